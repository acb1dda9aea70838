"""The program `trueroll`. An interrupt ends the program with a single line of output, even during the import of the
commands.
"""

from __future__ import annotations

import sys

from ..logs import INTERRUPTED, tell_interrupted


def main() -> None:
    """Run the program. Exit codes: 0 for success, 1 for an error or a failed check, 2 for wrong usage, 130 for an
    interrupt.
    """
    try:
        from .cli import main as run

        run()
    except KeyboardInterrupt:
        tell_interrupted()
        sys.exit(INTERRUPTED)
    except SystemExit as ended:
        if ended.code == INTERRUPTED:  # typer ends with this code after a KeyboardInterrupt
            tell_interrupted()
        raise
    except Exception as error:
        # An interrupt while pydantic builds a class becomes a SchemaError, and only its text names the interrupt.
        if KeyboardInterrupt.__name__ not in str(error):
            raise
        tell_interrupted()
        sys.exit(INTERRUPTED)
