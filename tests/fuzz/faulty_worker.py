"""A worker process with the fake engine and one fault, named by `model`. The harness must find every fault."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack

sys.path.insert(0, str(Path(__file__).parents[1]))

from fake_engine import FakeEngine, FakeTower  # noqa: E402
from frames import pack  # noqa: E402
from fuzz.images import (  # noqa: E402
    MAX_IMAGE_PATCHES,
    MAX_IMAGES,
    PATCH_SIZE,
    PLACEHOLDER,
    VIDEO_PLACEHOLDER,
)

from trueroll.engine.media import ImageLimits  # noqa: E402
from trueroll.rollout.network.router import Router  # noqa: E402
from trueroll.rollout.worker import (
    process,  # noqa: E402
    worker,  # noqa: E402
)

LATE = 300
"""Number of replies before a fault begins. The results collected before the attack are therefore correct."""
_kept: list[Any] = []


def _change(type: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[int, bytes], list[bytes]]:
    """Return a fault that changes each reply of `type`."""

    def fault(count: int, frame: bytes) -> list[bytes]:
        reply = msgpack.unpackb(frame)
        if reply["type"] != type:
            return [frame]
        change(reply)
        return [pack(reply)]

    return fault


def _flip_a_bit(sample: dict[str, Any]) -> None:
    if sample["logprobs"]:
        sample["logprobs"] = bytes([sample["logprobs"][0] ^ 1]) + sample["logprobs"][1:]


def _is_due(count: int, frame: bytes) -> bool:
    """Return whether the reply is an error for the attack, and is one of the few replies to change."""
    return count % 20 == 0 and b"\xa4type\xa5error" in frame and b"x-" in frame


def _grow(count: int, frame: bytes) -> list[bytes]:
    _kept.append(b"x" * 2**18)
    return [frame]


def _leak(count: int, frame: bytes) -> list[bytes]:
    if count % 100 == 0:
        _kept.append(os.dup(0))
    return [frame]


def _log(count: int, frame: bytes) -> list[bytes]:
    if count == LATE:
        print("Traceback (most recent call last):", file=sys.stderr, flush=True)
    return [frame]


def _hang(count: int, frame: bytes) -> list[bytes]:
    time.sleep(3600)
    return [frame]


FAULTS: dict[str, Callable[[int, bytes], Any]] = {
    "none": lambda count, frame: [frame],
    "flips a bit": _change("sample", _flip_a_bit),
    "loses an error": lambda count, frame: [] if _is_due(count, frame) else [frame],
    "repeats an error": lambda count, frame: [frame, frame] if _is_due(count, frame) else [frame],
    "serves another push": _change("weights", lambda weights: weights.update(push_id="f" * 32)),
    "keeps blocks": _change("stats", lambda stats: stats["engine"]["pools"][0].update(in_use=1)),
    "keeps images": _change("health", lambda health: health["memory"].update(images=2**30)),
    "asks for too much": _change("need_image", lambda question: question.update(num_bytes=2**21)),
    "exits": lambda count, frame: os._exit(3),
    "hangs": _hang,
    "grows": _grow,
    "leaks descriptors": _leak,
    "logs a traceback": _log,
    "ends badly": lambda count, frame: [frame],
}


class Faulty(Router):
    """Passes all outgoing frames through `fault`."""

    fault = staticmethod(FAULTS["none"])
    _count = 0

    def send(self, identity: bytes, frame: bytes) -> bool:
        self._count += 1
        frames = [frame] if self._count < LATE else self.fault(self._count, frame)
        were_sent = [super(Faulty, self).send(identity, each) for each in frames]
        return all(were_sent)


def load(config: Any) -> FakeEngine:
    Faulty.fault = staticmethod(FAULTS[config.model])
    if config.model == "ends badly":
        process._exit = lambda code: os._exit(4)  # type: ignore[assignment]
    engine = FakeEngine()
    tower = FakeTower(PLACEHOLDER, VIDEO_PLACEHOLDER, frames=2, patch_size=PATCH_SIZE)
    engine.images = ImageLimits(tower, MAX_IMAGES, MAX_IMAGE_PATCHES)
    return engine


if __name__ == "__main__":
    worker.Router = Faulty  # type: ignore[misc]
    process.run_as_child(load)
