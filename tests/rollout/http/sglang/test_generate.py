"""SGLang's `/generate`: the bits of the client in SGLang's form, whole and as a stream; refused fields by name."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from http_fronts import Front, error_of, events, front_end

from trueroll.engine.request import SampleOutput
from trueroll.rollout import RolloutClient, SamplingParams, WorkerProcess
from trueroll.rollout.http.sglang.answers import GROWTH

PROMPT = list(range(40, 80))
ROUTER = dict(
    model=None,
    stream=False,
    log_metrics=True,
    **dict.fromkeys(
        ("return_text_in_logprobs", "return_hidden_states", "background", "no_logs", "return_bytes", "return_entropy"),
        False,
    ),
)
"""The fields that sglang-router adds to a request."""


@pytest.fixture(scope="module")
def front(worker: WorkerProcess) -> Iterator[Front]:
    with front_end(worker.address, model_name="tiny", sglang=True) as running:
        yield running


def bits(logprobs: Any) -> bytes:
    return np.array(logprobs, np.float32).tobytes()


def ask(front: Front, sampling: dict[str, Any], **fields: Any) -> Any:
    answer = front.post("/generate", ROUTER | dict(input_ids=PROMPT, sampling_params=sampling) | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def check_same(told: Any, sample: SampleOutput) -> None:
    """Check that an answer has the tokens and bits of the client's sample."""
    meta = told["meta_info"]
    logprobs, token_ids, texts = zip(*meta["output_token_logprobs"], strict=True)
    assert list(token_ids) == told["output_ids"] == sample.token_ids and set(texts) == {None}
    assert sample.logprobs is not None and bits(logprobs) == sample.logprobs.tobytes()
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(PROMPT), len(sample.token_ids))
    assert meta["weight_version"] == "0"
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": len(sample.token_ids)}]


@pytest.mark.parametrize(
    ("sampling", "params"),
    [
        (dict(temperature=0), dict(temperature=0.0)),
        (dict(top_p=0.8, top_k=2**30), dict(top_p=0.8)),
        (
            dict(top_k=20, min_p=0.01, min_new_tokens=4, stop_token_ids=[7, 9], frequency_penalty=0.5),
            dict(top_k=20, min_p=0.01, min_tokens=4, stop_token_ids=[7, 9], frequency_penalty=0.5),
        ),
    ],
    ids=["greedy", "nucleus", "filtered"],
)
def test_an_answer_has_the_bits_of_the_client(
    front: Front, client: RolloutClient, sampling: dict[str, Any], params: dict[str, Any]
) -> None:
    asked = SamplingParams(max_tokens=12, logprobs="temperature", top_logprobs=2, **params)
    [group] = client.generate([PROMPT], asked, seed=11)
    sampling = sampling | dict(max_new_tokens=12, sampling_seed=11)
    told = ask(front, sampling, return_logprob=True, top_logprobs_num=2, rid="mine")
    [sample] = group.samples
    check_same(told, sample)
    meta = told["meta_info"]
    tops = np.array([[logprob for logprob, _, _ in row] for row in meta["output_top_logprobs"]], np.float32)
    assert sample.top_logprobs is not None and tops.tobytes() == sample.top_logprobs.tobytes()
    assert meta["id"] == "mine" and meta["input_token_logprobs"] == []
    if sample.finish_reason == "length":
        assert meta["finish_reason"] == {"type": "length", "length": 12}
    else:
        assert meta["finish_reason"] == {"type": "stop", "matched": sample.stop_reason}


def test_several_samples_and_prompts_are_a_list(front: Front, client: RolloutClient) -> None:
    params = SamplingParams(n=2, max_tokens=4, logprobs="temperature")
    [group] = client.generate([PROMPT], params, seed=3)
    sampling = dict(n=2, max_new_tokens=4, sampling_seed=3)
    told = ask(front, sampling, return_logprob=True, rid="g")
    assert [each["meta_info"]["id"] for each in told] == ["g_0", "g_1"]
    for each, sample in zip(told, group.samples, strict=True):
        check_same(each, sample)
    groups = client.generate([PROMPT, [5, 6]], params, seed=3)
    told = ask(front, sampling, input_ids=[PROMPT, [5, 6]], rid=["a", "b"])
    assert [each["output_ids"] for each in told] == [sample.token_ids for group in groups for sample in group.samples]
    assert [each["meta_info"]["id"] for each in told] == ["a_0", "a_1", "b_0", "b_1"]
    assert "output_token_logprobs" not in told[0]["meta_info"]
    [one] = ask(front, dict(max_new_tokens=1), input_ids=[PROMPT], rid="c")
    assert one["meta_info"]["id"] == "c_0"


def test_a_stream_repeats_the_answer_so_far(front: Front) -> None:
    sampling = dict(n=2, max_new_tokens=100, sampling_seed=4, ignore_eos=True)
    whole = ask(front, sampling, return_logprob=True, rid="s")
    response = front.post(
        "/generate", dict(input_ids=PROMPT, sampling_params=sampling, return_logprob=True, rid="s", stream=True)
    )
    assert response.headers["content-type"].startswith("text/event-stream")
    *told, last = events(response)
    assert last == "[DONE]", last
    assert len(told) > 4, "premise: several events"
    for index in (0, 1):
        own = [event for event in told if event["index"] == index]
        lens = [len(event["output_ids"]) for event in own]
        assert all(event["meta_info"]["finish_reason"] is None for event in own[:-1])
        assert all(b - a > a // GROWTH for a, b in zip(lens[:-1], lens[1:-1], strict=False))
        for event, count in zip(own[:-1], lens[:-1], strict=True):
            assert event["output_ids"] == whole[index]["output_ids"][:count]
            logprobs = event["meta_info"]["output_token_logprobs"]
            assert logprobs == whole[index]["meta_info"]["output_token_logprobs"][:count]
            assert whole[index]["text"].startswith(event["text"])
        own[-1]["meta_info"]["cached_tokens"] = whole[index]["meta_info"]["cached_tokens"]
        assert own[-1] == whole[index] | {"index": index}


def test_the_kept_tokens_of_each_draw(front: Front, client: RolloutClient) -> None:
    params = SamplingParams(max_tokens=6, top_p=0.5, return_sampling_mask=True)
    [group] = client.generate([PROMPT], params, seed=2)
    [sample] = group.samples
    assert sample.kept_token_ids is not None and sample.kept_offsets is not None and len(sample.kept_token_ids) > 6
    custom = {"return_top_p_token_ids": True}
    fields: dict[str, Any] = dict(return_logprob=True)
    sampling = dict(max_new_tokens=6, top_p=0.5, sampling_seed=2, custom_params=custom)
    for told in (ask(front, sampling, **fields), events(front.post("/generate", _streamed(sampling)))[-2]):
        check_same(told, sample)
        meta = told["meta_info"]
        kept, offsets = (np.frombuffer(b64decode(meta[f"top_p_token_{name}"]), "<i4") for name in ("ids", "offsets"))
        assert kept.tolist() == sample.kept_token_ids.tolist() and offsets.tolist() == sample.kept_offsets.tolist()


def _streamed(sampling: dict[str, Any]) -> dict[str, Any]:
    return dict(input_ids=PROMPT, sampling_params=sampling, return_logprob=True, stream=True)


def test_log_probs_of_a_prompt(front: Front, client: RolloutClient) -> None:
    """A teacher's request, as slime's and miles' distillation sends it."""
    [score] = client.score([PROMPT], 1.0)
    fields: dict[str, Any] = dict(return_logprob=True, logprob_start_len=0, top_logprobs_num=1)
    told = ask(front, dict(max_new_tokens=0, temperature=0.7, skip_special_tokens=False), **fields)
    first, *entries = told["meta_info"]["input_token_logprobs"]
    assert first == [None, PROMPT[0], None] and [entry[1] for entry in entries] == PROMPT[1:]
    assert bits([entry[0] for entry in entries]) == score.logprobs.tobytes()
    assert (told["text"], told["output_ids"], told["meta_info"]["completion_tokens"]) == ("", [], 0)
    assert told["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert told["meta_info"]["weight_version"] == "0"
    none, *tops = told["meta_info"]["input_top_logprobs"]
    assert none is None and len(tops) == len(entries) and all(len(top) == 1 for top in tops)
    later = ask(front, dict(max_new_tokens=1), return_logprob=True, logprob_start_len=30)["meta_info"]
    assert later["input_token_logprobs"][0] == [None, PROMPT[30], None]
    assert later["input_token_logprobs"][1:] == entries[30:] and later["completion_tokens"] == 1
    ends = ask(front, dict(max_new_tokens=1), return_logprob=True, logprob_start_len=39)["meta_info"]
    assert ends["input_token_logprobs"] == [[None, PROMPT[39], None]]


def test_the_text_ends_before_or_after_its_stop(front: Front) -> None:
    sampling = dict(max_new_tokens=20, sampling_seed=8, ignore_eos=True)
    free = ask(front, sampling, text="x y", input_ids=None)
    stop, token = free["text"][5:9], free["output_ids"][9]
    assert len(stop) == 4 and token not in free["output_ids"][:9], "premise"
    for streams in (False, True):
        for how, expected in ((dict(stop=[stop]), (stop, stop)), (dict(stop_token_ids=[token]), (token, None))):
            matched, text = expected
            trimmed, kept = (_last(front, sampling | how | {"no_stop_trim": keeps}, streams) for keeps in (False, True))
            assert trimmed["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}
            assert trimmed["output_ids"] == kept["output_ids"], "the ids have the stop token in any case"
            assert kept["text"].startswith(trimmed["text"]) and free["text"].startswith(kept["text"])
            assert len(kept["text"]) > len(trimmed["text"])
            if text is not None:
                assert kept["text"] == trimmed["text"] + text


def _last(front: Front, sampling: dict[str, Any], streams: bool) -> Any:
    fields = dict(text="x y", sampling_params=sampling, stream=streams)
    response = front.post("/generate", fields)
    return events(response)[-2] if streams else response.json()


@pytest.mark.parametrize(
    ("fields", "sampling", "names"),
    [
        (dict(lora_path="a"), {}, "lora_path: the adapter 'a' is not loaded"),
        (dict(lora_path=["a", None]), {}, "lora_path"),
        (dict(log_metrics=False), {}, "log_metrics: False is not supported"),
        (dict(return_hidden_states=True), {}, "return_hidden_states: True"),
        (dict(model="x"), {}, "model: 'x'"),
        (dict(image_data=["x"]), {}, "image_data"),
        (dict(prompt="x"), {}, "prompt"),
        (dict(text="x"), {}, "input_ids: give either"),
        (dict(input_ids=[]), {}, "a prompt has no tokens"),
        (dict(sampling_params=[{}]), {}, "sampling_params"),
        (dict(return_logprob=True, logprob_start_len=41), {}, "logprob_start_len: must be at most 40"),
        (dict(return_logprob=True, logprob_start_len=0, stream=True), {}, "logprob_start_len: 0 is not supported"),
        (dict(rid=["a"]), {}, "rid: there must be one name"),
        ({}, dict(max_tokens=3), "max_tokens: unknown parameter"),
        ({}, dict(json_schema="{}"), "sampling_params.json_schema: '{}' is not supported"),
        ({}, dict(max_new_tokens=0), "max_new_tokens: 0 returns only"),
        ({}, dict(max_new_tokens=-1), "max_new_tokens"),
        ({}, dict(max_new_tokens=2, min_new_tokens=3), "min_new_tokens must be at most max_new_tokens = 2"),
        ({}, dict(max_new_tokens=10**6), "lower max_new_tokens"),
        ({}, dict(custom_params={"other": 1}), "custom_params"),
        ({}, dict(top_p=2.0), "top_p"),
    ],
)
def test_a_refused_field_is_named(front: Front, fields: dict[str, Any], sampling: dict[str, Any], names: str) -> None:
    body = dict(input_ids=PROMPT, sampling_params=sampling) | fields
    answer = front.post("/generate", body)
    assert answer.status_code == 400 and names in error_of(answer)["message"], answer.text


def test_the_default_length_is_sglangs_and_null_fills_the_context(front: Front) -> None:
    told = ask(front, dict(ignore_eos=True))
    assert len(told["output_ids"]) == 128
    limit = front.get("/server_info").json()["context_length"]
    told = ask(front, dict(ignore_eos=True, max_new_tokens=None), input_ids=[5] * (limit - 3))
    assert len(told["output_ids"]) == 3
