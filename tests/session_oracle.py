"""Random histories of agents, and a simple oracle that says what a session must ask the worker for.

The oracle keeps all conversations in a list, compares messages field by field, and writes the text of a conversation
with Python functions, not with a chat template.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from scripted_sessions import Model, Reply
from tokenizers import Tokenizer

from trueroll.errors import InvalidRequestError
from trueroll.rollout.sessions.session import Answer, AsyncSession

Raw = tuple[int, ...]
"""The tokens of a drawn message without the token that ended it."""
Pieces = list[str | Raw]


@dataclass
class Said:
    """A message of a conversation. `raw`: if the model drew it. `birth`: the call that added it."""

    message: dict[str, Any]
    raw: Raw | None
    birth: int


def fields(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        dict(name=call["function"]["name"], arguments=arguments_of(call), id=call.get("id"))
        for call in message.get("tool_calls") or []
    ]
    told = {name: message.get(name) or "" for name in ("role", "reasoning_content")}
    return told | dict(content=content_of(message), calls=calls)


def content_of(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def arguments_of(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def same(given: dict[str, Any], stored: dict[str, Any]) -> bool:
    one, other = fields(given), fields(stored)
    if one["reasoning_content"] in ("", other["reasoning_content"]):
        other["reasoning_content"] = one["reasoning_content"]
    for call, kept in zip(one["calls"], other["calls"], strict=False):
        if call["id"] is None:
            kept["id"] = None
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def names(given: dict[str, Any], stored: dict[str, Any]) -> bool:
    return given.get("session_node") == stored.get("session_node") is not None


def newest(said: list[Said]) -> tuple[bool, int]:
    return said[-1].raw is not None, said[-1].birth


def calls_text(message: dict[str, Any]) -> str:
    told = (
        f'\n<tool_call>\n{{"name": "{c["name"]}", "arguments": {json.dumps(c["arguments"], ensure_ascii=False)}}}'
        "\n</tool_call>"
        for c in fields(message)["calls"]
    )
    return "".join(told)


def qwen(said: list[Said], thinks_after: Callable[[int], bool] | None) -> Pieces:
    """`thinks_after`: whether the reasoning of message i is written; None if the template knows no reasoning."""
    out: Pieces = []
    if said[0].message["role"] != "system":
        out.append("<|im_start|>system\nYou help.<|im_end|>\n")
    for i, each in enumerate(said):
        role, content = each.message["role"], content_of(each.message)
        if each.raw is not None:
            out += ["<|im_start|>assistant\n", each.raw, "<|im_end|>\n"]
        elif role == "assistant":
            told = fields(each.message)
            text = f"{content}{calls_text(each.message)}"
            if thinks_after is None and told["calls"] and not content:
                text = text[1:]
            if thinks_after is not None and thinks_after(i) and told["reasoning_content"]:
                text = f"<think>\n{told['reasoning_content']}\n</think>\n\n{text}"
            out.append(f"<|im_start|>assistant\n{text}<|im_end|>\n")
        elif role == "tool":
            begins = i == 0 or said[i - 1].message["role"] != "tool"
            ends = i + 1 == len(said) or said[i + 1].message["role"] != "tool"
            out.append("<|im_start|>user" * begins + f"\n<tool_response>\n{content}\n</tool_response>")
            out.append("<|im_end|>\n" * ends)
        else:
            out.append(f"<|im_start|>{role}\n{content}<|im_end|>\n")
    return [*out, "<|im_start|>assistant\n"]


def glm(said: list[Said]) -> Pieces:
    out: Pieces = ["[gMASK]<sop>"]
    for i, each in enumerate(said):
        role, content = each.message["role"], content_of(each.message)
        if each.raw is not None:
            out += ["<|assistant|>", each.raw]
        elif role == "assistant":
            told = fields(each.message)
            text = f"<|assistant|>\n<think>{told['reasoning_content']}</think>" + (f"\n{content}" if content else "")
            for call in told["calls"]:
                text += f"\n<tool_call>{call['name']}"
                for key, value in call["arguments"].items():
                    value = value if isinstance(value, str) else json.dumps(value)
                    text += f"\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>"
                text += "\n</tool_call>"
            out.append(text)
        elif role == "tool":
            begins = i == 0 or said[i - 1].message["role"] != "tool"
            out.append("<|observation|>" * begins + f"\n<tool_response>\n{content}\n</tool_response>")
        else:
            out.append(f"<|{role}|>\n{content}")
    return [*out, "<|assistant|>"]


def last_user(said: list[Said]) -> int:
    return max((i for i, each in enumerate(said) if each.message["role"] == "user"), default=-1)


@dataclass(frozen=True)
class Family:
    """What the oracle knows of a template. `drops`: whether reasoning before the last user message is removed."""

    pieces: Callable[[list[Said]], Pieces]
    ends: tuple[str, ...]
    has_reasoning: bool
    drops: bool


ORACLES = dict(
    qwen2_5=Family(lambda said: qwen(said, None), ("<|im_end|>", "<|im_end|>", "<|endoftext|>", ""), False, False),
    qwen3=Family(lambda said: qwen(said, lambda i: i > last_user(said)), ("<|im_end|>", "<|im_end|>", ""), True, True),
    nemotron=Family(lambda said: qwen(said, lambda i: True), ("<|im_end|>", "<|im_end|>", ""), True, False),
    glm=Family(glm, ("<|user|>", "<|observation|>", "<|endoftext|>", ""), True, False),
)


@dataclass
class Oracle:
    """All conversations of a session, each until an answer."""

    family: Family
    tokenizer: Tokenizer
    known: list[list[Said]] = field(default_factory=list)

    def expect(self, messages: list[dict[str, Any]]) -> tuple[list[Said], list[int], int | None]:
        """Return the conversation with the session's messages, the expected prompt, and the index of the first message
        that the template would rewrite.
        """
        said = [Said(message, None, len(self.known)) for message in messages]
        base = self._base(messages)
        said[: len(base)] = base
        lost = (i for i in range(last_user(said)) if self.family.drops and self._had_reasoning(said, i))
        return said, self._encoded(self.family.pieces(said)), next(lost, None)

    def _had_reasoning(self, said: list[Said], i: int) -> bool:
        """Return whether the session has tokens for the reasoning of a message: drawn tokens, or tokens of a prompt."""
        was_asked = any(each.raw is not None and last_user(said[:j]) < i for j, each in enumerate(said[i + 1 :], i + 1))
        return bool(said[i].message.get("reasoning_content")) and (said[i].raw is not None or was_asked)

    def _base(self, messages: list[dict[str, Any]]) -> list[Said]:
        found, depth = self.known, 0
        for depth, message in enumerate(messages):
            matching = [said for said in found if len(said) > depth and same(message, said[depth].message)]
            named = [said for said in matching if names(message, said[depth].message)]
            if not matching:
                break
            found = named or matching
        else:
            depth = len(messages)
        return max((said[:depth] for said in found if depth), key=newest, default=[])

    def _encoded(self, pieces: Pieces) -> list[int]:
        token_ids, text = [], ""
        for piece in [*pieces, ()]:
            if isinstance(piece, str):
                text += piece
                continue
            token_ids += [*self.tokenizer.encode(text, add_special_tokens=False).ids, *piece]
            text = ""
        return token_ids

    def add(self, said: list[Said], answer: Answer) -> None:
        token_ids = answer.sample.token_ids
        raw = tuple(token_ids[:-1] if isinstance(answer.sample.stop_reason, int) else token_ids)
        self.known.append([*said, Said(answer.message, raw, len(self.known))])


WORDS = ("false", "the \n\n", "er<b>", "é☃", " x ", "falsefalse", "<tool_call>", "\n", "{}", "th")


class Agent:
    """Sends random histories to a session, and compares each with the oracle. `counts`: the number of each outcome."""

    def __init__(self, session: AsyncSession, model: Model, family: Family, seed: int) -> None:
        self._session, self._model, self._family = session, model, family
        self._random = random.Random(seed)
        self._oracle = Oracle(family, model.tokenizer)
        self._histories: list[list[dict[str, Any]]] = []
        self._last: tuple[list[dict[str, Any]], Answer] | None = None
        self._answers: dict[str, Answer] = {}
        self.counts = dict(equal=0, branched=0, refused=0, retried=0)

    async def step(self) -> None:
        """Send one history."""
        messages = self._history()
        if self._last is not None and self._random.random() < 0.1:
            messages, answer = self._last
            assert (await self._session.chat(self._respelled(messages), is_retry=True)).node == answer.node
            self.counts["retried"] += 1
            return
        said, prompt, lost = self._oracle.expect(messages)
        num_asked = len(self._model.prompts)
        self._model.replies = [self._reply()]
        if lost is not None:
            await self._check_refused(messages, said, lost)
            return
        answer = await self._session.chat(messages)
        assert self._model.prompts[num_asked:] == [prompt] == [answer.prompt_token_ids]
        continues = any(each.raw is not None for each in said)
        self.counts["equal" if continues else "branched"] += 1
        self._oracle.add(said, answer)
        self._histories.append([*messages, answer.message])
        self._last = messages, answer
        self._answers[answer.node] = answer

    def check_samples(self) -> None:
        """Check that each drawn token is trained once, except ends of turns that the template does not write."""
        trained: dict[str, int] = {}
        for sample in self._session.samples():
            inside = 0
            for turn in sample.turns:
                drawn, stop = self._answers[turn.node].sample.token_ids, self._answers[turn.node].sample.stop_reason
                raw = len(drawn) - isinstance(stop, int)
                following = sample.token_ids[turn.start + raw : turn.start + raw + 1].tolist()
                assert sample.token_ids[turn.start : turn.end].tolist() == drawn[: raw + (following == [stop])]
                size, before = turn.end - turn.start, trained.get(turn.node, 0)
                assert turn.is_trained == (before < size)
                assert sample.mask[turn.start : turn.end].tolist() == [int(i >= before) for i in range(size)]
                inside += max(0, size - before)
                trained[turn.node] = max(size, before)
            assert sample.mask.sum() == inside and (sample.logprobs < 0).sum() == inside
        assert trained.keys() == self._answers.keys()

    async def _check_refused(self, messages: list[dict[str, Any]], said: list[Said], lost: int) -> None:
        raw = said[lost].raw
        where = f"before the answer messages[{next(i for i in range(lost, len(said)) if said[i].raw is not None)}]: "
        told = f" ({self._model.tokenizer.token_to_id('<')}, " if raw is None else f" ({raw[0]}, "
        try:
            await self._session.chat(messages)
        except InvalidRequestError as error:
            assert str(error).startswith(f"messages[{lost}]: " if raw else where) and told in str(error), str(error)
            self.counts["refused"] += 1
        else:
            raise AssertionError("the session did not notice that the template rewrites a message")

    def _history(self) -> list[dict[str, Any]]:
        """Return a new history, or a changed copy of an earlier one. The last message is not the model's."""
        draw = self._random.random
        if not self._histories or draw() < 0.05:
            system = [dict(role="system", content=self._text())] if draw() < 0.5 else []
            return [*system, dict(role="user", content=self._text())]
        recent = self._histories[-4:]
        messages = copy.deepcopy(self._random.choice(recent if draw() < 0.3 else recent[-1:]))
        if draw() < 0.15:
            messages = messages[: self._random.randint(1, len(messages))]
        if draw() < 0.1:
            self._random.choice(messages)["content"] = self._text()
        if draw() < 0.1:
            messages.append(dict(role="assistant", content="I add this."))
        messages = [self._changed(message) for message in self._respelled(messages)]
        if messages[-1]["role"] == "assistant":
            messages += self._following(messages[-1])
        return messages

    def _following(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        calls = message.get("tool_calls") or []
        results = [dict(role="tool", content=self._text()) for _ in calls]
        return results if calls and self._random.random() < 0.9 else [dict(role="user", content=self._text())]

    def _respelled(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return equal messages in another spelling."""
        messages = copy.deepcopy(messages)
        for message in messages:
            if self._random.random() < 0.2:
                message |= dict(refusal=None, annotations=[], name="")
                message["content"] = [dict(type="text", text=text)] if (text := content_of(message)) else None
            if self._random.random() < 0.2:
                message.pop("session_node", None)
            for call in message.get("tool_calls") or []:
                if self._random.random() < 0.2:
                    call["function"]["arguments"] = dict(reversed(arguments_of(call).items()))
        return messages

    def _changed(self, message: dict[str, Any]) -> dict[str, Any]:
        """Drop or change the reasoning, or drop the ids of calls."""
        draw = self._random.random()
        if message.get("reasoning_content") and draw < 0.15:
            message = message | dict(reasoning_content="other" if draw < 0.03 else None)
        if draw > 0.9:
            for call in message.get("tool_calls") or []:
                call["id"] = "other" if draw > 0.98 else None
        return message

    def _text(self) -> str:
        return "a" + "".join(self._random.choices(WORDS, k=self._random.randint(0, 3))) + "z"

    def _reply(self) -> Reply:
        """Return a random answer. The spelling of its text is not the template's."""
        draw = self._random.random
        content = self._text() if draw() < 0.8 else ""
        end = self._random.choice(self._family.ends)
        reasoning = self._text().strip() if self._family.has_reasoning and draw() < 0.4 else ""
        calls = []
        while end and draw() < 0.4:
            calls.append(("get", {self._random.choice("ab"): self._random.choice([False, 1.0, "x", None]), "c": "é"}))
        if not content and not calls:
            content = "b"
        text = f"<think> {reasoning}</think>" * bool(reasoning) + f"{content} " + "".join(f"<call>{c}" for c in calls)
        return Reply(text, end, reasoning, content, tuple(calls))
