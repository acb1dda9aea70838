"""The output of commands and workers to stderr: log lines, and the last line of an interrupted process.

Untrusted text cannot forge or color log lines.
"""

from __future__ import annotations

import logging
import sys

from trueroll.errors import printable

INTERRUPTED = 130
"""The exit code of a process that ended because of SIGINT."""


class LineFormatter(logging.Formatter):
    """Formatter that writes each message as one line and escapes unprintable characters, including line breaks.

    The lines of a traceback are indented, so that no line looks like a log message.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:  # noqa: N802
        lines = super().formatException(ei).splitlines()  # type: ignore[arg-type]
        return "\n".join(f"  {printable(line)}" for line in lines)


def log_to_stderr(level: int) -> None:
    """Configure this process to log to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=level, handlers=[handler])


def tell_interrupted() -> None:
    """Print the last line of a process that ends because of SIGINT."""
    print("trueroll: interrupted", file=sys.stderr, flush=True)
