"""`trueroll audit MODEL URL`: compare the log-probs of an engine behind an HTTP server with a trainer's log-probs,
token by token, and find the causes of the differences.

The same requests are sent under five conditions. First, each request runs alone and misses the prefix cache; second,
the first condition is repeated; third, each request runs alone and hits the cache; fourth, the requests run together
with other requests and miss the cache; fifth, they run together with other requests and hit the cache. Every prompt is
sampled greedily and at a temperature. To miss the cache, a request gets a new cache salt, so an audit flushes nothing,
and other users of the server keep their cache. The log-probs of each condition are compared with the trainer's
log-probs. The greedy samples of each condition are also compared with the greedy samples of the first condition.
"""

from __future__ import annotations

import logging
import random
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from trueroll.errors import ConfigError, printable

from ..auditing import Cause
from .causes import Change, Verdict, compare, find_causes, judge
from .engines import Ask, Drawn, Engine, find_engine
from .trainer import DTYPES, DistributionName, Sampled, Trainer
from .wire import Wire

MAX_TOKENS = 24
TEMPERATURE, TOP_K = 0.7, 5
"""Temperature and `top_k` of the requests that are not greedy. `TOP_K` is small, so that the filter clearly changes the
log-probs.
"""
PROMPT_LENGTHS = (40, 150, 280)
"""Two of these lengths exceed a block of the engine's cache (16 tokens in vLLM, 128 in its CPU build), so that hits
occur.
"""
NUM_OTHERS = 8
"""Number of other requests that run together with the audited requests."""
MISS, AGAIN, HIT = "miss, alone", "miss, alone, again", "hit, alone"
MISS_IN_COMPANY, HIT_IN_COMPANY = "miss, in company", "hit, in company"
_log = logging.getLogger(__name__)
_TOLD: dict[DistributionName, str] = {
    "raw": "at temperature 1, whatever the request's",
    "temperature": "at the request's temperature",
    "processed": "at the request's temperature, after its filters",
}


@dataclass(frozen=True)
class Distance:
    """Differences between a trainer's log-probs and the engine's log-probs. `values`: for each sample, the trainer's
    log-probs minus the engine's log-probs, float32 [tokens]; NaN is replaced with infinity.
    """

    values: tuple[np.ndarray, ...] = field(repr=False)

    @property
    def num_different(self) -> int:
        return int(np.count_nonzero(np.concatenate(self.values)))

    def __str__(self) -> str:
        sizes = np.abs(np.concatenate(self.values))
        return f"{self.num_different} of {len(sizes)} differ (largest {sizes.max():.3g}, mean {sizes.mean():.3g})"


@dataclass(frozen=True)
class Condition:
    """The results of the requests that were sent under one condition.

    `aligned`, `plain`: the differences between the engine's log-probs and the trainer's log-probs. For `aligned`, the
    trainer's model is aligned; for `plain`, it runs transformers' own forward pass. `num_cached`: number of prompt
    tokens that came from the prefix cache; None if the engine does not report this number. `change`: how the greedy
    samples differ from the greedy samples under the condition `MISS`.
    """

    name: str
    aligned: Distance
    plain: Distance
    num_cached: int | None
    change: Change


@dataclass(frozen=True)
class EngineAudit:
    """The result of `audit_engine`.

    `server`: the engine and its model. `dtype`: the dtype in which the trainer computed the log-probs for `conditions`.
    If the differences reveal the engine's dtype, `dtype` is the engine's dtype, otherwise the checkpoint's dtype.
    `distribution`: the distribution under which the engine computes log-probs.
    """

    server: str
    dtype: str
    distribution: DistributionName
    conditions: tuple[Condition, ...]
    causes: tuple[Cause, ...]

    def __str__(self) -> str:
        lines = [f"{self.server}: log-probs {_TOLD[self.distribution]}; trainer in {self.dtype}"]
        for each in self.conditions:
            cached = "" if each.num_cached is None else f"; {each.num_cached} cached prompt tokens"
            change = "" if each.name == MISS else f"; against {MISS}: {each.change}"
            lines.append(f"{each.name}: aligned {each.aligned}, transformers {each.plain}{cached}{change}")
        told = [f"- {cause.name}: {cause.text}" for cause in self.causes]
        return "\n".join([*lines, *(told or ["No cause of differences was found."])])


def audit_engine(
    model: str,
    url: str,
    prompts: Sequence[Sequence[int]] | None = None,
    max_tokens: int = MAX_TOKENS,
    api_key: str | None = None,
) -> EngineAudit:
    """Compare the engine behind `url` with the checkpoint `model`. The checkpoint is loaded on this machine, as a
    trainer loads a checkpoint.

    `prompts`: by default, prompts of consecutive low token ids of the lengths `PROMPT_LENGTHS`. `api_key`: the key that
    the server needs, if any. Raise ConfigError if the URL or the server is not supported, if the engine ignores cache
    salts (a request that must miss the cache then hits the cache), or if the engine samples a token that the
    checkpoint's vocabulary lacks. Raise UnavailableError or ProtocolError if the server does not answer as documented.
    Raise ModelError or AlignmentError if the checkpoint cannot be loaded or aligned.
    """
    engine, trainer = find_engine(Wire(url, api_key)), Trainer(model)
    asks = _asks(prompts or _prompts(engine, trainer, max_tokens), max_tokens)
    found = _sample_all(engine, asks, trainer.vocab_size)
    if any(drawn.num_cached for name in (MISS, AGAIN, MISS_IN_COMPANY) for drawn in found[name]):
        raise ConfigError(
            f"address: the {engine.kind} server at {url} has cache hits for requests with new salts; a release that "
            "knows cache_salt (vLLM) or extra_key (SGLang) is needed to tell hits from misses"
        )
    return _compare(f"{engine.kind} ({printable(engine.model)})", trainer, asks, found)


def _prompts(engine: Engine, trainer: Trainer, max_tokens: int) -> list[list[int]]:
    longest = min(engine.max_model_len or trainer.max_len, trainer.max_len) - max_tokens
    if longest < 1:
        raise ConfigError(
            f"the engine's maximum sequence length is too small for {max_tokens} new tokens; serve the model with a "
            "larger maximum"
        )
    lengths = [min(length, longest) for length in PROMPT_LENGTHS]
    return [[(start + i) % trainer.vocab_size for i in range(length)] for start, length in enumerate(lengths, 3)]


def _asks(prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Ask]:
    """For each prompt, return a greedy request and a request with the temperature `TEMPERATURE`. The requests have no
    salts.
    """
    kinds = (0.0, -1), (TEMPERATURE, TOP_K)
    return [
        Ask(tuple(prompt), max_tokens, temperature, top_k, "") for prompt in prompts for temperature, top_k in kinds
    ]


def _sample_all(engine: Engine, asks: Sequence[Ask], vocab_size: int) -> dict[str, list[Drawn]]:
    """Send the requests under each condition, and return their samples. To hit the cache, a request is sent again with
    the same salt.

    Raise ConfigError if a sample has a token id of `vocab_size` or more.
    """

    def sample(ask: Ask) -> Drawn:
        drawn = engine.sample(ask)
        if (most := max(drawn.token_ids)) >= vocab_size:
            raise ConfigError(
                f"model: its vocabulary has {vocab_size} tokens, but the engine drew token {most}; give the checkpoint "
                f"of the model {printable(engine.model)} that the engine serves"
            )
        return drawn

    def alone(name: str, salted: Sequence[Ask]) -> list[Drawn]:
        _log.info("sampling: %s", name)
        return [sample(ask) for ask in salted]

    def in_company(name: str, salted: Sequence[Ask]) -> list[Drawn]:
        _log.info("sampling: %s", name)
        others = _salted([_other(asks, number, vocab_size) for number in range(NUM_OTHERS)])
        with ThreadPoolExecutor(len(salted) + len(others)) as pool:
            return [*pool.map(sample, [*salted, *others])][: len(salted)]

    first, second, third = _salted(asks), _salted(asks), _salted(asks)
    found = {MISS: alone(MISS, first), AGAIN: alone(AGAIN, second), HIT: alone(HIT, first)}
    found[MISS_IN_COMPANY] = in_company(MISS_IN_COMPANY, third)
    found[HIT_IN_COMPANY] = in_company(HIT_IN_COMPANY, third)
    return found


def _salted(asks: Sequence[Ask]) -> list[Ask]:
    return [replace(ask, salt=f"trueroll-audit-{secrets.token_hex(16)}") for ask in asks]


def _other(asks: Sequence[Ask], number: int, vocab_size: int) -> Ask:
    """Return a request with a random prompt. The random prompt has the same length as the prompt of one of `asks`."""
    chance, like = random.Random(number), asks[number % len(asks)]
    prompt = tuple(chance.randrange(vocab_size) for _ in like.prompt)
    return Ask(prompt, like.max_tokens, 1.0, -1, "")


def _compare(server: str, trainer: Trainer, asks: Sequence[Ask], found: Mapping[str, list[Drawn]]) -> EngineAudit:
    samples = {
        name: [(ask, drawn.token_ids) for ask, drawn in zip(asks, each, strict=True)] for name, each in found.items()
    }
    told: dict[Sampled, np.ndarray] = {}
    for name in (AGAIN, MISS):
        told |= {key: drawn.logprobs for key, drawn in zip(samples[name], found[name], strict=True)}
    plain = {dtype: trainer.plain([*told], dtype) for dtype in DTYPES}
    verdict = _judge(told, plain)
    dtype = verdict.dtype or trainer.dtype
    distinct = [*dict.fromkeys(key for each in samples.values() for key in each)]
    own = dict(zip(told, plain[dtype][verdict.distribution], strict=True))
    if others := [key for key in distinct if key not in own]:
        own |= zip(others, trainer.plain(others, dtype)[verdict.distribution], strict=True)
    aligned = dict(zip(distinct, trainer.aligned(distinct, dtype, verdict.distribution), strict=True))
    conditions = tuple(_condition(name, asks, found, aligned, own) for name in found)
    changes = {each.name: each.change for each in conditions}
    pairs = {"again": changes[AGAIN], "cache": changes[HIT], "batch": changes[MISS_IN_COMPANY]}
    is_exact = dtype == trainer.dtype and not (
        conditions[0].aligned.num_different and conditions[0].plain.num_different
    )
    causes = find_causes(verdict, trainer.dtype, pairs, is_exact, TEMPERATURE)
    return EngineAudit(server, dtype, verdict.distribution, conditions, causes)


def _judge(
    told: Mapping[Sampled, np.ndarray], plain: Mapping[str, Mapping[DistributionName, Sequence[np.ndarray]]]
) -> Verdict:
    """Find the dtype and the distribution of the engine's log-probs `told`. `plain`: the log-probs that the trainer
    computes for the same samples in each dtype.
    """
    by_dtype: dict[str, dict[DistributionName, np.ndarray]] = {
        dtype: {name: np.concatenate(rows) for name, rows in by_name.items()} for dtype, by_name in plain.items()
    }
    greedy = np.concatenate([np.full(len(token_ids), not ask.temperature) for ask, token_ids in told])
    return judge(np.concatenate([*told.values()]), greedy, by_dtype)


def _condition(
    name: str,
    asks: Sequence[Ask],
    found: Mapping[str, list[Drawn]],
    aligned: Mapping[Sampled, np.ndarray],
    plain: Mapping[Sampled, np.ndarray],
) -> Condition:
    samples = found[name]
    keys = [(ask, drawn.token_ids) for ask, drawn in zip(asks, samples, strict=True)]
    cached = [drawn.num_cached for drawn in samples if drawn.num_cached is not None]
    greedy = [i for i, ask in enumerate(asks) if not ask.temperature]
    before, after = ([(each[i].token_ids, each[i].logprobs) for i in greedy] for each in (found[MISS], samples))
    return Condition(
        name,
        _distance([aligned[key] for key in keys], samples),
        _distance([plain[key] for key in keys], samples),
        sum(cached) if cached else None,
        compare(before, after),
    )


def _distance(own: Sequence[np.ndarray], samples: Sequence[Drawn]) -> Distance:
    with np.errstate(invalid="ignore"):
        rows = [mine - drawn.logprobs for mine, drawn in zip(own, samples, strict=True)]
    return Distance(tuple(np.where(np.isnan(row), np.float32(np.inf), row) for row in rows))
