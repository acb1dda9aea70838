"""The trainer's tensors, one at a time: from a module, a mapping or an iterable, gathered where they are sharded.

Owns the order of the gathers, which every rank of the trainer goes through alike, and the word by which rank 0 tells
the others how the push ended. Does not own what is sent. Promises to keep no tensor that it has handed out, and to use
the trainer's default process group only where tensors are sharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from trueroll.errors import PushError

Tensors: TypeAlias = torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
WORD_BYTES = 8192
"""How long the word on the outcome is, padding included."""


class TrainerTensors:
    """An iterator of (name, whole tensor). `mapping`: the tensors by name, where they are known in advance.

    `is_broken`: the iterable itself raised an error, so that there is no more to come.
    """

    def __init__(self, tensors: Tensors) -> None:
        source: Any = _bare(tensors).state_dict() if isinstance(tensors, torch.nn.Module) else tensors
        if not isinstance(source, Iterable) or isinstance(source, torch.Tensor):
            raise PushError(
                "push: expected a module, a mapping of names to tensors, or an iterable of pairs, found "
                f"{type(source).__name__}; give one of them"
            )
        self.mapping: Mapping[str, torch.Tensor] | None = source if isinstance(source, Mapping) else None
        self.is_broken = False
        self._items: Iterator[tuple[str, Any]] = iter(source.items() if isinstance(source, Mapping) else source)
        self._ahead: list[Any] = []
        self._gathered_on: str | None = None

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        item = self._next()
        if not isinstance(item, tuple) or len(item) != 2:
            raise PushError(f"push: expected pairs of a name and a tensor, found {type(item).__name__}; give pairs")
        name, tensor = item
        check_is_tensor(name, tensor)
        return name, self._whole(tensor.detach()).resolve_neg()

    def _next(self) -> Any:
        if self._ahead:
            return self._ahead.pop()
        try:
            return next(self._items)
        except Exception as error:
            self.is_broken = not isinstance(error, StopIteration)
            raise

    def _whole(self, tensor: Any) -> torch.Tensor:
        if not is_sharded(tensor):
            return tensor
        self._gathered_on = device = tensor.device_mesh.device_type
        # What is offloaded to the host is gathered where its process group gathers.
        return (tensor if tensor.device.type == device else tensor.to(device)).full_tensor()

    def are_pushed_by_another_rank(self, has_workers: bool) -> bool:
        """Whether this process only takes part in gathers: it is not rank 0, and the tensors are sharded over ranks, or
        it has no workers of its own.
        """
        return _rank() != 0 and (not has_workers or self._start_sharded())

    def _start_sharded(self) -> bool:
        if self.mapping is not None:
            return any(is_sharded(tensor) for tensor in self.mapping.values())
        return is_sharded(self._peek())

    def device(self) -> torch.device:
        """Where the first tensor is; the host, if there is none."""
        first = self._peek()
        return first.device if isinstance(first, torch.Tensor) else torch.device("cpu")

    def _peek(self) -> Any:
        """The first tensor as it is, or what is in its place; None if there is none."""
        try:
            item = self._next()
        except StopIteration:
            return None
        self._ahead.append(item)
        return item[1] if isinstance(item, tuple) and len(item) == 2 else item

    def gather_rest(self) -> None:
        """Take part in the gathers that are left, for the sake of the other ranks, and keep nothing of them."""
        if self.is_broken or not _is_distributed():
            return
        while True:
            try:
                next(self)
            except StopIteration:
                return
            except PushError:
                continue  # what is no tensor needs no gather

    @property
    def were_gathered(self) -> bool:
        """Whether any tensor was sharded, so that the other ranks wait for `tell`."""
        return self._gathered_on is not None

    def tell(self, word: bytes) -> None:
        """On rank 0: tell the other ranks how it ended, in at most `WORD_BYTES`."""
        padded = bytearray(word.ljust(WORD_BYTES, b"\0"))
        distributed.broadcast(torch.frombuffer(padded, dtype=torch.uint8).to(self._gathered_on), src=0)

    def hear(self) -> bytes:
        """On another rank: wait for what rank 0 tells."""
        word = torch.empty(WORD_BYTES, dtype=torch.uint8, device=self._gathered_on)
        distributed.broadcast(word, src=0)
        return word.cpu().numpy().tobytes().rstrip(b"\0")


def _bare(module: torch.nn.Module) -> torch.nn.Module:
    """The module whose tensors have Hugging Face names."""
    while isinstance(module, DistributedDataParallel):
        module = module.module
    return module


def check_is_tensor(name: object, value: object) -> None:
    """Raise PushError unless it is a name with numbers in memory that can be copied one by one."""
    if not isinstance(name, str):
        raise PushError(f"push: expected names that are strings, found {name!r:.80}; give Hugging Face names")
    if not isinstance(value, torch.Tensor):
        raise PushError(f"tensor {name:.80}: expected a tensor, found {type(value).__name__}; leave it out")
    if value.is_meta or value.is_quantized or value.is_complex() or value.layout != torch.strided:
        kind = "on the meta device" if value.is_meta else f"of {value.dtype}, {value.layout}"
        raise PushError(f"tensor {name:.80}: expected real numbers in dense memory, found one {kind}; convert it")


def can_be_read_again(tensors: Tensors) -> bool:
    """Whether the tensors can be gone through twice, by this process alone."""
    if isinstance(tensors, torch.nn.Module):
        tensors = tensors.state_dict()
    return isinstance(tensors, Mapping) and not any(is_sharded(tensor) for tensor in tensors.values())


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor; asked this way, torch's module for them need not be loaded."""
    return hasattr(tensor, "full_tensor")


def memory_of(tensor: Any) -> tuple[object, ...]:
    """What two tensors have in common that are the same elements in memory, as long as both live."""
    local = tensor.to_local() if is_sharded(tensor) else tensor
    return local.device, local.data_ptr(), local.dtype, tuple(tensor.shape), local.stride()


def _is_distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _rank() -> int:
    return distributed.get_rank() if _is_distributed() else 0
