"""Compare trueroll with transformers on several families: `python examples/benchmarks/families_report.py [FAMILY ...]`.

For each family, the report makes a model with random weights and few layers. Heads, states and latent rows have the
sizes of published models. trueroll and transformers load the same files, use the same dtype and one thread, and run in
turn in one process:

- prompts: one prompt of 2,048 tokens
- decodes: decode steps of eight sequences with 2,048 tokens of context each. In trueroll, the sequences have different
  prompts and share no memory. In transformers, the sequences start as copies of one prompt's cache.

For transformers, the report measures the forward pass and the choice of the largest logit, not all of `generate`.
transformers uses its default attention, its default experts and its own cache. On a CPU, transformers computes state
spaces with torch's ops. The first run of each system is a warm-up. The table, in Markdown, shows median rates in tokens
per second of CPU time, and medians of the ratios of consecutive runs. The report fails if trueroll and transformers
disagree on the log-prob of the most probable token after the prompt.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import transformers
import typer
from torch import Tensor

from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.request import GenerateRequest, SampleOutput, SamplingParams

SIZES: dict[str, Any] = dict(
    vocab_size=8192,
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=2,
    num_attention_heads=16,
    num_key_value_heads=4,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
EXPERTS: dict[str, Any] = dict(
    n_routed_experts=32,
    num_experts_per_tok=4,
    moe_intermediate_size=512,
    n_shared_experts=1,
    norm_topk_prob=True,
    routed_scaling_factor=1.8,
    first_k_dense_replace=1,
)
LATENT = EXPERTS | dict(
    num_key_value_heads=16,
    q_lora_rank=512,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)
MAMBA: dict[str, Any] = dict(mamba_n_heads=32, mamba_d_head=64, mamba_n_groups=1, mamba_d_state=128)
STATE, FULL, MOE = "linear_attention", "full_attention", "moe"
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek-V3": ("DeepseekV3", LATENT | dict(n_group=4, topk_group=2)),
    "GLM-4.7-Flash": (
        "Glm4MoeLite",
        LATENT | dict(num_attention_heads=20, num_key_value_heads=20, qk_nope_head_dim=192, v_head_dim=256),
    ),
    "GLM-4.5": ("Glm4Moe", EXPERTS | dict(head_dim=128, use_qk_norm=True, n_group=1, topk_group=1)),
    "Bamba": ("Bamba", MAMBA | dict(num_hidden_layers=3, attn_layer_indices=[2])),
    "Granite 4": (
        "GraniteMoeHybrid",
        MAMBA
        | dict(
            num_hidden_layers=3,
            layer_types=[STATE, STATE, FULL],
            num_local_experts=32,
            num_experts_per_tok=4,
            intermediate_size=512,
            shared_intermediate_size=1024,
            embedding_multiplier=12.0,
            attention_multiplier=0.015625,
            residual_multiplier=0.22,
            logits_scaling=8.0,
        ),
    ),
    "Nemotron-H": (
        "NemotronH",
        EXPERTS
        | dict(
            num_hidden_layers=5,
            layers_block_type=[STATE, MOE, STATE, MOE, FULL],
            head_dim=128,
            mamba_num_heads=32,
            mamba_head_dim=64,
            n_groups=8,
            ssm_state_size=128,
            moe_shared_expert_intermediate_size=1024,
            n_group=1,
            topk_group=1,
        ),
    ),
}
PROMPT, SEQUENCES, STEPS = 2048, 8, 8
"""Three numbers: tokens in a prompt, decoding sequences, and steps of trueroll in one timed run of decode steps. A
timed run of transformers has one step.
"""
MOST_APART = 0.1
"""The largest allowed difference between the two log-probs, in nats."""


@dataclass
class Rates:
    """Tokens per second of CPU time, one value for each run."""

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    def run(self, ours: Callable[[], object], our_tokens: int, theirs: Callable[[], object], their_tokens: int) -> None:
        self.ours.append(our_tokens / seconds_of(ours))
        self.theirs.append(their_tokens / seconds_of(theirs))

    @property
    def cells(self) -> str:
        """The cells of the table: two rates and the median ratio."""
        ratio = median(a / b for a, b in zip(self.ours, self.theirs, strict=True))
        return f"{median(self.ours):,.0f} | {median(self.theirs):,.1f} | {ratio:.1f}"


def seconds_of(run: Callable[[], object]) -> float:
    """Return the CPU time of `run`. With one thread, other work on the machine has little effect on the CPU time."""
    start = time.process_time()
    run()
    return time.process_time() - start


def save_model(name: str, folder: Path, dtype: torch.dtype, **changes: Any) -> None:
    """Save a model of a family with random weights. `changes`: fields of the configuration that differ from the
    family's defaults in this report.
    """
    architecture, sizes = FAMILIES[name]
    config = getattr(transformers, f"{architecture}Config")(**(SIZES | sizes | changes))
    torch.manual_seed(0)
    model: Any = getattr(transformers, f"{architecture}ForCausalLM")(config)
    model.to(dtype).save_pretrained(folder)


class Ours:
    """trueroll's engine, without a prefix cache."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.engine = Engine(EngineConfig(model=str(folder), dtype=dtype, enable_prefix_caching=False, max_num_seqs=8))
        self.names = map(str, count())

    def add(self, prompt: Tensor, max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0, ignore_eos=True)
        self.engine.add(GenerateRequest(next(self.names), prompt.numpy(), params))

    def compute(self, prompt: Tensor) -> float:
        """Compute a prompt. Return the log-prob of the most probable next token."""
        self.add(prompt, 1)
        outputs = []
        while self.engine.has_unfinished:
            outputs += self.engine.step()
        [output] = outputs
        assert isinstance(output, SampleOutput) and output.logprobs is not None
        return float(output.logprobs[0])

    def start(self, prompts: Tensor) -> None:
        """Compute the prompts of sequences, so that the following steps decode."""
        done = self.engine.stats().computed_prompt_tokens + prompts.numel()
        for prompt in prompts:
            self.add(prompt, 2 * PROMPT - prompts.shape[1])
        while self.engine.stats().computed_prompt_tokens < done:
            self.engine.step()

    def decode(self) -> None:
        for _ in range(STEPS):
            self.engine.step()


class Theirs:
    """transformers' model, with its own cache."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        kind = getattr(transformers, transformers.AutoConfig.from_pretrained(folder).architectures[0])
        self.model: Any = kind.from_pretrained(folder, dtype=dtype).eval()
        self.cache: Any = None
        self.last, self.context = torch.zeros(0), 0

    def forward(self, ids: Tensor) -> Tensor:
        """Compute tokens [sequences, tokens] that follow the cached tokens. Return the log-probs of the next tokens."""
        positions = torch.arange(self.context, self.context + ids.shape[1])[None].expand(len(ids), -1)
        with torch.inference_mode():
            out = self.model(ids, past_key_values=self.cache, position_ids=positions, use_cache=True, logits_to_keep=1)
            self.cache, self.context, self.last = out.past_key_values, positions.shape[1] + self.context, ids
            log_probs, self.last = out.logits[:, -1].float().log_softmax(-1).max(-1)
        return log_probs

    def compute(self, prompt: Tensor) -> float:
        """Compute a prompt. Return the log-prob of the most probable next token."""
        self.cache, self.context = None, 0
        return float(self.forward(prompt[None]))

    def start(self, sequences: int) -> None:
        """Copy the cache of the last prompt for each of `sequences` decoding sequences."""
        self.cache.reorder_cache(torch.zeros(sequences, dtype=torch.int64))
        self.last = self.last.expand(sequences)

    def decode(self) -> None:
        self.forward(self.last[:, None])


def compare(folder: Path, dtype: str, rounds: int, prompts: Tensor) -> Iterator[Rates]:
    """Yield the rates for computing `prompts[0]`, then for decode steps after all `prompts`. Raise RuntimeError if the
    results of trueroll and transformers differ.
    """
    ours, theirs = Ours(folder, dtype), Theirs(folder, getattr(torch, dtype))
    found = ours.compute(prompts[0]), theirs.compute(prompts[0])
    if abs(found[0] - found[1]) > MOST_APART:
        raise RuntimeError(f"the log-probs of trueroll and transformers must be equal (got {found})")
    rates, tokens = Rates(), prompts.shape[1]
    for _ in range(rounds):
        rates.run(lambda: ours.compute(prompts[0]), tokens, lambda: theirs.compute(prompts[0]), tokens)
    yield rates
    ours.start(prompts)
    theirs.start(len(prompts))
    ours.decode()
    theirs.decode()
    rates = Rates()
    for _ in range(rounds):
        rates.run(ours.decode, STEPS * len(prompts), theirs.decode, len(prompts))
    yield rates


def main(
    families: Annotated[list[str] | None, typer.Argument(help="Names of families; all by default.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Counted runs of each system.")] = 3,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
) -> None:
    """Print a table in Markdown: prompts and decodes of trueroll and of transformers."""
    torch.set_num_threads(1)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{dtype}, 1 thread, {versions}, {rounds} rounds, load average {os.getloadavg()[0]:.1f}\n")
    print("| family | prompt: trueroll | transformers | ratio | decode: trueroll | transformers | ratio | load |")
    print("|---" * 8 + "|")
    prompts = torch.randint(3, SIZES["vocab_size"], (SEQUENCES, PROMPT), generator=torch.Generator().manual_seed(0))
    for name in families or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            save_model(name, Path(folder), getattr(torch, dtype))
            cells = " | ".join(rates.cells for rates in compare(Path(folder), dtype, rounds, prompts))
        print(f"| {name} | {cells} | {os.getloadavg()[0]:.1f} |", flush=True)


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    typer.run(main)
