"""Branches, twins, retries, cancelled calls, bounds and samples of sessions with scripted answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from chat_templates import TEMPLATES, make_chat_folder, make_tokenizer
from safetensors.numpy import load
from scripted_sessions import Model, Reply, session_of

from trueroll.engine.request import SampleOutput
from trueroll.errors import IllegalStateError, InvalidRequestError, RequestAbortedError
from trueroll.rollout import SamplingParams
from trueroll.rollout.sessions.answers import read_answer
from trueroll.rollout.sessions.export import to_safetensors
from trueroll.rollout.sessions.session import Answer, AsyncSession
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
        call = session._read([user("a"), bare], (), {}, {})
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
    [(dict(n=2), "n must be 1"), (dict(seed=3), "seed must be left out"), (dict(top_q=1), "top_q: unknown parameter")],
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
        for value in (float("nan"), "1", True):
            with pytest.raises(InvalidRequestError, match="must be a finite number"):
                session.reward(value)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="'x' is not a node"):
            session.reward(1.0, "x")
        [given] = [node.id for node in session._forest._nodes.values() if node.drawn is None]
        with pytest.raises(InvalidRequestError, match="give the id of an answer"):
            session.reward(1.0, given)

    run(work)
    for seed in (-1, 2**64, 0.5):
        with pytest.raises(InvalidRequestError, match="seed: must be"):
            AsyncSession(None, texts, seed=seed)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="n must be 1"):
        AsyncSession(None, texts, sampling=SamplingParams(n=2))  # type: ignore[arg-type]


def test_samples_in_all_forms(texts: TextModel, model: Model) -> None:
    session = session_of(model, texts)

    async def work() -> list[Answer]:
        model.version = 3
        [first] = await answers(session, model, ([user("a")], Reply("one", "<|endoftext|>")))
        model.version = 4
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
    entries = session.token_entries()
    assert [entry["model_call_id"] for entry in entries] == [each.node for each in (first, second, third, fourth)]
    for entry, answer in zip(entries, (first, second, third, fourth), strict=True):
        assert entry["rollout_id"] == session.id and entry["prompt_token_ids"] == answer.prompt_token_ids
        assert entry["generation_token_ids"] == answer.sample.token_ids
        assert answer.sample.logprobs is not None
        assert entry["generation_log_probs"] == answer.sample.logprobs.tolist()


def test_the_default_parser(texts: TextModel) -> None:
    """The template writes tool calls in the form of Hermes. A call that was cut is content, and so is a call in an
    answer to a request without tools.
    """
    model = Model(make_tokenizer())
    call = 'Wait.\n<tool_call>\n{"name": "get", "arguments": {"x": 1}}\n</tool_call>'
    session = AsyncSession(model, texts, seed=1)  # type: ignore[arg-type]
    tools = [dict(type="function", function=dict(name="get", parameters=dict(type="object")))]

    async def work() -> list[Answer]:
        calls = ([user("a")], Reply(call, END)), ([user("b")], Reply(call[:-3])), ([user("b")], Reply(call))
        found = await answers(session, model, *calls, tools=tools)
        return found + await answers(session, model, ([user("c")], Reply(call, END)))

    whole, open_call, cut, plain = run(work)
    assert whole.message["content"] == "Wait." and whole.finish_reason == "tool_calls"
    assert whole.message["tool_calls"][0]["function"] == dict(name="get", arguments='{"x": 1}')
    assert said(open_call) == call[:-3] and open_call.finish_reason == "length"
    assert said(cut) == call and cut.finish_reason == "length"
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
        message = read_answer(sample, texts, None, [], tools, 0)
        assert (message.fields["content"], len(message.calls)) == (content, num_calls)
