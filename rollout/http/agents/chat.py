"""OpenAI's chat completions, as calls of a session."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..chat import ChatFields, ChatForm, chat_fields, chat_token_bytes, check_parallel, check_top_logprobs
from ..fields import SAMPLING, EditFields, checked, given
from ..images import Prompt
from ..logprobs import name_by_id
from .call import AgentCall, Context

_OFF = dict(
    prompt_logprobs=(),
    prompt_logprob_token_ids=(),
    prompt_logprob_start=(0,),
    prompt_sampling_mask=(False,),
    routed_experts_prompt_start=(0,),
    add_generation_prompt=(True,),
    skip_special_tokens=(True,),
)
"""Fields of chat completions that a session does not support, with their neutral values."""


def read_chat_call(body: dict[str, Any]) -> AgentCall:
    """Read a request for chat completions. Raise InvalidRequestError or HttpError if the request is not supported."""
    fields = given(chat_fields(body), frozenset(), _OFF)
    names = (*SAMPLING, "seed", *EditFields.model_fields)
    sampling = {name: fields.pop(name) for name in names if name in fields}
    own = checked(ChatFields, fields)
    check_top_logprobs(own)
    check_parallel(own)
    return AgentCall(
        messages=fields["messages"],
        form=partial(_form, own),
        tools=own.tools,
        tool_choice=own.tool_choice,
        chat_template_kwargs=own.chat_template_kwargs,
        sampling=sampling,
        model=own.model,
        top_logprobs=own.top_logprobs,
        token_bytes=chat_token_bytes(own),
        is_stream=own.stream,
    )


def _form(own: ChatFields, context: Context) -> ChatForm:
    return ChatForm(
        id=f"chatcmpl-{context.node}",
        created=context.created,
        model=context.model,
        fields=own,
        prompt=Prompt(context.prompt_token_ids),
        name=name_by_id if own.return_tokens_as_token_ids else context.token_text,
        eos_token_ids=context.eos_token_ids,
        new_parser=context.new_parser,
        told_prompt={},
        node=context.node,
    )
