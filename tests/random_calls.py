"""Runs of Hypothesis state machines that have to see certain events.

Hypothesis also draws constants that it finds in the loaded modules, so the draws of a test change with the code. A run
that misses an event is therefore repeated with other draws.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

MOST_RUNS = 4


def run_until_seen(machine: type[RuleBasedStateMachine], profile: settings, missing: Callable[[], Any]) -> None:
    """Run a machine once, and again with other draws while `missing` returns events, at most `MOST_RUNS` times in all.

    Raise AssertionError if events are still missing.
    """
    run_state_machine_as_test(machine, settings=profile)
    for number in range(1, MOST_RUNS):
        if not missing():
            return
        run_state_machine_as_test(seed(number)(type(machine.__name__, (machine,), {})), settings=profile)
    assert not (found := missing()), f"no run had these events: {found}"
