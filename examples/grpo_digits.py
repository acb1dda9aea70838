"""A complete GRPO trainer for images: `python examples/grpo_digits.py --out FOLDER`. `--help` lists the options.

A tiny Qwen3-VL learns to read scikit-learn's digits, 8 x 8 pixels each (pip install 'trueroll[digits]'). First, the
model learns the format of the answers from a few labelled images. Then the model learns from rewards alone. At each
step, a worker samples answers for some images, and an answer is rewarded if it is the right digit. After the optimizer
step, the new weights are pushed, including the weights of the vision tower. The client preprocesses each image once,
and the trainer computes with the pixels that the worker got. Each step prints the largest difference between the
log-probs of worker and trainer, which is 0.0. A run is reproducible to the bit.

At the end, the run prints the model's accuracy on images that were not used in training. FOLDER then contains the model
that examples/digits_benchmark.py evaluates.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # busy-waiting threads would slow down a worker on the same cores

import numpy as np
import torch
import typer
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from trueroll.kernels.training import align, token_log_probs
from trueroll.rollout import (
    Group,
    ImageInput,
    ImageProcessor,
    RolloutClient,
    SamplingParams,
    WeightPublisher,
    launch_worker,
)

END, QUESTION, IMAGE, VOCABULARY = 10, 11, 12, 16  # ids 0 to 9 are the digits
PROMPT = [IMAGE, QUESTION]
NUM_LABELLED, NUM_HELD_OUT = 200, 297
IMAGES_PER_STEP, GROUP_SIZE = 32, 8
SUPERVISED_RATE, LEARNING_RATE, CLIP = 2e-3, 1e-3, 0.2
WORKER: dict[str, Any] = dict(dtype="float32", max_model_len=64, num_blocks=256, max_images=1)


@dataclass(frozen=True)
class Digits:
    """Images, uint8 [N, 8, 8, 3], and the digit of each, int64 [N]."""

    images: np.ndarray
    labels: np.ndarray

    @classmethod
    def load(cls) -> Digits:
        """Return all digits in random order. The order is always the same."""
        images, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(images))
        levels = (images * 15.9375).astype(np.uint8).reshape(-1, 8, 8, 1).repeat(3, axis=3)
        return cls(levels[order], labels[order])

    @classmethod
    def held_out(cls) -> Digits:
        """Return the digits that no run trains on."""
        return cls.load().part(slice(NUM_HELD_OUT))

    @classmethod
    def labelled(cls) -> Digits:
        """Return the digits to imitate."""
        return cls.load().part(slice(NUM_HELD_OUT, NUM_HELD_OUT + NUM_LABELLED))

    @classmethod
    def rewarded(cls) -> Digits:
        """Return the digits to learn from rewards."""
        return cls.load().part(slice(NUM_HELD_OUT + NUM_LABELLED, None))

    def part(self, which: Any) -> Digits:
        return Digits(self.images[which], self.labels[which])


def make_model(folder: Path) -> Path:
    """Save an untrained model with an image processor into `folder`, and return `folder`."""
    text = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=16)
    text |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, eos_token_id=END)
    rope = dict(rope_type="default", rope_theta=1e4, mrope_section=[4, 2, 2], mrope_interleaved=True)
    vision = dict(depth=2, hidden_size=32, intermediate_size=64, num_heads=2, patch_size=2, out_hidden_size=64)
    vision |= dict(num_position_embeddings=16, deepstack_visual_indexes=[0])
    config = Qwen3VLConfig(text_config=text | dict(rope_parameters=rope), vision_config=vision, image_token_id=IMAGE)
    Qwen3VLForConditionalGeneration(config).save_pretrained(folder)
    processor = dict(image_processor_type="Qwen2VLImageProcessorFast", patch_size=2, merge_size=2)
    processor |= dict(temporal_patch_size=2, size=dict(shortest_edge=64, longest_edge=64))
    processor |= dict(image_mean=[0.5] * 3, image_std=[0.5] * 3)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def log_probs(model: Any, answers: list[tuple[list[int], list[int], tuple[ImageInput, ...]]]) -> torch.Tensor:
    """Return the log-probs of the answers' tokens, concatenated: float32. `answers`: for each answer, the prompt, the
    answer itself and the images.
    """
    rows = [torch.tensor([*prompt, *answer]) for prompt, answer, _ in answers]
    is_own = [torch.arange(len(row)) >= len(prompt) for row, (prompt, *_) in zip(rows, answers, strict=True)]
    ids = pad_sequence(rows, batch_first=True, padding_value=-1)
    wanted = pad_sequence(is_own, batch_first=True)
    media = [images for *_, images in answers]
    return token_log_probs(model, ids.clamp(min=0), ids >= 0, completion_mask=wanted, media=media)[wanted]


class Trainer:
    """An aligned model with its optimizer. `version`: the version of the weights for workers."""

    def __init__(self, folder: Path, learning_rate: float) -> None:
        self.model: Any = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        align(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate, weight_decay=0.0)
        self.version = 1  # a new worker has version 0

    def imitate(self, digits: Digits, processor: ImageProcessor, steps: int, seed: int) -> None:
        """Train on labelled images, 32 at each step."""
        prompts = [processor.expand(PROMPT, [processor.process(image)]) for image in digits.images]
        random = np.random.default_rng(seed)
        for _ in range(steps):
            chosen = random.choice(len(prompts), 32)
            labels = digits.labels[chosen].tolist()
            answers = [
                (prompts[i][0].tolist(), [digit, END], tuple(prompts[i][1]))
                for i, digit in zip(chosen, labels, strict=True)
            ]
            self._update(-log_probs(self.model, answers).mean())

    def learn(self, groups: list[Group], rewards: torch.Tensor) -> dict[str, float]:
        """Take one step of GRPO on groups with the rewards [groups, samples]. Return its metrics."""
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        samples = [(group, sample) for group in groups for sample in group.samples]
        found = log_probs(self.model, [(g.prompt_token_ids.tolist(), s.token_ids, g.images) for g, s in samples])
        sampled = torch.cat([torch.tensor(sample.logprobs) for _, sample in samples])
        lengths = torch.tensor([len(sample.token_ids) for _, sample in samples])
        weights = advantages.flatten().repeat_interleave(lengths)
        ratios = (found - sampled).exp()
        loss = -torch.minimum(ratios * weights, ratios.clamp(1 - CLIP, 1 + CLIP) * weights).mean()
        mismatch = (found - sampled).abs().max().item()
        norm = self._update(loss)
        self.version += 1
        return dict(reward=rewards.mean().item(), mismatch=mismatch, loss=loss.item(), grad_norm=norm)

    def _update(self, loss: torch.Tensor) -> float:
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm.item()


def rewards_of(groups: list[Group], labels: np.ndarray) -> torch.Tensor:
    """Return 1.0 for each answer that is the right digit, else 0.0: float32 [groups, samples]."""
    right = [
        [sample.token_ids == [label, END] for sample in g.samples] for g, label in zip(groups, labels, strict=True)
    ]
    return torch.tensor(right, dtype=torch.float32)


def ask(client: RolloutClient, digits: Digits, params: SamplingParams, seed: int) -> list[Group]:
    """Return the worker's answers for each image."""
    media = [[image] for image in digits.images]
    return client.generate([PROMPT] * len(media), params, media=media, seed=seed)


def accuracy(client: RolloutClient, digits: Digits) -> float:
    """Return the share of images for which the most probable answer is right."""
    groups = ask(client, digits, SamplingParams(temperature=0.0, max_tokens=2), seed=0)
    return rewards_of(groups, digits.labels).mean().item()


def draw(rows: list[dict[str, float]], path: Path) -> None:
    """Draw the reward and the mismatch of each step."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    titles = {"reward": "mean reward", "mismatch": "largest |rollout log-prob - trainer log-prob|"}
    for axes, (name, title) in zip(figure.subplots(2, sharex=True), titles.items(), strict=True):
        axes.plot([row["step"] for row in rows], [row[name] for row in rows], ".-")
        axes.set_title(title)
        axes.set_ylim(0, 1)
    axes.set_xlabel("step")
    figure.savefig(path)


def main(
    out: Annotated[Path, typer.Option(help="New folder for metrics.csv, plot.png and the model.")],
    steps: Annotated[int, typer.Option(min=1, help="Steps of GRPO.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the model, the images and the samples.")] = 1,
    supervised_steps: Annotated[int, typer.Option(min=0, help="Steps on labelled images before GRPO.")] = 50,
) -> None:
    """Train a tiny vision model to read digits."""
    if (out / "metrics.csv").exists():
        raise typer.BadParameter(f"--out: {out} already contains a run; choose another folder")
    torch.manual_seed(seed)
    random, folder = np.random.default_rng(seed), make_model(out / "model")
    held_out, labelled, rewarded = Digits.held_out(), Digits.labelled(), Digits.rewarded()
    teacher = Trainer(folder, SUPERVISED_RATE)
    teacher.imitate(labelled, ImageProcessor(str(folder)), supervised_steps, seed)
    teacher.model.save_pretrained(folder)
    trainer, rows = Trainer(folder, LEARNING_RATE), []
    params = SamplingParams(n=GROUP_SIZE, max_tokens=2)
    with launch_worker(str(folder), **WORKER) as worker, WeightPublisher() as publisher:
        publisher.connect([worker.address])
        with RolloutClient(worker.address) as client:
            print(f"accuracy on held-out images: {accuracy(client, held_out):.3f}")
            for step in range(steps):
                publisher.push(trainer.model, trainer.version)
                batch = rewarded.part(random.choice(len(rewarded.labels), IMAGES_PER_STEP, replace=False))
                groups = ask(client, batch, params, seed=seed * 10**6 + step)
                rows.append(dict(step=step) | trainer.learn(groups, rewards_of(groups, batch.labels)))
                print("step {step}: reward {reward:.3f}, mismatch {mismatch}".format(**rows[-1]))
            publisher.push(trainer.model, trainer.version)
            print(f"accuracy on held-out images: {accuracy(client, held_out):.3f}")
    trainer.model.save_pretrained(folder)
    lines = [",".join(rows[0]), *(",".join(map(repr, row.values())) for row in rows)]
    (out / "metrics.csv").write_text("\n".join(lines) + "\n")
    draw(rows, out / "plot.png")


if __name__ == "__main__":
    typer.run(main)
