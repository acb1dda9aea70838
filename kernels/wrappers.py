"""The wrappers that trainers put around a transformers model or its weights, and which of these wrappers are supported.

A wrapper is supported if all of its work runs when the wrapped module is called. Some wrappers are modules around
another module: DistributedDataParallel, torch's checkpoint_wrapper and a model of PEFT. `fully_shard` instead changes a
module in place and gathers the module's weights before each call.
"""

from __future__ import annotations

from typing import Any

from trueroll.errors import AlignmentError

_SERVED = {"DistributedDataParallel": "module", "CheckpointWrapper": "_checkpoint_wrapped_module"}
"""For each wrapper class, the attribute that holds the wrapped module."""
_FULLY_SHARD = "shard with torch.distributed.fsdp.fully_shard (FSDP2)"
_REFUSED = {
    "FullyShardedDataParallel": _FULLY_SHARD,
    "DeepSpeedEngine": f"{_FULLY_SHARD}, which shards the same tensors as ZeRO-3",
    "DataParallel": "use DistributedDataParallel, with a process for each device",
    "OptimizedModule": "do not use torch.compile, since compiled code rounds differently from a worker",
}
_IN_PLACE = ("FSDPModule", "ReplicateModule")


def unwrapped(model: Any) -> Any:
    """Return the model inside its supported wrappers, including PEFT's wrapper. Raise AlignmentError for any other
    wrapper.
    """
    while (inside := within(model)) is not None or _is_adapted(model):
        model = model.get_base_model() if inside is None else inside
    if (name := type(model).__name__) in _REFUSED:
        raise AlignmentError(
            f"model: the wrapper {name} is not supported (supported: fully_shard, {', '.join(_SERVED)}); "
            f"{_REFUSED[name]}"
        )
    return model


def text_decoder(model: Any) -> Any:
    """Return the decoder of a transformers model. If the model has a vision tower, the decoder is the module beside the
    tower.
    """
    return getattr(model.model, "language_model", model.model)


def adapted_inside(model: Any) -> Any:
    """Return the PEFT model inside its supported wrappers, or None."""
    while (inside := within(model)) is not None:
        model = inside
    return model if _is_adapted(model) else None


def within(model: Any) -> Any:
    """Return the module directly inside a supported wrapper, or None."""
    return getattr(model, _SERVED.get(plain_class(type(model)).__name__, ""), None)


def _is_adapted(model: Any) -> bool:
    return plain_class(type(model)).__module__.startswith("peft.") and hasattr(model, "get_base_model")


def plain_class(found: type) -> type:
    """Return the original class of a module, even if `fully_shard` has put another class in front of it."""
    return found.__bases__[-1] if found.__bases__[0].__name__ in _IN_PLACE else found


def reshard(model: Any) -> None:
    """Reshard the modules that `fully_shard` keeps gathered after a forward pass. The gathered weights are in the dtype
    of the module's policy.

    Resharding restores the shards of the trained weights. The next forward pass gathers the modules again.
    """
    for module in model.modules():
        if any(base.__name__ in _IN_PLACE for base in type(module).__mro__):
            module.reshard()


def check_gathered(name: str, weight: Any) -> None:
    """Raise AlignmentError for a parameter that is still sharded when a module reads it."""
    if hasattr(weight, "ds_id"):
        raise AlignmentError(f"{name}: the tensor is sharded by ZeRO-3, which is not supported; {_FULLY_SHARD}")
    if hasattr(weight, "full_tensor"):  # a DTensor; torch's module for DTensors need not be loaded
        raise AlignmentError(
            f"{name}: the tensor is still a DTensor in the forward pass (placements {list(weight.placements)}); call "
            "fully_shard on whole layers and on the model, not on modules inside a "
            "layer, and do not use tensor parallelism"
        )
