"""The config of a LoRA adapter that PEFT has saved: the rank and the scale of each adapted module.

Owns the checks of the config, which may be invalid. Accepts only plain LoRA, which adds scale * B A to a weight (see
`Backend.merge`). `kernels.lora_config` lists the fields that change the computation. Imports no torch and no PEFT.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from trueroll.errors import PushError, brief

from ...kernels.lora_config import INERT, PLAIN, USED
from .manifest import MAX_NAME_CHARS, first_fault

MOST_CONFIG_BYTES = 2**20
"""Limit on the size of a config. A config with a rank for each of 1000 modules has 100 KB."""
MOST_MATCHES = 2**21
"""Limit on the number of modules times the number of patterns for them."""
_IGNORED = INERT | USED | PLAIN.keys() | {"lora_dropout"}  # dropout is for training only
# The supported values of init_lora_weights. PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA are not among them, because they
# change the base weights before the training. MiCA is not among them, because it is a variant of its own.
_INITIALIZATIONS = (True, "gaussian", "eva", "orthogonal")
# In PEFT, a pattern is a regular expression. Expressions with repetitions or choices could take exponential time.
_PATTERN = re.compile(r"\^?(?:[A-Za-z0-9_.-]|\\\.)+")
_HINT = "save plain LoRA of linear layers, or merge the adapter into the weights and push the weights"


class _Pattern:
    """A pattern for the names of modules, as PEFT matches it: `text` must match the end of a module's name, and the
    match must begin at the beginning of the name or after a dot. In `text`, '.' stands for any character, a backslash
    and '.' for a dot, and '^' for the beginning of the name. Raise ValueError for any other regular expression.
    """

    def __init__(self, text: str) -> None:
        if len(text) > MAX_NAME_CHARS or _PATTERN.fullmatch(text) is None:
            raise ValueError(
                f"the pattern {text!a:.80} is not supported; use names of modules, which may begin with '^'"
            )
        self._is_anchored = text.startswith("^")
        self._pieces = [each.replace("\\.", ".") for each in re.split(r"(?<!\\)\.", text.removeprefix("^"))]
        self._length = len(".".join(self._pieces))

    def matches(self, name: str) -> bool:
        """Return whether the pattern matches the name of a module."""
        place = len(name) - self._length
        if place < 0 or (place > 0 and (self._is_anchored or name[place - 1] != ".")):
            return False
        for piece in self._pieces:
            if not name.startswith(piece, place):
                return False
            place += len(piece) + 1
        return True


Patterns: TypeAlias = list[tuple[_Pattern, int | float]]


def _rank(value: Any) -> int:
    if type(value) is not int or not 1 <= value < 2**16:
        raise ValueError(f"a rank must be an integer in [1, 65535] (got {brief(value)})")
    return value


def _alpha(value: Any) -> int | float:
    if type(value) not in (int, float) or abs(value) > 2**53 or not math.isfinite(value):
        raise ValueError(f"an alpha must be a finite number of at most 2**53 (got {brief(value)})")
    return value


def _patterns(values: Any, check: Callable[[Any], int | float]) -> Patterns:
    """Validate a map from patterns to numbers. Stop at the first error, since pydantic would describe every error."""
    if values is not None and not isinstance(values, dict):
        raise ValueError(f"expected a map (got {brief(values)})")
    return [(_Pattern(text), check(value)) for text, value in (values or {}).items()]


class _Fields(BaseModel):
    """The fields of the config that set the ranks and scales."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    r: Annotated[int, PlainValidator(_rank)]
    lora_alpha: Annotated[float, PlainValidator(_alpha)]
    use_rslora: bool = False
    rank_pattern: Annotated[Any, PlainValidator(lambda values: _patterns(values, _rank))] = Field(default_factory=list)
    alpha_pattern: Annotated[Any, PlainValidator(lambda values: _patterns(values, _alpha))] = Field(
        default_factory=list
    )


@dataclass(frozen=True)
class LoraConfig:
    """The ranks and scales of a saved adapter. See `read_config`."""

    fields: _Fields

    def ranks_and_scales(self, modules: Sequence[str]) -> list[tuple[int, float]]:
        """Return (rank, scale) of each module. `modules`: names of modules, as in the model that PEFT has adapted.

        As in PEFT, the first pattern that matches the end of a module's name sets the rank or alpha. Raise PushError if
        there are too many patterns.
        """
        ranks, alphas = self.fields.rank_pattern, self.fields.alpha_pattern
        needed = len(modules) * (len(ranks) + len(alphas))
        if needed > MOST_MATCHES:
            raise PushError(
                f"peft: rank_pattern and alpha_pattern need {needed} matches for {len(modules)} modules (limit "
                f"{MOST_MATCHES}); use fewer patterns"
            )
        root = math.sqrt if self.fields.use_rslora else float
        found = []
        for module in modules:
            rank = _first(ranks, module, self.fields.r)
            found.append((int(rank), _first(alphas, module, self.fields.lora_alpha) / root(rank)))
        return found


def read_config(text: bytes, path: str) -> LoraConfig:
    """Return the config of an adapter. `text`: the content of PEFT's adapter_config.json. `path`: the name of this file
    in errors.

    Raise PushError if the content is invalid, or if the adapter is not plain LoRA. Fields that PEFT's LoraConfig lacks
    must be empty, because they may change the computation.
    """
    if len(text) > MOST_CONFIG_BYTES:
        raise PushError(f"peft: {path} has more than {MOST_CONFIG_BYTES} bytes; use fewer patterns")
    try:
        values = json.loads(text.decode())
        if not isinstance(values, dict):
            raise ValueError(f"expected a JSON map (got {brief(values)})")
        _check_plain(values, path)
        return LoraConfig(_Fields.model_validate(values))
    except (ValueError, RecursionError) as error:
        cause = first_fault(error) if isinstance(error, ValidationError) else f"{error!s:.300}"
        raise PushError(f"peft: {path} is not the config of an adapter: {cause}; save the adapter again") from None


def _check_plain(values: Mapping[str, Any], path: str) -> None:
    wrong = {name: values.get(name) for name, plain in PLAIN.items() if values.get(name) != plain}
    wrong |= {name: value for name, value in values.items() if value and name not in _IGNORED}
    for name, value in wrong.items():
        raise PushError(f"peft: {path} has {name!a:.80} = {brief(value)}, which is not supported; {_HINT}")
    start = values.get("init_lora_weights")
    if start and (start.lower() if isinstance(start, str) else start) not in _INITIALIZATIONS:
        raise PushError(
            f"peft: {path} has init_lora_weights = {brief(start)}, which is not supported, because it may have changed "
            "the base weights; convert the adapter with save_pretrained(..., "
            "path_initial_model_for_weight_conversion=...), or merge it into the weights and push the weights"
        )


def _first(patterns: Patterns, module: str, default: int | float) -> int | float:
    return next((value for pattern, value in patterns if pattern.matches(module)), default)
