"""GRPO on an environment of verifiers: `python examples/verifiers_grpo.py ADDRESS URL [MODEL [STEPS]]`, on a CPU.

ADDRESS is a worker that serves MODEL, and URL is its front end (docs/verifiers.md). verifiers runs the episodes, and
its training client requests tokens over HTTP. The trainer takes token ids, mask and log-probs from the traces. Each
step prints the mean reward, the norm of the gradient, and the largest |ratio - 1| of its samples, which is 0.0.
"""

import asyncio
import os
import sys
from collections.abc import Iterable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # busy-waiting threads would slow down a worker on the same cores

import torch
import verifiers.v1 as vf
from openai import AsyncOpenAI
from renderers import DefaultRendererConfig
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult

from trueroll.kernels.training import align, token_log_probs
from trueroll.rollout import RolloutClient, WeightPublisher, derive_seed, resolve_model

__all__ = ["OneTurn", "Questions"]  # verifiers imports this module by its name and takes both classes from here
NAME = Path(__file__).stem
KEY = "TRUEROLL_HTTP_API_KEY"
"""The environment variable with the front end's key, if the front end has one."""
ANIMALS = ("whales", "owls", "ants", "frogs")
RUN_SEED, GROUP, TEMPERATURE, MAX_TOKENS = 1, 4, 1.0, 24


class Question(vf.Task[vf.TaskData]):
    """A question. The reward is the share of letters in the answer. Replace this reward with your own."""

    @vf.reward
    async def letters(self, trace: vf.Trace) -> float:
        text = "".join(message.content or "" for message in trace.assistant_messages)
        return sum(letter.isalpha() for letter in text) / max(len(text), 1)


class Questions(vf.Taskset[Question, vf.TasksetConfig]):
    def load(self) -> Iterable[Question]:
        return [Question(vf.TaskData(prompt=f"Where do {animal} live?")) for animal in ANIMALS]


class OneTurn(vf.Harness[vf.HarnessConfig]):
    """Sends the question in one request, in this process. verifiers also has harnesses for agents and tools."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> ProgramResult:
        messages = [message_to_wire(vf.UserMessage(content=data.prompt))]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return ProgramResult(0, "", "")


def make_environment() -> vf.SingleAgentEnv:
    seat = {"harness": {"id": NAME}, "runtime": {"type": "subprocess"}}
    return vf.SingleAgentEnv(vf.SingleAgentEnvConfig(taskset={"id": NAME}, agent=seat))


def context(model: str, url: str, folder: str, seed: int) -> vf.ModelContext:
    """Return the model, the client and the sampling parameters of one episode.

    The prompt is rendered by the chat template in `folder`. Each episode has its own seed. With one shared seed, all
    episodes of a group would be equal.
    """
    client = vf.TrainClientConfig(
        base_url=f"{url}/v1",
        api_key_var=KEY,
        renderer=DefaultRendererConfig(),
        renderer_model_name=folder,
    )
    sampling = vf.SamplingConfig(temperature=TEMPERATURE, max_tokens=MAX_TOKENS, seed=seed)
    return vf.ModelContext(model, client, sampling)


async def run_episodes(env: vf.SingleAgentEnv, url: str, folder: str, step: int) -> list[vf.Trace]:
    """Run a group of episodes for each task, all concurrently. Return the traces of the episodes, with the traces of a
    group next to each other.
    """
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=os.environ.get(KEY, "none")) as front:
        model = (await front.models.list()).data[0].id
    slots = [slot for task in env.taskset for slot in env.slots(task, GROUP)]
    seeds = [derive_seed(RUN_SEED, step * len(slots) + number) for number in range(len(slots))]
    runs = [env.run_slot(slot, context(model, url, folder, seed)) for slot, seed in zip(slots, seeds, strict=True)]
    episodes = await asyncio.gather(*runs)
    for episode in episodes:
        assert episode.ok, [*episode.errors, *(trace.errors for trace in episode.traces)]
    return [trace for episode in episodes for trace in episode.traces]


def padded(rows: list[list], dtype: torch.dtype) -> torch.Tensor:
    return pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True)


def loss_of(model: torch.nn.Module, traces: list[vf.Trace]) -> tuple[torch.Tensor, float]:
    """Return the loss and the largest |ratio - 1|. One branch is one training sample and one row of the batch."""
    rewards = torch.tensor([trace.reward for trace in traces]).view(-1, GROUP)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    branches = [branch for trace in traces for branch in trace.branches]
    assert len(branches) == len(traces), "an episode of one turn has one branch"
    ids = padded([branch.token_ids for branch in branches], torch.long)  # [B, T], as all tensors below
    attention = padded([[True] * len(branch.token_ids) for branch in branches], torch.bool)
    is_own = padded([branch.sampled_mask for branch in branches], torch.bool)
    sampled = padded([branch.logprobs for branch in branches], torch.float32)
    log_probs = token_log_probs(model, ids, attention, temperature=TEMPERATURE, completion_mask=is_own)
    ratios = (log_probs - sampled)[is_own].exp()  # exactly 1.0 for samples of the current weights
    each = advantages.repeat_interleave(is_own.sum(1))
    loss = -torch.minimum(ratios * each, ratios.clamp(0.8, 1.2) * each).mean()
    return loss, float((ratios.detach() - 1).abs().max())


async def train(address: str, url: str, folder: str, steps: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    align(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    env = make_environment()
    with RolloutClient(address) as client, WeightPublisher() as publisher:
        publisher.connect([address])
        served = client.health()
        dtype = getattr(torch, served.engine["dtype"])
        async with env.serving():
            for step in range(steps):
                publisher.push(model, served.weight_version + step + 1)
                traces = await run_episodes(env, url, folder, step)
                with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):  # the worker's dtype
                    loss, worst = loss_of(model, traces)
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                mean = sum(trace.reward for trace in traces) / len(traces)
                print(f"step {step}: reward {mean:.3f}, gradient norm {norm:.4f}, largest |ratio - 1| {worst}")


def main(address: str, url: str, model: str = "smollm2", steps: str = "3") -> None:
    asyncio.run(train(address, url, str(resolve_model(model)), int(steps)))


if __name__ == "__main__":
    main(*sys.argv[1:])
