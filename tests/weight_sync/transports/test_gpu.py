"""Which transport a push uses, depending on the GPUs of the trainer and the workers."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch

from trueroll.errors import ConfigError, PushError
from trueroll.kernels.transfer import stream_beside
from trueroll.weight_sync.trainer.trainer_tensors import TrainerTensors
from trueroll.weight_sync.transports.gpu import broadcasts_between_gpus, gpu_of, made_current, shares_gpu

from .stand_ins import gpu


@pytest.fixture(autouse=True)
def _nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)


@pytest.mark.parametrize(
    ("trainer", "workers", "shared", "collective"),
    [
        (None, [None], False, False),
        (None, [1], False, False),
        (0, [None], False, False),
        (0, [0], True, "the trainer and worker 0 are both on GPU 00000000"),
        (0, [0, 0], True, "the trainer and worker 0 are both on GPU 00000000"),
        (0, [1], False, True),
        (0, [1, 2], False, True),
        (0, [0, 1], False, "the trainer and worker 0"),
        (0, [1, None], False, False),
        (0, [0, None], False, False),
        (0, [1, 1], False, "worker 0 and worker 1 are both on GPU 00000001"),
    ],
)
def test_weights_stay_on_gpus_if_possible(
    trainer: int | None, workers: list[int | None], shared: bool, collective: bool | str
) -> None:
    trainer_gpu = None if trainer is None else gpu(trainer)
    gpus = {str(i): None if number is None else gpu(number) for i, number in enumerate(workers)}
    assert shares_gpu(trainer_gpu, gpus) is shared
    if isinstance(collective, bool):
        assert broadcasts_between_gpus(trainer_gpu, gpus) is collective
    else:
        with pytest.raises(ConfigError, match=f"^collective: {collective}.* needs a GPU of its own; push by 'shared'"):
            broadcasts_between_gpus(trainer_gpu, gpus)


def test_a_trainer_without_nccl_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert not broadcasts_between_gpus(None, {"0": gpu(1)})
    with pytest.raises(ConfigError, match="^collective: this torch has no NCCL"):
        broadcasts_between_gpus(gpu(0), {"0": gpu(1)})


def test_a_cpu_is_no_gpu_and_has_no_streams() -> None:
    cpu = torch.device("cpu")
    assert gpu_of(cpu) is None and gpu_of("cpu") is None
    with made_current(cpu), stream_beside(cpu):
        assert not torch.cuda.is_initialized()


def test_the_device_is_that_of_the_first_tensor_which_is_not_lost() -> None:
    first, second = torch.ones(2, device="meta"), torch.zeros(3)
    for given in ({"a": first, "b": second}, iter([("a", first), ("b", second)])):
        tensors = TrainerTensors(given)
        assert tensors.device() == tensors.device() == torch.device("meta")
        assert tensors._next()[1] is first and tensors._next()[1] is second


def test_the_first_tensor_is_not_kept() -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    def made_one_by_one() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(3):
            tensor = torch.zeros(4)
            seen.append(weakref.ref(tensor))
            yield str(number), tensor
            del tensor

    tensors = TrainerTensors(made_one_by_one())
    tensors.device()
    assert seen[0]() is not None
    names = []
    for name, tensor in tensors:
        names.append(name)
        assert tensor.shape == (4,)
        del tensor
        assert [each() is None for each in seen] == [number < int(name) for number in range(len(seen))]
    assert names == ["0", "1", "2"]


def test_without_a_first_tensor_the_trainer_is_on_the_host() -> None:
    for given in ({}, iter([])):
        assert TrainerTensors(given).device() == torch.device("cpu")
    tensors = TrainerTensors(iter([5]))  # type: ignore[arg-type]
    assert tensors.device() == torch.device("cpu")
    with pytest.raises(PushError, match="give pairs"):
        next(tensors)


def test_an_iterable_that_raises_at_its_first_tensor_is_broken() -> None:
    def break_at_once() -> Iterator[tuple[str, torch.Tensor]]:
        raise ValueError("broken")
        yield

    tensors = TrainerTensors(break_at_once())
    with pytest.raises(ValueError, match="broken"):
        tensors.device()
    assert tensors.is_broken
