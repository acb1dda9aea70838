"""Prompts with images on several ranks: each rank encodes every image, and the bits are those of one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, cast

import pytest
from proofs import proves
from vision_models import GRIDS, make_vision_model

from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.models import decoder
from trueroll.engine.models.tower import Tower
from trueroll.engine.parallel import agreement
from trueroll.engine.parallel.agreement import Agreement
from trueroll.engine.parallel.computation import RankComputation
from trueroll.engine.parallel.exchange import RankError, Segment
from trueroll.engine.parallel.wire import packed, unpacked
from trueroll.engine.request import GenerateRequest, Output
from trueroll.engine.running.encoder import ImageEncoder
from trueroll.engine.running.executor import LocalExecutor
from trueroll.engine.running.loading import load_model
from trueroll.engine.running.ranks import Topology
from trueroll.engine.running.step import Step
from trueroll.engine.scheduling.encodings import EncodeTask
from trueroll.engine.scheduling.media import ImageRows

from .running.test_ranks import ThreadRanks, bits
from .test_images import asked, bits_of, image_of, run, tower_of

Call = tuple[str, tuple[Any, ...], Any]
"""A method of an executor or of its encoder, the arguments, and the result that every rank must have."""
FAMILIES = "qwen3_vl", "gemma3", "qwen3_5"
RANKS = Topology(2, 1), Topology(2, 2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    whole = tmp_path_factory.mktemp("vision")

    def folder_of(family: str) -> Path:
        folder = whole / family
        return folder if folder.exists() else make_vision_model(family, folder)

    return folder_of


def config_of(folder: Path, **settings: Any) -> EngineConfig:
    """Return a configuration with room for one or two encoded images, and with chunks that cut images unless the images
    must be whole.
    """
    tower = tower_of(folder)
    size = max(tower.num_tokens(*grid) for grid in GRIDS[folder.name][:2]) * tower.row_size * 4
    sizes: dict[str, Any] = dict(
        num_blocks=200,
        block_size=8,
        max_model_len=400,
        state_interval=8,
        max_images=4,
        image_cache_bytes=size + size // 4,
        max_num_batched_tokens=24 if tower.sees_span else 9,
        max_num_seqs=8,
        num_threads=1,
    )
    return EngineConfig(model=str(folder), **(sizes | settings))


def short(requests: Sequence[GenerateRequest]) -> list[GenerateRequest]:
    return [replace(each, params=each.params.model_copy(update=dict(max_tokens=5))) for each in requests]


@contextmanager
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Call]]:
    """Record the steps of engines on one device, and the calls of their encoders, in their order."""
    found, compute = list[Call](), LocalExecutor.compute
    own = {name: getattr(ImageEncoder, name) for name in ("begin", "advance", "clear")}

    def computed(executor: LocalExecutor, step: Step) -> Any:
        computation = compute(executor, step)
        found.append(("compute", (step,), bits(computation.wait())))
        return computation

    def noting(name: str) -> Callable[..., Any]:
        def call(encoder: ImageEncoder, *arguments: Any) -> Any:
            result = own[name](encoder, *arguments)
            found.append((name, arguments, result))
            return result

        return call

    with monkeypatch.context() as patch:
        patch.setattr(LocalExecutor, "compute", computed)
        for name in own:
            patch.setattr(ImageEncoder, name, noting(name))
        yield found


def record(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Return the calls of an engine that evicts images, hits the cache and sleeps. The images of causal models are cut
    into chunks.
    """
    family, tower = Path(config.model).name, tower_of(Path(config.model))
    requests = short(asked(family, tower))
    with recording(monkeypatch) as calls:
        engine = Engine(config)
        run(engine, requests)
        for request in requests:
            engine.add(request)
        while engine.stats().num_running < 2:
            engine.step()
        engine.sleep(1, ["kv_cache"], "recompute")
        engine.wake_up(["kv_cache"])
        run(engine, [])
    encodings = engine._scheduler.running.encodings
    assert encodings is not None and encodings.stats.evictions > 0, "premise"
    assert engine.stats().prefix_hits > 0 and engine.stats().recomputed > 0, "premise"
    rows = [rows for name, arguments, _ in calls if name == "compute" for rows in arguments[0].images]
    assert any(rows.start > 0 for rows in rows) != tower.sees_span, "premise: chunks cut images"
    assert "clear" in [name for name, *_ in calls], "premise"
    return calls


Prepare = Callable[[int, LocalExecutor], None]


def replay(
    config: EngineConfig, calls: Sequence[Call], topology: Topology, prepare: Prepare = lambda index, executor: None
) -> list[int]:
    """Make the calls again on several ranks. Return the number of steps with other results, for each rank of the last
    stage. `prepare`: what happens to each rank before.
    """
    ranks = ThreadRanks(topology)

    def compute(index: int) -> int:
        try:
            links = ranks.links(index)
            executor, differences = LocalExecutor(config, load_model(config, links)), 0
            assert executor.encoder is not None
            prepare(index, executor)
            agreed, segment = Agreement(links.everyone, topology.tensor), cast(Segment, None)  # GPUs need the segment
            for call in calls:
                name, arguments = unpacked(packed(*call[:2])[8:])
                if name == "compute":
                    differences += bits(RankComputation(arguments[0], executor, agreed, segment).wait()) != call[2]
                else:
                    assert getattr(executor.encoder, name)(*arguments) == call[2]
            return differences
        except RankError:
            raise  # all ranks raise it
        except BaseException:
            ranks.abort()
            raise

    with ThreadPoolExecutor(topology.size) as pool:
        return list(pool.map(compute, range(topology.size)))[: topology.tensor]


@proves("ranks", backend="cpu", dtype="float32", vision=True)
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_give_the_bits_of_one_device(
    family: str, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(folders(family))
    calls = record(config, monkeypatch)
    for topology in RANKS:
        assert replay(config, calls, topology) == [0, 0]


def test_a_layer_of_a_later_stage_gets_its_part_of_the_rows(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3-VL adds rows after its first three layers; the third one belongs to the second stage."""
    config = config_of(folders("qwen3_vl"))
    calls = record(config, monkeypatch)

    def as_a_first_stage(spec: Any, backend: Any, get: Any, layers: Any, first: int) -> Tower:
        return Tower(spec, backend, get, layers, 0)

    monkeypatch.setattr(decoder, "Tower", as_a_first_stage)
    assert replay(config, calls, Topology(2, 1)) == [0, 0]
    assert min(replay(config, calls, Topology(2, 2))) > 0


def test_a_rank_with_stale_rows_is_named(folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank has another tower. The ranks exchange sums, so all of them draw the same wrong tokens."""
    monkeypatch.setattr(agreement, "STEPS", 4)
    config = config_of(folders("qwen3_vl"))
    calls = record(config, monkeypatch)

    def keep_an_old_tower(index: int, executor: LocalExecutor) -> None:
        if index == 1:
            old = executor.weights.tensors["model.visual.blocks.1.mlp.linear_fc2.bias"]
            old.copy_(1.5 * old.to_dense())

    for topology in RANKS:
        with pytest.raises(RankError, match=r"ranks \[1\] differ from rank 0 in inputs"):
            replay(config, calls, topology, keep_an_old_tower)
    monkeypatch.setattr(ImageEncoder, "checksums", lambda encoder, images: [])
    found = replay(config, calls, Topology(2, 1), keep_an_old_tower)
    assert found[0] == found[1] > 0, "premise: the drawn tokens alone do not show it"


def test_steps_and_images_arrive_as_they_were_sent(folders: Callable[[str], Path]) -> None:
    tower = tower_of(folders("qwen3_vl"))
    task = EncodeTask(image_of(tower, (4, 6), seed=3), [bytes(range(32))])
    name, found = unpacked(packed("encoder.begin", task)[8:])
    assert name == "encoder.begin" and isinstance(found, EncodeTask) and found.evicted == task.evicted
    assert found.image.content_hash == task.image.content_hash and found.image.rows == 4
    rows = ImageRows(bytes(range(32)), 1, 5, 3)
    _, arrived = unpacked(packed("compute", [rows])[8:])
    assert arrived == [rows]
    assert {field.name for field in fields(rows)} == {"key", "start", "end", "place"}


def push(engine: Engine, factor: float, in_flight: Literal["drain", "recompute"]) -> list[Output]:
    """Commit the weights, with a layer of the tower multiplied by `factor`."""
    weights = engine.weights
    staging = weights.new_staging(in_place=False)
    for name, shape in weights.shapes.items():
        value = weights.served(name)
        staging.rows(name, 0, shape[0]).copy_(value * factor if ".visual.blocks.1." in name else value)
    return engine.commit_weights(staging, engine.weight_version + 1, in_flight)


def push_the_same(engine: Engine) -> list[Output]:
    return push(engine, 1.0, "recompute")


def sleep(engine: Engine) -> list[Output]:
    outputs = engine.sleep(1, ["weights", "kv_cache"], "recompute")
    engine.wake_up(["weights", "kv_cache"])
    return outputs


def events(engine: Engine, requests: Sequence[GenerateRequest]) -> Iterator[dict[tuple[str, int], bytes]]:
    """Yield the bits of the requests alone, with a sleep and a push in flight, and with another tower."""
    yield bits_of(run(engine, requests))
    for event in (sleep, push_the_same):
        outputs, computed, recomputed = list[Output](), engine.stats().computed_tokens, engine.stats().recomputed
        for request in requests:
            engine.add(request)
        while engine.stats().computed_tokens < computed + 40:
            outputs += engine.step()
        outputs += event(engine)
        assert engine.stats().recomputed > recomputed, "premise"
        yield bits_of(outputs + run(engine, []))
    push(engine, 1.5, "drain")
    yield bits_of(run(engine, requests))


def test_processes_give_the_bits_of_one_device(folders: Callable[[str], Path]) -> None:
    """Two stages compute two steps at a time, and each stage adds rows to its layers."""
    folder, found, held = folders("qwen3_vl"), list[Any](), list[int]()
    for topology in (Topology(1, 1), Topology(2, 2)):
        sizes = dict(tensor_parallel_size=topology.tensor, pipeline_parallel_size=topology.stages)
        engine = Engine(config_of(folder, **sizes))
        try:
            found.append([*events(engine, short(asked(folder.name, tower_of(folder))))])
            held.append(engine.memory()["weights"])
            encodings = engine._scheduler.running.encodings
            assert encodings is not None and encodings.stats.evictions > 0, "premise"
        finally:
            engine.close()
    one, several = found
    assert several == one
    assert one[0] == one[1] == one[2] != one[3], "premise: the push changes the samples"
    assert held[1] < 1.05 * held[0], "the ranks share the memory of the tower"
