"""Modules of transformers with a replaced forward pass: the class with the new forward pass, the ops that the forward
pass uses, and the parameters that it reads.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trueroll.errors import AlignmentError
from trueroll.versions import untested

from .adapters import adapter_of, trained, with_adapter
from .autograd import GradientOps
from .plain_models import is_aligned
from .precision import rounding_of
from .selection import SelectedBackend, select_backend
from .specs import PLAIN, DecoderSpec, WeightSpec
from .stacks import HeadLayout, StackLayout
from .wrappers import check_gathered, plain_class

log = logging.getLogger(__name__)


class Aligned(NamedTuple):
    """The data that `align` adds to a module. `index`: the number of the layer, or -1 for other modules."""

    backend: str
    spec: DecoderSpec
    index: int = -1


@cache
def aligned_class(original: type, forward: Callable[..., Any]) -> type:
    """Return a subclass for aligned modules, with `forward` as its forward pass.

    The subclass keeps the name of the original class, since trainers use class names to find the layers to wrap or to
    checkpoint. The subclass also keeps the signature, since trainers read a model's arguments from the signature.
    """

    def either(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (forward if is_aligned(self) else original.forward)(self, *args, **kwargs)

    either.__signature__ = inspect.signature(original.forward)  # type: ignore[attr-defined]
    plain = plain_class(original)
    return type(plain.__name__, (original,), {"forward": either, "__module__": plain.__module__})


@cache
def select_and_log(name: str, device: torch.device, dtype: torch.dtype, spec: DecoderSpec) -> SelectedBackend:
    """Select a backend. If the selected backend is a fallback, log the same text as a worker does. The result is
    cached, so a process logs each fallback once.
    """
    found = select_backend(name, device, dtype, spec)
    if found.note:
        log.warning("backend %s, not a faster one: %s", found.name, found.note)
    return found


def chosen(module: Any, device: torch.device, dtype: torch.dtype) -> SelectedBackend:
    """Return the backend of an aligned module for hidden states with this device and dtype."""
    return select_and_log(module._aligned.backend, device, dtype, module._aligned.spec)


def ops_of(module: Any, x: Tensor) -> GradientOps:
    """Return the ops of an aligned module for the hidden states x."""
    return GradientOps(chosen(module, x.device, x.dtype).ops)


def forward_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype in which a forward pass uses this weight, given the current autocast."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def as_computed(
    name: str, module: nn.Module, leaf: str, x: Tensor, ops: GradientOps, held: WeightSpec = PLAIN
) -> Tensor:
    """Return the tensor that a module uses as its parameter `leaf`, with the parameter's adapter merged.

    If `held` has a dtype, the tensor has this dtype; otherwise it has the dtype of the hidden states x. If `held` has a
    format, an adapter is added to the values of the quantized matrix, because a worker has only these values. The sum
    of the adapter and these values is not quantized.
    """
    own = held.dtype
    weight, adapter = getattr(trained(module), leaf), adapter_of(module) if leaf == "weight" else None
    for tensor in (weight, *(adapter or ())[:2]):
        check_gathered(name, tensor)
    if own is None and forward_dtype(weight) != x.dtype:
        raise AlignmentError(
            f"{name} must be {x.dtype} like the hidden states (got {forward_dtype(weight)}); use one "
            "MixedPrecisionPolicy for all modules, with output_dtype unset or equal to param_dtype"
        )
    weight = weight.to(own or x.dtype)
    if adapter is not None:
        weight = ops.rounded(weight, rounding_of(held, None))
    return with_adapter(ops, weight, adapter)


def parameter(
    owner: nn.Module,
    prefix: str,
    name: str,
    *shape: int,
    layout: StackLayout | HeadLayout | None = None,
    held: WeightSpec = PLAIN,
) -> Tensor:
    """Return the parameter `name` of a part of a model. Raise AlignmentError unless the parameter matches the model's
    config.

    `owner`, `prefix`: as in `place`. If `layout` is given, `shape` is the shape of matrices [E, R, C] or biases [E, R].
    A matrix must be in a module of transformers, an nn.Linear or an nn.Embedding. If `held` names a dtype, the
    parameter must have this dtype.
    """
    module, leaf = place(owner, prefix, name)
    module = trained(module)
    if len(shape) == 2 or layout is not None:
        check_plain(name, module, owner)
    stored = held.shape or (shape if layout is None else layout.shape(shape))
    found = _attribute(module, leaf, name)
    if found is None or found.shape != stored:
        size = "none" if found is None else list(found.shape)
        raise AlignmentError(
            f"{name} must have shape {list(stored)} to match the model's config (got {size}); correct the config or "
            "the parameter"
        )
    if held.dtype not in (None, found.dtype):
        raise AlignmentError(
            f"{name} must be {held.dtype}, as in a worker (got {found.dtype}, which has rounded its values); add "
            f"{name.removeprefix(prefix)!r} to _keep_in_fp32_modules_strict of the model's class before you load the "
            "model. If a MixedPrecisionPolicy rounds a frozen parameter, pass the parameter to fully_shard in "
            "ignored_params. For a trained parameter, use autocast instead of a MixedPrecisionPolicy, and shard "
            "float32 parameters"
        )
    return found


def place(owner: nn.Module, prefix: str, name: str) -> tuple[nn.Module, str]:
    """Find a parameter by name. Return the module that holds the parameter, and the parameter's name in that module.

    `owner`: a layer, or another part of the model. `prefix`: the prefix of the names of the owner's parameters.
    """
    path, _, leaf = name.removeprefix(prefix).rpartition(".")
    try:
        return owner.get_submodule(path), leaf
    except AttributeError:
        raise AlignmentError(untested("transformers", f"{type(owner).__name__} has no module for {name}")) from None


def _attribute(module: Any, leaf: str, name: str) -> Any:
    try:
        return getattr(module, leaf)
    except AttributeError:
        raise AlignmentError(untested("transformers", f"{type(module).__name__} has no {leaf} for {name}")) from None


def check_plain(name: str, module: nn.Module, neighbour: nn.Module) -> None:
    """Raise AlignmentError unless `module` is an nn.Linear or an nn.Embedding, or its class is defined in the same
    Python module as the class of `neighbour`.

    transformers defines the routers and experts of a family in the same Python module as the family's other classes.
    """
    found = plain_class(type(module))
    if found not in (nn.Linear, nn.Embedding) and found.__module__ != plain_class(type(neighbour)).__module__:
        raise AlignmentError(
            f"{name} must be nn.Linear or a class of {type(neighbour).__module__} (got {found.__name__}); merge "
            "adapters into the weights"
        )
