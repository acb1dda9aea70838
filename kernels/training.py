"""The trainer's side: a transformers model that computes with the ops of a rollout, and its log-probs of given tokens.

`align` gives the decoder, its layers and the head of a Llama, Qwen2 or Qwen3 model another forward pass, and leaves
parameters, names and checkpoints alone; `unalign` gives them their own back. The forward pass drops padding, computes
the tokens of all sequences as rows, and keeps no KV cache. Forward hooks run on the decoder and its layers: the modules
inside a layer are read, not called.

Promises: with the same backend, instruction set, dtype and weights as a worker, `token_log_probs` returns the bits of
the worker's log-probs, and `token_statistics` those of its `top_logprobs`, whatever the micro-batch, padding or
packing. Gradients agree with those of the unaligned model within rounding. float32 parameters under bfloat16 autocast
compute what a bfloat16 worker computes that was given these parameters. `aligned_with` says what a model computes with;
a backend that is not the fastest one, taken because that cannot serve the model, is logged when it is first taken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from . import autograd
from .autograd import Packed
from .ops import Backend, SelectedBackend, TokenStatistics, select_backend

__all__ = ["Arithmetic", "TokenStatistics", "align", "aligned_with", "token_log_probs", "token_statistics", "unalign"]

log = logging.getLogger(__name__)
_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class Arithmetic(NamedTuple):
    """What decides the bits of an aligned model: `backend`, its instruction set `isa`, and `dtype`, such as `bfloat16`.

    The names and values are those of a worker's `health().engine`.
    """

    backend: str
    isa: str
    dtype: str


def align(model: Any, backend: str = "auto") -> None:
    """Make a transformers LlamaForCausalLM, Qwen2ForCausalLM or Qwen3ForCausalLM compute with the ops of `backend`:
    `auto` (the fastest that serves it), `cpu`, `triton` or `reference`.

    `model(...)` then returns float32 logits, leaves out tokens where `attention_mask` is 0, and keeps no KV cache.
    Raise ValueError for a model that is aligned already, or that the ops do not compute.
    """
    _check_model(model)
    head_dim, weight = model.model.layers[0].self_attn.head_dim, model.lm_head.weight
    # Under autocast float32 parameters compute in 16 bits: what serves the forward pass is known only there.
    dtype = torch.bfloat16 if weight.dtype == torch.float32 else weight.dtype
    _select_backend(backend, weight.device, dtype, head_dim)
    for module, forward in _parts(model):
        module.__class__ = _aligned_class(type(module), forward, backend, head_dim)


def unalign(model: Any) -> None:
    """Undo `align`. Raise ValueError if nothing of the model is aligned."""
    if not _has_parts(model) or not any(_is_aligned(module) for module, _ in _parts(model)):
        raise ValueError(
            f"model: expected an aligned one, found a {type(model).__name__} that is not; leave it as it is"
        )
    for module, _ in _parts(model):
        if _is_aligned(module):
            module.__class__ = type(module).__bases__[0]


def aligned_with(model: Any) -> Arithmetic:
    """What an aligned model computes with, in the autocast around this call. Log-probs are a worker's only if
    `aligned_with(model)._asdict().items() <= client.health().engine.items()`.

    Raise ValueError for a model that is not aligned.
    """
    _check_aligned(model)
    decoder, dtype = model.model, _forward_dtype(model.model)
    chosen = _select_backend(decoder._backend_name, model.lm_head.weight.device, dtype, decoder._head_dim)
    return Arithmetic(chosen.name, chosen.ops.instruction_set(), str(dtype).removeprefix("torch."))


def token_log_probs(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    lengths: Sequence[int] | None = None,
    temperature: float = 1.0,
    completion_mask: Tensor | None = None,
) -> Tensor:
    """The log-prob of each token given those before it in its sequence: float32 in the shape of `input_ids`.

    `model`: itself, not a wrapper such as DDP or FSDP, whose forward pass is not called here. `input_ids` (integers):
    padded [B, T], with `attention_mask` [B, T] (bool or integers) unless there is no padding, which may be on either
    side; or packed [M], with the `lengths` of the sequences. `temperature`: of the log-probs; 0 for greedy samples,
    whose log-probs are those of temperature 1. `completion_mask` (bool, in the shape of `input_ids`): the tokens whose
    log-prob is wanted. The others are 0.0, and so are padding and the first token of each sequence. Mixed precision is
    that of the autocast around this call: under accelerate, make it inside `accelerator.autocast()`.

    Raise ValueError for shapes that do not fit together, and for a model that is not aligned.
    """
    places, asked = _ask(model, input_ids, attention_mask, lengths, temperature, completion_mask)
    return _spread(autograd.log_probs(*asked), places, input_ids.shape)


def token_statistics(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    lengths: Sequence[int] | None = None,
    temperature: float = 1.0,
    completion_mask: Tensor | None = None,
    *,
    top_logprobs: int,
) -> TokenStatistics:
    """What a worker's `top_logprobs` gives, computed without gradient.

    `logprobs` has the bits of `token_log_probs`, whose arguments these are. `entropy` float32, in the shape of
    `input_ids`: of the distribution that each token comes from, in nats. `top_token_ids` int64 and `top_logprobs`
    float32, in that shape and [top_logprobs]: its most probable tokens, highest logit first, of equal ones the lower id
    first. Where `token_log_probs` is 0.0 for want of a log-prob, all of it is 0.

    Raise ValueError where `token_log_probs` does, and unless `top_logprobs` is from 0 to the size of the vocabulary.
    """
    _check_aligned(model)
    vocab_size = len(model.lm_head.weight)
    if not 0 <= top_logprobs <= vocab_size:
        raise ValueError(f"top_logprobs: expected 0 to {vocab_size}, found {top_logprobs}; that is all the model has")
    with torch.no_grad():
        places, asked = _ask(model, input_ids, attention_mask, lengths, temperature, completion_mask)
        found = autograd.statistics(*asked, top_logprobs)
    return TokenStatistics._make(_spread(column, places, input_ids.shape) for column in found)


def _ask(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    lengths: Sequence[int] | None,
    temperature: float,
    completion_mask: Tensor | None,
) -> tuple[Tensor, tuple[Backend, Tensor, Tensor, Tensor, float]]:
    """The places of the M tokens that are asked for in flat `input_ids`, and the arguments of `autograd.log_probs`."""
    _check_aligned(model)
    input_ids = input_ids.long()
    if not temperature >= 0.0:
        raise ValueError(f"temperature: expected a number from 0 on, found {temperature}; give that of the samples")
    mask = torch.ones_like(input_ids, dtype=torch.bool) if completion_mask is None else completion_mask
    _check_shape("completion_mask", mask, input_ids.shape)
    if lengths is None:
        indices, packed = _unpad(input_ids, attention_mask)
    else:
        _check_lengths(input_ids, attention_mask, lengths)
        indices, packed = torch.arange(len(input_ids), device=input_ids.device), Packed.of(lengths, input_ids.device)
    ids = input_ids.flatten()[indices]
    hidden = model.model(input_ids=ids[None], position_ids=packed.positions[None]).last_hidden_state[0]
    wanted = (mask.flatten()[indices].bool() & (packed.positions > 0)).nonzero().flatten()
    weight, ops = model.lm_head.weight.to(hidden.dtype), _backend(model.lm_head, hidden)
    return indices[wanted], (ops, hidden[wanted - 1], weight, ids[wanted], _divisor(temperature))


def _spread(found: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
    """`found` [M, ...] at flat `places` of [*shape, ...], which is 0 elsewhere."""
    spread = found.new_zeros(shape.numel(), *found.shape[1:]).index_copy(0, places, found)
    return spread.view(*shape, *found.shape[1:])


# The three forward passes. Each becomes a method of an aligned class; `self` is the transformers module.


def _decoder_forward(
    self: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> BaseModelOutputWithPast:
    for name in ("past_key_values", "inputs_embeds", "output_attentions", "output_hidden_states"):
        if (value := kwargs.get(name)) is not None and value is not False:
            raise ValueError(f"{name}: expected none for an aligned model, found one; leave it out, or call unalign")
    if input_ids is None:
        raise ValueError("input_ids: expected int64 [B, T], found none; give token ids")
    indices, packed = _unpad(input_ids, attention_mask, position_ids)
    x = self.embed_tokens(input_ids.flatten()[indices]).to(_forward_dtype(self))
    ops = _backend(self, x)
    inv_freq, scale = _rope_parameters(self)
    rotation = ops.rotation(packed.positions, inv_freq.to(x.device), scale)
    for layer in self.layers:
        x = layer(x, packed, rotation)
    x = autograd.rmsnorm(ops, x, self.norm.weight.to(x.dtype), self.norm.variance_epsilon)
    hidden = x.new_zeros(input_ids.numel(), x.shape[1]).index_copy(0, indices, x)
    return BaseModelOutputWithPast(last_hidden_state=hidden.view(*input_ids.shape, -1))  # type: ignore[arg-type]


def _layer_forward(self: Any, x: Tensor, packed: Packed, rotation: tuple[Tensor, Tensor]) -> Tensor:
    ops, attn, mlp = _backend(self, x), self.self_attn, self.mlp

    def linear(module: nn.Linear, x: Tensor) -> Tensor:
        _check_linear("linear layer", module)
        bias = None if module.bias is None else module.bias.to(x.dtype)
        return autograd.linear(ops, x, module.weight.to(x.dtype), bias)

    def norm(module: Any, x: Tensor) -> Tensor:
        return autograd.rmsnorm(ops, x.flatten(0, -2), module.weight.to(x.dtype), module.variance_epsilon).view_as(x)

    hidden = norm(self.input_layernorm, x)
    q, k, v = (
        linear(module, hidden).unflatten(1, (-1, attn.head_dim)) for module in (attn.q_proj, attn.k_proj, attn.v_proj)
    )
    if hasattr(attn, "q_norm"):
        q, k = norm(attn.q_norm, q), norm(attn.k_norm, k)
    q, k = autograd.rope(ops, q, rotation), autograd.rope(ops, k, rotation)
    attended = autograd.attention(ops, q, k, v, packed, attn.scaling)
    x = linear(attn.o_proj, attended.flatten(1)) + x
    hidden = norm(self.post_attention_layernorm, x)
    activated = autograd.silu_mul(ops, linear(mlp.gate_proj, hidden), linear(mlp.up_proj, hidden))
    return linear(mlp.down_proj, activated) + x


def _head_forward(self: Any, hidden: Tensor) -> Tensor:
    rows = hidden.flatten(0, -2)
    ops = _backend(self, hidden)
    return autograd.logits(ops, rows, self.weight.to(hidden.dtype)).unflatten(0, hidden.shape[:-1])


def _parts(model: Any) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """The modules whose forward pass is replaced: by which."""
    yield model.model, _decoder_forward
    for layer in model.model.layers:
        yield layer, _layer_forward
    yield model.lm_head, _head_forward


@cache
def _aligned_class(original: type, forward: Callable[..., Any], backend: str, head_dim: int) -> type:
    """A class of the same name, by which trainers that wrap or checkpoint layers find them."""
    fields = {"forward": forward, "__module__": original.__module__, "_backend_name": backend, "_head_dim": head_dim}
    return type(original.__name__, (original,), fields)


@cache
def _select_backend(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> SelectedBackend:
    """Logs a fallback in the words of a worker, once in a process, since forward passes ask again and again."""
    chosen = select_backend(name, device, dtype, head_dim)
    if chosen.note:
        log.warning("backend %s, not a faster one: %s", chosen.name, chosen.note)
    return chosen


def _backend(module: Any, x: Tensor) -> Backend:
    return _select_backend(module._backend_name, x.device, x.dtype, module._head_dim).ops


def _forward_dtype(decoder: Any) -> torch.dtype:
    weight = decoder.embed_tokens.weight
    if torch.is_autocast_enabled(weight.device.type):
        return torch.get_autocast_dtype(weight.device.type)
    return weight.dtype


def _rope_parameters(decoder: Any) -> tuple[Tensor, float]:
    """(inv_freq, scale), computed anew: a model that was cast to bfloat16 has rounded its own."""
    rotary = type(decoder.rotary_emb)(config=decoder.config)
    return rotary.inv_freq, rotary.attention_scaling


def _divisor(temperature: float) -> float:
    """What a worker divides logits by: greedy samples keep theirs, and no quotient leaves float32."""
    return max(temperature, 1e-30) if temperature > 0.0 else 1.0


def _unpad(
    input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None = None
) -> tuple[Tensor, Packed]:
    """The flat indices of the tokens that are not padding, and the sequences that they make.

    A sequence begins with each row of `input_ids`, and wherever `position_ids` are 0.
    """
    indices = _unpadded_indices(input_ids, attention_mask)
    if not len(indices):
        raise ValueError("attention_mask: expected tokens that are not padding, found none; leave such batches out")
    begins = torch.diff(indices // input_ids.shape[1], prepend=indices.new_full((1,), -1)) != 0
    if position_ids is None:
        return indices, _sequences(begins)
    if position_ids.shape not in (input_ids.shape, (1, input_ids.shape[1])):
        raise ValueError(
            f"position_ids: expected {list(input_ids.shape)} like input_ids, found {list(position_ids.shape)}"
        )
    given = position_ids.expand(input_ids.shape).flatten()[indices]
    packed = _sequences(begins | (given == 0))
    if not torch.equal(given, packed.positions):
        raise ValueError(
            "position_ids: expected to count up from 0 in each sequence, found something else; leave them out, and "
            "mark padding in attention_mask"
        )
    return indices, packed


def _sequences(begins: Tensor) -> Packed:
    """Sequences that begin where `begins` (bool [M]) says, the first of them at 0."""
    starts = [*begins.nonzero().flatten().tolist(), len(begins)]
    return Packed.of([end - start for start, end in pairwise(starts)], begins.device)


def _unpadded_indices(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids: expected [B, T], found {list(input_ids.shape)}; pack with lengths, or add [None]")
    if attention_mask is None:
        return torch.arange(input_ids.numel(), device=input_ids.device)
    _check_shape("attention_mask", attention_mask, input_ids.shape)
    return attention_mask.flatten().nonzero().flatten()


def _check_shape(name: str, found: Tensor, expected: torch.Size) -> None:
    if found.shape != expected:
        raise ValueError(
            f"{name}: expected {list(expected)} like input_ids, found {list(found.shape)}; one entry per token"
        )


def _check_lengths(input_ids: Tensor, attention_mask: Tensor | None, lengths: Sequence[int]) -> None:
    if attention_mask is not None:
        raise ValueError("attention_mask: expected none with lengths, found both; packed tokens have no padding")
    if input_ids.dim() != 1 or min(lengths, default=0) < 1 or sum(lengths) != len(input_ids):
        raise ValueError(
            f"lengths: expected at least 1 each and {list(input_ids.shape)} in sum, the shape of input_ids, found "
            f"{list(lengths)[:8]} with sum {sum(lengths)}; give one for each packed sequence"
        )


def _has_parts(model: Any) -> bool:
    return type(model).__name__ in _ARCHITECTURES


def _is_aligned(module: nn.Module) -> bool:
    return hasattr(module, "_backend_name")


def _check_linear(name: str, module: nn.Module) -> None:
    if type(module) is not nn.Linear:
        raise ValueError(
            f"{name}: expected nn.Linear, found {type(module).__name__}; merge adapters, and align before wrapping"
        )


def _check_aligned(model: Any) -> None:
    if not _has_parts(model) or not all(_is_aligned(module) for module, _ in _parts(model)):
        raise ValueError(
            f"model: expected an aligned one, found a {type(model).__name__} that is not; call align(model) first, and "
            "pass the model without a wrapper"
        )


def _check_model(model: Any) -> None:
    if not _has_parts(model):
        names = ", ".join(_ARCHITECTURES)
        raise ValueError(
            f"model: expected one of {names}, found {type(model).__name__}; unwrap it, or use another model"
        )
    if any(_is_aligned(module) for module, _ in _parts(model)):
        raise ValueError("model: expected one that is not aligned, found an aligned one; call unalign first")
    for module_name, module in model.named_modules():
        if module_name.endswith(("_proj", "lm_head")):
            _check_linear(module_name, module)
    head, embedding = model.lm_head, model.model.embed_tokens.weight
    if head.bias is not None or head.weight.shape != embedding.shape:
        raise ValueError(
            f"lm_head: expected {list(embedding.shape)} like the embedding and no bias, found "
            f"{list(head.weight.shape)}{' and none' if head.bias is None else ' and one'}; use another model"
        )
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) > 1 or not dtypes <= set(_DTYPES):
        names = " and ".join(sorted(map(str, dtypes)))
        raise ValueError(f"parameters: expected all in one of {_DTYPES}, found {names}; call model.to(dtype)")
    config = model.config
    features: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "hidden_act": (config.hidden_act, ("silu",)),
        "rope_type": (config.rope_parameters["rope_type"], _ROPE_TYPES),
        "attention_dropout": (config.attention_dropout, (0.0,)),
        "attention_bias": (getattr(config, "attention_bias", False), (False,)),
        "mlp_bias": (getattr(config, "mlp_bias", False), (False,)),
        "use_sliding_window": (bool(getattr(config, "use_sliding_window", False)), (False,)),
    }
    for feature, (found, served) in features.items():
        if found not in served:
            expected = " or ".join(map(repr, served))
            raise ValueError(f"{feature}: expected {expected}, found {found!r}; train this model without alignment")
