# Every target installs its requirements into the virtual environment .venv, or into one that is put in front of it. It
# installs again only after a change of pyproject.toml, the native sources, or the files in .ci that list packages.

SERVES := -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' >/dev/null 2>&1
PYTHON ?= $(or $(shell for candidate in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$candidate $(SERVES) && echo $$candidate && break; done),python3)
BIN := .venv/bin
# Runs test files in parallel, each file in one process, in the order of their names; the last files are short. There
# are no more processes than cores, and tests/whole_run.py divides the cores among them: a thread that waits for a core
# in the middle of an op delays other threads. A crashed process ends the run: with --dist loadfile, xdist would wait
# forever for the rest of its file.
IN_PARALLEL := --numprocesses $(shell nproc) --maxprocesses 6 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
SOURCES := pyproject.toml setup.py .ci/model.txt .ci/constraints.txt $(wildcard kernels/cpu/native/* kernels/cpu/native/*/*)

# Tests start hundreds of processes that import torch. This compiles each module once, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-quick test-all test-gpu test-integrations test-verl test-verl-all test-clients test-agents \
	test-newest test-floors test-wheel environments fuzz siege chaos soak drafts images sessions compare-vllm lint \
	docs wheel clean

demo: .venv/.demo
	@$(BIN)/trueroll demo

test: .venv/.dev
	@$(BIN)/pytest $(IN_PARALLEL)

# One test or a few for each promise.
test-quick: .venv/.dev
	@$(BIN)/pytest $(IN_PARALLEL) @.ci/quick.txt

# Includes the tests marked `exhaustive`, which `make test` leaves out.
test-all: .venv/.dev
	@$(BIN)/pytest $(IN_PARALLEL) -m ""

test-gpu: .venv/.dev
	@TRITON_INTERPRET=0 $(BIN)/pytest tests/gpu
	@TRITON_INTERPRET=0 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True $(BIN)/pytest tests/gpu/test_engine.py \
		tests/gpu/test_push.py

# Includes the test of verl marked `exhaustive`.
test-verl-all: .venv-verl/.done
	@TRUEROLL_VERL_PYTHON=$(CURDIR)/.venv-verl/bin/python $(BIN)/pytest tests/integrations/verl -m ""

test-integrations: test-verl test-clients test-agents

test-clients: .venv-integrations/.done
	@.venv-integrations/bin/python -P -m pytest tests/integrations/http tests/integrations/ui

test-agents: .venv-agents/.done
	@.venv-agents/bin/python -P -m pytest tests/integrations/sdks

test-verl: .venv-verl/.done
	@TRUEROLL_VERL_PYTHON=$(CURDIR)/.venv-verl/bin/python $(BIN)/pytest tests/integrations/verl

# Run the promises with the newest versions that pyproject.toml allows today, and with the oldest ones.
test-newest: .venv/.dev
	@$(BIN)/python .ci/newest.py build/newest.txt
	@$(MAKE) --no-print-directory .venv-newest/.done
	@.venv-newest/bin/python -P -m pytest @.ci/promises.txt

test-floors: .venv-floors/.done
	@.venv-floors/bin/python -P -m pytest @.ci/promises.txt

# Installs the wheel into an environment without a compiler, and compares its bits with those of .venv.
test-wheel: wheel
	@$(BIN)/pytest tests/integrations/wheel

fuzz: .venv/.dev
	@$(BIN)/python -P tests/fuzz/run.py --messages 1000000
	@$(BIN)/python -P tests/fuzz/run.py --messages 200000 --http
	@$(BIN)/python -P tests/fuzz/run.py --messages 100000 --images
	@$(BIN)/python -P tests/fuzz/grammars.py --values 50000

siege: .venv/.dev
	@$(BIN)/python -P tests/siege/run.py --seconds 600

chaos: .venv/.dev
	@$(BIN)/python -P tests/chaos/run.py --rounds 200
	@$(BIN)/python -P tests/chaos/ranks.py --rounds 100

soak: .venv/.dev
	@$(BIN)/python examples/benchmarks/soak.py

drafts: .venv/.dev
	@TRUEROLL_CAMPAIGN_TOKENS=1000000 $(BIN)/pytest -q -s --timeout 0 tests/engine/drafting/test_campaign.py

sessions: .venv/.dev
	@TRUEROLL_SESSION_HISTORIES=10000 $(BIN)/pytest -q -s --timeout 0 tests/rollout/sessions/test_fuzz.py

images: .venv/.dev
	@TRUEROLL_IMAGE_TOKENS=300000 $(BIN)/pytest -q -s --timeout 0 tests/engine/test_image_campaign.py

# Installs vLLM's CPU build into build/vllm. For an otherwise idle machine.
compare-vllm: .venv/.dev
	@$(BIN)/python -P examples/benchmarks/vllm_report.py

# The environments in front of .venv, except that of the newest versions.
environments: .venv-verl/.done .venv-integrations/.done .venv-agents/.done .venv-floors/.done .venv-wheel/.done

lint: .venv/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@rm -rf build/types && mkdir -p build/types/trueroll
	@cd build/types/trueroll && ln -s $(addprefix ../../../,rollout/trueroll/*.py rollout engine kernels weight_sync) .
	@$(BIN)/pyright

docs: .venv/.dev
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# The source archive and a wheel for Linux on x86_64, in dist.
wheel: .venv-wheel/.done
	@.venv-wheel/bin/python .ci/wheel.py

# Removes the old library first: if the new one does not compile, nothing may run on a library older than the sources.
define install
	@$(PYTHON) $(SERVES) || { echo "trueroll needs Python 3.11 to 3.14 with venv and pip; $(PYTHON) is" \
		"$$($(PYTHON) --version 2>&1 || true); name another one: make PYTHON=/path/to/python" >&2; exit 1; }
	@rm -f kernels/cpu/*.so
	@$(PYTHON) .ci/install.py $(@D) $(1)
	@touch $@
endef

.venv/.demo: $(SOURCES)
	$(call install,demo)

.venv/.dev: $(SOURCES)
	$(call install,dev)
	@touch .venv/.demo

# Packages that trueroll is tested with, in versions that conflict with .venv. All other packages come from .venv.
.venv-integrations/.done: .ci/integrations.txt .ci/chromium.py | .venv/.dev
	@$(BIN)/python .ci/install.py $(@D) $<
	@$(@D)/bin/python -P .ci/chromium.py
	@touch $@

.venv-agents/.done: .ci/agents.txt | .venv/.dev
	@$(BIN)/python .ci/install.py $(@D) $<
	@touch $@

.venv-verl/.done: .ci/verl.txt | .venv/.dev
	@$(BIN)/python .ci/install.py $(@D) $<
	@touch $@

.venv-newest/.done: build/newest.txt | .venv/.dev
	@$(BIN)/python .ci/install.py $(@D) $<
	@touch $@

.venv-floors/.done: .ci/floors.txt | .venv/.dev
	@$(BIN)/python .ci/install.py $(@D) $<
	@touch $@

.venv-wheel/.done: .ci/wheel.txt | .venv/.dev
	@$(BIN)/python .ci/install.py $(@D) $<
	@touch $@

clean:
	@rm -rf .venv .venv-integrations .venv-agents .venv-verl .venv-newest .venv-floors .venv-wheel build dist *.egg-info
	@rm -rf .pytest_cache .ruff_cache .hypothesis
	@rm -f kernels/cpu/*.so
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
