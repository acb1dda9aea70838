"""The experts that an aligned model chooses, routes given to an aligned model, and routes that unaligned models replay.
Another file, tests/engine/test_trainer_routes.py, tests that routes and log-probs equal the rollout's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trueroll.errors import AlignmentError
from trueroll.kernels.training import align, replayed, token_experts, token_log_probs, token_statistics, unalign

from .inputs import same_bits
from .test_training import LENS, gradients, load, loss, other_routes, pad, plain_log_probs, sequences


@pytest.fixture
def mixture(mixture_models: dict[str, Path], backend: str) -> Any:
    """An aligned model of two layers with 3 of 8 experts."""
    return load(mixture_models["qwen3_moe"], backend=backend)


def unread(ids: Tensor, mask: Tensor) -> Tensor:
    """Return the mask of positions that are not read: padding, and the last token of each row."""
    following = torch.cat((mask[:, 1:], torch.zeros_like(mask[:, :1])), 1)
    return (mask & following) == 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int32, torch.int64], ids=str)
def test_replaying_a_models_own_routes_changes_no_bit(mixture_model: Path, backend: str, dtype: torch.dtype) -> None:
    """Routes may come in any order, with any values in rows that are not read."""
    model, (ids, mask) = load(mixture_model, backend=backend), pad(sequences(), left=3)
    own = token_experts(model, ids, mask)
    given = own.flip(-1)
    given[unread(ids, mask)] = 77
    given = given.to(dtype)
    log_probs = token_log_probs(model, ids, mask)
    found = token_log_probs(model, ids, mask, routed_experts=given)
    assert same_bits(found, log_probs)
    if dtype == torch.uint8:
        expected, replayed = gradients(model, log_probs), gradients(model, found)
        assert all(same_bits(replayed[name], expected[name]) for name in expected)


def test_routes_do_not_depend_on_the_batch(mixture_model: Path, backend: str) -> None:
    model, rows = load(mixture_model, backend=backend), sequences()
    ids, mask = pad(rows, left=3)
    padded = token_experts(model, ids, mask)
    packed = token_experts(model, torch.cat(rows).to(torch.int32), lengths=LENS)
    layers, top_k = len(model.model._aligned.spec.experts), model.model._aligned.spec.experts[0].top_k
    assert padded.shape == (*ids.shape, layers, top_k) and padded.dtype == torch.int32
    assert not padded[mask == 0].any() and len(packed.unique()) == 8, "premise: all experts"
    assert (packed[..., 1:] > packed[..., :-1]).all()
    for i, part in enumerate(packed.split(LENS)):
        assert part.equal(padded[i, 3 : 3 + LENS[i]]) and part.equal(token_experts(model, rows[i][None])[0])


def test_given_routes_do_not_depend_on_the_batch(mixture: Any) -> None:
    rows = sequences()
    routes = other_routes(mixture, token_experts(mixture, torch.cat(rows), lengths=LENS))
    packed = token_log_probs(mixture, torch.cat(rows), lengths=LENS, routed_experts=routes)
    assert not same_bits(packed, token_log_probs(mixture, torch.cat(rows), lengths=LENS)), "premise: they are replayed"
    ids, mask = pad(rows, left=3)
    spread = torch.zeros(*ids.shape, *routes.shape[1:], dtype=torch.uint8)
    spread[mask == 1] = routes.to(torch.uint8)
    padded = token_log_probs(mixture, ids, mask, routed_experts=spread)
    statistics = token_statistics(mixture, ids, mask, routed_experts=spread, top_logprobs=2)
    assert same_bits(padded[mask == 1], packed) and same_bits(statistics.logprobs, padded)


def test_given_routes_survive_gradient_checkpointing(mixture: Any) -> None:
    ids, mask = pad(sequences())
    routes = other_routes(mixture, token_experts(mixture, ids, mask))
    whole = token_log_probs(mixture, ids, mask, routed_experts=routes)
    expected = gradients(mixture, whole)
    mixture.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    loss(token_log_probs(mixture, ids, mask, routed_experts=routes)).backward()
    assert all(same_bits(p.grad, expected[name]) for name, p in mixture.named_parameters())


def test_float32_parameters_of_a_mixture_under_autocast(mixture_model: Path, backend: str) -> None:
    """Parameters, routes and gradients match those of the rounded model. The gradients are float32."""
    masters, rounded = (load(mixture_model, dtype, backend) for dtype in (torch.float32, torch.bfloat16))
    ids, mask = pad(sequences())
    with torch.autocast("cpu", torch.bfloat16):
        found, routes = token_log_probs(masters, ids, mask), token_experts(masters, ids, mask)
    expected = token_log_probs(rounded, ids, mask)
    assert same_bits(found, expected) and not same_bits(found, token_log_probs(masters, ids, mask))
    assert routes.equal(token_experts(rounded, ids, mask))
    ours, theirs = gradients(masters, found), gradients(rounded, expected)
    for name in ours.keys() - {"model.embed_tokens.weight"}:
        assert same_bits(ours[name], theirs[name].float()), name


def test_unalign_restores_a_mixture(mixture_model: Path, backend: str) -> None:
    model, (ids, mask) = load(mixture_model), pad(sequences())
    before = model(ids, attention_mask=mask).logits
    align(model, backend)
    aligned = model(ids, attention_mask=mask).logits
    assert not same_bits(aligned, before) and torch.allclose(aligned[mask == 1], before[mask == 1], atol=1e-3)
    unalign(model)
    assert same_bits(model(ids, attention_mask=mask).logits, before)


IDS = torch.arange(3, 23).view(2, 10)
ROUTES = torch.arange(3).expand(2, 10, 2, 3).contiguous()
REFUSED_ROUTES: dict[str, tuple[str, Tensor]] = {
    "a layer too few": (r"\[2, 10, 2, 3\].*got \[2, 10, 1, 3\]", ROUTES[:, :, :1]),
    "an expert too few": (r"\[2, 10, 2, 3\].*got \[2, 10, 2, 2\]", ROUTES[..., :2]),
    "no layer": (r"\[2, 10, 2, 3\].*got \[2, 10, 0, 3\]", ROUTES[:, :, :0]),
    "no expert": (r"\[2, 10, 2, 3\].*got \[2, 10, 2, 0\]", ROUTES[..., :0]),
    "without the last tokens": (r"\[2, 10, 2, 3\].*got \[2, 9, 2, 3\]", ROUTES[:, 1:]),
    "floating-point": ("integers .got torch.float32", ROUTES.float()),
    "bool": ("integers .got torch.bool", ROUTES.bool()),
    "an id too high": ("ids from 0 to 7 .got 8", ROUTES + 6),
    "an id beyond 32 bits": ("ids from 0 to 7 .got 4294967296", ROUTES + 2**32),
    "a negative id": ("ids from 0 to 7 .got -1", ROUTES - 1),
    "an expert twice": (r"not repeat an expert within a row .got \[0, 0, 0\]", ROUTES * 0),
}


@pytest.mark.parametrize("name", REFUSED_ROUTES)
def test_invalid_routes_are_refused(mixture: Any, name: str) -> None:
    message, routes = REFUSED_ROUTES[name]
    with pytest.raises(AlignmentError, match=f"^routed_experts must .*{message}.*; "):
        token_log_probs(mixture, IDS, routed_experts=routes)
    unalign(mixture)
    if routes.shape[:2] == IDS.shape:  # the number of tokens is known from the routes alone
        with pytest.raises(AlignmentError, match=f"^routed_experts must .*{message}.*; "), replayed(mixture, routes):
            pass


def test_a_row_that_is_read_is_checked(mixture: Any) -> None:
    """The routes are zeros, as in padding, in the row of the last token and in one other row."""
    ids, mask = pad(sequences())
    routes = token_experts(mixture, ids, mask)
    routes[0, LENS[0] - 1] = 0
    token_log_probs(mixture, ids, mask, routed_experts=routes)
    routes[0, LENS[0] - 2] = 0
    with pytest.raises(AlignmentError, match="must not repeat an expert within a row"):
        token_log_probs(mixture, ids, mask, routed_experts=routes)


def test_routes_of_a_dense_model_are_refused(tiny_llama: Path) -> None:
    model = load(tiny_llama, backend="reference")
    with pytest.raises(AlignmentError, match="^routed_experts must be None for LlamaForCausalLM.*got .*leave"):
        token_log_probs(model, IDS, routed_experts=ROUTES)
    with pytest.raises(AlignmentError, match="^model must have experts .got LlamaForCausalLM"):
        token_experts(model, IDS)
    unalign(model)
    with (
        pytest.raises(AlignmentError, match="^routed_experts must be None for LlamaForCausalLM"),
        replayed(model, ROUTES),
    ):
        pass


def test_router_logits_are_refused(mixture: Any) -> None:
    with pytest.raises(AlignmentError, match="^output_router_logits: an aligned model does not support"):
        mixture(IDS, output_router_logits=True)


@pytest.mark.parametrize("path", ["mlp.gate", "mlp.experts", "mlp.shared_expert_gate", "mlp.shared_expert.up_proj"])
def test_adapters_of_a_mixture_are_refused(mixture_models: dict[str, Path], path: str) -> None:
    model = load(mixture_models["qwen3_next_moe"])
    adapted = model.model.layers[1].get_submodule(path)
    adapted.__class__ = type("Adapter", (type(adapted),), {})
    with pytest.raises(AlignmentError, match=rf"model.layers.1.{path}.* must .*got Adapter.; merge adapters"):
        align(model)


def chosen_by(model: Any, compute: Callable[[], object]) -> Tensor:
    """Return the experts that a plain model's routers choose while it computes: [layers, N, top_k], ascending."""
    found: list[Tensor] = []
    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    hooks = [router.register_forward_hook(lambda m, args, out: found.append(out[2])) for router in routers]
    compute()
    for hook in hooks:
        hook.remove()
    return torch.stack(found).sort(-1).values


def test_a_plain_model_replays_routes(mixture_model: Path) -> None:
    """The model replays routes that are not its own. In rows without routes, the model chooses the experts. Afterwards
    the model is unchanged.
    """
    model, (ids, mask) = load(mixture_model), pad(sequences(), left=3)
    before = model(ids, attention_mask=mask).logits
    own = chosen_by(model, lambda: model(ids, attention_mask=mask))
    align(model, "reference")
    routes = other_routes(model, token_experts(model, ids, mask))
    expected = token_log_probs(model, ids, mask, routed_experts=routes).detach()
    unalign(model)
    shifted = expected.where(~unread(ids, mask), 0.0)
    with replayed(model, routes, mask):
        replaying = chosen_by(model, lambda: model(ids, attention_mask=mask))
        found = plain_log_probs(model, ids, mask, 1.0)
    is_given = ~unread(ids, mask).flatten()
    given = routes.flatten(0, 1).transpose(0, 1).sort(-1).values
    assert replaying[:, is_given].equal(given[:, is_given].long()) and not own.equal(replaying)
    assert same_bits(model(ids, attention_mask=mask).logits, before)
    assert shifted.any() and torch.allclose(found[:, 4:], expected[:, 4:], atol=1e-3)
    assert not torch.allclose(plain_log_probs(model, ids, mask, 1.0)[:, 4:], expected[:, 4:], atol=0.1)


def test_a_packed_plain_model_replays_routes(mixture_models: dict[str, Path]) -> None:
    model, rows = load(mixture_models["qwen3_moe"], backend="reference"), sequences()[:1]
    routes = other_routes(model, token_experts(model, rows[0], lengths=LENS[:1]))
    expected = token_log_probs(model, rows[0], lengths=LENS[:1], routed_experts=routes).detach()
    unalign(model)
    with replayed(model, routes, lengths=LENS[:1]):
        found = plain_log_probs(model, rows[0][None], torch.ones(1, LENS[0]), 1.0)[0]
    assert torch.allclose(found, expected, atol=1e-3)


def test_a_batch_of_another_size_is_not_replayed(mixture: Any) -> None:
    routes = token_experts(mixture, IDS)
    unalign(mixture)
    with replayed(mixture, routes), pytest.raises(AlignmentError, match="has 20 tokens, but the forward pass has 10"):
        mixture(IDS[:1])


def test_aligned_models_and_wrong_shapes_cannot_be_replayed(mixture: Any) -> None:
    with pytest.raises(AlignmentError, match="already aligned"), replayed(mixture, ROUTES):
        pass
    unalign(mixture)
    with (
        pytest.raises(AlignmentError, match=r"must have shape \[B, T, .*got \[10, 2, 3\]"),
        replayed(mixture, ROUTES[0]),
    ):
        pass
