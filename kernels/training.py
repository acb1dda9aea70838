"""The trainer's side: make the models of transformers use the ops of a rollout, and compute the log-probs of given
tokens.

`align` replaces the forward pass of a model that belongs to one of the `families`. `align` also replaces the forward
passes of these modules inside the model: decoder, embedding, layers, last norm and head. Parameters, names and
checkpoints stay unchanged. `unalign` restores the original forward passes. An aligned forward pass drops padding,
computes the tokens of all sequences as rows, and keeps no KV cache. An aligned layer's forward pass is
`layer.run_layer` with the ops `autograd.GradientOps`. Each module with a replaced forward pass is called and reads its
own parameters during the call; the model is called through its wrapper. Hooks that a wrapper adds to an aligned module
therefore run, for example to gather weights or to reduce gradients. The modules inside a layer are never called: the
layer reads the parameters of these modules.

Guarantees: with a worker's backend, instruction set, dtype and weights, `token_log_probs` returns log-probs that are
bit-identical to the worker's, for any micro-batch, padding or packing. `token_statistics` returns values that are
bit-identical to the worker's `top_logprobs`. Gradients agree with the unaligned model's gradients within rounding.
Under bfloat16 autocast, a model with float32 parameters gives the same bits as a bfloat16 worker that received these
parameters. `aligned_with` returns the backend, instruction set and dtype of a model. If the fastest backend cannot
serve the model, the fallback backend is logged on first use. A mixture-of-experts model uses the same experts as the
worker: the model chooses the experts itself, or the caller passes the experts. For a model that is not aligned, use
`replayed` to pass experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import zip_longest
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from trueroll.errors import AlignmentError

from .adapters import check_adapters, check_modules, check_tie, copies_of, current, read_tensors, trained
from .aligned import (
    Aligned,
    aligned_class,
    as_computed,
    check_plain,
    chosen,
    forward_dtype,
    ops_of,
    parameter,
    place,
    select_and_log,
)
from .arguments import check_call, check_signature
from .autograd import NO_TOKEN, GradientOps
from .batches import OWN_CHOICE, check_shape, locate, read_routes, spread, unpad
from .cache_formats import AUTO, round_trip
from .contract import LOWEST_TEMPERATURE, Rotation, TokenStatistics
from .distributions import Drawn, Processing, Samples, rules_of
from .dynamic import DynamicValues
from .edits import Masks
from .layer import (
    HEAD,
    LAYERS,
    gated,
    make_layer,
    project,
    project_latent,
    run_layer,
    scale_embedding,
    turn,
)
from .packed import Packed
from .pieces import with_pieces
from .plain_models import describe_plain, is_aligned, is_decoder, module_of, spec_of
from .precision import NONE, rounding_of, with_kv_cache_dtype, with_quantization
from .replay import replayed
from .selection import select_backend
from .specs import (
    PLAIN,
    CachedSpec,
    DecoderSpec,
    ExpertsSpec,
    HeadSpec,
    LatentSpec,
    Mamba2Spec,
    RecurrentSpec,
    WeightSpec,
)
from .stacks import HeadLayout, StackLayout
from .training_images import Media, PackedImages, check_positions, has_axes, read_media, read_pixels, split_positions
from .training_towers import check_tower, encode_images, part_forward, tower_modules
from .wrappers import adapted_inside, check_gathered, plain_class, text_decoder, unwrapped

__all__ = [
    "Arithmetic",
    "TokenStatistics",
    "align",
    "aligned_with",
    "merged_weights",
    "replayed",
    "token_experts",
    "token_log_probs",
    "token_statistics",
    "unalign",
]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Settings that make the forward pass of a model in training random, unless they are 0.
_NOISE = ("attention_dropout", "residual_dropout", "resid_pdrop", "router_jitter_noise")

_Question: TypeAlias = Callable[[GradientOps, Tensor, Tensor], Any]
"""question(ops, hidden, weight): compute what the head returns instead of logits, from hidden states [M, H] and the
head's weight [V, H]. The float32 tensors of an answer go through `_sealed`, so that no wrapper casts them.
"""


class _Rows:
    """The inputs that a layer gets in addition to the hidden states [M, H].

    `route` and `record`: int32 [M, top_k] or None. The class is neither a dataclass nor a tuple. In a dataclass or a
    tuple, a wrapper would cast float tensors, such as rotations, to the dtype of the wrapper's mixed-precision policy.
    """

    def __init__(
        self, packed: Packed, rotations: Sequence[Rotation], route: Tensor | None, record: Tensor | None
    ) -> None:
        self.packed, self.rotations, self.route, self.record = packed, rotations, route, record


class _Embedded:
    """The embeddings of images. Like a `_Rows`, an `_Embedded` passes through wrappers unchanged.

    `rows`: [tokens of images, (1 + layers) * H]. The first part of a row replaces the embedding of the token at its
    index in `places`. Each further part is added to the token's hidden states after a layer: the second part after the
    first layer, and so on. `positions`: the positions of all M tokens, int64 [M] or [3, M].
    """

    def __init__(self, rows: Tensor, images: PackedImages | None, positions: Tensor, sees_span: bool) -> None:
        self.rows, self.positions = rows, positions
        self.places = positions.new_empty(0) if images is None else images.places
        self._images = images if sees_span else None

    def seen(self, packed: Packed) -> Packed:
        """Return `packed` with `ends`: for each token, the end of the tokens that it sees."""
        return packed if self._images is None else self._images.see_spans()


@dataclass
class _DecoderOutput(MoeModelOutputWithPast):
    """The output of an aligned decoder, with the fields that any family's decoder returns."""

    image_hidden_states: Tensor | None = None
    rope_deltas: Tensor | None = None


class _Drawn:
    """How given tokens were drawn. `divisor`: the number that logits are divided by, which is 1 for greedy samples, and
    otherwise at least LOWEST_TEMPERATURE.
    """

    def __init__(
        self,
        temperature: float,
        distribution: Drawn | None,
        eos_token_ids: Sequence[int] | None,
        masks: Masks | None,
    ) -> None:
        if distribution is not None and temperature != 1.0:
            raise AlignmentError(
                f"temperature must be left out if distribution is given (got {temperature}); the distribution has its "
                "own temperature"
            )
        mode = getattr(distribution, "logprobs", "processed")
        if mode is None:
            raise AlignmentError(
                "distribution: logprobs is None, so there are no log-probs to match; set logprobs to 'processed'"
            )
        if distribution is not None:
            temperature = 1.0 if mode == "raw" else distribution.temperature
        if not temperature >= 0.0:
            raise AlignmentError(
                f"temperature must be at least 0 (got {temperature}); pass the temperature of the samples"
            )
        self.divisor = max(temperature, LOWEST_TEMPERATURE) if temperature > 0.0 else 1.0
        self._processed = distribution if mode == "processed" else None
        self._eos_token_ids, self._masks = eos_token_ids, masks

    def processing(self, samples: Samples, tokens: Tensor, vocab_size: int) -> Processing | None:
        """Return the processing of the logits of `tokens`; None if the logits are only divided by `divisor`. `tokens`:
        indices of sampled tokens, int64 [M].
        """
        if self._processed is None:
            return None
        rules = rules_of(self._processed, self._eos_token_ids, samples, vocab_size, self._masks)
        if rules is None and not self._processed.has_filters:
            return None
        return Processing(self._processed, rules, self.divisor, samples, tokens, self._masks)


class Arithmetic(NamedTuple):
    """The settings that determine the bits of an aligned model. `isa`: the instruction set of `backend`. `dtype`: the
    name of a dtype, such as `bfloat16`. `pieces`: the number of pieces in which sums are computed. `quantization`: how
    weights are quantized. `kv_cache_dtype`: how keys and values are quantized.

    Names and values are the same as in a worker's `health().engine`.
    """

    backend: str
    isa: str
    dtype: str
    pieces: int
    quantization: str
    kv_cache_dtype: str


def align(
    model: Any,
    backend: str = "auto",
    pieces: int | None = None,
    quantization: str = NONE,
    kv_cache_dtype: str = AUTO,
) -> None:
    """Make a model of transformers use the ops of `backend`. The model must belong to one of the `families`.

    `backend`: `auto` (the fastest backend that serves the model), `cpu`, `triton` or `reference`. `pieces`: the number
    of pieces in which sums are computed (`kernels.pieces`); None: the number that suits the model, which is also a
    worker's default. `quantization`: compute with the values of quantized weights, as a worker with this setting does
    (`kernels.precision`). `kv_cache_dtype`: compute with the values of quantized keys and values, as a worker with this
    setting does (`kernels.cache_formats`). Gradients pass through the rounding unchanged. A PEFT model with a LoRA
    adapter uses the weights of `merged_weights`, and gradients reach the adapter's matrices A and B. After alignment,
    `model(...)` returns float32 logits, skips tokens where `attention_mask` is 0, and keeps no KV cache. `fully_shard`
    or DistributedDataParallel may wrap the model before or after `align`; accelerate may wrap the model only after
    `align`.

    Raise AlignmentError if the model is already aligned, if the ops cannot compute the model, or if the signature of
    the model's `forward` has an argument that `align` does not know. A later release of transformers may add such an
    argument. Raise ConfigError for a backend that cannot serve the model, and for `pieces` into which the model cannot
    be cut. When the aligned model is called with an unsupported argument, the call raises AlignmentError.
    """
    spec, model = _check_model(model), unwrapped(model)
    if pieces is not None:
        spec = with_pieces(spec, pieces)
    spec = with_kv_cache_dtype(with_quantization(spec, quantization), kv_cache_dtype)
    weight = model.lm_head.weight
    # Under autocast, float32 parameters are computed in 16 bits. The forward pass knows that dtype and selects the
    # backend again.
    dtype = torch.bfloat16 if weight.dtype == torch.float32 else weight.dtype
    select_and_log(backend, weight.device, dtype, spec)
    for module, forward, index in _parts(model, spec):
        module.__class__ = aligned_class(type(module), forward)
        module._aligned = Aligned(backend, spec, index)


def unalign(model: Any) -> None:
    """Undo `align`. Raise AlignmentError if no part of the model is aligned."""
    model = unwrapped(model)
    # `_parts` alone would miss a part that was wrapped in an adapter after `align`.
    aligned = list(filter(is_aligned, model.modules())) if is_decoder(model) else []
    if not aligned:
        raise AlignmentError(f"model is not aligned (got a plain {type(model).__name__}); unalign does not apply to it")
    for module in aligned:
        del module._aligned
        if plain_class(type(module)) is type(module):  # otherwise, fully_shard has put its class in front
            module.__class__ = type(module).__bases__[0]


def aligned_with(model: Any) -> Arithmetic:
    """Return the arithmetic that an aligned model uses under its wrapper and under any autocast that is active during
    the call.

    The model's log-probs equal a worker's only if `aligned_with(model)._asdict().items() <=
    client.health().engine.items()`. `aligned_with` runs a forward pass of one token. If weights are sharded, every rank
    must call `aligned_with`. Raise AlignmentError for a model that is not aligned.
    """
    head = _check_aligned(model).lm_head

    def tell(ops: GradientOps, hidden: Tensor, weight: Tensor) -> Arithmetic:
        name = chosen(current(head), hidden.device, hidden.dtype).name
        dtype = str(hidden.dtype).removeprefix("torch.")
        spec = head._aligned.spec
        settings = spec.pieces, spec.quantization, spec.kv_cache_dtype
        return Arithmetic(name, ops.backend.instruction_set(), dtype, *settings)

    token = torch.zeros(1, 1, dtype=torch.int64, device=head.weight.device)
    with torch.no_grad():
        return _ask(model, token, *locate(token, None, None), tell)


def merged_weights(model: Any, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights that a worker with this `dtype` serves after a PEFT model's adapters were pushed.

    Each tensor has the name that it would have without PEFT. Tensors are in `dtype`, except tensors for which the
    family fixes another dtype. Adapters are merged into the weights by `Backend.merge`, with the same bits on any
    device. Raise AlignmentError for a model without PEFT, or with adapters that `align` does not support.
    """
    adapted = adapted_inside(model)
    if adapted is None:
        raise AlignmentError(
            f"model must be a PEFT model (got {type(model).__name__}); a model without adapters has nothing to merge, "
            "so use its weights directly"
        )
    tensors = read_tensors(adapted)
    device = next(iter(tensors.tensors.values())).device
    own = _of_layers(unwrapped(adapted), lambda spec: spec.own_dtypes(dtype))
    formats = _of_layers(unwrapped(adapted), lambda spec: spec.own_formats)
    return tensors.merged(dtype, own, formats, select_backend("auto", device, dtype).ops)


def _of_layers(model: Any, of_spec: Callable[[DecoderSpec], dict[str, Any]]) -> dict[str, Any]:
    """Return a dict from the name of each weight to the result of `of_spec` for the weight's role. `of_spec`: returns a
    dict from role to result.

    Return {} for a model that no worker serves.
    """
    try:
        spec = spec_of(model)
    except AlignmentError:
        return {}
    prefix = next(name for name, module in model.named_modules() if module is text_decoder(model).layers)
    layers = range(len(spec.layers))
    return {f"{prefix}.{i}.{spec.names[role]}": found for role, found in of_spec(spec).items() for i in layers}


def token_log_probs(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    lengths: Sequence[int] | None = None,
    temperature: float = 1.0,
    completion_mask: Tensor | None = None,
    routed_experts: Tensor | None = None,
    position_ids: Tensor | None = None,
    media: Media | None = None,
    distribution: Drawn | None = None,
    eos_token_ids: Sequence[int] | None = None,
    target_ids: Tensor | None = None,
    masks: Masks | None = None,
) -> Tensor:
    """Return the log-prob of each token given the earlier tokens of its sequence: float32 in the shape of `input_ids`.

    `model`: the model as it is trained: unwrapped, sharded by `fully_shard`, in DistributedDataParallel or prepared by
    accelerate. The model's forward pass is called, so weights are gathered and gradients are prepared for reduction as
    in any forward pass. `input_ids`: integers in one of three forms. The first form is padded [B, T], with
    `attention_mask` [B, T] (bool or integers) if there is padding on the left or on the right. The second form is
    packed [M], with the `lengths` of the sequences. The third form is packed [B, T], with `position_ids` [B, T] that
    are 0 where a sequence begins. For a model with a vision tower, `position_ids` may also have the axes of its
    positions: [3, B, T] (time, row and column), or [4, B, T] (index, time, row and column). Positions with axes must
    equal the positions that a worker uses. `temperature`: the temperature at which log-probs are computed. Pass 0 for
    greedy samples: log-probs of greedy samples are computed at temperature 1. `completion_mask` (bool, in the shape of
    `input_ids`): the tokens that get a log-prob. Tokens outside the mask get 0.0, as do padding and the first token of
    each sequence. The model's wrapper and any autocast that is active during the call determine the dtypes of mixed
    precision.

    `routed_experts` (integers, [*input_ids.shape, layers with experts, experts per token]): the experts of each token,
    in any order. Gradients flow through the gates. If the model has the same arithmetic as the worker, `routed_experts`
    can be left out, since the model itself then chooses the same experts as the worker. Entries for padding and for the
    last token of each sequence are not read. A rollout's record of experts has no row for the last token of a sample.

    `media`: the images of the sequences, for a model with a vision tower. Two forms are accepted. The first form is one
    list of `ImageInput` per sequence, as the worker got the images: `start` counts the sequence's tokens without
    padding. The second form is a map with the output of an image processor of transformers: `pixel_values` and, if the
    model has them, `image_grid_thw` and the token types (`mm_token_type_ids` or `token_type_ids`, [*input_ids.shape]).
    The tokens of images are placeholders. All other placeholders are text, including placeholders that a worker
    sampled. Gradients reach the tower. All ranks of a sharded model call the model's tower. On a rank without images,
    the tower's parameters get gradients of zeros.

    `distribution`: the `SamplingParams` with which the tokens were sampled, in place of `temperature`. With a
    `distribution`, the log-probs equal the log-probs that a worker returns, for any value of its `logprobs` except
    None. Edits and filters keep the same tokens as in the worker. Gradients reach the logits of kept tokens only. Each
    run of tokens in `completion_mask` is a sample, and the earlier tokens of the sequence are the sample's prompt. A
    `Distribution` without `logprobs` counts as `processed`. `eos_token_ids`: the tokens that `min_tokens` bans, from
    the worker's `health().engine["eos_token_ids"]`. `masks`: the masks of `structured_outputs`, such as
    `trueroll.rollout.grammar.GrammarMasks`.

    `target_ids` (integers, [*input_ids.shape, K]): return the log-probs of these tokens instead of the log-probs of
    `input_ids`, for distillation. Pad a token's list of fewer than K ids with -1, which gets the log-prob 0. The result
    has the shape of `target_ids`.

    Raise AlignmentError for shapes that do not fit together, for `routed_experts` or `media` that do not fit the model
    or the tokens, for a `distribution` that needs an argument that is missing, and for a model that is not aligned.
    """
    drawn = _Drawn(temperature, distribution, eos_token_ids, masks)
    batch = input_ids, attention_mask, lengths, drawn, completion_mask, routed_experts, position_ids, media
    places, found = _ask_of_tokens(model, *batch, GradientOps.log_probs, target_ids)
    return spread(_unsealed(found), places, input_ids.shape)


def token_statistics(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    lengths: Sequence[int] | None = None,
    temperature: float = 1.0,
    completion_mask: Tensor | None = None,
    routed_experts: Tensor | None = None,
    position_ids: Tensor | None = None,
    media: Media | None = None,
    distribution: Drawn | None = None,
    eos_token_ids: Sequence[int] | None = None,
    masks: Masks | None = None,
    *,
    top_logprobs: int,
    gradient: bool = False,
) -> TokenStatistics:
    """Compute, in the trainer, the statistics that a worker returns for `top_logprobs`.

    The other arguments are documented at `token_log_probs`. `logprobs` is bit-identical to the result of
    `token_log_probs`. If `gradient` is True, `logprobs` has a gradient, so a loss needs no second forward pass.
    Entropy, top ids and top log-probs have no gradient. `entropy` (float32, in the shape of `input_ids`): for each
    token, the entropy in nats of the distribution that the token comes from. `top_token_ids` (int64) and `top_logprobs`
    (float32), both [*input_ids.shape, top_logprobs]: the most probable tokens and their log-probs, sorted from the
    highest logit to the lowest. Tokens with equal logits are sorted by id, lowest first. All values of a token without
    a log-prob are 0, as in `token_log_probs`.

    Raise AlignmentError in the same cases as `token_log_probs`, and if `top_logprobs` is negative or above the
    vocabulary size.
    """
    vocab_size = len(_check_aligned(model).lm_head.weight)
    if not 0 <= top_logprobs <= vocab_size:
        raise AlignmentError(
            f"top_logprobs must be from 0 to {vocab_size}, the size of the vocabulary (got {top_logprobs})"
        )
    drawn = _Drawn(temperature, distribution, eos_token_ids, masks)
    batch = input_ids, attention_mask, lengths, drawn, completion_mask, routed_experts, position_ids, media
    with torch.set_grad_enabled(gradient and torch.is_grad_enabled()):
        places, found = _ask_of_tokens(model, *batch, partial(GradientOps.statistics, k=top_logprobs))
    return TokenStatistics._make(spread(_unsealed(column), places, input_ids.shape) for column in found)


def token_experts(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    lengths: Sequence[int] | None = None,
    position_ids: Tensor | None = None,
    media: Media | None = None,
) -> Tensor:
    """Return, for each token, the experts that an aligned model chooses.

    The result is int32 [*input_ids.shape, layers with experts, experts per token]. The experts of each token are in
    ascending order. The entries of padding are 0. A worker with the same arithmetic chooses the same experts, and
    `token_log_probs` accepts these experts. The other arguments are documented at `token_log_probs`. Raise
    AlignmentError in the same cases as `token_log_probs`, and for a model without experts.
    """
    spec = _check_aligned(model)._aligned.spec
    if not spec.experts:
        raise AlignmentError(f"model must have experts (got {type(model).__name__}, which has none)")
    indices, packed, images = _locate(spec, input_ids, attention_mask, lengths, position_ids, media)
    record = input_ids.new_empty(len(spec.experts), len(indices), spec.experts[0].top_k, dtype=torch.int32)
    with torch.no_grad():
        _ask(model, input_ids, indices, packed, lambda ops, hidden, weight: None, images, record=record)
    return spread(record.transpose(0, 1), indices, input_ids.shape)


def _locate(
    spec: DecoderSpec,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    lengths: Sequence[int] | None,
    position_ids: Tensor | None,
    media: Media | None,
) -> tuple[Tensor, Packed, PackedImages | None]:
    """Return the result of `batches.locate` for a batch, and the batch's images. Raise AlignmentError unless positions
    with axes are the positions that a worker uses.
    """
    given = split_positions(position_ids)
    indices, packed = locate(input_ids, attention_mask, lengths, given.text)
    images = read_media(media, spec, input_ids.flatten()[indices].long(), indices, packed, input_ids.shape)
    check_positions(given.axes, _positions(spec, packed, images), indices, input_ids.shape)
    return indices, packed, images


def _positions(spec: DecoderSpec, packed: Packed, images: PackedImages | None) -> Tensor:
    """Return the positions of tokens, int64 [M], or [3, M] if they differ between the axes."""
    return packed.positions if images is None or not has_axes(spec) else images.positions()


def _ask(
    model: Any,
    input_ids: Tensor,
    indices: Tensor,
    packed: Packed,
    question: _Question,
    images: PackedImages | None = None,
    **routes: Tensor | None,
) -> Any:
    """Run the model on the M tokens at the flat `indices`, and return the result of `question` for the hidden states of
    these tokens. `routes`: as in `_decode`.
    """
    ids = input_ids.flatten()[indices].long()
    others: dict[str, Any] = routes if images is None else routes | {"images": images}
    return model(input_ids=ids[None], position_ids=packed.positions[None], question=question, **others)


def _ask_of_tokens(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    lengths: Sequence[int] | None,
    drawn: _Drawn,
    completion_mask: Tensor | None,
    routed_experts: Tensor | None,
    position_ids: Tensor | None,
    media: Media | None,
    what: Callable[[GradientOps, Tensor, Tensor, Tensor, float, HeadSpec, Processing | None], Any],
    target_ids: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """Return two values: the indices of the tokens to score in the flattened `input_ids`, and the result of `what` for
    these tokens, passed through `_sealed`.

    `what`: `GradientOps.log_probs`, or a function with the same arguments.
    """
    spec = _check_aligned(model)._aligned.spec
    mask = torch.ones_like(input_ids, dtype=torch.bool) if completion_mask is None else completion_mask
    check_shape("completion_mask", mask, input_ids.shape)
    indices, packed, images = _locate(spec, input_ids, attention_mask, lengths, position_ids, media)
    routes = None
    if routed_experts is not None:
        routes = read_routes(routed_experts, spec, input_ids.shape, indices, packed)
    is_sampled, all_ids = mask.flatten()[indices].bool(), input_ids.flatten()[indices].long()
    wanted = (is_sampled & (packed.positions > 0)).nonzero().flatten()
    places = indices[wanted]
    ids = all_ids[wanted] if target_ids is None else _targets(target_ids, input_ids.shape, spec.vocab_size)[places]
    samples = Samples(all_ids, packed, None if completion_mask is None else is_sampled)

    def answer(ops: GradientOps, hidden: Tensor, weight: Tensor) -> Any:
        processing = drawn.processing(samples, wanted, len(weight))
        return _sealed(what(ops, hidden[wanted - 1], weight, ids, drawn.divisor, spec.head, processing))

    return places, _ask(model, input_ids, indices, packed, answer, images, routes=routes)


def _targets(target_ids: Tensor, shape: torch.Size, vocab_size: int) -> Tensor:
    """Return `target_ids` as int64 [B * T, K]. `shape`: the shape of input_ids. Raise AlignmentError if `target_ids` do
    not fit.
    """
    if target_ids.shape[:-1] != shape or target_ids.is_floating_point() or not target_ids.shape[-1]:
        raise AlignmentError(
            f"target_ids must be integers with the shape of input_ids, {list(shape)}, plus one axis at the end (got "
            f"{target_ids.dtype} {list(target_ids.shape)}); pass -1 where there is no token"
        )
    wrong = target_ids[(target_ids < NO_TOKEN) | (target_ids >= vocab_size)]
    if len(wrong):
        raise AlignmentError(f"target_ids must be from 0 to {vocab_size - 1}, or -1 for no token (got {int(wrong[0])})")
    return target_ids.long().flatten(0, -2)


def _sealed(found: Any) -> Any:
    """Convert a float32 tensor, or the float32 tensors of a named tuple, to complex numbers.

    A wrapper with an output dtype in its policy would cast floats, but does not change complex numbers.
    """
    if isinstance(found, tuple):
        return type(found)(*map(_sealed, found))
    return torch.complex(found, torch.zeros_like(found)) if found.is_floating_point() else found


def _unsealed(found: Any) -> Tensor:
    if not isinstance(found, Tensor):
        raise AlignmentError(
            "model: the wrapper around the model must pass the argument `question` on to the model and return the "
            f"model's result (got a {type(found).__name__}); pass the model without this wrapper"
        )
    return found.real if found.is_complex() else found


# The forward passes. Each function becomes a method of an aligned class; `self` is the transformers module.


@cache
def _model_forward(original: type) -> Callable[..., Any]:
    """Return the forward pass of a model of this class. If called with a `question`, a function of the hidden states,
    the forward pass returns the function's result instead of logits.
    """

    def forward(self: Any, *args: Any, question: _Question | None = None, **kwargs: Any) -> Any:
        if question is None:
            check_call(original.forward, args, kwargs)
            return original.forward(self, *args, **kwargs)
        return self.lm_head(self.model(*args, **kwargs).last_hidden_state, question)

    return forward


@cache
def _wrapped_forward(original: type) -> Callable[..., Any]:
    """Return the forward pass of a module of this class, which holds a vision tower and a decoder. `images`: the images
    of the packed tokens, if no pixels are given. `routes` and `record`: as in `_decode`. If the tower is not supported,
    the forward pass takes text only.
    """

    def forward(self: Any, *args: Any, images: PackedImages | None = None, **kwargs: Any) -> _DecoderOutput:
        routes = {name: kwargs.pop(name, None) for name in ("routes", "record")}
        given, spec = _check_given(original, args, kwargs), self._aligned.spec
        ids, mask, position_ids = given["input_ids"], given.get("attention_mask"), given.get("position_ids")
        if spec.tower is None:
            if given.get("pixel_values") is not None:
                raise AlignmentError(
                    f"pixel_values: the vision tower of {spec.architecture} is not supported; pass text only, or call "
                    "unalign"
                )
            return self.language_model(ids, mask, position_ids, **routes)
        split = split_positions(position_ids)
        indices, packed = unpad(ids, mask, split.text)
        if images is None:
            images = read_pixels(given, spec.tower, ids.flatten()[indices], indices, packed, ids.shape)
        positions = _positions(spec, packed, images)
        check_positions(split.axes, positions, indices, ids.shape)
        rows = encode_images(self, spec.tower, images, ids.device)
        embedded = _Embedded(rows, images, positions, spec.tower.sees_span)
        return self.language_model(ids, mask, split.text, embedded=embedded, **routes)

    return forward


@cache
def _decoder_forward(original: type) -> Callable[..., Any]:
    """Return the forward pass of a decoder of this class. `embedded`, `routes` and `record`: as in `_decode`."""

    def forward(
        self: Any,
        *args: Any,
        embedded: _Embedded | None = None,
        routes: Tensor | None = None,
        record: Tensor | None = None,
        **kwargs: Any,
    ) -> _DecoderOutput:
        given = _check_given(original, args, kwargs)
        batch = given["input_ids"], given.get("attention_mask"), given.get("position_ids")
        return _decode(self, *batch, embedded, routes, record)

    return forward


def _check_given(original: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name. Raise AlignmentError for arguments that are not supported."""
    given = check_call(original.forward, args, kwargs)
    if given.get("input_ids") is None:
        raise AlignmentError("input_ids is missing; pass token ids, int64 [B, T]")
    if given.get("return_dict") is False:
        raise AlignmentError("return_dict: an aligned decoder does not return tuples; omit return_dict")
    return given


def _decode(
    self: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    embedded: _Embedded | None,
    routes: Tensor | None,
    record: Tensor | None,
) -> _DecoderOutput:
    """Compute the last hidden states of a batch.

    `embedded`: the embeddings of images, if the model has a vision tower. `routes` (int32 [layers with experts, M,
    top_k]): the result of `read_routes`, which holds the experts of the M tokens that are not padding. `record`: a
    tensor of the same shape as `routes`, which receives the experts of the tokens.
    """
    indices, packed = unpad(input_ids, attention_mask, position_ids)
    spec = self._aligned.spec
    x = module_of(self, spec.embedding)(input_ids.flatten()[indices])
    ops, others = ops_of(self, x), list[Tensor]()
    positions = packed.positions
    if embedded is not None:
        packed, positions = embedded.seen(packed), embedded.positions
        first, *others = embedded.rows.split(x.shape[1], 1)
        x = x.index_copy(0, embedded.places, first)
    rotations = [
        turn(ops.backend, rotation, torch.tensor(rotation.inv_freq, dtype=torch.float32, device=x.device), positions)
        for rotation in spec.rotations
    ]
    of_layers = zip(self.layers, _by_layer(spec, routes), _by_layer(spec, record), strict=True)
    for (layer, *of_layer), part in zip_longest(of_layers, others):
        x = layer(x, _Rows(packed, rotations, *of_layer))
        if part is not None and embedded is not None:
            x = x.index_copy(0, embedded.places, x[embedded.places] + part)
    x = module_of(self, spec.last_norm)(x)
    hidden = x.new_zeros(input_ids.numel(), x.shape[1]).index_copy(0, indices, x)
    return _DecoderOutput(last_hidden_state=hidden.view(*input_ids.shape, -1))  # type: ignore[arg-type]


def _by_layer(spec: DecoderSpec, routes: Tensor | None) -> list[Tensor | None]:
    """Return a list with the routes [M, top_k] of each layer. The entry of a layer without experts is None."""
    each = iter(()) if routes is None else iter(routes)
    return [next(each, None) if isinstance(layer.mlp, ExpertsSpec) else None for layer in spec.layers]


def _embedding_forward(self: Any, token_ids: Tensor) -> Tensor:
    check_gathered(self._aligned.spec.embedding, self.weight)
    x = nn.functional.embedding(token_ids, self.weight).to(forward_dtype(self.weight))
    return scale_embedding(x, self._aligned.spec)


def _layer_forward(self: Any, x: Tensor, rows: _Rows) -> Tensor:
    _, spec, index = self._aligned
    ops, packed, rotations = ops_of(self, x), rows.packed, rows.rotations

    prefix = _prefix(index)

    def get(
        name: str, *shape: int, layout: StackLayout | HeadLayout | None = None, held: WeightSpec = PLAIN
    ) -> Tensor | DynamicValues | tuple[Tensor, Tensor]:
        parameter(self, prefix, name, *shape, layout=layout, held=held)
        found = as_computed(name, *place(self, prefix, name), x, ops, held)
        found = found if held.shape is None else found.view(shape)
        rounding = rounding_of(held, layout)
        found = ops.rounded(found, rounding)
        if isinstance(layout, HeadLayout):
            return layout.rows_first(found)  # `head_linear` has plain activations
        found = found if layout is None else layout.rows_first(found)
        return found if rounding is None or not rounding.format.activations else DynamicValues(found, rounding.format)

    def attend(x: Tensor, spec: CachedSpec, weights: Any) -> Tensor:
        if isinstance(spec, LatentSpec):
            q, k = project_latent(ops, x, spec, weights, rotations[spec.rotation])
            k = round_trip(k, spec.cache_format, spec.key_sizes)
            k_up, v_up = weights.up
            return ops.latent_attention(q, k, k_up, v_up, packed, spec)
        q, k, v = project(ops, x, spec, weights, rotations[spec.rotation])
        k, v = (round_trip(part, spec.cache_format, spec.key_sizes) for part in (k, v))
        return gated(ops, q, spec, lambda q: ops.attention(q, k, v, packed, spec, weights.sinks))

    def recur(spec: RecurrentSpec, weights: Any, x: Tensor, *gates: Tensor) -> Tensor:
        if isinstance(spec, Mamba2Spec):
            [steps] = gates
            x = ops.convolve(x, weights.convolution, packed, weights.convolution_bias)
            return ops.state_space(x, steps, spec, weights, packed)
        b, a = gates
        x = ops.convolve(x, weights.convolution, packed)
        return ops.delta_rule(x, b, a, spec, weights, packed)

    def choose(logits: Tensor, spec: ExpertsSpec, correction: Tensor | None) -> tuple[Tensor, Tensor]:
        experts, gates = ops.route(logits, spec, correction=correction)
        if rows.route is not None:
            experts, gates = ops.route(logits, spec, torch.where(rows.route == OWN_CHOICE, experts, rows.route))
        if rows.record is not None:
            rows.record.copy_(experts)
        return experts, gates

    return run_layer(ops, make_layer(spec, index, get), x, attend, recur, choose)


def _norm_forward(self: Any, x: Tensor) -> Tensor:
    ops, spec = ops_of(self, x), self._aligned.spec
    return ops.rmsnorm(x, as_computed(spec.last_norm, self, "weight", x, ops), spec.norm)


def _head_forward(self: Any, hidden: Tensor, question: _Question | None = None) -> Any:
    ops, rows = ops_of(self, hidden), hidden.flatten(0, -2)
    weight = as_computed(HEAD, self, "weight", hidden, ops)
    if question is not None:
        return question(ops, rows, weight)
    # The model's own forward pass scales and caps the result.
    return ops.logits(rows, weight).unflatten(0, hidden.shape[:-1])


def _prefix(index: int) -> str:
    """Return the beginning of the names of a layer's weights."""
    return f"{LAYERS}.{index}."


def _parts(model: Any, spec: DecoderSpec) -> Iterator[tuple[Any, Callable[..., Any], int]]:
    """Yield the modules with a replaced forward pass: (module, new forward pass, layer number or -1)."""
    decoder = text_decoder(model)
    yield model, _model_forward(type(model)), -1
    if decoder is not model.model:
        yield model.model, _wrapped_forward(type(model.model)), -1
    if spec.tower is not None:
        for module in tower_modules(model.model, spec.tower):
            yield module, part_forward, -1
    yield decoder, _decoder_forward(type(decoder)), -1
    for copy in copies_of(module_of(decoder, spec.embedding)):
        yield copy, _embedding_forward, -1
    for index, layer in enumerate(decoder.layers):
        yield unwrapped(layer), _layer_forward, index
    for copy in copies_of(module_of(decoder, spec.last_norm)):
        yield copy, _norm_forward, -1
    for copy in copies_of(model.lm_head):
        yield copy, _head_forward, -1


def _check_aligned(model: Any) -> Any:
    """Return the model inside its wrappers. Raise AlignmentError unless the model is aligned."""
    model = unwrapped(model)
    if not is_aligned(model) or not all(is_aligned(module) for module, *_ in _parts(model, model._aligned.spec)):
        raise AlignmentError(f"model is not aligned (got a plain {type(model).__name__}); call align(model) first")
    return model


def _check_model(model: Any) -> DecoderSpec:
    """Return the spec of the model. Raise AlignmentError unless the ops can compute the model."""
    spec, adapted, model = describe_plain(unwrapped(model)), adapted_inside(model), unwrapped(model)
    for module in dict.fromkeys((model, model.model, text_decoder(model))):
        check_signature(plain_class(type(module)))
    if adapted is not None:
        check_adapters(adapted)
        check_tie(model, spec.tie_word_embeddings)
    else:
        check_modules(model)
    if any("forward" in vars(module) for module, *_ in _parts(model, spec)):
        raise AlignmentError(
            "model: the forward pass of a module was replaced; call align before accelerator.prepare, and before any "
            "other code that replaces forward passes"
        )
    head, embedding = trained(model.lm_head), module_of(text_decoder(model), spec.embedding).weight
    check_plain("lm_head", head, model)
    if head.bias is not None or head.weight.shape != embedding.shape:
        raise AlignmentError(
            f"lm_head must have no bias, and have shape {list(embedding.shape)} like the embedding (got "
            f"{list(head.weight.shape)} {'without' if head.bias is None else 'with'} a bias); use another model"
        )
    tower = None if spec.tower is None else getattr(model.config, "vision_config", None)
    for config in (model.config.get_text_config(), tower):
        _check_noise(config)
    _check_parameters(spec, model)
    return spec


def _check_noise(config: Any) -> None:
    """Raise AlignmentError if a config adds noise to a model in training. An aligned model adds no noise."""
    for name in _NOISE:
        if (found := getattr(config, name, 0.0)) != 0.0:
            raise AlignmentError(
                f"{name} must be 0.0 (got {found!r}), since an aligned model adds no noise; pass {name}=0.0 to "
                "from_pretrained, or set it in model.config, or do not align"
            )


def _check_parameters(spec: DecoderSpec, model: Any) -> None:
    """Raise AlignmentError unless the layers have the parameters that the spec requires, and all parameters share one
    dtype.

    A parameter may have another dtype if the spec fixes the parameter's dtype, or if no worker serves the parameter.
    """
    own: set[int] = set()

    def get(layer: nn.Module, prefix: str, name: str, *shape: int, held: WeightSpec = PLAIN, **layout: Any) -> Tensor:
        found = parameter(layer, prefix, name, *shape, held=held, **layout)
        own.update([id(found)] if held.dtype is not None else [])
        return found

    for index, layer in enumerate(text_decoder(model).layers):
        make_layer(spec, index, partial(get, unwrapped(layer), _prefix(index)))
    if spec.tower is not None:
        check_tower(model.model, spec.tower)
    others = (named for named in model.named_parameters() if id(named[1]) not in own)
    dtypes = {one.dtype for name, one in others if ".lora_" not in name and not name.startswith(spec.beside)}
    if len(dtypes) > 1 or not dtypes <= set(_DTYPES):
        names = " and ".join(sorted(map(str, dtypes)))
        raise AlignmentError(
            f"parameters must all have the same dtype, which must be one of {_DTYPES} (got {names}); call "
            "model.to(dtype)"
        )
