"""Compute the token masks of a grammar in a trainer. A trainer needs the masks to compute the log-probs of samples that
were generated with the grammar.

Runs llguidance in this process, without limits on time and memory: use this module only for grammars that you trust.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trueroll.errors import AlignmentError

from ..engine.grammars.matching import GrammarError, Template, TokenText, Walk, installed_version, translated
from ..engine.request import Distribution


class GrammarMasks:
    """The masks of `distribution.structured_outputs`, for the argument `masks` of `kernels.training.token_log_probs`.

    `tokenizer`: the model's tokenizer, either a `tokenizers.Tokenizer`, or a transformers tokenizer that contains a
    `tokenizers.Tokenizer`. `engine`: the worker's `health().engine`.

    Raise AlignmentError if worker and trainer have different versions of llguidance, because the masks may then differ.
    Raise AlignmentError also if the grammar or the tokenizer is not supported.
    """

    def __init__(self, distribution: Distribution, tokenizer: Any, engine: Mapping[str, Any]) -> None:
        if (own := installed_version()) is None:
            raise AlignmentError("masks of grammars need llguidance; install it with: pip install 'trueroll[grammar]'")
        if own != engine["llguidance"]:
            raise AlignmentError(
                f"llguidance must have the same version in worker and trainer (got {engine['llguidance']} and {own})"
            )
        if distribution.structured_outputs is None:
            raise AlignmentError("the distribution has no structured_outputs; leave masks out")
        eos: tuple[int, ...] = tuple(engine["eos_token_ids"])
        self._ending = sorted({*distribution.stop_token_ids, *eos})
        try:
            text = TokenText(_tokenizer_json(tokenizer), engine["vocab_size"], eos)
            self._template = Template(text, translated(distribution.structured_outputs))
        except GrammarError as error:
            raise AlignmentError(f"structured_outputs: {error}") from None

    def rows(self, sample: np.ndarray, first: int) -> np.ndarray:
        """Return the masks with which the tokens of `sample` from index `first` on were sampled. The masks are int32
        [len(sample) - first, ceil(V / 32)], where V is the size of the vocabulary. `sample`: the sample's tokens from
        its first token up to the last token that needs a mask.

        Raise AlignmentError if the grammar excludes a token of `sample` other than the last token.
        """
        walk, token_ids = Walk(self._template, self._ending), sample.tolist()
        try:
            count = walk.append(token_ids[:first])
            masks = walk.masks(token_ids[first:-1])
        except GrammarError as error:
            raise AlignmentError(f"structured_outputs: {error}") from None
        if count == first:
            count += len(masks) - 1
        if count < len(token_ids) - 1:
            raise AlignmentError(
                f"structured_outputs: the grammar excludes token {token_ids[count]} at index {count} of a sample; "
                "score samples with the grammar that generated them"
            )
        return masks


def _tokenizer_json(tokenizer: Any) -> str:
    """Return the content of tokenizer.json."""
    tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(tokenizer, "to_str"):
        raise AlignmentError(
            "tokenizer must be a tokenizers.Tokenizer or a fast tokenizer of transformers (got "
            f"{type(tokenizer).__name__})"
        )
    return tokenizer.to_str()
