"""What all ways into TRL share: settings in its words, prompts as token ids, checks of samples."""

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
"""Of all of TRL's trainers."""


class WeightsError(TruerollError):
    """A sample came from other weights than those that the trainer pushed last."""


def sampling_params(settings: Mapping[str, Any], stop_token_ids: list[int]) -> SamplingParams:
    """From the settings that all of TRL's trainers have. `generation_kwargs` override them, as in TRL."""
    if missing := [name for name in _SETTINGS if name not in settings]:
        raise TrlMissingError(untested("trl", f"the trainer's settings no longer have {', '.join(missing)}"))
    overrides = settings.get("generation_kwargs") or {}  # AsyncGRPOConfig has none
    if refused := [name for name in ("n", "seed", "logprobs") if name in overrides]:
        raise ConfigError(
            "generation_kwargs: expected none of n, seed and logprobs, which TRL's own settings and this adapter "
            f"decide, found {', '.join(refused)}; remove it"
        )
    if settings["repetition_penalty"] != 1.0:
        raise ConfigError(f"repetition_penalty is not supported (got {settings['repetition_penalty']}); set it to 1.0")
    fields = {
        "temperature": settings["temperature"],
        "top_p": settings["top_p"],
        "top_k": settings["top_k"] or -1,  # TRL's 0 and -1 are both off
        "min_p": settings["min_p"] or 0.0,
        "max_tokens": settings["max_completion_length"],
        "stop_token_ids": stop_token_ids,
    }
    return SamplingParams(**{**fields, **overrides})


def encode(tokenizer: Any, prompt: Prompt, template: Mapping[str, Any]) -> list[int]:
    """Token ids of text, or of a conversation with the template's prompt for an answer."""
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False, **template)


def check_samples(samples: Iterable[SampleOutput], oldest: int, newest: int) -> None:
    """Raise unless all samples ended by themselves and came from these versions of the weights, both included."""
    expected = f"{oldest}" if oldest == newest else f"{oldest} to {newest}"
    for sample in samples:
        if sample.finish_reason not in ("stop", "length"):
            raise TruerollError(
                f"sample: expected one that ended by itself, found finish reason {sample.finish_reason}"
                f" ({sample.error or 'a client ended it, or a push with in_flight abort'}); see the worker's log"
            )
        for span in sample.weight_versions:
            if not oldest <= span.version <= newest:
                raise WeightsError(
                    f"sample: expected weights of version {expected}, found {span.version}: the worker was restarted, "
                    "or somebody else pushed to it; connect the publisher to this worker and let the trainer alone push"
                )


def logprobs_of(sample: SampleOutput) -> np.ndarray:
    """Float32 [completion_len]. Every sample has them, as `sampling_params` asks for them."""
    assert sample.logprobs is not None
    return sample.logprobs


def logprobs(samples: Iterable[SampleOutput]) -> list[list[float]]:
    """Of each sample, those of its tokens."""
    return [logprobs_of(sample).tolist() for sample in samples]
