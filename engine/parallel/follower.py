"""A follower: computes the steps that the leader sends. `python -m trueroll.engine.parallel.follower SOCKET SEGMENT`.

SOCKET and SEGMENT are descriptors that the process inherits: an end of a socket pair, and the memory for exchanges. The
process ends when the leader closes its end of the socket, or has ended itself.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import Any

import torch

from trueroll.errors import TruerollError

from ...kernels.ranks import Rank
from ..config import EngineConfig
from ..running.executor import LocalExecutor
from ..running.loading import load_model
from .agreement import Agreement
from .exchange import MOST_SECONDS, MOST_SECONDS_TO_START, SharedExchange
from .wire import Channel


class LeaderGone(Exception):
    """The leader has closed its end of the socket."""


def follow(channel: Channel, segment: int) -> None:
    """Compute what the leader sends, until it closes the channel."""
    _, (settings, index, size) = channel.receive()
    config = EngineConfig(**settings)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)

    def check() -> None:
        if channel.is_closed():
            raise LeaderGone

    exchange = SharedExchange(Rank(index, size), segment, check, MOST_SECONDS_TO_START)
    os.close(segment)
    executor = LocalExecutor(config, load_model(config, exchange), exchange)
    channel.send("done")
    exchange.most_seconds = MOST_SECONDS
    agreement = Agreement(exchange)
    while True:
        name, content = channel.receive()
        if name == "compute":
            agreement.add(executor.compute(content).wait())
        elif name == "draft":
            executor.draft(content)
        else:
            _change(executor, name, content)
            channel.send("done")


def _change(executor: LocalExecutor, name: str, content: Any) -> None:
    if name == "sleep":
        executor.sleep(*content)
    else:
        assert name == "wake_up", name
        executor.wake_up(content)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the leader ends the followers
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    try:
        follow(channel, int(sys.argv[2]))
    except (EOFError, LeaderGone, ConnectionError):
        return
    except BaseException as error:
        kind = "" if isinstance(error, TruerollError) else f"{type(error).__name__}: "
        channel.send("failed", f"{kind}{error}")
        raise


if __name__ == "__main__":
    main()
