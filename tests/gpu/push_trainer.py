"""A trainer in a separate process. The trainer stops in the middle of a push, so that a test can kill the process at
that point.

Arguments: the worker's address, the transport, the device of the tensors, and the push's timeout in seconds.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from push_worker import trainer_tensors  # noqa: E402  # type: ignore[import-not-found]

from trueroll.rollout import WeightPublisher  # noqa: E402
from trueroll.weight_sync.trainer.transaction import Transaction  # noqa: E402


def main(address: str, transport: Any, device: str, timeout: str) -> None:
    stage = Transaction.stage

    def held(transaction: Transaction, bucket: Any) -> Future[list[Any]]:
        if bucket.index == 1:
            print("held", flush=True)
            time.sleep(3600)
        return stage(transaction, bucket)

    Transaction.stage = held  # type: ignore[method-assign]
    with WeightPublisher(transport, timeout=float(timeout)) as publisher:
        publisher.connect([address])
        publisher.push(trainer_tensors(99, device), 99)


if __name__ == "__main__":
    main(*sys.argv[1:])
