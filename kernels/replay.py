"""Replay a rollout's expert choices in a trainer that computes with the plain forward pass of transformers.

Such a trainer rounds differently than the worker, and its routers may therefore choose other experts. A single
different choice affects a log-prob more than all rounding differences together. Replaying the rollout's choices (Ma et
al. 2025) leaves only the rounding differences. A trainer with an aligned model (`training.align`) passes the choices to
`training.token_log_probs` instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trueroll.errors import AlignmentError
from trueroll.versions import untested

from .batches import OWN_CHOICE, locate, read_routes
from .gates import plain_gates
from .plain_models import describe_plain
from .specs import DecoderSpec, ExpertsSpec, RouterSpec
from .wrappers import text_decoder


@contextmanager
def replayed(
    model: Any, routed_experts: Tensor, attention_mask: Tensor | None = None, lengths: Sequence[int] | None = None
) -> Iterator[None]:
    """Context manager in which `model(...)` sends each token of one batch to the given experts.

    The gates are computed from the routers' own logits and have gradients.

    `model`: a transformers model of a supported family, without its wrapper. In the context, call the model or its
    wrapper. `routed_experts`: integers. For padded tokens [B, T], `routed_experts` has shape [B, T, layers with
    experts, experts per token], and `attention_mask` must be the mask of the forward pass (None if there is no
    padding). For packed tokens [1, M], `routed_experts` has shape [M, layers with experts, experts per token], and
    `lengths` must give the lengths of the sequences. Entries for padding and for the last token of each sequence are
    not read: the model chooses the experts of these tokens. If layers are checkpointed, and therefore recomputed in the
    backward pass, keep the context open until the backward pass is done.

    Raise AlignmentError for a model that is aligned or does not belong to a supported family, for `routed_experts` that
    do not fit the model, and for a forward pass with a different number of tokens.
    """
    spec = describe_plain(model)
    routes = _spread_routes(routed_experts, spec, attention_mask, lengths)
    with ExitStack() as stack:
        for router, of_router, experts in zip(_routers(model, spec), routes, spec.experts, strict=True):
            hook = partial(_replay, of_router, experts.router)
            stack.callback(router.register_forward_hook(hook).remove)
        yield


def _spread_routes(
    routed_experts: Tensor, spec: DecoderSpec, attention_mask: Tensor | None, lengths: Sequence[int] | None
) -> Tensor:
    """Return the routes of all N tokens, padding included: int64 [layers with experts, N, top_k]."""
    if routed_experts.dim() != (4 if lengths is None else 3):
        raise AlignmentError(
            "routed_experts must have shape [B, T, layers with experts, experts per token], or [M, ...] if `lengths` "
            f"is given (got {list(routed_experts.shape)}); pass a row for each token"
        )
    shape = routed_experts.shape[:-2]
    indices, packed = locate(routed_experts.new_empty(shape), attention_mask, lengths)
    routes = read_routes(routed_experts, spec, shape, indices, packed).long()
    whole = routes.new_full((len(routes), shape.numel(), routes.shape[2]), OWN_CHOICE)
    return whole.index_copy_(1, indices, routes)


def _routers(model: Any, spec: DecoderSpec) -> Iterator[nn.Module]:
    path, _, _ = spec.names["router"].rpartition(".")
    for layer, layer_spec in zip(text_decoder(model).layers, spec.layers, strict=True):
        if isinstance(layer_spec.mlp, ExpertsSpec):
            found = layer.get_submodule(path)
            # Some routers have their product in an inner module.
            yield layer.get_submodule(path.rpartition(".")[0]) if isinstance(found, nn.Linear) else found


def _replay(
    route: Tensor, spec: RouterSpec, router: nn.Module, args: Any, output: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a router's output with the replayed experts: (logits [N, E], gates [N, top_k], experts [N, top_k])."""
    logits, gates, own = _check_output(output, router)
    if len(logits) != len(route):
        raise AlignmentError(
            f"routed_experts has {len(route)} tokens, but the forward pass has {len(logits)} tokens; open `replayed` "
            "around each batch, with the experts of that batch"
        )
    route = route.to(own.device)
    experts = torch.where(route == OWN_CHOICE, own, route)
    return logits, plain_gates(logits.float(), experts, spec).to(gates.dtype), experts


def _check_output(output: Any, router: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, gates and experts from a router's output. Raise AlignmentError if the router's output has another
    form.
    """
    if isinstance(output, tuple) and len(output) == 3:
        logits, gates, own = output
        if gates.shape == own.shape and logits.shape[:-1] == own.shape[:-1] and not own.is_floating_point():
            return logits, gates, own
    what = f"{type(router).__name__} returns something other than (logits, gates, experts)"
    raise AlignmentError(untested("transformers", what))
