"""Arguments and errors of a client's calls: seeds, errors by prompt, aborts, ids, processes, and event loops."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fake_engine import MAX_MODEL_LEN, FakeEngine
from refusals import about
from serving import WorkerOnThread, check_group, stop_after_a_step

from trueroll.engine.request import GenerateRequest, derive_seed
from trueroll.errors import ConfigError, InvalidRequestError, MessageTooLargeError, TruerollError, UnknownRequestError
from trueroll.rollout import AsyncRolloutClient, Group, RolloutClient, SamplingParams, WeightPublisher

SHORT = SamplingParams(max_tokens=3)
LONG = SamplingParams(max_tokens=400)


def seeds_of(groups: list[Group]) -> list[int | None]:
    return [group.params.seed for group in groups]


def test_each_prompt_has_its_own_noise_with_one_seed(client: RolloutClient) -> None:
    first = client.generate([[1], [1], [2]], SHORT, seed=7)
    assert (
        seeds_of(first) == [derive_seed(7, i) for i in range(3)] == seeds_of(client.generate([[1], [1], [2]], seed=7))
    )
    assert len({tuple(group.samples[0].token_ids) for group in first}) == 3
    streamed = {position: sample.seed for position, sample in client.stream([[1], [1]], SHORT, seed=7)}
    assert streamed == {i: derive_seed(derive_seed(7, i), 0) for i in range(2)}


def test_a_seed_in_params_needs_a_single_prompt_or_a_list(client: RolloutClient) -> None:
    own = SamplingParams(max_tokens=3, seed=9)
    assert seeds_of(client.generate([[1]], own)) == [9] and seeds_of(client.generate([[1], [2]], [own, own])) == [9, 9]
    with pytest.raises(
        InvalidRequestError,
        match=r"params: with seed 9, all 2 prompts would be sampled with the same random numbers.*seed=9",
    ):
        client.generate([[1], [2]], own)


@pytest.mark.parametrize("params", [[{"n": 1}], "a", [None]])
def test_a_list_of_params_has_only_sampling_params(client: RolloutClient, params: Any) -> None:
    with pytest.raises(InvalidRequestError, check=about("params[0]")):
        client.generate([[1]], params, errors="return")


def test_numpy_numbers_are_accepted(client: RolloutClient) -> None:
    prompts: list[Any] = [[np.int64(1), np.int32(2)], np.array([1, 2], np.uint16), (1, np.uint64(2))]
    plain = client.generate([[1, 2]] * 3, SHORT, seed=7, min_weight_version=0)
    seed, oldest = np.uint64(7), np.int64(0)
    found = client.generate(prompts, SHORT, seed=seed, min_weight_version=oldest)  # type: ignore[arg-type]
    assert seeds_of(found) == seeds_of(plain)
    assert [group.samples[0].token_ids for group in found] == [group.samples[0].token_ids for group in plain]
    distribution: dict[str, Any] = dict(temperature=np.float32(0.5), top_k=np.int64(4), top_logprobs=np.int8(2))
    scores = client.score(prompts, **distribution)
    expected = client.score([[1, 2]] * 3, temperature=0.5, top_k=4, top_logprobs=2)
    assert [each.logprobs.tobytes() for each in scores] == [each.logprobs.tobytes() for each in expected]
    assert client.abort("nobody", np.int64(0), missing_ok=True) == 0  # type: ignore[arg-type]
    assert client.drain(np.float32(5.0)).state == "paused"  # type: ignore[arg-type]
    assert client.resume().state == "ready"


@pytest.mark.parametrize("value", [True, np.True_])
def test_a_boolean_is_not_a_number(client: RolloutClient, value: Any) -> None:
    for prompt in ([value], [1, value], (value, 2), np.array([True, False])):
        with pytest.raises(InvalidRequestError, check=about("prompts[0]")):
            client.generate([prompt], SHORT)
        with pytest.raises(InvalidRequestError, check=about("sequences[0]")):
            client.score([prompt])
    for call in (
        lambda: client.generate([[1]], SHORT, seed=value),
        lambda: client.generate([[1]], SHORT, min_weight_version=value),
        lambda: client.score([[1, 2]], top_logprobs=value),
        lambda: client.abort("nobody", value, missing_ok=True),
        lambda: client.drain(value),
    ):
        with pytest.raises(InvalidRequestError):
            call()


def test_an_impossible_min_weight_version_is_refused(client: RolloutClient) -> None:
    with pytest.raises(InvalidRequestError, check=about("min_weight_version", value=2**63 - 1, limit=2**63 - 2)):
        client.generate([[1]], SHORT, min_weight_version=2**63 - 1, wait_for_weights=True)


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, True, np.True_, "7"])
def test_an_invalid_seed_is_refused(client: RolloutClient, seed: Any) -> None:
    with pytest.raises(InvalidRequestError, check=about("seed")):
        client.generate([[1]], seed=seed)
    with pytest.raises(InvalidRequestError, match=r"^seed: the params also have a seed \(9\)"):
        client.generate([[1]], SamplingParams(seed=9), seed=1)


def test_an_error_names_its_prompt(client: RolloutClient) -> None:
    with pytest.raises(InvalidRequestError, match=r"^prompts\[1\]: token ids: expected ids in"):
        client.generate([[1], [-1], [2]], SHORT)
    with pytest.raises(MessageTooLargeError, match=r"^prompts\[2\]: message: it has .* max_message_bytes"):
        client.generate([[1], [2], [3] * 2000], SHORT)
    with pytest.raises(InvalidRequestError, match=r"^sequences\[1\]: token ids: expected more"):
        client.score([[1, 2], [1]])


def test_errors_may_be_returned_instead_of_groups(client: RolloutClient) -> None:
    prompts = [[1], [-1], [2], "text", [3] * 2000]
    found = client.generate(prompts, SHORT, errors="return")  # type: ignore[arg-type]
    kinds = [Group, InvalidRequestError, Group, InvalidRequestError, MessageTooLargeError]
    assert [type(each) for each in found] == kinds
    for i in (1, 3, 4):
        assert str(found[i]).startswith(f"prompts[{i}]: ")
    check_group(found[0], 1)  # type: ignore[arg-type]
    assert client.health().requests["open"] == client.health().requests["kept"] == 0
    with pytest.raises(InvalidRequestError, check=about("errors", value="ignore")):
        client.generate([[1]], errors="ignore")  # type: ignore[call-overload]


def test_one_abort_ends_many_requests_and_skips_finished_ones(client: RolloutClient, engine: FakeEngine) -> None:
    stop_after_a_step(engine)
    groups: list[Group] = []
    ids = ["a", "b", "c"]
    calls: dict[str, Any] = dict(prompts=[[1], [2], [3]], params=LONG, request_ids=ids)
    thread = threading.Thread(target=lambda: groups.extend(client.generate(**calls)))
    thread.start()
    while client.health().requests["open"] < 3:
        pass
    assert client.abort(["a", "gone", "b"], missing_ok=True) == 2
    with pytest.raises(UnknownRequestError, match="'gone'"):
        client.abort(["gone"])
    with RolloutClient(client._client._connection._line.address) as other:
        assert other.abort_all() == 0, "the client has no requests of its own"
    assert client.abort_all() == 1
    thread.join()
    assert [group.samples[0].finish_reason for group in groups] == ["abort"] * 3
    assert client.abort_all() == 0


def test_the_oldest_requests_are_ended_first(client: RolloutClient, engine: FakeEngine) -> None:
    stop_after_a_step(engine)
    found: list[int] = []
    prompts = [[i] for i in range(1, 17)]
    samples = client.stream(prompts, LONG)
    thread = threading.Thread(target=lambda: found.extend(position for position, _ in samples))
    thread.start()
    while client.health().requests["open"] < len(prompts):
        pass
    assert client.abort_all() == len(prompts)
    thread.join()
    assert found == [*range(len(prompts))]


def test_health_is_fresh_after_an_abort_that_leaves_nothing_to_do(client: RolloutClient, engine: FakeEngine) -> None:
    stop_after_a_step(engine)
    thread = threading.Thread(target=lambda: client.generate([[1]], LONG, request_ids=["a"]))
    thread.start()
    while not client.health().requests.get("running"):
        pass
    assert client.abort("a") == 1
    thread.join()
    while client.health().requests["running"]:  # `health` would be stale until the next request
        pass


def test_health_says_why_commits_copy(client: RolloutClient, engine: FakeEngine) -> None:
    told = client.health().engine
    assert told is not None and told["commit_note"] == ""
    engine.weights.commit_note = "memory pages are copied"
    told = client.health().engine
    assert told is not None and told["commit_note"] == "memory pages are copied"


def test_continued_samples_keep_their_places(client: RolloutClient, engine: FakeEngine) -> None:
    [group] = client.generate([[1]], SHORT, seed=1)
    ended = replace(group.samples[0], finish_reason="stop")
    stop_after_a_step(engine)
    cut: list[Group] = []
    thread = threading.Thread(target=lambda: cut.extend(client.generate([[1], [2]], LONG, seed=1)))
    thread.start()
    while client.health().requests["open"] < 2 or client.stats().engine["computed_tokens"] < 4:
        pass
    assert client.abort_all() == 2
    thread.join()
    engine.step = type(engine).step.__get__(engine)
    engine.flow.set()
    partial = [group.samples[0] for group in cut]
    same = client.continue_samples([[1], [1], [2]], [partial[0], ended, partial[1]], SamplingParams(max_tokens=9))
    assert same[1] is ended and [len(sample.token_ids) for sample in same] == [9, 3, 9]
    assert [sample.seed for sample in same] == [partial[0].seed, ended.seed, partial[1].seed]
    asked = [request for request in engine.requests[-2:] if isinstance(request, GenerateRequest)]
    assert [request.num_prior_tokens for request in asked] == [len(sample.token_ids) for sample in partial]
    assert [derive_seed(request.params.seed or 0, 0) for request in asked] == [sample.seed for sample in partial]
    with pytest.raises(InvalidRequestError, check=about("samples", value=1, limit=2)):
        client.continue_samples([[1], [2]], [partial[0]])


def test_without_max_tokens_the_sample_fills_the_context(client: RolloutClient) -> None:
    [group] = client.generate([[1, 2, 3]], SamplingParams(max_tokens=None))
    assert len(group.samples[0].token_ids) == group.params.max_tokens == MAX_MODEL_LEN - 3
    with pytest.raises(InvalidRequestError, match=r"^prompts\[0\]: length: .* exceed max_model_len"):
        client.generate([[1] * MAX_MODEL_LEN], SamplingParams(max_tokens=None))


def test_samples_that_ended_by_length_continue_to_the_end_of_the_context(client: RolloutClient) -> None:
    open_ended = SamplingParams(max_tokens=None)
    [short, full] = (client.generate([[1, 2, 3]], asked, seed=7)[0].samples[0] for asked in (SHORT, open_ended))
    assert short.finish_reason == full.finish_reason == "length" and len(full.token_ids) == MAX_MODEL_LEN - 3
    grown, same = client.continue_samples([[1, 2, 3]] * 2, [short, full], open_ended)
    assert same is full and len(grown.token_ids) == MAX_MODEL_LEN - 3
    assert grown.token_ids[:3] == short.token_ids and grown.finish_reason == "length" and grown.seed == short.seed
    with pytest.raises(InvalidRequestError, match=r"^samples\[1\]: length: .* exceed max_model_len"):
        client.continue_samples([[1, 2, 3], [1, 2, 3, 4]], [short, full], open_ended)


def test_an_error_of_a_continued_sample_aborts_the_others(client: RolloutClient) -> None:
    [sample] = client.generate([[1]], SHORT, seed=7)[0].samples
    with pytest.raises(InvalidRequestError, match=r"^samples\[0\]: length: .* exceed max_model_len"):
        client.continue_samples([[1] * MAX_MODEL_LEN, [1]], [sample, sample], SamplingParams(max_tokens=None))
    while client.health().requests["open"]:
        pass


def test_token_ids_are_a_list_of_ints(client: RolloutClient) -> None:
    [group] = client.generate([[1, 2]], SHORT)
    ids = group.samples[0].token_ids
    assert len([1, 2] + ids) == 5 and json.loads(json.dumps(ids)) == ids


@pytest.mark.parametrize("prompts", [np.ones((2, 3), np.int64), torch.ones(2, 3, dtype=torch.long), "text"], ids=type)
def test_a_table_of_prompts_is_refused(client: RolloutClient, prompts: Any) -> None:
    for call in (client.generate, client.score):
        with pytest.raises(InvalidRequestError, match="must be a list of token id sequences without padding"):
            call(prompts)
    assert len(client.generate(list(torch.ones(2, 3, dtype=torch.long)), SHORT)) == 2  # type: ignore[arg-type]


def in_a_child(act: Callable[[], object]) -> str:
    """Run an action in a forked process. Return the error, or the result if there is no error."""

    def tell() -> None:
        try:
            found = repr(act())
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        os.write(write, found.encode())

    read, write = os.pipe()
    child = multiprocessing.get_context("fork").Process(target=tell)
    child.start()
    os.close(write)
    with os.fdopen(read) as words:
        said = words.read()
    child.join(20)
    assert child.exitcode == 0
    return said


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_client_raises_in_a_forked_process(client: RolloutClient) -> None:
    client.health()
    publisher = WeightPublisher("shared")
    publisher.connect([client._client._connection._line.address])
    calls = [client.health, lambda: client.generate([[1]]), lambda: list(client.stream([[1]])), client.close]
    for call in [*calls, lambda: publisher.push({}, 1), publisher.close]:
        said = in_a_child(call)
        assert said.startswith(f"TruerollError: client: it was made in process {os.getpid()} and cannot be used"), said
    assert client.health().state == "ready"
    publisher.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_an_asynchronous_client_raises_in_a_forked_process(worker: WorkerOnThread) -> None:
    client = AsyncRolloutClient(worker.address)

    async def use() -> str:
        await client.health()
        said = in_a_child(lambda: asyncio.run(client.health()))
        await client.close()
        return said

    assert asyncio.run(use()).startswith(f"TruerollError: client: it was made in process {os.getpid()} and cannot be")


def test_an_asynchronous_client_raises_in_another_event_loop(worker: WorkerOnThread) -> None:
    client = AsyncRolloutClient(worker.address)
    runner = asyncio.Runner()
    runner.run(client.health())
    for call in (client.health, lambda: client.generate([[1]]), client.close):
        with pytest.raises(TruerollError, match="this call runs in another event loop"):
            asyncio.run(call())
    runner.run(client.close())
    runner.close()


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        (
            dict(temperature=0.5, distribution=SamplingParams()),
            "temperature",
            "must be left out if distribution is given",
        ),
        (dict(min_p=0.5, distribution=SamplingParams()), "min_p", "must be left out if distribution is given"),
        (dict(start=[1, 1, 1]), "start", "there must be one, or one for each of 2"),
        (dict(start=0), "start", "must be at least 1"),
        (dict(start=[1, 2.5]), "start", "must be a valid integer"),
    ],
)
def test_scores_refuse_invalid_distributions_and_starts(
    client: RolloutClient, given: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        client.score([[1, 2], [3, 4, 5]], **given)
    assert caught.value.field == field
    with pytest.raises(ConfigError, match="logprobs is None"):
        client.score([[1, 2]], distribution=SamplingParams(logprobs=None))


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (dict(temperature=0.7), 0.7),
        (dict(temperature=0.7, logprobs="temperature", top_p=0.9, min_tokens=3), 0.7),
        (dict(temperature=0.7, logprobs="raw", top_k=5), 1.0),
        (dict(temperature=0.0, top_p=0.9), 0.0),
    ],
)
def test_trainer_temperature(params: dict[str, Any], expected: float) -> None:
    assert SamplingParams(**params).trainer_temperature == expected


@pytest.mark.parametrize(
    ("params", "named"),
    [
        (dict(top_p=0.9, min_p=0.1), "top_p, min_p"),
        (dict(top_k=3), "top_k"),
        (dict(min_tokens=2), "min_tokens"),
        (dict(logit_bias={3: 1}), "logit_bias"),
    ],
)
def test_trainer_temperature_names_settings_that_no_trainer_computes(params: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^with logprobs='processed' and {named}, .*logprobs='temperature'"):
        _ = SamplingParams(**params).trainer_temperature
    with pytest.raises(ConfigError, match="^logprobs is None"):
        _ = SamplingParams(logprobs=None, **params).trainer_temperature


def test_a_single_stop_string_may_be_a_plain_string() -> None:
    assert SamplingParams(stop="\n").stop == ("\n",)  # type: ignore[arg-type]


@pytest.mark.parametrize("reason", [None, 0, 7, "", "\n"])
def test_the_stop_reason_arrives(client: RolloutClient, engine: FakeEngine, reason: int | str | None) -> None:
    finish = engine._finish
    engine._finish = lambda *which: replace(finish(*which), stop_reason=reason)  # type: ignore[method-assign]
    [group] = client.generate([[1]], SHORT)
    assert group.samples[0].stop_reason == reason and type(group.samples[0].stop_reason) is type(reason)
