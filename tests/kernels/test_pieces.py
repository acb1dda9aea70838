"""The number of pieces in which a decoder's sums are computed follows from the decoder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tiny import make_tiny_model
from trueroll.errors import ConfigError
from trueroll.kernels.layer import make_layer
from trueroll.kernels.pieces import num_parameters, requirement, with_pieces
from trueroll.kernels.plain_models import describe_plain
from trueroll.kernels.specs import DecoderSpec, DeltaNetSpec, ExpertsSpec, MlpSpec, Pieces
from trueroll.kernels.training import align, aligned_with

from .inputs import NORM, decoder_spec, layer_spec

DELTA_NET = DeltaNetSpec(2, 6, 16, 32, 4, NORM)


def decoder(heads: int = 4, kv_heads: int = 2, **changes: Any) -> DecoderSpec:
    return decoder_spec(replace(layer_spec(heads, kv_heads, 64), **changes))


@pytest.mark.parametrize(
    ("spec", "count"),
    [
        (decoder(32, 8), 4),
        (decoder(28, 4), 4),
        (decoder(16, 1), 4),
        (decoder(16, 2), 4),
        (decoder(14, 2), 2),
        (decoder(12, 6), 2),
        (decoder(9, 3), 1),
        (decoder(mlp=ExpertsSpec(6, 2, 64)), 2),
        (decoder(mixer=DELTA_NET), 2),
    ],
)
def test_the_number_divides_what_devices_share(spec: DecoderSpec, count: int) -> None:
    assert with_pieces(spec).pieces == count
    assert count == 4 or requirement(spec, 2 * count)


def test_a_decoder_for_several_devices_has_eight_pieces() -> None:
    """The sizes are those of Qwen2.5-72B, which has 72.7e9 parameters."""
    mixer = layer_spec(64, 8, 128, qkv_bias=True).mixer
    layer = replace(layer_spec(), mixer=mixer, mlp=MlpSpec(29568))
    large = replace(decoder_spec(layer), layers=(layer,) * 80, hidden_size=8192, vocab_size=152064)
    assert round(num_parameters(large) / 1e9, 1) == 72.7
    assert with_pieces(large).pieces == 8
    assert with_pieces(replace(large, layers=(layer,) * 40)).pieces == 4


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_oss", "qwen3_5_moe"])
def test_the_number_of_parameters_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(family, tmp_path))
    assert num_parameters(describe_plain(model)) == model.num_parameters()


def test_pieces_hold_whole_heads_and_whole_units() -> None:
    spec = replace(decoder(8, 2, mlp=MlpSpec(29568)), pieces=8)
    layer = make_layer(spec, 0, lambda *_, **__: None)
    assert layer.mixer_pieces == Pieces(8, 64)
    assert layer.mlp_pieces.bounds(29568) == [(i * 3712, min((i + 1) * 3712, 29568)) for i in range(8)]
    hybrid = make_layer(replace(decoder(mixer=DELTA_NET), pieces=2), 0, lambda *_, **__: None)
    assert hybrid.mixer_pieces == Pieces(2, 96), "three value heads for each key head"
    small = make_layer(replace(decoder(mlp=MlpSpec(200)), pieces=4), 0, lambda *_, **__: None)
    assert small.mlp_pieces.bounds(200) == [(0, 128), (128, 200), (200, 200), (200, 200)]


@pytest.mark.parametrize(
    ("count", "reason"),
    [
        (3, "1, 2, 4 or 8"),
        (0, "1, 2, 4 or 8"),
        (16, "1, 2, 4 or 8"),
        (8, "a divisor of 12 heads"),
        (4, "a divisor or a multiple of 6 key-value heads"),
    ],
)
def test_a_number_that_does_not_suit_the_model_is_refused(count: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"pieces must be {reason} \(got {count}\); leave it unset"):
        with_pieces(decoder(12, 6), count)


def test_a_trainer_may_choose_another_number(tiny_llama: Path) -> None:
    for asked, count in ((None, 4), (2, 2), (1, 1)):
        model = AutoModelForCausalLM.from_pretrained(tiny_llama)
        align(model, pieces=asked)
        assert aligned_with(model).pieces == count
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    with pytest.raises(ConfigError, match="a divisor of 4 heads .got 8"):
        align(model, pieces=8)
    align(model)
