"""The limits of test_accuracy.py, on the inputs of that file: a GPU's arithmetic is within the limits, and faulty
kernels are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trueroll.kernels import reference

from . import test_accuracy as accuracy
from .backends import Served
from .tensor_cores import TENSOR_CORES, TensorCore, multiply

DTYPES = [torch.bfloat16, torch.float16]
VOCAB_SIZES = [1001, 49153]


def served(dtype: torch.dtype, lm_head: Callable[[Tensor, Tensor], Tensor]) -> Served:
    ops: Any = SimpleNamespace(new_weight=reference.new_weight, lm_head=lm_head)
    return Served(ops, dtype)


@pytest.mark.parametrize("core", sorted(set(TENSOR_CORES.values())), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n,k", accuracy.PRODUCTS)
def test_products_of_tensor_cores_pass(n: int, k: int, dtype: torch.dtype, core: TensorCore) -> None:
    """The products are summed in one chain, the order with the largest errors."""
    accuracy.test_lm_head(served(dtype, lambda x, weight: multiply(core, x, weight, k)), n, k)


def summed_in_bfloat16(x: Tensor, weight: Tensor) -> Tensor:
    total = torch.zeros(len(x), len(weight), dtype=torch.bfloat16)
    for a, b in zip(x.float().split(16, 1), weight.float().split(16, 1), strict=True):
        total += (a @ b.T).bfloat16()
    return total.float()


WRONG_PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "summed in bfloat16": summed_in_bfloat16,
    "summed in 14 bits": lambda x, weight: multiply(TensorCore(16, 13), x, weight, 2048),
    "rounded to 16 bits": lambda x, weight: (x.double() @ weight.double().T).to(x.dtype).float(),
    "the last column left out": lambda x, weight: x[:, :-1].float() @ weight[:, :-1].float().T,
}


@pytest.mark.parametrize("wrong", WRONG_PRODUCTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n,k", accuracy.PRODUCTS)
def test_wrong_products_are_refused(n: int, k: int, dtype: torch.dtype, wrong: str) -> None:
    with pytest.raises(AssertionError):
        accuracy.test_lm_head(served(dtype, WRONG_PRODUCTS[wrong]), n, k)


def log_probs_of_a_gpu(logits: Tensor, ids: Tensor) -> Tensor:
    """Compute log-probs with the least accurate fast exponentials and logarithms that CUDA allows, all wrong in one
    direction.
    """
    distance = logits - logits.amax(-1, keepdim=True)
    weights = torch.exp2(distance * torch.tensor(math.log2(math.e))) * (1 + 2.0**-22)
    logarithm = weights.sum(-1).log2() * (1 + 2.0**-22) * torch.tensor(math.log(2))
    return distance.gather(1, ids[:, None])[:, 0] - logarithm


def log_probs_with(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return log-probs in float64, with a change of the exponentials."""

    def compute(logits: Tensor, ids: Tensor) -> Tensor:
        distance = logits.double() - logits.double().amax(-1, keepdim=True)
        total = change(distance.exp()).double()
        return (distance.gather(1, ids[:, None])[:, 0] - total.log()).float()

    return compute


WRONG_LOG_PROBS = {
    "the last token left out": log_probs_with(lambda weights: weights[:, :-1].sum(-1)),
    "summed in bfloat16": log_probs_with(lambda weights: weights.bfloat16().sum(-1)),
    "a sum rounded to float16": log_probs_with(lambda weights: weights.sum(-1).half()),
}


def with_log_probs(compute: Callable[[Tensor, Tensor], Tensor]) -> Any:
    return SimpleNamespace(log_probs=compute)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("spread", [1, 8])
def test_log_probs_of_a_gpu_pass(vocab_size: int, spread: int) -> None:
    accuracy.test_log_probs(with_log_probs(log_probs_of_a_gpu), vocab_size, spread)


@pytest.mark.parametrize("wrong", WRONG_LOG_PROBS)
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_wrong_log_probs_are_refused(vocab_size: int, wrong: str) -> None:
    with pytest.raises(AssertionError):
        accuracy.test_log_probs(with_log_probs(WRONG_LOG_PROBS[wrong]), vocab_size, 1)
