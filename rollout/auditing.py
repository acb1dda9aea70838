"""`audit`: compare the log-probs of a trainer and a worker, token by token, and find the causes of differences.

An audit requests a few groups of samples from the worker, computes the log-probs of the samples as the trainer does,
and compares both sets of log-probs bit by bit. The audit also compares everything that determines the bits: alignment,
dtype, backend, instruction set, weights (by checksums of the tensors), weight version, and the token distribution under
which log-probs are computed. For each cause of differences, the result has advice on how to remove the cause. An audit
changes nothing, but the worker pauses between two engine steps while the worker computes checksums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from trueroll.errors import AlignmentError, ConfigError

from ..engine.models.loader import read_config
from ..engine.models.names import resolve_model
from ..engine.request import SampleOutput, SamplingParams
from ..kernels.edits import Masks
from ..kernels.families import describe
from ..kernels.plain_models import is_aligned, is_decoder, spec_of
from ..kernels.precision import NONE, Rounding, roundings, with_quantization
from ..kernels.specs import is_of_mtp
from ..kernels.spellings import own_name
from ..kernels.training import Arithmetic, align, aligned_with, merged_weights, token_log_probs, unalign
from ..kernels.wrappers import adapted_inside, unwrapped
from ..weight_sync.payload.tensors import dtype_named, tensor_checksum
from ..weight_sync.trainer.trainer_tensors import TrainerTensors
from . import protocol
from .client.client import RolloutClient

CauseName: TypeAlias = Literal[
    "alignment",
    "backend",
    "batch",
    "cache",
    "distribution",
    "dtype",
    "instruction set",
    "kv_cache_dtype",
    "nondeterminism",
    "pieces",
    "quantization",
    "rounding",
    "unknown",
    "version",
    "weights",
]
"""The causes that `audit` finds in a worker, and `trueroll audit` in the engine of an HTTP server."""
LogProbs: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(input_ids int64 [B, T], attention_mask bool [B, T]) -> log-prob of each token given the tokens before it [B, T]."""
_Computation: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""As `LogProbs`, with a third argument: whether each token was sampled, bool [B, T]."""
_BATCH = 8
_MOST_NAMES = 5


@dataclass(frozen=True)
class Cause:
    """A cause of different log-probs. `text`: a description of the difference between trainer and engine, and of how to
    remove this difference.
    """

    name: CauseName
    text: str


@dataclass(frozen=True)
class Audit:
    """The result of `audit`.

    - `num_tokens`: number of compared tokens; `num_different`: number of tokens for which trainer and worker have
      different log-prob bits
    - `largest`, `mean`: maximum and mean of the absolute difference between the trainer's and the worker's log-probs
    - `place`: (prompt, sample, token) indices of the largest difference; None if all log-probs are equal
    - `causes`: the differences that were found between trainer and worker
    - `tensors`: names of the tensors that differ between trainer and worker, or that only the trainer or only the
      worker has
    - `is_aligned`: whether the trainer's model is aligned (see `align`)
    - `differences`: for each sample, the trainer's log-probs minus the worker's log-probs, as a float32 array [tokens
      of the sample]. A difference of NaN is replaced with infinity. If the worker sent no log-probs for the sample, all
      elements of the sample's array are infinity
    """

    num_tokens: int
    num_different: int
    largest: float
    mean: float
    place: tuple[int, int, int] | None
    causes: tuple[Cause, ...]
    tensors: tuple[str, ...]
    is_aligned: bool
    differences: tuple[np.ndarray, ...] = field(repr=False, compare=False)

    def __str__(self) -> str:
        if not self.num_different:
            lines = [f"All {self.num_tokens} log-probs have the same bits on both sides."]
        else:
            prompt, sample, token = self.place or (0, 0, 0)
            lines = [
                f"{self.num_different} of {self.num_tokens} log-probs differ: by {self.largest:.3g} at most (prompt "
                f"{prompt}, sample {sample}, token {token}), {self.mean:.3g} on average."
            ]
        return "\n".join([*lines, *(f"- {cause.name}: {cause.text}" for cause in self.causes)])


def audit(
    model: Any,
    client: RolloutClient,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | None = None,
    *,
    temperature: float | None = None,
    version: int | None = None,
    log_probs: LogProbs | None = None,
    masks: Masks | None = None,
) -> Audit:
    """Compare a trainer's log-probs with the log-probs of a worker. The client must have the role `control`.

    - `model`: the transformers model that is trained, or the wrapper that contains this model. If training uses
      autocast, call `audit` under the same autocast. If the model is sharded, call `audit` on every rank, with a
      separate client on each rank.
    - `client`: a client of the worker, or of a fleet. If the workers of a fleet have different weights, `audit` raises
      an error.
    - `prompts`: token ids
    - `params`: sampling parameters; by default 4 samples of 32 tokens for each prompt
    - `temperature`: the number by which the trainer divides the logits. By default, the log-probs of an aligned model
      are computed under the samples' distribution, and the logits of any other model are divided by
      `params.trainer_temperature`
    - `version`: weight version of the trainer's last push; None if the trainer has not pushed
    - `log_probs`: the function with which the trainer computes log-probs; by default `token_log_probs` for an aligned
      model, otherwise the log-softmax of the model's logits
    - `masks`: the `GrammarMasks` of `params`; needed if an aligned model computes the log-probs of samples that were
      generated with a grammar

    Raise the client's errors. Raise ConfigError if there are no prompts, if the model's vocabulary is smaller than the
    worker's vocabulary, or if the log-probs have the wrong shape. Raise AlignmentError if the model has adapters that
    workers do not support, or if `masks` is needed but missing.
    """
    if not len(prompts):
        raise ConfigError("prompts: the list is empty; give at least one prompt of token ids")
    params = SamplingParams(n=4, max_tokens=32, ignore_eos=True) if params is None else params
    # The seed is explicit, so that all ranks get the same samples. `generate` derives a seed for each prompt from this
    # seed.
    unseeded, seed = params.model_copy(update={"seed": None}), params.seed or 0
    groups = client.generate(list(map(list, prompts)), unseeded, seed=seed)
    samples = [
        (prompt, number, index, sample)
        for number, (prompt, group) in enumerate(zip(prompts, groups, strict=True))
        for index, sample in enumerate(group.samples)
    ]
    engine = client.health().engine or {}
    _check_vocabulary(model, engine)
    compute, of_distribution = _computation(model, params, temperature, log_probs, engine, masks)
    compute = _on_device(compute, model)
    with _watched(model) as dtypes:
        computed = zip(_compute(compute, samples), samples, strict=True)
        rows = [_difference(found, sample) for found, (*_, sample) in computed]
    tensors, served = _compare_tensors(model, client)
    causes = [*of_distribution, *_compare_arithmetic(model, engine, dtypes)]
    causes += _compare_version(samples, served.weight_version, version) + _describe_tensors(tensors, served)
    return _summarize(rows, samples, causes, tensors, _is_aligned(model))


def _summarize(
    rows: list[Tensor], samples: list[_Sampled], causes: list[Cause], tensors: tuple[str, ...], is_aligned: bool
) -> Audit:
    """Return the result of an audit. `rows`: for each token of each sample, the trainer's log-prob minus the worker's
    log-prob.
    """
    together = torch.cat(rows).abs()
    num_different = int((together != 0).sum())
    if num_different and not causes:
        causes = [Cause("unknown", _UNKNOWN)]
    worst = max(range(len(rows)), key=lambda i: rows[i].abs().max().item())
    place = (samples[worst][1], samples[worst][2], int(rows[worst].abs().argmax())) if num_different else None
    figures = len(together), num_different, together.max().item(), together.mean().item()
    differences = tuple(row.numpy() for row in rows)
    return Audit(*figures, place, tuple(causes), tensors, is_aligned, differences)


def audit_folder(
    model: str,
    client: RolloutClient,
    prompts: Sequence[Sequence[int]] | None = None,
    params: SamplingParams | None = None,
    with_plain: bool = False,
) -> list[Audit]:
    """Run `audit` on a checkpoint, as a trainer could do before its first training step.

    The checkpoint is loaded in the worker's dtype, and the loaded model is aligned. `model`: name or folder of the
    model, as in `launch_worker`. `prompts`: by default, three prompts of consecutive low token ids. `with_plain`: also
    audit the model without alignment, on the same samples. Raise ConfigError, ModelError or AlignmentError if the model
    cannot be loaded or aligned.
    """
    dtype = dtype_named(str((client.health().engine or {}).get("dtype")))
    loaded = load_trainer(resolve_model(model), dtype)
    most = loaded.config.get_text_config().vocab_size
    prompts = prompts or [[i % most for i in range(3, 3 + length)] for length in (4, 16, 64)]
    served = client.health().engine or {}
    settings = {name: served[name] for name in ("pieces", "quantization", "kv_cache_dtype") if name in served}
    align(loaded, **settings)
    audits = [audit(loaded, client, prompts, params)]
    if with_plain:
        unalign(loaded)
        audits.append(audit(loaded, client, prompts, params))
    return audits


def load_trainer(folder: Path, dtype: torch.dtype) -> Any:
    """Load a checkpoint as a model of transformers in `dtype`. Tensors that a worker always holds in float32, such as a
    router's correction bias, stay float32. For some model families, transformers alone would round these tensors.
    """
    spec = describe(read_config(folder))
    original = getattr(transformers, spec.architecture)
    kept = {spec.names[role] for role in spec.own_dtypes(dtype)} | {*(original._keep_in_fp32_modules_strict or ())}
    fields = {"_keep_in_fp32_modules_strict": kept, "__module__": original.__module__}
    return type(original.__name__, (original,), fields).from_pretrained(folder, dtype=dtype)


_UNKNOWN = (
    "none of the compared properties explains the differences; compute log-probs with token_log_probs, and look for "
    "code that changes hidden states or logits: hooks, dropout, position ids, or padding that attention_mask does not "
    "mark"
)
_Sampled: TypeAlias = tuple[Sequence[int], int, int, SampleOutput]
"""(prompt, prompt index, sample index in the group, sample)."""


def _computation(
    model: Any,
    params: SamplingParams,
    temperature: float | None,
    log_probs: LogProbs | None,
    engine: dict[str, Any],
    masks: Masks | None,
) -> tuple[_Computation, list[Cause]]:
    """Return the function with which the trainer computes log-probs. If the trainer's distribution differs from the
    samples' distribution, also return the cause of the difference. Arguments: as in `audit`. `engine`: the worker's
    engine, as `health` describes it.
    """
    if log_probs is None and temperature is None and params.logprobs is not None and _is_aligned(model):
        drawn: dict[str, Any] = dict(distribution=params, eos_token_ids=engine["eos_token_ids"], masks=masks)
        return lambda ids, mask, sampled: token_log_probs(model, ids, mask, completion_mask=sampled, **drawn), []
    asked, causes = _temperature(params, temperature)
    compute = log_probs or _log_probs_of(model, asked)
    return lambda ids, mask, _: compute(ids, mask), causes


def _temperature(params: SamplingParams, given: float | None) -> tuple[float, list[Cause]]:
    """Return the temperature that the trainer uses. If the samples' log-probs were not computed at this temperature,
    also return the cause of the mismatch.
    """
    try:
        expected = params.trainer_temperature
    except ConfigError as error:
        return params.temperature if given is None else given, [Cause("distribution", str(error))]
    if given is None or given == expected:
        return expected, []
    text = (
        f"the samples' log-probs are at temperature {expected:g} (logprobs={params.logprobs!r}), but the trainer "
        f"divides logits by {given:g}; use params.trainer_temperature"
    )
    return given, [Cause("distribution", text)]


def _decoder(model: Any) -> Any:
    """Return the transformers model that `model` contains as a submodule, even if workers do not support this
    transformers model. If `model` contains no transformers model, return `model`.
    """
    return next(filter(is_decoder, model.modules()), model)


def _checksum(tensor: Tensor, dtype: torch.dtype, rounding: Rounding | None) -> int:
    """Return the checksum that a worker would compute if the worker served the trainer's tensor `tensor`. `dtype`: the
    tensor's dtype in the worker. `rounding`: the worker's rounding of this tensor; None if the worker does not round.
    """
    return tensor_checksum(tensor if rounding is None else rounding(tensor.to(dtype)), dtype)


def _check_vocabulary(model: Any, engine: dict[str, Any]) -> None:
    """Raise ConfigError if the worker's vocabulary is larger than the model's vocabulary."""
    config = getattr(_decoder(model), "config", None)
    most = engine["vocab_size"] if config is None else config.get_text_config().vocab_size
    if most < engine["vocab_size"]:
        raise ConfigError(
            f"model: its vocabulary has {most} tokens, but the worker's vocabulary has {engine['vocab_size']} tokens; "
            "audit the model that the worker serves"
        )


def _on_device(compute: _Computation, model: Any) -> _Computation:
    """Return a function that moves the inputs to the model's device and calls `compute`. The function raises
    ConfigError if the shape of the result is not [B, T].
    """
    weight = next(iter(model.parameters()))
    device = torch.device(weight.device_mesh.device_type) if hasattr(weight, "device_mesh") else weight.device

    def moved(ids: Tensor, mask: Tensor, is_sampled: Tensor) -> Tensor:
        found = compute(ids.to(device), mask.to(device), is_sampled.to(device))
        if found.shape != ids.shape:
            raise ConfigError(
                f"log_probs: must have the shape of input_ids, {list(ids.shape)} (got {list(found.shape)}); return "
                "one log-prob for each token, and 0.0 for the first token of each row"
            )
        return found

    return moved


def _is_aligned(model: Any) -> bool:
    try:
        return is_aligned(unwrapped(model))
    except AlignmentError:
        return False


def _log_probs_of(model: Any, temperature: float) -> LogProbs:
    if _is_aligned(model):
        return lambda ids, mask: token_log_probs(model, ids, mask, temperature=temperature)

    def plain(ids: Tensor, mask: Tensor) -> Tensor:
        logits = model(input_ids=ids, attention_mask=mask).logits.float() / (temperature or 1.0)
        found = logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
        return nn.functional.pad(found, (1, 0))

    return plain


def _compute(compute: _Computation, samples: list[_Sampled]) -> Iterator[Tensor]:
    """For each sample, yield a float32 CPU tensor that contains the trainer's log-probs of the sample's tokens."""
    for start in range(0, len(samples), _BATCH):
        part = samples[start : start + _BATCH]
        rows = [torch.tensor([*prompt, *sample.token_ids]) for prompt, _, _, sample in part]
        ids = pad_sequence(rows, batch_first=True, padding_value=-1)
        starts = torch.tensor([len(prompt) for prompt, *_ in part])
        is_sampled = (ids >= 0) & (torch.arange(ids.shape[1]) >= starts[:, None])
        with torch.no_grad():
            found = compute(ids.clamp(min=0), ids >= 0, is_sampled).float().cpu()
        for row, (prompt, _, _, sample) in zip(found, part, strict=True):
            yield row[len(prompt) : len(prompt) + len(sample.token_ids)]


def _difference(found: Tensor, sample: SampleOutput) -> Tensor:
    """For each token of a sample, return the trainer's log-prob minus the worker's log-prob. A difference of NaN is
    replaced with infinity. If the worker sent no log-probs, all differences are infinity.
    """
    if sample.logprobs is None:
        return torch.full_like(found, torch.inf)
    difference = found - torch.tensor(sample.logprobs)
    return difference.where(~difference.isnan(), torch.inf)


def _compare_arithmetic(model: Any, engine: dict[str, Any], dtypes: set[torch.dtype]) -> list[Cause]:
    """Compare the trainer's model with the worker: alignment, dtype, backend, instruction set, the number of pieces
    into which sums are split, and the quantization of weights and of the KV cache. `dtypes`: the dtypes that `_watched`
    collected; used only if the model is not aligned.
    """
    served = Arithmetic(**{name: engine[name] for name in Arithmetic._fields})
    if not _is_aligned(model):
        text = (
            "the model uses the ops of transformers, which round differently from the worker's; call "
            "align(model) of trueroll.kernels.training, and compute log-probs with token_log_probs"
        )
        if any(map(is_aligned, model.modules())):
            text = (
                f"a {type(model).__name__} wraps the aligned model, so its log-probs come from another softmax than "
                "the worker's; compute them with token_log_probs, from the bare model or a wrapper that "
                "token_log_probs supports"
            )
        return [Cause("alignment", text), *_compare_dtype(_plain_dtype(model, dtypes), served.dtype)]
    own = aligned_with(model)
    causes = _compare_dtype(own.dtype, served.dtype)
    if own.backend != served.backend:
        note = f" (the worker: {engine['backend_note']})" if engine.get("backend_note") else ""
        text = f"the worker uses the backend {served.backend}, the trainer uses {own.backend}{note}; "
        text += f'call align(model, "{served.backend}"), or serve with backend="{own.backend}"'
        return [*causes, Cause("backend", text)]
    if own.isa != served.isa:
        advice = "set TRUEROLL_CPU_ISA on both machines to an instruction set that both support"
        advice = advice if own.backend == "cpu" else "use processors of one architecture, with the same settings"
        text = f"the worker uses the instruction set {served.isa}, the trainer uses {own.isa}; {advice}"
        return [*causes, Cause("instruction set", text)]
    if own.pieces != served.pieces:
        text = f"the worker computes sums in {served.pieces} pieces, the trainer in {own.pieces}; call "
        text += f"align(model, pieces={served.pieces}), or serve with pieces={own.pieces}"
        return [*causes, Cause("pieces", text)]
    if own.quantization != served.quantization:
        text = f"the worker quantizes weights to {served.quantization}, the trainer to {own.quantization}; call "
        text += f'align(model, quantization="{served.quantization}"), or serve with quantization="{own.quantization}"'
        return [*causes, Cause("quantization", text)]
    if own.kv_cache_dtype != served.kv_cache_dtype:
        mine, theirs = own.kv_cache_dtype, served.kv_cache_dtype
        text = f"the worker's kv_cache_dtype is {theirs}, the trainer's is {mine}; call "
        text += f'align(model, kv_cache_dtype="{theirs}"), or serve with kv_cache_dtype="{mine}"'
        return [*causes, Cause("kv_cache_dtype", text)]
    return causes


@contextmanager
def _watched(model: Any) -> Iterator[set[torch.dtype]]:
    """Context manager that collects the output dtypes of the first linear layer.

    Under autocast, or in a wrapper that turns on autocast, the output dtype may differ from the dtype of the
    parameters.
    """
    seen: set[torch.dtype] = set()
    linear = next(module for module in _decoder(model).modules() if isinstance(module, nn.Linear))
    hook = linear.register_forward_hook(lambda module, args, output: seen.add(output.dtype))
    try:
        yield seen
    finally:
        hook.remove()


def _plain_dtype(model: Any, seen: set[torch.dtype]) -> str:
    weight = next(iter(model.parameters()))
    device = weight.device.type
    expected = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    [found] = seen if len(seen) == 1 else {expected}
    return str(found).removeprefix("torch.")


def _compare_dtype(own: str, served: str) -> list[Cause]:
    if own == served:
        return []
    advice = f"train in {served}"
    if own == "float32":
        advice = f'compute log-probs inside torch.autocast("cpu" or "cuda", torch.{served}) or accelerator.autocast()'
    return [
        Cause("dtype", f'the worker computes in {served}, the trainer in {own}; {advice}, or serve with dtype="{own}"')
    ]


def _compare_version(samples: list[_Sampled], served: int, version: int | None) -> list[Cause]:
    """Compare weight versions. `served`: the weight version that the worker served when it computed the checksums."""
    if any(not sample.is_exact for *_, sample in samples):
        text = "the worker drew tokens over KV of older weights (a push with in_flight keep); audit without pushes"
        return [Cause("version", text)]
    found = sorted({served, *(span.version for *_, sample in samples for span in sample.weight_versions)})
    if len(found) > 1:
        return [Cause("version", f"the worker served versions {found} during the audit; audit again without pushes")]
    if version is None or found == [version]:
        return []
    text = f"the worker serves version {found[0]}, but the trainer pushed version {version}"
    return [Cause("version", f"{text}; push again, and generate with min_weight_version={version}")]


def _compare_tensors(model: Any, client: RolloutClient) -> tuple[tuple[str, ...], protocol.Checksums]:
    """Return the names of the tensors that differ between trainer and worker. Also return the worker's checksums.

    Before the comparison, adapters are merged into the trainer's weights. The trainer's tensors are then converted to
    the worker's dtype, and rounded as the worker rounds its weights. The module for multi-token prediction is not
    compared, because no bit of a sample depends on this module.
    """
    served = client.weight_checksums()
    dtype = dtype_named(served.dtype)
    adapted = next(filter(None, map(adapted_inside, model.modules())), None)
    tensors = TrainerTensors(_decoder(model)) if adapted is None else merged_weights(adapted, dtype)
    setting = str((client.health().engine or {}).get("quantization", NONE))
    rounded = {} if setting == NONE else roundings(with_quantization(spec_of(_decoder(model)), setting))
    own = {
        name: _checksum(tensor, dtype_named(served.dtypes.get(name, served.dtype)), rounded.get(name))
        for name, tensor in ((own_name(trained, served), tensor) for trained, tensor in tensors)
        if name is not None
    }
    known = set(served.checksums.values())
    # A trainer's tensor with a name that the worker lacks may be a copy of another tensor, for example a tied LM head.
    # So such a tensor counts as different only if no tensor of the worker has the same checksum.
    others = {name for name, value in own.items() if name not in served.checksums and value not in known}
    others |= {name for name, value in served.checksums.items() if own.get(name) != value}
    return tuple(sorted(name for name in others if not is_of_mtp(name))), served


def _describe_tensors(names: tuple[str, ...], served: protocol.Checksums) -> list[Cause]:
    if not names:
        return []
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    what = f"version {served.weight_version}" if served.push_id else "its own checkpoint, since nothing was pushed"
    text = f"the worker serves {what}, which has different values in {', '.join(names[:_MOST_NAMES])}{more}"
    return [Cause("weights", f"{text}; push the trainer's current weights")]
