"""GRPO with a tool: `python examples/agent_grpo.py --out FOLDER`. The example reuses the trainer, the worker and the
files of `grpo.py`.

SmolLM2-135M learns to call a calculator. A conversation begins with a question, such as `What is 37 * 24?`. In each
turn the model either calls the calculator, as in `<calc>37 * 24</calc>`, or gives the final answer. The result of a
call becomes the user's next turn. All conversations of a step run concurrently, and no conversation waits for another.
The conversations about one question form a group.

A conversation is one append-only sequence of token ids. The prompt of a turn is the prompt of the previous turn,
followed by the tokens sampled in that turn and the tokens of the calculator's result. Sampled text is never
retokenized. The trainer computes each whole conversation in one forward pass. The loss covers only sampled tokens. The
trainer's log-probs of all turns equal the worker's log-probs, bit for bit. Each step prints, for each turn, how many
prompt tokens came from the worker's prefix cache. Each turn has its own seed, so a run with the same seed gives the
same metrics.
"""

from __future__ import annotations

import ast
import asyncio
import operator
import random
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from grpo import GROUP_SIZE, WORKER_TIMEOUT, Record, Rollouts, Sample, Trainer, relative, versions_of
from transformers import AutoTokenizer

from trueroll.rollout import AsyncRolloutClient, SampleOutput, SamplingParams, derive_seed, resolve_model

TURNS = 3
MAX_TOKENS = 20  # per turn
# The maximum length of an expression, in characters. Powers are not supported, so a value cannot have more digits than
# this maximum.
MAX_LENGTH = 64
CHECKPOINT_EVERY = 10
CALL_ENDS = "</calc>"
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
    """Evaluate an expression of numbers, + - * / and parentheses. Return the value, or a text that begins with `error:
    `.
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
    """A question as token ids, its answer, and the seed of all random draws in the conversations about the question."""

    prompt: list[int]
    answer: int
    seed: int


@dataclass(frozen=True)
class Turn:
    """One turn of the policy: the output sampled after `prompt_len` tokens, the output's text, and the calculator's
    `result` (None if the turn has no call).
    """

    prompt_len: int
    output: SampleOutput
    text: str
    result: str | None


class Conversation:
    """`ids`: all tokens so far. `is_own`: for each token, True if the policy sampled it. `ids` and `is_own` are
    append-only.
    """

    def __init__(self, prompt: list[int]) -> None:
        self.turns: list[Turn] = []
        self.ids, self.is_own = list(prompt), [False] * len(prompt)

    def add(self, turn: Turn, seen: list[int]) -> None:
        """Append a turn and the tokens `seen`. `seen`: the tokens that show the turn's result to the policy."""
        self.turns.append(turn)
        self.ids += turn.output.token_ids + seen
        self.is_own += [True] * len(turn.output.token_ids) + [False] * len(seen)

    def sample(self, reward: float, advantage: float) -> Sample:
        log_probs = torch.cat([torch.tensor(turn.output.logprobs) for turn in self.turns])
        versions = torch.cat([versions_of(turn.output) for turn in self.turns])
        return Sample(torch.tensor(self.ids), torch.tensor(self.is_own), log_probs, versions, reward, advantage)


class Calculations:
    """The questions of each step, the calculator's replies, and the rewards of conversations."""

    def __init__(self, folder: Path, seed: int, per_step: int) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        self.seed, self.per_step = seed, per_step
        self.params = SamplingParams(max_tokens=MAX_TOKENS, stop=CALL_ENDS, stop_token_ids=self.between("")[:1])

    def of(self, step: int) -> list[Task]:
        of_step = derive_seed(self.seed, step)
        return [self._task(derive_seed(of_step, index)) for index in range(self.per_step)]

    def _task(self, seed: int) -> Task:
        noise = random.Random(seed)
        a, b, sign = noise.randint(11, 99), noise.randint(11, 99), noise.choice("+-*")
        said = [("system", INSTRUCTION), *EXAMPLE, ("user", f"What is {a} {sign} {b}?")]
        chat = [{"role": role, "content": content} for role, content in said]
        prompt = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        return Task(prompt, int(calculate(f"{a} {sign} {b}")), seed)

    def between(self, result: str) -> list[int]:
        """Return the tokens between a call and the next turn. The first token of the result ends the policy's turn."""
        said = [("user", "?"), ("assistant", "CALL"), ("user", result)]
        chat = [{"role": role, "content": content} for role, content in said]
        text = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return self.tokenizer.encode(text.rpartition("CALL")[2], add_special_tokens=False)

    def turn(self, prompt_len: int, output: SampleOutput) -> Turn:
        text = self.tokenizer.decode(output.token_ids, skip_special_tokens=True)
        call = re.search(r"<calc>(.*?)</calc>", text, re.DOTALL)
        result = calculate(call[1]) if call else "error: expected <calc>"
        return Turn(prompt_len, output, text, result if output.stop_reason == CALL_ENDS else None)

    def score(self, step: int, groups: list[list[Conversation]]) -> Iterator[Sample]:
        """Yield a training sample per conversation, with rewards from 0 to 1 and advantages relative to the group."""
        for task, group in zip(self.of(step), groups, strict=True):
            rewards = [0.2 * has_called(each) + 0.8 * is_right(each, task) for each in group]
            for each, reward, advantage in zip(group, rewards, relative(rewards), strict=True):
                yield each.sample(reward, advantage)


def has_called(conversation: Conversation) -> bool:
    """Return whether the calculator computed a value in this conversation."""
    results = [turn.result for turn in conversation.turns if turn.result is not None]
    return any(not result.startswith("error") for result in results)


def is_right(conversation: Conversation, task: Task) -> bool:
    """Return whether the conversation has a final answer that ends with the correct number."""
    last = conversation.turns[-1]
    return last.result is None and re.findall(r"-?\d+", last.text)[-1:] == [str(task.answer)]


class Conversations(Rollouts):
    """Multi-turn rollouts. All conversations of a step run concurrently."""

    max_model_len = 512

    def _generate(self, step: int) -> list[list[Conversation]]:
        return asyncio.run(self._converse(self.tasks.of(step)))

    async def _converse(self, tasks: list[Task]) -> list[list[Conversation]]:
        async with AsyncRolloutClient(self.address, timeout=WORKER_TIMEOUT) as client:
            return await asyncio.gather(*(self._group(client, task) for task in tasks))

    async def _group(self, client: AsyncRolloutClient, task: Task) -> list[Conversation]:
        seeds = [derive_seed(task.seed, index) for index in range(GROUP_SIZE)]
        return await asyncio.gather(*(self._conversation(client, task.prompt, seed) for seed in seeds))

    async def _conversation(self, client: AsyncRolloutClient, prompt: list[int], seed: int) -> Conversation:
        conversation = Conversation(prompt)
        for number in range(TURNS):
            [group] = await client.generate([conversation.ids], self.tasks.params, seed=derive_seed(seed, number))
            turn = self.tasks.turn(len(conversation.ids), group.samples[0])
            is_last = turn.result is None or number + 1 == TURNS
            conversation.add(turn, [] if is_last else self.tasks.between(turn.result))
            if is_last:
                break
        return conversation


def hits(conversations: list[Conversation]) -> str:
    """For each turn, return two sums over all conversations: the number of prompt tokens found in the worker's cache,
    and the number of all prompt tokens.
    """
    rows = []
    for number in range(TURNS):
        turns = [each.turns[number] for each in conversations if number < len(each.turns)]
        cached, total = sum(turn.output.num_cached_tokens for turn in turns), sum(turn.prompt_len for turn in turns)
        rows.append(f"turn {number + 1} {cached:,} of {total:,}")
    return ", ".join(rows)


def train(record: Record, tasks: Calculations, rollouts: Conversations, steps: int) -> None:
    for step in range(record.trainer.version, steps):
        groups = rollouts.finish(step)
        metrics = record.trainer.step(list(tasks.score(step, groups)))
        rollouts.publish()
        conversations = [each for group in groups for each in group]
        shares = dict(called=sum(map(has_called, conversations)) / len(conversations))
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
    trainer, tasks = Trainer(folder, is_aligned=True, staleness=0), Calculations(folder, seed, prompts)
    record = Record(out, trainer, dict(seed=seed, prompts=prompts, model=model))
    record.begin(resume)
    with ExitStack() as resources:
        train(record, tasks, Conversations(resources, folder, trainer, tasks), steps)
    record.draw()


if __name__ == "__main__":
    typer.run(main)
