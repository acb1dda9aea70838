"""These tests run verl in an environment of its own. `make test-verl` makes it and passes its Python."""

from __future__ import annotations

import os

collect_ignore_glob = [] if "TRUEROLL_VERL_PYTHON" in os.environ else ["test_*.py"]
