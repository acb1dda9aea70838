"""The exactness matrix: the same requests run under many circumstances, and every bit is compared with a baseline.

A cell is one set of circumstances: the content of the cache, the number of other requests, the chunking of prompts, the
block size, preemption, drafts, and the number of threads. The baseline serves each request alone with a cold cache. A
cell passes only if its premises are proven. A premise states that a circumstance really occurred: for example, that
tokens were reused, that the other requests ran in the same steps, or that a preemption happened. The baseline must also
prove that each variation of the sampling parameters had an effect. Each cell has a separate engine; all engines share
one loaded model.
"""

from __future__ import annotations

import dataclasses
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from trueroll.errors import InvalidRequestError, printable

from ...engine.config import EngineConfig
from ...engine.engine import Engine
from ...engine.models.names import resolve_model
from ...engine.outputs.stop_strings import load_vocabulary
from ...engine.parallel.place import config_of_rank
from ...engine.request import (
    GenerateRequest,
    Output,
    Request,
    SampleOutput,
    SamplingParams,
    ScoreOutput,
    ScoreRequest,
    columns_of,
)
from ...engine.running.loading import (
    LoadedModel,
    available_memory,
    engine_info,
    load_model,
    outline,
    specs_of_ranks,
    tower_obstacle,
)
from ...engine.running.ranks import Topology
from ...kernels.cache_formats import AUTO
from ...kernels.precision import NONE, keeps_values
from .progress import tracked
from .verify_drafts import MOST_DRAFTED, new_drafter
from .verify_images import AGAIN, IMAGE_LEGEND, MAX_IMAGES, ImageCell, ImageSubjects, check_image_premises, image_cells
from .verify_images import MAX_NUM_SEQS as MAX_NUM_SEQS_WITH_IMAGES
from .verify_premises import UNLIMITED, Cell, Premise, Run, check_premises, check_variations
from .verify_subjects import (
    Sizes,
    grammar_obstacle,
    is_restricted,
    make_fillers,
    make_score,
    make_subjects,
    make_variations,
    may_end_early,
    stop_string_obstacle,
    with_params,
)

MAX_NUM_SEQS = 64
CHECKPOINTS = 64  # enough for the prompts of any cell, even with few blocks

R = TypeVar("R", bound=Request)
Key: TypeAlias = tuple[str, int]
Baseline: TypeAlias = dict[Key, SampleOutput]


SIZES = Sizes()

CELLS = (
    Cell(cache="warm"),
    Cell(cache="host", block_size=8),
    Cell(cache="off"),
    Cell(others=1),
    Cell(others=10),
    Cell(others=31),
    Cell(others=1, budget=16),
    Cell(budget=64),
    Cell(budget=UNLIMITED),
    Cell(budget=1),
    Cell(others=10, block_size=8),
    Cell(others=10, block_size=64),
    Cell(others=10, block_size=8, is_starved=True),
    Cell(num_reread=9, block_size=8, is_restricted=True),
    Cell(others=10, threads=1),
    Cell(others=10, threads=2),
    Cell(cache="warm", others=31, budget=64, block_size=8, is_starved=True, is_restricted=True),
    Cell(cache="off", others=1, budget=16, block_size=64, threads=1),
    Cell(cache="warm", others=10, budget=UNLIMITED, block_size=64, threads=2),
    Cell(cache="off", others=31, budget=64, is_starved=True, threads=1),
    Cell(is_score=True, budget=64),
    Cell(is_score=True, others=31, block_size=8, is_restricted=True),
    Cell(drafts="repeats"),
    Cell(drafts="adversarial", budget=64, is_restricted=True),
    Cell(drafts="adversarial", cache="warm", others=10, block_size=8),
    Cell(drafts="adversarial", others=10, is_starved=True, is_restricted=True),
    Cell(drafts="adversarial", others=10, event="interruption"),
)
# The cells of `--quick`, one for each kind of circumstances that can be combined.
QUICK_CELLS = (
    Cell(cache="warm"),
    Cell(cache="host", block_size=8),
    Cell(others=10, budget=64),
    Cell(others=10, block_size=8, is_starved=True),
    Cell(cache="off", others=1, budget=16, block_size=64, threads=1),
    Cell(is_score=True, budget=64, is_restricted=True),
    Cell(drafts="adversarial", budget=64, is_restricted=True),
)
QUICK_SIZES = Sizes(prompt_lengths=(150, 64, 5))
LEFT_OUT = (
    "quick: {run} of {all} cells, prompts of up to {longest} tokens instead of {usual}. Left out: token by token, "
    "unlimited budget, multi-turn, 31 others, other block sizes and numbers of threads one by one, and most "
    "combinations. Run verify without --quick for all of them."
)
LEGEND = """\
Each row is a cell: the same requests, served under the circumstances it names.
  samples, tokens  how many are compared with the baseline, the first row
  differences      tokens of which any bit differs, in the id, the log-prob or
                   another requested number; a sample with another end adds 1
  premises         evidence that the circumstances occurred; if one FAILED, the
                   cell proves nothing
    reused, reread   prompt tokens, or tokens of earlier answers, from the cache
    chunks           steps in which the longest prompt was computed
    together         samples that shared a step
    preempted        samples that lost their memory and were recomputed
    restored         blocks and states that came back from host memory
    accepted, rejected  drafted tokens
    restricted       requests with allowed tokens or a grammar
    threads          CPU threads that computed
    ended by, held   requests of the baseline on which a stop token, a stop
    back, edited,    string, min_tokens, penalties, biases and bans, other
    other ...,       log-probs, allowed tokens, or a grammar had an effect; each
    allowed, in ...  token was allowed, and each text began as in the grammar
Circumstances: others are requests that run at the same time; budget is the
limit of tokens per step, block the number of tokens in a block of the cache;
score computes the log-probs of given tokens; drafts come from repeated text
(repeats), from the model's module (mtp), or from a drafter that is right, wrong
and too long (adversarial); in flight names an event while requests run, after
which all of them are computed again: an interruption, a push of equal weights,
a push of adapters that change nothing, or a sleep; restricted cells also serve
the requests with allowed tokens and with a grammar, as the baseline does; ranks
are processes that each compute a part of every layer of one stage; without
stages, of all layers."""

# Additional cells for models with recurrent layers.
STATE_CELLS = (
    Cell(cache="warm", interval=16, states="hit"),
    Cell(cache="warm", others=10, interval=16, budget=64, states="hit"),
    Cell(num_reread=9, block_size=8, interval=64, states="hit shortened"),
    Cell(cache="warm", interval=16, checkpoints=1, states="skipped"),
    Cell(cache="warm", others=10, interval=16, checkpoints=3, states="evicted"),
    Cell(cache="warm", others=1, checkpoints=0),
    Cell(cache="warm", interval=16, states="lost in a sleep"),
    Cell(others=10, interval=16, budget=64, event="interruption"),
)
ONE_RANK = Topology(1, 1)
# Additional cells for several ranks.
RANK_CELLS = (
    Cell(others=10, event="push"),
    Cell(cache="warm", others=10, event="adapters"),
    Cell(others=10, budget=64, event="sleep"),
)
# Additional cells for models with a module for multi-token prediction (MTP).
MTP_CELLS = (
    Cell(drafts="mtp", budget=64),
    Cell(drafts="mtp", cache="warm", others=10, block_size=8),
    Cell(drafts="mtp", others=10, is_starved=True),
    Cell(drafts="mtp", others=10, event="interruption"),
)
# Additional cells for models with experts.
ROUTE_CELLS = (
    Cell(cache="warm", block_size=8, routes="unknown"),
    Cell(cache="warm", others=10, budget=64, block_size=8, routes="added"),
)


@dataclass(frozen=True)
class Piece:
    """The results of a cell for one sample, beginning with token `start` of the sample.

    - `key`: request id and index of the sample
    - `rows`: the array that `rows_of` returns
    - `end`: finish reason and stop reason of a sample; None for a score
    - `routes`: `routed_experts` of prompt and sample, for a model with experts
    """

    key: Key
    start: int
    rows: np.ndarray
    end: tuple[str, int | str | None] | None
    routes: np.ndarray | None = None


@dataclass(frozen=True)
class CellResult:
    """The result of a cell: the number of compared samples, the number of compared tokens, and the total of
    `count_differences`.
    """

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


def run_matrix(config: EngineConfig, loaded: LoadedModel, sizes: Sizes, quick: bool = False) -> Iterator[CellResult]:
    """Yield the result of the baseline, and then the result of each cell in `cells_of`. Cells with images have their
    own baseline. The engine of a baseline has one rank.

    `loaded`: the model of `config`. The dtype, device, backend and ranks are also taken from `config`. Raise
    ConfigError if the model does not support `sizes.num_positions` tokens.
    """
    cells = cells_of(loaded, Topology.of(config), quick)
    of_images = [cell for cell in cells if isinstance(cell, ImageCell)]
    of_text = [cell for cell in cells if not isinstance(cell, ImageCell)]
    yield from _run_cells(_Lab(config, loaded, sizes), Cell(), of_text)
    if of_images:
        yield from _run_cells(_ImageLab(config, loaded, sizes.max_tokens), ImageCell(), of_images)


def _run_cells(lab: _Lab, first: Cell, cells: Sequence[Cell]) -> Iterator[CellResult]:
    """Yield the result of the baseline, which is the cell `first`, and the results of the other cells."""
    runs, premises = lab.run(first, {})
    baseline = {(sample.request_id, sample.index): sample for run in runs for sample in run.samples}
    yield CellResult(first, len(baseline), 0, 0, premises + lab.check_baseline(runs))
    for cell in cells:
        runs, premises = lab.run(cell, baseline)
        pieces = [piece for run in runs for piece in pieces_of(run, baseline, cell.num_reread)]
        yield compare(cell, pieces, baseline, premises)


def cells_of(loaded: LoadedModel, topology: Topology = ONE_RANK, quick: bool = False) -> Sequence[Cell]:
    """Return CELLS, plus STATE_CELLS if the model has recurrent layers, plus ROUTE_CELLS if the model has experts, plus
    MTP_CELLS if the model has an MTP module, plus `image_cells` if the model serves a vision tower.

    `topology`: the ranks of all cells. With more than one rank, cells that set `threads` are left out, and all
    RANK_CELLS are added. Cells with adapters that change nothing are also left out if quantizing the weights again
    would change the values of the weights. `quick`: return QUICK_CELLS instead of CELLS, and only the first cell of
    each additional list.
    """
    if topology.size > 1:
        cells = [cell for cell in (*cells_of(loaded, ONE_RANK, quick), *RANK_CELLS) if cell.threads is None]
        if not keeps_values(loaded.model.spec.quantization):
            cells = [cell for cell in cells if cell.event != "adapters"]
        return tuple(replace(cell, ranks=topology.size, stages=topology.stages) for cell in cells)
    spec = loaded.model.spec
    more = (
        STATE_CELLS if spec.recurrent else (),
        ROUTE_CELLS if spec.experts else (),
        MTP_CELLS if spec.serves_mtp else (),
        () if spec.served_tower is None else tuple(image_cells(spec.served_tower)),
    )
    if quick:
        return sum((cells[:1] for cells in more), QUICK_CELLS)
    return sum(more, CELLS)


class _Lab:
    """A loaded model and the requests of the matrix. Creates an engine for each cell.

    `steps_before_event`: as in `run_together`.
    """

    steps_before_event = 8

    def __init__(self, config: EngineConfig, loaded: LoadedModel, sizes: Sizes) -> None:
        self.config, self.loaded, self.sizes = config, loaded, sizes
        self.vocab_size = loaded.model.spec.vocab_size
        self.has_experts = bool(loaded.model.spec.experts)
        self.subjects = list[GenerateRequest]()
        self.subjects = self._make_subjects()

    def _make_subjects(self) -> list[GenerateRequest]:
        subjects = make_subjects(self.sizes, self.vocab_size, self.has_experts)
        return [*subjects, *make_variations(subjects, self._serve, self.loaded)]

    def run(self, cell: Cell, baseline: Baseline) -> tuple[list[Run], list[Premise]]:
        """Run a cell. Return all runs of the cell and the checked premises."""
        with _thread_count(cell.threads):
            drafter = new_drafter(cell.drafts, self._texts(baseline), self.vocab_size)
            engine = Engine(
                self._engine_config(cell), None if cell.ranks > 1 else self.loaded, drafter, draft_always=True
            )
            try:
                runs = list(self._runs(engine, cell, baseline))
            finally:
                engine.close()
            topology = Topology(engine.info.tensor_parallel_size, engine.info.pipeline_parallel_size)
            return runs, self.premises(cell, runs, topology)

    def premises(self, cell: Cell, runs: Sequence[Run], topology: Topology) -> list[Premise]:
        """Return the checked premises of a cell. `topology`: the ranks of the cell's engine."""
        return check_premises(cell, runs, torch.get_num_threads(), topology, bool(self.loaded.model.spec.recurrent))

    def check_baseline(self, runs: Sequence[Run]) -> list[Premise]:
        """Return the premises about the requests of the baseline."""
        return check_variations(runs, lambda token_ids: load_vocabulary(self.loaded.folder).decode(token_ids))

    def _engine_config(self, cell: Cell) -> EngineConfig:
        # A starved cell gets the blocks of all prompts, and one more block for each request but one. So all requests
        # can start together, but then they outgrow the blocks.
        window = self.loaded.model.spec.windows[0] or self.sizes.num_positions
        num_blocks = sum(-(-min(length, window) // cell.block_size) for length in self.sizes.prompt_lengths)
        num_blocks += len(self._subjects_of(cell)) - 1
        if cell.cache == "host":
            groups = [subject.params.n for subject in self.subjects]
            num_blocks = max(groups) * -(-self.sizes.num_positions // cell.block_size)
        # A step has at most MAX_NUM_SEQS * num_positions tokens. With a larger budget, a GPU would compile and plan for
        # steps that never occur.
        budget = min(cell.budget, MAX_NUM_SEQS * self.sizes.num_positions)
        config = EngineConfig(
            model=self.config.model,
            dtype=self.config.dtype,
            quantization=self.config.quantization,
            kv_cache_dtype=self.config.kv_cache_dtype,
            device=self.config.device,
            backend=self.config.backend,
            block_size=cell.block_size,
            num_blocks=num_blocks if cell.is_starved or cell.cache == "host" else None,
            max_model_len=self.sizes.num_positions,
            max_num_seqs=min(MAX_NUM_SEQS, budget),
            max_num_batched_tokens=budget,
            enable_prefix_caching=cell.cache != "off",
            state_interval=cell.interval,
            state_budget=CHECKPOINTS if cell.checkpoints is None else cell.checkpoints,
            decode_state_interval=cell.block_size if cell.num_reread and not cell.states else 0,
            speculative={"": "off", "mtp": "mtp"}.get(cell.drafts, "ngram"),
            num_speculative_tokens=MOST_DRAFTED,
            tensor_parallel_size=cell.topology.tensor,
            pipeline_parallel_size=cell.stages,
        )
        return self._with_host_tier(config) if cell.cache == "host" else config

    def _with_host_tier(self, config: EngineConfig) -> EngineConfig:
        """Return a configuration with a host tier that has room for all requests of a cell."""
        info = engine_info(config, self.loaded, available_memory(self.loaded.model.device))
        num_bytes = info.kv_bytes + info.state_bytes + info.num_blocks * info.block_size * info.route_bytes
        return config.model_copy(update=dict(host_cache_bytes=4 * num_bytes))

    def _serve(self, request: GenerateRequest) -> SampleOutput:
        """Serve a request under the circumstances of the baseline, and return sample 0."""
        engine = Engine(self._engine_config(Cell()), self.loaded)
        return next(sample for sample in run_together(engine, [request]).samples if sample.index == 0)

    def _runs(self, engine: Engine, cell: Cell, baseline: Baseline) -> Iterator[Run]:
        if cell.is_score:
            yield from (run_together(engine, batch) for batch in _batches(self._scores(cell, baseline), cell.others))
        elif cell.num_reread:
            whole = [subject for subject in self._subjects_of(cell) if not may_end_early(subject)]
            yield from (self._second_turn(engine, subject, cell.num_reread) for subject in whole)
        else:
            yield from (self._run_batch(engine, cell, batch) for batch in self._company(cell))

    def _subjects_of(self, cell: Cell) -> list[GenerateRequest]:
        """Return the compared requests of a cell. The baseline, which is the default cell, has all compared
        requests.
        """
        has_all = cell.is_restricted or cell == Cell()
        return [subject for subject in self.subjects if has_all or not is_restricted(subject)]

    def _company(self, cell: Cell) -> Iterator[list[GenerateRequest]]:
        """Yield the compared requests in batches. A batch of fewer than `cell.others` + 1 requests is filled up with
        requests that are not compared.
        """
        subjects = self._subjects_of(cell)
        if cell.budget == 1:
            subjects = [s for s in subjects if len(s.prompt_token_ids) <= self.sizes.longest_token_by_token]
        for batch in _batches(subjects, cell.others):
            fillers = self._fillers(cell.others + 1 - len(batch))
            yield fillers[::2] + batch + fillers[1::2]

    def _fillers(self, count: int) -> list[GenerateRequest]:
        return make_fillers(count, self.sizes, self.vocab_size)

    def _run_batch(self, engine: Engine, cell: Cell, batch: list[GenerateRequest]) -> Run:
        engine.invalidate_prefix_cache()
        if cell.cache in ("warm", "host"):
            first = dict(n=1, max_tokens=1, min_tokens=0)
            before = [with_params(request, **first) for request in reversed(batch)]
            if cell.routes:
                run_together(engine, [with_params(request, return_routed_experts=False) for request in before])
            if cell.routes != "unknown":
                run_together(engine, before)
        if cell.cache == "host":
            self._evict(engine)
        if cell.states == "lost in a sleep":
            engine.sleep(1, ["kv_cache"], "drain")
            engine.wake_up(["kv_cache"])
        return run_together(engine, batch, EVENTS.get(cell.event), self.steps_before_event)

    def _evict(self, engine: Engine) -> None:
        """Run other requests, one after the other, until they have used every block."""
        length = self.sizes.num_positions - 1
        for i in range(2 + engine.info.num_blocks * engine.info.block_size // length):
            prompt = np.random.default_rng(2 + i).integers(0, self.vocab_size, length, np.int32)
            run_together(engine, [GenerateRequest(f"evicts {i}", prompt, SamplingParams(seed=1, max_tokens=1))])

    def _second_turn(self, engine: Engine, subject: GenerateRequest, num_reread: int) -> Run:
        engine.invalidate_prefix_cache()
        spoken = next(sample for sample in run_together(engine, [subject]).samples if sample.index == 0)
        prompt = np.concatenate([subject.prompt_token_ids, spoken.token_ids[:num_reread]])
        second = with_params(subject, n=1, max_tokens=self.sizes.max_tokens - num_reread)
        return run_together(engine, [replace(second, prompt_token_ids=prompt, num_prior_tokens=num_reread)])

    def _texts(self, baseline: Baseline) -> Iterator[array[int]]:
        """Yield the tokens of each sample of the baseline, preceded by the tokens of its prompt."""
        prompts = {subject.id: subject.prompt_token_ids for subject in self.subjects}
        for (request_id, _), sample in baseline.items():
            yield array("i", [*prompts[request_id].tolist(), *sample.token_ids])

    def _scores(self, cell: Cell, baseline: Baseline) -> list[ScoreRequest]:
        subjects = {subject.id: subject for subject in self._subjects_of(cell)}
        return [
            make_score(subjects[request_id], sample)
            for (request_id, _), sample in baseline.items()
            if request_id in subjects
        ]


class _ImageLab(_Lab):
    """A `_Lab` for prompts with images."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel, max_tokens: int) -> None:
        tower = loaded.model.spec.served_tower
        assert tower is not None, "the cells of a model with a tower"
        self._tower, self._images = tower, ImageSubjects(tower, loaded.model.spec.vocab_size, max_tokens)
        self._num_refused = 0
        super().__init__(config, loaded, self._images.sizes)
        # After this many steps, the first image has been encoded, and the second image is being encoded.
        self.steps_before_event = tower.num_layers + 2

    def _make_subjects(self) -> list[GenerateRequest]:
        return self._images.requests

    def premises(self, cell: Cell, runs: Sequence[Run], topology: Topology) -> list[Premise]:
        assert isinstance(cell, ImageCell)
        if cell.is_refused:
            return [Premise("refused", self._num_refused, self._num_refused == len(self.subjects))]
        return check_image_premises(cell, runs, torch.get_num_threads(), topology, self._tower)

    def check_baseline(self, runs: Sequence[Run]) -> list[Premise]:
        return []

    def _engine_config(self, cell: Cell) -> EngineConfig:
        assert isinstance(cell, ImageCell)
        size = self._images.row_bytes(self.loaded.model.dtype.itemsize)
        # Enough blocks for each request alone, but not for two requests that run together.
        num_blocks = 3 * -(-self.sizes.num_positions // cell.block_size) // 2
        update = dict(
            num_blocks=num_blocks if cell.is_starved else None,
            max_images=MAX_IMAGES,
            max_model_len=self._images.most_positions,
            max_num_seqs=MAX_NUM_SEQS_WITH_IMAGES,
            image_cache_bytes=size if cell.encoder == "evicted" else MAX_IMAGES * size,
        )
        return super()._engine_config(cell).model_copy(update=update)

    def _fillers(self, count: int) -> list[GenerateRequest]:
        return self._images.fillers(count)

    def _runs(self, engine: Engine, cell: Cell, baseline: Baseline) -> Iterator[Run]:
        assert isinstance(cell, ImageCell)
        if cell.is_refused:
            self._num_refused = sum(_is_refused(engine, subject) for subject in self.subjects)
        elif cell.asks_again:
            first, again = self.subjects[0], next(each for each in self.subjects if each.id == AGAIN)
            run_together(engine, [first])
            yield run_together(engine, [again])
        else:
            yield from super()._runs(engine, cell, baseline)

    def _run_batch(self, engine: Engine, cell: Cell, batch: list[GenerateRequest]) -> Run:
        assert isinstance(cell, ImageCell)
        if cell.encoder == "hit":
            run_together(engine, batch)
        return super()._run_batch(engine, cell, batch)


def _is_refused(engine: Engine, subject: GenerateRequest) -> bool:
    """Add a request, and return whether the engine refuses the request because its image does not fit into a step."""
    try:
        engine.add(subject)
    except InvalidRequestError as error:
        return "must be computed in one step" in str(error)
    return False


def _batches(requests: Sequence[R], others: int) -> Iterator[list[R]]:
    for start in range(0, len(requests), others + 1):
        yield list(requests[start : start + others + 1])


def _push(engine: Engine) -> list[Output]:
    """Commit a copy of the weights."""
    weights = engine.weights
    staging = weights.new_staging(in_place=False)
    for name, shape in weights.shapes.items():
        staging.rows(name, 0, shape[0]).copy_(weights.rows(weights.tensors, name))
    return engine.commit_weights(staging, engine.weight_version + 1, "recompute")


def _push_adapters(engine: Engine) -> list[Output]:
    """Commit adapters of rank 1 that change nothing."""
    weights = engine.weights
    adapted = [name for name in weights.shapes if name.endswith("proj.weight")]
    staging = weights.new_staging(in_place=False)
    staging.adapt({name: (f"{name}/a", f"{name}/b", 1, 1.0) for name in adapted}, alone=True)
    for name in adapted:
        rows, columns = weights.shapes[name]
        for factor, value in (("a", torch.ones(1, columns)), ("b", torch.zeros(rows, 1))):
            staging.rows(f"{name}/{factor}", 0, len(value)).copy_(value)
    for name in staging.to_merge():
        staging.merge(name)
    return engine.commit_weights(staging, engine.weight_version + 1, "recompute")


def _sleep(engine: Engine) -> list[Output]:
    outputs = engine.sleep(1, ["weights", "kv_cache"], "recompute")
    engine.wake_up(["weights", "kv_cache"])
    return outputs


Event: TypeAlias = Callable[[Engine], list[Output]]
# The events that a cell can have after some steps. After an event, all running requests are recomputed.
EVENTS: dict[str, Event] = {
    "interruption": lambda engine: engine.interrupt("recompute"),
    "push": _push,
    "adapters": _push_adapters,
    "sleep": _sleep,
}


def run_together(
    engine: Engine, requests: Sequence[Request], event: Event | None = None, steps_before_event: int = 0
) -> Run:
    """Serve all requests at once until they finish.

    `event`: what happens once, after `steps_before_event` steps. If a sample ends in an earlier step, for example
    because its drafts were right, the event happens right after this step, while the other samples still run.
    """
    outputs, history = [], [engine.stats()]
    for request in requests:
        engine.add(request)
    while engine.has_unfinished:
        outputs += engine.step()
        history.append(engine.stats())
        if event is not None and (outputs or len(history) - 1 == steps_before_event):
            outputs += event(engine)
            event = None
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
    """Yield the results of a run for each sample that the baseline also has. The samples of the run begin with token
    `start` of the baseline's samples.
    """
    for output in run.outputs:
        if isinstance(output, ScoreOutput):
            request_id, index = output.request_id.rsplit("/", 1)
            rows = rows_of(output, baseline[request_id, int(index)].token_ids)
            yield Piece((request_id, int(index)), 0, rows, None, output.routed_experts)
        elif (output.request_id, output.index) in baseline:
            rows, key = rows_of(output, output.token_ids), (output.request_id, output.index)
            yield Piece(key, start, rows, _end(output), output.routed_experts)


def rows_of(output: Output, token_ids: Sequence[int]) -> np.ndarray:
    """Return an int32 array [num_tokens, width] with the record of each token. A record has the token id, then the bits
    of the token's log-prob, then the bits of the token's other numbers.

    For a score, `token_ids` are the last tokens of the scored sequence.
    """
    columns = [column[len(column) - len(token_ids) :] for column in columns_of(output).values()]
    bits = [np.ascontiguousarray(column).view(np.int32) for column in columns]
    return np.column_stack([np.array(token_ids, np.int32), *bits])


def _end(sample: SampleOutput) -> tuple[str, int | str | None]:
    return sample.finish_reason, sample.stop_reason


def compare(cell: Cell, pieces: Sequence[Piece], baseline: Baseline, premises: list[Premise]) -> CellResult:
    """Compare a cell's results with the baseline, bit by bit."""
    return CellResult(
        cell,
        samples=len(pieces),
        tokens=sum(len(piece.rows) for piece in pieces),
        differences=sum(count_differences(piece, baseline[piece.key]) for piece in pieces),
        premises=premises,
    )


def count_differences(piece: Piece, expected: SampleOutput) -> int:
    """Return the number of tokens with a record that differs in any bit.

    A missing token counts as different. The result is increased by 1 if the sample ended differently, and by 1 for each
    token with different routes, including tokens of the prompt.
    """
    rows = rows_of(expected, expected.token_ids)[piece.start :]
    other_end = piece.end is not None and piece.end != _end(expected)
    return _different_rows(rows, piece.rows) + other_end + _different_routes(expected.routed_experts, piece.routes)


def _different_routes(expected: np.ndarray | None, found: np.ndarray | None) -> int:
    if expected is None or found is None:
        return (expected is None) != (found is None)
    return _different_rows(expected.reshape(len(expected), -1), found.reshape(len(found), -1))


def _different_rows(expected: np.ndarray, found: np.ndarray) -> int:
    both = min(len(expected), len(found))
    differs = (expected[:both] != found[:both]).any(1)
    return int(differs.sum()) + abs(len(expected) - len(found))


def verify(
    config: EngineConfig,
    console: Console,
    json_file: Path | None = None,
    sizes: Sizes | None = None,
    quick: bool = False,
) -> bool:
    """Run the matrix on the model of `config`, print a table of the results, and write the results to `json_file`.
    Return whether the whole matrix passed.

    `quick`: run fewer cells with shorter prompts. The baseline runs on one rank, even if `config` has several ranks.
    Raise ConfigError or ModelError if the model cannot be loaded or divided, or its context is too short for the
    matrix.
    """
    name, config = config.model, config.model_copy(update={"model": str(resolve_model(config.model))})
    # The model is loaded with its MTP module and its vision tower, if it has them.
    max_images = 0 if tower_obstacle(outline(config).spec) else MAX_IMAGES
    loaded = load_model(config.model_copy(update={"speculative": "auto", "max_images": max_images}))
    sizes, topology = sizes or (QUICK_SIZES if quick else SIZES), Topology.of(config)
    if topology.size > 1:
        config_of_rank(config, 0)
        specs_of_ranks(loaded.model.spec, topology, loaded.backend.ops)
    matrix = run_matrix(config, loaded, sizes, quick)
    total = len(cells_of(loaded, topology, quick)) + 1 + bool(max_images)
    results = list(tracked(matrix, "verifying", total))
    backend = f"backend {loaded.backend.name} ({loaded.backend.ops.instruction_set()})"
    on = f"{topology.text} on {loaded.model.device}" if topology.size > 1 else loaded.model.device
    arithmetic = f"{loaded.dtype_name}, {on}, {backend}, pieces {loaded.model.spec.pieces}"
    if loaded.model.spec.quantization != NONE:
        arithmetic += f", quantization {loaded.model.spec.quantization}"
    if loaded.model.spec.kv_cache_dtype != AUTO:
        arithmetic += f", KV cache {loaded.model.spec.kv_cache_dtype}"
    console.print(make_table(results, f"{name}, {arithmetic}"))
    console.print(LEGEND, markup=False, highlight=False)
    if max_images:
        console.print(IMAGE_LEGEND, markup=False, highlight=False)
    if quick:
        run, every = (len(cells_of(loaded, topology, each)) + 1 + bool(max_images) for each in (True, False))
        console.print(
            LEFT_OUT.format(run=run, all=every, longest=max(sizes.prompt_lengths), usual=max(SIZES.prompt_lengths)),
            markup=False,
        )
    if loaded.backend.note:
        console.print(
            f"backend {loaded.backend.name}, not a faster one: {printable(loaded.backend.note)}", markup=False
        )
    if obstacle := stop_string_obstacle(loaded.folder):
        console.print(f"stop strings were not tested: {printable(obstacle)}", markup=False)
    if "in the grammar" not in [premise.name for premise in results[0].premises]:
        console.print(f"grammars were not tested: {printable(grammar_obstacle(loaded))}", markup=False)
    console.print(summarize(results))
    if json_file is not None:
        json_file.write_text(json.dumps([dataclasses.asdict(result) for result in results], indent=2))
    return all(result.passed for result in results)


def make_table(results: Sequence[CellResult], title: str) -> Table:
    """Return a table with a row for each cell. Each failed premise is on a separate line."""
    table = Table("circumstances", "samples", "tokens", "differences", "premises", title=title)
    for result in results:
        premises = ", ".join(f"{p.name} {p.seen}" for p in result.premises if p.seen and p.holds)
        failed = "".join(f"\n[red]PREMISE FAILED: {p.name} {p.seen}[/]" for p in result.failed_premises)
        differences = f"[red]{result.differences}[/]" if result.differences else "0"
        table.add_row(result.cell.name, str(result.samples), str(result.tokens), differences, premises + failed)
    return table


def summarize(results: Sequence[CellResult]) -> str:
    """Return the verdict in one line."""
    tokens, differences = (sum(getattr(result, name) for result in results) for name in ("tokens", "differences"))
    failed = sum(len(result.failed_premises) for result in results)
    verdict = "passed" if all(result.passed for result in results) else "FAILED"
    return (
        f"{verdict}: {len(results)} cells, {tokens} tokens and log-probs compared, {differences} differences, "
        f"{failed} failed premises"
    )
