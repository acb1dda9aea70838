"""An agent plays an environment of OpenEnv in a session over HTTP, through cut connections and steps that fail."""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from cutting_proxy import cutting_proxy
from exported_samples import assert_continued, assert_same_bits, assert_scored
from http_fronts import Front
from openenv.core import GenericEnvClient

from trueroll.rollout import RolloutClient

from .counting_env import serve_counting
from .programs import FUNCTION, MAX_TOKENS, SYSTEM, quick_retries

SEED = 19
"""With this seed, the episodes have several turns, steps that succeed and steps that fail, and different rewards."""


@dataclass
class Episode:
    """`turns`: the answers. `outcomes`: for each step, whether it succeeded. `reward`: the environment's."""

    turns: list[Any] = field(default_factory=list)
    outcomes: list[bool] = field(default_factory=list)
    reward: float = 0.0

    @property
    def node(self) -> str:
        """The last answer's node in the session."""
        return self.turns[-1].choices[0].message.session_node


def play(env_url: str, session: str) -> Episode:
    """Play an episode. `session`: the URL of the agent's session."""
    episode = Episode()
    with (
        GenericEnvClient(base_url=env_url).sync() as env,
        openai.OpenAI(
            base_url=f"{session}/v1", api_key="none", http_client=openai.DefaultHttpxClient(verify=False)
        ) as model,
    ):
        result = env.reset()
        messages: list[Any] = [
            dict(role="system", content=SYSTEM),
            dict(role="user", content=result.observation["text"]),
        ]
        while not result.done:
            turn = model.chat.completions.create(
                model="any",
                messages=messages,
                tools=[FUNCTION],
                max_tokens=MAX_TOKENS,
                logprobs=True,
                extra_body=dict(return_token_ids=True),
            )
            episode.turns.append(turn)
            message = turn.choices[0].message
            messages.append(message)
            for call in message.tool_calls or []:
                assert call.type == "function"
                try:
                    result = env.step(json.loads(call.function.arguments))
                    content = result.observation["text"]
                except RuntimeError as error:
                    content = str(error)
                episode.outcomes.append(not content.startswith("Server error:"))
                messages.append(dict(role="tool", tool_call_id=call.id, content=content))
                if result.done:
                    break
            if not message.tool_calls:
                messages.append(dict(role="user", content="Call the tool."))
    assert isinstance(result.reward, float)
    episode.reward = result.reward
    return episode


def play_group(env_url: str, front: Front, url: str) -> tuple[list[Episode], list[dict[str, Any]]]:
    """Play two episodes in one session, and attach their rewards. Return them with the session's samples.

    `url`: where the agent finds the front end.
    """
    answer = front.post("/sessions", dict(seed=SEED))
    assert answer.status_code == 200, answer.text
    session = f"/sessions/{answer.json()['session_id']}"
    episodes = [play(env_url, url + session) for _ in range(2)]
    for episode in episodes:
        rewarded = front.post(f"{session}/reward", dict(reward=episode.reward, node=episode.node))
        assert rewarded.status_code == 200, rewarded.text
    return episodes, front.get(f"{session}/samples").json()["samples"]


@pytest.fixture(scope="module")
def env_url() -> Iterator[str]:
    with serve_counting() as url:
        yield url


def test_each_episode_of_a_session_is_a_sample(env_url: str, front: Front, client: RolloutClient) -> None:
    episodes, samples = play_group(env_url, front, front.url)
    assert len(samples) == len(episodes)
    assert len({episode.reward for episode in episodes}) == 2, "premise: the environment gives different rewards"
    for episode, sample in zip(episodes, samples, strict=True):
        assert {True, False} == set(episode.outcomes), "premise: steps succeed and fail"
        assert sample["reward"] == episode.reward == 1 / len(episode.outcomes)
        assert_continued(sample, episode.turns)
        assert_scored(sample, client)


def test_cut_connections_change_nothing(env_url: str, front: Front) -> None:
    _, undisturbed = play_group(env_url, front, front.url)
    address = urlsplit(front.url)
    assert address.hostname is not None and address.port is not None
    with cutting_proxy((address.hostname, address.port)) as proxy, quick_retries():
        episodes, samples = play_group(env_url, front, f"http://127.0.0.1:{proxy.port}")
    assert proxy.num_cut == sum(len(episode.turns) for episode in episodes)
    assert len(samples) == len(undisturbed)
    for sample, other in zip(samples, undisturbed, strict=True):
        assert_same_bits(sample, other)
        assert sample["reward"] == other["reward"]
