"""Runs a campaign by hand: `.venv/bin/python -P tests/chaos/run.py --rounds 200`. Exits with 1 on a broken promise."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported, here and in the workers

from chaos.campaign import STRICT, BrokenPromise, Campaign, Numbers, plan  # noqa: E402
from rich.console import Console  # noqa: E402

from tiny import make_tiny_model  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False)

    def tell(numbers: Numbers) -> None:
        counts = f"{numbers.rounds} rounds, {numbers.hit} in time; {dict(numbers.killed)}, told {dict(numbers.told)}"
        console.print(f"{numbers.last}: {counts}")

    rounds, start = plan(arguments.seed, arguments.rounds), time.monotonic()
    half = len(rounds) // 2
    for settings, some in ({}, rounds[half:]), (STRICT, rounds[:half]):
        console.print(f"{len(some)} rounds with {settings or 'defaults'}")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "fleet.json"
            os.environ["TRUEROLL_CHAOS"] = str(file)
            model = make_tiny_model("llama", Path(folder) / "tiny")
            campaign = Campaign(model, file, arguments.seed, **settings)
            try:
                campaign.run(some, tell)
                campaign.close()
            except BrokenPromise as broken:
                console.print(f"FAILED: {broken}", markup=False)
                campaign.fleet.close()
                return 1
    console.print(f"{len(rounds)} rounds in {time.monotonic() - start:.0f} s.")
    console.print("Every promise was kept.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
