"""The program `trueroll`. An interrupt ends the program with a single line of output, even during the import of the
commands.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

from ..logs import INTERRUPTED, tell_interrupted


class _Interrupt:
    """Handler of SIGINT. Raises KeyboardInterrupt, and remembers that, because a library may turn a KeyboardInterrupt
    into another exception: pydantic does so while it builds a class.
    """

    def __init__(self) -> None:
        self.has_come = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.has_come = True
        signal.default_int_handler(number, frame)


def main() -> None:
    """Run the program. Exit codes: 0 for success, 1 for an error or a failed check, 2 for wrong usage, 130 for an
    interrupt.
    """
    interrupt = _Interrupt()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a process in the background ignores interrupts
        signal.signal(signal.SIGINT, interrupt)
    try:
        from .cli import main as run

        run()
    except KeyboardInterrupt:
        tell_interrupted()
        sys.exit(INTERRUPTED)
    except SystemExit as ended:
        if ended.code == INTERRUPTED:  # typer ends so after a KeyboardInterrupt
            tell_interrupted()
        raise
    except Exception:
        if not interrupt.has_come:
            raise
        tell_interrupted()
        sys.exit(INTERRUPTED)
