"""A worker with a real engine, driven through its socket by random calls, and compared with a second implementation of
the rules. The machine models the worker's state, the current push and every request, and checks each reply against this
model. The engine runs only steps that the test allows (`GatedEngine`), so that requests are running when a call
arrives. Every received token is computed again by a fresh engine with the weights of the version in the sample's spans,
except the tokens that were drawn over old KV.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from engine.checkpoints import another_version, read_tensors
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)
from pushing import HandPush
from random_calls import run_until_seen
from serving import RawClient, WorkerOnThread

from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.request import Distribution, GenerateRequest, Output, SamplingParams, ScoreRequest
from trueroll.engine.running.loading import LoadedModel, load_model
from trueroll.rollout.config import WorkerConfig

PROFILE = settings(derandomize=True, deadline=None, max_examples=150, stateful_step_count=30, database=None)
PATIENCE = 20.0
FREELY = float("inf")
GOLDEN = 0x9E3779B97F4A7C15
"""The difference between seeds in a group: sample i with seed s equals sample 0 with seed s + i * GOLDEN."""

Prompt = tuple[int, ...]
happened: Counter[str] = Counter()
"""Number of occurrences of each event in the whole test."""
IN_RANDOM_ORDER = [
    *(f"commit_push {policy} with running requests" for policy in ("recompute", "abort", "drain")),
    *(f"sleep {policy} with running requests" for policy in ("recompute", "abort")),
    *(f"refused in {state}" for state in ("paused", "draining", "asleep", "updating")),
    *(f"generate while {state}" for state in ("paused", "draining", "asleep", "updating")),
    "drain drain with running requests",
    "superseded pushes",
    "calls without waiting",
    "refused in passing",
    "joined",
    "aborted while running",
    "samples of 2 versions",
    "samples of several versions in free examples",
    "spans scored",
    "scores",
    "scores that met a commit",
    "prefix hits",
    "preemptions",
    "recomputed",
    "ended early",
]
"""Events that must occur in `test_any_order_of_calls`."""
WITH_OLD_KV = [
    "commit_push keep with running requests",
    "begin_push keep with running requests",
    "samples with tokens over old KV",
    "samples with tokens after old KV",
]
"""Events that must occur in `test_any_order_of_calls_with_old_kv`."""
IN_SCRIPTS = [
    *(f"{call} drain with running requests" for call in ("begin_push", "sleep")),
    *(f"begin_push {policy} with running requests" for policy in ("recompute", "keep")),
    "commit_push keep with running requests",
    "samples with tokens over old KV",
    *(f"{call} abort ended requests" for call in ("begin_push", "commit_push", "sleep")),
    *(f"{why} pushes{place}" for why in ("corrupted", "incomplete") for place in ("", " in place")),
    *(f"{call}: refused to drain while held" for call in ("begin_push", "commit_push", "sleep")),
    "refused in waking",
    "refused in dirty",
    "aborted pushes",
    "aborted while it waited to begin or to commit",
    "aborted while waiting",
    "drained in vain",
    "samples of 3 versions",
    "ended while a call waited",
]
"""Events that must occur in `test_each_kind_of_call`."""


# The pushed weights, and the expected results of each.


class Reference:
    """The results of requests in a fresh engine with the weights of one checkpoint. Each result is computed once."""

    def __init__(self, folder: Path) -> None:
        self.tensors = read_tensors(folder)
        self._config = EngineConfig(model=str(folder), enable_prefix_caching=False, num_blocks=2000, num_threads=1)
        self._loaded = load_model(self._config)
        self._known: dict[Any, Output] = {}

    def learn(self, keys: Sequence[Any]) -> None:
        """Compute unknown results. A key is (prompt, SamplingParams), or (tokens, Distribution) for a score."""
        missing = {str(number): key for number, key in enumerate(dict.fromkeys(keys)) if key not in self._known}
        if not missing:
            return
        engine = Engine(self._config, self._loaded)
        for id, (tokens, params) in missing.items():
            kind = GenerateRequest if isinstance(params, SamplingParams) else ScoreRequest
            engine.add(kind(id, np.array(tokens, np.int32), params))
        while engine.has_unfinished:
            for output in engine.step():
                self._known[missing[output.request_id]] = output

    def __getitem__(self, key: Any) -> Any:
        self.learn([key])
        return self._known[key]


class GatedEngine(Engine):
    """An engine that runs only the allowed number of steps.

    `is_idle`: set while the engine wants to step but may not.
    """

    def __init__(self, config: EngineConfig, loaded: LoadedModel) -> None:
        super().__init__(config, loaded)
        self.is_idle = threading.Event()
        self._allowed = 0.0
        self._lock = threading.Lock()

    def allow(self, steps: float) -> None:
        with self._lock:
            self._allowed = steps
            self.is_idle.clear()

    def step(self) -> list[Output]:
        with self._lock:
            may_step = self._allowed >= 1
            if may_step:
                self._allowed -= 1
            else:
                self.is_idle.set()
        if may_step:
            return super().step()
        time.sleep(0.0003)
        return []


# The rules, as the documentation of the protocol states them.


@dataclass
class Rules:
    """The state of a worker, and the effect of each call. `busy`: the state while a call waits for requests."""

    paused: bool = False
    sleeping: frozenset[str] = frozenset()
    waking: bool = False
    dirty: bool = False
    busy: str | None = None
    push: Push | None = None
    served_push: str | None = None
    version: int = 0

    @property
    def standing(self) -> str:
        if self.sleeping:
            return "waking" if self.waking else "asleep"
        return "dirty" if self.dirty else "paused" if self.paused else "ready"

    @property
    def state(self) -> str:
        return self.busy or self.standing

    def allow(self, call: str) -> bool:
        if call in ("pause", "resume", "drain"):
            return self.state in ("ready", "paused")
        if call in ("begin_push", "commit_push"):
            return self.busy is None and "weights" not in self.sleeping
        return self.busy is None

    def apply(self, call: str, fields: dict[str, Any]) -> None:
        """Apply the effect of a successful call."""
        if call in ("pause", "resume", "drain"):
            self.paused = call != "resume"
        elif call == "sleep":
            self._sleep(fields["level"], frozenset(fields["tags"]))
        elif call == "wake_up" and self.sleeping & set(fields["tags"]):
            self.sleeping -= frozenset(fields["tags"])
            self.waking = bool(self.sleeping)
        elif call == "begin_push":
            self.dirty |= fields["in_place"]
        elif call == "commit_push":
            assert self.push is not None
            self.version, self.served_push = self.push.hand.version, self.push.hand.push_id
            self.push, self.dirty = None, False

    def _sleep(self, level: int, tags: frozenset[str]) -> None:
        self.sleeping |= tags
        self.waking = False
        if "weights" in tags:
            self.dirty, self.push = self.dirty or level == 2, None


@dataclass(eq=False)
class Push:
    """A push, and the phase that the push should have reached."""

    hand: HandPush
    in_place: bool
    phase: str = "begun"


@dataclass(eq=False)
class Pending:
    """A call that waits until the engine has no unfinished requests."""

    id: str
    call: str
    fields: dict[str, Any]
    push: Push | None = None


class Received(NamedTuple):
    """A reply. The tokens of the reply come from versions between two positions in the history of versions."""

    message: dict[str, Any]
    first: int
    last: int


@dataclass(eq=False)
class Asked:
    """A request as sent, and all its replies.

    `served`: position in the history of versions at which the request began. `in_engine`: True if the worker has given
    the request to the engine; None if this depends on timing.
    """

    message: dict[str, Any]
    prompt: Prompt
    params: SamplingParams | Distribution
    served: int
    in_engine: bool | None
    times_sent: int = 1
    may_abort: bool = False
    samples: list[Received] = field(default_factory=list)
    ends: list[Received] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        return not self.ends

    @property
    def unfinished(self) -> set[int]:
        """Indices of samples that have not arrived. A score request has one sample."""
        if self.ends:
            return set()
        count = self.params.n if isinstance(self.params, SamplingParams) else 1
        return set(range(count)) - {sample["index"] for sample, _, _ in self.samples}


class Inbox(RawClient):
    """A client that passes every received message to `note`."""

    def __init__(self, address: str, note: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(address)
        self._note = note

    def receive(self) -> dict[str, Any]:
        message = super().receive()
        self._note(message)
        return message


# The values that the rules draw.

Load = tuple[list[Prompt], dict[str, Any], int]

_TRUNK = (11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22)
PROMPTS = st.builds(
    lambda shared, own: _TRUNK[:shared] + tuple(own), st.integers(1, 12), st.lists(st.integers(30, 32), max_size=3)
)
STYLES = st.sampled_from(
    [
        dict(temperature=1.0),
        dict(temperature=1.0, ignore_eos=True),
        dict(temperature=0.0),
        dict(temperature=0.8, top_k=20, logprobs="raw"),
    ]
)
SOME_LOAD = st.tuples(st.lists(PROMPTS, min_size=1, max_size=3), STYLES, st.integers(2, 12))
LOADS = st.one_of(st.none(), SOME_LOAD)
"""Requests that are running when the test makes a call, if the worker is ready."""
TAGS = st.sampled_from([["weights", "kv_cache"], ["kv_cache"], ["weights"]])
PLACES = st.integers(0, 59)
IN_PLACE = st.sampled_from([False, False, True])
POLICIES = st.sampled_from(["recompute", "abort", "drain"])
PUSH_POLICIES = st.runner().flatmap(lambda machine: st.sampled_from(machine.policies))
LEVELS = st.sampled_from([1, 1, 2])
FAULTS = st.sampled_from([None, None, None, "corrupted", "incomplete"])
UNAWAITED = st.one_of(
    st.sampled_from([("pause", {}), ("resume", {}), ("invalidate", {})]),
    st.builds(lambda tags: ("wake_up", dict(tags=tags)), TAGS),
    st.builds(
        lambda level, tags, policy: ("sleep", dict(level=level, tags=tags, in_flight=policy)),
        LEVELS,
        TAGS,
        st.sampled_from(["recompute", "abort"]),
    ),
)


class ServedEngine(RuleBasedStateMachine):
    """One Hypothesis example with one worker. Subclasses set `references`: the weights of the pushes. `policies`: what
    random pushes do with running requests.
    """

    references: ClassVar[list[Reference]]
    config: ClassVar[EngineConfig]
    policies: ClassVar[list[str]] = ["recompute", "abort", "drain"]

    def __init__(self) -> None:
        super().__init__()
        self.told = Rules()
        self.requests: dict[str, Asked] = {}
        self.replies: dict[str, dict[str, Any]] = {}
        self.weights = {0: 0}
        self.history = [0]
        self.commits: dict[str, int] = {}
        self.pending: Pending | None = None
        self.old_pushes: list[Push] = []
        self.hands: list[HandPush] = []
        self.num_ids = 0

    @initialize(is_free=st.sampled_from([False, False, True]), ends_early=st.sampled_from([False, False, True]))
    def start(self, is_free: bool, ends_early: bool) -> None:
        self.is_free, self.ends_early = is_free, ends_early
        self.engine = GatedEngine(self.config, load_model(self.config))
        self.engine.allow(FREELY if is_free else 0)
        self.worker = WorkerOnThread(WorkerConfig(), lambda: self.engine)
        self.client = Inbox(self.worker.address, self.note)
        while self.client.health()["state"] == "loading":
            time.sleep(0.001)

    # Messages.

    def note(self, message: dict[str, Any]) -> None:
        """Keep a message. Messages arrive in the order of events, so `history` ends with the version that was served at
        the time of the message.
        """
        id = message["id"]
        if id in self.requests:
            asked = self.requests[id]
            received = Received(message, asked.served, len(self.history) - 1)
            (asked.samples if message["type"] == "sample" else asked.ends).append(received)
            return
        self.replies[id] = message
        if message["type"] == "push_status" and id in self.commits:
            assert message["phase"] == "committed"
            self.history.append(self.commits.pop(id))

    def new_id(self) -> str:
        self.num_ids += 1
        return f"id-{self.num_ids}"

    def send(self, call: str, **fields: Any) -> str:
        id = self.new_id()
        self.client.send(call, id=id, **fields)
        return id

    def wait(self, id: str) -> dict[str, Any]:
        while id not in self.replies:
            self.client.receive()
        return self.replies.pop(id)

    def open_requests(self, *in_engine: bool | None) -> list[Asked]:
        return [asked for asked in self.requests.values() if asked.is_open and asked.in_engine in in_engine]

    # Calls that change the state.

    def operate(self, call: str, fields: dict[str, Any], push: Push | None = None) -> bool:
        """Make a call and check its effects. Return whether it succeeded at once."""
        self.sync()
        policy = "drain" if call == "drain" else fields.get("in_flight")
        if call == "begin_push" and not fields["in_place"]:
            policy = None
        running, unsure, waiting = (self.open_requests(value) for value in (True, None, False))
        if policy == "abort" and self.told.allow(call):
            for asked in running + unsure:
                asked.may_abort = True
        id = self.send(call, **fields)
        if call == "commit_push" and push is not None:
            self.commits[id] = push.hand.version
        is_held = self.told.standing != "ready"
        if not self.told.allow(call):
            return self.expect_refusal(id, call)
        if policy == "drain" and is_held and (running or (unsure and self.wait_and_peek(id) == "illegal_state")):
            happened[f"{call}: refused to drain while held"] += 1
            return self.expect_refusal(id, call)
        if policy == "drain" and running and not self.is_free:
            self.begin_pending(Pending(id, call, fields, push))
            return False
        if running and policy is not None:
            happened[f"{call} {policy} with running requests"] += 1
        self.finish(Pending(id, call, fields, push))
        if policy == "drain" and is_held:
            unsure = []  # the engine has none of these requests: each waits or has ended
        self.check_policy(call, policy, running, unsure, waiting)
        return True

    def wait_and_peek(self, id: str) -> str | None:
        reply = self.wait(id)
        self.replies[id] = reply
        return reply.get("code")

    def expect_refusal(self, id: str, call: str) -> bool:
        reply = self.wait(id)
        self.commits.pop(id, None)
        assert reply["type"] == "error" and reply["code"] == "illegal_state", (call, self.told, reply)
        assert self.told.state in reply["message"], (self.told.state, reply)
        happened["refused calls"] += 1
        happened[f"refused in {self.told.state}"] += 1
        return False

    def begin_pending(self, pending: Pending) -> None:
        self.told.busy = "draining" if pending.call in ("drain", "sleep") else "updating"
        self.pending = pending
        happened[f"{pending.call} drain with running requests"] += 1

    def finish(self, pending: Pending) -> None:
        """Check that the call succeeds now, and apply its effect to the model."""
        reply = self.wait(pending.id)
        self.told.busy = None
        if pending.call == "begin_push":
            self.replace_push(pending.push)
        self.told.apply(pending.call, pending.fields)
        if pending.call in ("begin_push", "commit_push"):
            phase = "begun" if pending.call == "begin_push" else "committed"
            assert reply["type"] == "push_status" and reply["phase"] == phase, (pending, reply)
        else:
            assert reply["type"] == "status" and reply["state"] == self.told.state, (pending, self.told, reply)
        assert reply["weight_version"] == self.told.version
        happened[pending.call] += 1
        self.release_waiting()

    def replace_push(self, push: Push | None) -> None:
        if self.told.push is not None:
            self.old_pushes.append(self.told.push)
            happened["superseded pushes"] += 1
        self.told.push = push

    def release_waiting(self) -> None:
        if self.told.state == "ready":
            for asked in self.open_requests(False, None):
                asked.in_engine = True

    def check_policy(
        self, call: str, policy: str | None, running: list[Asked], unsure: list[Asked], waiting: list[Asked]
    ) -> None:
        assert all(asked.is_open for asked in waiting) or self.is_free, "a request that waited has ended"
        still_open = [asked for asked in running + unsure if asked.is_open]
        if policy == "drain":
            assert not still_open
        elif policy == "abort":
            happened[f"{call} abort ended requests"] += len(still_open) < len(running) and not self.is_free
            for asked in still_open if call == "commit_push" else ():
                asked.served = len(self.history) - 1  # only requests that had not begun continue
        else:
            assert len(still_open) == len(running + unsure) or self.is_free

    def sync(self) -> None:
        """Process all events so far. A call that waited for requests is answered once no request is left."""
        self.catch_up()
        if self.pending is not None and not self.open_requests(True):
            pending, self.pending = self.pending, None
            self.finish(pending)

    def catch_up(self) -> None:
        """Receive the outputs of the engine. The worker reads several messages at a time, and reads events before
        messages.
        """
        deadline = time.monotonic() + PATIENCE
        while not self.worker.worker._inbox._items.empty():
            assert time.monotonic() < deadline, "the worker hangs"
            time.sleep(0.0001)
        self.client.health()

    # Requests.

    def submit(self, kind: str, prompt: Prompt, params: SamplingParams | Distribution, message: dict[str, Any]) -> None:
        id, served = self.new_id(), len(self.history) - 1
        message = {"type": kind, "id": id, **message}
        self.requests[id] = Asked(message, prompt, params, served, in_engine=self.told.state == "ready")
        self.client.send(**message)
        happened[f"{kind} while {self.told.state}"] += 1

    @rule(prompt=PROMPTS, n=st.integers(1, 4), max_tokens=st.integers(1, 24), style=STYLES, seed=st.integers(0, 3))
    def generate(self, prompt: Prompt, n: int, max_tokens: int, style: dict[str, Any], seed: int) -> None:
        fields: dict[str, Any] = dict(n=n, max_tokens=max_tokens, seed=seed, **style)
        self.sync()
        self.submit("generate", prompt, SamplingParams(**fields), dict(prompt_token_ids=_tokens(prompt), params=fields))

    @rule(prompts=st.lists(PROMPTS, min_size=2, max_size=4), style=STYLES, steps=st.integers(2, 12))
    def generate_for_a_while(self, prompts: list[Prompt], style: dict[str, Any], steps: int) -> None:
        """Start requests. In examples with a gated engine, the requests keep running."""
        for prompt in prompts:
            self.generate(prompt, 2, 20, style, 5)
        self.take_steps(steps)

    @rule(prompt=PROMPTS, rest=st.lists(st.integers(40, 49), min_size=1, max_size=16))
    def score(self, prompt: Prompt, rest: list[int]) -> None:
        self.sync()
        tokens = prompt + tuple(rest)
        self.submit("score", tokens, Distribution(), dict(token_ids=_tokens(tokens)))

    @rule(which=PLACES)
    def send_again(self, which: int) -> None:
        if not self.requests:
            return
        asked = _pick(list(self.requests.values()), which)
        asked.times_sent += 1
        self.client.send(**asked.message)
        happened["joined"] += 1

    @rule(which=PLACES, index=st.one_of(st.none(), st.integers(0, 3)))
    def abort(self, which: int, index: int | None) -> None:
        if not self.requests:
            return
        self.sync()
        asked = _pick(self.open_requests(True, False, None) or list(self.requests.values()), which)
        is_score = isinstance(asked.params, Distribution) and not isinstance(asked.params, SamplingParams)
        index = None if is_score else index
        ended = asked.unfinished if index is None else asked.unfinished & {index}
        asked.may_abort = True
        reply = self.wait(self.send("abort", request_id=asked.message["id"], index=index))
        if reply["type"] == "aborted":
            assert reply["num_samples"] == len(ended) or self.is_free
            happened["aborted while waiting" if asked.in_engine is False else "aborted while running"] += 1
        else:
            assert reply["code"] == "unknown_request" and (not ended or self.is_free), (reply, ended)

    def carry(self, load: Load | None) -> None:
        """Start requests, and a score request that is computed half-way if there is room for it."""
        if load is not None and self.told.state == "ready":
            self.generate_for_a_while(*load)
            self.score(load[0][0], list(range(40, 60)))
            self.take_steps(1)

    # Steps.

    @rule(steps=st.integers(1, 8))
    def take_few_steps(self, steps: int) -> None:
        self.take_steps(steps)

    @rule()
    def take_many_steps(self) -> None:
        self.take_steps(30)

    def take_steps(self, steps: int) -> None:
        self.sync()
        if self.is_free or self.told.standing != "ready":
            return
        # If a call waits, other requests may run after that call. These requests must not use the remaining steps.
        at_once = steps if self.pending is None else 1
        for _ in range(0, steps, at_once):
            self.engine.allow(at_once)
            deadline = time.monotonic() + PATIENCE
            while self.open_requests(True) and not self.engine.is_idle.is_set():
                assert time.monotonic() < deadline, "the engine hangs"
                self.client.health()
        self.engine.allow(0)

    # Lifecycle.

    @rule(call=st.sampled_from(["pause", "resume", "resume", "invalidate"]))
    def call_simply(self, call: str) -> None:
        self.operate(call, {})

    @rule()
    def drain(self) -> None:
        self.operate("drain", {})

    @rule()
    def drain_in_vain(self) -> None:
        self.sync()
        if self.told.state == "ready" and self.open_requests(True) and not self.is_free:
            reply = self.wait(self.send("drain", timeout=0.001))
            assert reply["code"] == "deadline_exceeded", reply
            happened["drained in vain"] += 1

    @rule(level=LEVELS, tags=TAGS, policy=POLICIES, load=LOADS)
    def sleep(self, level: int, tags: list[str], policy: str, load: Load | None) -> None:
        self.carry(load)
        self.operate("sleep", dict(level=level, tags=tags, in_flight=policy))

    @rule(tags=TAGS, level=st.sampled_from([None, 1, 2]))
    def wake_up(self, tags: list[str], level: int | None) -> None:
        """Wake up, from a sleep of `level` if the worker is ready."""
        if level is not None and self.told.state == "ready":
            self.operate("sleep", dict(level=level, tags=["weights", "kv_cache"], in_flight="recompute"))
        self.operate("wake_up", dict(tags=tags))

    @rule(calls=st.lists(UNAWAITED, min_size=2, max_size=4))
    def call_without_waiting(self, calls: list[tuple[str, dict[str, Any]]]) -> None:
        """Successful calls succeed one after the other. A call that comes while another one runs may be refused."""
        self.sync()
        if self.pending is not None:
            return
        for asked in self.open_requests(True, None, False):
            asked.may_abort |= any(fields.get("in_flight") == "abort" for _, fields in calls)
        sent = [(self.send(call, **fields), call, fields) for call, fields in calls]
        passed = {self.told.state, "draining", "waking", "paused"}
        for id, call, fields in sent:
            reply = self.wait(id)
            if reply["type"] == "error":
                assert reply["code"] == "illegal_state" and any(state in reply["message"] for state in passed), reply
                happened["refused in passing" if self.told.allow(call) else "refused calls"] += 1
            else:
                assert self.told.allow(call), (call, self.told)
                self.told.apply(call, fields)
                assert reply["state"] == self.told.state, (call, fields, reply, self.told)
                passed.add(self.told.state)
        for asked in self.open_requests(False):
            asked.in_engine = None
        self.release_waiting()
        happened["calls without waiting"] += 1

    # Pushes.

    @rule(weights=st.integers(0, 3), in_place=IN_PLACE, policy=PUSH_POLICIES)
    def begin_push(self, weights: int, in_place: bool, policy: str) -> None:
        version = max(self.weights) + 1
        self.weights[version] = weights
        hand = HandPush(self.client, self.references[weights].tensors, version)
        self.hands.append(hand)
        fields = dict(push_id=hand.push_id, weight_version=version, dtype="float32", in_place=in_place)
        fields |= dict(in_flight=policy, timeout=60.0, source=hand.memory.source(0).model_dump())
        self.operate("begin_push", fields, Push(hand, in_place))

    @rule(fault=FAULTS, policy=PUSH_POLICIES)
    def advance_push(self, fault: str | None, policy: str) -> None:
        self.sync()
        push = self.told.push
        if push is None or (self.pending is not None and push is self.pending.push):
            return
        if push.phase == "begun":
            self.stage(push, fault)
        elif push.phase in ("staged", "incomplete"):
            self.verify(push)
        else:
            fields = dict(push_id=push.hand.push_id, in_flight=policy)
            self.operate("commit_push", fields, push)

    def stage(self, push: Push, fault: str | None) -> None:
        bucket = push.hand.bucket()
        if fault == "corrupted":
            push.hand.memory.slots[0][3] ^= 1
        elif fault == "incomplete":
            del bucket["pieces"][0]
        reply = self.wait(self.send("stage_bucket", push_id=push.hand.push_id, bucket=bucket))
        if fault == "corrupted":
            self.expect_broken(push, reply, fault)
        else:
            assert reply.get("phase") == "staged", reply
            push.phase = "staged" if fault is None else fault

    def verify(self, push: Push) -> None:
        reply = self.wait(self.send("verify_push", push_id=push.hand.push_id, num_buckets=1))
        if push.phase == "incomplete":
            self.expect_broken(push, reply, "incomplete")
        else:
            assert reply.get("phase") == "verified", reply
            push.phase = "verified"

    def expect_broken(self, push: Push, reply: dict[str, Any], why: str) -> None:
        assert reply.get("code") == "push_failed", reply
        self.forget_push(push)
        happened[f"{why} pushes{' in place' * push.in_place}"] += 1

    def forget_push(self, push: Push) -> None:
        if self.told.push is push:
            self.told.push = None
        self.old_pushes.append(push)

    @rule(weights=st.integers(0, 3), in_place=IN_PLACE, policy=PUSH_POLICIES, fault=FAULTS, load=LOADS)
    def push(self, weights: int, in_place: bool, policy: str, fault: str | None, load: Load | None) -> None:
        self.carry(load)
        self.begin_push(weights, in_place, policy)
        push = self.told.push
        while self.told.push is push and push is not None and self.pending is None and push.phase != "verified":
            self.advance_push(fault, policy)
        if push is not None and self.told.push is push and self.pending is None:
            before = len(self.open_requests(True))
            self.advance_push(None, policy)
            happened["pushes in place that met requests"] += in_place and before > 0

    @rule(weights=st.integers(0, 3), in_place=IN_PLACE, policy=PUSH_POLICIES, load=SOME_LOAD)
    def push_into_running(self, weights: int, in_place: bool, policy: str, load: Load) -> None:
        """Push from any state, so that requests are running at the commit."""
        self.recover(weights)
        self.push(weights, in_place, policy, None, load)

    @rule(which=PLACES)
    def abort_push(self, which: int) -> None:
        self.sync()
        waiting = [self.pending.push] if self.pending is not None and self.pending.push is not None else []
        pushes = waiting or ([self.told.push] if self.told.push is not None else self.old_pushes)
        if not pushes:
            return
        push = _pick(pushes, which)
        is_served = push.hand.push_id == self.told.served_push
        id = self.send("abort_push", push_id=push.hand.push_id)
        if self.pending is not None and self.pending.push is push:
            assert self.wait(self.pending.id)["code"] == "push_failed"
            self.commits.pop(self.pending.id, None)
            self.pending, self.told.busy = None, None
            self.release_waiting()
            happened["aborted while it waited to begin or to commit"] += 1
        reply = self.wait(id)
        assert reply.get("phase") == ("committed" if is_served else "aborted"), reply
        if self.told.push is push:
            self.forget_push(push)
            happened["aborted pushes"] += 1

    @rule(which=PLACES, call=st.sampled_from(["stage", "verify", "commit"]))
    def use_old_push(self, which: int, call: str) -> None:
        self.sync()
        if not self.old_pushes:
            return
        push = _pick(self.old_pushes, which).hand
        if call == "stage":
            reply = self.wait(self.send("stage_bucket", push_id=push.push_id, bucket=push.bucket()))
        elif call == "verify":
            reply = self.wait(self.send("verify_push", push_id=push.push_id, num_buckets=1))
        else:
            reply = self.wait(self.send("commit_push", push_id=push.push_id))
        is_illegal = call == "commit" and not self.told.allow("commit_push")
        codes = {"illegal_state", "push_failed"} if is_illegal else {"push_failed"}
        assert reply.get("code") in codes, reply
        happened["calls for a push that is over"] += 1

    # Observation and recovery.

    @rule()
    def look(self) -> None:
        self.sync()
        reply = self.wait(self.send("weights"))
        served_push = None if self.told.dirty else self.told.served_push
        assert reply["push_id"] == served_push, (reply["push_id"], self.told)
        assert reply["weight_version"] == self.told.version
        stats = self.wait(self.send("stats"))
        assert stats["service"]["accepted"] == len(self.requests)
        ended = sum(not asked.is_open for asked in self.requests.values())
        assert stats["service"]["finished"] == ended or self.is_free

    @rule(weights=st.integers(0, 3))
    def recover(self, weights: int) -> None:
        """Bring the worker back to `ready`, with all necessary calls."""
        if self.told.state == "ready":
            return
        while self.pending is not None:
            self.take_steps(1000)
            self.sync()
        self.operate("wake_up", dict(tags=["weights", "kv_cache"]))
        if self.told.dirty:
            self.push(weights, False, "recompute", None, None)
        if self.told.paused:
            self.operate("resume", {})
        assert self.told.state == "ready"

    @invariant()
    def is_as_told(self) -> None:
        if not hasattr(self, "client"):
            return
        self.sync()
        health = self.client.health()
        assert health["state"] == self.told.state, (health["state"], self.told)
        assert set(health["sleeping"]) == self.told.sleeping
        assert health["weight_version"] == self.told.version
        if self.pending is None:
            self.check_push(health["push"])
        if not self.is_free:
            assert health["requests"]["open"] == len(self.open_requests(True, None, False))
        self.check_memory(health["memory"])

    def check_push(self, found: dict[str, Any] | None) -> None:
        push = self.told.push
        if push is None:
            assert found is None
        else:
            assert found is not None and found["push_id"] == push.hand.push_id, (found, push)
            assert found["phase"] == {"incomplete": "staged"}.get(push.phase, push.phase)

    def check_memory(self, memory: dict[str, int]) -> None:
        assert (memory["kv_cache"] == 0) == ("kv_cache" in self.told.sleeping), memory
        assert memory["weights"] > 0 or self.told.dirty

    # Shutdown.

    def teardown(self) -> None:
        if not hasattr(self, "client"):
            return
        has_failed = sys.exc_info()[0] is not None
        try:
            if not has_failed:
                self.end_early() if self.ends_early else self.end_well()
        finally:
            self.engine.allow(FREELY)
            self.worker.worker.drain()
            self.worker.worker.drain()
            self.worker.join()
        if not has_failed:
            self.check_end()
        self.client.close()
        for hand in self.hands:
            hand.memory.close()

    def end_well(self) -> None:
        self.sync()
        self.recover(1)
        self.is_free = True
        self.engine.allow(FREELY)
        self.operate("drain", {})
        assert not self.open_requests(True, False, None)

    def end_early(self) -> None:
        happened["ended early"] += 1
        for asked in self.open_requests(True, False, None):
            asked.may_abort = True
        self.worker.worker.drain()
        self.worker.worker.drain()
        if self.pending is not None:
            assert self.wait(self.pending.id).get("code") == "unavailable"
            happened["ended while a call waited"] += 1

    def check_end(self) -> None:
        while self.open_requests(True, False, None) or self.client.socket.poll(5):
            self.client.receive()
        assert self.worker.error is None
        self.engine.check_integrity()
        assert not self.engine.has_unfinished
        stats = self.engine.stats()
        happened["preemptions"] += stats.preemptions
        happened["recomputed"] += stats.recomputed
        happened["prefix hits"] += stats.prefix_hits
        Judge(self.references, self.weights, self.history).judge(list(self.requests.values()))
        samples = [sample for asked in self.requests.values() for sample, _, _ in asked.samples]
        spanning = sum(len(sample["weight_versions"]) > 1 for sample in samples)
        happened["samples of several versions in free examples"] += spanning * self.is_free
        happened["examples"] += 1


def _pick(items: Sequence[Any], which: int) -> Any:
    """Choose an item. `items` may depend on timing, but the drawn number must not."""
    return items[which % len(items)]


def _tokens(prompt: Prompt) -> bytes:
    return np.array(prompt, "<i4").tobytes()


# The check of the replies.


@dataclass
class Judge:
    """Checks replies. `weights`: index of the reference of each version. `history`: the served versions, in order."""

    references: list[Reference]
    weights: dict[int, int]
    history: list[int]

    def judge(self, requests: list[Asked]) -> None:
        self.learn(requests)
        for asked in requests:
            assert len(asked.ends) == asked.times_sent, "a request gets one terminal reply each time it is sent"
            if isinstance(asked.params, SamplingParams):
                self.judge_group(asked, asked.params)
            else:
                self.judge_score(asked, asked.params)

    def learn(self, requests: list[Asked]) -> None:
        """Compute all expected results at once, which is faster."""
        keys: list[list[Any]] = [[] for _ in self.references]
        for asked in requests:
            for sample, _, _ in asked.samples:
                for version, start, end in exact_parts(sample):
                    keys[self.weights[version]].append(_key(asked, sample, start, end))
        for reference, its_keys in zip(self.references, keys, strict=True):
            reference.learn(its_keys)

    def judge_group(self, asked: Asked, params: SamplingParams) -> None:
        assert all(end["type"] == "done" and end == asked.ends[0][0] for end, _, _ in asked.ends), asked.ends
        count = Counter(sample["index"] for sample, _, _ in asked.samples)
        assert count == dict.fromkeys(range(params.n), asked.times_sent), "each sample once for each time it was sent"
        first: dict[int, dict[str, Any]] = {}
        for received in asked.samples:
            sample = first.setdefault(received.message["index"], received.message)
            assert sample == received.message
            if sample is received.message:
                self.judge_sample(asked, params, received)

    def judge_sample(self, asked: Asked, params: SamplingParams, received: Received) -> None:
        sample = received.message
        tokens = np.frombuffer(sample["token_ids"], "<i4")
        logprobs = np.frombuffer(sample["logprobs"], "<f4")
        reason, spans = sample["finish_reason"], sample["weight_versions"]
        assert reason in ("stop", "length") or (reason == "abort" and asked.may_abort), sample
        self.check_spans(received, len(tokens))
        self.check_old_kv(received, len(tokens))
        parts = exact_parts(sample)
        for version, start, end in parts:
            expected = self.references[self.weights[version]][_key(asked, sample, start, end)]
            assert np.array_equal(expected.token_ids, tokens[start:end]), (version, start, end)
            assert np.array_equal(expected.logprobs, logprobs[start:end]), (version, start, end)
            is_last = end == len(tokens)
            assert expected.finish_reason == (reason if is_last and reason == "stop" else "length")
        assert reason != "length" or len(tokens) == params.max_tokens
        happened[f"samples of {len(spans)} versions"] += 1
        if len(spans) > 1 and params.temperature == 1.0:
            self.check_scores(asked, parts, tokens, logprobs)

    def check_spans(self, received: Received, num_tokens: int) -> None:
        """Check that spans are contiguous, cover all tokens, follow the commits, and name versions served while the
        request was open.
        """
        spans = received.message["weight_versions"]
        assert [start for _, start, _ in spans] == ([0] + [end for _, _, end in spans])[: len(spans)], spans
        assert all(start < end for _, start, end in spans) and (spans[-1][2] if spans else 0) == num_tokens, spans
        positions = [self.history.index(version) for version, _, _ in spans]
        assert positions == sorted(set(positions)), (spans, self.history)
        assert all(received.first <= position <= received.last for position in positions), (received, self.history)

    def check_old_kv(self, received: Received, num_tokens: int) -> None:
        """Check that the spans over old KV are sorted and disjoint, and begin where a newer version drew its first
        tokens.
        """
        spans, old_kv = received.message["weight_versions"], received.message["old_kv"]
        ends = [0]
        for version, start, end in old_kv:
            assert ends[-1] <= start < end <= num_tokens, (spans, old_kv)
            [drew] = [drew for drew, first, _ in spans if first == start]
            assert self.history.index(version) < self.history.index(drew), (spans, old_kv)
            ends.append(end)
        happened["samples with tokens over old KV"] += len(old_kv) > 0
        happened["samples with tokens after old KV"] += 0 < ends[-1] < num_tokens

    def check_scores(self, asked: Asked, spans: Sequence[Any], tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Check the log-probs of tokens that a version drew: the version gives the same log-probs when it alone scores
        all tokens up to these tokens.
        """
        for version, start, end in spans:
            whole = asked.prompt + tuple(tokens[:end].tolist())
            expected = self.references[self.weights[version]][whole, Distribution()].logprobs
            first = len(asked.prompt) - 1 + start
            assert np.array_equal(expected[first:], logprobs[start:end]), (version, start, end)
            happened["spans scored"] += 1

    def judge_score(self, asked: Asked, params: Distribution) -> None:
        reply, _, last = asked.ends[0]
        assert all(end == reply for end, _, _ in asked.ends) and reply["type"] == "scores", asked.ends
        logprobs = np.frombuffer(reply["logprobs"], "<f4")
        if reply["finish_reason"] == "abort":
            assert asked.may_abort and len(logprobs) == 0 and not reply["weight_versions"]
            return
        assert reply["finish_reason"] == "stop" and len(reply["weight_versions"]) == 1
        self.check_spans(asked.ends[0], len(asked.prompt) - 1)
        version = reply["weight_versions"][0][0]
        assert np.array_equal(self.references[self.weights[version]][asked.prompt, params].logprobs, logprobs)
        happened["scores that met a commit" if last > asked.served else "scores"] += 1


def exact_parts(sample: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Return the version, start and end of the parts of a sample that were not drawn over old KV."""
    old = {token for _, start, end in sample["old_kv"] for token in range(start, end)}
    parts = []
    for version, start, end in sample["weight_versions"]:
        places = [token for token in range(start, end) if token not in old]
        firsts = [token for token in places if token == start or token - 1 in old]
        lasts = [token for token in places if token + 1 == end or token + 1 in old]
        parts += [(version, first, last + 1) for first, last in zip(firsts, lasts, strict=True)]
    return parts


def _key(asked: Asked, sample: dict[str, Any], start: int, end: int) -> tuple[Prompt, SamplingParams]:
    """Return the request that continues a sample from token `start` up to `end`."""
    assert isinstance(asked.params, SamplingParams) and asked.params.seed is not None
    before = tuple(np.frombuffer(sample["token_ids"], "<i4")[:start].tolist())
    seed = (asked.params.seed + sample["index"] * GOLDEN) % 2**64
    update = dict(n=1, seed=seed, max_tokens=end - start)
    return asked.prompt + before, asked.params.model_copy(update=update)


@pytest.fixture(scope="module")
def references(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Reference]:
    folder = tmp_path_factory.mktemp("versions")
    others = [another_version(tiny_llama, folder / str(seed), seed) for seed in (1, 2, 3)]
    return [Reference(checkpoint) for checkpoint in (tiny_llama, *others)]


@pytest.fixture
def machine(tiny_llama: Path, references: list[Reference]) -> Iterator[type[ServedEngine]]:
    """The state machine with little memory for KV."""
    threads = torch.get_num_threads()
    sizes = dict(block_size=4, num_blocks=24, max_model_len=64, max_num_seqs=6, max_num_batched_tokens=16)
    config = EngineConfig(model=str(tiny_llama), num_threads=1, **sizes)
    happened.clear()
    yield type("Machine", (ServedEngine,), dict(references=references, config=config))
    torch.set_num_threads(threads)


LOAD: Load = ([_TRUNK[:3], _TRUNK[:5]], dict(temperature=1.0, ignore_eos=True), 6)
BOTH = ["weights", "kv_cache"]
SCRIPTS: dict[str, list[Callable[[Any], None]]] = {
    **{
        f"{policy}, {in_place=}, {fault}": [
            lambda m, i=in_place, p=policy, f=fault: m.push(1, i, p, f, LOAD),
            lambda m: m.take_many_steps(),
            lambda m: m.recover(2),
        ]
        for policy in ("recompute", "abort", "drain", "keep")
        for in_place in (False, True)
        for fault in (None, "corrupted", "incomplete")
    },
    **{
        f"sleep {level} {tags} {policy}": [
            lambda m, s=(level, tags, policy): m.sleep(*s, LOAD),
            lambda m: m.take_many_steps(),
            lambda m: m.call_simply("pause"),
            lambda m: m.wake_up(["weights"], None),
            lambda m: m.drain(),
            lambda m: m.wake_up(["kv_cache"], None),
            lambda m: m.call_simply("pause"),
            lambda m: m.generate(_TRUNK[:4], 2, 3, dict(temperature=1.0), 1),
            lambda m: m.abort(0, 0),
        ]
        for level in (1, 2)
        for tags in (BOTH, ["kv_cache"], ["weights"])
        for policy in ("recompute", "abort", "drain")
    },
    "three versions": [
        lambda m: m.push(1, False, "recompute", None, LOAD),
        lambda m: m.take_few_steps(3),
        lambda m: m.push(2, True, "recompute", None, None),
    ],
    **{
        f"a refused drain keeps a push, {in_place=}": [
            lambda m: m.carry(LOAD),
            lambda m: m.call_simply("pause"),
            lambda m: m.push(1, False, "drain", None, None),
            lambda m: m.sleep(2, BOTH, "drain", None),
            lambda m: m.begin_push(2, True, "drain"),
            lambda m, i=in_place: m.begin_push(2, i, "recompute"),
            lambda m: m.use_old_push(0, "verify"),
        ]
        for in_place in (False, True)
    },
    **{
        f"an abort of what waits, {in_place=}": [
            lambda m, i=in_place: m.push(1, i, "drain", None, LOAD),
            lambda m: m.call_simply("resume"),
            lambda m: m.abort_push(0),
            lambda m: m.drain_in_vain(),
            lambda m: m.take_many_steps(),
        ]
        for in_place in (False, True)
    },
    "an abort of a push and of requests": [
        lambda m: m.begin_push(1, True, "abort"),
        lambda m: m.generate(_TRUNK, 3, 8, dict(temperature=0.0), 1),
        lambda m: m.abort(0, 1),
        lambda m: m.abort_push(0),
        lambda m: m.abort(0, None),
    ],
    "a drain after an abort of a sample that waits": [
        lambda m: m.call_simply("pause"),
        lambda m: m.generate(_TRUNK[:4], 2, 3, dict(temperature=1.0), 1),
        lambda m: m.abort(0, 0),
        lambda m: m.drain(),
    ],
    "requests that came just before a drain": [
        lambda m: m.call_simply("pause"),
        lambda m: m.generate(_TRUNK, 3, 8, dict(temperature=0.0), 1),
        lambda m: m.call_simply("resume"),
        lambda m: m.drain(),
    ],
}


def test_each_kind_of_call(machine: type[ServedEngine]) -> None:
    for ends_early in (False, True):
        for script in SCRIPTS.values():
            play(machine(), script, ends_early)
    play(machine(), [lambda m: m.carry(LOAD), lambda m: m.drain()], ends_early=True)
    missing = [premise for premise in IN_SCRIPTS if not happened[premise]]
    assert not missing, (missing, happened)


def play(example: ServedEngine, script: list[Callable[[Any], None]], ends_early: bool) -> None:
    try:
        example.start(False, ends_early)
        for act in script:
            act(example)
            example.is_as_told()
    finally:
        example.teardown()


@pytest.mark.parametrize("examples", [100, pytest.param(150, marks=pytest.mark.exhaustive)])
def test_any_order_of_calls(machine: type[ServedEngine], examples: int) -> None:
    profile = settings(PROFILE, max_examples=examples)
    run_until_seen(machine, profile, lambda: [premise for premise in IN_RANDOM_ORDER if not happened[premise]])


@pytest.mark.exhaustive
def test_any_order_of_calls_with_old_kv(machine: type[ServedEngine]) -> None:
    machine.policies = [*machine.policies, "keep", "keep"]
    run_until_seen(machine, PROFILE, lambda: [premise for premise in WITH_OLD_KV if not happened[premise]])
