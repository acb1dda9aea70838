"""verl's GRPO with `rollout.name=trueroll` on a CPU: trainer and worker alternating, and partial rollouts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .reward import compute_score
from .running import PROMPTS, ROUNDING, SAMPLES, Run, make_inputs, run_main

STEPS = 2
STALE = 1e-2
"""Lower bound on how much the weights of another step change a probability."""

pytestmark = pytest.mark.timeout(1800)


def train(folder: Path, *changes: str) -> Run:
    make_inputs(folder)
    return run_main(os.environ["TRUEROLL_VERL_PYTHON"], folder, STEPS, *changes)


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with a fleet of two workers."""
    return train(
        tmp_path_factory.mktemp("sync"),
        "actor_rollout_ref.rollout.full_determinism=True",
        "+actor_rollout_ref.rollout.engine_kwargs.trueroll.num_workers=2",
    )


@pytest.fixture(scope="module")
def partial(tmp_path_factory: pytest.TempPathFactory) -> Run:
    # The prompts of two steps are in flight. verl checks every two seconds whether a step has all its samples. If so,
    # verl aborts the other samples, two of which are running. The next step waits for these two samples and trains on
    # them, because no prompt may be older than one step. Samples that the second step aborts may have no tokens yet.
    changes = "trainer.v1.trainer_mode=colocate_async", "trainer.v1.colocate_async.num_warmup_batches=1"
    changes += "trainer.v1.sampler.max_off_policy_threshold=2", "trainer.v1.sampler.max_off_policy_strategy=wait"
    worker = "actor_rollout_ref.rollout.engine_kwargs.trueroll"
    changes += f"+{worker}.backend=reference", f"{worker}.max_num_seqs=2", "data.max_response_length=384"
    return train(tmp_path_factory.mktemp("async"), *changes)


@pytest.mark.exhaustive  # the run of PPO also takes turns, and `partial` is a run of GRPO
def test_each_step_trains_on_samples_of_the_last_pushed_weights(in_turn: Run) -> None:
    assert [step["training/global_step"] for step in in_turn.metrics] == [1, 2]
    for step in in_turn.metrics:
        assert step["training/rollout_probs_diff_valid"] == 1
        assert step["training/rollout_probs_diff_max"] < ROUNDING
        assert step["training/off_policy/trajectory_staleness_worst/max"] == 0
        assert step["training/off_policy/trajectory_spans/max"] == 1
        assert step["actor/grad_norm"] > 0.0, "premise: the weights changed"


def test_rewards_belong_to_their_samples_and_differ(partial: Run) -> None:
    for step, samples in zip(partial.metrics, partial.samples, strict=True):
        assert len(samples) == PROMPTS * SAMPLES
        scores = [sample["score"] for sample in samples]
        assert scores == pytest.approx([compute_score("", sample["output"], "") for sample in samples])
        assert step["critic/rewards/mean"] == pytest.approx(sum(scores) / len(scores))
        assert len(set(scores)) > 1
        assert len({sample["output"] for sample in samples}) == len(samples), "each sample has its own noise"


def test_an_aborted_sample_continues_with_new_weights(partial: Run) -> None:
    assert partial.metrics[1]["training/off_policy/trajectory_spans/max"] == 2
    for step in partial.metrics:
        if step["training/off_policy/trajectory_staleness_worst/max"] == 0:
            assert step["training/rollout_probs_diff_max"] < ROUNDING
        else:
            assert step["training/rollout_probs_diff_max"] > STALE
    assert {step["training/off_policy/trajectory_staleness_worst/max"] for step in partial.metrics} == {0, 1}
