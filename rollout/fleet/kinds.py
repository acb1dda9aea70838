"""Which workers of a fleet give the same bits as the others.

Owns: the kind that counts, and which workers are of another one. The first kind of a fleet that is running counts;
a worker that joins with another one is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from trueroll.errors import ConfigError

from .links import Link

KIND = ("architecture", "vocab_size", "backend", "isa", "dtype", "torch_version")
"""Of `Health.engine`: what the bits of a sample depend on, beside weights and request."""

log = logging.getLogger(__name__)


class Kinds:
    """`are_mixed`: workers of any kind are taken."""

    def __init__(self, are_mixed: bool) -> None:
        self._are_mixed = are_mixed
        self._kind: tuple[Any, ...] | None = None
        self._odd: set[Link] = set()

    def forget(self) -> None:
        """Let the kind of the first worker count anew, of those that have answered by now."""
        self._kind = None

    def follow(self, links: Iterable[Link]) -> None:
        """See which workers are of another kind than the one that counts."""
        if self._are_mixed:
            return
        kinds = {link: kind for link in links if (kind := _kind(link)) is not None}
        if kinds and self._kind not in kinds.values():
            self._kind = next(iter(kinds.values()))
        before, self._odd = self._odd, {link for link, kind in kinds.items() if kind != self._kind}
        for link in self._odd - before:
            log.error("fleet: worker %s is left out: %s", link.member.name, self._difference(link))

    def is_odd(self, link: Link) -> bool:
        """Whether it is of another kind, and therefore not asked."""
        return link in self._odd

    def check(self, links: Iterable[Link]) -> None:
        """Raise ConfigError if a worker is of another kind."""
        for link in filter(self.is_odd, links):
            raise ConfigError(
                f"fleet: worker {link.member.name}: {self._difference(link)}; the same request would give other bits "
                "there: leave it out, or allow it with mixed_kinds=True"
            )

    def _difference(self, link: Link) -> str:
        pairs = zip(KIND, self._kind or (), _kind(link) or (), strict=False)
        expected, found = zip(*((f"{n} {a}", f"{n} {b}") for n, a, b in pairs if a != b), strict=True)
        return f"expected {', '.join(expected)} as of the others, found {', '.join(found)}"


def _kind(link: Link) -> tuple[Any, ...] | None:
    engine = link.health and link.health.engine
    return None if not engine else tuple(engine.get(name) for name in KIND)
