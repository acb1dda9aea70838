"""`examples/agent_grpo.py` on a tiny model: conversations are append-only, turns hit the prefix cache, and the
trainer's log-probs match the worker's.
"""

from __future__ import annotations

import csv
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_models import give_texts, prefer
from transformers import AutoTokenizer

from tiny import make_tiny_model
from trueroll.rollout import AsyncRolloutClient, Group, RolloutClient, WorkerProcess, launch_worker

EXAMPLES = Path(__file__).parents[2] / "examples"
SETTINGS: dict[str, Any] = dict(dtype="bfloat16", max_model_len=512)
STEPS = 3
CALL, GARBAGE, END_OF_TURN = 300, 301, 2
SAID = {CALL: "<calc>1+1</calc>", GARBAGE: "<calc>1/0</calc>"}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that prefers three tokens: a call, a call that cannot be computed, and the end of a turn."""
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("models") / "agent", dtype="bfloat16")
    prefer(folder, [CALL, GARBAGE, END_OF_TURN], logit=8.0)
    give_texts(folder, SAID)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(END_OF_TURN) == "</s>"
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def worker(model: Path, forked_workers: None) -> Iterator[WorkerProcess]:
    with launch_worker(str(model), **SETTINGS) as worker:
        yield worker


def load(name: str) -> Any:
    """Load an example as a module under its own name, because another example imports the module by that name."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Example:
    """The example with a running worker.

    `steps`: the conversations of each step since the last run began. `gradients`: for each micro-batch, the log-probs
    of all tokens with their gradients, and the mask of sampled tokens.
    """

    def __init__(self, model: Path, worker: WorkerProcess) -> None:
        def lend(folder: str, **settings: Any) -> AbstractContextManager[WorkerProcess]:
            assert (folder, settings) == (str(model), SETTINGS)
            return nullcontext(worker)

        self.model, self.grpo = model, load("grpo")
        self.token_log_probs = self.grpo.token_log_probs
        self.grpo.launch_worker, self.grpo.token_log_probs = lend, self.record
        self.agent = load("agent_grpo")
        generate = self.agent.Conversations._generate
        self.agent.Conversations._generate = lambda rollouts, step: self.keep(generate(rollouts, step))

    def keep(self, groups: list[Any]) -> list[Any]:
        self.steps.append([conversation for group in groups for conversation in group])
        return groups

    def record(self, *args: Any, completion_mask: torch.Tensor, **drawn: Any) -> torch.Tensor:
        log_probs = self.token_log_probs(*args, **drawn)
        log_probs.retain_grad()
        self.gradients.append((log_probs, completion_mask))
        return log_probs

    def run(self, folder: Path, *, steps: int = STEPS, resume: bool = False) -> list[dict[str, str]]:
        self.steps: list[Any] = []
        self.gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.agent.main(folder, model=str(self.model), steps=steps, seed=1, prompts=2, resume=resume)
        with (folder / "metrics.csv").open(newline="") as file:
            return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def example(model: Path, worker: WorkerProcess) -> Example:
    return Example(model, worker)


def test_turns_hit_the_cache_and_train_without_a_mismatch(
    example: Example, worker: WorkerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = example.run(tmp_path / "run")
    assert [row["mismatch"] for row in rows] == ["0.0"] * STEPS
    assert all(float(row["grad_norm"]) > 0.0 for row in rows), "premise: it trains"
    assert [row["oldest_version"] for row in rows] == [str(step + 1) for step in range(STEPS)]
    check_hits(example.steps, worker)
    assert capsys.readouterr().out.count("prompt tokens from the cache: turn 1 ") == STEPS
    check_gradients(example)
    example.run(tmp_path / "again", steps=1)
    example.run(tmp_path / "again", resume=True)
    first, second = ((tmp_path / name / "metrics.csv").read_bytes() for name in ("run", "again"))
    assert first == second


def check_hits(steps: list[Any], worker: WorkerProcess) -> None:
    """Each turn reuses all whole blocks of the previous turn. The last token of a turn was never an input, so it is not
    cached.
    """
    with RolloutClient(worker.address) as client:
        engine = client.health().engine
        assert engine is not None
        block_size = engine["block_size"]
    for conversations in steps:
        lengths = [len(each.turns) for each in conversations]
        assert max(lengths) > 1, "premise: some have a second turn"
        for each in conversations:
            check_conversation(each)
            for before, turn in zip(each.sample.turns, each.turns[1:], strict=False):
                assert turn.answer.sample.num_cached_tokens >= (before.end - 1) // block_size * block_size > 0


def check_conversation(conversation: Any) -> None:
    """The sample trains exactly the sampled tokens. All other tokens come from the environment."""
    turns, sample = conversation.turns, conversation.sample
    ids, is_own = sample.token_ids.tolist(), sample.mask == 1
    assert sample.token_ids[is_own].tolist() == [each for turn in turns for each in turn.answer.sample.token_ids]
    for turn, place in zip(turns, sample.turns, strict=True):
        assert ids[: place.start] == turn.answer.prompt_token_ids and is_own[place.start : place.end].all()
        called = {SAID[CALL]: "2", SAID[GARBAGE]: "error: division by zero"}
        text = turn.answer.message["content"] + "</calc>" * (turn.answer.sample.stop_reason == "</calc>")
        assert turn.result == next((called[call] for call in called if text.endswith(call)), None)
    heard = [turn for turn in turns[:2] if turn.result is not None]
    assert (~is_own[sample.turns[0].start :]).sum() >= 10 * len(heard)


def check_gradients(example: Example) -> None:
    """The loss has no gradient for the log-probs of tokens that the policy did not sample, such as the calculator's."""
    assert len(example.gradients) == STEPS, "premise: one micro-batch each"
    for log_probs, is_own in example.gradients:
        assert log_probs.grad is not None and (log_probs.grad[~is_own] == 0.0).all()
        assert (log_probs[:, 1:][~is_own[:, 1:]] != 0.0).any(), "premise: the log-probs of the others were computed"
        trained = log_probs.grad[is_own] != 0.0
        assert trained.any()


def test_a_killed_worker_changes_nothing(example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker is killed during a step: 16 conversations have begun, and some have requested another turn."""
    workers, prompts = [], []
    generate = AsyncRolloutClient.generate

    def launch(*args: Any, **settings: Any) -> WorkerProcess:
        workers.append(launch_worker(*args, **settings))
        return workers[-1]

    async def kill_once(self: AsyncRolloutClient, asked: list[list[int]], *args: Any, **settings: Any) -> list[Group]:
        prompts.extend(asked)
        if len(prompts) == 20:
            os.kill(workers[-1].pid, signal.SIGKILL)
        return await generate(self, asked, *args, **settings)

    example.run(tmp_path / "undisturbed", steps=1)
    monkeypatch.setattr(example.grpo, "launch_worker", launch)
    monkeypatch.setattr(example.agent, "WORKER_TIMEOUT", 5.0)
    monkeypatch.setattr(AsyncRolloutClient, "generate", kill_once)
    example.run(tmp_path / "killed", steps=1)
    assert len(workers) == 2 and len(prompts) > 20, "premise: the worker was replaced"
    undisturbed, killed = ((tmp_path / name / "metrics.csv").read_bytes() for name in ("undisturbed", "killed"))
    assert killed == undisturbed


def test_the_calculator_computes_or_reports_an_error(example: Example) -> None:
    calculate = example.agent.calculate
    good = {"37 * 24": "888", "-(1 + 2) * 3": "-9", "1/3": "0.333333", "7/2": "3.5", "0.1 + 0.2": "0.3", " 6/3 ": "2"}
    good |= {"*".join(["9" * 12] * 4): "1e+48"}
    assert {each: calculate(each) for each in good} == good
    not_one = [
        "",
        " ",
        "9**9**9",
        "9//2",
        "1 2",
        "(1",
        "1(2)",
        "1..2",
        "()",
        "1, 2",
        "x",
        "__import__('os')",
        "1_0",
        "٣+1",
    ]
    not_one += ["1e999", "0x1F", "True", "1\n+1", "\0", "." * 3, "(" * 40 + "1" + ")" * 20, "007"]
    assert {calculate(each) for each in not_one} == {"error: not an expression"}
    assert calculate("1/(1-1)") == "error: division by zero"
    assert calculate("9" * 65) == calculate("(" * 10**6) == "error: too long"
