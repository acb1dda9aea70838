"""Limits on the cost of one request for other requests. A request above a limit is refused before any work is done, and
long work runs in steps.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import suppress
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from fake_engine import FakeEngine
from http_fronts import Front, error_of, events, front_end
from serving import serving
from starlette.requests import Request

from trueroll.engine.request import SampleDelta, SamplingParams
from trueroll.rollout.http import elements, wire
from trueroll.rollout.http.answers import (
    STEP_ENTRIES,
    TURN_CHARS,
    Rows,
    TokenBytes,
    check_answer,
    encoded,
    encoded_in_parts,
)
from trueroll.rollout.http.bodies import _Body
from trueroll.rollout.http.chat import ChatFields, chat_token_bytes
from trueroll.rollout.http.config import HttpConfig
from trueroll.rollout.http.elements import WEIGHTS, check_elements
from trueroll.rollout.http.errors import Gone, HttpError
from trueroll.rollout.http.pieces import parts_of
from trueroll.rollout.http.texts import Texts
from trueroll.rollout.http.turns import Turns
from trueroll.rollout.http.wire import LongJson, long_answer
from trueroll.rollout.text import LONG_CHARS
from trueroll.rollout.text_child import TextChild, TooMany

DEFAULTS = HttpConfig(address="ipc://x")


@pytest.fixture(scope="module")
def front(chat_model: Path) -> Iterator[Front]:
    limits: dict[str, Any] = dict(max_body_elements=5000, max_text_chars=20_000, max_answer_bytes=2**16)
    with serving(FakeEngine()) as running, front_end(running.address, tokenizer=str(chat_model), **limits) as front:
        yield front


def over_limit(front: Front, limit: str) -> float:
    name = f'trueroll_http_over_limit_total{{limit="{limit}"}}'
    return front.metric(name) if name in front.get("/metrics").text else 0


def refused(front: Front, path: str, body: Any, limit: str) -> dict[str, Any]:
    """Post a request that exceeds a limit, check that it is counted, and return the error."""
    before = over_limit(front, limit)
    error = error_of(front.post(path, body))
    assert over_limit(front, limit) == before + 1, error
    return error


def cost_of(body: bytearray) -> int:
    """Compute the cost of a body's elements by a loop over single characters."""
    cost, in_string, characters = 0, False, iter(range(len(body)))
    for at in characters:
        character = bytes(body[at : at + 1])
        if character == b'"':
            in_string = not in_string
        elif in_string and character == b"\\":
            next(characters, None)
        elif not in_string:
            cost += WEIGHTS.get(character, 0)
    return cost


def value(generator: random.Random, depth: int = 0) -> Any:
    kind = generator.random()
    if kind < 0.4:
        return "".join(generator.choices('a,:[{"\\é\n', k=generator.randint(0, 9)))
    if kind < 0.6 or depth > 3:
        return 3
    values = [value(generator, depth + 1) for _ in range(generator.randint(0, 3))]
    return values if kind < 0.8 else {f'{i}"': each for i, each in enumerate(values)}


@pytest.mark.parametrize("step_bytes", [2, 7, 2**18])
def test_elements_are_counted_outside_of_strings(step_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elements, "_STEP_BYTES", step_bytes)
    for seed in range(200):
        body = bytearray(json.dumps(value(random.Random(seed))), "utf-8")
        cost = cost_of(body)
        list(check_elements(body, cost, True))
        if cost:
            with pytest.raises(HttpError, match=rf"too many elements \(limit {cost - 1},"):
                list(check_elements(body, cost - 1, True))


@pytest.mark.parametrize("step_bytes", [50, 2**18])
def test_numbers_with_many_digits_are_refused(step_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time to parse a number grows with the square of its number of digits. Digits in strings are not limited."""
    monkeypatch.setattr(elements, "_STEP_BYTES", step_bytes)
    for number in ("1" * 90, "0." + "1" * 90, "1e" + "0" * 90):
        list(check_elements(bytearray(f'{{"a": "{number}", "b": [1, "\\"{number}"]}}', "utf-8"), 1000, True))
        for body in (f'{{"a": {number}}}', f'["{number}", {number}]'):
            with pytest.raises(HttpError, match="a number has too many digits in a row"):
                list(check_elements(bytearray(body, "utf-8"), 1000, True))


def test_elements_are_counted_before_they_are_parsed(front: Front) -> None:
    broken = b'{"prompt": [' + b"1," * 6000 + b"]"
    response = httpx2.post(f"{front.url}/v1/completions", content=broken, headers={"Authorization": "Bearer none"})
    assert response.status_code == 413 and error_of(response)["code"] == "too_many_elements"
    assert "--max-body-elements" in error_of(response)["message"]
    assert httpx2.post(f"{front.url}/v1/completions", content=broken[:50]).status_code == 400, "it is not valid JSON"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["x"] * 6000}),
        ("/v1/completions", {"prompt": [[1]] * 1500}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 300}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {str(i): 1 for i in range(1300)}}),
        ("/detokenize", {"tokens": [1] * 6000}),
    ],
)
def test_many_elements_are_refused(front: Front, path: str, body: Any) -> None:
    assert refused(front, path, body, "max_body_elements")["code"] == "too_many_elements"


def test_no_setting_is_named_if_none_would_help(front: Front) -> None:
    headers = {"Authorization": "Bearer none"}
    response = httpx2.post(f"{front.url}/update_weights", content=b"[" + b"1," * 6000 + b"1]", headers=headers)
    error = error_of(response)
    assert (response.status_code, error["code"]) == (413, "too_many_elements") and error["message"].endswith(
        "send fewer elements"
    )


def request_with(content: bytes, let_go: Callable[[int], None], leaves: bool = False) -> Request:
    """A request after its body was read. With `leaves`, the client has disconnected by the next receive."""
    body = _Body(0.0, let_go)
    body.content += content
    body.num_bytes = len(content)

    async def receive() -> dict[str, Any]:
        if not leaves:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    return Request({"type": "http", "trueroll.body": body}, receive)  # type: ignore[arg-type]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list with one entry per parsing step: the number of the body."""
    found: list[int] = []
    parse, numbers = wire._parse, count()

    def noting(*arguments: Any, is_setting: bool) -> Generator[None, None, dict[str, Any]]:
        steps, number = parse(*arguments, is_setting=is_setting), next(numbers)
        while True:
            found.append(number)
            try:
                yield next(steps)
            except StopIteration as done:
                return done.value

    monkeypatch.setattr(wire, "_parse", noting)
    return found


@pytest.mark.parametrize("content", [b'{"text": "%s"}' % (b"," * 3 * 2**18), b'{"ids": [%s1]}' % (b"1," * 2**12)])
def test_long_bodies_are_read_one_after_the_other_in_steps(steps: list[int], content: bytes) -> None:
    """Other work runs between any two steps, however many bodies have arrived at once. Bodies are long in bytes or in
    number of elements.
    """
    by_turn, room = [0], [0]

    async def count_turns() -> None:
        while True:
            by_turn.append(len(steps))
            await asyncio.sleep(0)

    async def read_together() -> list[dict[str, Any]]:
        counting, reader = asyncio.create_task(count_turns()), LongJson(2**14)
        requests = [request_with(content, room.append) for _ in range(8)]
        found = await asyncio.gather(*map(reader.read, requests))
        counting.cancel()
        return found

    assert asyncio.run(read_together()) == [json.loads(content)] * 8
    assert max(after - before for before, after in pairwise(by_turn)) == 1
    assert steps == sorted(steps) and len(steps) >= 8 * 4
    assert room == [0, *[len(content)] * 8]


def test_surrogates_are_searched_and_checked_in_steps() -> None:
    steps = len([*wire._parse(bytearray(b'{"text": "%s"}' % (b"x" * 2**21)), 2**20, True)])
    assert steps >= 2 * 2**21 // 2**18, "the elements are counted in 8 steps, and surrogates are searched in 8 steps"
    strings = rb'{"texts": ["\ud83d\ude00"%s]}' % (b', "x"' * 2**16)
    assert len([*wire._parse(bytearray(strings), 2**20, True)]) >= 2**16 // 2**12


@pytest.mark.parametrize("start", range(2**18 - 6, 2**18 + 1))
def test_a_lone_surrogate_at_the_border_of_two_steps_is_found(start: int) -> None:
    begin = b'{"text": "'
    body = begin + b"x" * (start - len(begin)) + rb'\ud83d"}'
    with pytest.raises(HttpError, match="surrogates not allowed"):
        list(wire._parse(bytearray(body), 2**20, True))


def test_a_client_that_disconnects_ends_the_wait_of_its_body(steps: list[int]) -> None:
    room: list[int] = []
    content = b'{"text": "%s"}' % (b"x" * 2**17)

    async def check() -> None:
        reader = LongJson(2**14)
        await reader._lock.acquire()
        with pytest.raises(Gone):
            await reader.read(request_with(content, room.append, leaves=True))
        reader._lock.release()
        assert await reader.read(request_with(content, room.append)) == json.loads(content)

    asyncio.run(check())
    assert len({*steps}) == 1 and room == [len(content)] * 2


def test_by_default_half_a_million_token_ids_are_taken() -> None:
    body = bytearray(json.dumps({"prompt": [[12345] * 8192] * 63}), "utf-8")
    list(check_elements(body, DEFAULTS.max_body_elements, True))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that the child processes receive."""
    calls: list[str] = []
    ask = TextChild._ask

    def noting(self: TextChild, call: Any, is_abandoned: Callable[[], bool]) -> bytes:
        calls.append(call[0])
        return ask(self, call, is_abandoned)

    monkeypatch.setattr(TextChild, "_ask", noting)
    return calls


CONVERSATION = [{"role": "user", "content": "x" * 10_000}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "x" * 10_000}, "prompt"),
        ("/v1/completions", {"prompt": ["x", "x" * 10_000]}, "prompt"),
        ("/v1/chat/completions", {"messages": CONVERSATION}, "messages"),
        ("/v1/chat/completions", {"messages": CONVERSATION, "stream": True}, "messages"),
    ],
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    front: Front, asked: list[str], path: str, body: Any, param: str
) -> None:
    error = refused(front, path, body, "max_model_len")
    assert (error["code"], error["param"]) == ("context_length_exceeded", param) and asked == []
    assert re.search(r"100\d\d characters", error["message"]) and "maximum context length" in error["message"]
    assert front.post(path, {**body, param: "x" if param == "prompt" else [{"role": "user"}]}).status_code == 200
    assert len(asked) == 1


def test_a_text_with_too_many_tokens_is_refused_with_their_number(front: Front, asked: list[str]) -> None:
    error = refused(front, "/v1/completions", {"prompt": "x" * 600}, "max_model_len")
    assert "600 tokens" in error["message"] and asked == ["encode"]


def test_a_conversation_with_too_much_rendered_text_is_refused(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    async def encode_conversation(*_: Any) -> list[int]:
        raise TooMany("characters", 20_001)

    monkeypatch.setattr(Texts, "encode_conversation", encode_conversation)
    error = refused(front, "/tokenize", {"messages": [{"role": "user"}]}, "max_text_chars")
    assert error["code"] == "text_too_long" and "20001 characters are too many (limit 20000)" in error["message"]


def test_all_texts_together_are_bounded(front: Front, asked: list[str]) -> None:
    for path, body in [
        ("/v1/completions", {"prompt": ["x" * 7000] * 3}),
        ("/tokenize", {"prompt": "x" * 20_001}),
        ("/tokenize", {"messages": CONVERSATION * 2, "tools": [{"x": "y"}]}),
    ]:
        error = refused(front, path, body, "max_text_chars")
        assert error["code"] == "text_too_long" and "--max-text-chars" in error["message"]
    assert asked == []
    assert front.post("/tokenize", {"prompt": "x" * 20_000}).json()["count"] == 20_000, "it need not fit the context"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [1], "n": 100, "max_tokens": 400}),
        ("/v1/completions", {"prompt": [1], "logprobs": 100, "max_tokens": 400}),
        ("/v1/completions", {"prompt": [1] * 400, "echo": True, "n": 100, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user"}], "logprobs": True, "top_logprobs": 20}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"n": 64, "logprobs": 1}}),
    ],
)
def test_the_size_of_an_answer_is_estimated_before_its_request_is_accepted(front: Front, path: str, body: Any) -> None:
    error = refused(front, path, body, "max_answer_bytes")
    assert error["code"] == "answer_too_large" and "(limit 65536) for " in error["message"]
    assert "lower max_tokens, n or the number of log-probs" in error["message"]


def test_the_size_of_a_stream_is_not_estimated(front: Front) -> None:
    body = {"prompt": [1], "n": 100, "max_tokens": 400, "stream": True, "logprobs": 1}
    assert events(front.post("/v1/completions", body))[-1] == "[DONE]"


def test_by_default_64_samples_of_4096_tokens_with_ids_and_log_probs_are_accepted() -> None:
    fields = ChatFields.model_validate(dict(messages=[{"role": "user"}], logprobs=True, return_token_ids=True))
    params = SamplingParams(n=64, max_tokens=4096)
    check_answer([[1] * 4096], params, 8192, chat_token_bytes(fields), DEFAULTS.max_answer_bytes)
    with pytest.raises(HttpError, match="64 samples of up to 4096 tokens at "):
        check_answer([[1] * 4096], params, 8192, chat_token_bytes(fields), 2**24)


def test_the_estimated_size_exceeds_the_actual_size(front: Front) -> None:
    """Covers the response format of each endpoint."""
    prompt, words = [5, 6, 7], dict(n=3, max_tokens=20, seed=1)
    for path, body in [
        ("/v1/completions", {"prompt": prompt, **words, "logprobs": 5, "return_token_ids": True, "echo": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user"}], **words, "logprobs": True, "top_logprobs": 5}),
        ("/inference/v1/generate", {"token_ids": prompt, "sampling_params": words | {"logprobs": 5}}),
    ]:
        whole = len(front.post(path, body).content)
        few = {**body, "max_tokens": 400} if "prompt" in body or "messages" in body else None
        few = few or {**body, "sampling_params": {**body["sampling_params"], "max_tokens": 400}}
        planned = int(error_of(front.post(path, few))["message"].split("may need ")[1].split(" ")[0])
        assert planned > whole * (3 * 400) / (3 * 20 + 9), path


def contents() -> Iterator[tuple[Any, Any]]:
    """Yield pairs: a value that contains Rows, and an equal value with plain lists."""
    for size in (0, 1, 2, STEP_ENTRIES, STEP_ENTRIES + 1, 5000):
        numbers, text = list(range(size)), '"é\U0001f600\ud800' * size
        choice = {"index": 1, "text": text, "none": None, "ids": numbers, "rows": Rows(iter(numbers), 100)}
        plain = {**choice, "rows": numbers}
        yield Rows(numbers), numbers
        yield (
            {"choices": Rows(iter([choice, {}, {"a": 1.5}]), None), "": []},
            {"choices": [plain, {}, {"a": 1.5}], "": []},
        )


def test_an_answer_in_parts_is_the_answer() -> None:
    async def joined(content: Any) -> bytes:
        return b"".join([part async for part in encoded_in_parts(content, Turns())])

    for (in_parts, plain), (at_once, _) in zip(contents(), contents(), strict=True):
        expected = json.dumps(plain, separators=(",", ":")).encode()
        assert asyncio.run(joined(in_parts)) == encoded(at_once) == expected


async def taken(parts: AsyncGenerator[bytes, None]) -> int:
    return sum([len(part) async for part in parts])


@pytest.mark.parametrize(
    ("entry", "width", "most"), [("entry", 1, STEP_ENTRIES), ({"text": "x" * 91}, None, TURN_CHARS // 100 + 1)]
)
def test_other_work_runs_between_the_steps_of_long_answers(entry: Any, width: int | None, most: int) -> None:
    """Covers long lists and many short choices."""
    steps: list[int] = []

    def entries() -> Iterator[str]:
        for _ in range(20 * most):
            steps[-1] += 1
            yield entry

    async def look() -> None:
        while True:
            steps.append(0)
            await asyncio.sleep(0)

    async def run() -> None:
        looking, turns = asyncio.ensure_future(look()), Turns()
        await asyncio.sleep(0)
        await asyncio.gather(*[taken(encoded_in_parts(Rows(entries(), width), turns)) for _ in range(10)])
        looking.cancel()

    asyncio.run(run())
    first, *others = sorted(steps, reverse=True)
    assert first <= 10 * most, "all begin at once"
    assert max(others[9:]) <= most and sum(steps) == 200 * most


def test_a_long_answer_is_produced_while_the_client_reads_it() -> None:
    made = 0

    def entries() -> Iterator[str]:
        nonlocal made
        for _ in range(100_000):
            made += 1
            yield "x" * 97

    async def run() -> None:
        response = await long_answer({"rows": Rows(entries())}, Turns())
        assert made < 20_000 and "Content-Length" not in response.headers
        sent: list[dict[str, Any]] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            await asyncio.Event().wait()

        await response({"type": "http"}, receive, send)
        body = b"".join(message["body"] for message in sent[1:])
        assert made == 100_000 and len(json.loads(body)["rows"]) == made and not sent[-1].get("more_body")
        short = await long_answer({"rows": Rows(range(10))}, Turns())
        assert short.headers["Content-Length"] == str(len(short.body))

    asyncio.run(run())


def test_a_long_delta_is_split_into_several_events() -> None:
    tokens = list(range(1000))
    columns = np.arange(1000, dtype=np.float32)
    tops = np.arange(7000, dtype=np.int32).reshape(1000, 7)
    delta = SampleDelta("r", 0, 50, tokens, columns, columns, tops, tops.astype(np.float32))
    parts = list(parts_of(delta))
    assert len(parts) > 10 and all(len(part.token_ids) * 8 <= STEP_ENTRIES for part in parts)
    assert sum((part.token_ids for part in parts), []) == tokens
    assert [part.start for part in parts] == [50 + part.token_ids[0] for part in parts]
    for name in ("logprobs", "entropy", "top_token_ids", "top_logprobs"):
        assert np.array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(delta, name))
    one = SampleDelta("r", 0, 0, [], None)
    assert list(parts_of(one)) == [one]


class SlowModel:
    """A tokenizer that blocks on a long text until `flow` is set or the text is abandoned."""

    longest_token = 1

    def __init__(self) -> None:
        self.begun, self.flow, self.gone = threading.Event(), threading.Event(), threading.Event()

    def encode(self, text: str, add_special_tokens: bool, most: int, is_abandoned: Callable[[], bool]) -> list[int]:
        self.begun.set()
        while len(text) > LONG_CHARS and not self.flow.wait(0.01):
            if is_abandoned():
                self.gone.set()
                break
        return [len(text)]


def test_short_texts_do_not_wait_for_long_ones_and_abandoned_texts_are_dropped() -> None:
    model: Any = SlowModel()
    texts = Texts(model)
    size = LONG_CHARS + 1

    async def run() -> None:
        first, second = (asyncio.ensure_future(texts.encode("x" * (size + i), True)) for i in range(2))
        await asyncio.to_thread(model.begun.wait, 30)
        assert await texts.encode("short", True) == [5] and not first.done()
        for abandoned in (second, first):
            abandoned.cancel()
            with suppress(asyncio.CancelledError):
                await abandoned
        assert await asyncio.to_thread(model.gone.wait, 30)
        model.flow.set()
        assert await texts.encode("x" * size, True) == [size]

    asyncio.run(run())


def test_bytes_of_a_choice_grow_with_its_tokens() -> None:
    token_bytes = TokenBytes(new=10, prompt=3)
    assert token_bytes.of_choice(100, 50) - token_bytes.of_choice(0, 0) == 800


BODIES = """
import sys, psutil
from trueroll.rollout.http.server import _map_large_blocks
if sys.argv[1] == "mapped":
    _map_large_blocks()
def grown():
    return psutil.Process().memory_info().rss - before
before = psutil.Process().memory_info().rss
body = bytearray(2**23)
body += b"x"
del body  # from now on, glibc by default maps no smaller block
bodies = [bytearray(b"x" * 2**20) for _ in range(64)]
behind = [bytearray(2**14) for _ in range(100)]
assert grown() > 2**25
bodies.clear()
print(grown() < 2**23)
"""


@pytest.mark.parametrize(("how", "goes_back"), [("mapped", True), ("by itself", False)])
def test_the_memory_of_long_bodies_goes_back_to_the_system(how: str, goes_back: bool) -> None:
    """The memory is returned even if other blocks are behind it on the heap. By default the allocator would keep the
    memory in that case.
    """
    done = subprocess.run([sys.executable, "-c", BODIES, how], capture_output=True, text=True, check=True)
    assert done.stdout == f"{goes_back}\n"
