"""Updates of weights in vLLM's phases: what is served after each phase, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from fake_engine import SHAPES, FakeEngine
from http_fronts import Front, error_of, front_end
from serving import WorkerOnThread, serving, stop_after_a_step, wait_until
from skyrl_client import INIT, SkyrlClient

from trueroll.rollout import WeightPublisher
from trueroll.rollout.http.vllm.fields import REFUSED
from weight_sync.deltas.skyrl import write_delta


@pytest.fixture
def front(running: WorkerOnThread, chat_model: Path) -> Iterator[Front]:
    with front_end(running.address, tokenizer=str(chat_model), vllm=True) as front:
        yield front


def filled(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, float(value)) for name, shape in SHAPES.items()}


@pytest.fixture
def chain(tmp_path: Path, running: WorkerOnThread) -> str:
    """A chain of SkyRL. Version v consists of tensors filled with v; the worker serves version 4."""
    for version in (5, 6):
        write_delta(tmp_path / "sync", version, filled(version - 1), filled(version))
    push(running, 4)
    return str(tmp_path / "sync")


def push(worker: WorkerOnThread, version: int) -> None:
    with WeightPublisher("shared") as publisher:
        publisher.connect([worker.address])
        publisher.push(filled(version), version, allow_older=True)


def served(fake: FakeEngine, front: Front) -> set[float]:
    """Return the values of the served weights, and check that they belong to the served version."""
    values = {float(value) for tensor in fake.weights.live.values() for value in tensor.unique()}
    assert front.get("/weight_info").json() == {"weight_version": str(front.get("/health").json()["weight_version"])}
    return values


def fetch(front: Front, version: int, place: str) -> httpx2.Response:
    return front.post("/fetch_weights", {"target_version": version, "sync_dir": place})


def update(front: Front, **info: Any) -> httpx2.Response:
    return front.post("/update_weights", {"update_info": info})


def refuse(answer: httpx2.Response, status: int, text: str) -> None:
    assert answer.status_code == status and text in error_of(answer)["message"], answer.text


def checkpoint(folder: Path, value: float) -> str:
    with serving(FakeEngine()) as other, WeightPublisher("disk", folder=folder) as publisher:
        publisher.connect([other.address])
        publisher.push(filled(value), 9)
    return str(next(folder.iterdir()))


def test_the_last_phase_serves_the_version(front: Front, fake: FakeEngine, chain: str) -> None:
    assert front.post("/init_weight_transfer_engine", {"init_info": INIT}).status_code == 200
    assert fetch(front, 5, chain).json() == {"status": "ok", "target_version": 5}
    assert fetch(front, 5, f"{chain}/").status_code == 200, "a repeated fetch is a no-op"
    assert front.post("/start_weight_update").status_code == 200
    assert update(front, target_version=5, version=5, sync_dir=chain).status_code == 200
    assert served(fake, front) == {4.0}
    assert front.post("/finish_weight_update").json()["weight_version"] == "5"
    assert served(fake, front) == {5.0}
    assert fetch(front, 5, chain).status_code == 200, "the version is served"
    with SkyrlClient(front.url, front.model) as skyrl:
        skyrl.push(5, chain)
        skyrl.push(6, chain)
    assert served(fake, front) == {6.0} and front.get("/is_paused").json() == {"is_paused": False}


def test_a_request_in_flight_goes_on_with_the_new_weights(front: Front, fake: FakeEngine, chain: str) -> None:
    """SkyRL pauses with `keep`: running requests continue after the update."""
    stop_after_a_step(fake)
    with ThreadPoolExecutor(1) as threads, SkyrlClient(front.url, front.model) as skyrl:
        asked = threads.submit(skyrl.generate, [1], 2, 0)
        wait_until(lambda: not fake.flow.is_set())
        skyrl.push(5, chain)
        fake.step = type(fake).step.__get__(fake)  # type: ignore[method-assign]
        fake.flow.set()
        choice = asked.result()["choice"]
    assert choice["weight_versions"] == [{"version": "5", "start": 0, "end": 2}], "the fake engine tells one span"
    assert choice["finish_reason"] == "length" and ("commit", 5, "recompute") in fake.actions


def test_a_version_is_fetched_again_after_another_push(
    front: Front, fake: FakeEngine, running: WorkerOnThread, chain: str
) -> None:
    fetch(front, 5, chain)
    push(running, 7)
    front.post("/start_weight_update")
    assert update(front, target_version=5, sync_dir=chain).status_code == 200
    refuse(front.post("/finish_weight_update"), 409, "is not in progress; begin the push again")
    assert served(fake, front) == {7.0}
    refuse(fetch(front, 5, chain), 409, "version 5 is not newer than the served version 7")
    push(running, 5)
    assert fetch(front, 6, chain).status_code == 200


def test_a_version_of_another_run_is_not_taken_for_the_served_one(front: Front, chain: str, tmp_path: Path) -> None:
    fetch(front, 5, chain)
    front.post("/start_weight_update")
    update(front, target_version=5, sync_dir=chain)
    assert front.post("/finish_weight_update").status_code == 200
    write_delta(tmp_path / "other", 5, filled(4.0), filled(8.0))
    refuse(fetch(front, 5, str(tmp_path / "other")), 409, "version 5 is not newer than the served version 5")


def test_a_checkpoint_is_served_by_the_last_phase(front: Front, fake: FakeEngine, tmp_path: Path) -> None:
    """The test makes the calls of vLLM's `HTTPVLLMWeightSyncClient`."""
    folder = checkpoint(tmp_path, 9.0)
    for _ in range(2):
        assert front.post("/init_weight_transfer_engine", {"init_info": {}}).status_code == 200
        assert front.post("/start_weight_update").status_code == 200  # the trainer of this update ends here
    assert update(front, path=folder).status_code == 200
    assert served(fake, front) == {0.0}
    assert front.post("/finish_weight_update").json()["weight_version"] == "9"
    assert served(fake, front) == {9.0}
    assert front.post("/shutdown_weight_transfer_engine").status_code == 200
    # the path without phases is still there
    assert front.post("/update_weights", {"weight_dir": str(tmp_path / "x")}).status_code == 409


def test_phases_out_of_order_are_refused(front: Front, fake: FakeEngine, chain: str) -> None:
    begin = lambda: front.post("/start_weight_update")  # noqa: E731
    refuse(update(front, path="/x"), 409, "call /start_weight_update first")
    refuse(front.post("/finish_weight_update"), 409, "no update has named weights")
    assert begin().status_code == 200
    refuse(begin(), 409, "an update has begun already")
    refuse(front.post("/finish_weight_update"), 409, "no update has named weights")
    begin()
    refuse(update(front, target_version=5, sync_dir=chain), 409, "call /fetch_weights first")
    refuse(update(front, target_version=5, sync_dir=chain), 409, "call /start_weight_update first")
    fetch(front, 5, chain)
    begin()
    refuse(update(front, target_version=6, sync_dir=chain), 409, "version 6 of ")
    begin()
    assert update(front, target_version=5, sync_dir=chain).status_code == 200
    refuse(update(front, target_version=5, sync_dir=chain), 409, "an update serves one version")
    begin()
    update(front, target_version=5, sync_dir=chain)
    refuse(front.post("/finish_weight_update", {"weight_version": "6"}), 409, "version 5 was pulled (got 6)")
    begin()
    update(front, target_version=5, sync_dir=chain)
    refuse(front.post("/finish_weight_update", {"weight_version": "step-5"}), 400, "weight_version: must be a decimal")
    begin()
    update(front, target_version=5, sync_dir=chain)
    front.post("/shutdown_weight_transfer_engine")
    refuse(front.post("/finish_weight_update"), 409, "no update has named weights")
    assert served(fake, front) == {4.0}


def test_a_bad_chain_leaves_the_old_weights(front: Front, fake: FakeEngine, chain: str) -> None:
    [file] = Path(chain, "delta-00000005").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-9] ^= 4
    file.write_bytes(data)
    assert fetch(front, 5, chain).status_code == 409
    refuse(fetch(front, 6, chain), 409, "in version 6, expected checksum")
    refuse(fetch(front, 7, chain), 409, "no delta-00000007/manifest.json either")
    front.post("/start_weight_update")
    refuse(update(front, target_version=5, sync_dir=chain), 409, "call /fetch_weights first")
    assert served(fake, front) == {4.0}


NCCL = {"master_address": "10.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 2, "packed": True}
TENSORS = {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2]]}


@pytest.mark.parametrize(
    ("path", "fields", "text"),
    [
        ("init_weight_transfer_engine", {"init_info": NCCL}, "'master_address' is for transfers by NCCL, CUDA IPC"),
        ("init_weight_transfer_engine", {"init_info": {"packed": True}}, "'packed' is for transfers by NCCL, CUDA IPC"),
        ("init_weight_transfer_engine", {"init_info": {"nccl_unique_id_b64": "gASV"}}, "write a checkpoint and send"),
        ("init_weight_transfer_engine", {}, "init_info"),
        (
            "init_weight_transfer_engine",
            {"init_info": INIT | {"cloud_download_workers": "4"}},
            "cloud_download_workers",
        ),
        (
            "update_weights",
            {"update_info": TENSORS | {"ipc_handles_pickled": "gASV"}},
            "'dtype_names' is for transfers",
        ),
        ("update_weights", {"update_info": {"path": "/x", "names": ["a"]}}, "'names' is for transfers"),
        ("update_weights", {"update_info": [{"path": "/x"}]}, "update_info"),
        ("update_weights", {"update_info": {"path": "x"}}, "must be an absolute path"),
        ("update_weights", {"update_info": {"target_version": 5}}, "sync_dir: is missing"),
        ("fetch_weights", {"target_version": 5}, "sync_dir: is missing"),
        ("fetch_weights", {"target_version": -1, "sync_dir": "/x"}, "target_version"),
        ("fetch_weights", {"target_version": 5, "sync_dir": "x"}, "must be an absolute path or a URL"),
        ("fetch_weights", {"target_version": 5, "sync_dir": "/" + "x" * 5000}, "sync_dir"),
        ("fetch_weights", {"target_version": 5, "version": 6, "sync_dir": "/x"}, "version: 6 is wrong"),
        ("fetch_weights", {"target_version": 5, "uri": "/x/delta-00000006"}, "uri: '/x/delta-00000006' is wrong"),
        ("fetch_weights", {"target_version": 5, "sync_dir": "/y", "uri": "/x/delta-00000005"}, "uri: "),
        ("abort_requests", {"request_ids": ["a"]}, "request_ids: "),
        ("skyrl/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "x"}, "must be an absolute path"),
        ("start_weight_update", {"is_checkpoint_format": True}, "is_checkpoint_format"),
        *((path[1:], {}, f"{path}: ") for path in REFUSED),
    ],
)
def test_what_needs_gpus_or_pickles_or_is_wrong_is_refused(
    front: Front, path: str, fields: dict[str, Any], text: str
) -> None:
    if path == "update_weights":
        front.post("/start_weight_update")
    refuse(front.post(f"/{path}", fields), 400, text)


def test_a_uri_may_name_the_version(front: Front, fake: FakeEngine, chain: str) -> None:
    assert front.post("/fetch_weights", {"target_version": 5, "uri": f"{chain}/delta-00000005"}).status_code == 200
    front.post("/start_weight_update")
    assert update(front, target_version=5, sync_dir=chain).status_code == 200
    assert front.post("/finish_weight_update", {"weight_version": "5"}).status_code == 200
    assert served(fake, front) == {5.0}


def test_all_requests_end_with_their_tokens(front: Front, fake: FakeEngine) -> None:
    stop_after_a_step(fake)
    with ThreadPoolExecutor(1) as threads, SkyrlClient(front.url, front.model) as skyrl:
        asked = threads.submit(skyrl.generate, [1], 6, 0)
        wait_until(lambda: not fake.flow.is_set())
        assert front.post("/abort_requests", {"request_ids": []}).json() == {"status": "aborted", "aborted": 1}
        assert asked.result()["stop_reason"] == "abort" and len(asked.result()["response_ids"]) == 1
    assert front.get("/get_world_size?include_dp=false").json() == {"world_size": 1}
    refuse(front.get("/get_world_size?x=1"), 400, "x: unknown query parameter")


def test_the_end_of_the_front_end_drops_what_is_staged(
    fake: FakeEngine, chat_model: Path, running: WorkerOnThread, chain: str
) -> None:
    with front_end(running.address, tokenizer=str(chat_model), vllm=True) as front:
        assert fetch(front, 5, chain).status_code == 200
    push(running, 6)  # a worker has room for one staged version
    with front_end(running.address, tokenizer=str(chat_model)) as front:
        assert fetch(front, 5, chain).status_code == 404, "the paths are off by default"
