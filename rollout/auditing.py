"""How far a trainer's log-probs are from a worker's, token by token, and why: `audit`, for any trainer.

Samples a few groups, computes their log-probs as the trainer does, and compares bits; and compares what decides the
bits: alignment, dtype, backend, instruction set, weights by the checksums of their tensors, version, and which
distribution the log-probs are of. Says what to change. Changes nothing, but a worker stops between two steps while it
computes checksums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from trueroll.errors import AlignmentError, ConfigError

from ..engine.models.loader import resolve_model
from ..engine.request import SampleOutput, SamplingParams
from ..kernels.plain_models import is_aligned, is_decoder
from ..kernels.training import Arithmetic, align, aligned_with, merged_weights, token_log_probs
from ..kernels.wrappers import adapted_inside, unwrapped
from ..weight_sync.payload.tensors import dtype_named, tensor_checksum
from ..weight_sync.trainer.trainer_tensors import TrainerTensors
from . import protocol
from .client.client import RolloutClient

CauseName: TypeAlias = Literal[
    "alignment", "dtype", "backend", "instruction set", "weights", "version", "distribution", "unknown"
]
LogProbs: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(input_ids int64 [B, T], attention_mask bool [B, T]) to the log-prob of each token given those before it [B, T]."""
_BATCH = 8
_MOST_NAMES = 5


@dataclass(frozen=True)
class Cause:
    """One thing that trainer and worker do not have in common; `text` says what, and what to change."""

    name: CauseName
    text: str


@dataclass(frozen=True)
class Audit:
    """What `audit` has found. `num_different`: of `num_tokens`, those whose log-prob has other bits. `largest`, `mean`:
    of |trainer - worker|. `place`: the prompt, sample and token of the largest; None where all are equal. `tensors`:
    the names of those that differ, or that one side does not have.
    """

    num_tokens: int
    num_different: int
    largest: float
    mean: float
    place: tuple[int, int, int] | None
    causes: tuple[Cause, ...]
    tensors: tuple[str, ...]

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
) -> Audit:
    """Compare a trainer's log-probs with those of the worker of `client`, whose role must be control. A fleet's client
    will do: then it is also an error if its workers have different weights.

    `model`: of transformers, as it is trained: in its wrapper, and in the autocast around this call. Where it is
    sharded, every rank calls this, each with a client. `prompts`: token ids. `params`: of the samples, by default 4 of
    32 tokens each. `temperature`: what the trainer divides logits by; by default what `params` ask for. `version`: of
    the weights that the trainer pushed last, if it has. `log_probs`: how the trainer computes them, by default
    `token_log_probs` of an aligned model, and else the log-softmax of the model's logits.

    Raise what the client raises; ConfigError for no prompts, for a model of fewer tokens than the worker's, and for
    log-probs of another shape; AlignmentError for adapters that no worker serves.
    """
    if not len(prompts):
        raise ConfigError("prompts: expected some, found none; give token ids")
    params = SamplingParams(n=4, max_tokens=32, ignore_eos=True) if params is None else params
    asked, of_distribution = _temperature(params, temperature)
    # One that is given, so that all ranks have the same samples; each prompt gets one of its own from it.
    unseeded, seed = params.model_copy(update={"seed": None}), params.seed or 0
    groups = client.generate(list(map(list, prompts)), unseeded, seed=seed)
    samples = [
        (prompt, number, index, sample)
        for number, (prompt, group) in enumerate(zip(prompts, groups, strict=True))
        for index, sample in enumerate(group.samples)
    ]
    engine = client.health().engine or {}
    _check_vocabulary(model, engine)
    compute = _on_device(log_probs or _log_probs_of(model, asked), model)
    with _watched(model) as dtypes:
        computed = zip(_compute(compute, samples), samples, strict=True)
        rows = [_difference(found, sample) for found, (*_, sample) in computed]
    tensors, served = _compare_tensors(model, client)
    causes = [*of_distribution, *_compare_arithmetic(model, engine, dtypes)]
    causes += _compare_version(samples, served.weight_version, version) + _describe_tensors(tensors, served)
    together = torch.cat(rows)
    num_different = int((together != 0).sum())
    if num_different and not causes:
        causes.append(Cause("unknown", _UNKNOWN))
    worst = max(range(len(rows)), key=lambda i: rows[i].max().item())
    place = (samples[worst][1], samples[worst][2], int(rows[worst].argmax())) if num_different else None
    largest, mean = together.max().item(), together.mean().item()
    return Audit(len(together), num_different, largest, mean, place, tuple(causes), tensors)


def audit_folder(model: str, client: RolloutClient) -> Audit:
    """`audit` of a checkpoint in the worker's dtype, aligned, with prompts of its first tokens: of a trainer that is
    about to begin. `model`: as for a worker. Raise ConfigError, ModelError and AlignmentError for what cannot be loaded
    or aligned.
    """
    dtype = dtype_named(str((client.health().engine or {}).get("dtype")))
    loaded = AutoModelForCausalLM.from_pretrained(resolve_model(model), dtype=dtype, trust_remote_code=False)
    align(loaded)
    most = loaded.config.get_text_config().vocab_size
    return audit(loaded, client, [[i % most for i in range(3, 3 + length)] for length in (4, 16, 64)])


_UNKNOWN = (
    "nothing that was compared explains it; compute log-probs by token_log_probs, and look for what changes hidden "
    "states or logits on the way: hooks, dropout, position ids, or a padding that attention_mask does not mark"
)
_Sampled: TypeAlias = tuple[Sequence[int], int, int, SampleOutput]
"""Prompt, its number, the sample's number in its group, the sample."""


def _temperature(params: SamplingParams, given: float | None) -> tuple[float, list[Cause]]:
    """The trainer's, and what is wrong with it."""
    try:
        expected = params.trainer_temperature
    except ConfigError as error:
        return params.temperature if given is None else given, [Cause("distribution", str(error))]
    if given is None or given == expected:
        return expected, []
    text = (
        f"the samples' log-probs are of temperature {expected:g} (logprobs={params.logprobs!r}), the trainer divides "
        f"logits by {given:g}; use params.trainer_temperature"
    )
    return given, [Cause("distribution", text)]


def _decoder(model: Any) -> Any:
    """The transformers model inside of any wrapper, served or not, that keeps it as a module."""
    return next(filter(is_decoder, model.modules()), model)


def _check_vocabulary(model: Any, engine: dict[str, Any]) -> None:
    """Raise ConfigError if the worker samples tokens that the model does not have."""
    config = getattr(_decoder(model), "config", None)
    most = engine["vocab_size"] if config is None else config.get_text_config().vocab_size
    if most < engine["vocab_size"]:
        raise ConfigError(
            f"model: expected a vocabulary of {engine['vocab_size']} tokens, like the worker's, found {most}; it is "
            "another model, audit the one that is served"
        )


def _on_device(log_probs: LogProbs, model: Any) -> LogProbs:
    """With token ids and mask where the model computes. Raise ConfigError for a result that is not [B, T]."""
    weight = next(iter(model.parameters()))
    device = torch.device(weight.device_mesh.device_type) if hasattr(weight, "device_mesh") else weight.device

    def compute(ids: Tensor, mask: Tensor) -> Tensor:
        found = log_probs(ids.to(device), mask.to(device))
        if found.shape != ids.shape:
            raise ConfigError(
                f"log_probs: expected {list(ids.shape)} like input_ids, found {list(found.shape)}; give each token's, "
                "and 0.0 for the first ones"
            )
        return found

    return compute


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


def _compute(log_probs: LogProbs, samples: list[_Sampled]) -> Iterator[Tensor]:
    """The trainer's log-probs of each sample's tokens: float32 on the host."""
    for start in range(0, len(samples), _BATCH):
        part = samples[start : start + _BATCH]
        rows = [torch.tensor([*prompt, *sample.token_ids]) for prompt, _, _, sample in part]
        ids = pad_sequence(rows, batch_first=True, padding_value=-1)
        with torch.no_grad():
            found = log_probs(ids.clamp(min=0), ids >= 0).float().cpu()
        for row, (prompt, _, _, sample) in zip(found, part, strict=True):
            yield row[len(prompt) : len(prompt) + len(sample.token_ids)]


def _difference(found: Tensor, sample: SampleOutput) -> Tensor:
    """|trainer - worker| of a sample's tokens; infinite for NaN, and without log-probs of the worker."""
    if sample.logprobs is None:
        return torch.full_like(found, torch.inf)
    difference = (found - torch.tensor(sample.logprobs)).abs()
    return difference.where(~difference.isnan(), torch.inf)


def _compare_arithmetic(model: Any, engine: dict[str, Any], dtypes: set[torch.dtype]) -> list[Cause]:
    """`dtypes`: those that were seen at work in a model that is not aligned, if any."""
    served = Arithmetic(*(str(engine.get(name)) for name in Arithmetic._fields))
    if not _is_aligned(model):
        text = (
            "the model computes with the ops of transformers, which round otherwise than the worker's; call "
            "align(model) of trueroll.kernels.training, and compute log-probs by token_log_probs"
        )
        if any(map(is_aligned, model.modules())):
            text = (
                f"a {type(model).__name__} is around the aligned model, and log-probs come from its logits, by another "
                "softmax than the worker's; compute them by token_log_probs, with the model bare or in a wrapper that "
                "this takes"
            )
        return [Cause("alignment", text), *_compare_dtype(_plain_dtype(model, dtypes), served.dtype)]
    own = aligned_with(model)
    causes = _compare_dtype(own.dtype, served.dtype)
    if own.backend != served.backend:
        note = f" (the worker: {engine['backend_note']})" if engine.get("backend_note") else ""
        text = f"the worker computes by {served.backend}, the trainer by {own.backend}{note}; "
        text += f'call align(model, "{served.backend}"), or serve with backend="{own.backend}"'
        return [*causes, Cause("backend", text)]
    if own.isa != served.isa:
        advice = "set TRUEROLL_CPU_ISA to one that both machines have, for both"
        advice = advice if own.backend == "cpu" else "use processors of one architecture, with the same settings"
        text = f"the worker computes with {served.isa}, the trainer with {own.isa}; {advice}"
        return [*causes, Cause("instruction set", text)]
    return causes


@contextmanager
def _watched(model: Any) -> Iterator[set[torch.dtype]]:
    """The dtypes in which the first product of a layer comes out while this is open: those that a wrapper or its own
    autocast makes of the parameters'.
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
    """`served`: that of the weights when their checksums were computed."""
    found = sorted({served, *(span.version for *_, sample in samples for span in sample.weight_versions)})
    if len(found) > 1:
        return [Cause("version", f"the worker has served versions {found} meanwhile; audit while nobody pushes")]
    if version is None or found == [version]:
        return []
    text = f"the worker serves version {found[0]}, the trainer has pushed {version}"
    return [Cause("version", f"{text}; push again, and demand min_weight_version={version} of samples")]


def _compare_tensors(model: Any, client: RolloutClient) -> tuple[tuple[str, ...], protocol.Checksums]:
    """The names of tensors that are not the worker's, in its dtype and with adapters."""
    served = client.weight_checksums()
    dtype = dtype_named(served.dtype)
    adapted = next(filter(None, map(adapted_inside, model.modules())), None)
    own = {
        name: tensor_checksum(tensor, dtype_named(served.dtypes.get(name, served.dtype)))
        for name, tensor in (TrainerTensors(_decoder(model)) if adapted is None else merged_weights(adapted, dtype))
    }
    known = set(served.checksums.values())
    # A name that the worker does not have may be a copy of another tensor, as a tied head is.
    others = {name for name, value in own.items() if name not in served.checksums and value not in known}
    others |= {name for name, value in served.checksums.items() if own.get(name) != value}
    return tuple(sorted(others)), served


def _describe_tensors(names: tuple[str, ...], served: protocol.Checksums) -> list[Cause]:
    if not names:
        return []
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    what = f"version {served.weight_version}" if served.push_id else "its own checkpoint, for nothing was pushed"
    text = f"the worker serves {what}, which has other values in {', '.join(names[:_MOST_NAMES])}{more}"
    return [Cause("weights", f"{text}; push the weights that the trainer computes with")]
