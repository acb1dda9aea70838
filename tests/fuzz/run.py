"""Runs the fuzzer by hand: `.venv/bin/python -P tests/fuzz/run.py --messages 1000000`. Exits with 1 after a violation.

`--http` attacks a front end of the worker instead. `--images` sends only messages about images. `--seed` and
`--first-round` repeat a failed round. `--replay` sends the messages that were saved by a failed campaign.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported, here and in the worker
os.environ.setdefault("TQDM_DISABLE", "1")  # the fuzzer shows its own progress bar

from fuzz.campaign import Numbers, Plan, Size  # noqa: E402
from fuzz.target import tiny_campaign  # noqa: E402
from fuzz.violation import Violation, read_trace  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: E402
from rich.table import Table  # noqa: E402


def main() -> int:
    arguments = _arguments()
    warm_up = max(Plan.warm_up, arguments.messages // 50)
    limits = arguments.messages, arguments.seed, arguments.first_round, arguments.patience, warm_up
    plan = Plan(*limits, http=arguments.http, images=arguments.images)
    console = Console()
    numbers = Numbers()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("messages", total=plan.messages)
            with tiny_campaign(plan, lambda now: progress.update(task, completed=now.messages)) as campaign:
                numbers = campaign.numbers
                campaign.replay(read_trace(arguments.replay)) if arguments.replay else campaign.run()
    except Violation as violation:
        _print(console, numbers)
        console.print(f"FAILED: {violation}", markup=False, highlight=False, soft_wrap=True)
        return 1
    _print(console, numbers)
    console.print("Every promise was kept.")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first-round", type=int, default=0)
    parser.add_argument("--patience", type=float, default=Plan.patience, help="limit of any wait, in seconds")
    parser.add_argument("--http", action="store_true", help="attack a front end before the worker")
    parser.add_argument("--images", action="store_true", help="send only messages about images")
    parser.add_argument("--replay", type=Path, help="a file that a failed run has saved")
    return parser.parse_args()


def _print(console: Console, numbers: Numbers) -> None:
    table = Table(show_header=False)
    rate = numbers.messages / max(numbers.seconds, 1e-9)
    for name, value in {
        "messages": f"{numbers.messages:,} in {numbers.seconds:.0f} s, {rate:,.0f} a second",
        "of which": _listed(numbers.sent),
        "replies": _listed(numbers.replies),
        "images": _listed(numbers.images),
        "broken connections": f"{numbers.streams:,} by hand, {numbers.reconnects:,} of clients that came back",
        "good requests": f"{numbers.good_requests:,} with {numbers.good_tokens:,} tokens, every bit compared; "
        f"{numbers.good_refused:,} sent again, because the queue was full",
        "of which with images": f"{numbers.good_with_images:,}, with {numbers.good_parts:,} parts of images sent; "
        f"{numbers.good_late:,} sent again, because this machine had stalled the client",
        "preemptions": f"{numbers.preemptions:,}",
        "weights pushed": f"{numbers.pushes:,} times by the operator, because the attack had damaged them",
        "longest wait for health": f"{numbers.longest_wait:.2f} s",
        "after the warm-up": _size(numbers.before),
        "at the end": _size(numbers.after),
        "front end after the warm-up": _size(numbers.front_before),
        "front end at the end": _size(numbers.front_after),
    }.items():
        table.add_row(name, value)
    console.print(table)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.most_common())


def _size(size: Size | None) -> str:
    if size is None:
        return "not measured"
    return f"{size.threads} threads, {size.descriptors} descriptors, {size.rss / 2**20:.1f} MiB resident"


if __name__ == "__main__":
    sys.exit(main())
