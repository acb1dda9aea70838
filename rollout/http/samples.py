"""The latest groups of samples that this front end returned, for the page at `/ui`.

Owns: the tokens and log-probs of the kept groups, as arrays, and the images of their prompts. Guarantees that at most
`MOST_GROUPS` groups and `MOST_BYTES` bytes are kept, for prompts and samples of any length. The oldest groups are
evicted first.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...engine.media import ImageInput
from ...engine.request import SampleOutput, SamplingParams, WeightSpan
from .images import num_bytes

MOST_GROUPS = 300
MOST_BYTES = 64 * 2**20
MOST_GROUP_BYTES = 8 * 2**20
"""Maximum size of one group, in bytes. Samples beyond this size are not kept."""
MOST_IMAGE_BYTES = 16 * 2**20
"""Maximum size of the images of one group, in bytes. Larger images are not kept, but their group is kept."""
NUMBER_BYTES = 36
"""Memory of a number in the lists of sampling parameters, in bytes."""
OBJECT_BYTES = 2048
"""Upper bound on the memory of a sample or a group, excluding arrays, in bytes."""
MESSAGE_CHARS = 200
_MOST_TEXT = 500


@dataclass(frozen=True)
class KeptSample:
    """A kept sample.

    `token_ids`: int32 [num_tokens]. `logprobs`: float32 [num_tokens], or None. Other fields: see `SampleOutput`.
    """

    index: int
    token_ids: np.ndarray
    logprobs: np.ndarray | None
    finish_reason: str
    stop_reason: int | str | None
    error: str | None
    seed: int
    num_cached_tokens: int
    weight_versions: tuple[WeightSpan, ...]
    old_kv: tuple[WeightSpan, ...]

    @property
    def num_bytes(self) -> int:
        """Size in memory, in bytes."""
        return OBJECT_BYTES + self.token_ids.nbytes + (0 if self.logprobs is None else self.logprobs.nbytes)


@dataclass(frozen=True)
class KeptGroup:
    """A kept group.

    `id`: number of the group, counted from 1. `seconds`: time at which the group finished, in seconds since 1970.
    `prompt`: int32 [num_tokens]. `params`: sampling parameters, without stop strings and records. `seed`: seed of the
    request. `samples`: the samples that fit into `MOST_GROUP_BYTES`. `user`: the user of the request; None if clients
    have no names. `message`: the beginning of the last user message; None if the request is not a conversation or has
    no user message. `num_images`: number of images in the prompt. `images`: the images in the prompt; empty if the
    images need more than `MOST_IMAGE_BYTES`. `adapter`: the named adapter that generated the samples; None for the base
    weights.
    """

    id: int
    seconds: float
    prompt: np.ndarray
    params: SamplingParams
    seed: int | None
    samples: tuple[KeptSample, ...]
    user: str | None = None
    message: str | None = None
    num_images: int = 0
    images: tuple[ImageInput, ...] = ()
    adapter: str | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the group in memory, in bytes. An image that several groups share is counted once for each of these
        groups.
        """
        size = OBJECT_BYTES + self.prompt.nbytes + NUMBER_BYTES * self.params.num_numbers
        return size + sum(sample.num_bytes for sample in self.samples) + sum(map(num_bytes, self.images))


class SampleLog:
    """The latest groups of samples. `num_bytes`: total size of all kept groups, in bytes."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._groups: dict[int, KeptGroup] = {}
        self._last_id = 0

    @property
    def first_id(self) -> int:
        """Id of the oldest kept group, or of the next group if no group is kept."""
        return next(iter(self._groups), self._last_id + 1)

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int | None,
        samples: Iterable[SampleOutput],
        user: str | None = None,
        message: str | None = None,
        images: tuple[ImageInput, ...] = (),
        adapter: str | None = None,
    ) -> None:
        """Keep a finished group, and evict the oldest groups while the limits are exceeded.

        If no sample fits into `MOST_GROUP_BYTES`, the group is not kept.
        """
        tokens = np.array(prompt, np.int32)
        rest = MOST_GROUP_BYTES - OBJECT_BYTES - tokens.nbytes - NUMBER_BYTES * params.num_numbers
        kept = _fitting(sorted(samples, key=lambda sample: sample.index), rest)
        if not kept:
            return
        self._last_id += 1
        plain = params.model_copy(update=dict(stop=(), top_logprobs=None, target_token_ids=()))
        shown = images if sum(map(num_bytes, images)) <= MOST_IMAGE_BYTES else ()
        about: dict[str, Any] = dict(user=user, message=message, num_images=len(images), images=shown, adapter=adapter)
        group = KeptGroup(self._last_id, time.time(), tokens, plain, seed, kept, **about)
        self._groups[group.id] = group
        self.num_bytes += group.num_bytes
        while len(self._groups) > MOST_GROUPS or self.num_bytes > MOST_BYTES:
            self.num_bytes -= self._groups.pop(self.first_id).num_bytes

    def get(self, id: int, user: str | None = None) -> KeptGroup | None:
        """Return the group with this id; None if the group is not kept or belongs to another user.

        If `user` is None, the group may belong to any user.
        """
        group = self._groups.get(id)
        return group if group is None or user in (None, group.user) else None

    def after(self, id: int, user: str | None = None) -> list[KeptGroup]:
        """Return the groups that belong to `user` and have ids above `id`, oldest first. If `user` is None, return the
        groups of all users.
        """
        return [group for group in self._groups.values() if group.id > id and user in (None, group.user)]


def _fitting(samples: Iterable[SampleOutput], num_bytes: int) -> tuple[KeptSample, ...]:
    kept: list[KeptSample] = []
    for sample in samples:
        made = _kept(sample)
        if (num_bytes := num_bytes - made.num_bytes) < 0:
            break
        kept.append(made)
    return tuple(kept)


def _kept(sample: SampleOutput) -> KeptSample:
    reason = sample.stop_reason
    return KeptSample(
        index=sample.index,
        token_ids=np.array(sample.token_ids, np.int32),
        logprobs=None if sample.logprobs is None else np.array(sample.logprobs, np.float32),
        finish_reason=sample.finish_reason,
        stop_reason=reason[:_MOST_TEXT] if isinstance(reason, str) else reason,
        error=None if sample.error is None else sample.error[:_MOST_TEXT],
        seed=sample.seed,
        num_cached_tokens=sample.num_cached_tokens,
        weight_versions=sample.weight_versions,
        old_kv=sample.old_kv,
    )
