"""Run TRL's GRPOTrainer with trueroll in place of vLLM: `python examples/trl_grpo.py [MODEL] [STEPS]`, on a CPU.

The reward is the share of the letter e in an answer. After each step, TRL reports the difference between its log-probs
and the worker's log-probs. The difference is 0.
"""

import os
import sys
import tempfile

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle trainer threads yield while the worker computes

from datasets import Dataset
from trl import GRPOConfig

from trueroll.rollout import RolloutClient, WeightPublisher, launch_worker, resolve_model
from trueroll.rollout.integrations.trl import AlignedGRPOTrainer, trueroll_generation

model = str(resolve_model(sys.argv[1] if len(sys.argv) > 1 else "smollm2"))

animals = ["cat", "horse", "eagle", "salmon", "ant", "whale", "frog", "goat"]
dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"Describe a {name}."}] for name in animals]})


def share_of_e(completions, **_):
    """Return one reward per answer: the share of the letter e."""
    return [answer["content"].lower().count("e") / max(1, len(answer["content"])) for [answer] in completions]


folder = tempfile.TemporaryDirectory()
args = GRPOConfig(
    output_dir=folder.name,
    use_vllm=True,  # together with vllm_mode="server": TRL generates through the client of trueroll_generation
    vllm_mode="server",
    use_cpu=True,
    bf16=False,
    model_init_kwargs={"dtype": "float32"},
    gradient_checkpointing=False,
    num_generations=4,
    per_device_train_batch_size=4,
    max_completion_length=16,
    temperature=0.8,
    learning_rate=1e-5,
    max_steps=int(sys.argv[2]) if len(sys.argv) > 2 else 4,
    logging_steps=1,
    save_strategy="no",
)

with launch_worker(model, device="cpu", dtype="float32") as worker, WeightPublisher() as publisher:
    publisher.connect([worker.address])
    with RolloutClient(worker.address) as client, trueroll_generation(client, publisher):
        trainer = AlignedGRPOTrainer(model, reward_funcs=share_of_e, args=args, train_dataset=dataset)
        trainer.train()

for entry in trainer.state.log_history:
    if "reward" in entry:
        difference = entry["sampling/sampling_logp_difference/max"]
        print(f"step {entry['step']}: reward {entry['reward']:.3f}, max log-prob difference {difference}")
