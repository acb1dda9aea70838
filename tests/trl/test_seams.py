"""trueroll refuses releases of TRL with unknown arguments. The error names the tested versions."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from trl.trainer import grpo_trainer

from trueroll.rollout.integrations.trl.common import sampling_params
from trueroll.rollout.integrations.trl.seams import TRANSFER, TrlMissingError, check_grpo, check_protocol, check_sample
from trueroll.versions import installed, range_of


def with_another(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a function with one more argument."""

    def stand_in(*_: Any, **__: Any) -> None: ...

    signature = inspect.signature(function)
    more = inspect.Parameter("sharpness", inspect.Parameter.KEYWORD_ONLY, default=1.0)
    stand_in.__signature__ = signature.replace(parameters=[*signature.parameters.values(), more])  # type: ignore[attr-defined]
    return stand_in


def made_up(**changes: Any) -> Any:
    """Return a copy of TRL's module with changed attributes."""
    names = ("VLLMGeneration", "add_fused_lm_head", "GRPOTrainer")
    return SimpleNamespace(**{name: getattr(grpo_trainer, name) for name in names} | changes)


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(TrlMissingError) as refused:
        call()
    text = str(refused.value)
    assert text.startswith(f"{installed('trl')}: ")
    assert text.endswith(f"install {range_of('trl')}, which trueroll is tested with")
    return text


def test_the_installed_trl_has_the_expected_interfaces() -> None:
    check_grpo(grpo_trainer)
    check_grpo(made_up())


@pytest.mark.parametrize("method", ["__init__", "generate", "sync_weights"])
def test_generation_with_one_more_argument_is_refused(method: str) -> None:
    original = grpo_trainer.VLLMGeneration
    newer = type("VLLMGeneration", (original,), {method: with_another(getattr(original, method))})
    text = refusal(lambda: check_grpo(made_up(VLLMGeneration=newer)))
    assert f"VLLMGeneration.{method} has sharpness, which trueroll does not know" in text


def test_a_head_and_log_probs_with_one_more_argument_are_refused() -> None:
    newer = with_another(grpo_trainer.add_fused_lm_head)
    assert "add_fused_lm_head has sharpness" in refusal(lambda: check_grpo(made_up(add_fused_lm_head=newer)))
    name = "_get_per_token_logps_and_entropies"
    trainer = type("GRPOTrainer", (), {name: with_another(getattr(grpo_trainer.GRPOTrainer, name))})
    assert f"GRPOTrainer.{name} has sharpness" in refusal(lambda: check_grpo(made_up(GRPOTrainer=trainer)))


def test_names_missing_from_trl_are_reported() -> None:
    assert "GRPOTrainer has no _get_per_token" in refusal(
        lambda: check_grpo(made_up(GRPOTrainer=type("GRPOTrainer", (), {})))
    )
    assert "RolloutSample no longer has advantage, completion" in refusal(
        lambda: check_sample(type("RolloutSample", (), {}))
    )
    protocol = type("WeightTransferProtocol", (), dict.fromkeys((*TRANSFER, "sharpen")))
    assert "WeightTransferProtocol has sharpen" in refusal(lambda: check_protocol(protocol, TRANSFER))
    settings = dict(repetition_penalty=1.0, temperature=1.0, top_p=1.0, top_k=0, max_completion_length=8)
    assert "settings no longer have min_p" in refusal(lambda: sampling_params(settings, []))
