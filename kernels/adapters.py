"""Models of PEFT: which weights a LoRA adapter (Hu et al. 2022) is added to, and which modules are trained whole.

What such a model computes with is, for each weight, `Backend.merge` of the weight, A and B, all of them in the dtype of
the forward pass; and of a module in `modules_to_save` the active copy. Knows PEFT by its modules, and does not import
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trueroll.errors import AlignmentError, brief
from trueroll.versions import untested

from .contract import Backend
from .wrappers import plain_class, reshard, within

_LINEAR, _WRAPPER = ("peft.tuners.lora.layer", "Linear"), ("peft.utils.other", "ModulesToSaveWrapper")
_OF_PEFT = (_LINEAR, _WRAPPER)
# What a LoraConfig has where it computes what `Backend.merge` does; other fields that change that are empty there.
_PLAIN = {"peft_type": "LORA", "bias": "none"}
_EMPTY = ("lora_dropout", "lora_bias", "use_dora", "layer_replication", "trainable_token_indices", "target_parameters")
# Fields that say which modules are adapted, how A, B and the scale begin, or how the adapter is stored; and those of
# kinds of LoRA that PEFT computes in classes or variants of its own, which `adapter_of` finds in the modules.
_UNDERSTOOD = {
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights", "fan_in_fan_out"),
    *("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config", "ensure_weight_tying"),
    *("megatron_config", "megatron_core", "alora_invocation_tokens", "use_qalora", "qalora_group_size"),
    *("velora_config", "monteclora_config", "use_bdlora", "arrow_config", "kasa_config"),
}


class Adapter(NamedTuple):
    """What is added to a weight [N, K]: scale * (b [N, R] times a [R, K])."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True)
class AdaptedTensors:
    """The tensors of a PEFT model by the names that its base model has without PEFT.

    `tensors`: all of them, without adapters; `replaced`: those among them that are of `modules_to_save`; `adapters`: by
    the names of the weights that they are added to.
    """

    tensors: Mapping[str, Tensor]
    replaced: frozenset[str]
    adapters: Mapping[str, Adapter]

    def merged(self, dtype: torch.dtype, own: Mapping[str, torch.dtype], ops: Backend) -> Iterator[tuple[str, Tensor]]:
        """Every tensor in its `own` dtype or else in `dtype`, with the adapters in the weights; gathered, where they
        are sharded.
        """
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                adapter = self.adapters.get(name)
                if adapter is not None:
                    adapter = Adapter(_whole(adapter.a), _whole(adapter.b), adapter.scale)
                yield name, with_adapter(ops, _whole(tensor).to(own.get(name, dtype)), adapter)


def check_adapters(model: Any) -> None:
    """Raise AlignmentError for a model of PEFT that computes anything but W + scale * B A, or copies of modules."""
    active = list(_read(model, "active_adapters"))
    if len(active) != 1:
        raise AlignmentError(
            f"adapters: expected one that is active, found {', '.join(active) or 'none'}; call set_adapter with one"
        )
    config = _read(model, "peft_config")[active[0]]
    for field in (*_PLAIN, *_EMPTY):
        found, plain = _read(config, field), _PLAIN.get(field)
        if found != plain and (plain or found):
            raise AlignmentError(
                f"{field}: expected {plain or 'none'} of an adapter, found {getattr(found, 'value', found)!r}; train "
                "LoRA of linear layers alone, without dropout or biases, or merge it into the weights first"
            )
    _check_fields(config)
    check_modules(model.get_base_model())


def _check_fields(config: Any) -> None:
    """Raise AlignmentError for a field of a LoraConfig that is not known here and does not have its default."""
    for field in fields(config):
        if field.name in _UNDERSTOOD or field.name in _PLAIN or field.name in _EMPTY:
            continue
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if (found := getattr(config, field.name)) != default:
            what = f"{type(config).__name__} has {field.name} = {brief(found)}, which trueroll does not know"
            raise AlignmentError(untested("peft", what))


def _read(of_peft: Any, name: str) -> Any:
    """An attribute of one of PEFT's objects. Raise AlignmentError if this version of PEFT does not have it."""
    try:
        return getattr(of_peft, name)
    except AttributeError:
        raise AlignmentError(untested("peft", f"{type(of_peft).__name__} has no {name}")) from None


def check_modules(base: nn.Module) -> None:
    """Raise AlignmentError for what PEFT put into a model, with or without one of its own around it, that computes
    anything but W + scale * B A, or copies of modules.
    """
    for prefix, module in _outermost(base):
        name = prefix.removesuffix(".")
        adapter_of(module, name)
        _check_kind(module, name or "model")


def check_tie(base: Any, is_tied: bool) -> None:
    """Raise AlignmentError for a base model whose head is trained apart from the embedding that it `is_tied` to."""
    head, embedding = current(base.lm_head), base.model.embed_tokens
    is_apart = trained(head).weight is not trained(embedding).weight or adapter_of(head) is not None
    if is_tied and is_apart:
        raise AlignmentError(
            "lm_head: expected the embedding's own weights, as the model's config says, found others, which no worker "
            "of this model has; leave both out of modules_to_save and target_modules"
        )


def _check_kind(module: nn.Module, name: str) -> None:
    if plain_class(type(module)).__module__.startswith("peft.") and _kind(module) not in _OF_PEFT:
        raise AlignmentError(
            f"{name}: expected LoRA of a linear layer, or a module to save, found {'.'.join(_kind(module))}; leave it "
            "out of target_modules"
        )


def trained(module: nn.Module) -> Any:
    """The module whose parameters count: the one inside an adapter, or the active copy of a module to save. Raise
    AlignmentError for another module of PEFT.
    """
    module = current(module)
    _check_kind(module, "adapter")
    return _read(module, "base_layer") if _kind(module) == _LINEAR else module


def current(module: Any) -> Any:
    """The active copy of a module to save, or the module itself."""
    if _kind(module) != _WRAPPER:
        return module
    copies = _read(module, "modules_to_save")
    name = _active(module, copies)
    return _read(module, "original_module") if name is None else copies[name]


def copies_of(module: Any) -> list[nn.Module]:
    """All modules of which one is `current` at a time."""
    if _kind(module) != _WRAPPER:
        return [module]
    return [_read(module, "original_module"), *_read(module, "modules_to_save").values()]


def adapter_of(module: Any, name: str = "") -> Adapter | None:
    """The adapter that a module adds to its weight; None if it has none, or it is disabled.

    Raise AlignmentError, which calls the module `name`, if it is not the active one alone, or not plain LoRA.
    """
    if _kind(module) != _LINEAR:
        return None
    if _read(module, "merged"):
        raise AlignmentError(f"{name or 'adapter'}: expected one that is not merged, found one that is; unmerge it")
    adapters = _read(module, "lora_A")
    active = _active(module, adapters)
    if active is None:
        return None
    b, dropout = _read(module, "lora_B")[active], getattr(_read(module, "lora_dropout")[active], "p", 0.0)
    if active in _read(module, "lora_variant") or b.bias is not None or dropout != 0.0:
        raise AlignmentError(
            f"{name or 'adapter'}: expected plain LoRA without dropout and bias, found another kind; train it so"
        )
    return Adapter(adapters[active].weight, b.weight, _read(module, "scaling")[active])


def read_tensors(model: Any) -> AdaptedTensors:
    """The tensors of a model of PEFT, as they are trained. Raise AlignmentError as `check_adapters` does."""
    check_adapters(model)
    reshard(model)
    tensors: dict[str, Tensor] = {}
    replaced: set[str] = set()
    adapters: dict[str, Adapter] = {}
    for name, module in _outermost(model.get_base_model()):
        inner = trained(module)
        for path, parameter in inner.named_parameters(remove_duplicate=False, recurse=_kind(module) in _OF_PEFT):
            tensors[f"{name}{path}"] = parameter
            if _kind(module) == _WRAPPER and inner is not module.original_module:
                replaced.add(f"{name}{path}")
        if (adapter := adapter_of(module)) is not None:
            adapters[f"{name}weight"] = adapter
    return AdaptedTensors(tensors, frozenset(replaced), adapters)


def _outermost(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The module and those inside it with what their names begin with, but not what is inside modules of PEFT. What
    wraps one of them has no part in its name.
    """
    while (inside := within(module)) is not None:
        module = inside
    yield prefix, module
    for name, child in module.named_children() if _kind(module) not in _OF_PEFT else ():
        yield from _outermost(child, f"{prefix}{name}.")


def with_adapter(ops: Any, weight: Tensor, adapter: Adapter | None) -> Tensor:
    """What a weight becomes by `ops`, with A and B in its dtype; the weight itself where there is no adapter."""
    if adapter is None:
        return weight
    return ops.merge(weight, adapter.a.to(weight.dtype), adapter.b.to(weight.dtype), adapter.scale)


def _active(module: Any, among: Any) -> str | None:
    """The active adapter of a PEFT module, if it is `among` those that it has. Raise AlignmentError for several."""
    active = [name for name in _read(module, "active_adapters") if name in among]
    if _read(module, "disable_adapters") or not active:
        return None
    if len(active) > 1:
        raise AlignmentError(
            f"adapters: expected one that is active, found {', '.join(active)}; call set_adapter with one"
        )
    return active[0]


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _kind(module: Any) -> tuple[str, str]:
    """The module and the name of its class, which an aligned class shares with the one that it is made of."""
    found = plain_class(type(module))
    return found.__module__, found.__name__
