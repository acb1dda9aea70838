"""On-policy distillation: `python examples/distill.py --out FOLDER`. `--help` lists the options.

The teacher is SmolLM2-135M-Instruct. The student is the teacher model without some of its layers, and learns to answer
as the teacher does. At each step, a worker samples answers from the student, and a second worker scores these answers
with the teacher. At each position, the second worker returns the teacher's K most probable tokens and their log-probs.
The trainer computes the student's log-probs of the same tokens, and minimises the KL divergence from teacher to student
over K + 1 events. There is one event for each of the K tokens, and one event for all other tokens together. The new
weights are then pushed to the student's worker. The method is GKD on samples of the student alone (Agarwal et al. 2024,
arXiv:2306.13649).

Each step prints the divergence on the step's samples. Each step also prints the largest difference between the
log-probs of the student's worker and of the trainer, which is 0.0. A run is reproducible to the bit. Before and after
the training, the example prints the divergence on answers to questions that are not used in training.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # busy-waiting threads would slow down a worker on the same cores

import torch
import typer
from matplotlib.figure import Figure
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from trueroll.kernels.training import align, token_log_probs
from trueroll.rollout import RolloutClient, SamplingParams, WeightPublisher, launch_worker, resolve_model

TEMPLATES = [
    "What is {}?",
    "Name three facts about {}.",
    "Why is {} important?",
    "Write a sentence about {}.",
    "Explain {} to a child.",
    "Where can I learn about {}?",
]
SUBJECTS = ["rain", "bread", "the moon", "music", "a river", "trade", "sleep", "gold", "a bridge", "winter"]
NUM_HELD_OUT = 12
PROMPTS_PER_STEP = 12
MAX_TOKENS = 24
LEARNING_RATE = 5e-5
LEFT_OUT = range(20, 24)  # the teacher's layers that the student lacks

disable_progress_bar()  # hides the progress of loading weights


def prompts_of(folder: Path, seed: int) -> list[list[int]]:
    """Return the token ids of all questions, in an order that depends on `seed`."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    questions = [template.format(subject) for template in TEMPLATES for subject in SUBJECTS]
    random.Random(seed).shuffle(questions)
    chats = [[{"role": "user", "content": question}] for question in questions]
    return tokenizer.apply_chat_template(chats, add_generation_prompt=True)["input_ids"]


def make_student(teacher: Path, folder: Path) -> None:
    """Save the teacher into `folder` without the layers `LEFT_OUT`."""
    model: Any = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    kept = [layer for i, layer in enumerate(model.model.layers) if i not in LEFT_OUT]
    model.model.layers = torch.nn.ModuleList(kept)
    model.config.num_hidden_layers = len(kept)
    model.save_pretrained(folder)


def divergence(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """Return the KL divergence from teacher to student over K + 1 events: float32 [num_positions].

    `teacher`, `student`: the log-probs of the same K tokens, float32 [num_positions, K]. The first K events stand for
    the K tokens. The last event stands for all other tokens. By the log sum inequality, the result is at most the
    divergence over the whole vocabulary.
    """
    p, q = (torch.cat([each, _log_rest(each)], dim=1) for each in (teacher, student))
    return (p.exp() * (p - q)).sum(1)


def _log_rest(log_probs: torch.Tensor) -> torch.Tensor:
    """Return the log-prob of the event that the next token is none of the K tokens: float32 [num_positions, 1], at
    least log(1e-6).
    """
    return (1 - log_probs.exp().sum(1, keepdim=True)).clamp(min=1e-6).log()


class Distillation:
    """A student with its optimizer, and clients of the workers that serve student and teacher."""

    def __init__(self, folder: Path, client: RolloutClient, teacher: RolloutClient, top_k: int) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        align(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        self.client, self.teacher, self.top_k = client, teacher, top_k

    def learn(self, prompts: list[list[int]], seed: int) -> dict[str, float]:
        """Take one optimizer step on answers of the student. Return its metrics."""
        loss, mismatch = self.measure(prompts, seed)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return dict(divergence=loss.item(), mismatch=mismatch, grad_norm=norm.item())

    def measure(self, prompts: list[list[int]], seed: int) -> tuple[torch.Tensor, float]:
        """Return two values for answers of the student: the mean divergence, and the largest difference between the
        log-probs that worker and trainer compute for the answers' tokens.
        """
        groups = self.client.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS), seed=seed)
        samples = [sample for group in groups for sample in group.samples]
        sequences = [[*prompt, *sample.token_ids] for prompt, sample in zip(prompts, samples, strict=True)]
        starts = [len(prompt) for prompt in prompts]
        scores = self.teacher.score(sequences, start=starts, top_logprobs=self.top_k)
        tops = torch.cat([torch.tensor(score.top_token_ids) for score in scores])
        own = torch.tensor([token for sample in samples for token in sample.token_ids])
        found = self._log_probs(sequences, starts, torch.cat([tops, own[:, None]], dim=1))
        sampled = torch.cat([torch.tensor(sample.logprobs) for sample in samples])
        expected = torch.cat([torch.tensor(score.top_logprobs) for score in scores])
        mismatch = (found[:, -1].detach() - sampled).abs().max().item()
        return divergence(expected, found[:, :-1]).mean(), mismatch

    def _log_probs(self, sequences: list[list[int]], starts: list[int], targets: torch.Tensor) -> torch.Tensor:
        """Return the student's log-probs of `targets`: float32 [num_positions, K]. `targets`: [num_positions, K], the
        tokens to look up at the positions of all answers.
        """
        ids = pad_sequence([torch.tensor(row) for row in sequences], batch_first=True, padding_value=-1)
        wanted = (ids >= 0) & (torch.arange(ids.shape[1]) >= torch.tensor(starts)[:, None])
        target_ids = torch.full((*ids.shape, targets.shape[1]), -1)
        target_ids[wanted] = targets.to(target_ids.dtype)
        mask = dict(attention_mask=ids >= 0, completion_mask=wanted)
        return token_log_probs(self.model, ids.clamp(min=0), **mask, target_ids=target_ids)[wanted]


def draw(rows: list[dict[str, float]], path: Path) -> None:
    """Draw the divergence of each step."""
    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot([row["step"] for row in rows], [row["divergence"] for row in rows], ".-")
    axes.set(title="KL divergence from teacher to student, nats per token", xlabel="step", ylim=(0, None))
    figure.savefig(path)


def main(
    out: Annotated[Path, typer.Option(help="New folder for metrics.csv, plot.png and the student.")],
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 40,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the questions and the samples.")] = 1,
    top_k: Annotated[int, typer.Option(min=1, max=1024, help="How many of the teacher's tokens to use.")] = 32,
    model: Annotated[str, typer.Option(help="The teacher: a folder, or smollm2.")] = "smollm2",
) -> None:
    """Distil a teacher into a student with fewer layers."""
    if (out / "metrics.csv").exists():
        raise typer.BadParameter(f"--out: {out} already contains a run; choose another folder")
    torch.manual_seed(seed)
    folder, student = resolve_model(model), out / "student"
    prompts = prompts_of(folder, seed)
    held_out, train = prompts[:NUM_HELD_OUT], prompts[NUM_HELD_OUT:]
    make_student(folder, student)
    rows: list[dict[str, float]] = []
    options: dict[str, Any] = dict(device="cpu", dtype="float32", num_blocks=512)
    with (
        launch_worker(str(folder), **options) as teacher_worker,
        launch_worker(str(student), **options) as worker,
        RolloutClient(teacher_worker.address) as teacher,
        RolloutClient(worker.address) as client,
        WeightPublisher() as publisher,
    ):
        publisher.connect([worker.address])
        distillation = Distillation(student, client, teacher, top_k)
        with torch.no_grad():
            print(f"divergence on held-out questions: {distillation.measure(held_out, seed)[0]:.3f}")
        for step in range(steps):
            batch = random.Random(f"{seed} {step}").sample(train, PROMPTS_PER_STEP)
            rows.append(dict(step=step) | distillation.learn(batch, seed * 10**6 + step))
            publisher.push(distillation.model, version=step + 1)
            print("step {step}: divergence {divergence:.3f}, mismatch {mismatch}".format(**rows[-1]), flush=True)
        with torch.no_grad():
            print(f"divergence on held-out questions: {distillation.measure(held_out, seed)[0]:.3f}")
    distillation.model.save_pretrained(student)
    lines = [",".join(rows[0]), *(",".join(map(repr, row.values())) for row in rows)]
    (out / "metrics.csv").write_text("\n".join(lines) + "\n")
    draw(rows, out / "plot.png")


if __name__ == "__main__":
    typer.run(main)
