"""Which messages are equal, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from trueroll.errors import InvalidRequestError
from trueroll.rollout.sessions import messages
from trueroll.rollout.sessions.messages import Message, is_small, read_messages


def read(**fields: Any) -> Message:
    [message] = read_messages([dict(role="assistant") | fields])
    return message


def call(arguments: Any, **other: Any) -> list[dict[str, Any]]:
    return [dict(type="function", function=dict(name="f", arguments=arguments)) | other]


STORED = dict(content="a", reasoning_content="why", tool_calls=call({"x": [1, False], "y": "é"}, id="c1"))


@pytest.mark.parametrize(
    ("given", "is_same"),
    [
        (STORED, True),
        (STORED | dict(refusal=None, audio=None, annotations=[], index=0, token_ids=[1], name=""), True),
        (STORED | dict(id="msg_1", parsed={"a": 1}, cache_control={"type": "x"}, thinking_blocks=[1]), True),
        (STORED | dict(session_node="7"), True),
        (STORED | dict(content=[dict(type="text", text="a")]), True),
        (STORED | dict(tool_calls=call('{"y": "\\u00e9", "x": [1, false]}', id="c1", index=3)), True),
        (STORED | dict(tool_calls=call({"x": [1, False], "y": "é"})), True),  # without the id
        (STORED | dict(reasoning_content=None), True),
        (STORED | dict(reasoning_content=None, reasoning="why"), True),
        (STORED | dict(reasoning_content="else"), False),
        (STORED | dict(content="a "), False),
        (STORED | dict(name="Ann"), False),
        (STORED | dict(tool_calls=call({"x": [1, False], "y": "é"}, id="c2")), False),
        (STORED | dict(tool_calls=call({"x": [1, 0], "y": "é"}, id="c1")), False),
        (STORED | dict(tool_calls=call({"x": [True, False], "y": "é"}, id="c1")), False),
        (STORED | dict(tool_calls=call({"x": [1.5, False], "y": "é"}, id="c1")), False),
        (STORED | dict(tool_calls=call({"x": [1.0, False], "y": "é"}, id="c1")), True),  # JavaScript writes 1.0 as 1
        (STORED | dict(tool_calls=[]), False),
    ],
)
def test_equal_messages(given: dict[str, Any], is_same: bool) -> None:
    assert read(**given).is_(read(**STORED)) == is_same


def test_absent_fields_are_equal() -> None:
    forms = [dict(), dict(content=None), dict(content=""), dict(content=[], tool_calls=None), dict(tool_calls=[])]
    assert {read(**form).spelling for form in forms} == {read().spelling}
    assert read().fields == dict(role="assistant", content="")


def test_a_message_keeps_its_value_when_the_caller_changes_its_own() -> None:
    arguments = {"x": [1]}
    message = read(tool_calls=call(arguments))
    arguments["x"].append(2)
    assert message.calls[0]["function"]["arguments"] == {"x": [1]}


NESTED: list[Any] = []
for _ in range(100):
    NESTED = [NESTED]
WIDE: list[Any] = []
WIDE.extend([WIDE] * 40000)  # contains itself, so only the bounds end its reading


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ([], "at least one message"),
        ("text", "at least one message"),
        ([dict(content="a")], r"messages\[0\]: must be an object with a role"),
        ([dict(role="user"), 3], r"messages\[1\]: must be an object with a role"),
        ([dict(role="user", content=[dict(type="image_url")])], "send text only"),
        ([dict(role="user", content=3)], "send text only"),
        ([dict(role="user", other={1: 2})], "names must be strings"),
        ([dict(role="user", other=b"x")], "not a JSON value"),
        ([dict(role="user", other=float("nan"))], "not a JSON value"),
        ([dict(role="user", other=NESTED)], "more than 64 levels"),
        ([dict(role="user", other=1 << 5000)], "5001 bits"),
        ([dict(role="user", other=[0] * 2**16)], "more than 65536 values"),
        ([dict(role="user", content="x" * 2**22)], "more than 4194304 characters"),
        ([dict(role="user")] * 4097, "4097 messages are too many"),
        ([dict(role="assistant", reasoning_content=3)], "reasoning_content must be a string"),
        ([dict(role="assistant", function_call=dict(name="f"))], "use tool_calls"),
        ([dict(role="assistant", tool_calls=call("{"))], "correct the call"),
        ([dict(role="assistant", tool_calls=call("[1]"))], "correct the call"),
        ([dict(role="assistant", tool_calls=call('{"x": NaN}'))], "correct the call"),
        ([dict(role="assistant", tool_calls=call('{"x": 1e999}'))], "not a JSON value"),
        ([dict(role="assistant", tool_calls=call('{"x":' * 10**4 + "1" + "}" * 10**4))], "correct the call|levels"),
        ([dict(role="assistant", tool_calls=call({}, id=3))], "correct the call"),
        ([dict(role="assistant", tool_calls=dict(x=1))], "tool_calls must be a list"),
        ([dict(role="assistant", tool_calls=call(False))], "correct the call"),
        ([dict(role="assistant", tool_calls=call(0))], "correct the call"),
        ([dict(role="assistant", tool_calls=call({}, type="custom"))], "correct the call"),
        ([dict(role="assistant", reasoning={"effort": "high"})], "reasoning_content must be a string"),
        ([dict(role="user", content="a\ud800")], "half a character"),
        ([dict(role="assistant", tool_calls=call('{"x": "\\ud800"}'))], "half a character"),
        ([dict(role="user", other=WIDE)], "more than 65536 values"),
        ([dict(role="user", other=[1 << 4095] * 4000)], "more than 4194304 characters"),
        # The bounds include the values in the texts of arguments.
        ([dict(role="assistant", tool_calls=call('{"a": [' + "0," * 40000 + "0]}") * 2)], "more than 65536 values"),
        ([dict(role="assistant", tool_calls=call('{"x":' * 60 + "1" + "}" * 60))], "more than 64 levels"),
    ],
)
def test_refused_messages(given: Any, error: str) -> None:
    with pytest.raises(InvalidRequestError, match=error):
        read_messages(given)


def test_the_bounds_hold_for_the_messages_and_the_tools_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_CHARS", 100)
    read_messages([dict(role="user", content="x" * 40)], [dict(name="y" * 20)])
    with pytest.raises(InvalidRequestError, match="more than 100 characters"):
        read_messages([dict(role="user", content="x" * 40)], [dict(name="y" * 80)])


def test_fields_of_servers_do_not_count_towards_the_bounds() -> None:
    wire = dict(prompt_token_ids=[1] * 4000, generation_token_ids=[1] * 900, generation_log_probs=[0.1] * 900)
    read_messages([dict(role="assistant", content="x", **wire)] * 14)
    with pytest.raises(InvalidRequestError, match="more than 65536 values"):
        read_messages([dict(role="user", content="x", **wire)] * 14)


def test_what_is_small() -> None:
    for value in (["x" * 2**16], [0] * 5000, {"x": [[0] * 3000, [0] * 3000]}, [1 << 200000]):
        assert not is_small(value)
    assert is_small([{"x": ["y" * 1000] * 10}, None, 0.5])
