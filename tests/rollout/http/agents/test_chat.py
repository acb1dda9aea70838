"""Requests for chat completions of a session: what the session is asked, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from trueroll.errors import TruerollError
from trueroll.rollout.http.agents.call import AgentCall
from trueroll.rollout.http.agents.chat import read_chat_call

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
MESSAGES = [{"role": "user", "content": "hi", "name": "n"}]


def read(**fields: Any) -> AgentCall:
    return read_chat_call({"model": "any", "messages": MESSAGES} | fields)


def test_a_call_has_the_fields_of_the_request() -> None:
    call = read(
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        chat_template_kwargs={"a": 1},
        temperature=0.5,
        max_completion_tokens=7,
        seed=3,
        response_format={"type": "json_object"},
        logprobs=True,
        top_logprobs=2,
        stream=True,
        user="u",
        prompt_logprobs=None,
        add_generation_prompt=True,
    )
    assert (call.messages, call.tools, call.tool_choice) == (MESSAGES, [TOOL], "required")
    assert call.sampling == dict(temperature=0.5, max_tokens=7, seed=3, response_format={"type": "json_object"}), (
        "the session checks the sampling parameters"
    )
    assert (call.chat_template_kwargs, call.top_logprobs, call.is_stream) == ({"a": 1}, 2, True)
    assert not call.names_events


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        (dict(prompt_logprobs=1), "prompt_logprobs", "null"),
        (dict(prompt_logprob_start=1), "prompt_logprob_start", "null or 0"),
        (dict(add_generation_prompt=False), "add_generation_prompt", "True"),
        (dict(skip_special_tokens=False), "skip_special_tokens", "True"),
        (dict(unknown=1), "unknown", "unknown parameter"),
        (dict(tools=[TOOL], parallel_tool_calls=False), "parallel_tool_calls", "'required'"),
        (dict(top_logprobs=2), "top_logprobs", "requires logprobs"),
        (dict(messages=None), "messages", "required"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(TruerollError) as caught:
        read(**fields)
    assert caught.value.field == param and said in str(caught.value)
