"""Runs verl's main program on a CPU, in verl's own virtual environment, and reads the output."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer

from tiny import make_tiny_model

HERE = Path(__file__).parent
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
PROMPTS, SAMPLES, RESPONSE_LENGTH = 4, 4, 24
"""Prompts per step, samples per step, and response length in tokens."""
ROUNDING = 1e-4
"""Upper bound on how much rounding changes a probability."""

# verl's own settings for a run on a few CPU cores.
ON_A_CPU = """
trainer.device=cpu
trainer.n_gpus_per_node=1
+ray_kwargs.ray_init.num_gpus=1
+ray_kwargs.ray_init.include_dashboard=False
ray_kwargs.ray_init.num_cpus=16
data.dataloader_num_workers=0
reward.num_workers=1
actor_rollout_ref.rollout.agent.num_workers=1
transfer_queue.backend.SimpleStorage.num_data_storage_units=1
actor_rollout_ref.model.use_remove_padding=False
+actor_rollout_ref.model.override_config.attn_implementation=sdpa
actor_rollout_ref.actor.use_torch_compile=False
actor_rollout_ref.actor.strategy=fsdp2
actor_rollout_ref.actor.fsdp_config.dtype=float32
+actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}
"""
ROLLOUT = """
actor_rollout_ref.rollout.name=trueroll
actor_rollout_ref.rollout.tensor_model_parallel_size=1
actor_rollout_ref.rollout.dtype=float32
+actor_rollout_ref.rollout.engine_kwargs.trueroll={num_blocks:1024,num_threads:1,max_num_seqs:16}
"""
TRAINING = f"""
algorithm.adv_estimator=grpo
data.train_batch_size={PROMPTS}
data.max_prompt_length=64
data.max_response_length={RESPONSE_LENGTH}
actor_rollout_ref.rollout.n={SAMPLES}
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16
actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16
actor_rollout_ref.actor.optim.lr=1e-2
trainer.logger=[console,file]
trainer.val_before_train=False
trainer.save_freq=-1
trainer.total_epochs=100
"""


@dataclass(frozen=True)
class Run:
    """verl's log entries per step, and the samples per step with `input`, `output` and `score`."""

    metrics: list[dict[str, Any]]
    samples: list[list[dict[str, Any]]]
    printed: str


def make_inputs(folder: Path) -> None:
    """Make a tiny model with a chat template, and prompts."""
    model = make_tiny_model("llama", folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    rows = [
        {
            "data_source": "animals",
            "prompt": [{"role": "user", "content": f"Name {n} animals."}],
            "reward_model": {"style": "rule", "ground_truth": ""},
        }
        for n in range(2, 18)
    ]
    Dataset.from_list(rows).to_parquet(folder / "prompts.parquet")


def run_main(python: str, folder: Path, steps: int, *changes: str) -> Run:
    """Run `steps` steps on the inputs that `make_inputs` made in `folder`."""
    own = f"""
    actor_rollout_ref.model.path={folder}/model
    data.train_files={folder}/prompts.parquet
    data.val_files={folder}/prompts.parquet
    reward.custom_reward_function.path={HERE}/reward.py
    trainer.total_training_steps={steps}
    trainer.rollout_data_dir={folder}/samples
    trainer.default_local_dir={folder}/checkpoints
    """
    settings = [line.strip() for line in (ON_A_CPU + ROLLOUT + TRAINING + own).splitlines() if line.strip()]
    environment = os.environ | {
        "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",  # selects the verl engine that computes on the platform's device
        "PYTHONPATH": str(HERE),
        "VERL_FILE_LOGGER_PATH": f"{folder}/metrics.jsonl",
        "HYDRA_FULL_ERROR": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [python, "-P", "-m", "verl.trainer.main_ppo", *settings, *changes]
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout[-20000:]
    metrics = [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    samples = [_read_lines(folder / "samples" / f"{step}.jsonl") for step in range(1, steps + 1)]
    return Run(metrics, samples, done.stdout)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]  # splitlines would also split texts
