"""Tiny models with a module for multi-token prediction (MTP) that often guesses right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tiny import make_tiny_model

FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_next_moe")
FILE = "model.safetensors"
_LAST = "model.layers.3."  # has attention
_SMALL = ("o_proj", "out_proj", "down_proj")


def make_mtp_model(family: str, folder: Path, scale: float = 0.01, **config: Any) -> Path:
    """Save a tiny model with an MTP module into `folder`, and return `folder`.

    The outputs of mixers and MLPs are multiplied by `scale`: the smaller, the more a hidden state resembles the
    embedding of its token, from which the module guesses.
    """
    make_tiny_model(family, folder, **config)
    tensors = load_file(folder / FILE)
    for name, tensor in tensors.items():
        if any(part in name for part in _SMALL):
            tensor.mul_(scale)
    save_file(tensors | mtp_tensors(tensors), folder / FILE, {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"mtp_num_hidden_layers": 1}))
    return folder


def mtp_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a module that computes the decoder's last layer on the embedding of each token."""
    size = len(tensors["model.norm.weight"])
    dtype = tensors["model.norm.weight"].dtype
    layer = {name.replace(_LAST, "mtp.layers.0."): each.clone() for name, each in tensors.items() if _LAST in name}
    return layer | {
        "mtp.fc.weight": torch.cat((torch.eye(size), 0.02 * torch.eye(size)), 1).to(dtype),
        "mtp.pre_fc_norm_embedding.weight": torch.zeros(size, dtype=dtype),
        "mtp.pre_fc_norm_hidden.weight": torch.zeros(size, dtype=dtype),
        "mtp.norm.weight": tensors["model.norm.weight"].clone(),
    }
