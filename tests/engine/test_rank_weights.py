"""Weights of an engine with several ranks: new weights reach all ranks, whichever way they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from matrix import thinned
from torch import Tensor

from tiny import make_tiny_model
from trueroll.engine.engine import Engine
from trueroll.engine.models.decoder import Owner
from trueroll.engine.parallel import leader
from trueroll.engine.parallel.exchange import RankError
from trueroll.engine.parallel.weights import RankedArena
from trueroll.engine.request import GenerateRequest

from .checkpoints import another_version, read_tensors, stage, stage_changes, stage_rows
from .running.test_ranks import FAMILIES
from .test_parallel import asked, bits, children, engine_of

pytestmark = pytest.mark.usefixtures("forked_ranks")
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints of a model with attention, delta nets, experts and a shared expert."""
    parent = tmp_path_factory.mktemp("versions")
    first = make_tiny_model("qwen3_5_moe", parent / "0", **FAMILIES["qwen3_5_moe"])
    return [first, *(another_version(first, parent / str(seed), seed) for seed in (1, 2))]


@pytest.fixture(scope="module")
def engines(versions: list[Path], forked_ranks: None) -> Iterator[list[Engine]]:
    """An engine with one rank, one with four, and one with two stages of two. The ranks of the third engine compute
    with copies of their weights, and exchange tensors through gloo, as ranks on GPUs do through NCCL.
    """
    path = str(versions[0])
    with ExitStack() as stack:
        one, four = (stack.enter_context(engine_of(path, size)) for size in (1, 4))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(leader, "device_of_copies", lambda device: device)
            stages = stack.enter_context(engine_of(path, 2, 2, exchange="group"))
        yield [one, four, stages]


def run(engine: Engine) -> list[tuple[Any, ...]]:
    """Return the bits of the outputs of all requests, with a few tokens for each sample."""
    for request in asked():
        if isinstance(request, GenerateRequest):
            request = replace(request, params=request.params.model_copy(update=dict(max_tokens=8)))
        engine.add(request)
    found = []
    while engine.has_unfinished:
        found += [bits(output) for output in engine.step()]
    return sorted(found)


def commit(engine: Engine, staging: Any) -> None:
    engine.commit_weights(staging, 1, "drain")
    assert staging.num_bytes == 0


def whole(engine: Engine, first: Tensors, second: Tensors) -> None:
    commit(engine, stage(engine, second, step=16))


def in_place(engine: Engine, first: Tensors, second: Tensors) -> None:
    engine.settle()
    commit(engine, stage(engine, first, in_place=True))


def some_tensors(engine: Engine, first: Tensors, second: Tensors) -> None:
    commit(engine, stage(engine, first))
    commit(engine, stage(engine, {name: tensor for name, tensor in second.items() if ".1." in name}))


def elements(engine: Engine, first: Tensors, second: Tensors) -> None:
    commit(engine, stage(engine, first))
    third = {name: torch.where(torch.rand(each.shape) < 0.1, second[name], each) for name, each in first.items()}
    commit(engine, stage_changes(engine, first, third))


def adapters(engine: Engine, first: Tensors, second: Tensors) -> None:
    commit(engine, stage(engine, first))
    adapted = "q_proj.weight", "o_proj.weight", "shared_expert.down_proj.weight"
    names = [name for name in first if name.endswith(adapted)]
    staging = engine.weights.new_staging(in_place=False)
    staging.adapt({name: (f"{name}.a", f"{name}.b", 2, 0.5) for name in names}, alone=True)
    for name in names:
        rows, columns = first[name].shape
        stage_rows(staging, {f"{name}.a": torch.randn(2, columns), f"{name}.b": torch.randn(rows, 2)})
    assert all(staging.merge(name) for name in staging.to_merge())
    commit(engine, staging)
    assert len(names) == 6 and engine.weights.base.kept.keys() == {*names}


def asleep(engine: Engine, first: Tensors, second: Tensors) -> None:
    engine.sleep(2, ["weights", "kv_cache"], "drain")
    assert engine.memory()["weights"] == engine.memory()["kv_cache"] == 0
    engine.wake_up(["weights", "kv_cache"])
    with pytest.raises(RuntimeError, match="the weights are incomplete"):
        engine.add(asked()[0])
        engine.step()
    engine.abort("a")
    commit(engine, stage(engine, second))


WAYS = [whole, in_place, some_tensors, elements, adapters, asleep]


@thinned(lambda way: way in (whole, elements, asleep))
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_new_weights_give_the_same_bits_on_one_rank_and_on_several(
    engines: list[Engine], versions: list[Path], way: Callable[[Engine, Tensors, Tensors], None]
) -> None:
    first, second = (read_tensors(each) for each in versions[1:])
    before, found = [run(engine) for engine in engines[1:]], []
    for engine in engines:
        torch.manual_seed(0)
        way(engine, first, second)
        found.append(run(engine))
    assert found[2] == found[1] == found[0] not in before
    one, *others = ({name: engine.weights.served(name) for name in engine.weights.shapes} for engine in engines)
    for each in others:
        assert each.keys() == one.keys() and all(torch.equal(each[name], tensor) for name, tensor in one.items())


def test_weights_change_between_two_steps_of_running_requests(engines: list[Engine], versions: list[Path]) -> None:
    """With several stages, a sample has a different number of tokens after the same number of steps."""
    found = []
    for engine in engines[:2]:
        commit(engine, stage(engine, read_tensors(versions[0])))
        outputs = []
        for request in asked():
            engine.add(request)
        for _ in range(8):
            outputs += engine.step()
        assert engine.has_unfinished
        outputs += engine.commit_weights(stage(engine, read_tensors(versions[1])), 2, "recompute")
        while engine.has_unfinished:
            outputs += engine.step()
        found.append(sorted(map(bits, outputs)))
    assert found[0] == found[1]


@thinned(lambda stale: stale[0] is Owner.RANK)
@pytest.mark.parametrize("stale", [(Owner.ALL, 0), (Owner.STAGE, 0), (Owner.RANK, 2)])
def test_stale_weights_are_found(
    engines: list[Engine], versions: list[Path], stale: tuple[Owner, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks that share some weights keep the earlier ones."""
    one, _, several = engines
    for engine in (one, several):
        commit(engine, stage(engine, read_tensors(versions[1])))
    assert run(several) == run(one), "premise"

    def take(own: RankedArena, other: RankedArena) -> None:
        for place, arena in own.arenas.items():
            if place != stale:
                arena.take(other.arenas[place])

    with monkeypatch.context() as patch:
        patch.setattr(RankedArena, "take", take)
        for engine in (one, several):
            commit(engine, stage(engine, read_tensors(versions[2])))
    expected = run(one)
    assert run(several) != expected
    commit(several, stage(several, read_tensors(versions[2])))
    assert run(several) == expected


def test_the_ranks_share_what_each_of_them_needs(engines: list[Engine]) -> None:
    one, four, _ = engines
    assert one.memory()["weights"] <= four.memory()["weights"] < 1.03 * one.memory()["weights"]
    resident = [process.memory_info().shared for process in children()]
    assert len(resident) == 6 and all(size > 0 for size in resident)


def test_a_rank_that_is_killed_during_a_commit_is_named(versions: list[Path]) -> None:
    others = {child.pid for child in children()}
    with engine_of(str(versions[0]), 4) as engine:
        staging = stage(engine, read_tensors(versions[1]))
        killed = [child for child in children() if child.pid not in others][2]
        killed.kill()
        psutil.wait_procs([killed], 10)
        with pytest.raises(RankError, match=rf"rank 3 of 4 \(process {killed.pid}\) ended"):
            engine.commit_weights(staging, 1, "recompute")
    assert {child.pid for child in children()} == others
