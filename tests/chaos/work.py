"""The work of a fleet's client in one round, and the moments of this work at which a process is killed.

Run as a program, this module is a client in a separate process. The program does one piece of work, prints each moment
as it begins, and then waits until it is killed.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file

from trueroll.errors import QueueFullError, TruerollError
from trueroll.rollout import FleetClient, Group, SampleDelta, SampleOutput, SamplingParams, WeightPublisher
from trueroll.rollout.client.membership import FleetArg
from trueroll.rollout.publisher.publisher import WorkerClients
from trueroll.weight_sync.payload.tensors import raw_bytes
from trueroll.weight_sync.transports.disk import FolderWriter
from trueroll.weight_sync.transports.shared import SharedSlots

Bits = list[list[tuple[tuple[int, ...], bytes]]]

SEED = 11
PROMPTS = [[i, 5, 6, 7] * 6 for i in range(1, 17)]
PARAMS = SamplingParams(n=4, max_tokens=900, ignore_eos=True, stop_token_ids=(3, 4), temperature=1.5)
"""Chosen so that the samples of a group end at different steps."""
SEQUENCES = [[(7 * i + 3 * j) % 500 + 3 for j in range(600)] for i in range(16)]
MOMENTS = dict(
    generate="generate",
    stream="stream",
    score="score",
    begin="push",
    stage="push",
    verify="push",
    commit="push",
    sleep="sleep",
    wake="sleep",
    grow="scale",
    shrink="scale",
)
"""For each moment, the work that it belongs to."""
TRANSPORTS = ("shared", "collective", "relay", "disk")
_CALLS = dict(begin_push="begin", stage_bucket="stage", verify_push="verify", commit_push="commit")
_MEMORY = "memory "
ROOM_SECONDS, ROOM_LOOKS = 0.1, 3000
"""Seconds between a client's tries while workers are full, and the maximum number of tries."""
T = TypeVar("T")


class BrokenPromise(Exception):
    """A round found a broken promise."""


def weight_sets(folder: Path) -> list[dict[str, torch.Tensor]]:
    """Return two sets of weights for alternating versions.

    Both sets differ from the weights of the model in `folder`.
    """
    own = load_file(folder / "model.safetensors")
    return [{name: tensor * factor for name, tensor in own.items()} for factor in (1.125, 1.25)]


def write_old_push(parent: Path, model: Path, push_id: str) -> Path:
    """Make the folder of an earlier run's push by disk: version 900, with the weights of the model in `model`."""
    tensors = load_file(model / "model.safetensors")
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    with closing(FolderWriter(parent, push_id, 900, dtype, shapes)) as writer:
        for name, tensor in tensors.items():
            writer.append(name, raw_bytes(tensor))
        return writer.finish()


def bits(groups: list[Group]) -> Bits:
    """Return tokens and log-probs of each sample of each group."""
    return [[_bits_of(sample) for sample in group.samples] for group in groups]


def _bits_of(sample: SampleOutput) -> tuple[tuple[int, ...], bytes]:
    assert sample.logprobs is not None
    return tuple(sample.token_ids), sample.logprobs.tobytes()


class Work:
    """A client and a trainer of a fleet.

    `at`: called with each moment as it begins, on the working thread. `pushes`: folder of pushes by disk.
    """

    def __init__(self, fleet: FleetArg, model: Path, pushes: Path, at: Callable[[str], None]) -> None:
        self.at = at
        self._sets = weight_sets(model)
        self._ends = ExitStack()
        self.client = FleetClient(fleet)
        self._ends.enter_context(self.client)
        self._publishers: dict[str, WeightPublisher] = {}
        for transport in TRANSPORTS:
            fields: dict[str, Any] = dict(folder=pushes) if transport == "disk" else {}
            publisher = self._ends.enter_context(WeightPublisher(transport, **fields))
            publisher.connect_fleet(fleet)
            self._publishers[transport] = publisher

    def close(self) -> None:
        self._ends.close()

    def generate(self, version: int) -> list[Group]:
        self.at("generate")
        return self.samples(version)

    def samples(self, version: int | None = None) -> list[Group]:
        """Generate under the weights of `version`, or under any weights that the fleet serves."""
        return taken(lambda: self.client.generate(PROMPTS, PARAMS, seed=SEED, min_weight_version=version))

    def stream(self, version: int) -> Bits:
        """Return all samples, joined from their pieces.

        Raise BrokenPromise if a sample arrives twice or lacks pieces.
        """
        self.at("stream")
        return taken(lambda: self._streamed(version))

    def _streamed(self, version: int) -> Bits:
        pieces: dict[tuple[int, int], list[SampleDelta]] = {}
        samples: dict[tuple[int, int], SampleOutput] = {}
        for position, got in self.client.stream(PROMPTS, PARAMS, deltas=True, seed=SEED, min_weight_version=version):
            place = position, got.index
            if place in samples:
                raise BrokenPromise(f"sample {place} was complete, but more came: {got!r:.200}")
            if isinstance(got, SampleDelta):
                _add(pieces.setdefault(place, []), got)
            else:
                samples[place] = got
        return [[_whole(pieces, samples, (i, j)) for j in range(PARAMS.n)] for i in range(len(PROMPTS))]

    def score(self, version: int) -> list[bytes]:
        self.at("score")
        scores = taken(lambda: self.client.score(SEQUENCES, min_weight_version=version))
        return [score.logprobs.tobytes() for score in scores]

    def push(self, version: int, transport: str) -> None:
        if transport == "disk":  # a push by disk writes the weights before `begin_push`
            self.at("stage")
        with _calls_told(self.at):
            self._publishers[transport].push(self._sets[version % 2], version, allow_older=True)

    def sleep(self) -> None:
        self.at("sleep")
        self.client.sleep(level=1)
        self.at("wake")
        self.client.wake_up()


def taken(call: Callable[[], T]) -> T:
    """Return the result of a call. Retry while workers are full, possibly of other clients' requests."""
    for _ in range(ROOM_LOOKS):
        try:
            return call()
        except QueueFullError:
            time.sleep(ROOM_SECONDS)
    raise BrokenPromise("the workers stayed full")


def _add(pieces: list[SampleDelta], piece: SampleDelta) -> None:
    if piece.start == 0:
        pieces.clear()
    if piece.start != sum(len(each.token_ids) for each in pieces):
        raise BrokenPromise(f"a piece does not begin where the one before ended: {piece!r:.200}")
    pieces.append(piece)


def _whole(pieces: Any, samples: dict[Any, SampleOutput], place: tuple[int, int]) -> tuple[tuple[int, ...], bytes]:
    if place not in samples:
        raise BrokenPromise(f"sample {place} did not arrive")
    found = pieces.get(place, [])
    joined = tuple(id for piece in found for id in piece.token_ids), b"".join(p.logprobs.tobytes() for p in found)
    if joined != _bits_of(samples[place]):
        raise BrokenPromise(f"the pieces of sample {place} differ from the sample")
    return joined


@contextmanager
def _calls_told(at: Callable[[str], None]) -> Iterator[None]:
    """Report the phases of pushes on this thread. Workers that join get pushes too, but on other threads."""
    thread, ask, ask_all = threading.get_ident(), WorkerClients.ask, WorkerClients.ask_all

    def tell(calls: Any) -> None:
        if threading.get_ident() == thread:
            moment = _CALLS.get(calls[0].type if isinstance(calls, list) else calls.type)
            if moment is not None:
                at(moment)

    def told_ask(workers: WorkerClients, what: str, calls: Any, timeout: float, lost: Any) -> Any:
        tell(calls)
        return ask(workers, what, calls, timeout, lost)

    def told_ask_all(workers: WorkerClients, call: Any, timeout: float) -> Any:
        tell(call)
        return ask_all(workers, call, timeout)

    WorkerClients.ask, WorkerClients.ask_all = told_ask, told_ask_all  # type: ignore[method-assign]
    try:
        yield
    finally:
        WorkerClients.ask, WorkerClients.ask_all = ask, ask_all  # type: ignore[method-assign]


def tell_memory(tell: Callable[[str], None]) -> None:
    """Report the name of all shared memory that this process makes from now on."""
    make = SharedSlots.__init__

    def told(slots: SharedSlots, *args: Any) -> None:
        make(slots, *args)
        tell(slots.source(0).name)

    SharedSlots.__init__ = told  # type: ignore[method-assign]


def command(file: Path, model: Path, pushes: Path, moment: str, version: int, transport: str) -> list[str]:
    """Return the command of a client that does the work of `moment`. `version`: the version that the fleet serves."""
    return [sys.executable, "-P", __file__, str(file), str(model), str(pushes), moment, str(version), transport]


def read_moment(line: str, on_memory: Callable[[str], None]) -> str | None:
    """Return the moment in a line that a client printed. Pass names of shared memory to `on_memory`."""
    if line.startswith(_MEMORY):
        on_memory(line.removeprefix(_MEMORY).strip())
        return None
    return line.strip()


def _say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    file, model, pushes, moment, version, transport = sys.argv[1:]
    tell_memory(lambda name: _say(_MEMORY + name))
    work, done = Work(file, Path(model), Path(pushes), _say), MOMENTS[moment]
    try:
        if done == "push":
            work.push(int(version) + 1, transport)
        elif done == "sleep":
            work.sleep()
        else:
            getattr(work, "generate" if done == "scale" else done)(int(version))
    except TruerollError:
        pass  # its requests were lost; the campaign kills this process anyway
    signal.pause()


if __name__ == "__main__":
    main()
