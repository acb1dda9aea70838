"""`trueroll fleet`: a process that keeps a fleet running until it gets a signal."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

from .fleet import Fleet


def serve(settings: dict[str, Any], on_ready: Callable[[str], None]) -> None:
    """Run a fleet until SIGTERM or SIGINT. Call this function in the main thread. `settings`: the arguments of `Fleet`.
    `on_ready`: a function that is called when the workers serve. Its argument is a line of text that says how to reach
    the workers. Raise the same errors as `Fleet`, and KeyboardInterrupt once a SIGINT has ended the fleet.
    """
    ended, received = threading.Event(), set()

    def end(number: int, _: object) -> None:
        received.add(number)
        ended.set()

    with Fleet(**settings) as fleet:
        for number in (signal.SIGTERM, signal.SIGINT):  # after `Fleet`, because Ray installs its own handlers
            signal.signal(number, end)
        where = settings.get("file") or ",".join(member.address for member in fleet.members())
        metrics = "" if fleet.metrics_port is None else f" metrics=http://127.0.0.1:{fleet.metrics_port}/metrics"
        on_ready(f"ready workers={fleet.num_serving} fleet={where}{metrics}")
        while not ended.wait(1.0):  # a wait without a timeout would delay signal handlers
            pass
    if signal.SIGINT in received:
        raise KeyboardInterrupt
