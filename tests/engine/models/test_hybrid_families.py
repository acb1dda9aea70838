"""Families with gated delta nets: against transformers, loaded from checkpoints, computed in chunks, aligned in a
trainer, and refused settings. The decoder runs in memory that the test allocates.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from proofs import proves
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5VisionConfig,
)

from tiny import HYBRID, TINY, make_tiny_model, save_tiny_model
from trueroll.engine.models.decoder import Decoder, ModelInput
from trueroll.engine.models.dummy import fill_randomly
from trueroll.engine.models.eos import find_eos_tokens
from trueroll.engine.models.loader import check_checkpoint, copy_checkpoint, read_config
from trueroll.errors import AlignmentError, ConfigError, ModelError
from trueroll.kernels.contract import NO_SLOT, AttentionBatch, Memory, Pages, StateBatch, new_caches
from trueroll.kernels.families import describe
from trueroll.kernels.selection import select_backend
from trueroll.kernels.specs import AttentionSpec, DecoderSpec, DeltaNetSpec
from trueroll.kernels.training import align, aligned_with, token_log_probs, unalign

CPU = torch.device("cpu")
BLOCK, SLOTS = 16, 6
BACKENDS = ("reference", "cpu")


class Hybrid:
    """A decoder with memory for some sequences, each with its own blocks."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype = torch.float32,
        backend: str = "reference",
        spec: DecoderSpec | None = None,
    ) -> None:
        spec = spec or describe(read_config(folder))
        ops = select_backend(backend, CPU, dtype, spec).ops
        self.model = Decoder(spec, ops, partial(torch.empty, dtype=dtype))
        weights = self.model.checkpoint_tensors()
        copy_checkpoint(check_checkpoint(folder, weights, (), spec.own_name, self.model.stack_parts()), weights)

    @cached_property
    def blocks(self) -> int:
        """The number of blocks of each sequence."""
        return self.model.spec.max_position_embeddings // BLOCK

    def memories(self, sequences: int) -> list[Memory]:
        """Return memories for the sequences, filled with NaN."""
        dtype, found = self.model.dtype, []
        for layer in self.model.spec.layers:
            memory: Memory = ()
            if layer.cached is not None:
                empty = partial(torch.full, fill_value=torch.nan, dtype=dtype)
                blocks = sequences * self.blocks, BLOCK
                memory = new_caches(self.model.ops, layer.cached, *blocks, lambda *shape, empty=empty: empty(shape))
            if (mixer := layer.recurrent) is not None:
                states = torch.full((SLOTS, *mixer.state_shape), torch.nan)
                memory = *memory, states, torch.full((SLOTS, *mixer.tail_shape), torch.nan, dtype=dtype)
            found.append(memory)
        return found

    @torch.inference_mode()
    def step(
        self,
        memories: list[Memory],
        chunks: Sequence[tuple[int, Tensor, int]],
        reads: Sequence[int],
        writes: Sequence[int],
    ) -> list[Tensor]:
        """Return the logits of chunks (sequence, token ids, position of the first token)."""
        lens = [len(ids) for _, ids, _ in chunks]
        positions = torch.cat([start + torch.arange(len(ids)) for _, ids, start in chunks])
        first = torch.tensor([i * self.blocks for i, _, _ in chunks])
        starts = [0, *torch.tensor(lens).cumsum(0).tolist()]
        contexts = [start + len(ids) for _, ids, start in chunks]
        batch = AttentionBatch(starts, contexts, first[:, None] + torch.arange(self.blocks))
        slots = first.repeat_interleave(torch.tensor(lens)) * BLOCK + positions
        states = StateBatch(starts, torch.tensor(reads), torch.tensor(writes))
        ids = torch.cat([ids for _, ids, _ in chunks])
        pages = [Pages(slots, batch)] * len(memories)
        out = self.model.forward(ModelInput(ids, positions, memories, pages, states))
        return list(self.model.ops.lm_head(out.hidden, self.model.head, self.model.spec.head).split(lens))

    def logits(self, ids: Tensor) -> Tensor:
        """Return the logits of every token of a prompt, computed in one step."""
        return self.step(self.memories(1), [(0, ids, 0)], [NO_SLOT], [3])[0]

    def log_probs(self, ids: Tensor) -> Tensor:
        """Return the log-prob of each token except the first, given the preceding tokens."""
        return self.model.ops.log_probs(self.logits(ids)[:-1], ids[1:])


def prompt(length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 500, (length,), generator=torch.Generator().manual_seed(seed))


ODD = dict(linear_num_key_heads=3, linear_num_value_heads=3, linear_key_head_dim=21, linear_value_head_dim=13)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in HYBRID},
    "odd sizes of a delta net": ("qwen3_5", ODD | dict(linear_conv_kernel_dim=3)),
    "odd sizes of a joined delta net": ("qwen3_next", ODD | dict(linear_conv_kernel_dim=2)),
    "a key head for each value head": ("qwen3_next", dict(linear_num_key_heads=4)),
    "attention alone": ("qwen3_5", dict(layer_types=["full_attention"] * 2, num_hidden_layers=2)),
    "heads that turn as a whole": ("qwen3_5", dict(partial_rotary_factor=1.0)),
    "yarn of a part": (
        "qwen3_next",
        dict(
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=1e4,
                factor=4.0,
                original_max_position_embeddings=256,
                partial_rotary_factor=0.5,
            )
        ),
    ),
    "tied": ("qwen3_5", dict(tie_word_embeddings=True)),
    "no experts": ("qwen3_next", dict(num_experts=0, mlp_only_layers=None)),
    "none but in layers beyond": ("qwen3_next", dict(decoder_sparse_step=5, mlp_only_layers=[])),
}


@proves("transformers", family=lambda name: VARIANTS[name][0], backend=BACKENDS, dtype="float32")
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    family, overrides = VARIANTS[name]
    check_against_transformers(make_tiny_model(family, tmp_path, **overrides), 700 if name in HYBRID else 100)


def check_against_transformers(folder: Path, length: int, auto_model: Any = AutoModelForCausalLM) -> None:
    model = auto_model.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    ids = prompt(length)
    with torch.no_grad():
        expected = model(ids[None], use_cache=False).logits[0]
    for backend in BACKENDS:
        found = Hybrid(folder, backend=backend).logits(ids)
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max(), backend
        assert torch.equal(found.argmax(-1), expected.argmax(-1)), backend


def test_greedy_tokens_equal_those_of_transformers(hybrid_model: Path, backend: str) -> None:
    """The tokens are decoded one by one, from states and tails."""
    model: Any = AutoModelForCausalLM.from_pretrained(hybrid_model, dtype=torch.float32)
    ids = prompt(50)
    model.generation_config.eos_token_id = None
    expected = model.generate(ids[None], max_new_tokens=20, do_sample=False)[0, 50:]
    ours = Hybrid(hybrid_model, backend=backend)
    memories = ours.memories(1)
    [logits] = ours.step(memories, [(0, ids, 0)], [NO_SLOT], [0])
    found = [logits[-1].argmax()]
    for position in range(50, 69):
        [logits] = ours.step(memories, [(0, found[-1][None], position)], [0], [0])
        found.append(logits[0].argmax())
    assert torch.equal(torch.stack(found), expected) and len(expected.unique()) > 5


@proves("company")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunks_batches_and_restored_states_change_no_bit(hybrid_model: Path, dtype: torch.dtype, backend: str) -> None:
    """One sequence resumes from the checkpoint of another sequence. The checkpoint stays for a third sequence."""
    ours, ids, other = Hybrid(hybrid_model, dtype, backend), prompt(60), prompt(45, seed=1)
    expected, expected_other = ours.logits(ids), ours.logits(other)
    memories = ours.memories(3)
    found = ours.step(memories, [(0, ids[:16], 0)], [NO_SLOT], [2])
    for _, blocks in copied_blocks(ours, memories):
        blocks[1], blocks[2] = blocks[0], blocks[0]
    after = ours.step(memories, [(1, ids[16:30], 16), (2, other, 0)], [2, NO_SLOT], [4, 0])
    rest = [ours.step(memories, [(1, ids[30:31], 30)], [4], [4])[0]]
    rest += ours.step(memories, [(2, prompt(3), 45), (1, ids[31:], 31)], [0, 4], [0, 1])[1:]
    assert torch.equal(torch.cat((*found, after[0], *rest)), expected)
    assert torch.equal(after[1], expected_other)
    [again] = ours.step(memories, [(0, ids[16:], 16)], [2], [5])
    assert torch.equal(again, expected[16:])


def copied_blocks(ours: Hybrid, memories: list[Memory]) -> list[tuple[int, Tensor]]:
    """Return copies of each cache by sequences, [sequences, blocks, ...]."""
    mixers = [layer.mixer for layer in ours.model.spec.layers]
    return [
        (i, cache.unflatten(0, (-1, ours.blocks)))
        for i, (mixer, memory) in enumerate(zip(mixers, memories, strict=True))
        if isinstance(mixer, AttentionSpec)
        for cache in memory[:2]
    ]


@proves("trainer")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_aligned_trainer_has_the_same_bits(hybrid_model: Path, dtype: torch.dtype, backend: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(hybrid_model, dtype=dtype)
    align(model, backend)
    assert aligned_with(model).backend == backend
    rows, ours = [prompt(100), prompt(3, seed=1), prompt(70, seed=2)], Hybrid(hybrid_model, dtype, backend)
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    found = token_log_probs(model, padded, mask).detach()
    packed = token_log_probs(model, torch.cat(rows), lengths=[100, 3, 70]).detach().split([100, 3, 70])
    for row, ids in enumerate(rows):
        expected = ours.log_probs(ids)
        assert torch.equal(found[row, 1 : len(ids)], expected) and torch.equal(packed[row][1:], expected)


@proves("trainer", family="qwen3_next", backend="triton", dtype="bfloat16")
def test_an_aligned_trainer_has_the_bits_of_the_triton_kernels(tmp_path: Path) -> None:
    """The kernels run in the interpreter, so the model is thin and the tokens are few. torch computes the gradients."""
    sizes: dict[str, Any] = dict(linear_num_key_heads=1, linear_num_value_heads=2, linear_value_head_dim=8)
    sizes |= dict(hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1)
    sizes |= dict(num_hidden_layers=2)
    layers: dict[str, Any] = dict(layer_types=["linear_attention", "full_attention"], mlp_only_layers=[0, 1])
    folder = make_tiny_model("qwen3_next", tmp_path, **sizes, **layers)
    ours, rows = Hybrid(folder, torch.bfloat16, "triton"), [prompt(9), prompt(3, seed=1)]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    align(model, "triton")
    packed = token_log_probs(model, torch.cat(rows), lengths=[9, 3])
    for found, ids in zip(packed.detach().split([9, 3]), rows, strict=True):
        assert torch.equal(found[1:], ours.log_probs(ids))
    packed.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


def test_master_weights_under_autocast_have_the_bits_of_bfloat16(hybrid_model: Path, backend: str) -> None:
    model, ids = AutoModelForCausalLM.from_pretrained(hybrid_model, dtype=torch.float32), prompt(70)
    align(model, backend)
    with torch.autocast("cpu", torch.bfloat16):
        found = token_log_probs(model, ids[None]).detach()
    assert torch.equal(found[0, 1:], Hybrid(hybrid_model, torch.bfloat16, backend).log_probs(ids))


VISION: dict[str, Any] = dict(
    depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=64, num_position_embeddings=16
)


def with_vision(folder: Path, **outer: Any) -> Path:
    """Write a checkpoint of Qwen3.5 with a vision tower and a multi-token prediction head."""
    text = TINY | outer | dict(num_hidden_layers=4, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4)
    text |= dict(linear_key_head_dim=16, linear_value_head_dim=16)
    config = Qwen3_5Config(text_config=text, vision_config=Qwen3_5VisionConfig(**VISION).to_dict(), **outer)
    save_tiny_model(Qwen3_5ForConditionalGeneration(config), folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"mtp.fc.weight": torch.zeros(4, 4)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("tied", [False, True])
def test_the_text_model_of_a_checkpoint_with_vision_is_served(tmp_path: Path, tied: bool) -> None:
    folder = with_vision(tmp_path, tie_word_embeddings=tied)
    names = load_file(folder / "model.safetensors").keys()
    assert any(name.startswith("model.visual.") for name in names) and "mtp.fc.weight" in names
    assert "model.language_model.embed_tokens.weight" in names
    check_against_transformers(folder, 100, Qwen3_5ForConditionalGeneration)
    raw = read_config(folder)
    trained = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    names, ours = dict(trained.named_parameters()).keys(), Hybrid(folder, backend="cpu")
    assert names == ours.model.checkpoint_tensors().keys()
    align(trained)
    assert torch.equal(token_log_probs(trained, prompt(50)[None]).detach()[0, 1:], ours.log_probs(prompt(50)))
    assert describe(raw).tie_word_embeddings is tied and "eos_token_id" in raw["text_config"]
    assert find_eos_tokens(folder, raw | {"eos_token_id": None}, 512) == (2,)


def test_a_model_with_vision_and_its_text_model_are_aligned_alike(tmp_path: Path) -> None:
    whole = Qwen3_5ForConditionalGeneration.from_pretrained(with_vision(tmp_path))
    for call in (unalign, aligned_with, partial(token_log_probs, input_ids=prompt(5)[None])):
        with pytest.raises(AlignmentError, match="model is not aligned .got a plain Qwen3_5ForConditionalGeneration"):
            call(whole)
    found = [token_log_probs(aligned(model), prompt(50)[None]) for model in (whole, text_of(tmp_path))]
    assert torch.equal(*found)


def text_of(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def aligned(model: Any) -> Any:
    align(model)
    return model


def test_unknown_and_duplicate_names_of_a_checkpoint_are_refused(tmp_path: Path) -> None:
    folder = with_vision(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.visionary.weight", "language_model.norm.weight"):
        save_file(tensors | {name: torch.zeros(1)}, folder / "model.safetensors")
        with pytest.raises(ModelError, match=f"1 unknown: {name}"):
            Hybrid(folder)
    save_file(tensors | {"model.norm.weight": torch.zeros(64)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match="1 there more than once: model.norm.weight"):
        Hybrid(folder)


# Shortened settings of a published Qwen3-Next and a published Qwen3.5.
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3_next": dict(partial_rotary_factor=0.25, rope_theta=1e7, rope_scaling=None, full_attention_interval=4),
    "qwen3_5_text": dict(
        rope_parameters=dict(
            mrope_interleaved=True,
            mrope_section=[11, 11, 10],
            partial_rotary_factor=0.25,
            rope_theta=1e7,
            rope_type="default",
        )
    ),
}


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_published_settings_are_read_as_transformers_reads_them(tmp_path: Path, model_type: str) -> None:
    architecture = {"qwen3_next": "Qwen3NextForCausalLM", "qwen3_5_text": "Qwen3_5ForCausalLM"}[model_type]
    raw = dict(architectures=[architecture], model_type=model_type, vocab_size=99, hidden_size=64, intermediate_size=77)
    raw |= dict(num_hidden_layers=8, num_experts=0) | PUBLISHED[model_type]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found, config = describe(raw), AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).model
    [rotation] = found.rotations
    assert [isinstance(layer.mixer, DeltaNetSpec) for layer in found.layers] == [True, True, True, False] * 2
    inv_freq, scale = model.rotary_emb.compute_default_rope_parameters(config)
    assert torch.equal(torch.tensor(rotation.inv_freq), inv_freq) and rotation.scale == scale
    attention, delta_net = found.layers[3].mixer, found.layers[0].mixer
    assert isinstance(attention, AttentionSpec) and isinstance(delta_net, DeltaNetSpec)
    assert attention.rotated == 2 * len(inv_freq) == 64 and attention.head_dim == config.head_dim == 256
    assert (attention.num_heads, attention.num_kv_heads) == (config.num_attention_heads, config.num_key_value_heads)
    assert delta_net.tail_shape == (3, model.layers[0].linear_attn.conv_dim)
    assert delta_net.state_shape == (32, 128, 128)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("qwen3_5", dict(linear_num_key_heads=3), "linear_num_value_heads % linear_num_key_heads .* must be 0 .got 1"),
        ("qwen3_5", dict(linear_conv_kernel_dim=0), "'linear_conv_kernel_dim'.* must be at least 1 .* .got 0"),
        (
            "qwen3_5",
            dict(layer_types=["sliding_attention"] * 4),
            "layer_types .* each full_attention or linear_attention",
        ),
        ("qwen3_5", dict(layer_types=None, full_attention_interval=0), "invalid setting: ZeroDivisionError"),
        ("qwen3_5", dict(layer_types=["linear_attention"] * 4), "at least one full_attention layer .got"),
        ("qwen3_next", dict(layer_types=None, full_attention_interval=5), "at least one full_attention layer .got"),
        (
            "qwen3_5",
            dict(rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=1.5)),
            "elements of a head .got 1.5",
        ),
        ("qwen3_5", dict(rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=0.0)), "from 2 to 16 elements"),
        ("qwen3_5", dict(attention_bias=True), "attention_bias .* must be False"),
        ("qwen3_5", dict(hidden_act="gelu"), "hidden_act .* must be 'silu'"),
        (
            "qwen3_5",
            dict(architectures=["Qwen3_5ForConditionalGeneration"]),
            "text_config in config.json must be a map .got None",
        ),
        ("llama", dict(partial_rotary_factor=0.5), "partial_rotary_factor .* must be 1.0"),
    ],
)
def test_unsupported_settings_are_refused(
    tmp_path: Path, hybrid_models: dict[str, Path], tiny_llama: Path, family: str, change: dict[str, Any], message: str
) -> None:
    raw = read_config(tiny_llama if family == "llama" else hybrid_models[family])
    with pytest.raises(ModelError, match=message):
        describe(raw | change)


@pytest.mark.parametrize(
    ("field", "most", "expected"),
    [
        ("key_head_dim", 256, "keys of a gated delta net with up to 256 elements"),
        ("kernel_size", 17, "a convolution of up to 17 tokens"),
    ],
)
def test_triton_names_settings_that_it_cannot_compute(tiny_qwen3_5: Path, field: str, most: int, expected: str) -> None:
    spec = describe(read_config(tiny_qwen3_5))
    *_, delta_net, attention = spec.layers
    assert isinstance(delta_net.mixer, DeltaNetSpec)
    mixers = [replace(delta_net.mixer, **{field: size}) for size in (most, most + 1)]
    fits, does_not = (replace(spec, layers=(attention, replace(delta_net, mixer=mixer))) for mixer in mixers)
    assert select_backend("triton", CPU, torch.bfloat16, fits).name == "triton"
    with pytest.raises(ConfigError, match=f"need {expected} .got {most + 1}.; use the backend 'reference'"):
        select_backend("triton", CPU, torch.bfloat16, does_not)


def test_random_weights_give_finite_logits(hybrid_model: Path) -> None:
    ours = Hybrid(hybrid_model)
    fill_randomly(ours.model.checkpoint_tensors(), ours.model.spec, CPU)
    weights = {name: weight.to_dense() for name, weight in ours.model.checkpoint_tensors().items()}
    for name, weight in weights.items():
        if name.endswith("norm.weight"):
            assert weight.eq(1 if "linear_attn" in name else 0).all(), name
    logits = ours.logits(prompt(200))
    assert logits.isfinite().all() and 0.5 < logits.std() < 2
