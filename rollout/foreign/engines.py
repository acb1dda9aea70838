"""Clients of the engines that an audit supports, one class for each wire format.

The supported formats are the format of vLLM's OpenAI server (`/v1/completions`, with vLLM's fields
`return_tokens_as_token_ids` and `cache_salt`) and the format of SGLang's native API (`/generate`, with `extra_key` as
the salt of the prefix cache).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

import numpy as np

from trueroll.errors import ConfigError, ProtocolError, brief

from .wire import Wire

_PLAIN = {"top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Sampling parameters with the values that turn them off. Every request contains these parameters, because a server
would otherwise use the defaults of the model's generation config.
"""
_NAME = "token_id:"
_MOST_NAME_CHARS = 1000
_LEAST, _MOST = -1e6, 1e-3
"""Limits of a log-prob. Rounding can move a log-prob above 0."""
T = TypeVar("T")


@dataclass(frozen=True)
class Ask:
    """One request. `temperature` 0 is greedy; `top_k` -1 is off. `salt`: only requests with the same salt share cached
    prefixes, so a new salt causes a cache miss.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    top_k: int
    salt: str


@dataclass(frozen=True)
class Drawn:
    """An engine's sample: token ids and their log-probs (float32). `num_cached`: the number of prompt tokens that the
    engine found in its prefix cache; None if the engine does not report this number.
    """

    token_ids: tuple[int, ...]
    logprobs: np.ndarray
    num_cached: int | None


class Engine(Protocol):
    """An engine behind a server.

    `kind`: the engine's name. `model`: the name of the served model. `max_model_len`: maximum length of a sequence, in
    tokens; None if the server does not report this length.
    """

    kind: str
    model: str
    max_model_len: int | None

    def sample(self, ask: Ask) -> Drawn:
        """Send a request and return its sample. Raise the same errors as `Wire.post`. Raise ProtocolError if the reply
        does not have the documented form.
        """
        ...


def find_engine(wire: Wire) -> Engine:
    """Return the engine behind a server. The server's answer to `/v1/models` names the kind of engine in the field
    `owned_by`.

    Raise ConfigError for an unsupported kind of engine. Also raise the errors of `Wire.get`.
    """
    told = wire.get("/v1/models")
    card = _read(wire, "/v1/models", lambda: dict(told["data"][0]))
    kind, model, longest = card.get("owned_by"), card.get("id"), card.get("max_model_len")
    if not isinstance(model, str) or len(model) > _MOST_NAME_CHARS:
        raise ProtocolError(f"{wire.url}: /v1/models has no usable name of a model (got {brief(model)})")
    if kind not in _DOORS:
        raise ConfigError(
            f"address: the server at {wire.url} says that its models are owned by {brief(kind)}; an audit supports "
            f"the servers of {', '.join(_DOORS)}: give the URL of such a server, not of a gateway in front "
            "of the server"
        )
    name, door = _DOORS[kind]
    return door(wire, name, model, longest if isinstance(longest, int) else None)


class CompletionsEngine:
    """An engine behind the endpoint `/v1/completions` of vLLM or of trueroll's front end. Requests have no seed: vLLM's
    CPU build 0.32.0 exits if a request with a seed is prefilled in chunks.
    """

    def __init__(self, wire: Wire, kind: str, model: str, max_model_len: int | None) -> None:
        self._wire, self.kind, self.model, self.max_model_len = wire, kind, model, max_model_len

    def sample(self, ask: Ask) -> Drawn:
        drawn = dict(max_tokens=ask.max_tokens, temperature=ask.temperature, top_k=ask.top_k)
        asked = dict(model=self.model, prompt=list(ask.prompt), ignore_eos=True, cache_salt=ask.salt, logprobs=1)
        path = "/v1/completions"
        told = self._wire.post(path, _PLAIN | drawn | asked | {"return_tokens_as_token_ids": True})

        def read() -> Drawn:
            found = told["choices"][0]["logprobs"]
            tokens = [int(name.removeprefix(_NAME)) for name in found["tokens"]]
            details = (told.get("usage") or {}).get("prompt_tokens_details") or {}
            return _drawn(ask, tokens, found["token_logprobs"], details.get("cached_tokens"))

        return _read(self._wire, path, read)


class SglangEngine:
    """An engine behind SGLang's endpoint `/generate`."""

    def __init__(self, wire: Wire, kind: str, model: str, max_model_len: int | None) -> None:
        self._wire, self.kind, self.model, self.max_model_len = wire, kind, model, max_model_len

    def sample(self, ask: Ask) -> Drawn:
        drawn = dict(max_new_tokens=ask.max_tokens, temperature=ask.temperature, top_k=ask.top_k, ignore_eos=True)
        asked = dict(input_ids=list(ask.prompt), sampling_params=_PLAIN | drawn)
        asked |= dict(return_logprob=True, extra_key=ask.salt)
        path = "/generate"
        told = self._wire.post(path, asked)

        def read() -> Drawn:
            found = told["meta_info"]["output_token_logprobs"]
            return _drawn(ask, [row[1] for row in found], [row[0] for row in found], told["meta_info"]["cached_tokens"])

        return _read(self._wire, path, read)


def _drawn(ask: Ask, token_ids: list[int], logprobs: list[float], num_cached: int | None) -> Drawn:
    """Check the values of a sample, and return the sample. Raise ValueError or TypeError if a value is invalid."""
    if not 0 < len(token_ids) <= ask.max_tokens or len(token_ids) != len(logprobs):
        raise ValueError(f"{len(token_ids)} tokens and {len(logprobs)} log-probs for {ask.max_tokens} requested tokens")
    if any(type(token) is not int or not 0 <= token < 2**31 for token in token_ids):
        raise ValueError("a token id is not an integer from 0 to 2**31 - 1")
    if num_cached is not None and (type(num_cached) is not int or not 0 <= num_cached <= len(ask.prompt)):
        raise ValueError(f"{brief(num_cached)} cached tokens of a prompt of {len(ask.prompt)} tokens")
    if any(type(logprob) not in (int, float) or not _LEAST <= logprob <= _MOST for logprob in logprobs):
        raise ValueError("a log-prob is not a number from -1e6 to 1e-3")
    return Drawn(tuple(token_ids), np.array(logprobs, np.float32), num_cached)


def _read(wire: Wire, path: str, read: Callable[[], T]) -> T:
    """Call `read`, which parses the answer to a request. Raise ProtocolError if the answer does not have the documented
    form.
    """
    try:
        return read()
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ProtocolError(
            f"{wire.url}: the answer to {path} does not have the documented form ({type(error).__name__}: "
            f"{brief(str(error))})"
        ) from None


_Door: TypeAlias = Callable[[Wire, str, str, int | None], Engine]
_DOORS: dict[str, tuple[str, _Door]] = {
    "vllm": ("vLLM", CompletionsEngine),
    "sglang": ("SGLang", SglangEngine),
    "trueroll": ("trueroll", CompletionsEngine),
}
