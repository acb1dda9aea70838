"""What trainers put around a transformers model, or its weights, to train on several devices: what is served of it.

Served is what a module's own call sets off: DistributedDataParallel, torch's checkpoint_wrapper and a model of PEFT,
which are modules around another one, and `fully_shard`, which changes a module in place and gathers its weights before
each call.
"""

from __future__ import annotations

from typing import Any

from trueroll.errors import AlignmentError

_SERVED = {"DistributedDataParallel": "module", "CheckpointWrapper": "_checkpoint_wrapped_module"}
"""By class, the attribute that is the module inside."""
_FULLY_SHARD = "shard with torch.distributed.fsdp.fully_shard (FSDP2)"
_REFUSED = {
    "FullyShardedDataParallel": _FULLY_SHARD,
    "DeepSpeedEngine": f"{_FULLY_SHARD}, which keeps what ZeRO-3 keeps on each rank",
    "DataParallel": "use DistributedDataParallel, with a process for each device",
    "OptimizedModule": "leave torch.compile out, whose code rounds otherwise than a worker",
}
_IN_PLACE = ("FSDPModule", "ReplicateModule")


def unwrapped(model: Any) -> Any:
    """The model inside of wrappers that are served, PEFT's among them. Raise AlignmentError for one of another kind."""
    while (inside := within(model)) is not None or _is_adapted(model):
        model = model.get_base_model() if inside is None else inside
    if (name := type(model).__name__) in _REFUSED:
        raise AlignmentError(
            f"model: expected it bare, sharded in place or in one of {', '.join(_SERVED)}, found a {name}; "
            f"{_REFUSED[name]}"
        )
    return model


def adapted_inside(model: Any) -> Any:
    """The model of PEFT inside of wrappers that are served, or None."""
    while (inside := within(model)) is not None:
        model = inside
    return model if _is_adapted(model) else None


def within(model: Any) -> Any:
    """What is right inside of a wrapper that is served, or None."""
    return getattr(model, _SERVED.get(plain_class(type(model)).__name__, ""), None)


def _is_adapted(model: Any) -> bool:
    return plain_class(type(model)).__module__.startswith("peft.") and hasattr(model, "get_base_model")


def plain_class(found: type) -> type:
    """The class of a module, without the one that `fully_shard` puts before it."""
    return found.__bases__[-1] if found.__bases__[0].__name__ in _IN_PLACE else found


def reshard(model: Any) -> None:
    """Put what `fully_shard` keeps whole after a forward pass, in the dtype of its policy, back into the parts that are
    trained. It is gathered anew when it computes.
    """
    for module in model.modules():
        if any(base.__name__ in _IN_PLACE for base in type(module).__mro__):
            module.reshard()


def check_gathered(name: str, weight: Any) -> None:
    """Raise AlignmentError for a parameter that is in parts while the module that reads it computes."""
    if hasattr(weight, "ds_id"):
        raise AlignmentError(f"{name}: expected a whole tensor, found a part of ZeRO-3; {_FULLY_SHARD}")
    if hasattr(weight, "full_tensor"):  # a DTensor; torch's module for them need not be loaded
        raise AlignmentError(
            f"{name}: expected a whole tensor in the forward pass, found a DTensor of placements "
            f"{list(weight.placements)}; call fully_shard on whole layers and on the model, not on modules inside a "
            "layer, and leave tensor parallelism out"
        )
