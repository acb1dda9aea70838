"""OpenAI's chat completions, for a session."""

from __future__ import annotations

from typing import Any

from ..chat import ChatFields, ChatForm, chat_token_bytes, check_top_logprobs
from ..fields import SAMPLING, EditFields, checked, given, unsupported
from ..images import Prompt
from ..logprobs import name_by_id
from .call import AgentCall, Context

_NEUTRAL: dict[str, Any] = dict(
    prompt_logprobs=None,
    prompt_logprob_token_ids=None,
    prompt_logprob_start=0,
    routed_experts_prompt_start=0,
    add_generation_prompt=True,
    skip_special_tokens=True,
)
"""Fields of chat completions that a session does not support, with their neutral values."""


def read_chat_call(body: dict[str, Any]) -> AgentCall:
    """Read a request for chat completions. Raise InvalidRequestError or HttpError if the request is not supported."""
    fields = given(body)
    if (most := fields.pop("max_completion_tokens", None)) is not None:
        fields["max_tokens"] = most
    names = (*SAMPLING, "seed", *EditFields.model_fields)
    sampling = {name: fields.pop(name) for name in names if name in fields}
    own = checked(ChatFields, fields)
    for name, value in _NEUTRAL.items():
        if (found := getattr(own, name)) != value:
            raise unsupported(name, repr(value), found)
    check_top_logprobs(own)
    if own.tools and own.tool_choice == "auto" and not own.parallel_tool_calls:
        raise unsupported("parallel_tool_calls", "true", own.parallel_tool_calls)

    def form(context: Context) -> ChatForm:
        return ChatForm(
            id=f"chatcmpl-{context.id}",
            created=context.created,
            model=context.model,
            fields=own,
            prompt=Prompt(context.prompt_token_ids),
            name=name_by_id if own.return_tokens_as_token_ids else context.token_text,
            eos_token_ids=context.eos_token_ids,
            parser=context.parser,
            prompt_end=context.prompt_end,
            told_prompt={},
            call_id=context.call_id,
            node=context.id,
        )

    return AgentCall(
        messages=fields["messages"],
        form=form,
        tools=own.tools,
        tool_choice=own.tool_choice,
        chat_template_kwargs=own.chat_template_kwargs,
        sampling=sampling,
        top_logprobs=own.top_logprobs,
        token_bytes=chat_token_bytes(own),
        is_stream=own.stream,
        tells_usage=own.stream_options.include_usage,
    )
