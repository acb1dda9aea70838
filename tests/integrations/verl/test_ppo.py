"""verl's PPO with a critic and `rollout.name=trueroll` on a CPU, with the settings of docs/verl.md."""

from __future__ import annotations

import math
import os

import pytest

from .running import PROMPTS, ROUNDING, SAMPLES, Run, make_inputs, run_main

STEPS = 2
# The critic replaces the group's mean as baseline, so each prompt gets one sample.
PPO = f"""
algorithm.adv_estimator=gae
algorithm.lam=0.95
actor_rollout_ref.rollout.n=1
data.train_batch_size={PROMPTS * SAMPLES}
actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS * SAMPLES}
critic.optim.lr=1e-2
critic.ppo_micro_batch_size_per_gpu=16
actor_rollout_ref.rollout.full_determinism=True
+actor_rollout_ref.rollout.engine_kwargs.trueroll.num_workers=2
"""
CRITIC_ON_A_CPU = """
critic.strategy=fsdp2
critic.model.use_remove_padding=False
+critic.model.override_config.attn_implementation=sdpa
critic.fsdp.dtype=float32
critic.fsdp.use_torch_compile=False
+critic.fsdp.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}
"""

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with a fleet of two workers."""
    folder = tmp_path_factory.mktemp("ppo")
    make_inputs(folder)
    changes = (PPO + CRITIC_ON_A_CPU).split()
    return run_main(os.environ["TRUEROLL_VERL_PYTHON"], folder, STEPS, *changes, f"critic.model.path={folder}/model")


def test_both_steps_train_the_actor_on_samples_of_the_last_pushed_weights(run: Run) -> None:
    assert [step["training/global_step"] for step in run.metrics] == [1, 2]
    for step, samples in zip(run.metrics, run.samples, strict=True):
        assert len({sample["output"] for sample in samples}) == PROMPTS * SAMPLES
        assert step["training/rollout_probs_diff_valid"] == 1
        assert step["training/rollout_probs_diff_max"] < ROUNDING
        assert step["training/off_policy/trajectory_staleness_worst/max"] == 0
        assert step["actor/grad_norm"] > 0.0, "premise: the weights changed"


def test_the_critic_learns(run: Run) -> None:
    first, second = run.metrics
    for step in run.metrics:
        assert step["critic/vf_loss"] > 0.0 and step["critic/grad_norm"] > 0.0
        assert step["critic/values/min"] < step["critic/values/max"]
        assert math.isfinite(step["critic/vf_explained_var"])
    assert first["critic/values/max"] < first["critic/rewards/mean"], "premise: the first values are too low"
    assert first["critic/values/mean"] < second["critic/values/mean"]
