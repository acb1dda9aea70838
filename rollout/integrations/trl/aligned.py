"""`GRPOTrainer` whose model computes the worker's log-probs, to the bit: `AlignedGRPOTrainer`.

Owns: that policy and reference model are aligned before TRL changes them, and the log-probs and entropies of its loss.
Does not own how samples are drawn (see `trueroll_generation`). Promises: where trainer and worker compute alike, TRL
finds `sampling/sampling_logp_difference` to be 0.0; a setting by which it could not be is a ConfigError.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from trueroll.errors import ConfigError

from ....kernels.training import align, token_statistics
from .common import sampling_params
from .grpo import grpo_trainer


class AlignedGRPOTrainer(grpo_trainer.GRPOTrainer):
    """TRL's `GRPOTrainer`, whose arguments these are, with an aligned model, of PEFT or not, and reference model.

    The worker has to run the dtype of the forward pass: bfloat16 for `bf16=True`, float32 for float32 parameters
    without it. Raise AlignmentError for a model that `align` refuses, and ConfigError for settings of TRL under which
    its loss is of other log-probs.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        with self._aligned():
            super().__init__(*args, **options)

    @contextlib.contextmanager
    def _aligned(self) -> Iterator[None]:
        """Inside, TRL's models get our forward pass where they would get its head, and before accelerate wraps them."""
        original = grpo_trainer.add_fused_lm_head

        def align_instead(model: Any, **_: Any) -> None:
            self._temperature = _trainer_temperature(self)
            align(model if model is self.ref_model else self.model)  # not the model inside of one of PEFT

        grpo_trainer.add_fused_lm_head = align_instead
        try:
            yield
        finally:
            grpo_trainer.add_fused_lm_head = original

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **inputs: Any,
    ) -> tuple[Tensor, Tensor, None]:
        """Of the last `logits_to_keep` of the T tokens of each row, in chunks of `batch_size` rows: their log-probs,
        float32 [B, logits_to_keep], and the entropies of their distributions, without gradient; and no auxiliary loss.
        """
        if given := [name for name, value in inputs.items() if value is not None]:
            raise ConfigError(f"inputs: expected text alone, found {', '.join(given)}; remove images")
        wanted, size = attention_mask.bool(), batch_size or len(input_ids)
        wanted[:, :-logits_to_keep] = False
        parts = []
        for ids, mask, chosen in zip(
            *(column.split(size) for column in (input_ids, attention_mask, wanted)), strict=True
        ):
            with self.accelerator.autocast():
                found = token_statistics(
                    model,
                    ids,
                    mask,
                    temperature=self._temperature,
                    completion_mask=chosen,
                    top_logprobs=0,
                    gradient=True,
                )
            parts.append((found.logprobs[:, -logits_to_keep:], found.entropy[:, -logits_to_keep:]))
        log_probs, entropies = map(torch.cat, zip(*parts, strict=True))
        return log_probs, entropies, None


def _trainer_temperature(trainer: Any) -> float:
    """That of the samples' log-probs. Raise ConfigError for settings under which TRL trains on others."""
    args, coef = trainer.args, trainer.router_aux_loss_coef
    for name, is_off, found, why in (
        ("cast_lm_head_to_fp32", not args.cast_lm_head_to_fp32, True, "no worker computes so"),
        ("router_aux_loss_coef", not trainer.aux_loss_enabled, coef, "an aligned model returns no router logits"),
        ("entropy_coef", args.entropy_coef == 0.0, args.entropy_coef, "entropies have no gradient"),
        ("use_adaptive_entropy", not args.use_adaptive_entropy, True, "entropies have no gradient"),
    ):
        if not is_off:
            raise ConfigError(f"{name}: expected {type(found)()}, found {found}: {why}; set it so, or use GRPOTrainer")
    return sampling_params(vars(args), []).trainer_temperature
