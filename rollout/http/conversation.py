"""Conversations: render the messages with the model's chat template, and insert the images into the prompt.

For each message part of type `image_url`, the chat template gets `{"type": "image"}` and writes one placeholder. Each
placeholder is then replaced by as many placeholders as its image has tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from trueroll.errors import InvalidRequestError, brief

from ..parsing.forced import forced_tools
from ..text import strings_in
from .fields import Fields, unsupported
from .images import ImageUrl, Prompt
from .model import ServedModel

Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_RESERVED = {"tools", "add_generation_prompt", "tokenize", "chat_template", "conversation", "messages"}


class Message(Fields):
    """A message of a conversation. Additional fields, such as `tool_calls`, are passed to the chat template."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    role: Literal[ROLES]  # type: ignore[valid-type]
    content: str | Objects | None = None


class ConversationFields(Fields):
    """The fields of a conversation that determine the prompt.

    `chat_template_kwargs`: arguments of the chat template, such as `enable_thinking`.
    """

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    tools: Objects = []
    tool_choice: str | dict[str, Any] = "auto"
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}


async def prompt_of(own: ConversationFields, served: ServedModel, most: int | None = None) -> Prompt:
    """Return the prompt of a conversation.

    Raise HttpError if the conversation, with only one placeholder per image, has more than `most` tokens. Raise
    HttpError or InvalidRequestError if a field or an image is not supported.
    """
    forced_tools(own.tool_choice, own.tools)
    if found := _RESERVED & own.chat_template_kwargs.keys():
        text = f"chat_template_kwargs: {sorted(found)} cannot be set here; remove them"
        raise InvalidRequestError(text, field="chat_template_kwargs")
    messages = [_for_template(i, message) for i, message in enumerate(own.messages)]
    arguments = own.chat_template_kwargs | dict(
        tools=tools_of(own) or None, add_generation_prompt=own.add_generation_prompt
    )
    urls = [url for i, message in enumerate(own.messages) for url in _urls_of(i, message)]
    if not urls:
        return Prompt(await served.encode_conversation(messages, arguments, most))
    served.images.check_count(len(urls), "messages")
    _check_texts((messages, arguments), served)
    token_ids = await served.encode_conversation(messages, arguments, most)
    _check_placeholders(token_ids.count(served.images.placeholder), len(urls))
    return await served.images.expand(token_ids, await served.images.open(urls, served.salt))


def tools_of(own: ConversationFields) -> list[dict[str, Any]]:
    """Return the tools that are passed to the chat template."""
    return [] if own.tool_choice == "none" else own.tools


def text_of(content: str | list[dict[str, Any]] | None) -> str:
    """Return the text of a message's content. The texts of several parts are joined by line breaks."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if part.get("type") == "text")
    return content or ""


def _for_template(position: int, message: Message) -> dict[str, Any]:
    """Return a message in the format that chat templates expect, with tool call arguments as objects. The content of
    the returned message is a list of parts if one of the parts is an image, and a string otherwise.
    """
    told = {name: value for name, value in message if value is not None or name == "content"}
    if isinstance(content := message.content, list):
        parts = [_part_of(f"messages[{position}].content[{i}]", part) for i, part in enumerate(content)]
        has_image = any(part["type"] == "image" for part in parts)
        told["content"] = parts if has_image else text_of(parts)
    if isinstance(calls := told.get("tool_calls"), list):
        told["tool_calls"] = [_with_object(position, call) for call in calls]
    return told


def _part_of(where: str, part: dict[str, Any]) -> dict[str, Any]:
    if part.get("type") == "image_url":
        return {"type": "image"}
    if part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise InvalidRequestError(
            f"{where}: parts of type {brief(part.get('type'))} are not supported; send parts of type text or image_url",
            field=where,
            value=part.get("type"),
        )
    return {"type": "text", "text": part["text"]}


def _urls_of(position: int, message: Message) -> Iterator[ImageUrl]:
    for i, part in enumerate(message.content if isinstance(message.content, list) else []):
        if part.get("type") == "image_url":
            yield _url_of(f"messages[{position}].content[{i}].image_url", part.get("image_url"))


def _url_of(where: str, given: Any) -> ImageUrl:
    if not isinstance(given, dict) or not isinstance(given.get("url"), str):
        raise InvalidRequestError(f"{where}: must be an object with a string `url` (got {brief(given)})", field=where)
    for name, value in given.items():
        if name != "url" and value is not None and (name, value) != ("detail", "auto"):
            raise unsupported(f"{where}.{name}", "'auto'" if name == "detail" else "null", value)
    return ImageUrl(where, given["url"])


def _check_texts(values: Any, served: ServedModel) -> None:
    """Raise InvalidRequestError if a text of the conversation contains the placeholder text of an image. In the
    template's output, this text could not be distinguished from the placeholder of a real image.
    """
    marks = served.texts.image_texts(served.images.placeholder)
    for text in strings_in(values):
        for mark in marks:
            if mark in text:
                raise InvalidRequestError(
                    f"messages: a text contains {mark!r}, which stands for an image in this model's prompts; remove it "
                    "from conversations with images",
                    field="messages",
                )


def _check_placeholders(found: int, num_images: int) -> None:
    if found != num_images:
        raise InvalidRequestError(
            f"messages: the model's chat template wrote {found} placeholders for {num_images} images; send images only "
            "in messages of roles for which the template supports images, such as user",
            field="messages",
            value=found,
            limit=num_images,
        )


def _with_object(position: int, call: Any) -> Any:
    try:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        return call | {"function": call["function"] | {"arguments": arguments}}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InvalidRequestError(
            f"messages[{position}].tool_calls: {brief(call)} is not a function call with JSON arguments; correct the "
            "call",
            field=f"messages[{position}].tool_calls",
        ) from None
