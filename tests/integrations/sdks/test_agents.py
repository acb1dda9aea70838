"""Agents of OpenAI's Agents SDK, Anthropic's package and LiteLLM in sessions over HTTP. Cut connections, cancelled
streams and tools that fail change no token.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from cutting_proxy import cutting_proxy
from exported_samples import assert_same_bits, assert_scored
from http_fronts import Front

from trueroll.rollout import RolloutClient

from .counting_env import serve_counting
from .programs import AGENTS, TEXTS, Agent, Tool, quick_retries

PAGE = Path(__file__).parents[3] / "docs" / "agents.md"
REASON = "make test-agents runs the blocks of this page with the packages"
"""Why tests/test_snippets.py does not run the blocks that these tests run."""
SEED = 8
"""With this seed the tool succeeds and fails in all agents."""
LONG, SHORT = 12_000, 32
"""Tokens of an answer that is cancelled, and of one that is read."""


def begin(front: Front, **sampling: Any) -> str:
    """Begin a session, and return its path."""
    answer = front.post("/sessions", dict(seed=SEED, sampling_params=sampling))
    assert answer.status_code == 200, answer.text
    return f"/sessions/{answer.json()['session_id']}"


def samples_of(front: Front, session: str) -> list[dict[str, Any]]:
    return front.get(f"{session}/samples").json()["samples"]


def talk(agent: Agent, front: Front, url: str, streams: bool = False) -> tuple[dict[str, Any], Tool]:
    """Run an agent in a new session, and return the session's only sample. `url`: where the agent finds the server."""
    session, tool = begin(front), Tool()
    agent.talk(url + session, front.model, tool, streams)
    [sample] = samples_of(front, session)
    return sample, tool


@pytest.fixture(scope="module")
def undisturbed(front: Front) -> Callable[[str], tuple[dict[str, Any], Tool]]:
    """Return a function that returns the sample and the tool of an agent that nothing disturbs."""
    return cache(lambda name: talk(AGENTS[name], front, front.url))


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_keeps_its_tokens(name: str, undisturbed: Any, front: Front, client: RolloutClient) -> None:
    sample, tool = undisturbed(name)
    assert {True, False} == set(tool.outcomes), "premise: the tool succeeds and fails"
    results = [message["content"] for message in sample["messages"] if message["role"] == "tool"]
    assert [result.isdecimal() for result in results] == tool.outcomes
    assert len(sample["turns"]) > len(TEXTS), "premise: the agent gave results of tools"
    assert_scored(sample, client)
    streamed, _ = talk(AGENTS[name], front, front.url, streams=True)
    assert_same_bits(streamed, sample)


@pytest.mark.parametrize("name", [name for name in AGENTS if AGENTS[name].is_from_stainless])
@pytest.mark.parametrize("streams", [False, True])
def test_a_cut_connection_changes_nothing(name: str, streams: bool, undisturbed: Any, front: Front) -> None:
    sample, _ = undisturbed(name)
    address = urlsplit(front.url)
    assert address.hostname is not None and address.port is not None
    with cutting_proxy((address.hostname, address.port)) as proxy, quick_retries():
        cut, _ = talk(AGENTS[name], front, f"http://127.0.0.1:{proxy.port}", streams)
    assert proxy.num_cut >= len(sample["turns"])  # Anthropic's tool runner also repeats requests without a thread
    assert_same_bits(cut, sample)


@pytest.mark.parametrize("name", AGENTS)
def test_a_cancelled_stream_leaves_nothing(name: str, front: Front) -> None:
    cancelled, whole = (begin(front, ignore_eos=True) for _ in range(2))
    AGENTS[name].stream(front.url + cancelled, front.model, LONG, True)
    front.wait_for("trueroll_http_open_requests", 0)
    assert samples_of(front, cancelled) == [], "an answer that was complete would be a sample"
    for session in (cancelled, whole):
        AGENTS[name].stream(front.url + session, front.model, SHORT, False)
    [sample], [other] = (samples_of(front, session) for session in (cancelled, whole))
    assert sum(sample["mask"]) == SHORT
    assert_same_bits(sample, other)


def test_the_programs_of_the_guide_run(front: Front, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(rf"^<!--- skip: next \"{REASON}\" -->\n\n```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    found: dict[str, Any] = {"__name__": "guide"}
    with serve_counting() as env_url:
        for block in blocks:
            program = block.replace("http://127.0.0.1:8000", front.url).replace("http://127.0.0.1:8001", env_url)
            exec(compile(program, str(PAGE), "exec", dont_inherit=True), found)
    printed = capsys.readouterr().out
    assert len(blocks) == 6
    assert found["result"].done and found["result"].reward > 0
    [sample] = found["samples"]
    assert sample["reward"] == 1.0 and len(sample["turns"]) > 1, "premise: the model called the tool"
    assert printed.endswith(f"\n{len(sample['token_ids'])} {sum(sample['mask'])} 1.0\n")
