"""A follower: computes the steps that the leader sends. `python -m trueroll.engine.parallel.follower SOCKET SEGMENT
RANK`.

SOCKET and SEGMENT are descriptors that the process inherits: an end of a socket pair, and the memory for exchanges. The
process ignores signals that ask it to end, and ends when the leader closes its end of the socket, or has ended itself.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import cast

import torch

from trueroll.errors import TruerollError

from ...kernels.ranks import Rank
from ..config import EngineConfig
from ..running.executor import LocalExecutor
from ..running.loading import allocate_model
from ..running.weight_memory import Build
from .agreement import Agreement
from .exchange import MOST_SECONDS, MOST_SECONDS_TO_START, SharedExchange
from .weights import NUM_FILES, FollowerArena, FollowerWeights
from .wire import Channel


class LeaderGone(Exception):
    """The leader has closed its end of the socket."""


def follow(channel: Channel, segment: int, index: int) -> None:
    """Compute what the leader sends to the rank with this index, until it closes the channel."""
    _, (settings, size) = channel.receive()
    config = EngineConfig(**settings)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)

    def check() -> None:
        if channel.is_closed():
            raise LeaderGone

    exchange = SharedExchange(Rank(index, size), segment, check, MOST_SECONDS_TO_START)
    os.close(segment)

    def place(builds: Sequence[Build], dtype: torch.dtype, device: torch.device) -> FollowerWeights:
        return FollowerWeights(builds[index], dtype, lambda: channel.receive_files(NUM_FILES))

    model = allocate_model(config, exchange, place)
    arena = cast(FollowerArena, model.loaded.weights.arena)
    executor = LocalExecutor(config, model.read())
    gc.freeze()  # otherwise a garbage collection would traverse all of torch, and all ranks would wait
    exchange.meet()
    exchange.most_seconds = MOST_SECONDS
    agreement = Agreement(exchange)
    while True:
        match channel.receive():
            case "compute", step:
                agreement.add(step, executor.compute(step).wait())
            case "draft", step:
                executor.draft(step)
            case "meet", None:
                exchange.meet()
            case "map", None:
                arena.map(channel.receive_files(NUM_FILES))
                exchange.meet()
            case "sleep", (level, tags):
                executor.sleep(level, tags)
                exchange.meet()
            case "wake_up", tags:
                executor.wake_up(tags)
                exchange.meet()


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logging.getLogger("trueroll").addHandler(logging.NullHandler())  # the leader logs the same warnings
    channel = Channel(socket.socket(fileno=int(sys.argv[1])), MOST_SECONDS)
    try:
        follow(channel, int(sys.argv[2]), int(sys.argv[3]))
    except (EOFError, LeaderGone, ConnectionError):
        return
    except TruerollError as error:
        _report(channel, str(error))
    except BaseException as error:
        _report(channel, f"{type(error).__name__}: {error}")
        raise


def _report(channel: Channel, failure: str) -> None:
    with suppress(OSError):  # the leader may have failed for the same reason, and ended
        channel.send("failed", failure)


if __name__ == "__main__":
    main()
