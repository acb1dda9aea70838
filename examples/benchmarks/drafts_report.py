"""Measure the speedup from drafts: `python examples/benchmarks/drafts_report.py [MODEL [DTYPE]]`.

An engine with drafts (`speculative="ngram"`) and an engine without drafts take turns and generate the same samples.
Every run with drafts must have the same tokens and log-prob bits as the run without drafts. The first table shows the
speed of the engine with drafts as a multiple of the speed without drafts: the median and the range of several pairs of
runs. "again" means that the same requests with the same seeds were served before, and that a commit since then changed
the weights by about 1e-5. DTYPE is the dtype of the weights, by default the dtype of the checkpoint. In bfloat16, even
such a small change alters roundings in every layer, and samples soon differ from the earlier ones. In float32, most
samples stay the same.

The column "limit of again" shows the speed that drafts from the earlier samples could reach at best: drafted rows would
take no time, and every token before the first difference from the earlier sample would be accepted. From the first
difference on, each token takes a step of its own. Therefore the sample with the earliest difference determines how many
steps its group takes. Repeats in a sample's own text can raise the speed above this limit.

The second table shows that the drafter's index stays within its memory budget. The second table also shows that the
time to index a hostile prompt (a single token, repeated a million times) is proportional to the length of the prompt.
Run the report on an otherwise idle machine.
"""

from __future__ import annotations

import statistics
import sys
import time
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import cast

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoTokenizer

from trueroll.engine.cache.prefix_cache import Chain
from trueroll.engine.config import Dtype, EngineConfig
from trueroll.engine.drafting.repeats import RepeatsDrafter
from trueroll.engine.engine import Engine
from trueroll.engine.request import GenerateRequest, SampleOutput, SamplingParams
from trueroll.engine.running.loading import LoadedModel, load_model
from trueroll.engine.scheduling.sequence import Generation, Sequence
from trueroll.rollout import resolve_model

PAIRS, NEW_TOKENS, LANES = 5, 160, 8
Bits = list[tuple[str, int, tuple[int, ...], bytes]]
"""For each sample: the request id, the index of the sample in the group, the token ids and the bytes of the log-probs.
"""
STEP = 1e-5
"""The standard deviation of the change of each weight in a small step of training."""
CODE = """\
def add(a, b):
    return a + b

def sub(a, b):
    return a - b

class Stack:
    def __init__(self):
        self.items = []
    def push(self, x):
        self.items.append(x)
    def pop(self):
        return self.items.pop()
"""
PROMPTS = {
    "code": f"Repeat this code exactly, without changes:\n{CODE}",
    "json": 'Continue this JSON list with ten more persons: [{"name": "Ann", "age": 31, "city": "Paris"}, '
    '{"name": "Bob", "age": 25, "city": "Rome"},',
    "chat": "Tell me a story about a dog that finds a ball.",
}


@dataclass(frozen=True)
class Work:
    """`n` samples of each prompt. `is_repeated`: whether the same requests were served before (rows with "again").

    `is_queue`: whether all requests are submitted at once. In a queue, the engine starts a waiting sample whenever one
    of its `LANES` running samples ends. Without a queue, a request is submitted after the previous request has ended.
    """

    prompts: tuple[str, ...]
    n: int
    temperature: float
    is_repeated: bool = False
    is_queue: bool = False

    @property
    def name(self) -> str:
        what = " and ".join(self.prompts) + ", again" * self.is_repeated + ", as a queue" * self.is_queue
        return f"{what}, {self.n} sample{'s' * (self.n > 1)}, temperature {self.temperature:g}"


WORKS = (
    Work(("chat",), 8, 1.0),
    Work(tuple(PROMPTS), 8, 1.0, is_repeated=True),
    Work(tuple(PROMPTS), 8, 1.0, is_repeated=True, is_queue=True),
    Work(("chat",), 1, 0.0),
    Work(("code",), 1, 0.0),
    Work(("json",), 1, 0.0),
    Work(tuple(PROMPTS), 1, 1.0, is_repeated=True),
)


class Side:
    """An engine, with drafts or without."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel) -> None:
        self.engine = Engine(config, loaded)

    def run(self, prompts: list[np.ndarray], work: Work, salt: str) -> tuple[float, Bits]:
        """Return the seconds and the bits of all samples. The drafter ignores earlier requests with a different cache
        salt.
        """
        params = SamplingParams(
            n=work.n, temperature=work.temperature, max_tokens=NEW_TOKENS, seed=1, ignore_eos=True, cache_salt=salt
        )
        self.engine.invalidate_prefix_cache()
        samples, start = list[SampleOutput](), time.perf_counter()
        for i, prompt in enumerate(prompts):
            self.engine.add(GenerateRequest(str(i), prompt, params))
            while self.engine.has_unfinished and (i == len(prompts) - 1 or not work.is_queue):
                samples += [output for output in self.engine.step() if isinstance(output, SampleOutput)]
        seconds = time.perf_counter() - start
        found = [
            (s.request_id, s.index, tuple(s.token_ids), s.logprobs.tobytes()) for s in samples if s.logprobs is not None
        ]
        return seconds, sorted(found)

    def commit(self, tensors: Mapping[str, Tensor]) -> None:
        staging = self.engine.weights.new_staging(in_place=False)
        for name, tensor in tensors.items():
            staging.rows(name, 0, len(tensor)).copy_(tensor)
        self.engine.commit_weights(staging, self.engine.weight_version + 1, "recompute")


class Report:
    """Two engines that share one model, and the model's weights before and after a small training step."""

    def __init__(self, model: str, dtype: str) -> None:
        folder = resolve_model(model)
        config = EngineConfig(model=str(folder), dtype=cast(Dtype, dtype), num_blocks=2048, max_num_seqs=LANES)
        loaded = load_model(config)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.dtype = loaded.dtype_name
        self.plain = Side(config, loaded)
        self._tokens_of_step = 1 + config.num_speculative_tokens
        self.drafts = Side(config.model_copy(update={"speculative": "ngram"}), loaded)
        self.before = {name: weight.to_dense().clone() for name, weight in loaded.weights.tensors.items()}
        noise = torch.Generator().manual_seed(0)
        self.after = {
            name: (tensor.float() + STEP * torch.randn(tensor.shape, generator=noise)).to(tensor.dtype)
            for name, tensor in self.before.items()
        }

    def ids_of(self, text: str) -> np.ndarray:
        """Return the tokens of a conversation that begins with the message `text`."""
        message = [{"role": "user", "content": text}]
        ids = self.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        return np.array(ids, np.int32)

    @cached_property
    def step_seconds(self) -> list[float]:
        """The time for a step without drafts, by the number of samples, from 1 to `LANES`."""
        prompt, found = [self.ids_of(PROMPTS["chat"])], list[list[float]]()
        for pair in range(PAIRS):
            works = [Work(("chat",), n, 1.0) for n in range(1, LANES + 1)]
            found.append([self.plain.run(prompt, work, f"steps {pair}")[0] / NEW_TOKENS for work in works])
        return np.median(found, axis=0).tolist()

    def limit(self, earlier: Bits, later: Bits) -> float:
        """Return the highest speed that drafts from the earlier samples of the same groups could reach, as a multiple
        of the speed without drafts.
        """
        plain = best = 0.0
        for _, group in groupby(zip(earlier, later, strict=True), key=lambda pair: pair[0][0]):
            steps = list[int]()
            for (*_, old, _), (*_, new, _) in group:
                equal = next((i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b), NEW_TOKENS)
                steps.append(-(-equal // self._tokens_of_step) + NEW_TOKENS - equal)
            plain += NEW_TOKENS * self.step_seconds[len(steps) - 1]
            running = [sum(count > step for count in steps) for step in range(max(steps))]
            best += sum(self.step_seconds[count - 1] for count in running)
        return plain / best

    def measure(self, work: Work) -> tuple[list[float], float, float, float | None]:
        """Return the speeds with drafts as multiples of the speeds without drafts, the mean number of tokens per draft,
        the share of drafted tokens that were accepted, and for repeated groups the limit.
        """
        prompts = [self.ids_of(PROMPTS[name]) for name in work.prompts]
        speeds, drafts, drafted, accepted, limit = list[float](), 0, 0, 0, None
        for number in range(1 + PAIRS):
            salt = f"{work.name} {number}"
            earlier = self.drafts.run(prompts, work, salt)[1] if work.is_repeated else None
            if earlier is not None:
                self.plain.commit(self.after)
            before = self.drafts.engine.stats().drafts[0]
            sides = [self.plain, self.drafts][:: 1 if number % 2 else -1]
            runs = {side: side.run(prompts, work, salt) for side in sides}
            (plain, bits), (quick, found) = runs[self.plain], runs[self.drafts]
            assert found == bits, f"{work.name}: drafts changed bits"
            if earlier is not None:
                self.plain.commit(self.before)
                limit = None if work.is_queue else self.limit(earlier, found)
            if number > 0:  # the first pair of runs is a warm-up
                now = self.drafts.engine.stats().drafts[0]
                speeds.append(plain / quick)
                drafts += now.drafts - before.drafts
                drafted += now.num_drafted - before.num_drafted
                accepted += now.num_accepted - before.num_accepted
        return speeds, 1 + accepted / max(drafts, 1), accepted / max(drafted, 1), limit


def index_rows() -> Iterator[tuple[str, str]]:
    """Yield the rows of the table about the drafter's index: the name and the result of a measurement."""
    drafter, most, start = RepeatsDrafter(), 0, time.perf_counter()
    rng = np.random.default_rng(0)
    for i in range(100_000):
        prompt, sample = rng.integers(0, 50_000, 64).tolist(), rng.integers(0, 50_000, 32).tolist()
        drafter.end(sequence_of([i, *prompt], sample), i)
        most = max(most, drafter.num_bytes)
    seconds = time.perf_counter() - start
    yield "largest index over 100,000 prompts, MiB", f"{most / 2**20:.1f}"
    yield "us per prompt of 65 tokens and sample of 32", f"{seconds * 10:.0f}"
    for count in (250_000, 500_000, 1_000_000):
        hostile, start = sequence_of([5] * count, [5, 5, 5]), time.perf_counter()
        RepeatsDrafter(budget=2**40).expect(hostile, 0, 4)
        yield f"ms to index one token {count:,} times, and to draft", f"{(time.perf_counter() - start) * 1e3:.0f}"


def sequence_of(prompt: list[int], sample: list[int]) -> Sequence:
    return Sequence((0, 0), array("i", prompt + sample), len(prompt), Chain(0, b"", ()), Generation([]))


@torch.inference_mode()
def main() -> None:
    console = Console(width=120)
    defaults = ("smollm2", "auto")
    report = Report(*sys.argv[1:], *defaults[len(sys.argv) - 1 :])
    columns = "samples", "speed", "slowest to fastest", "limit of again", "tokens per draft", "accepted"
    table = Table(*columns, title=f"Drafts against none, {report.dtype}")
    for work in WORKS:
        speeds, length, share, limit = report.measure(work)
        lowest, *_, highest = sorted(speeds)
        spread = f"{lowest:.2f} to {highest:.2f}"
        at_most = "" if limit is None else f"{limit:.2f}"
        table.add_row(work.name, f"{statistics.median(speeds):.2f}", spread, at_most, f"{length:.2f}", f"{share:.0%}")
    console.print(table)
    index = Table("the index of the drafter", "")
    for row in index_rows():
        index.add_row(*row)
    console.print(index)


if __name__ == "__main__":
    main()
