"""50 turns with tools on a tiny mixture of experts. The tokens of each turn begin with the tokens of the turn before.
The session, a score of the same tokens and an aligned trainer have the same bits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from chat_templates import TEMPLATES, make_chat_folder
from serving import WorkerOnThread
from transformers import AutoModelForCausalLM

from tiny import make_tiny_model
from trueroll.engine.config import EngineConfig
from trueroll.errors import RequestAbortedError, TruerollError
from trueroll.kernels.training import align, token_log_probs
from trueroll.rollout import FleetClient, RolloutClient, SamplingParams, WeightPublisher, launch_worker
from trueroll.rollout.client.membership import Member, write_members
from trueroll.rollout.config import WorkerConfig
from trueroll.rollout.sessions.export import SessionSample
from trueroll.rollout.sessions.session import Session
from trueroll.rollout.text import TextModel
from trueroll.rollout.worker.process import load_engine

TEMPERATURE = 0.8
TURNS, PUSH_AT, EVICT_AT, ABORT_AT = 50, 40, 30, 15
BLOCK_SIZE, NUM_BLOCKS = 16, 320
TOOLS = [dict(type="function", function=dict(name="f"))]


class OddAnswersAreCalls:
    """Takes each complete answer with an odd number of tokens as a call of a tool. A random model writes no calls."""

    def whole(self, token_ids: Sequence[int], text: str, finish_reason: str) -> Any:
        is_call = finish_reason == "stop" and len(token_ids) % 2 == 1
        calls = [dict(function=dict(name="f", arguments=dict(text=text)))] * is_call
        return SimpleNamespace(content="" if is_call else text, reasoning_content=None, tool_calls=calls)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sessions")
    model = make_tiny_model("qwen3_moe", root / "model", max_position_embeddings=8192)
    return make_chat_folder(root / "chat", TEMPLATES["qwen2_5"], "<|im_end|>", model)


@pytest.fixture
def client(folder: Path) -> Iterator[RolloutClient]:
    config = EngineConfig(
        model=str(folder), num_blocks=NUM_BLOCKS, host_cache_bytes=2**24, num_threads=1, backend="cpu"
    )
    running = WorkerOnThread(WorkerConfig(), lambda: load_engine(config))
    with RolloutClient(running.address) as client:
        yield client
    running.worker.drain()
    running.join()
    assert running.error is None


class Agent:
    """Talks in one session. `history`: the messages so far."""

    def __init__(self, client: RolloutClient, texts: TextModel, seed: int) -> None:
        stop = texts.encode("<|im_end|>", False)[0]
        sampling: dict[str, Any] = dict(max_tokens=9, temperature=TEMPERATURE, logprobs="temperature")
        sampling |= dict(logit_bias={stop: 12.0}, return_routed_experts=True, top_logprobs=2)
        settings: dict[str, Any] = dict(parser=OddAnswersAreCalls(), sampling=SamplingParams(**sampling))
        self.session = Session(client, texts, seed=seed, **settings)
        self.history: list[dict[str, Any]] = [dict(role="user", content="go")]
        self.tokens: list[int] = []
        self.num_calls = self.num_cached = 0

    def turn(self) -> None:
        answer = self.session.chat(self.history, TOOLS)
        assert answer.prompt_token_ids[: len(self.tokens)] == self.tokens
        self.tokens = [*answer.prompt_token_ids, *answer.sample.token_ids]
        retry = self.session.chat(self.history, TOOLS, is_retry=True)
        assert retry.node == answer.node
        is_call = answer.finish_reason == "tool_calls"
        self.history += [answer.message, dict(role="tool", content="7") if is_call else dict(role="user", content="go")]
        self.num_calls += is_call
        self.num_cached += answer.sample.num_cached_tokens > 0

    def abort_a_turn(self, client: RolloutClient) -> None:
        """Abort a call in flight. The aborted call must leave nothing in the session."""
        errors: list[TruerollError] = []

        def chat() -> None:
            try:
                self.session.chat(self.history, TOOLS, max_tokens=4000, ignore_eos=True)
            except TruerollError as error:
                errors.append(error)

        before = self.session.samples()
        calling = threading.Thread(target=chat)
        calling.start()
        while not client.abort_all():
            assert calling.is_alive()
        calling.join()
        assert [type(error) for error in errors] == [RequestAbortedError]
        assert [sample.node for sample in self.session.samples()] == [sample.node for sample in before]


def num_different(samples: list[SessionSample], log_probs: list[np.ndarray], version: int) -> int:
    """Return how many log-probs differ in any bit, among the tokens that the weights `version` drew."""
    different = total = 0
    for sample, found in zip(samples, log_probs, strict=True):
        drawn = (sample.mask == 1) & (sample.versions == version)
        different += int((sample.logprobs.view(np.int32) != found.view(np.int32))[drawn].sum())
        total += int(drawn.sum())
    assert total > 20, "premise"
    return different


def scored(client: RolloutClient, samples: list[SessionSample]) -> list[np.ndarray]:
    scores = client.score([sample.token_ids for sample in samples], TEMPERATURE)
    return [np.concatenate((np.zeros(1, np.float32), score.logprobs)) for score in scores]


def trained(model: torch.nn.Module, samples: list[SessionSample]) -> list[np.ndarray]:
    sequences = [torch.from_numpy(sample.token_ids).long() for sample in samples]
    lengths = [len(sequence) for sequence in sequences]
    with torch.no_grad():
        found = token_log_probs(model, torch.cat(sequences), lengths=lengths, temperature=TEMPERATURE)
    return [part.numpy() for part in found.split(lengths)]


def test_fifty_turns_have_the_bits_of_one_prompt_and_of_the_trainer(client: RolloutClient, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    align(model, "cpu")
    with closing(TextModel(str(folder))) as texts, WeightPublisher("shared") as publisher:
        agent = Agent(client, texts, seed=5)
        for turn in range(PUSH_AT):
            if turn == ABORT_AT:
                agent.abort_a_turn(client)
            if turn == ABORT_AT + 1:  # a branch: the agent edits its last message
                agent.session.chat([*agent.history[:-1], dict(role="user", content="no")], TOOLS)
                agent.session.chat(agent.history, TOOLS)  # a twin
            if turn == EVICT_AT:
                evict(client)
            agent.turn()
            if turn == EVICT_AT:
                assert client.stats().engine["host_hits"] > 300, "premise: the turn came back from host memory"
        before = agent.session.samples()
        assert len(before) == 3 and [sample.versions.max() for sample in before] == [0] * 3
        assert num_different(before, scored(client, before), 0) == num_different(before, trained(model, before), 0) == 0
        check_records(client, before)
        check_replay(client, texts, agent)

        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.125)
        publisher.connect([client.asynchronous.address])
        publisher.push(model, version=1)
        for _ in range(PUSH_AT, TURNS):
            agent.turn()
        after = agent.session.samples()
        assert num_different(after, scored(client, after), 1) == num_different(after, trained(model, after), 1) == 0
        assert num_different(after, trained(model, after), 0) > 0, "premise: the push changed the log-probs"
    longest = max(after, key=lambda sample: len(sample.turns))
    assert len(longest.turns) == TURNS and longest.token_ids.tolist() == agent.tokens
    assert 5 < agent.num_calls < TURNS - 5 and agent.num_cached > TURNS - 10, "premise: calls, texts and cache hits"
    assert {turn.finish_reason for turn in longest.turns} == {"stop", "length"}, "premise: some answers were cut"
    assert [sample.node for sample in after[:2]] == [sample.node for sample in before[:2]], "the branch and the twin"


def evict(client: RolloutClient) -> None:
    """Fill the device's cache with other prompts, so that the session's tokens move to host memory."""
    prompts = [[10 + i] * (16 * BLOCK_SIZE) for i in range(NUM_BLOCKS // 16)]
    client.generate(prompts, SamplingParams(max_tokens=1))


def check_records(client: RolloutClient, samples: list[SessionSample]) -> None:
    """The routed experts of a session's requests join to the routed experts of one prompt."""
    scores = client.score([sample.token_ids for sample in samples], TEMPERATURE, return_routed_experts=True)
    for sample, score in zip(samples, scores, strict=True):
        assert sample.routed_experts is not None and score.routed_experts is not None
        assert np.array_equal(sample.routed_experts, score.routed_experts)
        assert sample.columns["top_token_ids"].shape == (sample.mask.sum(), 2)


def check_replay(client: RolloutClient, texts: TextModel, agent: Agent) -> None:
    """A session with the same seed draws the same answers, here from a cold cache."""
    client.invalidate_prefix_cache()
    again = Agent(client, texts, seed=5)
    for _ in range(4):
        again.turn()
    assert again.history == agent.history[: len(again.history)]
    assert again.tokens == agent.tokens[: len(again.tokens)]


def test_a_turn_goes_on_when_its_worker_is_lost(folder: Path, tmp_path: Path, forked_workers: None) -> None:
    """The worker of a turn is killed. Another worker draws the same bits, and the next turn continues them."""
    file, asked = tmp_path / "fleet.json", [dict(role="user", content="go")]
    with ExitStack() as stack:
        workers = {f"worker-{i}": stack.enter_context(launch_worker(str(folder), num_blocks=256)) for i in range(2)}
        members = {name: Member(name, worker.address) for name, worker in workers.items()}
        write_members(file, [*members.values()])
        texts = stack.enter_context(closing(TextModel(str(folder))))
        fleet = stack.enter_context(FleetClient(file))
        alone = stack.enter_context(RolloutClient(workers["worker-0"].address))

        def lose() -> None:
            while not (lost := [name for name, health in fleet.healths().items() if health.requests["open"]]):
                pass
            killed.extend(lost)
            workers[lost[0]].kill()
            write_members(file, [member for name, member in members.items() if name not in lost])

        found, killed, losing = list[list[SessionSample]](), list[str](), threading.Thread(target=lose)
        for client in (alone, fleet):
            session, history = Session(client, texts, seed=5, sampling=SamplingParams(max_tokens=9)), [*asked]
            for turn in range(4):
                if (client, turn) == (fleet, 2):
                    losing.start()
                more: dict[str, Any] = dict(max_tokens=600, ignore_eos=True) if turn == 2 else {}
                history += [session.chat(history, **more).message, *asked]
            found.append(session.samples())
        losing.join()
    assert len(killed) == 1, "premise: one worker had the turn"
    [whole], [cut] = found
    assert np.array_equal(whole.token_ids, cut.token_ids) and len(whole.turns) == 4
    assert np.array_equal(whole.logprobs.view(np.int32), cut.logprobs.view(np.int32))
