"""Named adapters: requests of several adapters in one engine get the same bits as from one engine per adapter.

The oracle is an engine with the adapter merged into its weights, without a name, as pushes of adapters have always
done.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matrix import thinned

from tiny import make_tiny_model
from trueroll.engine.engine import Engine
from trueroll.engine.request import Distribution, GenerateRequest, SampleOutput, ScoreOutput, ScoreRequest
from trueroll.errors import ConfigError, InvalidRequestError

from .drive import bits, drain, executor_of, generate, make_engine, run, samples_of, tokens
from .named_adapters import load, merge, staged

BUDGET = 2**26
SEEDS = {"a": 1, "b": 2, "c": 3}
pytestmark = [pytest.mark.usefixtures("steps_ahead"), thinned(lambda steps_ahead, **_: steps_ahead)]


def of(adapter: str | None, request: GenerateRequest) -> GenerateRequest:
    return GenerateRequest(request.id, request.prompt_token_ids, request.params, adapter=adapter)


def requests(adapter: str | None, **params: Any) -> list[GenerateRequest]:
    """Return requests with the same prompts for every adapter: two that share a prefix, and a group."""
    long = tokens(41, seed=7)
    prompts = [long, np.concatenate((long[:32], tokens(9, seed=8))), tokens(5, seed=9)]
    groups = [dict(n=1), dict(n=1), dict(n=3)]
    return [
        of(adapter, generate(f"{adapter}-{i}", prompt, **group, **params))
        for i, (prompt, group) in enumerate(zip(prompts, groups, strict=True))
    ]


def alone(model: Path, adapter: str | None, **settings: Any) -> dict[tuple[str, int], Any]:
    """Return the bits of an adapter's requests on an engine that has only this adapter, merged without a name."""
    engine = make_engine(model, **settings)
    if adapter is not None:
        merge(engine, SEEDS[adapter])
    found = run(engine, [of(None, request) for request in requests(adapter)])
    return {key: bits(sample) for key, sample in found.items()}


def adapters_per_turn(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Return a list that grows by the adapter of each step."""
    executor, seen = executor_of(engine), list[str | None]()
    compute = executor.compute

    def watched(step: Any) -> Any:
        seen.append(step.adapter)
        return compute(step)

    monkeypatch.setattr(executor, "compute", watched)
    return seen


CASES = [
    ("llama", dict(dtype="bfloat16")),
    ("qwen3", dict(dtype="float32", speculative="ngram")),
    ("qwen3_moe", dict(dtype="bfloat16")),
    ("qwen3_5", dict(dtype="float32")),
    ("gemma3", dict(dtype="bfloat16", host_cache_bytes=2**22)),
    ("deepseek_v3", dict(dtype="bfloat16")),
]


@pytest.mark.parametrize(("family", "settings"), CASES, ids=[family for family, _ in CASES])
def test_a_mixed_batch_has_the_bits_of_each_adapter_alone(
    family: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_model(family, tmp_path)
    engine = make_engine(model, adapter_bytes=BUDGET, num_blocks=96, max_num_seqs=24, **settings)
    for name, seed in SEEDS.items():
        load(engine, name, seed)
    names = [*SEEDS, None]
    seen = adapters_per_turn(engine, monkeypatch)
    found = run(engine, [request for group in zip(*map(requests, names), strict=True) for request in group])
    assert {*names} == {*seen} and any(one != other for one, other in zip(seen[2:], seen[3:], strict=False))
    expected = [alone(model, name, **settings) for name in names]
    assert {key: bits(sample) for key, sample in found.items()} == {k: v for each in expected for k, v in each.items()}
    assert len({tuple(each.values()) for each in expected}) == len(names), "each adapter changes the results"


def test_a_budget_for_one_merged_adapter_serves_them_in_turn(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, adapter_bytes=BUDGET)
    store = engine.adapters
    assert store is not None
    for name, seed in SEEDS.items():
        load(engine, name, seed)
    of_factors = store.num_held
    run(engine, requests("a"))
    of_one = store.num_held - of_factors
    small = make_engine(tiny_llama, adapter_bytes=of_factors + of_one)
    for name, seed in SEEDS.items():
        load(small, name, seed)
    for name in SEEDS:
        for request in requests(name):
            small.add(request)
    outputs, most = list[SampleOutput](), 0
    while small.has_unfinished:
        outputs += samples_of(small.step())
        most = max(most, small.memory()["adapters"])
    assert most == of_factors + of_one
    expected = {key: value for name in SEEDS for key, value in alone(tiny_llama, name).items()}
    assert {(each.request_id, each.index): bits(each) for each in outputs} == expected


def test_no_prefix_is_shared_between_adapters_or_with_the_base(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, adapter_bytes=BUDGET)
    load(engine, "a", 1)
    load(engine, "b", 2)
    prompt = tokens(64)

    def hits(id: str, adapter: str | None) -> int:
        [sample] = run(engine, [of(adapter, generate(id, prompt))]).values()
        return sample.num_cached_tokens

    assert [hits("1", None), hits("2", "a"), hits("3", "b")] == [0, 0, 0]
    assert min(hits("4", None), hits("5", "a"), hits("6", "b")) >= 48
    load(engine, "a", 1, version=2)
    assert hits("7", "a") == 0, "the same values under a later version are another adapter"
    assert min(hits("8", None), hits("9", "b")) >= 48, "a commit of one adapter costs no other request a hit"
    engine.remove_adapter("a")
    load(engine, "a", 2)
    assert hits("10", "a") == 0


def test_a_commit_recomputes_only_the_requests_of_its_adapter(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, adapter_bytes=BUDGET, dtype="bfloat16")
    load(engine, "a", 1, version=5)
    load(engine, "b", 2)
    own, other = generate("own", tokens(40), n=2, max_tokens=20), generate("other", tokens(40), max_tokens=20)
    engine.add(of("a", own))
    engine.add(of("b", other))
    for _ in range(8):
        assert engine.step() == []
    recomputed = engine.stats().recomputed
    load(engine, "a", 3, version=6)
    assert engine.stats().recomputed == recomputed + 2
    found = {(each.request_id, each.index): each for each in samples_of(drain(engine))}
    fresh = make_engine(tiny_llama, adapter_bytes=BUDGET, dtype="bfloat16")
    for name, seed in SEEDS.items():
        load(fresh, name, seed)
    [expected] = run(fresh, [of("b", other)]).values()
    assert bits(found["other", 0]) == bits(expected)
    for index in range(2):
        sample = found["own", index]
        old, new = sample.weight_versions
        assert (old.version, new.version) == (5, 6) and 0 < old.end == new.start < new.end == 20
        for adapter, span in (("a", old), ("c", new)):
            whole = np.concatenate((tokens(40), np.array(sample.token_ids, np.int32)))
            fresh.add(ScoreRequest("score", whole, Distribution(), start=40, adapter=adapter))
            [score] = drain(fresh)
            assert isinstance(score, ScoreOutput) and sample.logprobs is not None
            assert np.array_equal(
                score.logprobs[span.start : span.end].view(np.int32),
                sample.logprobs[span.start : span.end].view(np.int32),
            )


def test_a_commit_can_abort_and_a_removal_aborts(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, adapter_bytes=BUDGET, max_num_seqs=2)
    load(engine, "a", 1)
    load(engine, "b", 2)
    for name in ("a", "b"):
        engine.add(of(name, generate(name, tokens(20), max_tokens=30)))
    for _ in range(6):
        engine.step()
    [aborted] = samples_of(load(engine, "a", 3, version=2, in_flight="abort"))
    assert (aborted.request_id, aborted.finish_reason) == ("a", "abort") and aborted.token_ids
    engine.add(of("b", generate("waiting", tokens(20), max_tokens=30)))
    engine.add(of("b", generate("more", tokens(21), max_tokens=30)))
    removed = samples_of(engine.remove_adapter("b"))
    assert {each.request_id: each.finish_reason for each in removed} == dict.fromkeys(("b", "waiting", "more"), "abort")
    assert not engine.has_unfinished and drain(engine) == []
    assert engine.adapters is not None and engine.adapters.names == ["a"]


def test_a_request_with_one_version_ends_at_a_commit_of_its_adapter(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, adapter_bytes=BUDGET)
    load(engine, "a", 1)
    for adapter in ("a", None):
        engine.add(of(adapter, generate(f"{adapter}", tokens(20), max_tokens=20, one_version=True)))
    for _ in range(5):
        engine.step()
    [ended] = samples_of(load(engine, "a", 2, version=2))
    assert (ended.request_id, ended.finish_reason) == ("a", "abort")
    [other] = samples_of(drain(engine))
    assert other.finish_reason == "length"


def test_what_cannot_be_done_changes_nothing(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, adapter_bytes=BUDGET)
    load(engine, "a", 1)
    with pytest.raises(InvalidRequestError, match="adapter 'x' is not loaded"):
        engine.add(of("x", generate("1", tokens(8))))
    with pytest.raises(RuntimeError, match="adapter 'x' is not loaded"):
        engine.remove_adapter("x")
    with pytest.raises(RuntimeError, match=r"unload the named adapters \['a'\] first"):
        engine.commit_weights(staged(engine, 2), 1, "recompute")
    with pytest.raises(RuntimeError, match=r"unload the named adapters \['a'\] first"):
        engine.sleep(2, ["weights"], "recompute")
    with pytest.raises(ValueError, match="only A and B"):
        staged(engine, 1, "b").rows("model.norm.weight", 0, 1)
    other = make_engine(tiny_llama, adapter_bytes=BUDGET)
    early = staged(other, 1, "a")
    merge(other, 2)
    with pytest.raises(ValueError, match="staged for base weights that have been replaced"):
        other.commit_adapter(early, "a", 1, "recompute")
    tight = make_engine(tiny_llama, adapter_bytes=1000)
    with pytest.raises(ValueError, match=r"needs \d+ bytes \(limit 1000, adapter_bytes\)"):
        load(tight, "a", 1)
    with pytest.raises(RuntimeError, match="set adapter_bytes"):
        load(make_engine(tiny_llama), "a", 1)
    with pytest.raises(ConfigError, match="several ranks"):
        make_engine(tiny_llama, adapter_bytes=BUDGET, tensor_parallel_size=2, pieces=2)
    assert not engine.has_unfinished
    expected = alone(tiny_llama, "a")
    assert {key: bits(sample) for key, sample in run(engine, requests("a")).items()} == expected


def test_merged_weights_sleep_and_come_back(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, adapter_bytes=BUDGET)
    load(engine, "a", 1)
    expected = alone(tiny_llama, "a")
    assert {key: bits(sample) for key, sample in run(engine, requests("a")).items()} == expected
    held = engine.memory()["adapters"]
    engine.sleep(1, ["weights", "kv_cache"], "recompute")
    assert 0 < engine.memory()["adapters"] < held
    engine.wake_up(["weights", "kv_cache"])
    assert {key: bits(sample) for key, sample in run(engine, requests("a")).items()} == expected
    assert engine.memory()["adapters"] == held


def test_an_adapter_without_a_name_is_no_part_of_named_ones(tiny_llama: Path) -> None:
    """A named adapter is added to the base weights, even if another adapter is merged into the served weights."""
    engine = make_engine(tiny_llama, adapter_bytes=BUDGET)
    merge(engine, SEEDS["b"])
    engine.commit_adapter(staged(engine, SEEDS["a"], "a", "q_proj"), "a", 1, "recompute")
    found = run(engine, requests("a"))
    other = make_engine(tiny_llama)
    other.commit_weights(staged(other, SEEDS["a"], part="q_proj"), 1, "recompute")
    expected = run(other, [of(None, request) for request in requests("a")])
    assert {key: bits(each) for key, each in found.items()} == {key: bits(each) for key, each in expected.items()}
    assert {key: bits(each) for key, each in run(engine, requests(None)).items()} == {
        (f"None-{id[2:]}", i): value for (id, i), value in alone(tiny_llama, "b").items()
    }
