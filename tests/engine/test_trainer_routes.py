"""Mixtures of experts: an aligned trainer computes the bits of the rollout's log-probs, and chooses the rollout's
routes.

An unaligned model comes closer to the rollout's log-probs if it replays the routes.
"""

from __future__ import annotations

import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import thinned
from proofs import proves
from torch import Tensor

from tiny import make_tiny_model
from trueroll.engine.models.loader import read_config
from trueroll.kernels import reference, training
from trueroll.kernels.autograd import GradientOps
from trueroll.kernels.contract import ExpertsWeights
from trueroll.kernels.families import describe
from trueroll.kernels.specs import ExpertsSpec
from trueroll.kernels.training import align, replayed, token_experts, token_log_probs

from .drive import generate, make_engine, run, tokens
from .test_trainer_log_probs import (
    BATCHES,
    DTYPES,
    TEMPERATURE,
    Rollout,
    count_differences,
    packed,
    roll_out,
    trainer_model,
)

LENGTHS = (80, 40, 5)


def sequences(rollout: Rollout) -> list[Tensor]:
    return [torch.tensor([*prompt, *sample.token_ids]).long() for prompt, sample in rollout]


def recorded(rollout: Rollout) -> Tensor:
    """Return the routes of all samples in one row, with a row of zeros for the last token of each sample."""
    parts = [torch.from_numpy(sample.routed_experts) for _, sample in rollout if sample.routed_experts is not None]
    return torch.cat([torch.cat((part, torch.zeros_like(part[:1]))) for part in parts])


@proves("company", "trainer")
@pytest.mark.parametrize("dtype", DTYPES)
@thinned(lambda mixture_model, dtype, backend: backend == "cpu" or mixture_model == "qwen3_moe")
def test_a_trainer_computes_the_bits_and_finds_the_routes_of_the_rollout(
    mixture_model: Path, dtype: str, backend: str
) -> None:
    is_hybrid = bool(describe(read_config(mixture_model)).recurrent)
    states = dict(state_interval=16) if is_hybrid else {}
    rollout = roll_out(mixture_model, LENGTHS, routes=True, dtype=dtype, backend=backend, **states)
    model = trainer_model(mixture_model, dtype)
    align(model, backend)
    assert [count_differences(batch(model, rollout), rollout) for batch in BATCHES] == [0, 0, 0]
    rows, routes = sequences(rollout), recorded(rollout)
    lengths = [len(row) for row in rows]
    assert count_differences(packed(model, rollout, routes), rollout) == 0
    found = token_experts(model, torch.cat(rows), lengths=lengths)
    assert len(found.unique()) == 8, "premise: all experts are used"
    for ours, theirs in zip(found.split(lengths), routes.int().split(lengths), strict=True):
        assert ours[:-1].equal(theirs[:-1])


def with_near_ties(folder: Path) -> Path:
    """Return a mixture with pairs of experts.

    The two experts of a pair have nearly equal scores for any token, so often only one of the two is chosen.
    """
    model = trainer_model(make_tiny_model("qwen3_moe", folder, dtype="bfloat16"), "bfloat16")
    for layer in model.model.layers:
        router = layer.mlp.gate.weight.data
        router[1::2] = router[::2] + 0.004 * router[1::2]
    model.save_pretrained(folder)
    return folder


def plain_log_probs(model: Any, rollout: Rollout, replay: bool) -> tuple[list[Tensor], Tensor]:
    """Return the log-probs of each sample's tokens by a plain model, and its routes.

    `replay`: use the rollout's routes instead of the model's own. Routes: [tokens, layers, top_k] of all samples,
    without the last token of each sample.
    """
    log_probs, chosen, routes = [], [], recorded(rollout)
    rows = sequences(rollout)
    for (prompt, _), row, route in zip(rollout, rows, routes.split([len(row) for row in rows]), strict=True):
        seen: list[Tensor] = []
        hooks = [
            layer.mlp.gate.register_forward_hook(lambda router, args, out, seen=seen: seen.append(out[2]))
            for layer in model.model.layers
        ]
        with replayed(model, route[None]) if replay else nullcontext():
            found = torch.log_softmax(model(row[None]).logits[0].float() / TEMPERATURE, -1)
        for hook in hooks:
            hook.remove()
        log_probs.append(found[:-1].gather(1, row[1:, None])[len(prompt) - 1 :, 0].detach())
        chosen.append(torch.stack(seen, 1)[:-1].sort(-1).values)
    return log_probs, torch.cat(chosen)


def largest_gap(found: list[Tensor], rollout: Rollout) -> float:
    return max(
        (ours - torch.tensor(sample.logprobs)).abs().max().item()
        for ours, (_, sample) in zip(found, rollout, strict=True)
    )


def test_replaying_routes_lowers_the_mismatch_of_a_plain_trainer(tmp_path: Path) -> None:
    folder = with_near_ties(tmp_path)
    rollout = roll_out(folder, LENGTHS, routes=True, dtype="bfloat16", backend="reference")
    model = trainer_model(folder, "bfloat16")
    own, chosen = plain_log_probs(model, rollout, replay=False)
    lengths = [len(row) for row in sequences(rollout)]
    routes = torch.cat([part[:-1] for part in recorded(rollout).split(lengths)])
    flipped = (chosen != routes).any(-1).float().mean()
    assert 0.0 < flipped < 0.5, "premise: some routers chose other experts"
    found, _ = plain_log_probs(model, rollout, replay=True)
    assert largest_gap(found, rollout) < largest_gap(own, rollout) / 4
    align(model, "reference")
    assert count_differences(packed(model, rollout), rollout) == 0, "an aligned model has no mismatch"


def experts_in_descending_order(
    x: Tensor, spec: ExpertsSpec, weights: ExpertsWeights, experts: Tensor, gates: Tensor, *shared: Tensor | None
) -> Tensor:
    out = torch.zeros_like(x)
    for place in reversed(range(spec.top_k)):
        one = experts[:, place : place + 1], gates[:, place : place + 1]
        out = out + reference.experts(x, spec, weights, *one)
    return out


def test_another_order_of_experts_is_found(mixture_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = mixture_models["qwen3_moe"]
    rollout, model = roll_out(folder, LENGTHS, backend="reference"), trainer_model(folder, "float32")
    align(model, "reference")
    whole = packed(model, rollout)
    assert count_differences(whole, rollout) == 0
    broken: Any = types.SimpleNamespace(**vars(reference) | dict(experts=experts_in_descending_order))
    monkeypatch.setattr(training, "ops_of", lambda module, x: GradientOps(broken))
    found = packed(model, rollout)
    assert count_differences(found, rollout) > 0
    assert all(torch.allclose(a, b, rtol=0.0, atol=1e-3) for a, b in zip(found, whole, strict=True)), (
        "the difference is small"
    )


def test_a_trainer_of_a_mixture_computes_the_bits_of_the_triton_kernels(tmp_path: Path) -> None:
    """The kernels run in the interpreter, so the tokens are few. torch computes the gradients."""
    sizes = dict(num_hidden_layers=1, hidden_size=32, vocab_size=64, num_experts=4, num_experts_per_tok=2)
    folder = make_tiny_model("qwen3_moe", tmp_path, dtype="bfloat16", **sizes)
    engine = make_engine(folder, backend="triton", num_blocks=16, block_size=2)
    prompt = tokens(3, vocab_size=64)
    request = generate("a", prompt, temperature=TEMPERATURE, max_tokens=3, return_routed_experts=True)
    rollout = [(prompt, run(engine, [request])["a", 0])]
    model, row = trainer_model(folder, "bfloat16"), sequences(rollout)[0]
    align(model, "triton")
    found = token_log_probs(model, row[None], temperature=TEMPERATURE)
    assert count_differences([found[0, 3:].detach()], rollout) == 0
    assert token_experts(model, row[None])[0, :-1].equal(recorded(rollout)[:-1].int())
    found.sum().backward()
    gradients = [p.grad for p in model.parameters()]
    assert all(g is not None and g.isfinite().all() and g.any() for g in gradients)
