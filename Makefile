# Every target puts what it needs into the virtual environment .venv, or into one that lies in front of it, and installs again
# only after pyproject.toml, the native sources or the files in .ci that name packages changed.

PYTHON ?= $(shell for candidate in python3 python3.12 python3.11; do \
	$$candidate -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null \
	&& echo $$candidate && break; done)
BIN := .venv/bin
# Files of tests side by side, each file in one process, in the order of their names, where the last ones are short. There
# are no more processes than cores, and tests/whole_run.py shares the cores out: threads that have to wait for a core in the
# middle of an op make others wait for them. A process that crashes ends the run: with --dist loadfile, xdist waits for ever
# for what was left of its file.
IN_PARALLEL := --numprocesses $(shell nproc) --maxprocesses 6 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
SOURCES := pyproject.toml setup.py .ci/model.txt .ci/constraints.txt $(wildcard kernels/cpu/native/* kernels/cpu/native/*/*)

# Tests start hundreds of processes that import torch: each module is compiled once, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all test-gpu test-integrations test-verl test-newest test-floors fuzz siege chaos lint docs clean

demo: .venv/.demo
	@$(BIN)/trueroll demo

test: .venv/.dev
	@$(BIN)/pytest $(IN_PARALLEL)

# With the tests marked `exhaustive`, which `make test` leaves out.
test-all: .venv/.dev
	@$(BIN)/pytest $(IN_PARALLEL) -m ""

test-gpu: .venv/.dev
	@TRITON_INTERPRET=0 $(BIN)/pytest tests/gpu
	@TRITON_INTERPRET=0 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True $(BIN)/pytest tests/gpu/test_engine.py \
		tests/gpu/test_push.py

test-integrations: test-verl .venv-integrations/.done
	@.venv-integrations/bin/python -P -m pytest tests/integrations/http tests/integrations/ui

test-verl: .venv-verl/.done
	@TRUEROLL_VERL_PYTHON=$(CURDIR)/.venv-verl/bin/python $(BIN)/pytest tests/integrations/verl

# The promises with the newest versions that pyproject.toml allows today, and with the oldest ones.
test-newest: .venv/.dev
	@$(BIN)/python .ci/newest.py build/newest.txt
	@$(MAKE) --no-print-directory .venv-newest/.done
	@.venv-newest/bin/python -P -m pytest @.ci/promises.txt

test-floors: .venv-floors/.done
	@.venv-floors/bin/python -P -m pytest @.ci/promises.txt

fuzz: .venv/.dev
	@$(BIN)/python -P tests/fuzz/run.py --messages 1000000
	@$(BIN)/python -P tests/fuzz/run.py --messages 200000 --http

siege: .venv/.dev
	@$(BIN)/python -P tests/siege/run.py --seconds 600

chaos: .venv/.dev
	@$(BIN)/python -P tests/chaos/run.py --rounds 200

lint: .venv/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@rm -rf build/types && mkdir -p build/types/trueroll
	@cd build/types/trueroll && ln -s $(addprefix ../../../,rollout/trueroll/*.py rollout engine kernels weight_sync) .
	@$(BIN)/pyright

docs: .venv/.dev
	@$(BIN)/python -P docs/api.py build/api

# The old library is removed first: should the new one not compile, nothing must run on what the sources no longer say.
define install
	@test -n "$(PYTHON)" || { echo "expected Python 3.11 or 3.12 with venv and pip, found neither;" \
		"install one, or name it: make PYTHON=/path/to/python"; exit 1; }
	@rm -f kernels/cpu/*.so
	@$(PYTHON) .ci/install.py $(@D) $(1)
	@touch $@
endef

.venv/.demo: $(SOURCES)
	$(call install,demo)

.venv/.dev: $(SOURCES)
	$(call install,dev)
	@touch .venv/.demo

# Packages that trueroll is tested with and whose versions do not go with those of .venv, which has the rest.
.venv-integrations/.done: .ci/integrations.txt .ci/chromium.py | .venv/.dev
	@$(BIN)/python .ci/install.py $(@D) $<
	@$(@D)/bin/python -P .ci/chromium.py
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

clean:
	@rm -rf .venv .venv-integrations .venv-verl .venv-newest .venv-floors build *.egg-info .pytest_cache .ruff_cache .hypothesis
	@rm -f kernels/cpu/*.so
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
