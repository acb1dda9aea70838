"""verl's settings in trueroll's words, and refusals of those that a worker does not have. Imports nothing of verl's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trueroll.errors import ConfigError, InvalidRequestError

from ....engine.request import SamplingParams

NAME = "trueroll"
"""Of the rollout, in verl's settings."""
LOGPROBS_MODES = {"processed_logprobs": "processed", "raw_logprobs": "raw", "temperature": "temperature"}
"""By `rollout.logprobs_mode`: the first two are verl's own words."""
ONLY = {
    "tensor_model_parallel_size": 1,
    "data_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "quantization": None,
    "enable_rollout_routing_replay": False,
}
NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
KV_SETTINGS = ("num_blocks", "kv_memory", "kv_memory_fraction")


def check_rollout(config: Any) -> None:
    """Raise ConfigError for a `rollout` section that asks for what a worker does not do."""
    for name, value in ONLY.items():
        if (found := getattr(config, name)) != value:
            raise ConfigError(f"rollout.{name}: expected {value}, as a worker has nothing else, found {found}; set it")
    if config.logprobs_mode not in LOGPROBS_MODES:
        raise ConfigError(
            f"rollout.logprobs_mode: expected one of {', '.join(LOGPROBS_MODES)}, found {config.logprobs_mode!r}; "
            "correct it"
        )


def worker_settings(config: Any, device: str) -> dict[str, Any]:
    """For `launch_worker`, from a `rollout` section, and `num_workers`: how many of them the replica has. Its
    `engine_kwargs.trueroll`, which holds settings of EngineConfig and of WorkerConfig, overrides the others.

    Raise ConfigError for a number of workers that the device cannot have.
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
            f"engine_kwargs.{NAME}.num_workers: expected an integer from 1 on, and 1 where a replica has an "
            f"accelerator, found {num_workers!r} on {device}; correct it"
        )
    return settings | own | {"num_workers": num_workers}


def max_model_len(config: Any) -> int:
    """The most tokens that prompt and response have together."""
    return config.max_model_len or config.prompt_length + config.response_length


def sampling_params(given: Mapping[str, Any], config: Any, prompt_len: int, seed: int | None) -> SamplingParams:
    """From the parameters of one request, and where it names none, from a `rollout` section. `seed` None: the worker's
    choice.

    Raise InvalidRequestError, by its name, for what a worker does not serve, and for a prompt that leaves no room.
    """
    fields = {"ignore_eos": config.ignore_eos, "seed": seed, **given}
    for name, value in NEUTRAL.items():
        if (found := fields.pop(name, value)) != value:
            text = f"{name} is not supported (got {found}); set it to {value}"
            raise InvalidRequestError(text, field=name, value=found)
    if fields.get("n", 1) != 1:
        text = f"n: expected 1, as verl takes one sample of a request, found {fields['n']}"
        raise InvalidRequestError(text, field="n", value=fields["n"], limit=1)
    fields["logprobs"] = LOGPROBS_MODES[config.logprobs_mode] if fields.get("logprobs") else None
    fields["max_tokens"] = _max_tokens(fields, config, prompt_len)
    return SamplingParams(**fields)


def _max_tokens(fields: dict[str, Any], config: Any, prompt_len: int) -> int:
    """Takes it out of `fields`, by the name of vLLM or of SGLang."""
    room = max_model_len(config) - prompt_len
    if room < 1:
        raise InvalidRequestError(
            f"prompt: expected fewer than max_model_len = {max_model_len(config)} tokens, found {prompt_len}; shorten "
            "it, or raise rollout.max_model_len",
            field="prompt",
            value=prompt_len,
            limit=max_model_len(config) - 1,
        )
    of_turns = config.prompt_length + config.response_length - prompt_len
    wanted = [fields.pop(name) for name in ("max_tokens", "max_new_tokens") if fields.get(name) is not None]
    return max(1, min(*(wanted or [config.response_length, of_turns]), room))
