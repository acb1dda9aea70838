"""Tests that run verl in a separate virtual environment. `make test-verl` makes this environment and passes the path of
its Python.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if "TRUEROLL_VERL_PYTHON" in os.environ else ["test_*.py"]
