"""Aligned models with LoRA adapters: the bits of the merged model, gradients of A and B, and refused models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import ATTENTION, HYBRID, LATENT, NEMOTRON, adapt, change, load
from matrix import thinned
from peft import LNTuningConfig, LoraConfig, get_peft_model, inject_adapter_in_model
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModelForCausalLM

from tiny import make_tiny_model
from trueroll.errors import AlignmentError
from trueroll.kernels import reference
from trueroll.kernels.adapters import read_tensors
from trueroll.kernels.training import align, aligned_with, merged_weights, token_experts, token_log_probs, unalign

from .inputs import same_bits

IDS = torch.randint(3, 500, (2, 24), generator=torch.Generator().manual_seed(0))
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": dict(target_modules="all-linear", modules_to_save=["lm_head", "input_layernorm", "norm"]),
    "qwen2": dict(target_modules=["q_proj", "down_proj"], use_rslora=True, modules_to_save=["embed_tokens"]),
    "qwen3": dict(target_modules=ATTENTION, rank_pattern={"k_proj": 2}, alpha_pattern={"v_proj": 3}),
    "phi3": dict(target_modules=["qkv_proj", "gate_up_proj", "down_proj"]),
    "qwen3_5": dict(target_modules=HYBRID),
    "qwen3_moe": dict(target_modules=ATTENTION),
}
MECHANISMS: dict[str, dict[str, Any]] = {
    "granite": dict(target_modules="all-linear"),
    "gemma2": dict(target_modules=ATTENTION),
    "mistral3": dict(target_modules=ATTENTION),
    "deepseek_v3": dict(target_modules=LATENT),
    "ernie4_5_moe": dict(target_modules=ATTENTION),
    "nemotron_h": dict(target_modules=NEMOTRON),
}
CONFIGS |= MECHANISMS


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("adapted")
    return {family: make_tiny_model(family, parent / family) for family in CONFIGS}


def log_probs(model: Any, autocast: bool) -> Tensor:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return token_log_probs(model, IDS)


def plain(folder: Path, dtype: torch.dtype, weights: dict[str, Tensor] | None = None) -> Any:
    """Return the aligned model without PEFT, with these weights or its own."""
    model = load(folder, dtype)
    if weights is not None:
        model.load_state_dict(weights)
    align(model)
    return model


def test_persistent_buffers_are_tensors_of_a_model(folders: dict[str, Path]) -> None:
    """A router's correction bias is a buffer, which `named_parameters` lacks."""
    model = AutoModelForCausalLM.from_pretrained(folders["llama"])
    layer, head = model.model.layers[0].mlp, model.lm_head
    layer.register_buffer("correction", torch.ones(8))
    layer.register_buffer("scratch", torch.ones(8), persistent=False)
    head.register_buffer("correction", torch.ones(8))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapted = get_peft_model(model, LoraConfig(target_modules=ATTENTION, modules_to_save=["lm_head"]))
    found = read_tensors(adapted).tensors
    assert found.keys() == expected.keys() and "model.layers.0.mlp.correction" in found
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("family", CONFIGS)
@thinned(lambda family, autocast: autocast or family not in MECHANISMS)
def test_an_adapted_model_computes_with_the_merged_weights(
    folders: dict[str, Path], family: str, autocast: bool
) -> None:
    dtype = torch.bfloat16 if autocast else torch.float32
    model = adapt(folders[family], **CONFIGS[family])
    align(model)
    found = log_probs(model, autocast)
    assert same_bits(log_probs(plain(folders[family], dtype, dict(merged_weights(model, dtype))), False), found)
    with model.disable_adapter():
        base = log_probs(model, autocast)
    assert same_bits(log_probs(plain(folders[family], dtype), False), base)
    assert (base - found).abs().max() > 0.1


def test_merged_weights_are_what_peft_merges_within_rounding(folders: dict[str, Path]) -> None:
    model = adapt(folders["llama"], **CONFIGS["llama"])
    found = dict(merged_weights(model, torch.float32))
    merged = copy.deepcopy(model).double().merge_and_unload().state_dict()
    assert found.keys() == merged.keys()
    assert all((found[name] - merged[name]).abs().max() < 1e-6 for name in found)


def test_a_bfloat16_model_and_layers_that_are_checkpointed(folders: dict[str, Path]) -> None:
    """PEFT keeps A and B of a bfloat16 model in float32. The aligned model rounds A and B like any weight."""
    wide, narrow = (adapt(folders["llama"], dtype, **CONFIGS["qwen3"]) for dtype in (torch.float32, torch.bfloat16))
    a = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert narrow.get_parameter(a).dtype == torch.float32
    found = []
    for model, autocast in ((wide, True), (narrow, False)):
        align(model)
        model.get_base_model().gradient_checkpointing_enable()
        model.enable_input_require_grads()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found.append(token_log_probs(model, IDS))
            assert aligned_with(model).dtype == "bfloat16"
        found[-1].sum().backward()
        assert model.get_parameter(a).grad.any()
    assert same_bits(*(each.detach() for each in found))


def test_layer_wrappers_do_not_change_names(folders: dict[str, Path]) -> None:
    model = adapt(folders["llama"], **CONFIGS["llama"])
    align(model)
    expected, layers = dict(merged_weights(model, torch.float32)), model.get_base_model().model.layers
    layers[0], layers[1].mlp = checkpoint_wrapper(layers[0]), checkpoint_wrapper(layers[1].mlp)
    found = dict(merged_weights(model, torch.float32))
    assert found.keys() == expected.keys()
    assert all(same_bits(found[name], expected[name]) for name in found)


def test_one_of_several_adapters_is_active(folders: dict[str, Path]) -> None:
    model = adapt(folders["qwen3"])
    model.add_adapter("other", LoraConfig(r=2, target_modules=["v_proj"], task_type="CAUSAL_LM"))
    align(model)
    first = log_probs(model, True)
    model.set_adapter("other")
    change(model, seed=1)
    other = log_probs(model, True)
    assert not same_bits(first, other)
    model.delete_adapter("default")
    assert same_bits(log_probs(model, True), other)


def test_experts_are_those_of_the_merged_model(folders: dict[str, Path]) -> None:
    model = adapt(folders["qwen3_moe"])
    align(model)
    found = token_experts(model, IDS)
    merged = plain(folders["qwen3_moe"], torch.float32, dict(merged_weights(model, torch.float32)))
    assert torch.equal(found, token_experts(merged, IDS))
    assert not torch.equal(found, token_experts(plain(folders["qwen3_moe"], torch.float32), IDS)), "premise"


def test_gradients_are_those_of_peft(folders: dict[str, Path]) -> None:
    """Compare with the unaligned PEFT model in float64, which has the same weights."""
    model = adapt(folders["llama"], **CONFIGS["llama"])
    exact = copy.deepcopy(model).double()
    plain_log_probs(exact).sum().backward()
    align(model)
    token_log_probs(model, IDS).sum().backward()
    expected = {name: p.grad for name, p in exact.named_parameters() if p.grad is not None}
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    assert max(error(found[name], expected[name]) for name in found) < 1e-4


def test_gradients_of_bfloat16_pass_through_the_rounding(folders: dict[str, Path]) -> None:
    """Compare with gradients of the rounded merged weights in float64. The errors are as large as those of an unaligned
    model.
    """
    model = adapt(folders["llama"], torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    weights = dict(merged_weights(model, torch.bfloat16))
    align(model)
    token_log_probs(model, IDS).sum().backward()
    merged = AutoModelForCausalLM.from_pretrained(folders["llama"], dtype=torch.bfloat16)
    merged.load_state_dict(weights)
    exact = copy.deepcopy(merged).double()
    for each in (merged, exact):
        plain_log_probs(each).sum().backward()
    for name, (a, b, scale) in read_tensors(model).adapters.items():
        grads = [each.get_parameter(name).grad for each in (exact, merged)]
        of_weight, of_unaligned = (grad.double() for grad in grads if grad is not None)
        for grad, chain in ((a.grad, lambda g, b=b: b.double().T @ g), (b.grad, lambda g, a=a: g @ a.double().T)):
            assert grad is not None
            expected, unaligned = chain(of_weight) * scale, chain(of_unaligned) * scale
            # Rounding errors are random, so the errors of two equally accurate backward passes often differ by half.
            assert error(grad, expected) < 2 * error(unaligned, expected) + 0.01, name


def plain_log_probs(model: Any) -> Tensor:
    return model(IDS).logits.log_softmax(-1)[:, :-1].gather(2, IDS[:, 1:, None])


def error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


def test_frozen_weights_get_no_gradient_and_unalign_undoes_all(folders: dict[str, Path]) -> None:
    model = adapt(folders["llama"], **CONFIGS["llama"])
    before = model(IDS).logits
    align(model)
    with pytest.raises(AlignmentError, match="already aligned"):
        align(model)
    token_log_probs(model, IDS).sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    unalign(model)
    assert torch.equal(model(IDS).logits, before)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dict(lora_dropout=0.1), "lora_dropout = 0.1 is not supported"),
        (dict(bias="all"), "bias = 'all' is not supported"),
        (dict(use_dora=True), "use_dora = True is not supported"),
        (dict(target_modules=["embed_tokens"]), "modules of the kind peft.*Embedding are not supported"),
        (
            dict(target_parameters=["mlp.gate_proj.weight"], target_modules=[]),
            "target_parameters = .* is not supported .* PEFT turns targets of a mixture .* name other modules",
        ),
        (dict(trainable_token_indices=[1]), "trainable_token_indices = .* is not supported"),
    ],
    ids=["dropout", "bias", "dora", "embedding", "parameters", "tokens"],
)
def test_adapters_that_are_not_plain_are_refused(folders: dict[str, Path], config: Any, message: str) -> None:
    with pytest.raises(AlignmentError, match=message):
        align(adapt(folders["llama"], **config))


def test_adapters_in_a_model_that_is_not_one_of_peft_are_refused_too(folders: dict[str, Path]) -> None:
    """PEFT can inject adapters without its own wrapper. transformers adds adapters by the same PEFT function."""
    model = AutoModelForCausalLM.from_pretrained(folders["llama"], dtype=torch.float32)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"]), model)
    with pytest.raises(AlignmentError, match="model.embed_tokens: PEFT modules of the kind peft.*Embedding are"):
        align(model)


def test_an_adapter_around_another_is_refused(folders: dict[str, Path]) -> None:
    model = get_peft_model(adapt(folders["llama"]), LoraConfig(r=2, target_modules=["v_proj"]))
    with pytest.raises(AlignmentError, match="model: PEFT modules of the kind peft.peft_model.* are not"):
        align(model)


def test_a_separate_head_is_refused_if_the_config_ties_it(folders: dict[str, Path]) -> None:
    configs: list[dict[str, Any]] = [dict(modules_to_save=["lm_head"]), dict(target_modules=["lm_head"])]
    for config in configs:
        with pytest.raises(AlignmentError, match="lm_head is trained separately from the embedding"):
            align(adapt(folders["qwen3"], **config))


def test_unsupported_changes_after_align_are_refused(folders: dict[str, Path]) -> None:
    model = adapt(folders["qwen2"])
    align(model)
    model.merge_adapter()
    with pytest.raises(AlignmentError, match="a merged adapter is not supported"):
        token_log_probs(model, IDS)
    model.unmerge_adapter()
    model.add_adapter("other", LoraConfig(r=2, target_modules=ATTENTION, task_type="CAUSAL_LM"))
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(AlignmentError, match="one adapter must be active .got default, other"):
        token_log_probs(model, IDS)
    norms = get_peft_model(plain(folders["qwen2"], torch.float32), LNTuningConfig(target_modules=["input_layernorm"]))
    with pytest.raises(AlignmentError, match="modules of the kind peft.*LNTuningLayer are not"):
        token_log_probs(norms, IDS)
    with pytest.raises(AlignmentError, match="got LlamaForCausalLM.; a model without adapters has nothing to merge"):
        merged_weights(AutoModelForCausalLM.from_pretrained(folders["llama"]), torch.float32)


def test_a_head_that_was_adapted_since_can_be_aligned_again(folders: dict[str, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders["llama"], dtype=torch.float32)
    align(model)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    change(model, seed=0)
    with pytest.raises(AlignmentError, match="call align"):
        token_log_probs(model, IDS)
    with pytest.raises(AlignmentError, match="call unalign"):
        align(model)
    unalign(model)
    align(model)
    merged = plain(folders["llama"], torch.float32, dict(merged_weights(model, torch.float32)))
    assert same_bits(log_probs(model, False), log_probs(merged, False))


def test_a_different_merge_changes_log_probs(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge with different results changes the log-probs."""
    model = adapt(folders["llama"])
    align(model, "reference")
    found, merge = log_probs(model, True), reference.merge
    monkeypatch.setattr(reference, "merge", lambda w, a, b, scale: merge(w, a, b * 1.01, scale))
    assert not same_bits(log_probs(model, True), found)
