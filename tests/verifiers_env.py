"""Two environments of verifiers for tests, one with a single question and one with a conversation. Both have their own
data and harness.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult

__all__ = ["Chat", "Conversation", "Questions"]
QUESTIONS = ("Which animals live in the sea, and which of them are fish?", "What is 6 times 7?")
REPLIES = ("Are you sure? Say it again.", "And why is that?")


class Question(vf.Task[vf.TaskData]):
    """A task with a reward for letters."""

    @vf.reward
    async def letters(self, trace: vf.Trace) -> float:
        text = "".join(message.content or "" for message in trace.assistant_messages)
        return sum(letter.isalpha() for letter in text) / max(len(text), 1)


class Questions(vf.Taskset[Question, vf.TasksetConfig]):
    def load(self) -> Iterable[Question]:
        return [Question(vf.TaskData(prompt=question)) for question in QUESTIONS]


class Conversation(vf.Env[vf.SingleAgentEnvConfig]):
    """A conversation in which two fixed replies follow the first answer."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as talk:
            await talk.turn()
            for reply in REPLIES:
                await talk.turn(reply)


class Chat(vf.Harness[vf.HarnessConfig]):
    """A harness that runs in this process and sends one request per turn. `trace.info["answers"]` has the answers."""

    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> ProgramResult:
        prompt = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt or []
        messages: list[Any] = [message_to_wire(message) for message in prompt]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=2) as client:
            answer = await client.chat.completions.create(model=ctx.model, messages=messages)
        trace.info.setdefault("answers", []).append(answer)
        return ProgramResult(0, "", "")
