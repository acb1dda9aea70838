"""`trueroll fleet`: a process that keeps a fleet running until it is told to end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

from .fleet import Fleet


def serve(settings: dict[str, Any], on_ready: Callable[[str], None]) -> None:
    """Run in the main thread of this process until SIGTERM or SIGINT. `settings`: the arguments of `Fleet`. `on_ready`
    gets a line that says where the workers are. Raise what `Fleet` raises.
    """
    ended = threading.Event()
    with Fleet(**settings) as fleet:
        for number in (signal.SIGTERM, signal.SIGINT):  # only now, for Ray has set one of its own
            signal.signal(number, lambda *_: ended.set())
        where = settings.get("file") or ",".join(member.address for member in fleet.members())
        metrics = "" if fleet.metrics_port is None else f" metrics=http://127.0.0.1:{fleet.metrics_port}/metrics"
        on_ready(f"ready workers={fleet.num_serving} fleet={where}{metrics}")
        while not ended.wait(1.0):  # a wait without an end would keep signals waiting
            pass
