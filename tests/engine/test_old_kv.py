"""Commits with `in_flight` `keep`: samples go on over KV of older weights, which is never published.

The oracle of every test is an engine that has only the final weights. A token that is not listed in `old_kv` has the
bits that `score` computes with the weights that drew the token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matrix import thinned

from tiny import FAMILIES, HYBRID, MIXTURES, WINDOWED, make_tiny_model
from trueroll.engine.cache.prefix_cache import Chain, Entry, PrefixCache
from trueroll.engine.engine import Engine
from trueroll.engine.request import GenerateRequest, InFlight, Output, SampleOutput, ScoreOutput, ScoreRequest
from trueroll.engine.scheduling.scheduler import Scheduler
from trueroll.errors import InvalidRequestError

from .checkpoints import another_version, read_tensors, stage
from .drafting.mtp_models import make_mtp_model
from .drive import bits, drain, executor_of, generate, make_engine, run, samples_of, score, tokens

BLOCK = 8
pytestmark = [pytest.mark.usefixtures("steps_ahead"), thinned(lambda steps_ahead, **_: steps_ahead)]


@dataclass
class Pushed:
    """An engine with alternating weights: even versions are those of `folders[0]`, odd versions those of `folders[1]`.

    `engine` gets commits. `oracles`: for each folder, an engine that never gets one.
    """

    folders: tuple[Path, Path]
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.engine = make_engine(self.folders[0], block_size=BLOCK, **self.settings)
        drafts = dict(speculative=self.settings.get("speculative", "off"))
        self.oracles = [make_engine(folder, block_size=BLOCK, num_blocks=1024, **drafts) for folder in self.folders]
        self._tensors = [read_tensors(folder) for folder in self.folders]

    def push(self, in_flight: InFlight = "keep", in_place: bool = False) -> list[Output]:
        version = self.engine.weight_version + 1
        outputs = self.engine.interrupt(in_flight) if in_place else []
        staging = stage(self.engine, self._tensors[version % 2], in_place, step=4096)
        return outputs + self.engine.commit_weights(staging, version, in_flight)

    def check(self, prompt: np.ndarray, sample: SampleOutput) -> int:
        """Check that each token outside `old_kv` has the log-prob that `score` computes with the weights that drew it,
        and that the spans add up. Return the number of tokens in `old_kv` with a log-prob that no version recomputes.
        """
        count, whole = len(sample.token_ids), np.concatenate((prompt, np.array(sample.token_ids, np.int32)))
        old = covered(sample.old_kv, count)
        assert sample.is_exact == (not old.any())
        drawn_by = np.full(count, -1)
        for span in sample.weight_versions:
            drawn_by[span.start : span.end] = span.version
        if sample.routed_experts is not None:
            assert len(sample.routed_experts) == len(whole) - 1
        assert (drawn_by >= 0).all() and sum(s.end - s.start for s in sample.weight_versions) == count
        assert sample.logprobs is not None
        found = sample.logprobs.view(np.int32)
        scored = np.stack([score(oracle, whole)[len(prompt) - 1 :].view(np.int32) for oracle in self.oracles])
        assert np.array_equal(found[~old], scored[drawn_by % 2, np.arange(count)][~old])
        for span in sample.old_kv:
            assert (drawn_by[span.start : span.end] > span.version).all()
        return int((old & (found != scored).all(0)).sum())

    def check_index(self) -> int:
        """Check that every published block on the device has the bits that an engine with the same weights computes.
        Return the number of compared blocks.
        """
        oracle = self.oracles[self.engine.weight_version % 2]
        published = index_of(self.engine)
        for i, path in enumerate(published):
            oracle.add(generate(f"path-{i}", np.frombuffer(path + b"\5\0\0\0", np.int32), max_tokens=1))
        drain(oracle)
        computed, count = index_of(oracle), 0
        for path, entry in published.items():
            for group, block in enumerate(entry.blocks):
                other = computed[path].blocks[group]
                if block is not None and other is not None and block >= 0:  # not on the host
                    pairs = zip(block_tensors(self.engine)[group], block_tensors(oracle)[group], strict=True)
                    assert all(torch.equal(a[block], b[other]) for a, b in pairs), "a stale block is published"
                    count += 1
        return count


def covered(spans: Sequence[Any], count: int) -> np.ndarray:
    """Return which tokens the spans cover, bool [count]. The spans must be sorted, disjoint and not empty."""
    found, last = np.zeros(count, np.bool_), 0
    for span in spans:
        assert last <= span.start < span.end <= count
        found[span.start : span.end], last = True, span.end
    return found


def index_of(engine: Engine) -> dict[bytes, Entry]:
    """Return the published prefixes, by the bytes of all their tokens."""

    def path(entry: Entry) -> bytes:
        return (b"" if entry.parent is None else path(entry.parent)) + entry.tokens

    return {path(entry): entry for entry in engine._scheduler.cache.entries}


def block_tensors(engine: Engine) -> list[list[torch.Tensor]]:
    return executor_of(engine)._runner._copied()


@pytest.fixture
def pushed(tiny_llama: Path, tmp_path: Path) -> Pushed:
    return Pushed((tiny_llama, another_version(tiny_llama, tmp_path / "other")))


def begin(engine: Engine, request: GenerateRequest, count: int = 4) -> None:
    """Add a request, and step until each of its samples has at least `count` tokens."""
    engine.add(request)
    while min(len(sample.token_ids) for sample in engine._ledger.samples_of(request.id)) < count:
        assert engine.step() == []


@pytest.mark.parametrize("started", ["long", "score"])
def test_only_decoding_samples_go_on_over_their_old_kv(pushed: Pushed, started: str) -> None:
    engine, prompt, long = pushed.engine, tokens(30), tokens(150, seed=1)
    engine._scheduler.max_num_batched_tokens = 48
    begin(engine, generate("group", prompt, n=3, max_tokens=30))
    requests = [generate("long", long, n=2), ScoreRequest("score", tokens(150, seed=2))]
    for request in sorted(requests, key=lambda request: request.id != started):
        engine.add(request)
    engine.step()
    waiting = generate("waiting", prompt, max_tokens=30)
    engine.add(waiting)
    recomputed = engine.stats().recomputed
    outputs = pushed.push()
    assert engine.stats().recomputed - recomputed == 1, "premise: a chunk was computed"
    engine.check_integrity()
    outputs += drain(engine)
    samples = {(o.request_id, o.index): o for o in outputs if isinstance(o, SampleOutput)}
    for (id, _), sample in samples.items():
        inexact = pushed.check(long if id == "long" else prompt, sample)
        [*_, last] = sample.weight_versions
        if id == "group":
            assert [(s.version, s.start, s.end) for s in sample.old_kv] == [(0, last.start, 30)] and inexact > 10
            with pytest.raises(InvalidRequestError, match="drawn over KV of version 0"):
                sample.check_exact()
        else:
            sample.check_exact()
            assert last.version == 1 and last.start == 0
    [scores] = [output for output in outputs if isinstance(output, ScoreOutput)]
    assert scores.logprobs.tobytes() == score(pushed.oracles[1], tokens(150, seed=2)).tobytes()
    assert bits(samples["waiting", 0]) == bits(run(pushed.oracles[1], [waiting])["waiting", 0])


@pytest.mark.parametrize("length", [3, 30], ids=["no full block", "full blocks"])
def test_requests_after_a_push_have_the_bits_of_a_worker_that_never_kept(pushed: Pushed, length: int) -> None:
    """The prompt of these requests has tokens that the kept sample drew, before and after its KV was kept."""
    engine, prompt = pushed.engine, tokens(length)
    begin(engine, generate("kept", prompt, max_tokens=60), 5)
    pushed.push()
    while len(engine._ledger.samples_of("kept")[0].token_ids) < 50:
        engine.step()
    [sample] = engine._ledger.samples_of("kept")
    again = generate("again", np.concatenate((prompt, np.array(sample.token_ids[:45], np.int32))), n=2)
    hits = engine.stats().prefix_hits
    engine.add(again)
    outputs = drain(engine)
    assert engine.stats().prefix_hits == hits, "no block of the kept sample can be hit"
    fresh = run(pushed.oracles[1], [again])
    assert {s.index: bits(s) for s in samples_of(outputs) if s.request_id == "again"} == {
        i: bits(fresh["again", i]) for i in range(2)
    }
    second = run(engine, [again])
    assert engine.stats().prefix_hits > hits, "premise: the clean blocks are hit"
    assert {key: bits(s) for key, s in second.items()} == {key: bits(s) for key, s in fresh.items()}
    assert pushed.check_index() > 0


def test_several_pushes_keep_the_oldest_version_until_the_kv_is_recomputed(pushed: Pushed) -> None:
    engine, prompt = pushed.engine, tokens(20)
    begin(engine, generate("r", prompt, max_tokens=40))
    for in_flight in ("keep", "keep", "recompute", "keep"):
        pushed.push(in_flight)
        for _ in range(6):
            engine.step()
    engine.interrupt("recompute")  # as by a sleep
    [sample] = samples_of(drain(engine))
    assert pushed.check(prompt, sample) > 8
    starts = {span.version: span.start for span in sample.weight_versions}
    first, second = [(span.version, span.start, span.end) for span in sample.old_kv]
    assert first == (0, starts[1], starts[3])
    assert second[:2] == (3, starts[4]) and second[2] < 40, "a recomputation makes the KV clean again"
    assert [span.version for span in sample.weight_versions] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("after", ["sleep", "weights", "invalidate", "abort", "in place"])
def test_what_a_later_call_does_with_old_kv(pushed: Pushed, after: str) -> None:
    engine, prompt = pushed.engine, tokens(20)
    begin(engine, generate("r", prompt, max_tokens=30))
    outputs = pushed.push(in_place=after == "in place")
    engine.step()
    engine.step()
    match after:
        case "sleep":
            outputs += engine.sleep(1, ["kv_cache"], "recompute")
            engine.wake_up(["kv_cache"])
        case "weights":
            outputs += engine.sleep(1, ["weights"], "recompute")
            engine.wake_up(["weights"])
        case "invalidate":
            engine.invalidate_prefix_cache()
        case "abort":
            outputs += engine.abort("r")
    [sample] = samples_of(outputs + drain(engine))
    count = len(sample.token_ids)
    pushed.check(prompt, sample)
    [span] = sample.old_kv
    assert (span.end == count) == (after != "sleep") and (count < 30) == (after == "abort")
    assert pushed.check_index() == 0 or after == "sleep"


def test_a_preempted_sample_is_computed_again_with_the_current_weights(tiny_llama: Path, tmp_path: Path) -> None:
    folders = tiny_llama, another_version(tiny_llama, tmp_path / "other")
    pushed = Pushed(folders, dict(num_blocks=24))
    prompts = {str(i): tokens(30 + i, seed=i) for i in range(3)}
    for id, prompt in prompts.items():
        pushed.engine.add(generate(id, prompt, max_tokens=60))
    outputs: list[Output] = []
    while sum(len(s.token_ids) for id in prompts for s in pushed.engine._ledger.samples_of(id)) < 9:
        outputs += pushed.engine.step()
    assert pushed.engine.stats().preemptions == 0, "premise"
    outputs += pushed.push()
    outputs += drain(pushed.engine)
    assert pushed.engine.stats().preemptions > 0, "premise"
    samples = samples_of(outputs)
    assert sum(pushed.check(prompts[sample.request_id], sample) for sample in samples) > 20
    ends = [sample.old_kv[0].end for sample in samples]
    assert max(ends) == 60 and min(ends) < 60, (
        "a preempted sample goes on with clean KV, and its old tokens stay marked"
    )


def test_one_version_refuses_keep_and_is_aborted_by_recompute(pushed: Pushed) -> None:
    engine = pushed.engine
    begin(engine, generate("one", tokens(20), one_version=True, max_tokens=30))
    begin(engine, generate("any", tokens(21), max_tokens=30))
    engine.add(generate("new", tokens(22), one_version=True))
    with pytest.raises(RuntimeError, match="one_version"):
        pushed.push()
    assert engine.weight_version == 0
    outputs = pushed.push("recompute")
    [cut] = samples_of(outputs)
    assert (cut.request_id, cut.finish_reason) == ("one", "abort") and len(cut.token_ids) >= 4
    assert [span.version for span in cut.weight_versions] == [0]
    samples = {sample.request_id: sample for sample in samples_of(drain(engine))}
    assert [span.version for span in samples["any"].weight_versions] == [0, 1]
    assert [span.version for span in samples["new"].weight_versions] == [1], "it had no tokens at the commit"


class Load:
    """Random requests on a small engine, with a commit after every few steps."""

    def __init__(self, pushed: Pushed, seed: int) -> None:
        self.pushed, self.rng = pushed, np.random.default_rng(seed)
        self.prompts: dict[str, np.ndarray] = {}
        self.shared = tokens(40, seed=seed)
        self.num_blocks = self.num_inexact = self.num_tokens = 0

    def run(self, pushes: int, checked_every: int) -> None:
        """Make `pushes` commits under load, then finish all requests."""
        engine = self.pushed.engine
        for i in range(pushes):
            in_flight = "keep" if self.rng.random() < 0.8 else "recompute"
            self.take(self.pushed.push(in_flight))
            for _ in range(int(self.rng.integers(1, 9))):
                while len(engine._ledger.open) < 6:
                    self.add()
                self.take(engine.step())
                engine.check_integrity()
            if (i + 1) % checked_every == 0:
                self.num_blocks += self.pushed.check_index()
        self.take(drain(engine))
        self.num_blocks += self.pushed.check_index()

    def add(self) -> None:
        rng, id = self.rng, str(len(self.prompts))
        own = tokens(int(rng.integers(1, 50)), seed=int(rng.integers(1000)))
        self.prompts[id] = np.concatenate((self.shared, own)) if rng.random() < 0.5 else own
        params = dict(n=int(rng.integers(1, 4)), max_tokens=int(rng.integers(1, 40)), seed=int(rng.integers(2**32)))
        if self.pushed.engine.info.num_experts:
            params["return_routed_experts"] = bool(rng.integers(2))
        self.pushed.engine.add(generate(id, self.prompts[id], **params))

    def take(self, outputs: list[Output]) -> None:
        for sample in samples_of(outputs):
            self.num_inexact += self.pushed.check(self.prompts[sample.request_id], sample)
            self.num_tokens += len(sample.token_ids)


SMALL = dict(
    num_blocks=32,
    max_num_batched_tokens=40,
    max_num_seqs=8,
    state_interval=16,
    decode_state_interval=16,
    state_budget=16,
)


def load_on(model: Path, folder: Path, pushes: int, checked_every: int, seed: int = 0, **settings: Any) -> Load:
    load = Load(Pushed((model, another_version(model, folder / "other")), SMALL | settings), seed)
    load.run(pushes, checked_every)
    stats = load.pushed.engine.stats()
    assert stats.prefix_hits and load.num_inexact and load.num_blocks, "premise"
    return load


@thinned(lambda family, steps_ahead: steps_ahead and family in ("llama", "gemma3", "qwen3_5", "qwen3_moe"))
@pytest.mark.parametrize("family", (*FAMILIES, *WINDOWED, *HYBRID, *MIXTURES, "falcon_h1", "bamba"))
def test_no_stale_block_is_published_under_load(family: str, tmp_path: Path) -> None:
    load_on(make_tiny_model(family, tmp_path / "model"), tmp_path, pushes=8, checked_every=4)


@thinned(lambda drafts, steps_ahead: steps_ahead and drafts == "ngram")
@pytest.mark.parametrize("drafts", ["ngram", "mtp"])
def test_no_stale_block_is_published_with_drafts(drafts: str, tiny_llama: Path, tmp_path: Path) -> None:
    model = tiny_llama if drafts == "ngram" else make_mtp_model("qwen3_5", tmp_path / "model")
    load = load_on(model, tmp_path, pushes=8, checked_every=4, speculative=drafts)
    assert load.pushed.engine.stats().drafts[0].num_drafted, "premise"


@pytest.mark.exhaustive
def test_no_stale_block_is_published_in_a_thousand_pushes(tiny_qwen3: Path, tmp_path: Path) -> None:
    load = load_on(tiny_qwen3, tmp_path, pushes=1000, checked_every=10, host_cache_bytes=2**20)
    stats = load.pushed.engine.stats()
    assert stats.preemptions and stats.host_restored, "premise"
    print(f"{load.num_tokens} tokens, {load.num_inexact} over old KV, {load.num_blocks} blocks compared, 0 stale")


@pytest.mark.parametrize("guarded", [True, False], ids=["integrity check", "content"])
def test_a_stale_block_that_is_published_on_purpose_is_found(
    pushed: Pushed, monkeypatch: pytest.MonkeyPatch, guarded: bool
) -> None:
    publish = PrefixCache.publish

    def publish_all(cache: PrefixCache, chain: Chain, *args: Any) -> None:
        chain.epoch = cache.identity.epoch
        publish(cache, chain, *args)

    monkeypatch.setattr(PrefixCache, "publish", publish_all)
    if not guarded:
        monkeypatch.setattr(Scheduler, "check_integrity", lambda scheduler: None)
    begin(pushed.engine, generate("r", tokens(3), max_tokens=30))
    pushed.push()
    with pytest.raises(AssertionError, match="a stale block is published"):
        drain(pushed.engine)
        pushed.check_index()
