"""Releases of transformers and PEFT that are newer than trueroll: new settings are refused with an error that names the
setting.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from adapters import adapt
from peft import LoraConfig
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tiny import make_tiny_model
from trueroll.errors import AlignmentError, ModelError
from trueroll.kernels.families import describe
from trueroll.kernels.training import align, replayed, token_log_probs
from trueroll.versions import range_of

from .inputs import same_bits

IDS = torch.arange(3, 23).view(2, 10)
TRANSFORMERS = f"^transformers {transformers.__version__}: .*install {range_of('transformers')}, which trueroll is"
PEFT = f"install {range_of('peft')}, which trueroll is tested with"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("releases"))


def load(folder: Path, is_aligned: bool = False) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if is_aligned:
        align(model, "reference")
    return model


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "LlamaModel"])
def test_a_forward_pass_with_one_more_argument_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = load(folder)
    original = type(model) if name == "LlamaForCausalLM" else type(model.model)
    plain = original.forward

    def forward(self: Any, input_ids: Any = None, sharpness: float = 1.0, **others: Any) -> Any:
        return plain(self, input_ids, **others)

    monkeypatch.setattr(original, "forward", forward)
    with pytest.raises(AlignmentError, match=TRANSFORMERS) as refused:
        align(model, "reference")
    assert f"{name}.forward takes sharpness, which trueroll does not know" in str(refused.value)


@pytest.mark.parametrize("argument", ["past_key_values", "cache"])
@pytest.mark.parametrize("part", ["model", "decoder"])
def test_a_cache_is_refused_by_either_of_its_names(folder: Path, part: str, argument: str) -> None:
    model = load(folder, is_aligned=True)
    called = model if part == "model" else model.model
    with pytest.raises(AlignmentError, match=f"^{argument}: an aligned model keeps no KV cache"):
        called(IDS, **{argument: transformers.DynamicCache()})
    with pytest.raises(AlignmentError, match="^(past_key_values|cache): "):
        called(IDS, None, None, transformers.DynamicCache())


def test_generate_is_refused_since_there_is_no_cache(folder: Path) -> None:
    model = load(folder, is_aligned=True)
    with pytest.raises(AlignmentError, match="^(past_key_values|cache): .* KV cache; call `generate` with use_cache"):
        model.generate(IDS, max_new_tokens=2)
    assert model.generate(IDS, max_new_tokens=2, use_cache=False).shape == (2, 12)


@pytest.mark.parametrize("call", [dict(sharpness=0.0), dict(sharpness=False), dict(is_causal=False)], ids=str)
def test_an_argument_that_is_not_known_is_refused(folder: Path, call: dict[str, Any]) -> None:
    model = load(folder, is_aligned=True)
    for called in (model, model.model):
        with pytest.raises(AlignmentError, match=f"^{next(iter(call))}: an aligned model does not"):
            called(IDS, **call)


def test_arguments_that_request_nothing_are_served(folder: Path) -> None:
    model = load(folder, is_aligned=True)
    positions = torch.arange(10).repeat(2, 1)
    neutral = dict(use_cache=True, output_attentions=False, is_causal=True, past_key_values=None, sharpness=None)
    packed = dict(position_ids=positions, cu_seq_lens_q=torch.tensor([0, 10, 20]), max_length_q=10)
    plain = model(IDS).logits
    assert same_bits(model(IDS, logits_to_keep=3, **neutral, **packed).logits, plain[:, -3:])
    found = model(IDS, labels=IDS, num_items_in_batch=20)
    assert same_bits(found.logits, plain) and found.loss > 0


def test_parts_of_other_names_are_refused(folder: Path) -> None:
    model = load(folder)
    model.model.layers[1].mlp.rise_proj = model.model.layers[1].mlp.up_proj
    del model.model.layers[1].mlp.up_proj
    with pytest.raises(AlignmentError, match=TRANSFORMERS) as refused:
        align(model, "reference")
    assert "no module for model.layers.1.mlp.up_proj" in str(refused.value)
    model = load(folder)
    model.model.last_norm = model.model.norm
    del model.model.norm
    with pytest.raises(AlignmentError, match=TRANSFORMERS) as refused:
        align(model, "reference")
    assert "LlamaForCausalLM has no norm" in str(refused.value)


def test_a_router_that_returns_something_else_is_refused(tmp_path: Path) -> None:
    model = load(make_tiny_model("qwen3_moe", tmp_path))
    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    routes = torch.zeros(*IDS.shape, len(routers), model.config.num_experts_per_tok, dtype=torch.int64)
    routes[..., 1:] += torch.arange(1, model.config.num_experts_per_tok)
    routers[0].register_forward_hook(lambda *_: (torch.zeros(20, 2), torch.zeros(20, 2)))
    with replayed(model, routes), pytest.raises(AlignmentError, match=TRANSFORMERS) as refused:
        model(IDS)
    assert "returns something other than (logits, gates, experts)" in str(refused.value)


def test_a_rotation_with_one_more_argument_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def newer(config: Any, device: Any, seq_len: Any, layer_type: Any, sharpness: float = 1.0) -> None: ...

    raw = llama_config(rope_scaling=dict(rope_type="linear", factor=2.0))
    describe(raw)
    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "linear", newer)
    with pytest.raises(ModelError, match=TRANSFORMERS) as refused:
        describe(raw)
    assert "the rotation linear takes config, device, layer_type, seq_len, sharpness" in str(refused.value)
    monkeypatch.delitem(ROPE_INIT_FUNCTIONS, "linear")
    with pytest.raises(ModelError, match="the rotation linear takes nothing, since it is missing"):
        describe(raw)


def llama_config(**others: Any) -> dict[str, Any]:
    """Return the content of a config.json."""
    sizes = dict(vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    return dict(architectures=["LlamaForCausalLM"], max_position_embeddings=256, **sizes, **others)


@dataclasses.dataclass
class NewerConfig(LoraConfig):
    """A LoraConfig of a PEFT release that has one more field."""

    sharpness: float = 1.0


def test_a_field_of_lora_that_is_not_known_is_refused_unless_it_has_its_default(folder: Path) -> None:
    model = adapt(folder, target_modules=["q_proj"])
    newer = NewerConfig()
    vars(newer).update(vars(model.peft_config["default"]), sharpness=2.0)
    model.peft_config["default"] = newer
    with pytest.raises(AlignmentError, match=f"^peft [0-9].* has sharpness = 2.0, .*{PEFT}"):
        align(model, "reference")
    newer.sharpness = 1.0
    align(model, "reference")
    assert token_log_probs(model, IDS).isfinite().all()


@pytest.mark.parametrize("name", ["merged", "lora_variant", "scaling", "disable_adapters"])
def test_a_layer_of_peft_without_what_is_read_is_refused(folder: Path, name: str) -> None:
    model = adapt(folder, target_modules=["q_proj"])
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    layer.__class__ = type("Linear", (_Without, type(layer)), {"__module__": type(layer).__module__, "hidden": name})
    with pytest.raises(AlignmentError, match=f"^peft [0-9].*: Linear has no {name}; {PEFT}"):
        align(model, "reference")


class _Without(nn.Module):
    """A module that lacks the attribute `hidden`."""

    hidden = ""

    def __getattribute__(self, name: str) -> Any:
        if name == type(self).hidden:
            raise AttributeError(name)
        return super().__getattribute__(name)
