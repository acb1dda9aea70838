"""Kinds of workers. With the same weights, workers of one kind give the same bits for the same request.

Owns: the kind of the fleet, and the set of workers of other kinds. The kind of the fleet is the kind of the first
listed member that answers. The kind of the fleet changes only when no worker of this kind is left. Workers of other
kinds get no requests.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from trueroll.errors import ConfigError

from .links import Link

KIND = (
    *("architecture", "vocab_size", "backend", "isa", "pieces", "quantization", "kv_cache_dtype"),
    *("dtype", "torch_version", "llguidance"),
)
"""Fields of `Health.engine` that determine the bits of a sample, together with the weights and the request."""

log = logging.getLogger(__name__)


class Kinds:
    """Track the kinds of the workers. `are_mixed`: whether workers of different kinds are accepted."""

    def __init__(self, are_mixed: bool) -> None:
        self._are_mixed = are_mixed
        self._kind: tuple[Any, ...] | None = None
        self._odd: set[Link] = set()

    def forget(self) -> None:
        """Forget the kind of the fleet. The next call to `follow` adopts the kind of the first listed worker that has
        answered.
        """
        self._kind = None

    def follow(self, links: Iterable[Link]) -> None:
        """Find the workers with a kind other than the kind of the fleet. If no worker has the fleet's kind, select
        another kind for the fleet.
        """
        if self._are_mixed:
            return
        kinds = {link: kind for link in links if (kind := _kind(link)) is not None}
        if kinds and self._kind not in kinds.values():
            self._kind = next(iter(kinds.values()))
        before, self._odd = self._odd, {link for link, kind in kinds.items() if kind != self._kind}
        for link in self._odd - before:
            log.error("fleet: worker %s gets no requests: %s", link.member.name, self._difference(link))

    def is_odd(self, link: Link) -> bool:
        """Return whether a worker gets no requests because its kind is not the fleet's kind."""
        return link in self._odd

    def check(self, links: Iterable[Link]) -> None:
        """Raise ConfigError if a worker's kind is not the fleet's kind."""
        for link in filter(self.is_odd, links):
            raise ConfigError(
                f"fleet: worker {link.member.name} would give different bits: {self._difference(link)}; remove it from "
                "the fleet, or set mixed_kinds=True"
            )

    def _difference(self, link: Link) -> str:
        pairs = zip(KIND, self._kind or (), _kind(link) or (), strict=False)
        expected, found = zip(*((f"{n} {a}", f"{n} {b}") for n, a, b in pairs if a != b), strict=True)
        return f"it has {', '.join(found)}; the others have {', '.join(expected)}"


def _kind(link: Link) -> tuple[Any, ...] | None:
    engine = link.health and link.health.engine
    return None if not engine else tuple(engine.get(name) for name in KIND)
