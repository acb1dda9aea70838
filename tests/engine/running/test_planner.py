"""How the planner divides memory, checked with published numbers, and which configurations the planner refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from trueroll.engine.config import EngineConfig
from trueroll.engine.running.planner import MemoryPlan, Sizes, Storage, plan_memory, scratch_bytes
from trueroll.errors import ConfigError
from trueroll.kernels.ranks import Rank, part_of
from trueroll.kernels.specs import (
    AttentionSpec,
    CachedSpec,
    DecoderSpec,
    DeltaNetSpec,
    LatentSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
)

MIB = 2**20
NORM = NormSpec(1e-6)
ATTENTION = AttentionSpec(24, 4, 256, 1.0)
DELTA = DeltaNetSpec(16, 48, 128, 128, 4, NORM)
DENSE, HYBRID = Sizes(16, 1000, 0), Sizes(16, 1000, 5000)
WINDOWED = Sizes(16, 1000, 0, ((64, 5000),))


def decoder(mixers: Sequence[CachedSpec | DeltaNetSpec]) -> DecoderSpec:
    layers = tuple(LayerSpec(mixer, MlpSpec(17408), NORM) for mixer in mixers)
    return DecoderSpec("made up", torch.bfloat16, 248320, 5120, 262144, layers, (), NORM)


def plan(sizes: Sizes, available: int = 1_000_000, max_model_len: int = 1600, **settings: Any) -> MemoryPlan:
    values = dict(model="m", kv_memory_fraction=1.0, max_num_seqs=4) | settings
    return plan_memory(EngineConfig(**values), sizes, max_model_len, available)


def test_published_figures_of_qwen3_5_27b_on_two_ranks() -> None:
    """LMDeploy published the figures. LMDeploy uses 8-bit keys and values, bfloat16 states, and tails with one more
    input.
    """
    spec = replace(decoder(([replace(DELTA, kernel_size=5)] * 3 + [ATTENTION]) * 16), pieces=2)
    sizes = Sizes.of(part_of(spec, Rank(0, 2), 16), Storage(kv=1, tail=2, state=2, kv_head=4), 64)
    assert sizes.block == 1.015625 * MIB and sizes.state == 37.875 * MIB
    found = [sizes.cached_tokens(8480 * MIB, blocks * 64) for blocks in (2, 64, 128)]
    assert found == pytest.approx([27_200, 337_600, 413_952], rel=0.005)


def test_a_layer_with_two_mixers_has_the_memory_of_both() -> None:
    one, storage = decoder([ATTENTION]), Storage.of(torch.bfloat16)
    both = replace(one, layers=(replace(one.layers[0], recurrent_mixer=DELTA),))
    assert Sizes.of(both, storage, 16, 3) == Sizes.of(decoder([DELTA, ATTENTION]), storage, 16, 3)


def test_sizes_equal_the_bytes_that_a_worker_stores() -> None:
    sizes = Sizes.of(decoder([DELTA, ATTENTION]), Storage.of(torch.bfloat16), 16)
    assert sizes.block == 16 * 2 * 4 * 256 * 2
    assert sizes.state == 48 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 48 * 128) * 2


@pytest.mark.parametrize(("holds_values", "numbers"), [(False, 576), (True, 1088)])
def test_a_backend_may_hold_the_latent_rows_twice(holds_values: bool, numbers: int) -> None:
    """All heads share the cache, so each rank has the whole cache. The sizes are those of DeepSeek V3."""
    latent = LatentSpec(128, 512, 64, 128, 128, 1.0, NORM, q_rank=1536)
    spec, storage = replace(decoder([latent] * 3), pieces=8), Storage.of(torch.bfloat16, holds_values)
    for one in (spec, part_of(spec, Rank(5, 8), 16)):
        assert Sizes.of(one, storage, 16) == Sizes(16, 3 * 16 * numbers * 2, 0)


def test_encoded_images_take_memory_before_blocks() -> None:
    assert plan(DENSE, image_cache_bytes=300_000).num_blocks == 1000, "the tower is not loaded"
    assert plan(DENSE, max_images=1, image_cache_bytes=300_000).num_blocks == 700
    for name, size in {"num_blocks": 701, "kv_memory": 701_000}.items():
        with pytest.raises(ConfigError, match="exceed the 700000 bytes of available memory"):
            plan(DENSE, kv_memory_fraction=None, max_images=1, image_cache_bytes=300_000, **{name: size})
    with pytest.raises(ConfigError, match=r"image_cache_bytes must be less than the 1000000 bytes .*got 1000000"):
        plan(DENSE, max_images=1, image_cache_bytes=1_000_000)


def test_checkpoints_take_no_more_than_the_blocks_between_them() -> None:
    assert HYBRID.interval == 8 * 16, "8 is the first power of two of blocks with at least 5,000 bytes"
    found = plan(HYBRID)
    assert found.state_interval == 128
    assert found.checkpoints == found.num_blocks // 8
    assert found.checkpoints * HYBRID.state <= found.kv_bytes
    assert 990_000 < found.kv_bytes + found.state_bytes <= 1_000_000


def test_there_is_a_live_state_per_sequence_and_some_spare() -> None:
    assert plan(HYBRID).live_states == 5
    assert plan(HYBRID, max_num_seqs=32).live_states == 36


def test_a_model_without_states_has_only_blocks() -> None:
    assert plan(DENSE) == MemoryPlan(DENSE, 1000)


def test_layers_with_the_same_window_form_a_group() -> None:
    local, wide = replace(ATTENTION, window=1024), replace(ATTENTION, window=4096)
    one = 16 * 2 * 4 * 256 * 2
    mixed = decoder([local, ATTENTION, local, wide])
    assert mixed.windows == (None, 1024, 4096)
    assert Sizes.of(mixed, Storage.of(torch.bfloat16), 16) == Sizes(16, one, 0, ((1024, 2 * one), (4096, one)))
    alone = decoder([local, local])
    assert alone.windows == (1024,)
    assert Sizes.of(alone, Storage.of(torch.bfloat16), 16) == Sizes(16, 2 * one, 0)


def test_a_window_has_blocks_for_sequences_and_for_prefixes() -> None:
    found = plan(WINDOWED, available=10_000_000, max_num_batched_tokens=32)
    running = 4 * (4 + 1) + 2 * 2
    assert found.window_blocks == (running + -(-found.num_blocks // 4),)
    assert found.pools == [(found.num_blocks, 1000), (*found.window_blocks, 5000)]
    assert 9_990_000 < found.kv_bytes <= 10_000_000
    assert found.num_blocks > 2 * 10_000_000 // 6000, "more tokens than if all layers kept all of them"


def test_a_window_has_at_most_the_blocks_of_layers_without() -> None:
    found = plan(WINDOWED, kv_memory_fraction=None, num_blocks=12)
    assert (found.num_blocks, found.window_blocks, found.kv_bytes) == (12, (12,), 72_000)


def test_windows_that_do_not_fit_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match="200 blocks of 1000 bytes, 74 blocks of 5000 bytes and 0 states"):
        plan(WINDOWED, 500_000, kv_memory_fraction=None, num_blocks=200, max_num_batched_tokens=32)


def test_without_a_prefix_cache_a_budget_of_checkpoints_takes_no_memory() -> None:
    assert plan(HYBRID, enable_prefix_caching=False, state_budget=100) == plan(HYBRID, enable_prefix_caching=False)


def test_a_plan_follows_explicit_settings() -> None:
    found = plan(HYBRID, state_interval=64, state_budget=7)
    assert (found.state_interval, found.checkpoints) == (64, 7)
    assert found.num_blocks == (1_000_000 - 12 * 5000) // 1000
    assert plan(HYBRID, state_budget=0).checkpoints == plan(HYBRID, enable_prefix_caching=False).checkpoints == 0
    given = plan(HYBRID, kv_memory_fraction=None, num_blocks=40)
    assert (given.num_blocks, given.checkpoints) == (40, 5)


def test_by_default_there_are_only_blocks_that_sequences_can_use() -> None:
    assert plan(DENSE, available=10**9, kv_memory_fraction=None).num_blocks == 4 * 100


@pytest.mark.parametrize(
    "settings,message",
    [
        (
            dict(kv_memory_fraction=None, kv_memory=25_500),
            "25500 bytes are not enough for one KV block of 1000 bytes in addition to 5 live states of 5000",
        ),
        (
            dict(max_num_seqs=400),
            "^kv_memory: 1000000 bytes .* in addition to 450 live states of 5000 bytes each; raise kv_memory, or lower",
        ),
        (
            dict(kv_memory_fraction=None, num_blocks=990),
            "990 blocks of 1000 bytes and 128 states of 5000 bytes each exceed",
        ),
        (
            dict(state_budget=500),
            "5 live states and 500 checkpoints of 5000 bytes each; raise .*, or lower max_num_seqs or state_budget",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_with_the_numbers(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(HYBRID, **settings)


@pytest.mark.parametrize("name", ["state_interval", "decode_state_interval"])
def test_an_interval_that_is_no_multiple_of_a_block_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a multiple of block_size = 16 .got 24."):
        EngineConfig(model="m", **{name: 24})


def test_the_largest_step_of_a_decoder_without_mlps() -> None:
    whole = decoder([DELTA, ATTENTION])
    bare = replace(whole, layers=tuple(replace(layer, mlp=None) for layer in whole.layers))
    without_recurrence = replace(bare, layers=bare.layers[1:])
    specs = without_recurrence, bare, whole
    found = [scratch_bytes(spec, torch.bfloat16, EngineConfig(model="m")) for spec in specs]
    assert 0 < found[0] < found[1] < found[2]


@pytest.mark.parametrize(("route_bytes", "num_blocks"), [(0, 50), (25, 35)])
def test_the_blocks_of_a_host_tier_include_their_routed_experts(route_bytes: int, num_blocks: int) -> None:
    config = EngineConfig(model="m", num_blocks=100, host_cache_bytes=50_000)
    found = plan_memory(config, DENSE, 1600, 1_000_000, route_bytes)
    assert (found.host_blocks, found.host_states) == ((num_blocks,), 0)
    assert num_blocks * (DENSE.block + DENSE.block_size * route_bytes) <= 50_000


TIERED: dict[str, Any] = dict(kv_memory_fraction=None, num_blocks=100)


def test_a_host_tier_is_divided_like_the_memory_of_the_device() -> None:
    sizes, settings = replace(WINDOWED, state=5000), TIERED | dict(state_budget=10)
    of_device = plan(sizes, **settings)
    total = of_device.kv_bytes + 10 * sizes.state
    half = plan(sizes, **settings, host_cache_bytes=total // 2)
    assert half.host_blocks == (50, of_device.window_blocks[0] // 2) and half.host_states == 5
    assert plan(sizes, **settings, host_cache_bytes=total // 2 - 1).host_states == 4
    assert replace(half, host_blocks=(), host_states=0) == of_device, "the device keeps its own memory"
    for budget in range(total // 10, total, 997):
        found = plan(sizes, **settings, host_cache_bytes=budget)
        kinds = [
            *zip(found.host_blocks, (size for _, size in found.pools), strict=True),
            (found.host_states, sizes.state),
        ]
        used, least = sum(count * size for count, size in kinds), sum(size for _, size in kinds)
        assert budget - least < used <= budget, "less than a slot of each kind is left"


def test_a_host_tier_needs_a_slot_of_each_kind() -> None:
    sizes, settings = replace(WINDOWED, state=5000), TIERED | dict(state_budget=3)
    with pytest.raises(ConfigError, match=r"host_cache_bytes must be at least \d+, .* \(got 1\)") as refused:
        plan(sizes, **settings, host_cache_bytes=1)
    assert isinstance(least := refused.value.limit, int)
    assert plan(sizes, **settings, host_cache_bytes=least).host_states == 1
    with pytest.raises(ConfigError, match=f"at least {least}"):
        plan(sizes, **settings, host_cache_bytes=least - 1)
