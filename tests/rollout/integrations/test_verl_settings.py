"""Translation of verl's settings. Fake configuration sections replace verl's, so verl need not be installed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from refusals import about

from trueroll.engine.config import EngineConfig
from trueroll.errors import ConfigError, InvalidRequestError
from trueroll.rollout.integrations.verl.settings import check_rollout, sampling_params, worker_settings

OF_VERL: dict[str, Any] = dict(
    tensor_model_parallel_size=1,
    data_parallel_size=1,
    pipeline_model_parallel_size=1,
    quantization=None,
    enable_rollout_routing_replay=False,
    logprobs_mode="processed_logprobs",
    dtype="bfloat16",
    prompt_length=512,
    response_length=512,
    max_model_len=None,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    enable_prefix_caching=True,
    enforce_eager=False,
    gpu_memory_utilization=0.5,
    ignore_eos=False,
    engine_kwargs={"vllm": {}},
)
OF_AN_AGENT_LOOP = dict(temperature=0.7, top_p=1, top_k=-1, repetition_penalty=1.0, logprobs=True)


def section(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**(OF_VERL | changes))


def test_the_defaults_of_verl_are_settings_of_a_worker() -> None:
    check_rollout(section())
    settings = worker_settings(section(), "cpu")
    assert settings.pop("num_workers") == 1
    config = EngineConfig(model="m", **settings)
    assert (config.max_model_len, config.kv_memory_fraction, config.cuda_graphs) == (1024, 0.5, True)


def test_settings_for_trueroll_override_the_others() -> None:
    of_trueroll = {"num_blocks": 8, "max_num_seqs": 4, "num_workers": 2}
    settings = worker_settings(section(engine_kwargs={"trueroll": of_trueroll}), "cpu")
    assert settings.pop("num_workers") == 2
    config = EngineConfig(model="m", **settings)
    assert (config.num_blocks, config.kv_memory_fraction, config.max_num_seqs) == (8, None, 4)


@pytest.mark.parametrize(("number", "device"), [(0, "cpu"), (True, "cpu"), ("2", "cpu"), (2, "cuda")])
def test_an_invalid_number_of_workers_is_refused(number: Any, device: str) -> None:
    with pytest.raises(ConfigError, match="num_workers: .* is not valid on .*; set num_workers to 1"):
        worker_settings(section(engine_kwargs={"trueroll": {"num_workers": number}}), device)


@pytest.mark.parametrize(
    ("name", "value"),
    [("tensor_model_parallel_size", 2), ("quantization", "fp8"), ("logprobs_mode", "raw_logits")],
)
def test_unsupported_settings_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"rollout.{name}: '?{value}'? is not supported"):
        check_rollout(section(**{name: value}))


def test_the_parameters_of_an_agent_loop_are_taken() -> None:
    params = sampling_params(OF_AN_AGENT_LOOP, section(), prompt_len=10, seed=3)
    assert (params.temperature, params.logprobs, params.max_tokens, params.seed) == (0.7, "processed", 512, 3)
    edits: dict[str, Any] = dict(repetition_penalty=1.1, presence_penalty=1, frequency_penalty=0.5, logit_bias={3: 2.0})
    edited = sampling_params(OF_AN_AGENT_LOOP | edits, section(), prompt_len=10, seed=3)
    assert (edited.repetition_penalty, edited.presence_penalty, edited.frequency_penalty) == (1.1, 1.0, 0.5)
    assert edited.logit_bias == ((3, 2.0),)
    follows = sampling_params(OF_AN_AGENT_LOOP | {"structured_outputs": {"regex": "[0-9]+"}}, section(), 10, seed=3)
    assert follows.structured_outputs is not None and follows.structured_outputs.regex == "[0-9]+"
    greedy = sampling_params({"temperature": 0}, section(logprobs_mode="raw_logprobs"), prompt_len=10, seed=None)
    assert greedy.is_greedy and greedy.logprobs is None and greedy.seed is None


@pytest.mark.parametrize(
    ("given", "prompt_len", "expected"),
    [({}, 700, 324), ({"max_tokens": 7}, 10, 7), ({"max_new_tokens": 9}, 10, 9), ({"max_tokens": 512}, 1000, 24)],
    ids=["a later turn", "vLLM's name", "SGLang's name", "the end of the context"],
)
def test_no_response_goes_beyond_the_context(given: dict[str, Any], prompt_len: int, expected: int) -> None:
    assert sampling_params(given, section(), prompt_len, seed=None).max_tokens == expected


@pytest.mark.parametrize(
    ("given", "prompt_len", "field"),
    [
        ({"repetition_penalty": 0.0}, 10, "repetition_penalty"),
        ({"n": 2}, 10, "n"),
        ({"beam_width": 2}, 10, "beam_width"),
        ({}, 1024, "prompt"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(given: dict[str, Any], prompt_len: int, field: str) -> None:
    with pytest.raises(InvalidRequestError, check=about(field)):
        sampling_params(given, section(), prompt_len, seed=None)
