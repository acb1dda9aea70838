"""Tiny random models, saved as Hugging Face folders, on which tests run in milliseconds.

The weights are spread out so that any wrong bit changes the output. Every layer visibly changes the result, the top two
logits are well apart, biases are not zero, and norm weights are not one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TINY: dict[str, Any] = dict(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_FAMILIES: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, dict(head_dim=16, tie_word_embeddings=False)),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, dict(tie_word_embeddings=False)),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, dict(head_dim=16, tie_word_embeddings=True)),
}
FAMILIES = tuple(_FAMILIES)
_WINDOW: dict[str, Any] = dict(sliding_window=32)
_QWEN_WINDOW = dict(**_WINDOW, use_sliding_window=True, max_window_layers=1)
_BOTH = dict(layer_types=["sliding_attention", "full_attention"])
# With tied embeddings, large embeddings would make the model repeat each token.
_GEMMA3 = dict(**_BOTH, head_dim=16, query_pre_attn_scalar=24, tie_word_embeddings=False)
_FAMILIES |= {
    "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM, _WINDOW | _GEMMA3),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, _WINDOW | dict(head_dim=16)),
    "olmo3": (transformers.Olmo3Config, transformers.Olmo3ForCausalLM, _WINDOW | _BOTH),
    "qwen2_window": (*_FAMILIES["qwen2"][:2], _FAMILIES["qwen2"][2] | _QWEN_WINDOW),
    "ministral": (transformers.MinistralConfig, transformers.MinistralForCausalLM, _WINDOW | _BOTH | dict(head_dim=16)),
    "qwen3_window": (*_FAMILIES["qwen3"][:2], _FAMILIES["qwen3"][2] | _QWEN_WINDOW),
}
_DELTA_NET: dict[str, Any] = dict(
    head_dim=16,
    num_hidden_layers=4,
    linear_key_head_dim=16,
    linear_value_head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_conv_kernel_dim=4,
)
_FAMILIES |= {
    "qwen3_5": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM, _DELTA_NET),
    "qwen3_next": (
        transformers.Qwen3NextConfig,
        transformers.Qwen3NextForCausalLM,
        _DELTA_NET | dict(num_experts=4, mlp_only_layers=[0, 1, 2, 3]),
    ),
}
_EXPERTS: dict[str, Any] = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32)
_SHARED: dict[str, Any] = dict(_DELTA_NET, **_EXPERTS, shared_expert_intermediate_size=32)
_FAMILIES |= {
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM, _EXPERTS | dict(head_dim=16)),
    "qwen3_next_moe": (*_FAMILIES["qwen3_next"][:2], _SHARED),
    "qwen3_5_moe": (transformers.Qwen3_5MoeTextConfig, transformers.Qwen3_5MoeForCausalLM, _SHARED),
    "gpt_oss": (
        transformers.GptOssConfig,
        transformers.GptOssForCausalLM,
        _WINDOW | dict(head_dim=16, num_local_experts=8, num_experts_per_tok=3, intermediate_size=64),
    ),
}
_PIXTRAL = dict(model_type="pixtral", hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)


def _mistral3_config(tie_word_embeddings: bool, **text: Any) -> Any:
    vision = _PIXTRAL | dict(head_dim=16, image_size=32, patch_size=4)
    text_config = dict(model_type="mistral") | text
    return transformers.Mistral3Config(
        text_config=text_config, vision_config=vision, tie_word_embeddings=tie_word_embeddings
    )


# Families that consist of known parts.
_NORMED: dict[str, Any] = dict(num_hidden_layers=4, tie_word_embeddings=False)
_FREE: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "smollm3": (transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM, _NORMED),
    "exaone4": (
        transformers.Exaone4Config,
        transformers.Exaone4ForCausalLM,
        _NORMED | _WINDOW | dict(sliding_window_pattern=2),
    ),
    "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM, {}),
    "olmoe": (transformers.OlmoeConfig, transformers.OlmoeForCausalLM, dict(num_experts=8, num_experts_per_tok=3)),
    "seed_oss": (
        transformers.SeedOssConfig,
        transformers.SeedOssForCausalLM,
        dict(head_dim=16, attention_out_bias=True, attention_dropout=0.0, residual_dropout=0.0),
    ),
    "qwen2_moe": (
        transformers.Qwen2MoeConfig,
        transformers.Qwen2MoeForCausalLM,
        _EXPERTS | dict(shared_expert_intermediate_size=48),
    ),
    "mixtral": (
        transformers.MixtralConfig,
        transformers.MixtralForCausalLM,
        _WINDOW | dict(num_local_experts=8, num_experts_per_tok=3),
    ),
    "mistral3": (
        _mistral3_config,
        transformers.Mistral3ForConditionalGeneration,
        _WINDOW | dict(head_dim=16, tie_word_embeddings=False),
    ),
}
_MAMBA: dict[str, Any] = dict(
    num_hidden_layers=4,
    attn_layer_indices=[2],
    mamba_n_heads=8,
    mamba_n_groups=2,
    mamba_d_state=16,
    mamba_d_head=16,
    mamba_chunk_size=16,
    time_step_limit=(0.02, 1.0),
)
_NEMOTRON: dict[str, Any] = dict(
    layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
    head_dim=16,
    mamba_num_heads=8,
    mamba_head_dim=16,
    n_groups=2,
    ssm_state_size=16,
    chunk_size=16,
    time_step_min=0.1,
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=32,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    moe_shared_expert_intermediate_size=48,
    moe_latent_size=32,
)
_GRANITE: dict[str, Any] = dict(
    layer_types=["linear_attention", "linear_attention", "full_attention"],
    num_hidden_layers=3,
    num_local_experts=8,
    num_experts_per_tok=3,
    intermediate_size=32,
    shared_intermediate_size=48,
    embedding_multiplier=3.0,
    residual_multiplier=0.6,
    attention_multiplier=0.3,
    logits_scaling=0.7,
    tie_word_embeddings=False,
)
# No two factors are equal, so that a factor in the wrong place changes the results.
_FALCON: dict[str, Any] = dict(
    head_dim=16,
    mamba_d_ssm=96,
    mamba_n_heads=6,
    mamba_n_groups=2,
    mamba_d_state=16,
    mamba_d_head=16,
    mamba_chunk_size=16,
    time_step_limit=(0.02, 1.0),
    mamba_rms_norm=True,
    mamba_norm_before_gate=False,
    embedding_multiplier=1.7,
    lm_head_multiplier=0.6,
    attention_in_multiplier=0.8,
    attention_out_multiplier=1.4,
    key_multiplier=0.45,
    ssm_in_multiplier=1.25,
    ssm_out_multiplier=0.7,
    ssm_multipliers=[0.9, 0.55, 1.6, 0.5, 1.3],
    mlp_multipliers=[0.75, 1.1],
    tie_word_embeddings=False,
)
_STATE_SPACES: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "granite4": (
        transformers.GraniteMoeHybridConfig,
        transformers.GraniteMoeHybridForCausalLM,
        _MAMBA | _GRANITE,
    ),
    "bamba": (transformers.BambaConfig, transformers.BambaForCausalLM, _MAMBA),
    "falcon_h1": (transformers.FalconH1Config, transformers.FalconH1ForCausalLM, _FALCON),
    "nemotron_h": (transformers.NemotronHConfig, transformers.NemotronHForCausalLM, _NEMOTRON),
}
_FAMILIES |= _FREE | _STATE_SPACES
FREE = (*_FREE, *_STATE_SPACES)
# Multipliers and caps far from 1, so that a step that is left out changes the results.
_SWITCHES: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "gemma2": (
        transformers.Gemma2Config,
        transformers.Gemma2ForCausalLM,
        _WINDOW | _GEMMA3 | dict(attn_logit_softcapping=1.5, final_logit_softcapping=4.0),
    ),
    "glm4": (transformers.Glm4Config, transformers.Glm4ForCausalLM, dict(head_dim=32)),
    "granite": (
        transformers.GraniteConfig,
        transformers.GraniteForCausalLM,
        dict(
            embedding_multiplier=3.0,
            attention_multiplier=0.15,
            residual_multiplier=0.22,
            logits_scaling=0.4,
            attention_bias=True,
            mlp_bias=True,
        ),
    ),
    "llama_biases": (*_FAMILIES["llama"][:2], _FAMILIES["llama"][2] | dict(attention_bias=True, mlp_bias=True)),
    "ministral3": (
        transformers.Ministral3Config,
        transformers.Ministral3ForCausalLM,
        dict(
            head_dim=16,
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=1e6,
                factor=32.0,
                original_max_position_embeddings=32,
                mscale=1.0,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.3,
            ),
        ),
    ),
    "phi3": (
        transformers.Phi3Config,
        transformers.Phi3ForCausalLM,
        dict(
            original_max_position_embeddings=512,
            rope_parameters=dict(
                rope_type="longrope",
                rope_theta=1e4,
                partial_rotary_factor=0.75,
                short_factor=[1.0, 1.0, 1.1, 1.2, 1.4, 1.7],
                long_factor=[1.0, 1.5, 3.0, 8.0, 16.0, 32.0],
            ),
        ),
    ),
}
_FAMILIES |= _SWITCHES
SWITCHES = tuple(_SWITCHES)
# Families with a correction bias in the router.
_GROUPED: dict[str, Any] = dict(
    num_hidden_layers=3,
    head_dim=16,
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=32,
    n_shared_experts=1,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    norm_topk_prob=True,
    tie_word_embeddings=False,
)
_DENSE_FIRST = _GROUPED | dict(first_k_dense_replace=1)
_SLIDING = _WINDOW | dict(layer_types=["sliding_attention", "full_attention", "sliding_attention"])
_CORRECTED: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "glm4_moe": (
        transformers.Glm4MoeConfig,
        transformers.Glm4MoeForCausalLM,
        _DENSE_FIRST | dict(use_qk_norm=True, attention_bias=True),
    ),
    "solar_open": (transformers.SolarOpenConfig, transformers.SolarOpenForCausalLM, _GROUPED),
    "dots1": (transformers.Dots1Config, transformers.Dots1ForCausalLM, _DENSE_FIRST | _SLIDING),
    "minimax_m2": (
        transformers.MiniMaxM2Config,
        transformers.MiniMaxM2ForCausalLM,
        dict(head_dim=16, rotary_dim=8, num_local_experts=8, num_experts_per_tok=3, intermediate_size=32),
    ),
    "afmoe": (
        transformers.AfmoeConfig,
        transformers.AfmoeForCausalLM,
        _EXPERTS | _SLIDING | dict(num_hidden_layers=3, head_dim=16, route_scale=2.5, mup_enabled=True),
    ),
    "ernie4_5_moe": (
        transformers.Ernie4_5_MoeConfig,
        transformers.Ernie4_5_MoeForCausalLM,
        dict(num_hidden_layers=3, moe_num_experts=8, moe_k=3, moe_intermediate_size=32, tie_word_embeddings=False),
    ),
}
_FAMILIES |= _CORRECTED
CORRECTED = tuple(_CORRECTED)
_CORRECTIONS = ("e_score_correction_bias", "mlp.expert_bias")
# Tensors that a trainer holds in float32 in a model of another dtype.
_WIDE = {"Ernie4_5_MoeForCausalLM": (*_CORRECTIONS, "mlp.gate.weight")}


def _kimi_config(tie_word_embeddings: bool = False, **text: Any) -> Any:
    vision = dict(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=2,
        num_hidden_layers=1,
        pos_emb_height=4,
        pos_emb_width=4,
        patch_size=4,
    )
    text_config = text | dict(model_type="deepseek_v3", tie_word_embeddings=tie_word_embeddings)
    return transformers.Kimi_K25Config(
        text_config=text_config,
        vision_config=vision,
        projection_hidden_size=32,
        tie_word_embeddings=tie_word_embeddings,
        image_token_id=500,
        video_token_id=501,
        vision_start_token_id=502,
    )


# Latent attention, in layers without and with experts. The norms inside the attention have another epsilon.
_LATENT: dict[str, Any] = dict(
    num_key_value_heads=4,
    q_lora_rank=48,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=32,
    rms_norm_eps=1e-3,
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=32,
    n_shared_experts=2,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
)
_DENSE_BEFORE = _LATENT | dict(first_k_dense_replace=1)
_OF_LATENT: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "deepseek_v2": (transformers.DeepseekV2Config, transformers.DeepseekV2ForCausalLM, _DENSE_BEFORE),
    "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM, _DENSE_BEFORE),
    "glm4_moe_lite": (transformers.Glm4MoeLiteConfig, transformers.Glm4MoeLiteForCausalLM, _LATENT),
}
_OF_LATENT["mistral4"] = (
    transformers.Mistral4Config,
    transformers.Mistral4ForCausalLM,
    _LATENT
    | dict(
        first_k_dense_replace=1,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=1e4,
            factor=16.0,
            original_max_position_embeddings=32,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.3,
        ),
    ),
)
_OF_LATENT["kimi_k25"] = (_kimi_config, transformers.Kimi_K25ForConditionalGeneration, _DENSE_BEFORE)
_FAMILIES |= _OF_LATENT
OF_LATENT = tuple(_OF_LATENT)
MIXTURES = ("qwen3_moe", "qwen3_next_moe", "qwen3_5_moe", "gpt_oss")
HYBRID = ("qwen3_5", "qwen3_next")
# Families with different computations in their layers. Families that are not listed differ only in their settings.
WINDOWED = ("gemma3", "mistral", "olmo3", "qwen2_window")
ARCHITECTURES = {family: make_model.__name__ for family, (_, make_model, _) in _FAMILIES.items()}
"""The architecture of each family's tiny model, as in config.json."""
_ZERO_CENTERED = ("Gemma", "Qwen3_5", "Qwen3Next")
_SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")


def make_tiny_model(family: str, folder: Path, dtype: str = "float32", **config_overrides: Any) -> Path:
    """Save a random model of `family` with a tokenizer into `folder`, and return `folder`.

    The same arguments give the same weights. `config_overrides`: fields of the family's Hugging Face config. Llama and
    Qwen2 have a separate head, Qwen2 has biases on q, k and v, and Qwen3 ties the embedding to the head. In families
    with sliding windows, a window has 32 tokens.
    """
    make_config, make_model, defaults = _FAMILIES[family]
    return save_tiny_model(make_model(make_config(**(TINY | defaults | config_overrides))), folder, dtype)


def save_tiny_model(model: Any, folder: Path, dtype: str = "float32") -> Path:
    """Replace the weights of a transformers model, save it with a tokenizer into `folder`, and return `folder`. The
    weights of routers that trainers hold in float32 are not rounded.
    """
    _spread_weights(model)
    names = _WIDE.get(type(model).__name__, _CORRECTIONS)
    wide = {name: tensor.clone() for name, tensor in model.state_dict().items() if name.endswith(names)}
    model.to(getattr(torch, dtype))
    for name, tensor in wide.items():
        path, _, leaf = name.rpartition(".")
        getattr(model.get_submodule(path), leaf).data = tensor
    model.save_pretrained(folder)
    _make_tokenizer(model.config.get_text_config().vocab_size).save_pretrained(folder)
    return folder


@torch.no_grad()
def _spread_weights(model: torch.nn.Module) -> None:
    generator, transposed = torch.Generator().manual_seed(0), type(model).__name__.startswith("GptOss")
    corrections = (named for named in model.named_buffers() if named[0].endswith(_CORRECTIONS))
    for name, weight in (*model.named_parameters(), *corrections):
        if name.endswith(("norm.weight", "norm_f.weight")):
            weight.uniform_(0.5, 1.5, generator=generator)
            if type(model).__name__.startswith(_ZERO_CENTERED) and not name.endswith("linear_attn.norm.weight"):
                weight.sub_(1.0)  # these norms multiply by 1 + w
        else:
            weight.normal_(std=_spread(name, weight, transposed), generator=generator)


def _spread(name: str, weight: torch.Tensor, transposed: bool) -> float:
    if "visual." in name or "vision_tower." in name:
        # Wider weights would amplify the rounding errors of float32 far beyond 1e-5.
        return 0.2 if weight.dim() == 1 else weight[0].numel() ** -0.5
    if name.endswith(_CORRECTIONS):
        return 0.3
    if name.endswith("bias") or "lm_head" in name:
        return 0.5
    if "embed_tokens" in name or "embeddings" in name:
        return 0.3
    if weight.dim() == 3 and "experts" in name:
        return 2 * weight.shape[1 if transposed else 2] ** -0.5
    return 2 * weight[0].numel() ** -0.5


def _make_tokenizer(vocab_size: int) -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer with three special tokens, then one per byte. Higher ids decode to words such as `<300>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*_SPECIAL_TOKENS, *alphabet]
    words = (words + [f"<{i}>" for i in range(len(words), vocab_size)])[:vocab_size]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, bos, eos = _SPECIAL_TOKENS
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos, clean_up_tokenization_spaces=False
    )
