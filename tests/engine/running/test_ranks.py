"""A decoder on several ranks gives the bits of one device.

The steps of an engine on one device are recorded. Ranks in threads of this process compute the same steps again, with
their parts of the weights and of the memory, and draw the same tokens with the same log-probs.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matrix import thinned
from proofs import proves
from torch import Tensor

from tiny import make_tiny_model
from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.models import decoder
from trueroll.engine.parallel.leader import RankedExecutor
from trueroll.engine.request import Distribution, ScoreRequest
from trueroll.engine.running import loading
from trueroll.engine.running.executor import LocalComputation, LocalExecutor, StepResults
from trueroll.engine.running.loading import load_model
from trueroll.engine.running.ranks import Links, Topology
from trueroll.engine.running.step import Step
from trueroll.kernels import ranks
from trueroll.kernels.cpu.backend import HEAD_SECTION, PackedLayers
from trueroll.kernels.ranks import Rank, RankedOps
from trueroll.kernels.specs import AttentionSpec
from trueroll.kernels.triton import products

from ..drive import generate, run, tokens

WIDE: dict[str, Any] = dict(
    num_attention_heads=8, num_key_value_heads=2, intermediate_size=512, num_hidden_layers=4, vocab_size=1600
)
_DELTA_NET: dict[str, Any] = dict(linear_num_key_heads=4, linear_num_value_heads=8)
_GRANITE4: dict[str, Any] = dict(hidden_size=128, intermediate_size=32, mamba_n_groups=4, mamba_d_head=32)
_GRANITE4 |= dict(layer_types=[*["linear_attention"] * 3, "full_attention"])
_RECURRENT = {"linear_num_key_heads", "mamba_n_groups", "n_groups"}
_MIXTURE: dict[str, Any] = WIDE | dict(moe_intermediate_size=32)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": WIDE,
    "qwen2": WIDE | dict(hidden_size=128),
    "gemma3": WIDE | dict(layer_types=["sliding_attention", "full_attention"] * 2),
    "olmo3": WIDE | dict(hidden_size=128, layer_types=["sliding_attention", "full_attention"] * 2),
    "qwen3_5": WIDE | _DELTA_NET,
    "granite4": WIDE | _GRANITE4,
    "nemotron_h": WIDE | dict(n_groups=4),
    "falcon_h1": WIDE | dict(mamba_n_groups=4, mamba_n_heads=8, mamba_d_ssm=128),
    "qwen3_next": WIDE | _DELTA_NET | dict(mlp_only_layers=[0, 1, 2, 3]),
    "qwen3_moe": _MIXTURE,
    "qwen3_5_moe": _MIXTURE | _DELTA_NET | dict(shared_expert_intermediate_size=512),
    "qwen3_next_moe": _MIXTURE | _DELTA_NET | dict(shared_expert_intermediate_size=128),
    "glm4_moe": _MIXTURE | dict(n_shared_experts=12),
    "afmoe": _MIXTURE | dict(layer_types=["sliding_attention", "full_attention"] * 2),
    "granite": WIDE | dict(hidden_size=128),
    "phi3": WIDE | dict(hidden_size=128),
    "gpt_oss": WIDE | dict(intermediate_size=64, layer_types=["sliding_attention", "full_attention"] * 2),
    "deepseek_v3": _MIXTURE | dict(num_key_value_heads=8),
}
DYNAMIC = ("qwen3_next_moe", "llama", "falcon_h1", "glm4_moe", "deepseek_v3")
"""The families of which all ranks quantize activations. Every test run includes the first family."""
IN_STAGES = ("gemma3", "nemotron_h", "gpt_oss")
"""The families that every test run computes in stages: with windows, with state spaces, and with experts and sinks.
Other tests compute further families in stages.
"""


class Room:
    """Where `size` threads of this process meet."""

    def __init__(self, size: int) -> None:
        self.shelf, self.meeting = list[Any]([None] * size), threading.Barrier(size, timeout=120)


class ThreadExchange:
    """Moves tensors between the threads that meet in a room."""

    native = None

    def __init__(self, rank: Rank, room: Room) -> None:
        self.rank, self._room = rank, room

    def gather(self, x: Tensor) -> Sequence[Tensor]:
        self._room.shelf[self.rank.index] = x
        self._room.meeting.wait()
        found = list(self._room.shelf)
        self._room.meeting.wait()
        return found

    def add(self, own: Tensor, finish: ranks.Finish) -> Tensor:
        return finish(ranks.fold(self.gather(own)), 0)


class ThreadLink:
    """Moves tensors from one thread to another."""

    def __init__(self) -> None:
        self._queue = queue.SimpleQueue[Tensor]()

    def send(self, x: Tensor) -> None:
        self._queue.put(x.clone())

    def receive(self, out: Tensor) -> None:
        found = self._queue.get(timeout=120)
        assert found.shape == out.shape and found.dtype == out.dtype and out.is_contiguous()
        out.copy_(found)


class ThreadRanks:
    """The ranks of a topology, as threads of this process."""

    def __init__(self, topology: Topology) -> None:
        self.topology, self._everyone = topology, Room(topology.size)
        self._stages = [Room(topology.tensor) for _ in range(topology.stages)]
        self._links = [ThreadLink() for _ in range(topology.size)]  # by receiver

    def links(self, index: int) -> Links:
        topology, rank = self.topology, self.topology.rank(index)
        after = topology.after(index)
        return Links(
            topology,
            ThreadExchange(Rank(index, topology.size), self._everyone),
            ThreadExchange(rank, self._stages[topology.stage(index).index]),
            None if topology.before(index) is None else self._links[index],
            None if after is None else self._links[after],
        )

    def abort(self) -> None:
        for room in (self._everyone, *self._stages):
            room.meeting.abort()


@contextmanager
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Step, StepResults]]]:
    """Record the steps of engines on one device, and their results."""
    found = list[tuple[Step, StepResults]]()
    compute: Callable[[LocalExecutor, Step], LocalComputation] = LocalExecutor.compute

    def recorded(executor: LocalExecutor, step: Step) -> LocalComputation:
        computation = compute(executor, step)
        found.append((step, computation.wait()))
        return computation

    with monkeypatch.context() as patch:
        patch.setattr(LocalExecutor, "compute", recorded)
        yield found


def record(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Step, StepResults]]:
    """Return the steps of an engine on one device, and their results. The steps have chunks of prompts, prefix hits,
    groups, preemptions, filters, penalties, a grammar, scores, top log-probs, targets and kept sets.
    """
    with recording(monkeypatch) as found:
        engine = Engine(config)
        shared = tokens(40)
        asked = [
            generate("a", np.concatenate((shared, tokens(9, seed=1))), n=3, max_tokens=24),
            generate(
                "b",
                np.concatenate((shared, tokens(30, seed=2))),
                n=2,
                max_tokens=20,
                top_k=9,
                return_sampling_mask=True,
            ),
            generate("c", tokens(70, seed=3), max_tokens=30, temperature=0.0, top_logprobs=3),
            generate("e", tokens(9, seed=5), max_tokens=9, presence_penalty=0.5, target_token_ids=(7, 400)),
            generate("g", tokens(9, seed=6), max_tokens=9, ignore_eos=False, structured_outputs=dict(json_object=True)),
        ]
        run(engine, asked[:1])
        kept = ScoreRequest("k", tokens(50, seed=4), Distribution(top_p=0.9), return_sampling_mask=True)
        run(engine, [*asked[1:], ScoreRequest("d", tokens(50, seed=4)), kept])
        assert engine.stats().preemptions > 0 and engine.stats().prefix_hits > 0, "premise"
    return found


def replay(
    config: EngineConfig, steps: Sequence[tuple[Step, StepResults]], tensor: int, stages: int = 1, layers: int = 4
) -> list[int]:
    """Compute the steps again on `stages` stages of `tensor` ranks. Return the number of steps with different results,
    for each rank of the last stage. `layers`: the number of the model's layers.
    """
    ranks = ThreadRanks(Topology(tensor, stages))

    def compute(index: int) -> int:
        try:
            loaded = load_model(config, ranks.links(index))
            assert len(loaded.model.layers) == layers // stages, "premise"
            executor, differences = LocalExecutor(config, loaded), 0
            for step, expected in steps:
                differences += bits(executor.compute(step).wait()) != bits(expected)
            return differences
        except BaseException:
            ranks.abort()
            raise

    with ThreadPoolExecutor(ranks.topology.size) as pool:
        return list(pool.map(compute, range(ranks.topology.size)))[:tensor]


def bits(results: StepResults) -> tuple[Any, ...]:
    drawn = results.drawn
    found = None
    if drawn is not None:
        columns = [column.tobytes() for column in (drawn.token_ids, drawn.logprobs, drawn.is_finite)]
        found = *columns, drawn.records, drawn.targets, drawn.kept
    scores = [[column.tobytes() for column in columns] for columns in results.scores]
    return found, scores, None if results.routes is None else bytes(results.routes), results.expert_tokens


def config_of(family: str, folder: Path, **settings: Any) -> EngineConfig:
    model = str(make_tiny_model(family, folder, **FAMILIES[family]))
    sizes = dict(
        num_blocks=20,
        block_size=8,
        state_interval=8 if FAMILIES[family].keys() & _RECURRENT else None,
        max_num_batched_tokens=48,
        max_num_seqs=16,
        num_threads=1,
    )
    return EngineConfig(model=model, **(sizes | settings))


@proves("ranks", backend="cpu", dtype="float32")
@pytest.mark.parametrize(("tensor", "stages"), [(4, 1), (2, 2)])
@pytest.mark.parametrize("family", FAMILIES)
@thinned(lambda family, tensor, stages: stages == 1 or family in IN_STAGES)
def test_ranks_give_the_bits_of_one_device(
    family: str, tensor: int, stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(family, tmp_path)
    steps, loaded = record(config, monkeypatch), load_model(config)
    assert loaded.model.spec.pieces == 4 and len(steps) > 50, "premise"
    assert loaded.backend.name == "cpu" and -(-loaded.model.spec.vocab_size // HEAD_SECTION) == 4, "premise"
    assert replay(config, steps, tensor, stages) == [0] * tensor


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 4)])
def test_other_numbers_of_ranks_give_the_bits_of_one_device(
    tensor: int, stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of("qwen3_5_moe", tmp_path)
    assert replay(config, record(config, monkeypatch), tensor, stages) == [0] * tensor


@proves("ranks", backend="cpu", dtype="bfloat16")
@pytest.mark.parametrize("family", ["smollm3", "olmoe", "mistral3"])
def test_two_stages_of_two_ranks_give_the_bits_of_one_device(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, family, WIDE | dict(hidden_size=128, sliding_window=None))
    config = config_of(family, tmp_path, dtype="bfloat16")
    steps = record(config, monkeypatch)
    assert len(steps) > 50, "premise"
    assert replay(config, steps, 2, 2) == [0] * 2


@proves("ranks", family="qwen3_next_moe", backend="cpu", dtype="bfloat16")
@proves("ranks", family="qwen3_next_moe", backend="reference", dtype="float32")
def test_ranks_give_the_bits_of_one_device_in_bfloat16_and_on_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some ranks have an empty piece, because the shared expert has only 128 inner features."""
    for settings in (dict(dtype="bfloat16"), dict(backend="reference")):
        config = config_of("qwen3_next_moe", tmp_path, **settings)
        steps = record(config, monkeypatch)
        assert replay(config, steps, 4) == [0] * 4
        assert replay(config, steps, 2, 2) == [0] * 2


@pytest.mark.parametrize("family", DYNAMIC)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("quantization", ["fp8_dynamic", "int8_dynamic"])
@thinned(lambda family, backend, quantization: family == DYNAMIC[0] and backend == "cpu")
def test_ranks_quantize_activations_with_the_scales_of_whole_rows(
    family: str, backend: str, quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some ranks have an empty piece, because the shared expert of Qwen3-Next has only 128 inner features."""
    config = config_of(family, tmp_path, dtype="bfloat16", quantization=quantization, backend=backend)
    steps = record(config, monkeypatch)
    assert [replay(config, steps, size) for size in (2, 4)] == [[0] * 2, [0] * 4]
    monkeypatch.setattr(RankedOps, "_peaks", lambda self, x, weight: None)
    assert min(replay(config, steps, 4)) > 0, "premise: the ranks have different peaks"


of_attention, of_mlp, of_head = ranks._part_of_attention, ranks._part_of_one_mlp, ranks._part_of_head


def add_from_the_left(sums: Sequence[Tensor]) -> Tensor:
    first, *others = sums
    return sum(others, first)


def take_keys_of_another_head(spec: AttentionSpec, rank: Rank) -> Any:
    (own, parts), (_, others) = (
        of_attention(spec, rank),
        of_attention(spec, Rank(rank.size - 1 - rank.index, rank.size)),
    )
    return own, parts | {"mixer.k": others["mixer.k"]}


def take_the_features_of_another_rank(role: str, inner: int, pieces: int, rank: Rank, gated: bool) -> Any:
    (own, unit, parts), other = of_mlp(role, inner, pieces, rank, gated), Rank((rank.index + 1) % rank.size, rank.size)
    return own, unit, parts | {f"{role}.down": of_mlp(role, inner, pieces, other, gated)[2][f"{role}.down"]}


def add_in_a_ring(sums: Sequence[Tensor]) -> Tensor:
    """Add as the all-reduce of a library does: each rank begins with the columns of another rank."""
    cut = [each.tensor_split(4, 1) for each in sums]
    return torch.cat(
        [sum((cut[(first + i) % 4][first] for i in range(1, 4)), cut[first][first]) for first in range(4)], 1
    )


def shift_by_a_section(vocab_size: int, rank: Rank, section: int) -> Any:
    part = of_head(vocab_size, rank, section)
    start, length = part.ranges[0]
    return dataclasses.replace(part, ranges=((max(0, start - section), length),))


SABOTAGE: list[tuple[Any, str, Any]] = [
    (ranks, "fold", add_from_the_left),
    (ranks, "fold", add_in_a_ring),
    (ranks, "_part_of_head", shift_by_a_section),
    (ranks, "_part_of_attention", take_keys_of_another_head),
    (ranks, "_part_of_one_mlp", take_the_features_of_another_rank),
]


@pytest.mark.parametrize(("owner", "name", "other"), SABOTAGE, ids=[other.__name__ for *_, other in SABOTAGE])
def test_these_tests_find(owner: Any, name: str, other: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("llama", tmp_path)
    steps = record(config, monkeypatch)
    monkeypatch.setattr(owner, name, other)
    assert min(replay(config, steps, 4)) > 0


@pytest.mark.usefixtures("forked_ranks")
@thinned(lambda family: family in ("qwen3_5", "glm4_moe"))
@pytest.mark.parametrize("family", ["gemma3", "qwen3_5", "qwen3_5_moe", "glm4_moe", "gpt_oss"])
def test_the_sums_that_the_library_exchanges_give_the_bits_of_one_device(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank is a process, and runs its layers in one call of the library."""
    config = config_of(family, tmp_path)
    steps = record(config, monkeypatch)[:50]
    assert len(steps) == 50, "premise"
    executor = RankedExecutor(config.model_copy(update=dict(tensor_parallel_size=4)))
    try:
        assert isinstance(executor.loaded.model.layers, PackedLayers), "premise"
        assert [bits(executor.compute(step).wait()) != bits(expected) for step, expected in steps].count(True) == 0
    finally:
        executor.peers.close()


class OneAtATime:
    """The ops of a backend, for threads that cannot interpret kernels at the same time."""

    def __init__(self, backend: Any) -> None:
        self._backend, self._lock = backend, INTERPRETER

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                return found(*args, **kwargs)

        return call


INTERPRETER = threading.RLock()


@proves("ranks", backend="triton", dtype="bfloat16")
@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_5_moe", marks=pytest.mark.exhaustive)])
def test_ranks_give_the_bits_of_one_device_with_triton(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums of a product depend on the shape of the whole weight, of which a rank holds some rows. In this test, the
    sums differ for parts of the head. The products in layers are rounded to bfloat16, which hides most differences.
    """
    monkeypatch.setattr(products, "k_splits", lambda rows, columns: 1 if rows >= 3000 else 2)

    def one_at_a_time(backend: Any, exchange: Any, first_id: int) -> RankedOps:
        alone: Any = OneAtATime(backend)
        return RankedOps(alone, exchange, first_id)

    monkeypatch.setattr(loading, "RankedOps", one_at_a_time)
    sizes = dict(hidden_size=256, vocab_size=4100, num_hidden_layers=2)
    monkeypatch.setitem(FAMILIES, family, FAMILIES[family] | sizes)
    config = config_of(family, tmp_path, backend="triton", dtype="bfloat16")
    with recording(monkeypatch) as steps:
        run(Engine(config), [generate("a", tokens(9), n=2, max_tokens=2), ScoreRequest("b", tokens(8))])
    assert replay(config, steps, 4, layers=2) == [0] * 4
    monkeypatch.setattr(decoder, "mark_rows", lambda weight, full_rows: weight)
    assert min(replay(config, steps[:1], 4, layers=2)) > 0, "premise: without the mark, a rank has other bits"
