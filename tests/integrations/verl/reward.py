"""What verl calls to judge a response: a number that differs from text to text."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    return float(sum(map(ord, solution_str)) % 7)
