"""The exactness matrix reports no false differences, finds planted differences, and checks its own premises."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import types
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from engine.drafting.mtp_models import make_mtp_model
from matrix import thinned
from proofs import proves
from rich.console import Console
from torch import Tensor

from tiny import MIXTURES, make_tiny_model
from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.outputs.stop_strings import load_vocabulary
from trueroll.engine.request import GenerateRequest, Output, SampleOutput
from trueroll.engine.running import executor
from trueroll.engine.running.loading import LoadedModel, load_model
from trueroll.engine.running.ranks import Topology
from trueroll.kernels import reference
from trueroll.kernels.contract import NO_SLOT, SAMPLE, Backend, MlpWeights, TokenStatistics, Wanted, Weight
from trueroll.kernels.cpu.library import Library, load_library
from trueroll.kernels.layer import run_layers
from trueroll.rollout.tools import verify, verify_subjects
from trueroll.rollout.tools.verify_premises import UNLIMITED, Cell, Premise, Run, check_premises, check_variations

SMALL = verify.Sizes(prompt_lengths=(150, 64, 5), max_tokens=12, longest_token_by_token=5)
# The native kernels are fast enough for a prompt that attention splits into four parts.
LONGER = dataclasses.replace(SMALL, prompt_lengths=(400, 64, 5))
IN_FLOAT32 = {"cpu": ("qwen3", "gemma3"), "reference": ("gemma3",)}
"""The families that every run tests in float32: one without windows, and one with windows."""
# The reference backend is slow. Its attention splits at 128 tokens, and does not depend on the last block being full.
SHORTER = verify.Sizes(prompt_lengths=(130, 8), max_tokens=10, longest_token_by_token=8, varied_length=130)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread. More threads make tiny models no faster, and on a busy machine slower. Some cells set two
    threads.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def grammars() -> None:
    """Let the matrix of a test serve grammars."""


@pytest.fixture(autouse=True)
def few_grammars(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave grammars to the tests that use `grammars`: starting their child processes takes as long as many cells."""
    if "grammars" not in request.fixturenames:
        for module in (verify, verify_subjects):
            monkeypatch.setattr(module, "grammar_obstacle", lambda loaded: "left to other tests")


def failing_cells(config: EngineConfig, sizes: verify.Sizes) -> list[str]:
    loaded = load_model(config)
    results = list(verify.run_matrix(config, loaded, sizes))
    assert [result.cell for result in results] == [Cell(), *verify.cells_of(loaded)]
    assert all(result.tokens > 0 for result in results[1:])
    return [result.cell.name for result in results if not result.passed]


@proves("company")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@thinned(lambda any_model, dtype, backend: any_model in IN_FLOAT32[backend] if dtype == "float32" else backend == "cpu")
def test_no_bit_differs_in_any_cell(any_model: Path, dtype: str, backend: str) -> None:
    config = EngineConfig(model=str(any_model), dtype=dtype, backend=backend)
    assert failing_cells(config, LONGER if backend == "cpu" else SHORTER) == []


@pytest.mark.usefixtures("grammars")
def test_no_bit_differs_with_steps_queued_ahead(tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine queues a step before the tokens of the previous step are known, as on a GPU."""
    monkeypatch.setattr(executor, "runs_ahead", lambda device: True)
    config = EngineConfig(model=str(tiny_qwen3), dtype="bfloat16", backend="cpu")
    assert failing_cells(config, LONGER) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@thinned(lambda dtype, **_: dtype == "bfloat16")
def test_no_bit_differs_with_any_instruction_set(tiny_llama: Path, native_library: Library, dtype: str) -> None:
    config = EngineConfig(model=str(tiny_llama), dtype=dtype, backend="cpu")
    for name in native_library.instruction_sets():
        native_library.choose(name)
        assert Engine(config).info.isa == name
        assert failing_cells(config, SMALL) == [], name


def linear_in_halves(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """For more than 8 rows, change the order of accumulation of products, on every machine."""
    if len(x) <= 8:
        return F.linear(x, weight, bias)
    (left, right), (left_weight, right_weight) = x.chunk(2, 1), weight.chunk(2, 1)
    return F.linear(left, left_weight, bias) + F.linear(right, right_weight)


def project_back_in_halves(
    x: Tensor, weight: Weight, residual: Tensor, bias: Tensor | None = None, pieces: int = 1
) -> Tensor:
    return linear_in_halves(x, weight.to_dense(), bias) + residual


def reference_with(linear: Callable[..., Tensor]) -> Any:
    """Return a copy of the reference backend that uses `linear` for all products except the head."""
    spec = importlib.util.find_spec("trueroll.kernels.reference")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module).update(linear=linear, _SELF=module, layers=partial(run_layers, cast(Backend, module)))
    return module


def cpu_with_project_back_in_halves() -> Any:
    from trueroll.kernels.cpu import backend

    ops: Any = types.SimpleNamespace(**vars(backend) | {"project_back": project_back_in_halves})
    ops.layers = partial(run_layers, ops)
    return ops


def depends_on_the_row_count(product: Callable[[Tensor], Tensor], columns: int) -> bool:
    x = torch.randn(64, columns, generator=torch.Generator().manual_seed(0))
    return any(not torch.equal(product(x)[:1], product(x[:rows])[:1]) for rows in (1, 2, 7, 31))


def finds_differences(config: EngineConfig, loaded: LoadedModel, ops: Any, sizes: verify.Sizes = SMALL) -> bool:
    loaded.model.ops = ops
    broken = dataclasses.replace(loaded, backend=dataclasses.replace(loaded.backend, ops=ops))
    return any(result.differences > 0 for result in verify.run_matrix(config, broken, sizes))


def test_a_linear_that_depends_on_the_row_count_is_found(tiny_llama: Path) -> None:
    config = EngineConfig(model=str(tiny_llama), backend="reference")
    loaded = load_model(config)
    mlp = loaded.model.layers[0].mlp
    assert isinstance(mlp, MlpWeights) and isinstance(mlp.gate, Tensor)
    weight = mlp.gate
    assert depends_on_the_row_count(lambda x: linear_in_halves(x, weight), weight.shape[1])
    assert finds_differences(config, loaded, reference_with(linear_in_halves))


def test_a_native_op_that_depends_on_the_row_count_is_found(tiny_llama: Path) -> None:
    config = EngineConfig(model=str(tiny_llama), backend="cpu")
    loaded = load_model(config)
    mlp: Any = loaded.model.layers[0].mlp
    ops, weight = cpu_with_project_back_in_halves(), mlp.down

    def product(x: Tensor) -> Tensor:
        return ops.project_back(x, weight, torch.zeros(len(x), weight.shape[0]))

    assert depends_on_the_row_count(product, weight.shape[1])
    assert finds_differences(config, loaded, ops)


def next_bit(x: Tensor) -> Tensor:
    return x.nextafter(torch.zeros(()))


def plain_draws(ops: Any, hidden: Tensor, weight: Weight, wanted: Wanted, *head: Any) -> tuple[Tensor, ...]:
    """Change the log-probs of unfiltered rows in a batch with other rows. Greedy and filtered rows are unchanged."""
    token_ids, logprobs, finite = ops.next_tokens(hidden, weight, wanted, *head)
    is_broken = (wanted.targets == SAMPLE) & (len(hidden) > 4)
    return token_ids, torch.where(is_broken, next_bit(logprobs), logprobs), finite


def entropies(found: TokenStatistics, is_broken: bool) -> TokenStatistics:
    return found._replace(entropy=next_bit(found.entropy)) if is_broken else found


def recorded_draws(ops: Any, hidden: Tensor, *rest: Any) -> tuple[Tensor, TokenStatistics, Tensor]:
    token_ids, found, finite = ops.next_token_statistics(hidden, *rest)
    return token_ids, entropies(found, len(hidden) > 4), finite


def filtered_statistics(ops: Any, logits: Tensor, *rest: Any) -> TokenStatistics:
    return entropies(ops.token_statistics(logits, *rest), len(logits) > 4)


SAMPLING_OPS: dict[str, Callable[..., Any]] = {
    "next_tokens": plain_draws,
    "next_token_statistics": recorded_draws,
    "token_statistics": filtered_statistics,
}


@pytest.mark.parametrize("op", SAMPLING_OPS)
def test_sampling_that_depends_on_the_company_is_found(tiny_llama: Path, op: str) -> None:
    config = EngineConfig(model=str(tiny_llama), backend="cpu")
    loaded = load_model(config)
    broken: Any = types.SimpleNamespace(
        **vars(loaded.backend.ops) | {op: partial(SAMPLING_OPS[op], loaded.backend.ops)}
    )
    assert finds_differences(config, loaded, broken)


HYBRID = dataclasses.replace(SMALL, prompt_lengths=(100, 40, 5), varied_length=40)
# The reference backend is slow, so only one prompt is longer than the largest block, and the model has one layer of
# each mixer.
SHORT_HYBRID = verify.Sizes(prompt_lengths=(66, 5), max_tokens=10, longest_token_by_token=5, varied_length=66)


@pytest.fixture(scope="module")
def short_hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    layers = ["linear_attention", "full_attention"]
    return make_tiny_model("qwen3_5", tmp_path_factory.mktemp("m") / "m", num_hidden_layers=2, layer_types=layers)


@proves("company", family="qwen3_5")
@pytest.mark.usefixtures("grammars")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@thinned(lambda dtype, backend: backend == "cpu")
def test_no_bit_differs_in_any_cell_of_a_hybrid(
    tiny_qwen3_5: Path, short_hybrid: Path, dtype: str, backend: str
) -> None:
    model, sizes = (tiny_qwen3_5, HYBRID) if backend == "cpu" else (short_hybrid, SHORT_HYBRID)
    assert failing_cells(EngineConfig(model=str(model), dtype=dtype, backend=backend), sizes) == []


@pytest.fixture(scope="module")
def short_mixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny mixtures for the reference. The hybrid mixture has one layer of each kind."""
    folder = tmp_path_factory.mktemp("m")
    layers = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    of = {"qwen3_moe": {}, "qwen3_5_moe": layers, "gpt_oss": {}}
    return {family: make_tiny_model(family, folder / family, **overrides) for family, overrides in of.items()}


@proves("company", backend="cpu")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", MIXTURES)
@thinned(lambda family, dtype: family == "gpt_oss" or dtype == "bfloat16" and family != "qwen3_next_moe")
def test_no_bit_differs_in_any_cell_of_a_mixture(mixture_models: dict[str, Path], family: str, dtype: str) -> None:
    sizes = LONGER if family in ("qwen3_moe", "gpt_oss") else HYBRID
    assert failing_cells(EngineConfig(model=str(mixture_models[family]), dtype=dtype, backend="cpu"), sizes) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe", "gpt_oss"])
@pytest.mark.exhaustive
def test_no_bit_differs_in_any_cell_of_a_mixture_on_the_reference(
    short_mixtures: dict[str, Path], family: str, dtype: str
) -> None:
    sizes = SHORT_HYBRID if family == "qwen3_5_moe" else SHORTER
    assert failing_cells(EngineConfig(model=str(short_mixtures[family]), dtype=dtype, backend="reference"), sizes) == []


def recurrence_with(delta_rule: Callable[..., Tensor]) -> Any:
    """Return the reference backend with a changed recurrence."""
    ops: Any = types.SimpleNamespace(**vars(reference) | {"delta_rule": delta_rule})
    ops.layers = partial(run_layers, ops)
    return ops


def rounded_checkpoints(*args: Any) -> Tensor:
    """Round a state to bfloat16 when it is restored, or when it is copied for several sequences."""
    *_, states, batch = args
    moved = batch.reads[(batch.reads != batch.writes) & (batch.reads != NO_SLOT)]
    states[moved] = states[moved].bfloat16().float()
    return reference.delta_rule(*args)


def another_chunking(*args: Any) -> Tensor:
    """Change a bit in the states after chunks of many tokens, as another order of summation would."""
    *_, states, batch = args
    out = reference.delta_rule(*args)
    long = torch.tensor([end - start > 8 for start, end in pairwise(batch.query_starts)])
    states[batch.writes[long]] = next_bit(states[batch.writes[long]])
    return out


@pytest.mark.parametrize("delta_rule", [rounded_checkpoints, another_chunking])
def test_a_recurrence_that_depends_on_checkpoints_or_chunks_is_found(
    short_hybrid: Path, delta_rule: Callable[..., Tensor]
) -> None:
    config = EngineConfig(model=str(short_hybrid), backend="reference")
    assert finds_differences(config, load_model(config), recurrence_with(delta_rule), SHORT_HYBRID)


def make_engine(folder: Path, **settings: int | bool) -> Engine:
    return Engine(EngineConfig(model=str(folder), max_model_len=SMALL.num_positions, **settings))


def run_alone(folder: Path) -> Run:
    """Run the first subject (greedy, 150 tokens) in the conditions of the baseline."""
    engine = make_engine(folder)
    return verify.run_together(engine, verify.make_subjects(SMALL, engine.info.vocab_size)[:1])


def test_each_cell_has_a_unique_name() -> None:
    names = [cell.name for cell in (Cell(), *verify.CELLS, *verify.STATE_CELLS, *verify.ROUTE_CELLS, *verify.MTP_CELLS)]
    assert len(set(names)) == len(names)
    assert "cache warm, with 1 other, no checkpoints" in names


def test_no_engine_plans_for_more_tokens_than_a_step_can_have(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets: list[int] = []

    def note(config: EngineConfig, *others: Any, **more: Any) -> Engine:
        budgets.append(config.max_num_batched_tokens)
        return Engine(config, *others, **more)

    monkeypatch.setattr(verify, "Engine", note)
    monkeypatch.setattr(verify, "CELLS", (Cell(budget=UNLIMITED),))
    config = EngineConfig(model=str(tiny_llama))
    _, result = verify.run_matrix(config, load_model(config), SMALL)
    assert result.passed and max(budgets) == verify.MAX_NUM_SEQS * SMALL.num_positions < UNLIMITED


def failed_premises(cell: Cell, run: Run) -> list[str]:
    return [
        premise.name
        for premise in check_premises(cell, [run], num_threads=1, topology=Topology(1, 1))
        if not premise.holds
    ]


@pytest.mark.parametrize(
    ("claim", "failed"),
    [
        (Cell(), []),
        (Cell(cache="warm"), ["reused"]),
        (Cell(budget=64), ["chunks"]),
        (Cell(others=1), ["together"]),
        (Cell(others=10, is_starved=True), ["together", "preempted"]),
        (Cell(num_reread=9), ["reread"]),
        (Cell(threads=2), ["threads"]),
        (Cell(is_restricted=True), ["restricted"]),
        (Cell(cache="warm", others=1, threads=2), ["reused", "together", "threads"]),
    ],
)
def test_a_claim_without_evidence_in_the_run_fails(tiny_llama: Path, claim: Cell, failed: list[str]) -> None:
    assert failed_premises(claim, run_alone(tiny_llama)) == failed


def test_reuse_fails_the_claim_of_a_cold_cache_and_of_none(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    subjects = verify.make_subjects(SMALL, engine.info.vocab_size)[:1]
    verify.run_together(engine, subjects)
    warm = verify.run_together(engine, subjects)
    assert failed_premises(Cell(cache="warm"), warm) == []
    assert failed_premises(Cell(), warm) == ["reused"]
    assert failed_premises(Cell(cache="off"), warm) == ["reused"]


def test_a_cache_leaves_at_most_as_many_chunks_as_the_budget_implies(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    [longest, *_] = verify.make_subjects(SMALL, engine.info.vocab_size)
    verify.run_together(engine, [longest])
    warm = verify.run_together(engine, [longest])
    assert warm.longest > 64 and [prompt > 0 for prompt, _ in warm.steps].count(True) == 1
    assert failed_premises(Cell(cache="warm", budget=64), warm) == []
    assert failed_premises(Cell(cache="host", budget=64), warm) == ["restored"]
    cut = verify.run_together(make_engine(tiny_llama, max_num_batched_tokens=64), [longest])
    assert "chunks" in failed_premises(Cell(cache="host"), cut)


def test_joining_a_running_prompt_is_no_reuse_but_needs_a_cache(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    longest = [s for s in verify.make_subjects(SMALL, engine.info.vocab_size) if len(s.prompt_token_ids) == 150]
    assert len(longest) == 2
    run = verify.run_together(engine, longest)
    assert run.hits > 0
    assert failed_premises(Cell(others=1), run) == []
    assert failed_premises(Cell(others=1, cache="off"), run) == ["reused"]


def test_a_failed_or_missing_sample_fails_the_premises(tiny_llama: Path) -> None:
    run = run_alone(tiny_llama)
    broken = dataclasses.replace(run.samples[0], finish_reason="error")
    assert failed_premises(Cell(), dataclasses.replace(run, outputs=[broken])) == ["failed"]
    assert failed_premises(Cell(), dataclasses.replace(run, outputs=[])) == ["failed"]


def test_score_requests_in_separate_steps_are_not_together(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    requests = [verify.ScoreRequest(f"{i}", np.arange(3, 3 + 20 * (i + 1), dtype=np.int32)) for i in range(2)]
    claim = Cell(is_score=True, others=1)
    assert failed_premises(claim, verify.run_together(engine, requests)) == []
    assert failed_premises(claim, verify.run_together(engine, requests[:1])) == ["together"]


@pytest.mark.parametrize("steps", [1, 100])
def test_an_event_happens_once_while_samples_run(tiny_llama: Path, steps: int) -> None:
    """The first sample ends after three steps."""
    engine, running = make_engine(tiny_llama), list[int]()
    first, last = verify.make_subjects(SMALL, engine.info.vocab_size)[:2]

    def interrupt(engine: Engine) -> list[Output]:
        running.append(engine.stats().num_running)
        return verify.EVENTS["interruption"](engine)

    requests = [verify.with_params(first, max_tokens=3), last]
    run = verify.run_together(engine, requests, interrupt, steps)
    assert running == [2 if steps == 1 else 1] and run.growth("recomputed") == running[0]
    assert failed_premises(Cell(others=1, event="interruption"), run) == []


def test_every_changed_bit_and_another_end_are_differences(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    request = verify.with_params(verify.make_subjects(SMALL, engine.info.vocab_size)[0], top_logprobs=2)
    sample = verify.run_together(engine, [request]).samples[0]
    key, rows, end = (sample.request_id, sample.index), verify.rows_of(sample, sample.token_ids), ("length", None)
    assert rows.shape == (12, 1 + 1 + 1 + 2 + 2) and rows.dtype == np.int32

    def differences(rows: np.ndarray, start: int = 0, end: tuple[str, Any] | None = end) -> int:
        return verify.count_differences(verify.Piece(key, start, rows, end), sample)

    assert differences(rows) == differences(rows, end=None) == differences(rows[3:], start=3) == 0
    assert differences(rows[:-2]) == 2
    assert differences(rows, end=("stop", 7)) == 1
    for column in range(rows.shape[1]):
        last_bit = rows.copy()
        last_bit[[2, 7], column] ^= 1
        assert differences(last_bit) == 2, column


@cache
def baseline(folder: Path) -> tuple[list[Run], list[str]]:
    """Return the baseline's runs, and the names of the premises about sampling that hold in these runs. Only for tests
    with `grammars`.
    """
    config = EngineConfig(model=str(folder))
    lab = verify._Lab(config, load_model(config), SMALL)
    runs, _ = lab.run(Cell(), {})
    return runs, [premise.name for premise in lab.check_baseline(runs) if premise.holds and premise.seen]


def failed_variations(folder: Path, runs: list[Run]) -> list[Premise]:
    return [each for each in check_variations(runs, load_vocabulary(folder).decode) if not each.holds]


SHOWN = ["ended by a token", "held back by min_tokens", "edited", "other log-probs", "allowed", "ended by a string"]


@pytest.mark.usefixtures("grammars")
def test_each_variation_of_a_request_has_an_effect(tiny_model: Path) -> None:
    runs, shown = baseline(tiny_model)
    assert shown == [*SHOWN, "in the grammar"]
    plain = next(asked_of(run).params for run in runs if run.requests[0].id == "plain 64")
    assert (plain.n, plain.temperature, plain.has_filters, plain.top_logprobs) == (4, 1.0, False, None)


def asked_of(run: Run) -> GenerateRequest:
    request = run.requests[0]
    assert isinstance(request, GenerateRequest)
    return request


def vary(run: Run, sample: dict[str, Any], params: dict[str, Any]) -> Run:
    """Return a copy of the run with changed parameters or a changed first sample."""
    changed = dataclasses.replace(run.samples[0], **sample)
    request = verify.with_params(asked_of(run), **params)
    return dataclasses.replace(run, requests=[request], outputs=[changed, *run.outputs[1:]])


@pytest.mark.parametrize(
    ("name", "sample", "params", "missing"),
    [
        ("min_tokens 64", dict(stop_reason=None), {}, "ended by a token"),
        ("min_tokens 64", {}, dict(min_tokens=0), "held back by min_tokens"),
        ("edits 64", {}, dict(logit_bias=()), "edited"),
        ("raw 64", dict(stop_reason=None), {}, "ended by a string"),
        ("raw 64", dict(token_ids=[3] * 12), {}, "other log-probs"),
        ("allowed 64", dict(token_ids=[3] * 12), {}, "allowed"),
        ("grammar 64", dict(token_ids=[3] * 12), {}, "in the grammar"),
    ],
)
@pytest.mark.usefixtures("grammars")
def test_a_variation_without_effect_fails(
    tiny_llama: Path, name: str, sample: dict[str, Any], params: dict[str, Any], missing: str
) -> None:
    runs, _ = baseline(tiny_llama)
    assert name in [run.requests[0].id for run in runs]
    changed = [vary(run, sample, params) if run.requests[0].id == name else run for run in runs]
    assert missing in [premise.name for premise in failed_variations(tiny_llama, changed)]


@pytest.mark.usefixtures("grammars")
def test_the_baseline_fails_if_all_log_probs_are_of_one_kind(tiny_llama: Path) -> None:
    runs, _ = baseline(tiny_llama)
    by_id = {run.requests[0].id: run for run in runs}
    raw, processed = by_id["raw 64"], by_id["seeded 64"].samples[0].logprobs
    assert processed is not None
    by_id["raw 64"] = vary(raw, dict(logprobs=processed[: len(raw.samples[0].token_ids)]), {})
    [premise] = failed_variations(tiny_llama, [*by_id.values()])
    assert (premise.name, premise.seen) == ("other log-probs", 0)


def test_the_report_shows_what_failed(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "CELLS", (Cell(cache="warm"), Cell(others=1, is_starved=True)))
    monkeypatch.setattr(verify, "count_differences", lambda piece, expected: isinstance(expected, SampleOutput))
    console = Console(record=True, width=160)
    config = EngineConfig(model=str(tiny_llama))
    assert not verify.verify(config, console, tmp_path / "report.json", SMALL)
    text = console.export_text()
    assert "PREMISE FAILED: preempted 0" in text
    assert "FAILED: 3 cells" in text and "34 differences, 1 failed premises" in text
    report = json.loads((tmp_path / "report.json").read_text())
    assert [cell["differences"] for cell in report] == [0, 17, 17], "one difference for each sample"
    assert [cell["cell"]["cache"] for cell in report] == ["cold", "warm", "cold"]


def test_the_report_says_when_all_is_well(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "CELLS", (Cell(cache="warm"),))
    console = Console(record=True, width=160)
    assert verify.verify(EngineConfig(model=str(tiny_llama)), console, None, SMALL)
    text = console.export_text()
    # 15 samples of 12 tokens, and two samples that end earlier.
    found = re.search(r"passed: 2 cells, (\d+) tokens and log-probs compared, 0 differences, 0 failed premises", text)
    assert found is not None and 15 * 12 < int(found[1]) < 17 * 12
    assert "PREMISE FAILED" not in text and "faster" not in text
    assert f"float32, cpu, backend cpu ({load_library().instruction_set()})" in text


@pytest.mark.usefixtures("grammars")
def test_without_a_tokenizer_the_report_says_what_was_not_tested(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "CELLS", ())
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(tiny_llama / name)
    console = Console(record=True, width=400)
    assert verify.verify(EngineConfig(model=str(tmp_path)), console, None, SMALL)
    text = console.export_text()
    assert "ended by a token 1" in text and "ended by a string" not in text
    assert f"stop strings were not tested: stop: {tmp_path / 'tokenizer.json'} does not exist" in text
    assert "allowed 1" in text and "in the grammar 1" not in text
    assert "grammars were not tested: structured_outputs: the model has no tokenizer.json" in text


def test_the_report_says_why_a_slower_backend_was_used(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "CELLS", ())
    console = Console(record=True, width=160)
    assert verify.verify(EngineConfig(model=str(tiny_llama), dtype="float16"), console, None, SMALL)
    text = console.export_text()
    assert "backend reference (torch" in text
    assert "backend reference, not a faster one: native CPU kernels do not support float16" in text


def test_drafts_of_a_module_are_verified_if_the_checkpoint_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CELLS", "STATE_CELLS", "ROUTE_CELLS"):
        monkeypatch.setattr(verify, name, ())
    console = Console(record=True, width=160)
    model = make_mtp_model("qwen3_5_moe", tmp_path / "model")
    assert verify.verify(EngineConfig(model=str(model)), console, None, SMALL)
    assert f"passed: {len(verify.MTP_CELLS) + 1} cells" in console.export_text()
    assert all(cell.drafts == "mtp" for cell in verify.MTP_CELLS)


@pytest.mark.usefixtures("grammars")
def test_a_quick_run_says_what_it_leaves_out(tiny_llama: Path) -> None:
    config, console = EngineConfig(model=str(tiny_llama)), Console(record=True, width=160)
    assert verify.verify(config, console, sizes=SMALL, quick=True)
    text = console.export_text()
    assert f"quick: {len(verify.QUICK_CELLS) + 1} of {len(verify.CELLS) + 1} cells, prompts of up to 150 tokens" in text
    assert all(cell.name in text for cell in verify.QUICK_CELLS) and "token by token" in text
    assert f"passed: {len(verify.QUICK_CELLS) + 1} cells" in text
    covered = {(c.cache, bool(c.others), c.is_starved, c.is_score, c.drafts) for c in verify.QUICK_CELLS}
    assert len(covered) == len(verify.QUICK_CELLS), "each cell covers another kind"


@pytest.mark.usefixtures("grammars")
def test_the_legend_explains_every_premise(tiny_llama: Path) -> None:
    config = EngineConfig(model=str(tiny_llama))
    results = list(verify.run_matrix(config, load_model(config), verify.QUICK_SIZES, quick=True))
    named = {premise.name for result in results for premise in result.premises} - {"failed"}
    missing = [name for name in named if name.split()[0] not in verify.LEGEND]
    assert named >= {"reused", "chunks", "together", "preempted", "threads"} and missing == []


@pytest.mark.parametrize(
    ("stages", "formats"),
    [
        (1, {}),
        (2, dict(quantization="fp8", kv_cache_dtype="int8", dtype="bfloat16")),
        pytest.param(1, dict(quantization="awq", dtype="bfloat16"), marks=pytest.mark.exhaustive),
    ],
    ids=["plain", "8 bits in stages", "4 bits"],
)
@pytest.mark.usefixtures("forked_ranks")
def test_ranks_run_the_cells_and_the_events_of_ranks(
    stages: int, formats: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine of one cell starts another process, so a few cells stand for all. In awq, adapters of zeros change
    bits.
    """
    sizes: dict[str, Any] = dict(num_attention_heads=8, intermediate_size=512, num_hidden_layers=4)
    model = make_tiny_model("llama", tmp_path / "model", **sizes)
    topology = Topology(2 // stages, stages)
    ranks = dict(tensor_parallel_size=2 // stages, pipeline_parallel_size=stages)
    config = EngineConfig(model=str(model), **ranks, **formats)
    loaded = load_model(config)
    cells = verify.cells_of(loaded, topology)
    assert {cell.topology for cell in cells} == {topology}
    events = {*verify.EVENTS} - ({"adapters"} if formats.get("quantization") == "awq" else set())
    assert {cell.ranks for cell in cells} == {2} and events == {cell.event for cell in cells} - {""}
    monkeypatch.setattr(verify, "CELLS", ())
    few = Cell(others=3, event="push"), Cell(others=3, event="adapters")
    monkeypatch.setattr(verify, "RANK_CELLS", few[: len({"push", "adapters"} & events)])
    baseline, *results = verify.run_matrix(config, loaded, SMALL)
    assert baseline.cell.ranks == 1 and {result.cell.ranks for result in results} == {2}
    assert all(result.passed and result.tokens > 0 for result in results)
    seen = [premise.seen for result in results for premise in result.premises if premise.name == "ranks"]
    assert seen == [2] * len(verify.RANK_CELLS)
