"""Products on a GPU have the bits that `tests/kernels/tensor_cores.py` computes: K in ascending order, in its pieces.

Equal rows in all tiles would not prove this order. If a product differs, the failure names a candidate tensor core that
would explain the difference, if there is one.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trueroll.kernels.contract import Backend
from trueroll.kernels.triton import products

from ..kernels.tensor_cores import TENSOR_CORES, TensorCore, check_product, multiply
from .moved import DEVICE, random, same

pytestmark = pytest.mark.usefixtures("gpu")
DTYPES = [torch.bfloat16, torch.float16]
COUNTS = (1, 16, 17, 33, 65, 128, 129, 280, 300, 384, 400, 1024)
ROWS = (0, 1, 15, 16, 32, 64, 127, 128, 200, 279, 299, 383, 399, 1023)  # the rows that are compared
# Weights: the layers of Qwen2.5-7B, tails of K that do not fill a step of 16 or a step of a tile (with K whole and in
# pieces), and values of K for which elements are loaded one by one.
SHAPES = [
    (3584, 3584),
    (512, 3584),
    (3584, 18944),
    (2 * 18944, 3584),
    (700, 584),
    (1024, 3592),
    (528, 130),
    (2048, 1537),
]


def piece_of(weight: Tensor) -> int:
    """Return the number of columns in a piece of the weight."""
    return products.factor_of(weight).pieces[0].length


@pytest.fixture
def core(kernels: Backend) -> TensorCore:
    major, minor = torch.cuda.get_device_capability()
    if major not in TENSOR_CORES:
        pytest.skip(f"needs tensor cores with known arithmetic (sm_80, sm_90, sm_100), found sm_{major}{minor}")
    return TENSOR_CORES[major]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n,k", SHAPES)
def test_products_have_the_bits_of_the_model(
    kernels: Backend, core: TensorCore, n: int, k: int, dtype: torch.dtype
) -> None:
    x, weight = random(max(COUNTS), k, dtype=dtype), random(n, k, dtype=dtype, scale=k**-0.5, seed=1)
    features = torch.arange(0, n, n // 64 | 1, device=DEVICE)  # an odd stride covers every place in an instruction
    compared, piece = weight[features], piece_of(weight)
    assert not same(multiply(core, x[:16].flip(1), compared.flip(1), piece), multiply(core, x[:16], compared, piece)), (
        "premise: the order of K changes the bits"
    )
    for count in COUNTS:
        rows = torch.tensor([row for row in (*ROWS, count - 1) if row < count], device=DEVICE)
        logits = kernels.lm_head(x[:count], weight)
        check_product(core, logits[rows][:, features], x[rows], compared, piece)
        assert same(kernels.linear(x[:count], weight), logits.to(dtype)), f"{count} rows, rounded"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n,k", SHAPES)
def test_gate_and_up_have_the_bits_of_their_products(kernels: Backend, n: int, k: int, dtype: torch.dtype) -> None:
    """Compare with separate products, which the previous test compares with the model."""
    x, weight = random(max(COUNTS), k, dtype=dtype), random(n, k, dtype=dtype, scale=k**-0.5, seed=1)
    for part in (x[:count] for count in COUNTS):
        gate, up = (kernels.linear(part, half) for half in weight.chunk(2))
        expected = kernels.gate_mul(gate, up, "silu")
        assert same(kernels.gate_up(part, *weight.chunk(2), activation="silu"), expected), f"{len(part)} rows"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_at_the_ends_of_a_dtype_have_the_bits_of_the_model(
    kernels: Backend, core: TensorCore, dtype: torch.dtype
) -> None:
    x, weight = (side.to(DEVICE) for side in numbers_at_the_ends(dtype))
    found = kernels.lm_head(x, weight)
    for row in range(len(x)):
        check_product(core, found[row : row + 1], x[row : row + 1], weight, piece_of(weight))


def numbers_at_the_ends(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x [7, 40] and a weight [64, 40]. Each row of x has one kind of numbers: zeros, subnormals, all magnitudes,
    cancelling numbers, numbers near overflow, inf, and NaN.
    """
    info, generator = torch.finfo(dtype), torch.Generator().manual_seed(0)
    x, weight, sizes = (torch.randn(n, 40, generator=generator) for n in (7, 64, 1))
    weight[:32, 1::2], weight[0, 3] = weight[:32, ::2], 0.0
    x[0], x[1] = 0 * x[0], x[1] * info.tiny / 8
    x[2] *= torch.exp2(5 * sizes[0])
    x[3, 1::2] = -x[3, ::2]
    x[4] = info.max / 2048
    x[5, 3], x[5, 30], x[6, 39] = torch.inf, torch.inf, torch.nan
    return x.to(dtype), (weight * 1024).to(dtype)
