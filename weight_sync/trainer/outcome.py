"""How a push ended, on every rank of the trainer.

Rank 0 pushes, takes part in the gathers that are left, and tells the others in one word; they take part in the gathers,
and return or raise the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch

from trueroll.errors import ConfigError, PushError, TruerollError

from .trainer_tensors import WORD_BYTES, Tensors, TrainerTensors

MOST_TOLD = 40


@dataclass(frozen=True)
class PushResult:
    """What a push took. `num_bytes`: sent to each worker. `seconds`: by phase. `pause_seconds`: the longest that a
    worker's engine made no step because of the commit. `is_sparse`: only what changed was sent. `left_out`: the
    addresses of workers that were lost, and that it went on without; ranks of the trainer other than 0 are told of
    `MOST_TOLD` at most.
    """

    version: int
    push_id: str
    num_bytes: int
    total_seconds: float
    seconds: dict[str, float]
    pause_seconds: float
    is_sparse: bool
    left_out: list[str] = field(default_factory=list)


def push_on_all_ranks(
    tensors: Tensors, has_workers: bool, push: Callable[[TrainerTensors], PushResult | None]
) -> PushResult | None:
    """What `push` returns or raises, on rank 0 and on the ranks that only take part in gathers, which is those without
    workers of their own where the tensors are sharded. None: nobody needed it.
    """
    with torch.no_grad():
        from_trainer = TrainerTensors(tensors)
        if from_trainer.are_pushed_by_another_rank(has_workers):
            return _follow(from_trainer)
        return _lead(from_trainer, push)


def _lead(tensors: TrainerTensors, push: Callable[[TrainerTensors], PushResult | None]) -> PushResult | None:
    """Push, take part in the gathers that are left, and tell the other ranks how it ended."""
    try:
        result = push(tensors)
    except Exception as error:
        tensors.gather_rest()
        if tensors.were_gathered and not tensors.is_broken:
            tensors.tell(_failure_word(error))
        raise
    if result is None:
        tensors.gather_rest()
    if tensors.were_gathered:
        tensors.tell(_result_word(result))
    return result


def _follow(tensors: TrainerTensors) -> PushResult | None:
    """Take part in the gathers, and learn from rank 0 how the push ended."""
    tensors.gather_rest()
    if not tensors.were_gathered:
        raise ConfigError("push: expected workers, or sharded tensors, on a rank other than 0; push from rank 0 alone")
    word = json.loads(tensors.hear())
    if "error" in word:
        raise PushError(f"on rank 0 of the trainer: {word['error']}")
    return word["result"] and PushResult(**word["result"])


def _result_word(result: PushResult | None) -> bytes:
    fields = result and asdict(result) | {"left_out": result.left_out[:MOST_TOLD]}
    return json.dumps({"result": fields}, ensure_ascii=False).encode()


def _failure_word(error: Exception) -> bytes:
    text = str(error) if isinstance(error, TruerollError) else f"{type(error).__name__}: {error}"
    return json.dumps({"error": text[: WORD_BYTES // 4 - 16]}, ensure_ascii=False).encode()[:WORD_BYTES]
