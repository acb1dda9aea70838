"""Tiny models with LoRA adapters that visibly change the results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model

from trueroll.engine.models.loader import read_config

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
HYBRID = [*ATTENTION, "in_proj_qkv", "in_proj_z", "out_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
# PEFT refuses `out_proj` of Nemotron.
NEMOTRON = [*ATTENTION, "in_proj", "fc1_latent_proj", "fc2_latent_proj", "up_proj", "down_proj"]


def load(folder: Path, dtype: torch.dtype) -> Any:
    """Return the model of transformers. Some architectures have no automatic class."""
    return getattr(transformers, read_config(folder)["architectures"][0]).from_pretrained(folder, dtype=dtype)


def adapt(folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **config: Any) -> Any:
    """Return the model in `folder` with a LoRA adapter. By default the adapter has rank 4 and covers all attention
    matrices; `config` overrides this.
    """
    model = load(folder, dtype)
    fields: dict[str, Any] = dict(r=4, lora_alpha=8, target_modules=ATTENTION, task_type="CAUSAL_LM") | config
    adapted = get_peft_model(model, LoraConfig(**fields))
    change(adapted, seed)
    return adapted


@torch.no_grad()
def change(model: Any, seed: int) -> None:
    """Set all trained parameters to new values.

    The values depend only on `seed`, so all processes get the same values.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            values = torch.empty(parameter.shape).normal_(generator=generator)
            parameter.copy_(values * 0.2 if ".lora_" in name else parameter + 0.05 * values)
