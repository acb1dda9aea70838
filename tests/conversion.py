"""Converts the embedded model in a separate process and keeps the process's output for a test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CONVERSION_LOG = "conversion.log"
"""File in the cache with the output of the process. Absent if another process made the folder."""


def convert_smollm2(cache: Path) -> None:
    code = "from trueroll.engine.models.smollm2 import smollm2_folder; print(smollm2_folder())"
    environment = os.environ | {"TRUEROLL_CACHE": str(cache)}
    with open(cache / CONVERSION_LOG, "w") as log:
        subprocess.run([sys.executable, "-P", "-c", code], env=environment, stdout=log, stderr=log, check=True)
