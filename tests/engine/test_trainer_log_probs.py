"""A trainer's aligned model computes the bits of the rollout's log-probs, whatever the trainer's own batches look like.

The prompts of the samples were partly cached, and samples were preempted.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from matrix import thinned
from proofs import proves
from torch import Tensor
from transformers import AutoModelForCausalLM

from tiny import make_tiny_model
from trueroll.engine.engine import Engine
from trueroll.engine.request import SampleOutput
from trueroll.errors import AlignmentError
from trueroll.kernels import training
from trueroll.kernels.autograd import GradientOps
from trueroll.kernels.contract import Rotation
from trueroll.kernels.cpu.library import Library
from trueroll.kernels.selection import select_backend
from trueroll.kernels.specs import NormSpec
from trueroll.kernels.training import TokenStatistics, align, aligned_with, token_log_probs, token_statistics

from .drive import generate, make_engine, run, score, tokens

DTYPES = ["float32", "bfloat16"]
TEMPERATURE = 0.8

Rollout = list[tuple[np.ndarray, SampleOutput]]


def roll_out(
    model: Path,
    lengths: tuple[int, ...] = (150, 64, 40, 5),
    top: int | None = None,
    routes: bool = False,
    **settings: Any,
) -> Rollout:
    """Return (prompt, sample) for groups of three. Some prompts were partly cached, and some samples were preempted."""
    engine = make_engine(model, **settings, num_blocks=5 * len(lengths) + max(lengths) // 8, block_size=8)
    prompts = [np.concatenate((tokens(n), tokens(7, seed=i))) for i, n in enumerate(lengths)]
    run(engine, [generate("warm", tokens(max(lengths)), max_tokens=1)])
    params = dict(n=3, temperature=TEMPERATURE, top_logprobs=top, return_routed_experts=routes)
    requests = [generate(str(i), p, **params, max_tokens=20 + 5 * i, seed=i) for i, p in enumerate(prompts)]
    samples = run(engine, requests)
    assert engine.stats().preemptions > 2, "premise: samples were preempted"
    cached = [(sample.num_cached_tokens, len(prompts[int(id)])) for (id, _), sample in samples.items()]
    assert any(0 < hit < length for hit, length in cached), "premise: prompts were partly cached"
    return [(prompts[int(id)], sample) for (id, _), sample in samples.items()]


def trainer_model(folder: Path, dtype: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))


def packed(model: Any, rollout: Rollout, routes: Tensor | None = None) -> list[Tensor]:
    """Return the log-probs of each sample's tokens, with all samples and their `routes` packed in one row."""
    sequences = [torch.tensor([*prompt, *s.token_ids]).long() for prompt, s in rollout]
    lengths = [len(s) for s in sequences]
    found = token_log_probs(
        model, torch.cat(sequences), lengths=lengths, temperature=TEMPERATURE, routed_experts=routes
    )
    parts = found.detach().split(lengths)
    return [part[len(prompt) :] for part, (prompt, _) in zip(parts, rollout, strict=True)]


def padded(model: Any, rollout: Rollout) -> list[Tensor]:
    """Return the log-probs of each sample's tokens from a typical trainer batch, with prompts padded on the left and
    completions on the right.
    """
    left, right = (max(map(len, part)) for part in ([p for p, _ in rollout], [s.token_ids for _, s in rollout]))
    ids, mask = torch.zeros(2, len(rollout), left + right, dtype=torch.int64)
    completion_mask = torch.zeros_like(mask, dtype=torch.bool)
    for i, (prompt, sample) in enumerate(rollout):
        end = left + len(sample.token_ids)
        ids[i, left - len(prompt) : end] = torch.tensor([*prompt, *sample.token_ids])
        mask[i, left - len(prompt) : end] = 1
        completion_mask[i, left:end] = True
    assert not mask[:, 0].all() and not mask[:, -1].all(), "premise: padding on both sides"
    found = token_log_probs(model, ids, mask, temperature=TEMPERATURE, completion_mask=completion_mask).detach()
    assert found[~completion_mask].eq(0).all()
    return [row[left : left + len(sample.token_ids)] for row, (_, sample) in zip(found, rollout, strict=True)]


def alone(model: Any, rollout: Rollout) -> list[Tensor]:
    """Return the log-probs of each sample's tokens, from one call per sample."""
    return [packed(model, [one])[0] for one in rollout]


BATCHES = (packed, padded, alone)


def count_differences(found: list[Tensor], rollout: Rollout) -> int:
    """Return the number of log-probs that differ in any bit."""
    differences = 0
    for tensor, (_, sample) in zip(found, rollout, strict=True):
        assert sample.logprobs is not None and len(tensor) == len(sample.logprobs) > 0
        differences += int((tensor.numpy().view(np.int32) != sample.logprobs.view(np.int32)).sum())
    return differences


@proves("company", "trainer")
@pytest.mark.parametrize("dtype", DTYPES)
@thinned(lambda any_model, dtype, backend: (backend, dtype) != ("reference", "float32"))
def test_a_trainer_computes_the_bits_of_the_rollout(any_model: Path, dtype: str, backend: str) -> None:
    rollout = roll_out(any_model, dtype=dtype, backend=backend)
    model = trainer_model(any_model, dtype)
    align(model, backend)
    assert {batch.__name__: count_differences(batch(model, rollout), rollout) for batch in BATCHES} == {
        "packed": 0,
        "padded": 0,
        "alone": 0,
    }


@pytest.mark.parametrize("family", ["llama", "qwen3_5_moe"])
def test_a_trainer_computes_the_bits_of_a_rollout_in_as_many_pieces(family: str, backend: str, tmp_path: Path) -> None:
    """No piece of the wide model is empty."""
    name = "intermediate_size" if family == "llama" else "shared_expert_intermediate_size"
    inner: dict[str, Any] = {name: 512}
    folder, found = make_tiny_model(family, tmp_path, **inner), {}
    counts = (1, 2, 4) if family == "llama" else (1, 2)
    rollouts = {count: roll_out(folder, (80, 40, 5), backend=backend, pieces=count) for count in counts}
    for count in counts:
        model = trainer_model(folder, "float32")
        align(model, backend, count)
        found |= {(count, of): count_differences(packed(model, rollout), rollout) for of, rollout in rollouts.items()}
    assert [pair for pair, differences in found.items() if differences == 0] == [(count, count) for count in counts]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_trainer_computes_the_top_logprobs_of_the_rollout(tiny_llama: Path, dtype: str, backend: str) -> None:
    rollout = roll_out(tiny_llama, (80, 40, 5), top=4, dtype=dtype, backend=backend)
    model = trainer_model(tiny_llama, dtype)
    align(model, backend)
    sequences = [torch.from_numpy(np.concatenate((prompt, s.token_ids))).long() for prompt, s in rollout]
    ids, mask = (torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.int64) for _ in range(2))
    for i, sequence in enumerate(sequences):
        ids[i, : len(sequence)], mask[i, : len(sequence)] = sequence, 1
    found = token_statistics(model, ids, mask, temperature=TEMPERATURE, top_logprobs=4)
    log_probs = token_log_probs(model, ids, mask, temperature=TEMPERATURE)
    assert log_probs.requires_grad and not any(column.requires_grad for column in found)
    assert torch.equal(found.logprobs.view(torch.int32), log_probs.detach().view(torch.int32))
    assert found.top_token_ids.shape == found.top_logprobs.shape == (*ids.shape, 4)
    lengths = [len(s) for s in sequences]
    packed = token_statistics(model, torch.cat(sequences), lengths=lengths, temperature=TEMPERATURE, top_logprobs=4)
    for i, (prompt, sample) in enumerate(rollout):
        whole = slice(sum(lengths[:i]), sum(lengths[: i + 1]))
        for columns in ([column[i, : lengths[i]] for column in found], [column[whole] for column in packed]):
            entropy, token_ids, logprobs = (column[len(prompt) :].numpy() for column in columns[1:])
            expected = sample.entropy, sample.top_token_ids, sample.top_logprobs
            for mine, theirs in zip((entropy, token_ids.astype(np.int32), logprobs), expected, strict=True):
                assert theirs is not None and mine.tobytes() == theirs.tobytes()


def test_statistics_have_the_gradient_of_log_probs_on_request(tiny_llama: Path) -> None:
    model, ids = trainer_model(tiny_llama, "float32"), torch.from_numpy(tokens(9)).view(1, 9)
    align(model)
    weight, found = model.model.layers[0].mlp.up_proj.weight, []
    for log_probs in (
        token_log_probs(model, ids, temperature=TEMPERATURE),
        token_statistics(model, ids, temperature=TEMPERATURE, top_logprobs=1, gradient=True),
    ):
        if isinstance(log_probs, TokenStatistics):
            assert [column.requires_grad for column in log_probs] == [True, False, False, False]
            log_probs = log_probs.logprobs
        log_probs.sum().backward()
        found.append((log_probs.detach(), weight.grad))
        weight.grad = None
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True)) and found[0][1].any()
    with torch.no_grad():
        assert not token_statistics(model, ids, top_logprobs=1, gradient=True).logprobs.requires_grad


def test_statistics_that_are_not_requested_are_empty(tiny_llama: Path) -> None:
    model, ids = trainer_model(tiny_llama, "float32"), torch.from_numpy(tokens(9)).view(1, 9)
    align(model)
    chosen = torch.arange(9)[None] % 3 == 2
    found = token_statistics(model, ids, completion_mask=chosen, top_logprobs=2)
    assert (found.entropy > 0).equal(chosen) and not found.top_token_ids[~chosen].any()
    none = token_statistics(model, ids, completion_mask=torch.zeros_like(chosen), top_logprobs=2)
    assert none.top_logprobs.shape == (1, 9, 2) and not any(column.any() for column in none)
    for k in (-1, 513):
        with pytest.raises(AlignmentError, match=f"top_logprobs must be from 0 to 512, .* .got {k}"):
            token_statistics(model, ids, top_logprobs=k)


@proves("company", "trainer", family="qwen3", backend="triton", dtype="bfloat16")
def test_a_trainer_computes_the_bits_of_the_triton_kernels(tmp_path: Path) -> None:
    """The kernels run in the interpreter, so the tokens are few. torch computes the gradients."""
    folder = make_tiny_model("qwen3", tmp_path / "tiny", dtype="bfloat16", num_hidden_layers=1, vocab_size=64)
    engine = make_engine(folder, backend="triton", num_blocks=16, block_size=2)
    prompts = [tokens(3, vocab_size=64), tokens(5, vocab_size=64)]
    requests = [generate(str(i), p, n=2, temperature=TEMPERATURE, max_tokens=3) for i, p in enumerate(prompts)]
    samples = [sample for request in requests for sample in run(engine, [request]).values()]
    assert samples[2].num_cached_tokens == 2, "premise: a prompt was partly cached"
    rollout = list(zip((prompts[0], prompts[0], prompts[1], prompts[1]), samples, strict=True))
    model = trainer_model(folder, "bfloat16")
    align(model, "triton")
    assert count_differences(packed(model, rollout), rollout) == 0
    ids = torch.tensor([*prompts[1], *samples[2].token_ids]).long()
    token_log_probs(model, ids[None], temperature=TEMPERATURE).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    assert all(g is not None and g.isfinite().all() and g.any() for g in gradients)
    masters = trainer_model(folder, "float32")
    align(masters, "triton")
    with torch.autocast("cpu", torch.bfloat16):
        assert count_differences(packed(masters, rollout), rollout) == 0


@pytest.mark.parametrize(("backend", "dtype"), [("cpu", "float32"), ("cpu", "bfloat16"), ("reference", "bfloat16")])
@thinned(lambda dtype, backend: (dtype, backend) == ("bfloat16", "cpu"))
def test_a_trainer_computes_the_bits_of_a_rollout_of_smollm2(smollm2: Path, dtype: str, backend: str) -> None:
    rollout = roll_out(smollm2, (130, 40), dtype=dtype, backend=backend, num_threads=2)
    model = trainer_model(smollm2, dtype)
    align(model, backend)
    assert count_differences(packed(model, rollout), rollout) == 0
    assert count_differences(padded(model, rollout), rollout) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_trainer_computes_the_bits_of_every_instruction_set(
    tiny_llama: Path, native_library: Library, dtype: str
) -> None:
    model = trainer_model(tiny_llama, dtype)
    align(model, "cpu")
    for name in native_library.instruction_sets():
        native_library.choose(name)
        rollout = roll_out(tiny_llama, dtype=dtype, backend="cpu")
        assert count_differences(packed(model, rollout), rollout) == 0, name


def test_master_weights_under_autocast_equal_a_bfloat16_worker(tiny_model: Path) -> None:
    """The float32 master weights have values that bfloat16 cannot represent.

    The worker has the rounded master weights.
    """
    masters = trainer_model(tiny_model, "float32")
    assert any(not torch.equal(p, p.bfloat16().float()) for p in masters.parameters())
    rollout = roll_out(tiny_model, dtype="bfloat16")
    align(masters)
    for batch in BATCHES:
        assert count_differences(batch(masters, rollout), rollout) > 0, "float32 differs"
        with torch.autocast("cpu", torch.bfloat16):
            assert count_differences(batch(masters, rollout), rollout) == 0


@pytest.mark.parametrize("masters", [False, True])
def test_a_float16_checkpoint_is_served_and_trained_as_bfloat16(tmp_path: Path, masters: bool) -> None:
    """The native kernels do not support float16. Trainer and worker round the weights to bfloat16 in the same way."""
    folder = make_tiny_model("llama", tmp_path, dtype="float16")
    assert any(not torch.equal(p, p.bfloat16().half()) for p in trainer_model(folder, "float16").parameters())
    engine = make_engine(folder, dtype="bfloat16")
    assert (engine.info.backend, engine.info.backend_note) == ("cpu", "")
    rollout = roll_out(folder, dtype="bfloat16")
    model = trainer_model(folder, "float32" if masters else "bfloat16")
    align(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=masters):
        assert count_differences(packed(model, rollout), rollout) == 0


def computes_alike(model: Any, engine: Engine) -> bool:
    return aligned_with(model)._asdict().items() <= asdict(engine.info).items()


def test_a_trainer_can_ask_whether_it_computes_like_a_worker(
    tiny_llama: Path, native_library: Library, backend: str
) -> None:
    masters, rounded = trainer_model(tiny_llama, "float32"), trainer_model(tiny_llama, "bfloat16")
    align(masters, backend)
    align(rounded, backend)
    served = make_engine(tiny_llama, dtype="bfloat16", backend=backend)
    assert computes_alike(rounded, served) and not computes_alike(masters, served)
    with torch.autocast("cpu", torch.bfloat16):
        assert computes_alike(masters, served)
    if backend == "cpu":
        native_library.choose("portable")
        assert not computes_alike(rounded, served), "the instruction sets differ"


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
def test_the_default_dtype_of_the_process_changes_no_bit(tmp_path: Path, default: torch.dtype) -> None:
    """A trainer may have set the default dtype. Embeddings are scaled by a number that bfloat16 cannot represent."""
    folder, ids = make_tiny_model("gemma3", tmp_path, hidden_size=96), tokens(40)

    def compute() -> tuple[bytes, bytes]:
        model = trainer_model(folder, "float32")
        align(model)
        found = token_log_probs(model, torch.tensor(ids)[None], temperature=TEMPERATURE)[0, 1:]
        return found.detach().numpy().tobytes(), score(make_engine(folder), ids, temperature=TEMPERATURE).tobytes()

    expected = compute()
    torch.set_default_dtype(default)
    try:
        found = compute()
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == expected and found[0] == found[1]


def test_an_unaligned_trainer_differs(tiny_llama: Path) -> None:
    rollout = roll_out(tiny_llama)
    model = trainer_model(tiny_llama, "float32")
    found = []
    for prompt, sample in rollout:
        ids = torch.tensor([*prompt, *sample.token_ids]).long()
        log_probs = torch.log_softmax(model(ids[None]).logits[0] / TEMPERATURE, -1)
        found.append(log_probs[:-1].gather(1, ids[1:, None])[len(prompt) - 1 :, 0].detach())
    assert count_differences(found, rollout) > 0


def linear_in_halves(ops: Any, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    (left, right), (left_weight, right_weight) = x.chunk(2, 1), weight.to_dense().chunk(2, 1)
    return F.linear(left, left_weight, bias) + F.linear(right, right_weight)


def norm_in_double(ops: Any, x: Tensor, weight: Tensor, norm: NormSpec) -> Tensor:
    return F.rms_norm(x.double(), weight.shape, weight.double(), norm.eps).to(x.dtype)


def rope_by_complex_numbers(ops: Any, x: Tensor, rotation: Rotation, interleaved: bool) -> Tensor:
    turns = torch.complex(*(part[:, None].double() for part in rotation[:2]))
    turned = torch.complex(*x.double().chunk(2, -1)) * turns
    return torch.cat((turned.real, turned.imag), -1).to(x.dtype)


def torch_silu_mul(ops: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return F.silu(gate.double()).to(gate.dtype) * up


def attention_of_later_rounding(ops: Any, q: Tensor, *rest: Any) -> Tensor:
    *others, scale, window, soft_cap, sinks = rest
    return ops.paged_attention(q * (scale * 1.7), *others, 1 / 1.7, window, soft_cap, sinks)


def log_probs_by_torch(ops: Any, hidden: Tensor, weight: Any, wanted: Any, head: Any) -> tuple[Tensor, Tensor, Tensor]:
    scaled = ops.lm_head(hidden, weight).double() / wanted.temperatures[:, None]
    found = scaled.log_softmax(-1).gather(1, wanted.targets[:, None])[:, 0].float()
    return wanted.targets, found, found.isfinite()


BROKEN: dict[str, Callable[..., Any]] = {
    "linear": linear_in_halves,
    "rmsnorm": norm_in_double,
    "rope": rope_by_complex_numbers,
    "gate_mul": torch_silu_mul,
    "paged_attention": attention_of_later_rounding,
    "next_tokens": log_probs_by_torch,
}


@pytest.mark.parametrize("op", BROKEN)
def test_an_op_with_different_rounding_is_found(tiny_llama: Path, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replacement op changes log-probs by less than 1e-3, and the difference is still found."""
    rollout = roll_out(tiny_llama, backend="cpu")
    model = trainer_model(tiny_llama, "float32")
    align(model, "cpu")
    whole = packed(model, rollout)
    assert count_differences(whole, rollout) == 0
    ops = select_backend("cpu", torch.device("cpu"), torch.float32).ops
    broken: Any = types.SimpleNamespace(**{name: getattr(ops, name) for name in dir(ops)})
    setattr(broken, op, lambda *args: BROKEN[op](ops, *args))
    monkeypatch.setattr(training, "ops_of", lambda module, x: GradientOps(broken))
    found = packed(model, rollout)
    assert count_differences(found, rollout) > 0
    assert all(torch.allclose(a, b, rtol=0.0, atol=1e-3) for a, b in zip(found, whole, strict=True)), (
        "the difference is small"
    )
