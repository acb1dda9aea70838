"""In a PEFT model, find the weights with a LoRA adapter (Hu et al. 2022), and the modules that are fully trained.

A PEFT model changes weights in two ways. A weight with an adapter is replaced by `Backend.merge` of the weight and the
adapter's matrices A and B, each in the dtype of the forward pass. A module listed in `modules_to_save` is replaced by
its active copy. This module recognizes PEFT's classes by Python module and class name, and does not import PEFT.
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
from .lora_config import EMPTY, INERT, KINDS, PLAIN, USED
from .quantization import Format, round_trip
from .wrappers import plain_class, reshard, within

_LINEAR, _WRAPPER = ("peft.tuners.lora.layer", "Linear"), ("peft.utils.other", "ModulesToSaveWrapper")
_OF_PEFT = (_LINEAR, _WRAPPER)
_EMPTY = ("lora_dropout", *EMPTY)
_UNDERSTOOD = USED | INERT | KINDS  # in modules, `adapter_of` detects the use of KINDS
_HINTS = {
    "target_parameters": (
        "; PEFT turns targets of a mixture such as gate_proj, up_proj and down_proj, also those of 'all-linear', into "
        "parameters of the experts: name other modules in target_modules"
    )
}


class Adapter(NamedTuple):
    """A LoRA adapter of a weight [N, K]. The adapter adds scale * (b @ a) to the weight; `a` is [R, K] and `b` is [N,
    R].
    """

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True)
class AdaptedTensors:
    """The tensors of a PEFT model, named as in the base model without PEFT.

    `tensors`: all tensors, without adapters. `replaced`: the names of the tensors that come from active copies of
    modules in `modules_to_save`. `adapters`: maps the name of each adapted weight to the weight's adapter.
    """

    tensors: Mapping[str, Tensor]
    replaced: frozenset[str]
    adapters: Mapping[str, Adapter]

    def merged(
        self, dtype: torch.dtype, own: Mapping[str, torch.dtype], formats: Mapping[str, Format], ops: Backend
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor, with adapters merged into the weights.

        Each tensor is in the dtype that `own` gives for the tensor's name, or in `dtype` if `own` lacks the name.
        `formats`: the format of each quantized weight, by name. Sharded tensors are gathered.
        """
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                adapter = self.adapters.get(name)
                weight = _whole(tensor).to(own.get(name, dtype))
                if adapter is not None:
                    adapter = Adapter(_whole(adapter.a), _whole(adapter.b), adapter.scale)
                    weight = round_trip(weight, formats[name]) if name in formats else weight
                yield name, with_adapter(ops, weight, adapter)


def check_adapters(model: Any) -> None:
    """Check that a PEFT model uses only plain LoRA (W + scale * B A) and active copies of modules.
    Raise AlignmentError otherwise.
    """
    active = list(_read(model, "active_adapters"))
    if len(active) != 1:
        raise AlignmentError(
            f"adapters: exactly one adapter must be active (got {', '.join(active) or 'none'}); activate one with "
            "set_adapter"
        )
    config = _read(model, "peft_config")[active[0]]
    for field in (*PLAIN, *_EMPTY):
        found, plain = _read(config, field), PLAIN.get(field)
        if found != plain and (plain or found):
            raise AlignmentError(
                f"{field} = {getattr(found, 'value', found)!r} is not supported in an adapter; use LoRA of linear "
                "layers only, without dropout or biases, or merge the adapter into the weights first"
                f"{_HINTS.get(field, '')}"
            )
    _check_fields(config)
    check_modules(model.get_base_model())


def _check_fields(config: Any) -> None:
    """Raise AlignmentError if a LoraConfig has a non-default value in a field that this module does not know."""
    for field in fields(config):
        if field.name in _UNDERSTOOD or field.name in PLAIN or field.name in _EMPTY:
            continue
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if (found := getattr(config, field.name)) != default:
            what = f"{type(config).__name__} has {field.name} = {brief(found)}, which trueroll does not know"
            raise AlignmentError(untested("peft", what))


def _read(of_peft: Any, name: str) -> Any:
    """Return an attribute of a PEFT object. Raise AlignmentError if this version of PEFT lacks the attribute."""
    try:
        return getattr(of_peft, name)
    except AttributeError:
        raise AlignmentError(untested("peft", f"{type(of_peft).__name__} has no {name}")) from None


def check_modules(base: nn.Module) -> None:
    """Check that each PEFT module in `base` is either a linear layer with plain LoRA (W + scale * B A) or a module in
    `modules_to_save`. Raise AlignmentError otherwise.

    `base`: the model without PEFT's outer wrapper, or a model that PEFT never wrapped.
    """
    for prefix, module in _outermost(base):
        name = prefix.removesuffix(".")
        adapter_of(module, name)
        _check_kind(module, name or "model")


def check_tie(base: Any, is_tied: bool) -> None:
    """Raise AlignmentError if the config ties head and embedding (`is_tied`), but the model trains them separately."""
    head, embedding = current(base.lm_head), base.get_input_embeddings()
    is_apart = trained(head).weight is not trained(embedding).weight or adapter_of(head) is not None
    if is_tied and is_apart:
        raise AlignmentError(
            "lm_head is trained separately from the embedding, but the model's config and the workers tie the two "
            "modules; leave both modules out of modules_to_save and target_modules"
        )


def _check_kind(module: nn.Module, name: str) -> None:
    if plain_class(type(module)).__module__.startswith("peft.") and _kind(module) not in _OF_PEFT:
        raise AlignmentError(
            f"{name}: PEFT modules of the kind {'.'.join(_kind(module))} are not supported, only LoRA of linear layers "
            "and modules in modules_to_save; leave this module out of target_modules"
        )


def trained(module: nn.Module) -> Any:
    """Return the module that holds the trained weight: the layer inside an adapter, the active copy of a module in
    `modules_to_save`, or the module itself.

    Raise AlignmentError for any other module of PEFT.
    """
    module = current(module)
    _check_kind(module, "adapter")
    return _read(module, "base_layer") if _kind(module) == _LINEAR else module


def current(module: Any) -> Any:
    """Return the active copy of a module in `modules_to_save`; return any other module itself."""
    if _kind(module) != _WRAPPER:
        return module
    copies = _read(module, "modules_to_save")
    name = _active(module, copies)
    return _read(module, "original_module") if name is None else copies[name]


def copies_of(module: Any) -> list[nn.Module]:
    """Return every module that `current` may return for this module."""
    if _kind(module) != _WRAPPER:
        return [module]
    return [_read(module, "original_module"), *_read(module, "modules_to_save").values()]


def adapter_of(module: Any, name: str = "") -> Adapter | None:
    """Return the adapter that a module adds to its weight, or None if the module has no enabled adapter.

    Raise AlignmentError, with the module's `name`, if several adapters are active, or if the adapter is merged or not
    plain LoRA.
    """
    if _kind(module) != _LINEAR:
        return None
    if _read(module, "merged"):
        raise AlignmentError(f"{name or 'adapter'}: a merged adapter is not supported; unmerge it")
    adapters = _read(module, "lora_A")
    active = _active(module, adapters)
    if active is None:
        return None
    b, dropout = _read(module, "lora_B")[active], getattr(_read(module, "lora_dropout")[active], "p", 0.0)
    if active in _read(module, "lora_variant") or b.bias is not None or dropout != 0.0:
        raise AlignmentError(
            f"{name or 'adapter'}: this kind of LoRA is not supported; use plain LoRA without dropout and bias"
        )
    return Adapter(adapters[active].weight, b.weight, _read(module, "scaling")[active])


def read_tensors(model: Any) -> AdaptedTensors:
    """Return the trained tensors of a PEFT model. Raise AlignmentError in the same cases as `check_adapters`."""
    check_adapters(model)
    reshard(model)
    tensors: dict[str, Tensor] = {}
    replaced: set[str] = set()
    adapters: dict[str, Adapter] = {}
    for name, module in _outermost(model.get_base_model()):
        inner = trained(module)
        for path, tensor in _saved(inner, recurse=_kind(module) in _OF_PEFT):
            tensors[f"{name}{path}"] = tensor
            if _kind(module) == _WRAPPER and inner is not module.original_module:
                replaced.add(f"{name}{path}")
        if (adapter := adapter_of(module)) is not None:
            adapters[f"{name}weight"] = adapter
    return AdaptedTensors(tensors, frozenset(replaced), adapters)


def _saved(module: nn.Module, recurse: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a module's `state_dict` by name: parameters, and persistent buffers. `recurse`: include the
    submodules.
    """
    yield from module.named_parameters(remove_duplicate=False, recurse=recurse)
    for prefix, part in module.named_modules() if recurse else [("", module)]:
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _outermost(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a module and all its submodules, each together with the prefix of its parameters' names.

    Do not descend into PEFT modules. A supported wrapper does not change the prefix of the module that it wraps.
    """
    while (inside := within(module)) is not None:
        module = inside
    yield prefix, module
    for name, child in module.named_children() if _kind(module) not in _OF_PEFT else ():
        yield from _outermost(child, f"{prefix}{name}.")


def with_adapter(ops: Any, weight: Tensor, adapter: Adapter | None) -> Tensor:
    """Return `ops.merge` of a weight and an adapter, with A and B in the weight's dtype. Without an adapter, return
    `weight`.
    """
    if adapter is None:
        return weight
    return ops.merge(weight, adapter.a.to(weight.dtype), adapter.b.to(weight.dtype), adapter.scale)


def _active(module: Any, among: Any) -> str | None:
    """Return the name of a PEFT module's active adapter, if the name is in `among`; None if no such adapter is active,
    or if adapters are disabled. Raise AlignmentError if several adapters are active.
    """
    active = [name for name in _read(module, "active_adapters") if name in among]
    if _read(module, "disable_adapters") or not active:
        return None
    if len(active) > 1:
        raise AlignmentError(
            f"adapters: exactly one adapter must be active (got {', '.join(active)}); activate one with set_adapter"
        )
    return active[0]


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _kind(module: Any) -> tuple[str, str]:
    """Return the class of an nn.Module as (Python module, class name); for an aligned class, the original class."""
    found = plain_class(type(module))
    return found.__module__, found.__name__
