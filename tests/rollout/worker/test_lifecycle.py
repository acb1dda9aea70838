"""The states of a worker as a table: legal transitions, the calls that each state allows, and refusals."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from trueroll.engine.request import Tag
from trueroll.errors import IllegalStateError, UnavailableError
from trueroll.rollout.protocol import ALL_TAGS, State
from trueroll.rollout.worker.lifecycle import LEGAL_CALLS, LEGAL_MOVES, Lifecycle, Standing

PAGE = (Path(__file__).parents[3] / "docs/protocol.md").read_text()
STATES: dict[State, Callable[[Lifecycle], object]] = {
    "loading": lambda lifecycle: None,
    "ready": lambda lifecycle: lifecycle.finish_loading(),
    "paused": lambda lifecycle: (lifecycle.finish_loading(), go(lifecycle, "paused", Standing(is_paused=True))),
    "draining": lambda lifecycle: (lifecycle.finish_loading(), lifecycle.begin("draining")),
    "asleep": lambda lifecycle: (lifecycle.finish_loading(), fall_asleep(lifecycle, drops_weights=False)),
    "waking": lambda lifecycle: (
        lifecycle.finish_loading(),
        fall_asleep(lifecycle, drops_weights=False),
        wake_up(lifecycle, "weights"),
    ),
    "updating": lambda lifecycle: (lifecycle.finish_loading(), lifecycle.begin("updating")),
    "dirty": lambda lifecycle: (lifecycle.finish_loading(), go(lifecycle, "updating", Standing(is_dirty=True))),
    "failed": lambda lifecycle: lifecycle.fail(),
}


def go(lifecycle: Lifecycle, busy: State, standing: Standing) -> None:
    lifecycle.begin(busy)
    assert lifecycle.state == busy
    lifecycle.end(standing)


def fall_asleep(lifecycle: Lifecycle, drops_weights: bool) -> None:
    go(lifecycle, "draining", lifecycle.standing.slept(ALL_TAGS, drops_weights))


def wake_up(lifecycle: Lifecycle, *tags: Tag) -> None:
    go(lifecycle, "waking", lifecycle.standing.woken(tags))


def in_state(state: State) -> Lifecycle:
    lifecycle = Lifecycle()
    STATES[state](lifecycle)
    assert lifecycle.state == state
    return lifecycle


def test_the_tables_have_every_state() -> None:
    assert set(STATES) == set(LEGAL_MOVES) == set(get_args(State))
    assert all(moves <= set(get_args(State)) for moves in (*LEGAL_MOVES.values(), *LEGAL_CALLS.values()))


def documented_calls() -> dict[str, set[str]]:
    """Return the table "call, possible in" of docs/protocol.md."""
    rows = re.findall(r"^\| (`.+`) \| (.+) \|$", PAGE.split("| call | possible in |\n")[1].split("\n\n")[0], re.M)
    table: dict[str, set[str]] = {}
    before: set[str] = set()
    for calls, states in rows:
        named = set(re.findall(r"`(\w+)`", states))
        if states.startswith("every state but"):
            before = set(get_args(State)) - named
        elif states.startswith("every state"):
            before = set(get_args(State))
        elif not states.startswith("the same"):
            before = named
        table |= dict.fromkeys(re.findall(r"`(\w+)`", calls), before)
    return table


def test_the_documentation_lists_the_calls_that_a_state_allows() -> None:
    documented = documented_calls()
    assert LEGAL_CALLS.keys() <= documented.keys() and len(documented) == 15
    for call, states in documented.items():
        assert LEGAL_CALLS.get(call, frozenset(get_args(State))) == states, call


@pytest.mark.parametrize("state", get_args(State))
@pytest.mark.parametrize("call", sorted(LEGAL_CALLS))
def test_a_call_that_a_state_does_not_allow_names_the_state(call: str, state: State) -> None:
    lifecycle = in_state(state)
    if state in LEGAL_CALLS[call]:
        lifecycle.check(call)
    else:
        with pytest.raises(IllegalStateError, match=f"^{call}: is not allowed in state {state} .needs .*; "):
            lifecycle.check(call)
    assert lifecycle.state == state


@pytest.mark.parametrize("state", sorted(set(get_args(State)) - {"loading", "failed"}))
def test_during_a_shutdown_only_weights_is_allowed(state: State) -> None:
    lifecycle = in_state(state)
    lifecycle.start_ending()
    assert lifecycle.state == "draining"
    for call in LEGAL_CALLS.keys() - {"weights"}:
        with pytest.raises(UnavailableError, match="worker is shutting down"):
            lifecycle.check(call)


@pytest.mark.parametrize("state", get_args(State))
def test_every_state_but_failed_can_fail(state: State) -> None:
    lifecycle = in_state(state)
    lifecycle.fail()
    assert lifecycle.state == "failed"


def test_waking_in_stages_after_the_weights_were_dropped() -> None:
    lifecycle = in_state("ready")
    fall_asleep(lifecycle, drops_weights=True)
    assert lifecycle.state == "asleep" and lifecycle.standing.is_held
    with pytest.raises(IllegalStateError, match=r"wake_up\(tags=\[.weights.\]\)"):
        lifecycle.check_weights_awake("begin_push")
    wake_up(lifecycle, "weights")
    lifecycle.check_weights_awake("begin_push")
    assert lifecycle.state == "waking" and lifecycle.standing.is_held
    go(lifecycle, "updating", lifecycle.standing.overwritten(is_whole=True))
    assert lifecycle.state == "waking" and lifecycle.standing.is_held
    wake_up(lifecycle, "kv_cache")
    assert lifecycle.state == "ready" and not lifecycle.standing.is_held


def test_a_woken_worker_without_weights_is_dirty_until_a_push() -> None:
    lifecycle = in_state("ready")
    fall_asleep(lifecycle, drops_weights=True)
    wake_up(lifecycle, *ALL_TAGS)
    assert lifecycle.state == "dirty" and lifecycle.standing.is_held


def test_a_pause_outlasts_a_sleep() -> None:
    lifecycle = in_state("paused")
    fall_asleep(lifecycle, drops_weights=False)
    wake_up(lifecycle, *ALL_TAGS)
    assert lifecycle.state == "paused"
    go(lifecycle, "paused", lifecycle.standing.paused(False))
    assert lifecycle.state == "ready"


def test_a_move_that_is_not_in_the_table_is_a_bug() -> None:
    lifecycle = in_state("failed")
    lifecycle._has_failed = False
    with pytest.raises(RuntimeError, match="cannot move from failed to ready"):
        lifecycle.finish_loading()
