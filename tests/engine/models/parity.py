"""Comparisons with transformers: the log-probs of a tiny model with those of the whole forward pass in float32, and the
decoder that a file with few settings describes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from mixers import attention_of
from torch import Tensor

from tiny import make_tiny_model
from trueroll.engine.models.decoder import Decoder
from trueroll.engine.models.loader import read_config
from trueroll.kernels import reference
from trueroll.kernels.contract import Layer
from trueroll.kernels.families import describe
from trueroll.kernels.specs import DecoderSpec

from .test_hybrid_families import Hybrid, prompt

LIMIT = 1e-4  # nats


def load(folder: Path, dtype: str = "float32", **settings: Any) -> Any:
    """Return the model of transformers, with eager attention. Some architectures have no automatic class."""
    kind = getattr(transformers, read_config(folder)["architectures"][0])
    return kind.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="eager", **settings)


@torch.no_grad()
def theirs(folder: Path, ids: Tensor) -> Tensor:
    """Return the log-prob of each token of `ids` after the first one."""
    return load(folder)(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def check_parity(family: str, overrides: dict[str, Any], folder: Path) -> None:
    """Compare a tiny model of a family on the backends `reference` and `cpu`."""
    ids = prompt(100)
    expected = theirs(make_tiny_model(family, folder, **overrides), ids)
    for backend in ("reference", "cpu"):
        assert (Hybrid(folder, backend=backend).log_probs(ids) - expected).abs().max() <= LIMIT, backend


def error_with(change: Callable[[Layer], Layer], folder: Path) -> float:
    """Return the largest error of the log-probs if each layer is changed."""
    ours, ids = Hybrid(folder), prompt(100)
    ours.model.layers = tuple(map(change, ours.model.layers))
    return float((ours.log_probs(ids) - theirs(folder, ids)).abs().max())


def check_defaults(raw: dict[str, Any], folder: Path) -> tuple[Any, DecoderSpec]:
    """Compare weights, norms, rotation and windows of the decoder that `raw` describes with those of transformers.
    Return the config of transformers and the spec of the decoder.
    """
    (folder / "config.json").write_text(json.dumps(raw))
    config, spec = transformers.AutoConfig.from_pretrained(folder), describe(raw)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    ours = Decoder(spec, reference, partial(torch.empty, device="meta"))  # type: ignore[arg-type]
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for copy in ours.tied_tensors():
        del shapes[copy]
    assert {name: weight.shape for name, weight in ours.checkpoint_tensors().items()} == shapes
    for name in ("tie_word_embeddings", "max_position_embeddings"):
        assert getattr(spec, name) == getattr(config, name), name
    assert {norm.eps for norm in (spec.norm, *(layer.norm for layer in spec.layers))} == {config.rms_norm_eps}
    theta, part = config.rope_parameters["rope_theta"], config.rope_parameters.get("partial_rotary_factor", 1.0)
    size = attention_of(spec.layers[0]).head_dim * part
    assert spec.rotations[0].inv_freq[1] == pytest.approx(theta ** (-2 / size))
    windows = [config.sliding_window if "sliding" in kind else None for kind in getattr(config, "layer_types", [])]
    assert [attention_of(layer).window for layer in spec.layers] == (windows or [None] * len(spec.layers))
    return config, spec
