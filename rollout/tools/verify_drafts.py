"""A drafter for the exactness matrix that knows the samples and misleads the engine."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from ...engine.drafting.drafter import Drafter, FunctionDrafter

MOST_DRAFTED = 5


class Adversary:
    """Drafts tokens of known samples. Three kinds of drafts take turns: correct drafts, drafts that are wrong from some
    token on, and drafts that are wrong from the first token. Drafts also continue past the end of a sample.

    `texts`: for each known sample, the tokens of its prompt and of the sample. Drafts for unknown samples are random.
    Each draft has more tokens than the engine asks for.
    """

    def __init__(self, texts: Iterable[array[int]], vocab_size: int) -> None:
        self._vocab_size, self._calls = vocab_size, 0
        self._texts: dict[bytes, list[array[int]]] = {}
        for text in texts:
            self._texts.setdefault(_start_of(text), []).append(text)
        self._rng = np.random.default_rng(0)

    def __call__(self, so_far: array[int], most: int) -> Sequence[int]:
        self._calls += 1
        known = (text for text in self._texts.get(_start_of(so_far), ()) if text[: len(so_far)] == so_far)
        right = next(known, so_far)[len(so_far) :][: most + 1]
        num_right = (len(right), int(self._rng.integers(0, most)), 0)[self._calls % 3]
        wrong = self._rng.integers(0, self._vocab_size, most + 1)
        following = right[num_right : num_right + 1]
        if following and following[0] == wrong[0]:
            wrong[0] = (wrong[0] + 1) % self._vocab_size
        return [*right[:num_right], *wrong.tolist()]


def new_drafter(kind: str, texts: Iterable[array[int]], vocab_size: int) -> Drafter | None:
    """Return the adversarial drafter of a cell; None if the cell's drafts are not adversarial. `texts`: as in
    `Adversary`.
    """
    return FunctionDrafter(Adversary(texts, vocab_size)) if kind == "adversarial" else None


def _start_of(tokens: array[int]) -> bytes:
    return tokens[:4].tobytes()
