"""GPU memory that two processes share. Host memory replaces GPU memory in these tests."""

from __future__ import annotations

import logging
from contextlib import closing
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from trueroll.errors import PushError
from trueroll.weight_sync.payload.manifest import Bucket, CudaIpcSource, Source
from trueroll.weight_sync.transports import cuda_ipc as cuda_ipc_module
from trueroll.weight_sync.transports.cuda_ipc import CudaIpcReader, CudaIpcSlots, Driver, load_driver, tensor_at

from .stand_ins import CudaLibrary, gpu, host_tensor_at

CPU = torch.device("cpu")
PAGE = 2 * 2**20


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> CudaLibrary:
    library = CudaLibrary()
    monkeypatch.setattr(cuda_ipc_module, "load_driver", lambda: Driver(library))
    monkeypatch.setattr(cuda_ipc_module, "tensor_at", host_tensor_at)
    monkeypatch.setattr(cuda_ipc_module, "gpu_of", lambda device: gpu(0))
    return library


def test_the_worker_reads_the_bytes_of_the_trainer(library: CudaLibrary) -> None:
    slots = CudaIpcSlots(1000, CPU)
    assert [len(slot) for slot in slots.slots] == [PAGE, PAGE]  # no other allocation shares these pages
    reader = CudaIpcReader(slots.source(0), CPU)
    for index in range(4):
        slots.slots[index % 2].fill_(index)
        assert (reader.read(Bucket(index=index, num_bytes=PAGE, pieces=())) == index).all()
    with pytest.raises(PushError, match="bucket 4: has .* but a slot has only 2097152"):
        reader.read(Bucket(index=4, num_bytes=PAGE + 1, pieces=()))
    [address] = library.allocated
    assert library.opened == {address: 1}
    for _ in range(2):
        reader.close()
        assert library.opened == {address: 0} and library.allocated
    for _ in range(2):
        slots.close()
        assert not library.allocated and not slots.slots


def test_the_source_survives_the_wire(library: CudaLibrary) -> None:
    source = CudaIpcSlots(1000, CPU).source(0)
    fields = source.model_dump()
    assert {type(value) for value in fields.values()} == {str, int, bytes} and len(fields["handle"]) == 64
    assert TypeAdapter(Source).validate_python(fields) == source


@pytest.mark.parametrize(
    "change",
    [
        dict(gpu="GPU-0"),
        dict(gpu=None),
        dict(handle=b"short"),
        dict(handle=b"\0" * 65),
        dict(handle="\0" * 64),
        dict(slot_bytes=0),
        dict(slot_bytes=100),
        dict(slot_bytes=2**40),
        dict(num_slots=0),
        dict(num_slots=2**17),
        dict(name="more"),
    ],
)
def test_an_invalid_source_is_refused(change: dict[str, Any]) -> None:
    right = dict(kind="cuda_ipc", gpu=gpu(0), handle=b"\0" * 64, slot_bytes=PAGE, num_slots=2)
    assert isinstance(TypeAdapter(Source).validate_python(right), CudaIpcSource)
    with pytest.raises(ValidationError):
        TypeAdapter(Source).validate_python(right | change)


@pytest.mark.parametrize(("failing", "word"), [("cuMemAlloc_v2", "out of memory"), ("cuIpcGetMemHandle", "unknown")])
def test_memory_that_cannot_be_allocated_or_shared_is_an_error_and_is_freed(
    library: CudaLibrary, failing: str, word: str
) -> None:
    library.failing.add(failing)
    with pytest.raises(PushError, match=rf"^shared: {failing} failed .*{word}"):
        CudaIpcSlots(1000, CPU)
    assert not library.allocated


def test_torch_empties_its_cache_first(library: CudaLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    allocated_then: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: allocated_then.append(len(library.allocated)))
    CudaIpcSlots(1000, CPU)
    assert allocated_then == [0] and len(library.allocated) == 1


def test_an_error_while_freeing_is_logged_and_does_not_hide_the_pushs_error(
    library: CudaLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    library.failing.add("cuMemFree_v2")
    with caplog.at_level(logging.WARNING), pytest.raises(PushError, match="^the push's own$"):
        with closing(CudaIpcSlots(1000, CPU)):
            raise PushError("the push's own")
    assert "was not freed: shared: cuMemFree_v2 failed" in caplog.text


def test_memory_of_another_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "as_tensor", lambda *_, **__: torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(PushError, match="^shared: torch has copied the memory instead of using it on cpu"):
        tensor_at(64, 8, CPU)


def test_memory_that_is_gone_or_too_small_is_refused_and_unmapped(library: CudaLibrary) -> None:
    slots = CudaIpcSlots(1000, CPU)
    larger = slots.source(0).model_copy(update=dict(num_slots=3))
    with pytest.raises(PushError, match=f"handle has {2 * PAGE} bytes.*take {3 * PAGE}"):
        CudaIpcReader(larger, CPU)
    assert list(library.opened.values()) == [0]
    slots.close()
    with pytest.raises(PushError, match="cuIpcOpenMemHandle_v2 .*error 400 .*invalid resource handle"):
        CudaIpcReader(slots.source(0), CPU)


def test_a_worker_on_another_gpu_is_an_error(library: CudaLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = CudaIpcSlots(1000, CPU)
    for found in (gpu(1), None):
        monkeypatch.setattr(cuda_ipc_module, "gpu_of", lambda device, found=found: found)
        with pytest.raises(PushError, match=f"the trainer is on GPU {gpu(0)}, but the worker is on {found}"):
            CudaIpcReader(slots.source(0), CPU)
    assert not library.opened


def test_a_missing_driver_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(cuda_ipc_module.ctypes, "CDLL", fail)
    with pytest.raises(PushError, match="cannot load the CUDA driver: libcuda.so.1: cannot open"):
        load_driver()
