"""Branches, twins, retries, cancelled calls, bounds and samples of sessions with scripted answers."""

from __future__ import annotations

import asyncio
import io
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from chat_templates import TEMPLATES, make_chat_folder, make_tokenizer
from safetensors.numpy import load
from scripted_sessions import Model, Reply, session_of

from trueroll.engine.request import SampleOutput, WeightSpan
from trueroll.errors import IllegalStateError, InvalidRequestError, RequestAbortedError
from trueroll.rollout import SamplingParams
from trueroll.rollout.sessions.answers import ParserSettings, read_answer
from trueroll.rollout.sessions.export import as_record, to_safetensors
from trueroll.rollout.sessions.forest import _num_bytes
from trueroll.rollout.sessions.messages import read_messages
from trueroll.rollout.sessions.record import read_record
from trueroll.rollout.sessions.session import Answer, Asked, AsyncSession, _Run
from trueroll.rollout.text import TextModel

END = "<|im_end|>"
CALL: tuple[str, dict[str, Any]] = ("get", {"x": False})


def user(text: str) -> dict[str, Any]:
    return dict(role="user", content=text)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextModel]:
    texts = TextModel(str(make_chat_folder(tmp_path_factory.mktemp("chat"), TEMPLATES["qwen2_5"], END)))
    yield texts
    texts.close()


@pytest.fixture
def model() -> Model:
    return Model(make_tokenizer())


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def whole() -> Any:
        return await work()

    return asyncio.run(whole())


def said(answer: Answer) -> str:
    """Return the content of an answer without other parts."""
    assert answer.message.keys() == {"role", "content", "session_node"}
    return answer.message["content"]


async def answers(
    session: AsyncSession,
    model: Model,
    *calls: tuple[list[dict[str, Any]], Reply],
    tools: Sequence[dict[str, Any]] = (),
) -> list[Answer]:
    found = []
    for messages, reply in calls:
        model.replies.append(reply)
        found.append(await session.chat(messages, tools))
    return found


def test_branches_share_the_tokens_of_their_common_messages(texts: TextModel, model: Model) -> None:
    session = session_of(model, texts)

    async def work() -> None:
        [first] = await answers(session, model, ([user("a")], Reply("one", END)))
        history = [user("a"), first.message]
        second, third, fourth = await answers(
            session,
            model,
            ([*history, user("b")], Reply("two", END)),
            ([*history, user("c")], Reply("three", END)),
            ([user("a"), dict(role="assistant", content="ONE"), user("b")], Reply("four", END)),
        )
        common = [*first.prompt_token_ids, *first.sample.token_ids]
        assert second.prompt_token_ids[: len(common)] == third.prompt_token_ids[: len(common)] == common
        assert fourth.prompt_token_ids[: len(common)] != common
        assert fourth.prompt_token_ids == texts.encode_conversation(
            [user("a"), dict(role="assistant", content="ONE"), user("b")], dict(add_generation_prompt=True)
        )
        samples = session.samples()
        assert [sample.node for sample in samples] == [second.node, third.node, fourth.node]
        assert [[turn.is_trained for turn in sample.turns] for sample in samples] == [[True] * 2, [False, True], [True]]
        seeds = [params.seed for params in model.params]
        assert len({*seeds}) == 4 and all(params.n == 1 for params in model.params)

    run(work)


def test_other_tools_and_arguments_begin_other_conversations(texts: TextModel, model: Model) -> None:
    session = session_of(model, texts)

    async def work() -> None:
        model.replies += [Reply("one", END), Reply("two"), Reply("three")]
        first = await session.chat([user("a")], [dict(type="function", function=dict(name="f"))])
        history = [user("a"), first.message, user("b")]
        same = await session.chat(history, [dict(type="function", function=dict(name="f"))])
        assert same.prompt_token_ids[: len(first.prompt_token_ids)] == first.prompt_token_ids
        other = await session.chat(history)
        assert len(session.samples()) == 2 and len(other.prompt_token_ids) < len(same.prompt_token_ids)
        with pytest.raises(InvalidRequestError, match="'add_generation_prompt'"):
            await session.chat(history, chat_template_kwargs=dict(add_generation_prompt=False))
        with pytest.raises(InvalidRequestError, match="tools: must be a list"):
            await session.chat(history, [3])  # type: ignore[list-item]

    run(work)


def test_an_agent_may_drop_reasoning_and_spell_calls_in_its_own_way(texts: TextModel, model: Model) -> None:
    reply = Reply('<tool_call>\n{"arguments": {"x":false}, "name":"get"}\n</tool_call>', END, "", "", (CALL,))
    session = session_of(model, texts)

    async def work() -> None:
        [first] = await answers(session, model, ([user("a")], reply))
        [told] = first.message["tool_calls"]
        assert told["function"] == dict(name="get", arguments='{"x": false}') and first.finish_reason == "tool_calls"
        again = dict(role="assistant", content="", tool_calls=[told | dict(index=0) | dict(id=None)])
        [second] = await answers(
            session, model, ([user("a"), again, dict(role="tool", content="42")], Reply("two", END))
        )
        drawn = [*first.prompt_token_ids, *first.sample.token_ids]
        assert second.prompt_token_ids[: len(drawn)] == drawn and len(session.samples()) == 1

    run(work)


def test_the_ids_of_calls_and_the_seeds_are_the_same_in_an_equal_session(texts: TextModel) -> None:
    def outcome() -> list[Any]:
        model = Model(make_tokenizer())
        session = session_of(model, texts)

        async def work() -> list[Answer]:
            call = Reply("<tool_call>..</tool_call>", END, "", "", (("f", {}), ("f", {})))
            text = ([user("a")], Reply("one"))
            return await answers(session, model, ([user("a")], call), text, ([user("b")], call))

        found = run(work)
        return [[answer.message, answer.node, answer.sample.seed] for answer in found]

    first = outcome()
    assert first == outcome()
    ids = [call["id"] for message, *_ in (first[0], first[2]) for call in message["tool_calls"]]
    assert len({*ids}) == 4 and len({seed for *_, seed in first}) == 3


def test_twins_and_retries(texts: TextModel, model: Model) -> None:
    session = session_of(model, texts)

    async def work() -> None:
        first, twin = await answers(session, model, ([user("a")], Reply("one", END)), ([user("a")], Reply("two", END)))
        assert first.sample.seed != twin.sample.seed and first.prompt_token_ids == twin.prompt_token_ids
        retry = await session.chat([user("a")], is_retry=True)
        assert retry.node == twin.node and len(model.prompts) == 2
        assert [sample.is_abandoned for sample in session.samples()] == [False, False]
        model.replies.append(Reply("three", END))
        other = await session.chat([user("a")], is_retry=True, max_tokens=7)
        assert other.node not in (first.node, twin.node) and model.params[-1].max_tokens == 7
        # The agent goes on with the first twin.
        await answers(session, model, ([user("a"), first.message, user("b")], Reply("x", END)))
        is_abandoned = {sample.turns[0].node: sample.is_abandoned for sample in session.samples()}
        assert is_abandoned == {first.node: False, twin.node: True, other.node: False}

    run(work)


def test_a_retry_is_of_the_same_adapter(texts: TextModel, model: Model) -> None:
    """The adapter belongs to the call, and is in the record of the session."""

    async def work() -> None:
        session = session_of(model, texts)
        model.replies += [Reply("x", END), Reply("y", END)]
        first = await session.chat([user("a")], adapter="a")
        again = await session.chat([user("a")], adapter="a", is_retry=True)
        other = await session.chat([user("a")], is_retry=True)
        assert again.node == first.node != other.node and model.adapters == ["a", None]
        assert [each.adapter for each in read_record(io.BytesIO(session.record())).requests] == ["a", None]

    run(work)


def test_equal_twins_are_told_apart_by_their_reasoning(texts: TextModel, model: Model) -> None:
    """Without the reasoning, the newest of the twins is continued."""
    session = session_of(model, texts)
    replies = [Reply(f"<think>{why}</think>Yes", END, why, "Yes") for why in "pq"]

    async def work() -> None:
        first, second = await answers(session, model, *(([user("a")], reply) for reply in replies))
        bare = dict(role="assistant", content="Yes")
        for message, chosen in ((first.message, "p"), (second.message, "q"), (bare, "q")):
            with pytest.raises(InvalidRequestError, match="does not keep the reasoning") as caught:
                await session.chat([user("a"), message, user("b")])
            told = first if chosen == "p" else second
            assert f"token {len(told.prompt_token_ids)} ({told.sample.token_ids[0]}, " in str(caught.value)
        [root] = session._forest._roots.values()
        [given] = [node for nodes in root.children.values() for node in nodes]
        call = session._read([user("a"), bare], (), "auto", {}, {})
        assert session._forest.find(call.root, call.messages)[0].id == second.node
        assert [node.id for nodes in given.children.values() for node in nodes] == [first.node, second.node]

    run(work)


def test_a_retry_waits_for_the_call_in_flight(texts: TextModel, model: Model) -> None:
    session = session_of(model, texts)

    async def work() -> None:
        model.gate = asyncio.Event()
        model.replies += [Reply("one", END), Reply("two", END)]
        first = asyncio.ensure_future(session.chat([user("a")]))
        while not model.prompts:
            await asyncio.sleep(0)
        retry = asyncio.ensure_future(session.chat([user("a")], is_retry=True))
        await asyncio.sleep(0)
        first.cancel()  # as a client library does when it gives up a connection and sends the request again
        await asyncio.gather(first, return_exceptions=True)
        model.gate.set()
        answer = await retry
        assert first.cancelled() and answer.message["content"] == "one" and len(model.prompts) == 1
        assert [sample.node for sample in session.samples()] == [answer.node]

    run(work)


class SlowToLeave(Model):
    """A model of which a cancelled call goes on until `may_leave` is set."""

    def __init__(self) -> None:
        super().__init__(make_tokenizer())
        self.may_leave = asyncio.Event()

    async def generate(self, prompts: list[list[int]], params: SamplingParams, adapter: str | None = None) -> list[Any]:
        try:
            return await super().generate(prompts, params, adapter)
        except asyncio.CancelledError:
            await self.may_leave.wait()
            raise


async def until(num_asked: int, model: Model) -> None:
    while len(model.prompts) < num_asked:
        await asyncio.sleep(0)


def test_a_retry_of_a_cancelled_call_waits_for_its_end_and_has_its_seed(texts: TextModel) -> None:
    async def work() -> None:
        model = SlowToLeave()
        session = session_of(model, texts)
        model.gate = asyncio.Event()
        model.replies += [Reply(text, END) for text in ("one", "two", "three")]
        first = asyncio.ensure_future(session.chat([user("a")]))
        await until(1, model)  # otherwise the twin may ask first, because both prompts are rendered on threads
        twin = asyncio.ensure_future(session.chat([user("a")]))
        await until(2, model)
        first.cancel()
        retries = [asyncio.ensure_future(session.chat([user("a")], is_retry=True)) for _ in range(2)]
        for _ in range(9):
            await asyncio.sleep(0)
        assert len(model.prompts) == 2 and not first.done(), "premise: the cancelled call has not ended"
        model.may_leave.set()
        model.gate.set()
        other, again, second = await asyncio.gather(twin, *retries)
        assert again.node == second.node and len(model.prompts) == 3
        seeds = [params.seed for params in model.params]
        assert seeds[0] == seeds[2] == again.sample.seed != other.sample.seed == seeds[1]
        assert first.cancelled() and len(session.samples()) == 2

    run(work)


def test_a_retry_finds_the_call_in_flight_although_its_twin_failed(texts: TextModel, model: Model) -> None:
    session = session_of(model, texts)

    async def work() -> None:
        model.gate = asyncio.Event()
        model.replies.append(Reply("one", END))
        first = asyncio.ensure_future(session.chat([user("a")]))
        await until(1, model)
        with pytest.raises(IndexError):  # the scripted model has no reply
            await session.chat([user("a")])
        retry = asyncio.ensure_future(session.chat([user("a")], is_retry=True))
        await asyncio.sleep(0)
        model.gate.set()
        assert (await retry).node == (await first).node and len(model.prompts) == 2

    run(work)


def test_retries_of_twins_wait_for_different_calls(texts: TextModel, model: Model) -> None:
    session = session_of(model, texts)

    async def work() -> None:
        model.gate = asyncio.Event()
        model.replies += [Reply("one", END), Reply("two", END)]
        calls = [asyncio.ensure_future(session.chat([user("a")])) for _ in range(2)]
        await until(2, model)
        retries = [asyncio.ensure_future(session.chat([user("a")], is_retry=True)) for _ in range(2)]
        await asyncio.sleep(0)
        model.gate.set()
        nodes = [(await call).node for call in [*calls, *retries]]
        assert nodes[:2] == nodes[2:] and len({*nodes}) == 2 == len(model.prompts)

    run(work)


def test_a_call_that_is_cancelled_before_its_caller_gets_the_answer_adds_nothing(
    texts: TextModel, model: Model
) -> None:
    session = session_of(model, texts)

    async def work() -> None:
        model.gate = asyncio.Event()
        model.replies.append(Reply("one", END))
        call = asyncio.ensure_future(session.chat([user("a")]))
        await until(1, model)
        [[running]] = session._running.values()
        running.task.add_done_callback(lambda _: call.cancel())
        model.gate.set()
        await asyncio.gather(call, return_exceptions=True)
        assert call.cancelled() and running.task.result(), "premise: the answer was complete"
        forest = session._forest
        assert len(forest) == 0 == forest.num_bytes
        assert not (session._running or forest._ordinals or forest._pending or forest._roots)

    run(work)


def test_an_answer_names_its_tokens_among_equal_answers(texts: TextModel, model: Model) -> None:
    session = session_of(model, texts)

    async def work() -> None:
        first, second = await answers(session, model, *[([user("a")], Reply("false is it", END))] * 2)
        assert first.message["content"] == second.message["content"], "premise"
        assert first.sample.token_ids != second.sample.token_ids, "premise"
        for answer in (first, second):
            [following] = await answers(session, model, ([user("a"), answer.message, user("b")], Reply("x", END)))
            assert following.prompt_token_ids[len(answer.prompt_token_ids) :][: len(answer.sample.token_ids)] == (
                answer.sample.token_ids
            )
        unnamed = dict(role="assistant", content="false is it")
        edited = first.message | dict(content="true is it")
        [newest, other] = await answers(
            session, model, *(([user("a"), each, user("c")], Reply("x", END)) for each in (unnamed, edited))
        )
        drawn = newest.prompt_token_ids[len(second.prompt_token_ids) :]
        assert drawn[: len(second.sample.token_ids)] == second.sample.token_ids
        assert (newest.num_continued, other.num_continued) == (2, 0), "a name does not replace the content"

    run(work)


def test_given_messages_with_arguments_in_another_order_are_not_shared(texts: TextModel, model: Model) -> None:
    """The template writes the arguments in the given order, so both conversations can go on."""
    session = session_of(model, texts)

    def history(arguments: str) -> list[dict[str, Any]]:
        call = dict(id="c", function=dict(name="f", arguments=arguments))
        return [user("a"), dict(role="assistant", content="", tool_calls=[call]), dict(role="tool", content="r")]

    async def work() -> None:
        model.replies += [Reply("one", END), Reply("two", END)]
        histories = [history('{"x": 1, "y": 2}'), history('{"y": 2, "x": 1}')]
        found = await asyncio.gather(*map(session.chat, histories))
        assert found[0].prompt_token_ids != found[1].prompt_token_ids, "premise"
        for messages, answer in zip(histories, found, strict=True):
            [following] = await answers(session, model, ([*messages, answer.message, user("b")], Reply("x", END)))
            drawn = [*answer.prompt_token_ids, *answer.sample.token_ids]
            assert following.prompt_token_ids[: len(drawn)] == drawn

    run(work)


def test_large_calls_are_read_on_another_thread_in_order(
    texts: TextModel, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, is_busy = [], threading.Lock()

    def read(*args: Any) -> Any:
        assert is_busy.acquire(blocking=False), "two large calls are read at a time"
        time.sleep(0.02 * (len(threads) == 2))  # an overlap of the two calls would show
        threads.append(threading.get_ident())
        is_busy.release()
        return read_messages(*args)

    monkeypatch.setattr("trueroll.rollout.sessions.session.read_messages", read)
    large = [user("a" * 2**16)]

    async def work() -> None:
        model.replies += [Reply("x", END)] * 6
        one_by_one, together = session_of(model, texts), session_of(model, texts)
        expected = [await one_by_one.chat(large) for _ in range(2)]
        found = await asyncio.gather(together.chat(large), together.chat(large))
        assert [answer.sample.seed for answer in found] == [answer.sample.seed for answer in expected]
        assert threading.get_ident() not in threads and len(threads) == 4
        await together.chat([user("a")])
        assert threads[-1] == threading.get_ident()

    run(work)


def test_records_cannot_be_changed_through_an_answer(texts: TextModel, model: Model) -> None:
    session = session_of(model, texts)

    async def work() -> None:
        [first] = await answers(session, model, ([user("a")], Reply("one", END)))
        drawn = list(first.sample.token_ids)
        first.sample.token_ids[0] = 7
        assert first.sample.logprobs is not None
        with pytest.raises(ValueError, match="read-only"):
            first.sample.logprobs[0] = 0
        [second] = await answers(session, model, ([user("a"), first.message, user("b")], Reply("two", END)))
        assert second.prompt_token_ids[len(first.prompt_token_ids) :][: len(drawn)] == drawn
        assert (first.num_continued, second.num_continued) == (0, 2)

    run(work)


def test_two_calls_at_a_time(texts: TextModel, model: Model) -> None:
    session = session_of(model, texts)

    async def work() -> None:
        model.replies += [Reply("one", END), Reply("two", END), Reply("three", END)]
        twins_and_other = [session.chat([user("a")]), session.chat([user("a")]), session.chat([user("b")])]
        found = await asyncio.gather(*twins_and_other)
        assert len({answer.node for answer in found}) == 3 and len({answer.sample.seed for answer in found}) == 3
        assert found[0].prompt_token_ids == found[1].prompt_token_ids != found[2].prompt_token_ids
        assert len(session._forest) == 5, "the twins share the given message"

    run(work)


@pytest.mark.parametrize("how", ["cancelled", "aborted", "refused"])
def test_a_call_that_fails_adds_nothing_and_its_seed_is_used_again(texts: TextModel, model: Model, how: str) -> None:
    session = session_of(model, texts)

    async def work() -> None:
        if how == "cancelled":
            model.gate = asyncio.Event()
            model.replies.append(Reply("one", END))
            call = asyncio.ensure_future(session.chat([user("a")]))
            while not model.prompts:
                await asyncio.sleep(0)
            call.cancel()
            assert isinstance((await asyncio.gather(call, return_exceptions=True))[0], asyncio.CancelledError)
            model.gate = None
        elif how == "aborted":
            model.replies.append(Reply("on", finish="abort"))
            with pytest.raises(RequestAbortedError, match="call chat again"):
                await session.chat([user("a")])
        else:
            with pytest.raises(IndexError):  # the scripted model has no reply
                await session.chat([user("a")])
        assert len(session._forest) == 0 == session._forest.num_bytes and session.samples() == []
        assert not (session._forest._ordinals or session._forest._pending or session._forest._roots)
        model.replies.append(Reply("two", END))
        answer = await session.chat([user("a")], is_retry=True)
        assert answer.message["content"] == "two" and model.params[0].seed == model.params[1].seed
        assert not (session._forest._pending or session._running)

    run(work)


def test_close(texts: TextModel, model: Model) -> None:
    session = session_of(model, texts)

    async def work() -> None:
        await answers(session, model, ([user("a")], Reply("one", END)))
        model.gate = asyncio.Event()
        model.replies.append(Reply("two", END))
        call = asyncio.ensure_future(session.chat([user("b")]))
        while len(model.prompts) < 2:
            await asyncio.sleep(0)
        await session.close()
        with pytest.raises(IllegalStateError, match="closed during the call"):
            await call
        with pytest.raises(IllegalStateError, match="begin a new session"):
            await session.chat([user("c")])
        await session.close()
        assert len(session.samples()) == 1

    run(work)


def test_a_caller_that_is_cancelled_during_close_is_cancelled(texts: TextModel, model: Model) -> None:
    session = session_of(model, texts)

    async def work() -> None:
        model.gate = asyncio.Event()
        model.replies.append(Reply("one", END))
        call = asyncio.ensure_future(session.chat([user("a")]))
        await until(1, model)
        closing = asyncio.ensure_future(session.close())
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, closing, return_exceptions=True)
        assert call.cancelled() and closing.exception() is None

    run(work)


def test_the_bytes_of_a_session_include_its_samples_and_roots(texts: TextModel, model: Model) -> None:
    async def work() -> None:
        session, history = session_of(model, texts, max_bytes=400_000), [user("w " * 2000)]
        [first] = await answers(session, model, (history, Reply("one", END)))
        with pytest.raises(IllegalStateError, match="bytes of samples are too many"):
            for i in range(6):
                branch = [*history, first.message, user(f"{i}")]
                await answers(session, model, (branch, Reply("one", END)))
        assert i == 4 and session._forest.num_bytes < 300_000, "premise: the nodes are small"
        actual = sum(sample.token_ids.nbytes + sample.versions.nbytes for sample in session.samples())
        assert actual < session._forest.num_sample_bytes < 10 * actual
        line = session_of(model, texts)
        model.replies += [Reply("one", END)] * 2
        answer = await line.chat([user("a")], chat_template_kwargs=dict(unused="x" * 10**5))
        before = line._forest.num_sample_bytes
        history = [user("a"), answer.message, user("b")]
        leaf = await line.chat(history, chat_template_kwargs=dict(unused="x" * 10**5))
        assert before < line._forest.num_sample_bytes == line._forest.node(leaf.node).sample_bytes
        [root] = line._forest._roots.values()
        assert len(root.id) == 32, "the arguments of the template are not kept"
        assert line._forest.num_bytes == 2 * 2048 + sum(map(_num_bytes, line._forest._nodes.values()))

    run(work)


def test_bounds(texts: TextModel, model: Model) -> None:
    async def work() -> None:
        small = session_of(model, texts, max_nodes=4)
        await answers(small, model, ([user("a")], Reply("one", END)))
        with pytest.raises(IllegalStateError, match=r"6 messages are too many \(limit 4\)"):
            await small.chat([user("b"), user("c"), user("d")])
        model.gate = asyncio.Event()
        model.replies.append(Reply("two", END))
        running = asyncio.ensure_future(small.chat([user("b")]))
        while len(model.prompts) < 2:
            await asyncio.sleep(0)
        with pytest.raises(IllegalStateError, match=r"6 messages are too many"):
            await small.chat([user("c")])
        model.gate.set()
        await running
        short = session_of(model, texts, max_bytes=1)
        await answers(short, model, ([user("a")], Reply("one", END)))
        with pytest.raises(IllegalStateError, match=r"\d+ bytes are too many \(limit 1\)"):
            await short.chat([user("b")])

    run(work)


@pytest.mark.parametrize(
    ("params", "error"),
    [
        (dict(n=2), "n must be 1"),
        (dict(seed=3), "seed must be left out"),
        (dict(logprobs=None), "logprobs must not"),
        (dict(top_q=1), "top_q: unknown parameter"),
    ],
)
def test_refused_parameters(texts: TextModel, model: Model, params: dict[str, Any], error: str) -> None:
    with pytest.raises(InvalidRequestError, match=error):
        run(lambda: session_of(model, texts).chat([user("a")], **params))


def test_refused_calls(texts: TextModel, model: Model) -> None:
    session = session_of(model, texts)

    async def work() -> None:
        [first] = await answers(session, model, ([user("a")], Reply("one", END)))
        with pytest.raises(InvalidRequestError, match="ends with an answer"):
            await session.chat([user("a"), first.message])
        for value in (float("nan"), "1", True, 10**400):
            with pytest.raises(InvalidRequestError, match="must be a finite number"):
                session.reward(value)  # type: ignore[arg-type]
        session.reward(np.float32(0.5))  # type: ignore[arg-type]
        assert session.samples()[0].reward == 0.5
        for node in ("x", [], "x" * 10**6):
            with pytest.raises(InvalidRequestError, match="^node: .{2,80} is not a node"):
                session.reward(1.0, node)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="chat_template_kwargs: must be an object"):
            await session.chat([user("a")], chat_template_kwargs=[1])  # type: ignore[arg-type]
        for name in ("return_dict", "padding", "self", "tokenizer_kwargs"):
            with pytest.raises(InvalidRequestError, match=f"'{name}'] cannot be set here"):
                await session.chat([user("a")], chat_template_kwargs={name: 1})
        [given] = [node.id for node in session._forest._nodes.values() if node.drawn is None]
        with pytest.raises(InvalidRequestError, match="give the id of an answer"):
            session.reward(1.0, given)

    run(work)
    for seed in (-1, 2**64, 0.5):
        with pytest.raises(InvalidRequestError, match="seed: must be"):
            AsyncSession(None, texts, seed=seed)  # type: ignore[arg-type]
    for bounds in (dict(max_nodes="x"), dict(max_bytes=-1)):
        with pytest.raises(InvalidRequestError, match="must be a positive integer"):
            session_of(model, texts, **bounds)
    with pytest.raises(InvalidRequestError, match="n must be 1"):
        AsyncSession(None, texts, sampling=SamplingParams(n=2))  # type: ignore[arg-type]


def test_samples_in_all_forms(texts: TextModel, model: Model) -> None:
    session = session_of(model, texts)

    async def work() -> list[Answer]:
        model.version, model.old_kv = 3, (WeightSpan(2, 1, 9),)  # as after a push that kept old KV
        [first] = await answers(session, model, ([user("a")], Reply("one", "<|endoftext|>")))
        model.version, model.old_kv = 4, ()
        history = [user("a"), first.message]
        return [
            first,
            *await answers(
                session,
                model,
                ([*history, user("b")], Reply("two", END)),
                ([*history, user("c")], Reply("three")),
                ([user("z")], Reply("four", END)),
            ),
        ]

    first, second, third, fourth = run(work)
    session.reward(0.5)
    session.reward(2.0, second.node)
    session.reward(0.25, first.node)
    samples = session.samples()
    assert [sample.reward for sample in samples] == [2.0, 0.5, 0.5]
    assert [[turn.reward for turn in sample.turns] for sample in samples] == [[0.25, 2.0], [0.25, 0.5], [0.5]]
    # The template ends a turn with another token than the model, so the model's token is not in the samples.
    kept = first.sample.token_ids[:-1]
    for sample, last, expected_mask in ((samples[0], second, 1), (samples[1], third, 0)):
        prompt, drawn = last.prompt_token_ids, last.sample.token_ids
        start, end = len(first.prompt_token_ids), len(first.prompt_token_ids) + len(kept)
        assert sample.token_ids.tolist() == [*prompt, *drawn] and sample.token_ids[start:end].tolist() == kept
        mask = np.zeros(len(prompt) + len(drawn), np.uint8)
        mask[start:end], mask[len(prompt) :] = expected_mask, 1
        assert sample.mask.tolist() == mask.tolist()
        versions = np.full(len(mask), -1)
        versions[start:end], versions[len(prompt) :] = 3, 4
        assert sample.versions.tolist() == versions.tolist()
        assert np.flatnonzero(sample.old_kv).tolist() == list(range(start + 1, end))
        assert first.sample.logprobs is not None and last.sample.logprobs is not None
        logprobs = np.zeros(len(mask), np.float32)
        logprobs[start:end] = first.sample.logprobs[:-1] if expected_mask else 0.0
        logprobs[len(prompt) :] = last.sample.logprobs
        assert np.array_equal(sample.logprobs.view(np.int32), logprobs.view(np.int32))
        assert [(turn.start, turn.end) for turn in sample.turns] == [(start, end), (len(prompt), len(mask))]
    told = json.loads(json.dumps([sample.told() for sample in samples]))
    found = load(to_safetensors(samples))
    for i, sample in enumerate(samples):
        assert told[i]["token_ids"] == sample.token_ids.tolist() and told[i]["logprobs"] == sample.logprobs.tolist()
        for name, values in (("tokens", sample.token_ids), ("loss_mask", sample.mask), ("versions", sample.versions)):
            assert found[f"{name}.{i}"].dtype == values.dtype and np.array_equal(found[f"{name}.{i}"], values)
        assert np.array_equal(found[f"rollout_log_probs.{i}"], sample.logprobs)
        assert np.array_equal(found[f"old_kv.{i}"], sample.old_kv) and told[i]["old_kv"] == sample.old_kv.tolist()
    entries = session.token_entries()
    assert [entry["model_call_id"] for entry in entries] == [each.node for each in (first, second, third, fourth)]
    for entry, answer in zip(entries, (first, second, third, fourth), strict=True):
        assert entry["rollout_id"] == session.id and entry["prompt_token_ids"] == answer.prompt_token_ids
        assert entry["generation_token_ids"] == answer.sample.token_ids
        assert answer.sample.logprobs is not None
        assert entry["generation_log_probs"] == answer.sample.logprobs.tolist()


def test_an_answer_with_half_a_character_is_content(texts: TextModel, model: Model) -> None:
    session = session_of(model, texts)
    reply = Reply("call", END, "", "", (("f", {"x": "\ud800"}),))

    async def work() -> None:
        [first] = await answers(session, model, ([user("a")], reply))
        assert said(first) == "call"
        await answers(session, model, ([user("a"), first.message, user("b")], Reply("x", END)))
        assert len(session.samples()) == 1

    run(work)


def test_the_default_parser(texts: TextModel) -> None:
    """The template writes tool calls in the form of Hermes. In an answer that was cut, a complete call is a call, and
    the beginning of a call is no part of the message. Without tools, calls are content.
    """
    model = Model(make_tokenizer())
    call = 'Wait.\n<tool_call>\n{"name": "get", "arguments": {"x": 1}}\n</tool_call>'
    session = AsyncSession(model, texts, seed=1)  # type: ignore[arg-type]
    tools = [dict(type="function", function=dict(name="get", parameters=dict(type="object")))]

    async def work() -> list[Answer]:
        calls = ([user("a")], Reply(call, END)), ([user("b")], Reply(call[:-3])), ([user("b")], Reply(call))
        found = await answers(session, model, *calls, tools=tools)
        after = [user("b"), found[2].message, dict(role="tool", content="7")]
        found += await answers(session, model, (after, Reply("done", END)), tools=tools)
        return found + await answers(session, model, ([user("c")], Reply(call, END)))

    whole, open_call, cut, after, plain = run(work)
    assert whole.message["content"] == "Wait." and whole.finish_reason == "tool_calls"
    assert whole.message["tool_calls"][0]["function"] == dict(name="get", arguments='{"x": 1}')
    assert said(open_call) == "Wait.\n" and open_call.finish_reason == "length"
    assert cut.message["tool_calls"][0]["function"] == whole.message["tool_calls"][0]["function"]
    assert cut.message["content"] == "Wait." and cut.finish_reason == "length" and after.num_continued == 2
    before = [*cut.prompt_token_ids, *cut.sample.token_ids]
    assert after.prompt_token_ids[: len(before)] == before
    assert said(plain) == call and plain.finish_reason == "stop"


def test_a_stop_string_may_cut_the_end_of_a_call() -> None:
    words = ["a", "<tool_call>", '{"name": "get"}', "</tool_call>", "b"]
    texts: Any = SimpleNamespace(
        chat_templates={"default": "<tool_call>"},
        added_tokens={"<tool_call>": 1, "</tool_call>": 3},
        decode=lambda token_ids, skip_special_tokens: "".join(words[i] for i in token_ids),
    )
    tools = [dict(type="function", function=dict(name="get"))]
    for stop, content, num_calls in (("l>b", 'a<tool_call>{"name": "get"}</tool_cal', 0), ("b", "a", 1)):
        sample = SampleOutput("r", 0, [0, 1, 2, 3, 4], None, "stop", 0, 0, (), stop_reason=stop)
        message = read_answer(sample, texts, None, ParserSettings(tuple(tools)), [], 0)
        assert (message.fields["content"], len(message.calls)) == (content, num_calls)


def test_a_stop_string_may_be_cut_into_bytes() -> None:
    texts: Any = SimpleNamespace(
        chat_templates={"default": ""},
        added_tokens={},
        decode=lambda token_ids, skip_special_tokens: bytes(token_ids).decode(errors="replace"),
    )
    for stop in ("\U0001f600", "é", "é!", "b"):
        sample = SampleOutput("r", 0, [*f"a{stop}".encode()], None, "stop", 0, 0, (), stop_reason=stop)
        assert read_answer(sample, texts, None, ParserSettings(), [], 0).fields["content"] == "a"


def test_a_retry_that_finds_many_deltas_lets_other_work_run() -> None:
    async def work() -> int:
        found = _Run(call=Any, wants_deltas=True, deltas=[Any] * 100)  # type: ignore[arg-type, list-item]
        found.task = asyncio.ensure_future(asyncio.Event().wait())  # type: ignore[arg-type, assignment]
        asked = Asked("n", [], SamplingParams(), ParserSettings(), found, None)  # type: ignore[arg-type]
        num_turns = 0

        async def other() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        other_work = asyncio.ensure_future(other())
        deltas = asked.deltas()
        for _ in range(100):
            await anext(deltas)
        for task in (other_work, found.task):
            task.cancel()
        return num_turns

    assert run(work) >= 99


def test_a_record_keeps_no_other_memory_alive() -> None:
    """A front end's client returns arrays that share the memory of a whole reply."""
    frame = np.arange(1000, dtype=np.float32)
    sample = SampleOutput("r", 0, [1, 2, 3], frame[:3], "length", 0, 0, ())
    found = as_record(sample, 0).logprobs
    assert found is not None and np.array_equal(found.view(np.int32), frame[:3].view(np.int32))
    assert not np.shares_memory(found, frame) and not found.flags.writeable
