"""Sampling and scoring through the Tinker API: the bits of the client, and refused fields by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from http_fronts import Front, error_of, front_end
from tinker_client import TinkerClient, fields_of, varint

from trueroll.engine.request import ScoreOutput
from trueroll.rollout import RolloutClient, SamplingParams, WorkerProcess

PROMPT = list(range(40, 80))


@pytest.fixture(scope="module")
def front(worker: WorkerProcess) -> Iterator[Front]:
    with front_end(worker.address, model_name="tiny", tinker=True) as running:
        yield running


@pytest.fixture(scope="module")
def tinker(front: Front) -> TinkerClient:
    return TinkerClient(front)


@pytest.mark.parametrize(
    ("sampling", "params"),
    [
        (dict(temperature=0), dict(temperature=0.0)),
        (dict(temperature=0.7, top_p=0.8, top_k=20), dict(temperature=0.7, top_p=0.8, top_k=20)),
        (dict(stop=[7, 9]), dict(stop_token_ids=[7, 9])),
        (dict(stop="a"), dict(stop=["a"])),
        (dict(stop=["a", "b"]), dict(stop=["a", "b"])),
        (dict(stop=[]), dict(ignore_eos=True)),
    ],
    ids=["greedy", "filtered", "ids", "text", "texts", "none"],
)
def test_samples_have_the_bits_of_the_client(
    tinker: TinkerClient, client: RolloutClient, sampling: dict[str, Any], params: dict[str, Any]
) -> None:
    asked = SamplingParams(n=2, max_tokens=12, logprobs="temperature", top_logprobs=3, **params)
    [group] = client.generate([PROMPT], asked, seed=2**64 - 5)
    told = tinker.sample(PROMPT, dict(max_tokens=12, seed=-5) | sampling, num_samples=2, topk_sample_logprobs=3)
    assert told.token_ids == [sample.token_ids for sample in group.samples]
    assert told.stop_reasons == [int(sample.finish_reason == "length") for sample in group.samples]
    for i, sample in enumerate(group.samples):
        assert sample.logprobs is not None and sample.top_logprobs is not None and sample.top_token_ids is not None
        assert told.logprobs[i] == sample.logprobs.tobytes()
        ids, logprobs, k, length = told.tops[i]
        assert (k, length) == (3, len(sample.token_ids)) and ids == sample.top_token_ids.flatten().tolist()
        assert logprobs == sample.top_logprobs.tobytes()
    assert told.prompt_logprobs is told.prompt_tops is told.targets is None


def test_a_sample_ends_at_the_token_of_its_stop(tinker: TinkerClient) -> None:
    free = tinker.sample(PROMPT, dict(max_tokens=12, seed=5))
    place = next(i for i, token in enumerate(free.token_ids[0][:-1]) if token not in free.token_ids[0][:i] and i > 1)
    ended = tinker.sample(PROMPT, dict(max_tokens=12, seed=5, stop=[free.token_ids[0][place]]))
    assert ended.token_ids == [free.token_ids[0][: place + 1]] and ended.stop_reasons == [0]


def test_the_parts_of_a_prompt_are_joined(tinker: TinkerClient) -> None:
    whole = tinker.sample(PROMPT, dict(max_tokens=4, seed=5))
    chunks = [{"tokens": part, "type": "encoded_text"} for part in (PROMPT[:7], [], PROMPT[7:])]
    assert tinker.sample([], dict(max_tokens=4, seed=5), prompt={"chunks": chunks}).token_ids == whole.token_ids


def test_log_probs_of_the_prompt_have_the_bits_of_the_client(tinker: TinkerClient, client: RolloutClient) -> None:
    [score] = client.score([PROMPT], top_logprobs=2)
    one_token = dict(max_tokens=1, temperature=0.5)
    told = tinker.sample(PROMPT, one_token, prompt_logprobs=True, topk_prompt_logprobs=2)
    assert told.prompt_logprobs is not None and told.prompt_tops is not None
    assert np.isnan(np.frombuffer(told.prompt_logprobs[:4], np.float32)).all()
    assert told.prompt_logprobs[4:] == score.logprobs.tobytes()
    ids, logprobs, k, length = told.prompt_tops
    assert (k, length, ids[:2]) == (2, len(PROMPT), [0, 0])
    assert np.frombuffer(logprobs[:8], np.float32).tolist() == [-99999.0] * 2
    assert score.top_token_ids is not None and score.top_logprobs is not None
    assert ids[2:] == score.top_token_ids.flatten().tolist() and logprobs[8:] == score.top_logprobs.tobytes()
    last = tinker.sample(PROMPT, one_token, prompt_logprobs=True, prompt_logprobs_last_n=5, topk_prompt_logprobs=1)
    assert last.prompt_logprobs is not None and last.prompt_tops is not None
    assert np.isnan(np.frombuffer(last.prompt_logprobs[: -4 * 5], np.float32)).all()
    assert last.prompt_logprobs[-4 * 5 :] == score.logprobs[-5:].tobytes()
    assert last.prompt_tops[1][-4 * 5 :] == score.top_logprobs[-5:, :1].tobytes()
    assert last.prompt_tops[0][:-5] == [0] * (len(PROMPT) - 5)
    alone = tinker.sample([7], one_token, prompt_logprobs=True, topk_prompt_logprobs=1)
    assert alone.prompt_logprobs is not None and np.isnan(np.frombuffer(alone.prompt_logprobs, np.float32)).all()
    assert alone.prompt_tops is not None and alone.prompt_tops[2:] == (1, 1)


def scored(client: RolloutClient, ids: np.ndarray) -> ScoreOutput:
    [score] = client.score([PROMPT], target_token_ids=[ids])
    return score


def test_target_ids_are_scored_dense_and_in_csr_form(tinker: TinkerClient, client: RolloutClient) -> None:
    ids = np.full((len(PROMPT) - 1, 4), -1)
    ids[20] = [5, -1, 9, -1]
    ids[38] = [-1, 7, 8, 9]
    expected = scored(client, ids)
    assert expected.target_logprobs is not None and np.count_nonzero(expected.target_logprobs) == 5
    dense = dict(data=ids.flatten().tolist(), dtype="int64", shape=[*ids.shape])
    for also in ({}, dict(prompt_logprobs=True), dict(prompt_logprobs=True, prompt_logprobs_last_n=3)):
        told = tinker.sample(PROMPT, dict(max_tokens=1), target_prompt_logprobs=dense, **also)
        assert told.targets is not None and told.targets.keys() == {1, 3, 4} and told.targets[3] == [1]
        assert told.targets[1] == [expected.target_logprobs.tobytes()] and told.targets[4] == [bytes([39, 4])]
        num_scored = also.get("prompt_logprobs_last_n", len(PROMPT) - 1)
        if also:
            assert told.prompt_logprobs is not None
            assert told.prompt_logprobs[-4 * num_scored :] == expected.logprobs[-num_scored:].tobytes()
    rows, columns = np.nonzero(ids != -1)
    starts = [int((rows < row).sum()) for row in range(len(ids) + 1)]
    csr = dict(data=ids[rows, columns].tolist(), dtype="int64", shape=[39, 40_000])
    csr |= dict(sparse_crow_indices=starts, sparse_col_indices=columns.tolist())
    told = tinker.sample(PROMPT, dict(max_tokens=1), target_prompt_logprobs=csr)
    assert told.targets is not None and told.targets.keys() == {2, 3, 4}
    sparse = fields_of(told.targets[2][0])
    assert sparse[1] == [expected.target_logprobs[rows, columns].tobytes()]
    assert np.frombuffer(sparse[2][0], np.int64).tolist() == starts
    assert np.frombuffer(sparse[3][0], np.int64).tolist() == columns.tolist()
    shape = told.targets[4][0]
    assert varint(shape, 0) == (39, 1) and varint(shape, 1) == (40_000, len(shape))


def csr(data: list[int], starts: list[int], columns: list[int], shape: list[int]) -> dict[str, Any]:
    named = dict(sparse_crow_indices=starts, sparse_col_indices=columns)
    return dict(data=data, dtype="int64", shape=shape, **named)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (dict(data=[7], dtype="float32", shape=[1, 1]), "target_prompt_logprobs.dtype"),
        (dict(data=[7.0, 8], dtype="int64", shape=[2, 1]), "target_prompt_logprobs.data"),
        (dict(data=[-2, 8], dtype="int64", shape=[2, 1]), "target_prompt_logprobs.data.0: must be at least -1"),
        (dict(data=[7], dtype="int64", shape=[1]), "target_prompt_logprobs.shape"),
        (dict(data=[7], dtype="int64", shape=[1, 1]), "shape: must have 2 rows"),
        (dict(data=[7], dtype="int64", shape=[2, 1]), "data: must have 2 elements"),
        (dict(data=[-1, -1], dtype="int64", shape=[2, 1]), "data: must name at least one token id"),
        (dict(data=[7] * 2050, dtype="int64", shape=[2, 1025]), "must name at most 1024 token ids"),
        (csr([7], [0, 0, 1], [0], [2, 1]) | dict(sparse_col_indices=None), "sparse_crow_indices and"),
        (csr([7, 8], [0, 2, 1], [0, 1], [2, 2]), "sparse_crow_indices: must have 3 ascending"),
        (csr([7, 8], [0, 2], [0, 1], [2, 2]), "sparse_crow_indices: must have 3 ascending"),
        (csr([7, 8], [1, 1, 2], [0, 1], [2, 2]), "sparse_crow_indices: must have 3 ascending"),
        (csr([7, 8], [0, 0, 2], [1, 1], [2, 2]), "sparse_col_indices: must have a column below 2"),
        (csr([7, 8], [0, 0, 2], [0, 2], [2, 2]), "sparse_col_indices: must have a column below 2"),
        (csr([7, 8], [0, 0, 2], [0], [2, 2]), "sparse_col_indices: must have a column below 2"),
        (csr([], [0, 0, 0], [], [2, 2]), "data: must name at least one token id"),
    ],
)
def test_wrong_tensors_are_refused(tinker: TinkerClient, tensor: dict[str, Any], message: str) -> None:
    refused = tinker.begin([1, 2, 3], dict(max_tokens=1), target_prompt_logprobs=tensor)
    assert refused.status_code == 400 and message in error_of(refused)["message"]


@pytest.mark.parametrize(
    ("sampling", "fields", "message"),
    [
        ({}, dict(prompt_alt_tokens_k=2), "prompt_alt_tokens_k: 2 is not supported"),
        ({}, dict(record_stability_info=True), "record_stability_info: True is not supported"),
        ({}, dict(model_path="tinker://a"), "model_path: 'tinker://a' is not supported"),
        ({}, dict(new_field=1), "new_field"),
        (dict(min_p=0.1), {}, "min_p"),
        (dict(top_p=0.0), {}, "top_p"),
        (dict(stop=["a", 7]), {}, "stop"),
        (dict(max_tokens=0), {}, "max_tokens"),
        (dict(max_tokens=1000), {}, "exceed the model's maximum context length"),
        ({}, dict(num_samples=0), "num_samples"),
        ({}, dict(num_samples=4097), "num_samples"),
        ({}, dict(prompt={"chunks": []}), "a prompt has no tokens"),
        ({}, dict(prompt={"chunks": [{"tokens": []}] * 4097}), "prompt.chunks"),
        (
            {},
            dict(prompt={"chunks": [{"type": "image", "data": "a", "format": "png"}]}),
            "prompt.chunks[0].type: 'image'",
        ),
        ({}, dict(prompt_logprobs_last_n=2), "prompt_logprobs_last_n: needs prompt_logprobs"),
        ({}, dict(prompt_logprobs=True, prompt_logprobs_last_n=40), "prompt_logprobs_last_n: must be at most 39"),
        ({}, dict(topk_sample_logprobs=1025), "topk_sample_logprobs"),
        ({}, dict(seq_id=-1), "seq_id"),
    ],
)
def test_unsupported_fields_are_refused_by_name(
    tinker: TinkerClient, sampling: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    refused = tinker.begin(PROMPT, dict(max_tokens=4) | sampling, **fields)
    assert refused.status_code == 400 and message in error_of(refused)["message"]


def test_a_request_that_the_worker_refuses_ends_with_its_error(tinker: TinkerClient) -> None:
    promise = tinker.begin([40, 2**30], dict(max_tokens=1)).json()
    told = tinker.retrieve(promise["request_id"]).json()
    assert told.keys() == {"error", "category"} and told["category"] == "user" and str(2**30) in told["error"]


def test_the_model_is_told_and_checked(front: Front, tinker: TinkerClient) -> None:
    told = front.get("/api/v1/get_server_capabilities").json()
    assert told == {
        "supported_models": [{"model_name": "tiny", "max_context_length": 1024, "trainable": False, "sampleable": True}]
    }
    sampler = front.get(f"/api/v1/samplers/{tinker.sampling_session_id}").json()
    assert sampler == {"sampler_id": tinker.sampling_session_id, "base_model": "tiny", "model_path": None}
    assert tinker.begin_sampling(model_path="tinker://tiny").json()["sampling_session_id"] == tinker.sampling_session_id
    for fields, field in (
        (dict(base_model="other"), "base_model"),
        (dict(base_model="tiny", model_path="tinker://other/weights"), "model_path"),
        ({}, "base_model"),
    ):
        refused = tinker.begin_sampling(**fields)
        assert refused.status_code == 404 and error_of(refused)["param"] == field
        assert "set base_model to 'tiny'" in error_of(refused)["message"]
    assert front.get("/api/v1/healthz").json() == {"status": "ok"}
    assert tinker.call("telemetry", events=["x" * 100_000]).json() == {"status": "accepted"}
    assert tinker.call("client/config", sdk_version="0.38.0").json()["pjwt_auth_enabled"] is False
    assert tinker.call("client/dynamic_config", sdk_version="0.38.0").json() == {"sample_cancel_enabled": True}
