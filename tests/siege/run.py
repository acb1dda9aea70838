"""Runs the siege by hand: `.venv/bin/python -P tests/siege/run.py --seconds 600`. Exits with 1 on a broken promise.

The siege starts a worker and a front end. Good requests are measured alone, under attack, and alone again. The report
gives the ratio of the request rates, the longest response time of `/health`, and how the attacks ended.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from siege.attacks import Target  # noqa: E402
from siege.siege import KEY, Held, Plan, Seen, Siege, front_end, spread  # noqa: E402

from trueroll.rollout import launch_worker  # noqa: E402

LEAST_RATE = 0.8
MOST_MEMORY = 1.05
MOST_SILENT_MS = 100.0
MOST_SHOWN = 100


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    leaves_one = max(1, (os.cpu_count() or 1) - 1)
    parser.add_argument(
        "--num-threads", type=int, default=leaves_one, help="threads of the worker; one core is left to the front end"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="siege; a fifth more warms up, a tenth runs alone")
    parser.add_argument("--attackers", type=int, default=192)
    parser.add_argument("--good", type=int, default=8)
    parser.add_argument("--pause", type=float, default=1.0)
    parser.add_argument("--patience", type=float, default=30.0)
    parser.add_argument("--scale", type=float, default=1.0)
    arguments = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "front.log"
        worker = launch_worker(arguments.model, device="cpu", num_threads=arguments.num_threads)
        with worker, front_end(worker.address, log) as (port, pid):
            target = Target(port, KEY, arguments.patience, arguments.scale)
            return besiege(console, arguments, target, pid, worker.address, log)


def besiege(console: Console, arguments: argparse.Namespace, target: Target, pid: int, address: str, log: Path) -> int:
    """Run the siege and return the exit status."""

    def siege(seconds: float) -> Siege:
        plan = Plan(seconds, arguments.attackers, arguments.good, arguments.pause)
        return Siege(plan, target, pid, address)

    short = siege(max(10.0, arguments.seconds / 10))
    siege(arguments.seconds / 5).attacked()  # warm-up, in which memory grows once
    before = short.settled()
    first = short.alone()
    attacked = siege(arguments.seconds).attacked()
    left = short.wait_until_idle(before)
    last = short.alone()
    report(console, first, attacked, last, log)
    return judge(console, before, left, attacked.rate / max(first.rate, last.rate), max(attacked.silences) * 1e3)


def report(console: Console, first: Seen, attacked: Seen, last: Seen, log: Path) -> None:
    table = Table("good requests", "a second", "/health, ms: median", "99%", "longest")
    for name, seen in (("alone", first), ("under attack", attacked), ("alone again", last)):
        table.add_row(name, f"{seen.rate:.1f}", *spread(seen.silences))
    console.print(table)
    attacks = Table("attack", "how it ended")
    for name, ended in attacked.ended.items():
        attacks.add_row(name.replace("_", " "), ", ".join(f"{count} {how}" for how, count in sorted(ended.items())))
    console.print(attacks)
    console.print(f"the front end's log has {log.stat().st_size:,} bytes")
    for line, count in Counter(line[:MOST_SHOWN] for line in log.read_text().splitlines()).most_common(5):
        console.print(f"  {count} times: {line}")


def judge(console: Console, before: Held, left: Held, rate: float, silent_ms: float) -> int:
    """Print the verdict and return the exit status: 1 if a promise was broken."""
    memory = left.memory / before.memory
    console.print(f"rate {rate:.2f} of the rate alone; /health silent for at most {silent_ms:.0f} ms")
    console.print(f"memory {memory:.3f} of before; before: {before}; left: {left}")
    broken = [
        text
        for is_kept, text in (
            (rate >= LEAST_RATE, "the rate of good requests"),
            (silent_ms <= MOST_SILENT_MS, "the silence of /health"),
            (memory <= MOST_MEMORY, "memory"),
            (left.has_no_more_than(before), "descriptors and children"),
            (left.open_requests == 0, "open requests"),
        )
        if not is_kept
    ]
    console.print(f"FAILED: {', '.join(broken)}" if broken else "Every promise was kept.")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
