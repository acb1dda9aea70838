"""The exactness matrix: the same requests under many circumstances, every bit compared with one baseline.

A cell is one set of circumstances: what the cache held, how many others ran along, how prompts were cut, block size,
preemption, threads. The baseline serves each request alone with a cold cache. A cell counts only if it proves its
premises: that tokens were reused, that the others ran in the same steps, that a preemption happened. Each cell gets an
engine of its own; all of them share one loaded model.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ...engine.config import EngineConfig
from ...engine.engine import Engine
from ...engine.request import (
    Distribution,
    GenerateRequest,
    Request,
    SampleOutput,
    SamplingParams,
    ScoreOutput,
    ScoreRequest,
)
from ...engine.running.loading import LoadedModel, load_model
from .verify_premises import UNLIMITED, Cell, Premise, Run, check_premises

MAX_NUM_SEQS = 64

SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, seed=0, ignore_eos=True),
    "seeded": SamplingParams(n=2, temperature=0.9, top_p=0.95, seed=2**63 + 11, ignore_eos=True),
}

R = TypeVar("R", bound=Request)
Key: TypeAlias = tuple[str, int]
Baseline: TypeAlias = dict[Key, SampleOutput]


@dataclass(frozen=True)
class Sizes:
    """How much is run: a greedy and a seeded request for each prompt length, with `max_tokens` new tokens each.

    Prompts beyond `longest_token_by_token` are left out of the cell that feeds one token in each step.
    """

    prompt_lengths: tuple[int, ...] = (530, 121, 64, 5)
    max_tokens: int = 12
    longest_token_by_token: int = 64

    @property
    def num_positions(self) -> int:
        """The longest prompt with its new tokens."""
        return max(self.prompt_lengths) + self.max_tokens


SIZES = Sizes()

CELLS = (
    Cell(cache="warm"),
    Cell(cache="off"),
    Cell(others=1),
    Cell(others=7),
    Cell(others=31),
    Cell(others=1, budget=16),
    Cell(budget=64),
    Cell(budget=UNLIMITED),
    Cell(budget=1),
    Cell(others=7, block_size=8),
    Cell(others=7, block_size=64),
    Cell(others=7, is_starved=True),
    Cell(num_reread=9, block_size=8),
    Cell(others=7, threads=1),
    Cell(others=7, threads=2),
    Cell(cache="warm", others=31, budget=64, block_size=8, is_starved=True),
    Cell(cache="off", others=1, budget=16, block_size=64, threads=1),
    Cell(cache="warm", others=7, budget=UNLIMITED, block_size=64, threads=2),
    Cell(cache="off", others=31, budget=64, is_starved=True, threads=1),
    Cell(is_score=True, budget=64),
    Cell(is_score=True, others=31, block_size=8),
)


@dataclass(frozen=True)
class Piece:
    """What a cell found for the tokens of sample `key` from its token `start` on."""

    key: Key
    start: int
    token_ids: list[int]
    logprobs: np.ndarray


@dataclass(frozen=True)
class CellResult:
    """`tokens` of `samples` were compared; `differences` counts those whose id or log-prob has another bit."""

    cell: Cell
    samples: int
    tokens: int
    differences: int
    premises: list[Premise]

    @property
    def failed_premises(self) -> list[Premise]:
        return [premise for premise in self.premises if not premise.holds]

    @property
    def passed(self) -> bool:
        return self.differences == 0 and not self.failed_premises


def run_matrix(config: EngineConfig, loaded: LoadedModel, sizes: Sizes) -> Iterator[CellResult]:
    """The baseline's result, then one for each of CELLS.

    `loaded` is the model of `config`, from which dtype, device and backend are taken as well. Raise ConfigError if the
    model cannot take `sizes.num_positions` tokens.
    """
    lab = _Lab(config, loaded, sizes)
    runs, premises = lab.run(Cell(), {})
    baseline = {(sample.request_id, sample.index): sample for run in runs for sample in run.samples}
    yield CellResult(Cell(), len(baseline), 0, 0, premises)
    for cell in CELLS:
        runs, premises = lab.run(cell, baseline)
        pieces = [piece for run in runs for piece in pieces_of(run, baseline, cell.num_reread)]
        yield compare(cell, pieces, baseline, premises)


class _Lab:
    """One loaded model and the requests of the matrix; gives every cell an engine of its own."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel, sizes: Sizes) -> None:
        self.config, self.loaded, self.sizes = config, loaded, sizes
        self.vocab_size = loaded.model.spec.vocab_size
        self.subjects = make_subjects(sizes, self.vocab_size)

    def run(self, cell: Cell, baseline: Baseline) -> tuple[list[Run], list[Premise]]:
        """Everything the cell runs, and its premises."""
        with _thread_count(cell.threads):
            engine = Engine(self._engine_config(cell), self.loaded)
            runs = list(self._runs(engine, cell, baseline))
            return runs, check_premises(cell, runs, torch.get_num_threads())

    def _engine_config(self, cell: Cell) -> EngineConfig:
        # Room for all prompts and one more block for each request: they start together and outgrow it.
        num_blocks = sum(-(-length // cell.block_size) for length in self.sizes.prompt_lengths)
        num_blocks += len(self.subjects)
        return EngineConfig(
            model=self.config.model,
            dtype=self.config.dtype,
            device=self.config.device,
            backend=self.config.backend,
            block_size=cell.block_size,
            num_blocks=num_blocks if cell.is_starved else None,
            max_model_len=self.sizes.num_positions,
            max_num_seqs=min(MAX_NUM_SEQS, cell.budget),
            max_num_batched_tokens=cell.budget,
            enable_prefix_caching=cell.cache != "off",
        )

    def _runs(self, engine: Engine, cell: Cell, baseline: Baseline) -> Iterator[Run]:
        if cell.is_score:
            yield from (run_together(engine, batch) for batch in _batches(self._scores(baseline), cell.others))
        elif cell.num_reread:
            yield from (self._second_turn(engine, subject, cell.num_reread) for subject in self.subjects)
        else:
            yield from (self._run_batch(engine, cell, batch) for batch in self._company(cell))

    def _company(self, cell: Cell) -> Iterator[list[GenerateRequest]]:
        """The subjects in batches of as many as the cell wants together, between fillers where they are too few."""
        subjects = self.subjects
        if cell.budget == 1:
            subjects = [s for s in subjects if len(s.prompt_token_ids) <= self.sizes.longest_token_by_token]
        for batch in _batches(subjects, cell.others):
            fillers = make_fillers(cell.others + 1 - len(batch), self.sizes, self.vocab_size)
            yield fillers[::2] + batch + fillers[1::2]

    def _run_batch(self, engine: Engine, cell: Cell, batch: list[GenerateRequest]) -> Run:
        engine.invalidate_prefix_cache()
        if cell.cache == "warm":
            run_together(engine, [_with_params(request, n=1, max_tokens=1) for request in reversed(batch)])
        return run_together(engine, batch)

    def _second_turn(self, engine: Engine, subject: GenerateRequest, num_reread: int) -> Run:
        engine.invalidate_prefix_cache()
        spoken = next(sample for sample in run_together(engine, [subject]).samples if sample.index == 0)
        prompt = np.concatenate([subject.prompt_token_ids, spoken.token_ids[:num_reread]])
        second = _with_params(subject, n=1, max_tokens=self.sizes.max_tokens - num_reread)
        return run_together(engine, [dataclasses.replace(second, prompt_token_ids=prompt)])

    def _scores(self, baseline: Baseline) -> list[ScoreRequest]:
        subjects = {subject.id: subject for subject in self.subjects}
        return [_score_request(subjects[request_id], sample) for (request_id, _), sample in baseline.items()]


def make_subjects(sizes: Sizes, vocab_size: int) -> list[GenerateRequest]:
    """For each prompt, which is random but always the same, one request of each sampling."""
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, vocab_size, length, np.int32) for length in sizes.prompt_lengths]
    return [
        _with_params(GenerateRequest(f"{name} {len(prompt)}", prompt, params), max_tokens=sizes.max_tokens)
        for name, params in SAMPLINGS.items()
        for prompt in prompts
    ]


def make_fillers(count: int, sizes: Sizes, vocab_size: int) -> list[GenerateRequest]:
    """Requests that only keep the others company, with prompts of 3 to 40 tokens."""
    generator = np.random.default_rng(1)
    params = SamplingParams(seed=1, ignore_eos=True, max_tokens=sizes.max_tokens)
    prompts = [generator.integers(0, vocab_size, 3 + 7 * i % 38, np.int32) for i in range(count)]
    return [GenerateRequest(f"filler {i}", prompt, params) for i, prompt in enumerate(prompts)]


def _with_params(request: GenerateRequest, **update: int) -> GenerateRequest:
    return dataclasses.replace(request, params=request.params.model_copy(update=update))


def _score_request(subject: GenerateRequest, sample: SampleOutput) -> ScoreRequest:
    params = subject.params
    distribution = Distribution(**{name: getattr(params, name) for name in Distribution.model_fields})
    token_ids = np.array([*subject.prompt_token_ids, *sample.token_ids], np.int32)
    return ScoreRequest(f"{subject.id}/{sample.index}", token_ids, distribution)


def _batches(requests: Sequence[R], others: int) -> Iterator[list[R]]:
    for start in range(0, len(requests), others + 1):
        yield list(requests[start : start + others + 1])


def run_together(engine: Engine, requests: Sequence[Request]) -> Run:
    """Serves all requests at once, to the end."""
    outputs, history = [], [engine.stats()]
    for request in requests:
        engine.add(request)
    while engine.has_unfinished:
        outputs += engine.step()
        history.append(engine.stats())
    engine.check_integrity()
    return Run(requests, outputs, history)


@contextmanager
def _thread_count(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def pieces_of(run: Run, baseline: Baseline, start: int) -> Iterator[Piece]:
    """What a run found for samples of the baseline; its samples begin with their token `start`."""
    for output in run.outputs:
        if isinstance(output, ScoreOutput):
            request_id, index = output.request_id.rsplit("/", 1)
            expected = baseline[request_id, int(index)]
            logprobs = output.logprobs[-len(expected.token_ids) :]
            yield Piece((request_id, int(index)), 0, expected.token_ids, logprobs)
        elif (output.request_id, output.index) in baseline:
            assert output.logprobs is not None
            yield Piece((output.request_id, output.index), start, output.token_ids, output.logprobs)


def compare(cell: Cell, pieces: Sequence[Piece], baseline: Baseline, premises: list[Premise]) -> CellResult:
    """Counts what differs from the baseline, bit by bit."""
    return CellResult(
        cell,
        samples=len(pieces),
        tokens=sum(len(piece.token_ids) for piece in pieces),
        differences=sum(count_differences(piece, baseline[piece.key]) for piece in pieces),
        premises=premises,
    )


def count_differences(piece: Piece, expected: SampleOutput) -> int:
    """Tokens of the piece whose id or log-prob differs in any bit, a missing token counting as one that differs."""
    tokens = expected.token_ids[piece.start :]
    assert expected.logprobs is not None
    logprobs = expected.logprobs[piece.start :]
    both = min(len(tokens), len(piece.token_ids))
    differs = np.not_equal(piece.token_ids[:both], tokens[:both])
    differs |= piece.logprobs[:both].view(np.int32) != logprobs[:both].view(np.int32)
    return int(differs.sum()) + abs(len(tokens) - len(piece.token_ids))


def verify(config: EngineConfig, console: Console, json_file: Path | None = None, sizes: Sizes = SIZES) -> bool:
    """Runs the matrix on the model of `config`, prints its table, writes it to `json_file`; whether everything passed.

    Raise ConfigError or ModelError if the model cannot be loaded or is too short for the matrix.
    """
    loaded = load_model(config)
    matrix = run_matrix(config, loaded, sizes)
    results = list(track(matrix, "verifying", total=len(CELLS) + 1, console=console, transient=True))
    backend = f"backend {loaded.backend.name} ({loaded.backend.ops.instruction_set()})"
    console.print(make_table(results, f"{config.model}, {loaded.dtype_name}, {loaded.model.device}, {backend}"))
    if loaded.backend.note:
        console.print(f"backend {loaded.backend.name}, not a faster one: {loaded.backend.note}", markup=False)
    console.print(summarize(results))
    if json_file is not None:
        json_file.write_text(json.dumps([dataclasses.asdict(result) for result in results], indent=2))
    return all(result.passed for result in results)


def make_table(results: Sequence[CellResult], title: str) -> Table:
    """One row for each cell. Premises that failed stand in words of their own."""
    table = Table("circumstances", "samples", "tokens", "differences", "premises", title=title)
    for result in results:
        premises = ", ".join(f"{p.name} {p.seen}" for p in result.premises if p.seen and p.holds)
        failed = "".join(f"\n[red]PREMISE FAILED: {p.name} {p.seen}[/]" for p in result.failed_premises)
        differences = f"[red]{result.differences}[/]" if result.differences else "0"
        table.add_row(result.cell.name, str(result.samples), str(result.tokens), differences, premises + failed)
    return table


def summarize(results: Sequence[CellResult]) -> str:
    """The verdict in one line."""
    tokens, differences = (sum(getattr(result, name) for result in results) for name in ("tokens", "differences"))
    failed = sum(len(result.failed_premises) for result in results)
    verdict = "passed" if all(result.passed for result in results) else "FAILED"
    return (
        f"{verdict}: {len(results)} cells, {tokens} tokens and log-probs compared, {differences} differences, "
        f"{failed} failed premises"
    )
