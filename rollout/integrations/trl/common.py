"""Shared parts of the TRL integrations: the translation of settings, the encoding of prompts, and checks of samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np

from trueroll.errors import ConfigError, TruerollError
from trueroll.versions import untested

from ....engine.request import SampleOutput, SamplingParams
from .seams import TrlMissingError

Prompt: TypeAlias = str | list[dict[str, Any]]
"""Text, or the messages of a conversation."""


_SETTINGS = ("repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_completion_length")
"""The settings that all TRL trainers have."""


class WeightsError(TruerollError):
    """A sample was generated with weights other than the weights of the trainer's last push."""


def sampling_params(settings: Mapping[str, Any], stop_token_ids: list[int]) -> SamplingParams:
    """Return sampling parameters from the settings of a TRL trainer. As in TRL, `generation_kwargs` override the
    trainer's other settings.

    Raise ConfigError if a worker does not support a setting. Raise TrlMissingError if the trainer's settings lack a
    setting that this integration reads.
    """
    if missing := [name for name in _SETTINGS if name not in settings]:
        raise TrlMissingError(untested("trl", f"the trainer's settings no longer have {', '.join(missing)}"))
    overrides = settings.get("generation_kwargs") or {}  # AsyncGRPOConfig has no generation_kwargs
    if refused := [name for name in ("n", "seed", "logprobs") if name in overrides]:
        raise ConfigError(
            f"generation_kwargs must not set {', '.join(refused)}: TRL's own settings and this adapter determine n, "
            "seed and logprobs"
        )
    fields = {
        "repetition_penalty": settings["repetition_penalty"],
        "temperature": settings["temperature"],
        "top_p": settings["top_p"],
        "top_k": settings["top_k"] or -1,  # in TRL, 0 and -1 both mean off
        "min_p": settings["min_p"] or 0.0,
        "max_tokens": settings["max_completion_length"],
        "stop_token_ids": stop_token_ids,
    }
    if (regex := settings.get("structured_outputs_regex")) is not None:
        fields["structured_outputs"] = {"regex": regex}
    return SamplingParams(**{**fields, **overrides})


def tokenizer_of(processing_class: Any) -> Any:
    """Return the tokenizer of a trainer's `processing_class`, which is either a tokenizer or a processor that contains
    a tokenizer.
    """
    return getattr(processing_class, "tokenizer", processing_class)


def encode(tokenizer: Any, prompt: Prompt, template: Mapping[str, Any]) -> list[int]:
    """Return the token ids of a text, or of a conversation followed by the generation prompt of its chat template.

    Raise ConfigError for a conversation with images.
    """
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    for message in prompt:
        content = message.get("content")
        if isinstance(content, list) and any(part.get("type") == "image" for part in content):
            raise ConfigError(
                "prompt: images are supported only by GRPOTrainer with trueroll_generation; use that trainer, or "
                "remove the images"
            )
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False, **template)


def check_samples(samples: Iterable[SampleOutput], oldest: int, newest: int) -> None:
    """Check that all samples finished normally with weights of versions `oldest` to `newest`, both inclusive.

    Raise TruerollError for a sample that did not finish normally, and WeightsError for a sample from weights of any
    other version. Raise InvalidRequestError for a sample with tokens that were generated over the KV cache of older
    weights.
    """
    expected = f"{oldest}" if oldest == newest else f"{oldest} to {newest}"
    for sample in samples:
        if sample.finish_reason not in ("stop", "length"):
            raise TruerollError(
                f"sample: generation ended with finish reason {sample.finish_reason} "
                f"({sample.error or 'aborted by a client, or by a push with in_flight abort'}); see the worker's log"
            )
        sample.check_exact()
        for span in sample.weight_versions:
            if not oldest <= span.version <= newest:
                raise WeightsError(
                    f"sample: its weights have version {span.version} instead of {expected}, because the worker was "
                    "restarted, or another program pushed to the worker; connect the publisher to this worker, and "
                    "push only from the trainer"
                )


def logprobs_of(sample: SampleOutput) -> np.ndarray:
    """Return a sample's log-probs as float32 [completion_len]. Every sample has log-probs, because the parameters from
    `sampling_params` request log-probs.
    """
    assert sample.logprobs is not None
    return sample.logprobs


def logprobs(samples: Iterable[SampleOutput]) -> list[list[float]]:
    """Return the log-probs of each sample's tokens."""
    return [logprobs_of(sample).tolist() for sample in samples]
