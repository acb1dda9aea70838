"""What verl calls to judge a response: the share of vowels in its text."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    return sum(letter in "aeiou" for letter in solution_str) / max(1, len(solution_str))
