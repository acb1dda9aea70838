"""The invariance contract of `kernels/ops.py`, bit by bit: every op, every dtype, every way of sharing a call."""

import numpy as np
import pytest
import torch

from trueroll.kernels.ops import KV_SPLIT, AttentionBatch, select_backend

ops = select_backend("reference", torch.device("cpu"))[1]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = 70
BATCHES = [[0], [3], [69], list(range(2)), list(range(5, 12)), list(range(31)), list(range(33)), list(range(1, 66))]


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equality of bits: distinguishes zeros by sign and takes NaN for equal to itself."""
    assert left.dtype == right.dtype and left.shape == right.shape
    as_bytes = [x.contiguous().view(-1).view(torch.uint8).numpy() for x in (left, right)]
    return np.array_equal(*as_bytes)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear(n: int, k: int, bias: bool, dtype: torch.dtype):
    weight = randn(n, k, dtype=dtype, seed=1)
    b = randn(n, dtype=dtype, seed=2) if bias else None
    return (lambda x: ops.linear(x, weight, b)), (randn(ROWS, k, dtype=dtype),)


def rmsnorm(h: int, dtype: torch.dtype):
    return (lambda x: ops.rmsnorm(x, randn(h, dtype=dtype, seed=1), 1e-6)), (randn(ROWS, h, dtype=dtype),)


def head_norm(dtype: torch.dtype):
    return (lambda x: ops.rmsnorm(x, randn(80, dtype=dtype, seed=1), 1e-6)), (randn(ROWS, 5, 80, dtype=dtype),)


def add_rmsnorm(dtype: torch.dtype):
    rows = (randn(ROWS, 577, dtype=dtype), randn(ROWS, 577, dtype=dtype, seed=3))
    return (lambda x, r: torch.cat(ops.add_rmsnorm(x, r, randn(577, dtype=dtype, seed=1), 1e-6), -1)), rows


def rope(dtype: torch.dtype):
    inv_freq = 10000.0 ** (-torch.arange(0, 80, 2) / 80)
    rows = (randn(ROWS, 3, 80, dtype=dtype), torch.arange(ROWS) * 977)
    return (lambda x, positions: ops.rope(x, positions, inv_freq, 1.2)), rows


def silu_mul(i: int, dtype: torch.dtype):
    return ops.silu_mul, (randn(ROWS, 2 * i, dtype=dtype) * 4,)


def lm_head(dtype: torch.dtype):
    return (lambda x: ops.lm_head(x, randn(1001, 96, dtype=dtype, seed=1))), (randn(ROWS, 96, dtype=dtype),)


def filter_logits():
    # Rounded, so that rows hold many ties.
    rows = (
        (randn(ROWS, 1001) * 8).round() / 4,
        torch.tensor([-1, 1, 40] * ROWS)[:ROWS],
        torch.tensor([1.0, 0.9, 0.3, 1e-9] * ROWS)[:ROWS],
        torch.tensor([0.0, 0.05] * ROWS)[:ROWS],
    )
    return ops.filter_logits, rows


def sample(v: int):
    return ops.sample, (randn(ROWS, v), torch.arange(ROWS) * 2**57 - 5, torch.arange(ROWS) * 2**28)


ROW_OPS = {
    **{
        f"linear {n}x{k}{' bias' if bias else ''} {dtype}": linear(n, k, bias, dtype)
        for n, k in ((576, 576), (960, 576), (576, 1536), (96, 64), (1, 7), (513, 130))
        for bias in (False, True)
        for dtype in DTYPES
    },
    **{f"rmsnorm {h} {dtype}": rmsnorm(h, dtype) for h in (16, 576, 1001, 8192) for dtype in DTYPES},
    **{f"head norm {dtype}": head_norm(dtype) for dtype in DTYPES},
    **{f"add_rmsnorm {dtype}": add_rmsnorm(dtype) for dtype in DTYPES},
    **{f"rope {dtype}": rope(dtype) for dtype in DTYPES},
    **{f"silu_mul {i} {dtype}": silu_mul(i, dtype) for i in (7, 128, 1001) for dtype in DTYPES},
    **{f"lm_head {dtype}": lm_head(dtype) for dtype in DTYPES},
    **{f"log_softmax {v}": (ops.log_softmax, (randn(ROWS, v) * 5,)) for v in (17, 512, 49152)},
    **{f"sample {v}": sample(v) for v in (1, 17, 1001, 49152)},
    "filter_logits": filter_logits(),
    "embedding": (lambda ids: ops.embedding(ids, randn(ROWS, 64, seed=1)), (torch.arange(ROWS) % 13,)),
}


@pytest.mark.parametrize("name", ROW_OPS)
def test_a_row_does_not_depend_on_its_company(name: str) -> None:
    op, rows = ROW_OPS[name]
    together = op(*rows)
    for batch in BATCHES:
        assert same_bits(op(*(x[batch] for x in rows)), together[batch]), f"rows {batch[0]} to {batch[-1]} alone"
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(order, torch.arange(ROWS))
    assert same_bits(op(*(x[order] for x in rows)), together[order]), "rows in another order"


@pytest.mark.parametrize("name", ROW_OPS)
def test_a_row_does_not_depend_on_threads_or_alignment(name: str, two_threads: None) -> None:
    op, rows = ROW_OPS[name]
    expected = op(*rows)
    torch.set_num_threads(1)
    assert same_bits(op(*rows), expected), "one thread"
    shifted = tuple(torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape) for x in rows)
    assert shifted[0].data_ptr() % 64 != rows[0].data_ptr() % 64
    assert same_bits(op(*shifted), expected), "another place in memory"


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Paged:
    """Sequences of given lengths in a paged cache whose unused places hold NaN, and the queries of all their tokens."""

    def __init__(self, lens, heads=6, kv_heads=2, size=64, block_size=16, dtype=torch.float32, seed=0):
        self.lens, self.size = lens, size
        tables = [-(-n // block_size) for n in lens]
        num_blocks = sum(tables) + 3
        shape = (num_blocks, block_size, kv_heads, size)
        self.k_cache, self.v_cache = (torch.full(shape, torch.nan, dtype=dtype) for _ in "kv")
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
        self.tables = torch.zeros(len(lens), max(tables), dtype=torch.int64)
        self.q = []
        for i, n in enumerate(lens):
            blocks = torch.tensor([order.pop() for _ in range(tables[i])])
            self.tables[i, : len(blocks)] = blocks
            tokens = torch.arange(n)
            slots = blocks[tokens // block_size] * block_size + tokens % block_size
            k, v = (randn(n, kv_heads, size, dtype=dtype, seed=100 * i + j) for j in (1, 2))
            ops.write_kv(k, v, self.k_cache, self.v_cache, slots)
            self.q.append(randn(n, heads, size, dtype=dtype, seed=100 * i))

    def attend(self, chunks):
        """The attention of chunks (sequence, start, end), computed in one call; one tensor for each chunk."""
        sizes = [end - start for _, start, end in chunks]
        batch = AttentionBatch(
            query_starts=[sum(sizes[:i]) for i in range(len(sizes) + 1)],
            context_lens=[end for _, _, end in chunks],
            block_tables=self.tables[[i for i, _, _ in chunks]],
        )
        q = torch.cat([self.q[i][start:end] for i, start, end in chunks])
        return ops.paged_attention(q, self.k_cache, self.v_cache, batch, self.size**-0.5).split(sizes)

    def whole(self, i):
        return self.attend([(i, 0, self.lens[i])])[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads,kv_heads,size", [(6, 2, 64), (4, 4, 80), (9, 1, 16), (8, 1, 128), (3, 3, 96)])
def test_attention_does_not_depend_on_chunks_or_company(heads, kv_heads, size, dtype) -> None:
    lens = [1, 5, KV_SPLIT, KV_SPLIT + 1, 300]
    paged = Paged(lens, heads, kv_heads, size, dtype=dtype)
    alone = [paged.whole(i) for i in range(len(lens))]
    assert all(x.isfinite().all() for x in alone)
    everyone = paged.attend([(i, 0, n) for i, n in enumerate(lens)])
    assert all(same_bits(a, b) for a, b in zip(alone, everyone, strict=True))
    for step in (1, 7, 64):
        chunks = [paged.attend([(4, start, min(start + step, 300))])[0] for start in range(0, 300, step)]
        assert same_bits(torch.cat(chunks), alone[4]), f"chunks of {step}"
    mixed = [(4, 290, 297), (3, 128, 129), (2, 127, 128), (1, 0, 5), (0, 0, 1), (4, 299, 300)]
    for (i, start, end), out in zip(mixed, paged.attend(mixed), strict=True):
        assert same_bits(out, alone[i][start:end])


@pytest.mark.parametrize("block_size", [1, 8, 24, 64, 512])
def test_attention_does_not_depend_on_block_size(block_size: int, two_threads: None) -> None:
    expected = Paged([300, 40]).whole(0)
    paged = Paged([300, 40], block_size=block_size, seed=1)
    assert same_bits(paged.whole(0), expected)
    torch.set_num_threads(1)
    assert same_bits(paged.whole(0), expected)


def test_attention_never_reads_what_others_left_behind() -> None:
    paged = Paged([300])
    assert paged.k_cache.isnan().any(), "the unused places hold NaN"
    assert paged.whole(0).isfinite().all()


def test_the_contract_tests_can_fail() -> None:
    """A linear whose order of accumulation follows the number of rows is caught."""

    def fickle(x: torch.Tensor) -> torch.Tensor:
        weight = randn(64, 576, seed=1)
        if len(x) <= 8:
            return ops.linear(x, weight)
        return ops.linear(x[:, :288], weight[:, :288]) + ops.linear(x[:, 288:], weight[:, 288:])

    rows = randn(ROWS, 576)
    assert not same_bits(fickle(rows[:1]), fickle(rows)[:1])
