"""GRPO with a tool: `python examples/agent_grpo.py --out FOLDER`. The example reuses the trainer, the worker and the
files of `grpo.py`.

SmolLM2-135M learns to call a calculator. Each conversation begins with a question, such as `What is 37 * 24?`. In each
turn the model either calls the calculator, as in `<calc>37 * 24</calc>`, or gives the final answer. The result of a
call becomes the user's next turn. All conversations of a step run concurrently, and no conversation waits for another.
The conversations about one question form a group.

Each conversation is a session. The agent sees messages only. The session keeps the token ids, and appends the sampled
tokens and the tokens of the calculator's result to them, so sampled text is never retokenized. The session's sample has
the ids, the log-probs and the mask of the whole conversation. The trainer computes the sample in one forward pass. The
loss covers only sampled tokens. The trainer's log-probs of all turns equal the worker's log-probs, bit for bit. Each
step prints, for each turn, how many prompt tokens came from the worker's prefix cache. Each session has its own seed,
so a run with the same seed gives the same metrics.
"""

from __future__ import annotations

import ast
import asyncio
import operator
import random
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from grpo import GROUP_SIZE, WORKER_TIMEOUT, Record, Rollouts, Sample, Trainer, relative

from trueroll.rollout import (
    Answer,
    AsyncRolloutClient,
    AsyncSession,
    SamplingParams,
    SessionSample,
    TextModel,
    derive_seed,
    resolve_model,
)

TURNS = 3
MAX_TOKENS = 20  # maximum number of tokens per turn
# The maximum length of an expression, in characters. Powers are not supported, so a value cannot have more digits than
# this maximum.
MAX_LENGTH = 64
CHECKPOINT_EVERY = 10
CALL_BEGINS, CALL_ENDS = "<calc>", "</calc>"
PARAMS = SamplingParams(max_tokens=MAX_TOKENS, stop=CALL_ENDS)
INSTRUCTION = "You compute with a calculator."
EXAMPLE = [("user", "What is 14 * 16?"), ("assistant", "<calc>14 * 16</calc>"), ("user", "224"), ("assistant", "224")]
OPERATORS: dict[type, Callable[..., Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str:
    """Evaluate an expression of numbers, + - * / and parentheses. Return the value, or a text that begins with
    `error:`.
    """
    if len(expression) > MAX_LENGTH:
        return "error: too long"
    if not re.fullmatch(r"[\d.+\-*/() ]+", expression, re.ASCII):
        return "error: not an expression"
    try:
        value = evaluate(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError):
        return "error: not an expression"
    is_short = value.denominator == 1 and abs(value) < 10**12
    return str(value) if is_short else f"{float(value):.6g}"


def evaluate(node: ast.expr) -> Fraction:
    """Return the value of a syntax tree.

    Raise ZeroDivisionError on division by zero. Raise ValueError for anything other than numbers and the four
    arithmetic operators.
    """
    match node:
        case ast.Constant(value=int() | float() as number):
            return Fraction(str(number))
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](evaluate(left), evaluate(right))
        case ast.UnaryOp(op, operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](evaluate(operand))
    raise ValueError(f"only numbers and + - * / are supported (got {ast.dump(node)})")


@dataclass(frozen=True)
class Task:
    """The messages of a question, the number that answers the question, and the seed of all conversations about the
    question.
    """

    messages: list[dict[str, Any]]
    number: int
    seed: int


@dataclass(frozen=True)
class Turn:
    """An answer of the policy. `result`: what the calculator returned; None for a final answer."""

    answer: Answer
    result: str | None


@dataclass(frozen=True)
class Conversation:
    """`sample`: the tokens of all turns, and the reward."""

    turns: list[Turn]
    sample: SessionSample


class Calculations:
    """The questions of each step."""

    def __init__(self, seed: int, per_step: int) -> None:
        self.seed, self.per_step = seed, per_step

    def of(self, step: int) -> list[Task]:
        of_step = derive_seed(self.seed, step)
        return [self._task(derive_seed(of_step, index)) for index in range(self.per_step)]

    def _task(self, seed: int) -> Task:
        noise = random.Random(seed)
        a, b, sign = noise.randint(11, 99), noise.randint(11, 99), noise.choice("+-*")
        said = [("system", INSTRUCTION), *EXAMPLE, ("user", f"What is {a} {sign} {b}?")]
        messages = [dict(role=role, content=content) for role, content in said]
        return Task(messages, int(calculate(f"{a} {sign} {b}")), seed)


def take_turn(answer: Answer) -> Turn:
    """Run the calculator if the answer is a call."""
    if answer.sample.stop_reason != CALL_ENDS:
        return Turn(answer, None)
    _, found, expression = answer.message["content"].partition(CALL_BEGINS)
    return Turn(answer, calculate(expression) if found else f"error: expected {CALL_BEGINS}")


def reward_of(turns: list[Turn], task: Task) -> float:
    return 0.2 * has_called(turns) + 0.8 * is_right(turns, task)


def has_called(turns: list[Turn]) -> bool:
    """Return whether the calculator computed a value."""
    return any(turn.result is not None and not turn.result.startswith("error") for turn in turns)


def is_right(turns: list[Turn], task: Task) -> bool:
    """Return whether there is a final answer that ends with the correct number."""
    last = turns[-1]
    return last.result is None and re.findall(r"-?\d+", last.answer.message["content"])[-1:] == [str(task.number)]


def training_samples(groups: list[list[Conversation]]) -> Iterator[Sample]:
    """Yield a training sample per conversation, with advantages relative to the group."""
    for group in groups:
        samples = [each.sample for each in group]
        rewards = [float(sample.reward or 0.0) for sample in samples]
        for sample, reward, advantage in zip(samples, rewards, relative(rewards), strict=True):
            is_own = torch.from_numpy(sample.mask).bool()
            log_probs, versions = (torch.from_numpy(each)[is_own] for each in (sample.logprobs, sample.versions))
            ids = torch.from_numpy(sample.token_ids).long()
            yield Sample(ids, is_own, log_probs, versions, reward, advantage)


class Conversations(Rollouts):
    """Multi-turn rollouts. All conversations of a step run concurrently."""

    max_model_len = 512

    def __init__(self, resources: ExitStack, folder: Path, trainer: Trainer, tasks: Any, texts: TextModel) -> None:
        super().__init__(resources, folder, trainer, tasks)
        self.texts = texts

    def _generate(self, step: int) -> list[list[Conversation]]:
        return asyncio.run(self._converse(self.tasks.of(step)))

    async def _converse(self, tasks: list[Task]) -> list[list[Conversation]]:
        async with AsyncRolloutClient(self.address, timeout=WORKER_TIMEOUT) as client:
            return await asyncio.gather(*(self._group(client, task) for task in tasks))

    async def _group(self, client: AsyncRolloutClient, task: Task) -> list[Conversation]:
        seeds = [derive_seed(task.seed, index) for index in range(GROUP_SIZE)]
        return await asyncio.gather(*(self._conversation(client, task, seed) for seed in seeds))

    async def _conversation(self, client: AsyncRolloutClient, task: Task, seed: int) -> Conversation:
        messages, turns = list(task.messages), list[Turn]()
        async with AsyncSession(client, self.texts, seed=seed, sampling=PARAMS) as session:
            while len(turns) < TURNS:
                turns.append(take_turn(await session.chat(messages)))
                if (result := turns[-1].result) is None:
                    break
                messages += [turns[-1].answer.message, dict(role="user", content=result)]
            session.reward(reward_of(turns, task))
            [sample] = session.samples()
        return Conversation(turns, sample)


def hits(conversations: list[Conversation]) -> str:
    """For each turn, return two sums over all conversations: the number of prompt tokens found in the worker's cache,
    and the number of all prompt tokens.
    """
    rows = []
    for number in range(TURNS):
        turns = [each.turns[number] for each in conversations if number < len(each.turns)]
        cached = sum(turn.answer.sample.num_cached_tokens for turn in turns)
        total = sum(len(turn.answer.prompt_token_ids) for turn in turns)
        rows.append(f"turn {number + 1} {cached:,} of {total:,}")
    return ", ".join(rows)


def train(record: Record, rollouts: Conversations, steps: int) -> None:
    for step in range(record.trainer.version, steps):
        groups = rollouts.finish(step)
        metrics = record.trainer.step(list(training_samples(groups)))
        rollouts.publish()
        conversations = [each for group in groups for each in group]
        shares = dict(called=sum(has_called(each.turns) for each in conversations) / len(conversations))
        shares["turns"] = sum(len(each.turns) for each in conversations) / len(conversations)
        record.add(dict(step=step) | metrics | shares)
        print("    called {called:.0%}, {turns:.2f} turns; prompt tokens from the cache:".format(**shares), end=" ")
        print(hits(conversations))
        if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == steps:
            record.save()


def main(
    out: Annotated[Path, typer.Option(help="Folder for metrics.csv, plot.png and the last checkpoint (1.6 GB).")],
    steps: Annotated[int, typer.Option(min=1, help="Training steps of the whole run.")] = 30,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the tasks and the samples.")] = 1,
    prompts: Annotated[int, typer.Option(min=1, help="Questions per step, with 8 conversations each.")] = 4,
    model: Annotated[str, typer.Option(help="A model folder, hf://ORG/NAME, or smollm2.")] = "smollm2",
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint.")] = False,
) -> None:
    """Train a small language model to use a calculator."""
    folder = resolve_model(model)
    trainer, tasks = Trainer(folder, is_aligned=True, staleness=0), Calculations(seed, prompts)
    record = Record(out, trainer, dict(seed=seed, prompts=prompts, model=model))
    record.begin(resume)
    with closing(TextModel(str(folder))) as texts, ExitStack() as resources:
        train(record, Conversations(resources, folder, trainer, tasks, texts), steps)
    record.draw()


if __name__ == "__main__":
    typer.run(main)
