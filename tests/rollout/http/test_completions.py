"""`/v1/completions` and `/inference/v1/generate`: tokens, bits and fields of the responses."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_fronts import Front, error_of, events
from transformers import AutoTokenizer

from trueroll.engine.request import SampleOutput
from trueroll.rollout import Group, RolloutClient, SamplingParams
from trueroll.rollout.http.wire import encoded

PROMPT = list(range(40, 80))
IDS = {"return_token_ids": True, "return_tokens_as_token_ids": True}


def bits(logprobs: Any) -> bytes:
    return np.array(logprobs, np.float32).tobytes()


def check_same(choice: Any, sample: SampleOutput) -> None:
    """Check that a choice of a completions response has the sample's tokens and bits."""
    assert choice.token_ids == sample.token_ids
    assert choice.logprobs.tokens == [f"token_id:{token_id}" for token_id in sample.token_ids]
    assert sample.logprobs is not None and bits(choice.logprobs.token_logprobs) == sample.logprobs.tobytes()
    # The JSON number is exactly the float32, not only a number that rounds to it.
    assert choice.logprobs.token_logprobs == sample.logprobs.tolist()


def flat(groups: list[Group]) -> list[SampleOutput]:
    return [*chain.from_iterable(group.samples for group in groups)]


@pytest.mark.parametrize(
    ("sampling", "extra"),
    [
        (dict(temperature=0.0), {}),
        (dict(n=3, temperature=0.8, top_p=0.9), {}),
        (dict(n=2, temperature=1.3), dict(top_k=20, min_p=0.01, min_tokens=4, stop_token_ids=[7, 9])),
    ],
    ids=["greedy", "nucleus", "filtered"],
)
def test_completions_have_the_bits_of_the_client(
    front: Front, client: RolloutClient, sampling: dict[str, Any], extra: dict[str, Any]
) -> None:
    prompts = [PROMPT, [5, 6, 7]]
    params = SamplingParams(max_tokens=12, top_logprobs=2, **sampling, **extra)
    samples = flat(client.generate(prompts, params, seed=11))
    fields: dict[str, Any] = dict(model="tiny", prompt=prompts, max_tokens=12, seed=11, logprobs=2, **sampling)
    answer = front.openai().completions.create(**fields, extra_body=IDS | extra)
    assert [choice.index for choice in answer.choices] == list(range(len(samples))) and len(samples) == 2 * params.n
    for choice, sample in zip(answer.choices, samples, strict=True):
        check_same(choice, sample)
        assert choice.finish_reason == sample.finish_reason
        assert sample.top_token_ids is not None and sample.top_logprobs is not None
        for told, ids, logprobs in zip(
            choice.logprobs.top_logprobs, sample.top_token_ids, sample.top_logprobs, strict=True
        ):
            finite = np.where(np.isneginf(logprobs), -9999.0, logprobs)
            assert [*told.items()][:2] == [(f"token_id:{i}", float(p)) for i, p in zip(ids, finite, strict=True)]
    assert answer.usage is not None and answer.usage.prompt_tokens == sum(map(len, prompts))
    assert answer.usage.completion_tokens == sum(len(sample.token_ids) for sample in samples)


def test_edits_have_the_bits_of_the_client(front: Front, client: RolloutClient, chat_model: Path) -> None:
    """Each of `bad_words` is banned as it begins a text and as it follows a space."""
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    words = ["a", " time", "  "]
    encoded_words = [tokenizer.encode(text, add_special_tokens=False) for text in ("a", " a", "time", " time", "  ")]
    shared: dict[str, Any] = dict(n=2, max_tokens=12, temperature=0.8, presence_penalty=0.5, frequency_penalty=-0.25)
    extra: dict[str, Any] = dict(repetition_penalty=1.2, allowed_token_ids=[*range(20, 400)])
    edits: dict[str, Any] = dict(logit_bias={70: 3.5, 30: -100}, bad_words_token_ids=encoded_words)
    params = SamplingParams(**shared, **extra, **edits)
    samples = flat(client.generate([PROMPT], params, seed=11))
    plain = flat(client.generate([PROMPT], SamplingParams(n=2, max_tokens=12, temperature=0.8), seed=11))
    assert [each.token_ids for each in samples] != [each.token_ids for each in plain], (
        "premise: the edits had an effect"
    )
    fields: dict[str, Any] = dict(shared, seed=11, logit_bias={"70": 3.5, "30": -100})
    own = IDS | extra | {"bad_words": words}
    answer = front.openai().completions.create(model="tiny", prompt=PROMPT, logprobs=0, **fields, extra_body=own)
    for choice, sample in zip(answer.choices, samples, strict=True):
        check_same(choice, sample)
    sampling = fields | extra | {"bad_words": words, "logprobs": 0}
    answer = front.post("/inference/v1/generate", dict(token_ids=PROMPT, sampling_params=sampling)).json()
    assert [choice["token_ids"] for choice in answer["choices"]] == [sample.token_ids for sample in samples]
    messages: Any = [{"role": "user", "content": "once"}]
    chat: Any = front.openai().chat.completions.create(
        model="tiny", messages=messages, **fields, extra_body={"return_token_ids": True} | extra | {"bad_words": words}
    )
    expected = flat(client.generate([chat.prompt_token_ids], params, seed=11))
    assert [choice.token_ids for choice in chat.choices] == [sample.token_ids for sample in expected]
    neutral = dict(repetition_penalty=1, presence_penalty=0, logit_bias={}, allowed_token_ids=[], bad_words=[])
    body = dict(prompt=PROMPT, n=2, max_tokens=12, temperature=0.8, seed=11) | neutral | IDS
    answer = front.post("/v1/completions", body).json()
    assert [choice["token_ids"] for choice in answer["choices"]] == [sample.token_ids for sample in plain]


def test_grammars_have_the_bits_of_the_client(front: Front, client: RolloutClient) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": [1, "x"]}}, "required": ["a"]}
    of_schema: dict[str, Any] = {"json_schema": {"name": "s", "schema": schema}}
    grammar: Any
    for grammar, named in (({"json": schema}, of_schema), ({"json_object": True}, {})):
        params = SamplingParams(max_tokens=16, structured_outputs=grammar)
        [group] = client.generate([PROMPT], params, seed=3)
        kind = {"type": "json_schema" if named else "json_object"} | named
        for fields in ({"structured_outputs": grammar | {"regex": None}}, {"response_format": kind}):
            asked: dict[str, Any] = dict(model="tiny", prompt=PROMPT, max_tokens=16, seed=3, logprobs=0)
            answer = front.openai().completions.create(**asked, extra_body=IDS | fields)
            check_same(answer.choices[0], group.samples[0])
            assert answer.choices[0].text.startswith("{")
    plain = client.generate([PROMPT], SamplingParams(max_tokens=16), seed=3)[0].samples[0]
    assert plain.token_ids != group.samples[0].token_ids, "premise"
    refused = front.post("/v1/completions", dict(prompt=PROMPT, structured_outputs={"json": {"not": {}}}))
    assert (refused.status_code, error_of(refused)["param"]) == (400, "structured_outputs")
    body = dict(prompt=PROMPT, max_tokens=16, seed=3, response_format={"type": "text"}) | IDS
    text = front.post("/v1/completions", body)
    assert text.json()["choices"][0]["token_ids"] == plain.token_ids


def test_a_cached_prompt_has_the_bits_of_a_cold_one(front: Front, client: RolloutClient) -> None:
    prompt = list(range(100, 164))
    client.invalidate_prefix_cache()
    fields: dict[str, Any] = dict(model="tiny", prompt=prompt, max_tokens=6, seed=2, logprobs=0)
    cold, warm = (front.openai().completions.create(**fields, extra_body=IDS) for _ in range(2))
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in (cold, warm)]  # type: ignore[union-attr]
    assert cached[0] == 0 and cached[1] >= 48, "the second had the first one's prefix"
    [group] = client.generate([prompt], SamplingParams(max_tokens=6), seed=2)
    for answer in (cold, warm):
        check_same(answer.choices[0], group.samples[0])
    salted = front.openai().completions.create(**fields, extra_body=IDS | {"cache_salt": "mine"})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0  # type: ignore[union-attr]
    check_same(salted.choices[0], group.samples[0])


def test_a_stream_has_the_bits_and_the_text_of_the_whole(front: Front, client: RolloutClient) -> None:
    fields: dict[str, Any] = dict(model="tiny", prompt=PROMPT, max_tokens=400, n=2, seed=4, logprobs=1)
    whole = front.openai().completions.create(**fields, extra_body=IDS)
    parts: dict[int, list[Any]] = {0: [], 1: []}
    usage = None
    stream = front.openai().completions.create(
        **fields, extra_body=IDS, stream=True, stream_options={"include_usage": True}
    )
    for event in stream:
        usage = event.usage
        for choice in event.choices:
            parts[choice.index].append(choice)
    assert usage is not None and whole.usage is not None and usage.completion_tokens == whole.usage.completion_tokens
    [group] = client.generate([PROMPT], SamplingParams(n=2, max_tokens=400), seed=4)
    for choice, sample in zip(whole.choices, group.samples, strict=True):
        pieces = parts[choice.index]
        assert len(pieces) > 2, "it came in pieces"
        check_same(choice, sample)
        token_ids: list[int] = sum((piece.token_ids for piece in pieces), [])
        logprobs = sum((piece.logprobs.token_logprobs for piece in pieces if piece.logprobs), [])
        assert token_ids == sample.token_ids and bits(logprobs) == bits(choice.logprobs.token_logprobs)
        assert "".join(piece.text for piece in pieces) == choice.text
        assert sum((piece.logprobs.text_offset for piece in pieces if piece.logprobs), []) == (
            choice.logprobs.text_offset
        )
        assert [piece.finish_reason for piece in pieces[-2:]] == [None, choice.finish_reason]


def test_text_prompts_are_tokenized_and_texts_are_told(front: Front, chat_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    texts = ["once upon", "a time"]
    answer = front.openai().completions.create(
        model="tiny", prompt=texts, max_tokens=5, seed=1, logprobs=0, extra_body={"return_token_ids": True}
    )
    for choice, text in zip(answer.choices, texts, strict=True):
        told: Any = choice
        assert told.prompt_token_ids == tokenizer.encode(text)
        assert choice.text == tokenizer.decode(told.token_ids, skip_special_tokens=True)
        assert told.logprobs.tokens == [tokenizer.decode([token_id]) for token_id in told.token_ids]
        assert told.logprobs.top_logprobs is None


def stop_within(text: str) -> str:
    """Return three characters from the middle of a text. The three characters do not occur earlier in the text."""
    return next(text[at : at + 3] for at in range(8, len(text)) if text.find(text[at : at + 3]) == at)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(front: Front, is_stream: bool) -> None:
    fields: dict[str, Any] = dict(model="tiny", prompt=PROMPT, max_tokens=48, temperature=0.7, seed=9)
    [free] = front.openai().completions.create(**fields).choices
    stop = stop_within(free.text)
    answer: Any = front.openai().completions.create(**fields, stop=["never there", stop], stream=is_stream)
    choices = [choice for event in answer for choice in event.choices] if is_stream else answer.choices
    assert "".join(choice.text for choice in choices) == free.text[: free.text.index(stop)]
    assert choices[-1].finish_reason == "stop" and choices[-1].stop_reason == stop


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_stop_token_is_returned_but_not_in_the_text(front: Front, is_stream: bool, chat_model: Path) -> None:
    fields: dict[str, Any] = dict(model="tiny", prompt=PROMPT, max_tokens=30, temperature=0.7, seed=9)
    [free] = front.openai().completions.create(**fields, extra_body=IDS).choices
    token_ids: list[int] = free.token_ids  # type: ignore[attr-defined]
    last = next(i for i in range(4, 30) if token_ids.index(token_ids[i]) == i)
    extra = IDS | {"stop_token_ids": [token_ids[last]]}
    answer: Any = front.openai().completions.create(**fields, extra_body=extra, stream=is_stream)
    choices = [choice for event in answer for choice in event.choices] if is_stream else answer.choices
    assert sum((choice.token_ids for choice in choices), []) == token_ids[: last + 1]
    expected = AutoTokenizer.from_pretrained(chat_model).decode(token_ids[:last], skip_special_tokens=True)
    assert "".join(choice.text for choice in choices) == expected
    assert choices[-1].finish_reason == "stop" and choices[-1].stop_reason == token_ids[last]


def test_echo_tells_the_prompt_and_its_log_probs(front: Front, client: RolloutClient) -> None:
    prompts = [PROMPT, [9]]
    fields: dict[str, Any] = dict(model="tiny", prompt=prompts, max_tokens=2, temperature=0, logprobs=1)
    plain = front.openai().completions.create(**fields, extra_body=IDS)
    echoed = front.openai().completions.create(**fields, echo=True, extra_body=IDS)
    [score] = client.score([PROMPT], temperature=0.0, top_logprobs=1)
    for prompt, without, told in zip(prompts, plain.choices, echoed.choices, strict=True):
        assert without.logprobs is not None and told.logprobs is not None
        logprobs: Any = told.logprobs.token_logprobs
        assert told.text.endswith(without.text) and len(told.text) > len(without.text)
        assert told.logprobs.tokens == [f"token_id:{i}" for i in prompt] + (without.logprobs.tokens or [])
        assert logprobs[0] is None and logprobs[len(prompt) :] == without.logprobs.token_logprobs
        if prompt is PROMPT:
            assert bits(logprobs[1 : len(prompt)]) == score.logprobs.tobytes()
    edited = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 0}
    edited |= {"repetition_penalty": 3, "min_tokens": 1, "logit_bias": {str(i): -100 for i in PROMPT}}
    told = front.post("/v1/completions", edited).json()["choices"][0]["logprobs"]["token_logprobs"]
    assert bits(told[1 : len(PROMPT)]) == score.logprobs.tobytes(), "edits do not concern tokens of a prompt"
    filtered = front.post("/v1/completions", {"prompt": prompts[0], "echo": True, "logprobs": 1, "top_k": 1}).json()
    assert -9999.0 in filtered["choices"][0]["logprobs"]["token_logprobs"]
    assert front.openai().completions.create(model="tiny", prompt="ab", max_tokens=1, echo=True).choices[0].text[
        :2
    ] == ("ab")


SAMPLING: dict[str, Any] = dict(
    n=2, max_tokens=9, temperature=0.9, top_p=0.95, seed=21, logprobs=3, stop_token_ids=[2], min_tokens=2
)
RENDERERS = dict(
    skip_special_tokens=False, flat_logprobs=True, detokenize=False, extra_args={"prl_compact_logprobs": True}
)


def test_generate_has_the_bits_of_the_client(front: Front, client: RolloutClient) -> None:
    body = dict(model="tiny", token_ids=PROMPT, sampling_params=SAMPLING | RENDERERS, request_id="mine", cache_salt="s")
    answer = front.post("/inference/v1/generate", body).json()
    params = SamplingParams(
        **{name: value for name, value in SAMPLING.items() if name not in ("seed", "logprobs")}, top_logprobs=3
    )
    [group] = client.generate([PROMPT], params, seed=21)
    assert answer["request_id"] == "mine" and len(answer["choices"]) == 2
    for choice, sample in zip(answer["choices"], group.samples, strict=True):
        assert choice["token_ids"] == sample.token_ids and choice["finish_reason"] == sample.finish_reason
        content = choice["logprobs"]["content"]
        assert [entry["token"] for entry in content] == [f"token_id:{i}" for i in sample.token_ids]
        assert sample.logprobs is not None
        assert bits([entry["logprob"] for entry in content]) == sample.logprobs.tobytes()
        assert [len(entry["top_logprobs"]) for entry in content] == [3] * len(content)
        assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": len(sample.token_ids)}]
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)


def test_generate_streams_the_same_tokens(front: Front) -> None:
    body = dict(token_ids=PROMPT, sampling_params=SAMPLING)
    whole = front.post("/inference/v1/generate", body).json()
    *told, done = events(front.post("/inference/v1/generate", body | {"stream": True}))
    assert done == "[DONE]"
    for choice in whole["choices"]:
        pieces = [each for event in told for each in event["choices"] if each["index"] == choice["index"]]
        assert sum((piece["token_ids"] for piece in pieces), []) == choice["token_ids"]
        logprobs = [entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["content"]]
        assert logprobs == choice["logprobs"]["content"]
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]


def test_an_event_is_one_line_whatever_is_in_it(front: Front) -> None:
    text = "a\x85b\u2028c\u2029d\r\ne"
    assert len(text.splitlines()) == 5
    assert front.post("/detokenize", {"tokens": front.post("/tokenize", {"prompt": text}).json()["tokens"]}).json() == {
        "prompt": text
    }
    raw = encoded({"text": text}).decode()
    assert raw.splitlines() == [raw] and json.loads(raw) == {"text": text}


def test_without_max_tokens_generate_takes_the_rest_of_the_context(front: Front) -> None:
    body = dict(token_ids=[3] * 1000, sampling_params=dict(ignore_eos=True))
    [choice] = front.post("/inference/v1/generate", body).json()["choices"]
    assert len(choice["token_ids"]) == 24 and choice["logprobs"] is None


def test_tokenize_and_detokenize_are_those_of_the_tokenizer(front: Front, chat_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    text = "Grüße, 世界 </s>"
    told = front.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert told["tokens"] == tokenizer.encode(text) and told["count"] == len(told["tokens"])
    assert told["max_model_len"] == 1024 and len(told["token_strs"]) == told["count"]
    assert front.post("/detokenize", {"tokens": told["tokens"]}).json() == {"prompt": text}
    messages = [{"role": "user", "content": "hi"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    told = front.post("/tokenize", {"messages": messages}).json()
    assert told["tokens"] == tokenizer.encode(rendered, add_special_tokens=False)


def test_the_model_is_listed(front: Front) -> None:
    [model] = front.openai().models.list().data
    assert (model.id, model.object, model.max_model_len) == ("tiny", "model", 1024)  # type: ignore[attr-defined]
    assert front.openai().models.retrieve("tiny").id == "tiny"
    assert error_of(front.get("/v1/models/other"))["code"] == "model_not_found"
