"""The campaign by hand: `.venv/bin/python -P tests/chaos/run.py --rounds 200`. Exits with 1 if a promise was broken."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported, here and in the workers

from chaos.campaign import BrokenPromise, Campaign, Numbers  # noqa: E402
from rich.console import Console  # noqa: E402

from tiny import make_tiny_model  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transport", choices=("shared", "collective", "disk"), default="shared")
    arguments = parser.parse_args()
    console = Console()

    def tell(numbers: Numbers) -> None:
        console.print(
            f"{numbers.rounds} rounds, {numbers.hit} in the middle of something; killed {dict(numbers.killed)}"
        )

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fleet.json"
        os.environ["TRUEROLL_CHAOS"] = str(file)
        campaign = Campaign(make_tiny_model("llama", Path(folder) / "tiny"), file, arguments.seed, arguments.transport)
        try:
            campaign.run(arguments.rounds, tell)
            campaign.close()
        except BrokenPromise as broken:
            console.print(f"FAILED: {broken}", markup=False, highlight=False, soft_wrap=True)
            campaign.fleet.close()
            return 1
    console.print("Every promise was kept.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
