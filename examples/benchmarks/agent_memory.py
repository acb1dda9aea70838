"""Measure the host tier with sessions of agents: `python examples/benchmarks/agent_memory.py`. `--help` lists the
options.

**Replay.** Together, the contexts of all sessions in a trace need twice the size of the KV cache. In each turn, a
session sends its whole history with a tool's result, gets a sample, and waits for the tool. The engine's scheduler and
prefix cache serve the trace without a model. The clock is simulated: a step takes the time that `STEP_SECONDS` gives,
and restoring a block from the host takes `RESTORE_SECONDS`. The table compares an LRU cache without a host tier with
host tiers of several sizes. The column `recomputed` shows how many more prompt tokens are computed than with an
unlimited cache. All numbers of the replay are the same in each run.

**Measurement.** With `--model`, an engine computes a prompt, evicts the prompt's blocks to make room for other prompts,
and then restores these blocks from the host tier. The report shows the time to compute the prompt and the time to
restore it. Both times include the step that computes the last token.
"""

from __future__ import annotations

import heapq
import random
import time
from array import array
from collections.abc import Sequence as AnySequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from trueroll.engine.cache.prefix_cache import PrefixCache
from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.outputs.open_requests import DrawRecord
from trueroll.engine.request import GenerateRequest, SampleOutput, SamplingParams
from trueroll.engine.scheduling.scheduler import Scheduler
from trueroll.engine.scheduling.sequence import Generation, Sequence, takers_of

STEP_SECONDS = 0.010, 0.000038
"""Seconds of a step, and of each token that it computes."""
RESTORE_SECONDS = 0.0002
"""Seconds to restore a block: 2 MiB at 10 GB/s."""
BLOCK_SIZE, MAX_SEQS, MAX_TOKENS = 16, 32, 1024
FIRST, LATER, SAMPLED = (300, 700), (50, 400), (30, 100)
"""The smallest and the largest number of tokens in a session's first message, in later messages, and in samples."""
TOOL_SECONDS = 1.0
"""Mean duration of a tool call. Durations are exponentially distributed."""
HOST_SHARES = 0.25, 0.5, 1.0
"""The sizes of host tiers, as multiples of the KV cache; the table shows them as `host tier x 0.25` and so on."""
_DRAW = DrawRecord()


@dataclass(frozen=True)
class Turn:
    """A turn of a session: the numbers of new and of sampled tokens, and the seconds that the tool takes afterwards."""

    new: int
    sampled: int
    tool: float


Trace = AnySequence[AnySequence[Turn]]


def make_trace(sessions: int, turns: int, seed: int = 1) -> Trace:
    """Return the turns of each session."""
    rng = random.Random(seed)

    def turn(i: int) -> Turn:
        return Turn(rng.randint(*(LATER if i else FIRST)), rng.randint(*SAMPLED), rng.expovariate(1 / TOOL_SECONDS))

    return [[turn(i) for i in range(turns)] for _ in range(sessions)]


def blocks_of(trace: Trace) -> int:
    """Return the number of blocks that the final contexts of all sessions need together."""
    return sum(-(-sum(turn.new + turn.sampled for turn in turns) // BLOCK_SIZE) for turns in trace)


@dataclass(eq=False)
class Sample:
    """A sample as the scheduler sees it. `left`: the number of tokens still to be sampled."""

    session: int
    order: tuple[int, int]
    left: int
    draw: DrawRecord = _DRAW

    def renew_kv(self) -> None:
        """Do nothing: the weights never change."""


@dataclass(frozen=True)
class Result:
    """The cost of a replay. `computed`: number of computed prompt tokens. `restored`: number of blocks restored from
    the host.
    """

    computed: int
    restored: int
    seconds: float


class Replay:
    """Replays a trace with `num_blocks` blocks on the device and `host_blocks` blocks on the host."""

    def __init__(self, trace: Trace, num_blocks: int, host_blocks: int = 0) -> None:
        self._trace, self._rng = trace, random.Random(0)
        self._cache = PrefixCache({None: num_blocks}, BLOCK_SIZE, host_blocks=(host_blocks,))
        self._scheduler = Scheduler(self._cache, MAX_SEQS, MAX_TOKENS)
        self._histories = [array("i") for _ in trace]
        self._turns, self._arrivals, self._now = [0] * len(trace), 0, 0.0
        self._ready = [(0.0, session) for session in range(len(trace))]

    def run(self) -> Result:
        """Serve all turns of all sessions."""
        scheduler, host = self._scheduler, self._cache.tables.host
        while self._ready or scheduler.running.sequences or len(scheduler.waiting):
            if not scheduler.running.sequences and not len(scheduler.waiting):
                self._now = max(self._now, self._ready[0][0])
            while self._ready and self._ready[0][0] <= self._now:
                self._ask(heapq.heappop(self._ready)[1])
            self._step()
        return Result(scheduler.stats.computed_prompt_tokens, host.num_restored, self._now)

    def _ask(self, session: int) -> None:
        turn, history = self._trace[session][self._turns[session]], self._histories[session]
        history.extend(self._rng.randrange(50_000) for _ in range(turn.new))
        sample = Sample(session, (self._arrivals, 0), turn.sampled)
        self._arrivals += 1
        chain = self._cache.identity.new_chain(None)
        purpose = Generation([sample])  # type: ignore[list-item]
        self._scheduler.waiting.add(Sequence(sample.order, history[:], len(history), chain, purpose))

    def _step(self) -> None:
        scheduler, lanes = self._scheduler, self._scheduler.running.lanes
        chunks = scheduler.schedule()
        restored = sum(source < 0 for copies in scheduler.running.take_block_copies() for source, _ in copies)
        takers = takers_of(chunks, lanes)
        scheduler.advance(chunks)
        seconds, of_token = STEP_SECONDS
        self._now += seconds + of_token * int((chunks.ends - chunks.starts).sum()) + RESTORE_SECONDS * restored
        scheduler.publish(chunks)
        decodes, num_decodes = takers.decodes, len(takers.decodes.lanes)
        drawn = [self._draw(sample) for sample in takers.samples]
        lanes.accept(
            decodes,
            np.array(drawn[:num_decodes], np.int64),
            takers.counts[:num_decodes],
            np.zeros(num_decodes, np.bool_),
        )
        for sequence, sample in zip(decodes.sequences, takers.samples[:num_decodes], strict=True):
            self._go_on(sequence, sample)
        for place, group in takers.prompts:
            sequence, sample = chunks.sequences[place], takers.samples[group.start]
            if sample.left:
                lanes.begin(sequence, sample, drawn[group.start])
            self._go_on(sequence, sample)

    def _draw(self, sample: Sample) -> int:
        token = self._rng.randrange(50_000)
        self._histories[sample.session].append(token)
        sample.left -= 1
        return token

    def _go_on(self, sequence: Sequence, sample: Sample) -> None:
        """If the sample has all its tokens, end it, and schedule the session's next turn for when the tool has
        finished.
        """
        if sample.left:
            return
        self._scheduler.finish(sequence)
        turns, session = self._trace[sample.session], sample.session
        done = turns[self._turns[session]]
        self._turns[session] += 1
        if self._turns[session] < len(turns):
            heapq.heappush(self._ready, (self._now + done.tool, session))


def compare(trace: Trace) -> dict[str, Result]:
    """Replay a trace with an unlimited cache, and then with half of the blocks that the trace needs, without a host
    tier and with host tiers of several sizes.
    """
    needed = blocks_of(trace)
    half = needed // 2
    found = {"unlimited": Replay(trace, 2 * needed).run(), "LRU": Replay(trace, half).run()}
    return found | {f"host tier x {share}": Replay(trace, half, int(share * half)).run() for share in HOST_SHARES}


def table_of(results: dict[str, Result]) -> Table:
    """Return the table of results."""
    table = Table("cache", "recomputed", "to LRU", "restored blocks", "seconds")
    least, lru = results["unlimited"].computed, results["LRU"].computed
    for name, result in results.items():
        recomputed = result.computed - least
        share = f"{recomputed / (lru - least):.3f}"
        table.add_row(name, f"{recomputed:,}", share, f"{result.restored:,}", f"{result.seconds:.1f}")
    return table


def measure(model: str, length: int, device: str) -> tuple[float, float]:
    """Return the seconds that an engine takes to compute a prompt, and to restore it from the host tier. Both samples
    must have the same bits.
    """
    num_blocks = length // BLOCK_SIZE + 2
    sizes = dict(num_blocks=num_blocks, block_size=BLOCK_SIZE, max_num_seqs=1, max_model_len=length + 1)
    engine = Engine(EngineConfig(model=model, device=device, **sizes, host_cache_bytes=2**31))
    rng = np.random.default_rng(0)
    prompt, *others = (rng.integers(3, engine.info.vocab_size, length, np.int32) for _ in range(3))

    def run(name: str, token_ids: np.ndarray) -> tuple[float, SampleOutput]:
        started = time.perf_counter()
        engine.add(GenerateRequest(name, token_ids, SamplingParams(seed=1, max_tokens=1)))
        outputs = []
        while engine.has_unfinished:
            outputs += engine.step()
        return time.perf_counter() - started, outputs[0]

    run("warm up", prompt[: 2 * BLOCK_SIZE])
    computed, first = run("computed", prompt)
    for other in others:
        run("evicts", other)
    restored, again = run("restored", prompt)
    assert first.logprobs is not None and again.logprobs is not None
    assert first.token_ids == again.token_ids and first.logprobs.tobytes() == again.logprobs.tobytes()
    assert engine.stats().host_restored >= (length - 1) // BLOCK_SIZE
    return computed, restored


def main(
    sessions: Annotated[int, typer.Option(help="Number of sessions.")] = 24,
    turns: Annotated[int, typer.Option(help="Number of turns of each session.")] = 8,
    model: Annotated[str, typer.Option(help="Also measure this model; for example smollm2.")] = "",
    length: Annotated[int, typer.Option(help="Tokens of the measured prompt.")] = 4096,
    device: Annotated[str, typer.Option(help="Device of the measured model.")] = "cpu",
) -> None:
    """Replay sessions with and without a host tier, and measure how fast a prompt comes back."""
    console = Console()
    console.print(table_of(compare(make_trace(sessions, turns))))
    if model:
        computed, restored = measure(model, length, device)
        console.print(
            f"{model}: {length:,} tokens: computed in {computed:.3f} s, restored in {restored:.3f} s, "
            f"{computed / restored:.1f} times as fast"
        )


if __name__ == "__main__":
    typer.run(main)
