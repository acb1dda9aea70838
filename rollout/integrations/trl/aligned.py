"""`AlignedGRPOTrainer`: a `GRPOTrainer` with a model that computes the worker's log-probs bit for bit.

Owns: the log-probs and entropies of the loss, and the alignment of the policy and the reference model before TRL
changes these models. Does not own: the generation of samples (`trueroll_generation`). Guarantees: TRL's
`sampling/sampling_logp_difference` is 0.0 if trainer and worker use the same dtype, backend and instruction set. A
setting that would make TRL's `sampling_logp_difference` nonzero raises ConfigError.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from trueroll.errors import ConfigError

from ....kernels.training import align, token_statistics
from ....kernels.training_images import FROM_PROCESSORS
from .common import sampling_params
from .grpo import TruerollGeneration, grpo_trainer


class AlignedGRPOTrainer(grpo_trainer.GRPOTrainer):
    """TRL's `GRPOTrainer` with an aligned policy and an aligned reference model. Supports models with and without PEFT.
    Takes the same arguments as `GRPOTrainer`.

    The worker must use the dtype of the forward pass: bfloat16 with `bf16=True`, or float32 for float32 parameters
    without `bf16`. Raise AlignmentError for a model that `align` refuses. Raise ConfigError if a setting of TRL would
    make the loss use log-probs that differ from the worker's log-probs.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        with self._aligned():
            super().__init__(*args, **options)

    @contextlib.contextmanager
    def _aligned(self) -> Iterator[None]:
        """Context manager in which TRL aligns its models instead of replacing their LM heads. The models are aligned
        before accelerate wraps them.
        """
        original = grpo_trainer.add_fused_lm_head

        def align_instead(model: Any, **_: Any) -> None:
            _check_settings(self)
            align(model if model is self.ref_model else self.model)  # self.model is the PEFT model, if there is one

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
        """Return log-probs, entropies and None (no auxiliary loss) for the last `logits_to_keep` tokens of each row.

        Log-probs and entropies are float32 [B, logits_to_keep]. Log-probs and entropies are computed under the
        distribution from which the samples were generated. If the sampling filters drop a token under the current
        weights, the log-prob of this token is -inf. Entropies have no gradient. Rows are computed in chunks of
        `batch_size`. `inputs`: the images of all rows, as TRL's processor has returned them, and `num_images`, the
        number of images of each row.
        """
        images = _Images.read(inputs, len(input_ids))
        wanted, size = attention_mask.bool(), batch_size or len(input_ids)
        wanted[:, :-logits_to_keep] = False
        parts = []
        for start in range(0, len(input_ids), size):
            rows = slice(start, start + size)
            ids, mask, chosen = (column[rows] for column in (input_ids, attention_mask, wanted))
            with self.accelerator.autocast():
                found = token_statistics(
                    model,
                    ids,
                    mask,
                    **self._drawn,
                    completion_mask=chosen,
                    media=None if images is None else images.of(rows),
                    top_logprobs=0,
                    gradient=True,
                )
            parts.append((found.logprobs[:, -logits_to_keep:], found.entropy[:, -logits_to_keep:]))
        log_probs, entropies = map(torch.cat, zip(*parts, strict=True))
        return log_probs, entropies, None

    @cached_property
    def _drawn(self) -> dict[str, Any]:
        """The arguments of `token_statistics` that describe how the samples were generated."""
        generation = getattr(self, "vllm_generation", None)
        if isinstance(generation, TruerollGeneration):
            return dict(distribution=generation.params, eos_token_ids=generation.eos_token_ids, masks=generation.masks)
        return dict(distribution=sampling_params(vars(self.args), []))


@dataclass(frozen=True)
class _Images:
    """The images of a batch's rows. `ends`: the number 0, then for each row the total number of images in this row and
    in all earlier rows. `pixels`, `grids`: the outputs of the processor for the images; `grids` is None if all images
    have the same size. `types`: the token types of each row.
    """

    ends: list[int]
    pixels: Tensor
    grids: Tensor | None
    types: dict[str, Tensor]

    @classmethod
    def read(cls, inputs: dict[str, Any], num_rows: int) -> _Images | None:
        """Return the images in TRL's inputs for `num_rows` rows; None if there are no images. Raise ConfigError if an
        input is not supported, or if the images do not match the rows.
        """
        given = {name: value for name, value in inputs.items() if value is not None}
        if others := [*given.keys() - {"num_images", *FROM_PROCESSORS}]:
            raise ConfigError(
                f"inputs: {', '.join(sorted(others))} is not supported; use a model with a vision tower that trueroll "
                "supports"
            )
        if "pixel_values" not in given:
            return None
        pixels, grids, counts = given["pixel_values"], given.get("image_grid_thw"), given.get("num_images") or []
        num_images = len(pixels if grids is None else grids)
        if len(counts) != num_rows or sum(counts) != num_images:
            raise ConfigError(
                f"num_images: must have one number for each of {num_rows} rows, with the sum {num_images} (got "
                f"{counts!r:.80}); give each row its own images"
            )
        types = {name: value for name, value in given.items() if name.endswith("token_type_ids")}
        return cls([0, *accumulate(counts)], pixels, grids, types)

    def of(self, rows: slice) -> dict[str, Tensor] | None:
        """Return the argument `media` for the given rows; None if the given rows have no images."""
        first, *_, last = self.ends[rows.start : rows.stop + 1]
        if first == last:
            return None
        types = {name: value[rows] for name, value in self.types.items()}
        if self.grids is None:
            return {"pixel_values": self.pixels[first:last]} | types
        starts = [0, *self.grids.prod(1).cumsum(0).tolist()]
        patches = self.pixels[starts[first] : starts[last]]
        return {"pixel_values": patches, "image_grid_thw": self.grids[first:last]} | types


def _check_settings(trainer: Any) -> None:
    """Raise ConfigError if TRL would train on log-probs that differ from the worker's log-probs."""
    args, coef = trainer.args, trainer.router_aux_loss_coef
    for name, is_off, found, why in (
        ("cast_lm_head_to_fp32", not args.cast_lm_head_to_fp32, True, "no worker does that"),
        ("router_aux_loss_coef", not trainer.aux_loss_enabled, coef, "an aligned model returns no router logits"),
        ("entropy_coef", args.entropy_coef == 0.0, args.entropy_coef, "entropies have no gradient"),
        ("use_adaptive_entropy", not args.use_adaptive_entropy, True, "entropies have no gradient"),
    ):
        if not is_off:
            text = f"{name}: {found} is not supported: {why}; set it to {type(found)()}, or use GRPOTrainer"
            raise ConfigError(text)
    params = sampling_params(vars(args), [])
    if params.has_filters and trainer.beta:
        raise ConfigError(
            f"beta: {trainer.beta} is not supported with top_k, top_p or min_p: the reference model may filter sampled "
            "tokens, so the KL divergence is infinite; set beta to 0.0, or turn the filters off"
        )
    if params.min_tokens and not trainer.use_vllm:
        raise ConfigError(
            f"min_tokens: {params.min_tokens} is supported only inside trueroll_generation; use trueroll_generation, "
            "or leave min_tokens out of generation_kwargs"
        )
    counts = ("min_tokens", "presence_penalty", "frequency_penalty", "bad_words_token_ids", "structured_outputs")
    found = [name for name in counts if getattr(params, name)]
    found += ["vllm_structured_outputs_regex"] * (args.vllm_structured_outputs_regex is not None)
    if trainer.tools and found:
        raise ConfigError(
            f"{', '.join(found)}: is not supported with tools, because a worker generates each turn as a separate "
            "sample, but TRL scores all turns as one sample; leave the setting out"
        )
