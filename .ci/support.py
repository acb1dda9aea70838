"""Write what the tests prove of each family of models into the table in docs/support.md. With --print, print it."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


class Collector:
    """A pytest plugin that makes the table from the collected tests."""

    table = ""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        from proofs import COLLECTED, table

        self.table = table(session.config.stash[COLLECTED].proofs)


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    from proofs import marked_files, write_table

    collector: Any = Collector()
    options = ["--collect-only", "-q", "-p", "no:cacheprovider", "-W", "ignore"]
    said = io.StringIO()
    with redirect_stdout(said):
        status = pytest.main([*options, *map(str, marked_files())], [collector])
    if status != pytest.ExitCode.OK:
        sys.exit(said.getvalue())
    if sys.argv[1:] == ["--print"]:
        print(collector.table)
    else:
        write_table(collector.table)


if __name__ == "__main__":
    main()
