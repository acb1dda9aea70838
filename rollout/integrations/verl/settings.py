"""Translate verl's settings to trueroll's settings. Unsupported settings raise an error. Imports nothing from verl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trueroll.errors import ConfigError, InvalidRequestError

from ....engine.request import SamplingParams

NAME = "trueroll"
"""The rollout's name in verl's settings."""
LOGPROBS_MODES = {"processed_logprobs": "processed", "raw_logprobs": "raw", "temperature": "temperature"}
"""trueroll's `logprobs` for each `rollout.logprobs_mode`. verl defines the first two modes, and trueroll adds the
third.
"""
ONLY = {
    "tensor_model_parallel_size": 1,
    "data_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "quantization": None,
}
KV_SETTINGS = ("num_blocks", "kv_memory", "kv_memory_fraction")


def check_rollout(config: Any) -> None:
    """Raise ConfigError if a `rollout` section has a setting that a worker does not support."""
    for name, value in ONLY.items():
        if (found := getattr(config, name)) != value:
            raise ConfigError(f"rollout.{name}: {found} is not supported; set it to {value}")
    if config.logprobs_mode not in LOGPROBS_MODES:
        raise ConfigError(
            f"rollout.logprobs_mode: {config.logprobs_mode!r} is not supported; set it to one of "
            f"{', '.join(LOGPROBS_MODES)}"
        )


def worker_settings(config: Any, device: str) -> dict[str, Any]:
    """Convert a `rollout` section to settings for `launch_worker`. In addition to the settings for `launch_worker`, the
    returned dict contains `num_workers`, the number of workers in the replica.

    The section's `engine_kwargs.trueroll` may contain any settings of EngineConfig and WorkerConfig. Settings in
    `engine_kwargs.trueroll` override all other settings. Raise ConfigError if `num_workers` is not possible on the
    device.
    """
    own = dict(config.engine_kwargs.get(NAME) or {})
    settings = {
        "device": device,
        "dtype": config.dtype,
        "max_model_len": max_model_len(config),
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "enable_prefix_caching": config.enable_prefix_caching,
        "cuda_graphs": not config.enforce_eager,
    }
    if not any(name in own for name in KV_SETTINGS):
        settings["kv_memory_fraction"] = config.gpu_memory_utilization
    num_workers = own.pop("num_workers", 1)
    if type(num_workers) is not int or num_workers < 1 or (num_workers > 1 and device != "cpu"):
        raise ConfigError(
            f"engine_kwargs.{NAME}.num_workers: {num_workers!r} is not valid on {device}; set num_workers to 1 (on "
            "cpu, any integer of at least 1 is valid)"
        )
    return settings | own | {"num_workers": num_workers}


def max_model_len(config: Any) -> int:
    """Return the maximum number of tokens of prompt and response together."""
    return config.max_model_len or config.prompt_length + config.response_length


def sampling_params(given: Mapping[str, Any], config: Any, prompt_len: int, seed: int | None) -> SamplingParams:
    """Return the sampling parameters of a request, with defaults from a `rollout` section.

    `seed`: None lets the worker choose a seed. Raise InvalidRequestError if a parameter is not supported, or if the
    prompt leaves no room for a response. The error names the parameter.
    """
    fields = {"ignore_eos": config.ignore_eos, "seed": seed, **given}
    if fields.get("n", 1) != 1:
        text = f"n: must be 1, because verl takes one sample per request (got {fields['n']})"
        raise InvalidRequestError(text, field="n", value=fields["n"], limit=1)
    fields.pop("detokenize", None)  # ignored, because samples have no text
    fields["logprobs"] = LOGPROBS_MODES[config.logprobs_mode] if fields.get("logprobs") else None
    fields["return_routed_experts"] = config.enable_rollout_routing_replay
    fields["max_tokens"] = _max_tokens(fields, config, prompt_len)
    return SamplingParams(**fields)


def _max_tokens(fields: dict[str, Any], config: Any, prompt_len: int) -> int:
    """Remove the keys `max_tokens` and `max_new_tokens` from `fields`, and return the maximum number of new tokens."""
    room = max_model_len(config) - prompt_len
    if room < 1:
        raise InvalidRequestError(
            f"prompt: its {prompt_len} tokens leave no room for a response (max_model_len = {max_model_len(config)}); "
            "shorten the prompt, or raise rollout.max_model_len",
            field="prompt",
            value=prompt_len,
            limit=max_model_len(config) - 1,
        )
    of_turns = config.prompt_length + config.response_length - prompt_len
    wanted = [fields.pop(name) for name in ("max_tokens", "max_new_tokens") if fields.get(name) is not None]
    return max(1, min(*(wanted or [config.response_length, of_turns]), room))
