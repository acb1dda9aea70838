"""Falcon-H1: each layer has attention and a state space (Mamba 2), which read the same hidden states, and an MLP. The
results of most products are multiplied by factors. In some models, the state space has a norm.
"""

from __future__ import annotations

from typing import Any

from trueroll.errors import ModelError

from ..specs import DecoderSpec, HeadSpec, LayerSpec, Mamba2Spec, MlpSpec, NormSpec
from .mamba2 import NAMES, expect_inner_size, expect_state_space, fill_state_space, state_space
from .settings import expect, read_settings

_FALCON: dict[str, Any] = dict(
    max_position_embeddings=8192,
    num_attention_heads=32,
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    mamba_d_ssm=1024,
    mamba_d_head="auto",
)


def _fill(raw: dict[str, Any]) -> dict[str, Any]:
    if raw["mamba_d_ssm"] is None:
        raw["mamba_d_ssm"] = raw.get("mamba_expand", 2) * raw["hidden_size"]
    return fill_state_space(raw, raw["mamba_d_ssm"])


def _falcon_h1(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    settings = read_settings(_fill, _FALCON | raw)
    biased, mlp_bias = bool(settings.attention_bias), bool(settings.mlp_bias)
    expect(settings, hidden_act="silu", projectors_bias=False, attention_bias=biased, mlp_bias=mlp_bias)
    expect_state_space(settings)
    expect_inner_size(settings, settings.mamba_d_ssm, "mamba_d_ssm")
    norm, (of_gate, of_down) = NormSpec(settings.rms_norm_eps), map(float, settings.mlp_multipliers or [1.0] * 2)
    mlp = MlpSpec(settings.intermediate_size, bias=mlp_bias, gate_scale=of_gate, out_scale=of_down)
    attention, recurrent_mixer = _attention(settings, biased), _state_space(settings, norm)
    layer = LayerSpec(attention, mlp, norm, recurrent_mixer=recurrent_mixer)
    return settings.decoder(
        architecture,
        [layer] * settings.num_hidden_layers,
        [settings.rotation()],
        names=NAMES,
        last_norm="model.final_layernorm.weight",
        embed_scale=float(settings.embedding_multiplier),
        head=HeadSpec(float(settings.lm_head_multiplier)),
    )


def _attention(settings: Any, biased: bool) -> Any:
    """Return the attention. The scale of the scores includes the factors of the input and of the keys, and the scale of
    the output includes the factor of the input. The attention's results differ from transformers only in rounding.
    """
    of_input = float(settings.attention_in_multiplier)
    if biased and of_input != 1.0:
        raise ModelError(
            "attention_in_multiplier in config.json must be 1.0 if attention_bias is set (got "
            f"{of_input}); serve another model"
        )
    return settings.attention(
        scale=settings.head_dim**-0.5 * of_input**2 * settings.key_multiplier,
        qkv_bias=biased,
        o_bias=biased,
        out_scale=of_input * settings.attention_out_multiplier,
    )


def _state_space(settings: Any, norm: NormSpec) -> Mamba2Spec:
    """Return the state space. The factors of the projections include the factor of the input."""
    of_inputs = [settings.ssm_in_multiplier * scale for scale in settings.ssm_multipliers or [1.0] * 5]
    return state_space(
        settings,
        norm=norm if settings.mamba_rms_norm else None,
        norm_before_gate=settings.mamba_norm_before_gate,
        input_scales=None if {*of_inputs} == {1.0} else tuple(of_inputs),
        out_scale=float(settings.ssm_out_multiplier),
    )


FAMILIES = {"FalconH1ForCausalLM": _falcon_h1}
