"""verifiers' own rollouts: with its training client, which requests `/inference/v1/generate`, and with its client for
evaluation in sessions.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import importlib
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import openai
import pytest
import requests
import verifiers.v1 as vf
from cutting_proxy import cutting_proxy
from exported_samples import assert_continued, assert_same_bits, assert_scored
from http_fronts import Front
from renderers import Qwen3RendererConfig
from verifiers.v1.runtimes import subprocess
from verifiers_env import QUESTIONS, REPLIES, Conversation

from trueroll.rollout import RolloutClient, SamplingParams, WorkerProcess

EXAMPLES = Path(__file__).parents[3] / "examples"
GUIDE = Path(__file__).parents[3] / "docs" / "agents.md"
GUIDE_REASON = '<!--- skip: next "make test-clients runs this block with verifiers" -->'
STOPS = [301, 302]
"""`<|im_end|>` and `<|endoftext|>`, at which verifiers ends an answer."""
SAMPLING: dict[str, Any] = dict(temperature=1.0, max_tokens=48)
SEED = 3
BLOCK = 16
"""Tokens in a block of the worker's cache."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "CACHE_DIR", tmp_path)


def make_env(kind: type[vf.Env[Any]]) -> vf.Env[Any]:
    seat: Any = {"harness": {"id": "verifiers_env"}, "runtime": {"type": "subprocess"}}
    return kind(vf.SingleAgentEnvConfig(taskset={"id": "verifiers_env"}, agent=seat))  # type: ignore[arg-type]


def run_episode(kind: type[vf.Env[Any]], front: Front, model: Path) -> vf.Branch:
    """Run one episode of the environment on its first question, and return its branch."""
    env = make_env(kind)
    client = vf.TrainClientConfig(
        base_url=f"{front.url}/v1",
        api_key_var="NO_KEY",
        renderer=Qwen3RendererConfig(enable_thinking=False),
        renderer_model_name=str(model),
    )
    context = vf.ModelContext(front.model, client, vf.SamplingConfig(**SAMPLING, seed=SEED))

    async def run() -> vf.Episode:
        async with env.serving():
            [slot] = env.slots(next(iter(env.taskset)), 1)
            return await env.run_slot(slot, context)

    episode = asyncio.run(run())
    assert episode.ok, (episode.errors, [trace.errors for trace in episode.traces])
    [trace] = episode.traces
    assert 0 < trace.rewards["letters"].value <= 1
    [branch] = trace.branches
    return branch


def turns_of(branch: vf.Branch) -> list[tuple[list[int], list[int], list[float]]]:
    """Return prompt, tokens and log-probs of each answer, as a trainer gets them."""
    tokens: list[int] = []
    turns = []
    for node in branch.nodes:
        tokens += node.token_ids
        if node.sampled:
            n = sum(node.mask)
            assert node.mask[-n:] == [True] * n
            turns.append((tokens[:-n], tokens[-n:], node.logprobs))
    return turns


def assert_clients_bits(turns: list[tuple[list[int], list[int], list[float]]], client: RolloutClient) -> None:
    params = SamplingParams(**SAMPLING, stop_token_ids=tuple(STOPS), top_logprobs=1)
    for prompt, completion, logprobs in turns:
        [group] = client.generate([prompt], params, seed=SEED)
        assert completion == group.samples[0].token_ids
        expected = group.samples[0].logprobs
        assert expected is not None
        assert np.array(logprobs, np.float64).tobytes() == expected.astype(np.float64).tobytes()


def test_a_question_gets_the_tokens_and_log_probs_of_the_client(
    front: Front, client: RolloutClient, chat_model: Path
) -> None:
    turns = turns_of(run_episode(vf.SingleAgentEnv, front, chat_model))
    assert len(turns) == 1 and len(turns[0][1]) > 1
    assert_clients_bits(turns, client)


def test_a_conversation_continues_with_the_sampled_tokens_and_hits_the_cache(
    front: Front, client: RolloutClient, chat_model: Path
) -> None:
    client.invalidate_prefix_cache()
    before = client.stats().engine["prefix_hits"]
    branch = run_episode(Conversation, front, chat_model)
    hits = client.stats().engine["prefix_hits"] - before
    turns = turns_of(branch)
    assert [message.content for message in branch.messages[::2]] == [QUESTIONS[0], *REPLIES]
    assert len(turns) == 3
    for (prompt, completion, _), (later, _, _) in zip(turns, turns[1:], strict=False):
        assert later[: len(prompt) + len(completion)] == prompt + completion
    # Only whole blocks are cached. The last token of an answer was never an input, so that token is not cached.
    assert hits == sum((len(prompt) + len(completion) - 1) // BLOCK * BLOCK for prompt, completion, _ in turns[:-1])
    assert_clients_bits(turns, client)


def test_the_guides_program_trains_on_episodes_with_the_bits_of_the_worker(
    worker: WorkerProcess,
    front: Front,
    client: RolloutClient,
    chat_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    before = client.health().weight_version
    importlib.import_module("verifiers_grpo").main(worker.address, front.url, str(chat_model), "2")
    line = re.compile(r"step (\d): reward (\S+), gradient norm (\S+), largest \|ratio - 1\| (\S+)\n")
    steps = line.findall(capsys.readouterr().out)
    assert [(step, worst) for step, _, _, worst in steps] == [("0", "0.0"), ("1", "0.0")]
    assert all(0 < float(reward) < 1 and float(norm) > 0 for _, reward, norm, _ in steps), "premise: it trains"
    assert before is not None and client.health().weight_version == before + 2


def begin(front: Front) -> str:
    """Begin a session, and return its path."""
    answer = front.post("/sessions", dict(seed=SEED, sampling_params=dict(temperature=1.0)))
    assert answer.status_code == 200, answer.text
    return f"/sessions/{answer.json()['session_id']}"


def samples_of(front: Front, session: str) -> list[dict[str, Any]]:
    return front.get(f"{session}/samples").json()["samples"]


def texts_of(trace: vf.Trace) -> list[Any]:
    [branch] = trace.branches
    return [message.content for message in branch.messages]


def test_a_group_in_one_session_is_a_sample_for_each_episode(front: Front, client: RolloutClient) -> None:
    env, session = make_env(Conversation), begin(front)
    config = vf.EvalClientConfig(base_url=f"{front.url}{session}/v1", api_key_var="NO_KEY")
    sampling: dict[str, Any] = dict(max_tokens=16, logprobs=True, return_token_ids=True)
    context = vf.ModelContext("any", config, vf.SamplingConfig(**sampling))

    async def run() -> list[vf.Episode]:
        async with env.serving():
            slots = env.slots(next(iter(env.taskset)), 3)
            return await asyncio.gather(*(env.run_slot(slot, context) for slot in slots))

    episodes = asyncio.run(run())
    assert [(episode.errors, [trace.errors for trace in episode.traces]) for episode in episodes] == [([], [[]])] * 3
    samples, traces = samples_of(front, session), [trace for episode in episodes for trace in episode.traces]
    assert len(samples) == len(traces)
    by_texts = {tuple(message["content"] for message in sample["messages"]): sample for sample in samples}
    assert len(by_texts) == len(samples), "premise: the model drew different answers"
    for trace in traces:
        sample = by_texts[tuple(texts_of(trace))]
        assert_continued(sample, trace.info["answers"])
        assert_scored(sample, client)


def test_the_block_of_the_agents_guide_keeps_its_tokens_if_connections_break(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai._base_client, "INITIAL_RETRY_DELAY", 0.0)
    [program] = re.findall(rf"{re.escape(GUIDE_REASON)}\n\n```python\n(.*?)^```", GUIDE.read_text(), re.M | re.S)
    found: dict[str, Any] = {"requests": requests}
    exec(compile(program, str(GUIDE), "exec", dont_inherit=True), found)
    env, sessions = make_env(Conversation), [begin(front) for _ in range(2)]
    address = urlsplit(front.url)
    assert address.hostname is not None and address.port is not None
    with cutting_proxy((address.hostname, address.port)) as proxy:
        urls = [front.url + sessions[0], f"http://127.0.0.1:{proxy.port}{sessions[1]}"]
        asyncio.run(found["run_episodes"](env, next(iter(env.taskset)), urls))
    assert proxy.num_cut == 1 + len(REPLIES)
    [sample], [cut] = (samples_of(front, session) for session in sessions)
    assert len(sample["turns"]) == 1 + len(REPLIES) and 0 < sample["reward"] <= 1
    assert cut["reward"] == sample["reward"]
    assert_same_bits(cut, sample)
