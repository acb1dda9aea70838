"""The places where trueroll plugs into TRL, checked against the installed version of TRL.

If TRL passes an argument that trueroll does not know, samples or training could be wrong. So unknown arguments raise an
error when the integration is imported or created.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from trueroll.errors import TruerollError
from trueroll.versions import untested


class TrlMissingError(TruerollError, ImportError):
    """TRL is not installed, or its version does not have the interface that the integration needs."""


GENERATION = {
    "__init__": {
        *("model", "accelerator", "processing_class", "mode", "structured_outputs_regex", "server_base_url"),
        *("server_host", "server_port", "server_timeout", "group_port", "tensor_parallel_size"),
        *("gpu_memory_utilization", "max_model_length", "max_num_seqs", "enable_sleep_mode", "model_impl"),
        *("trust_remote_code", "repetition_penalty", "temperature", "top_p", "top_k", "min_p"),
        *("max_completion_length", "logprobs", "generation_kwargs"),
    },
    "generate": {"prompts", "images", "num_generations", "profiler"},
    "sync_weights": set(),
}
"""The methods of TRL's class VLLMGeneration and the arguments of each method. `TruerollGeneration` replaces this class.
"""
FUSED_HEAD = {"model", "temperature", "cast_lm_head_to_fp32", "outputs"}
"""Arguments of `add_fused_lm_head`, which `AlignedGRPOTrainer` replaces with `align`."""
LOG_PROBS = {
    *("model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy", "compute_aux_loss"),
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
    *("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
}
"""Arguments of GRPOTrainer's `_get_per_token_logps_and_entropies`, which `AlignedGRPOTrainer` overrides."""
SAMPLE = {
    *("prompt", "completion", "input_ids", "completion_mask", "old_log_probs", "advantage", "model_version"),
    *("group_id", "metrics", "enqueued_at"),
}
"""Fields of `RolloutSample`, which `TruerollWorker` creates."""
TRANSFER = ("init_weight_transfer", "pause", "send_weights", "resume", "destroy")
"""Methods that TRL requires of a weight transfer."""
WORKER = ("rollout_buffer", "metrics_queue", "start", "stop", "update_model_version", "check_health")
"""Methods and attributes that TRL requires of a rollout worker."""


def check_grpo(module: Any) -> None:
    """Raise TrlMissingError unless `trl.trainer.grpo_trainer` has all functions and classes that trueroll replaces,
    with the expected arguments.
    """
    generation = _found(module, "VLLMGeneration")
    for name, known in GENERATION.items():
        _check(f"VLLMGeneration.{name}", _found(generation, name), known)
    _check("add_fused_lm_head", _found(module, "add_fused_lm_head"), FUSED_HEAD)
    name = "_get_per_token_logps_and_entropies"
    _check(f"GRPOTrainer.{name}", _found(_found(module, "GRPOTrainer"), name), LOG_PROBS)


def check_sample(sample: type) -> None:
    """Raise TrlMissingError unless TRL's RolloutSample has exactly the fields that trueroll sets."""
    _check("RolloutSample", sample, SAMPLE)


def check_protocol(protocol: type, known: Iterable[str]) -> None:
    """Raise TrlMissingError unless the class `protocol` of TRL has exactly the methods and attributes in `known`."""
    asked = {name for name in (*vars(protocol), *inspect.get_annotations(protocol)) if not name.startswith("_")}
    _compare(protocol.__name__, asked, {*known})


def _found(where: Any, name: str) -> Any:
    if not hasattr(where, name):
        raise TrlMissingError(untested("trl", f"{getattr(where, '__name__', where)} has no {name}"))
    return getattr(where, name)


def _check(name: str, function: Callable[..., Any], known: set[str]) -> None:
    _compare(name, inspect.signature(function).parameters.keys() - {"self"}, known)


def _compare(name: str, found: Iterable[str], known: set[str]) -> None:
    more, fewer = sorted({*found} - known), sorted(known - {*found})
    if more:
        raise TrlMissingError(untested("trl", f"{name} has {', '.join(more)}, which trueroll does not know"))
    if fewer:
        raise TrlMissingError(untested("trl", f"{name} no longer has {', '.join(fewer)}"))
