"""A reward function for verl: a number that differs between texts."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    return float(sum(map(ord, solution_str)) % 7)
