"""Gather the trainer's tensors one at a time, check them against the workers' parameters, and share the result of a
push with all ranks.

- `TrainerTensors` takes tensors from a module, a mapping or an iterable, and gathers sharded tensors. `TrainerTensors`
  owns the order of the gathers, which is the same on every rank of the trainer. `TrainerTensors` keeps no reference to
  a returned tensor, and uses the trainer's default process group only for sharded tensors.
- `Checklist` checks names, shapes and tied values. `Checklist` keeps names and checksums, but no tensors.
- `push_on_all_ranks` runs on every rank of the trainer. Rank 0 sends the push. After the push, rank 0 takes part in the
  remaining gathers, and sends the result of the push to the other ranks in one message. The other ranks take part in
  the gathers, and return or raise the result of rank 0.

Does not own: the choice of the tensors to send.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from trueroll.errors import ConfigError, PushError, TruerollError

from ..payload.manifest import Parameters, Shape, check_complete, describe_tie, describe_unknown, spellings_of
from ..payload.tensors import dtypes_of, tensor_checksum

Tensors: TypeAlias = torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
WORD_BYTES = 8192
"""Length of the message with the result, padding included, in bytes."""


class TrainerTensors:
    """An iterator of (name, whole tensor).

    `mapping`: all tensors by name, or None if the tensors are not known in advance. `is_broken`: True once the iterable
    has raised an error, after which there are no more tensors.
    """

    def __init__(self, tensors: Tensors) -> None:
        source: Any = _bare(tensors).state_dict() if isinstance(tensors, torch.nn.Module) else tensors
        if not isinstance(source, Iterable) or isinstance(source, torch.Tensor):
            raise PushError(
                f"push: cannot push a {type(source).__name__}; give a module, a mapping of names to tensors, or an "
                "iterable of (name, tensor) pairs"
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
            raise PushError(f"push: the iterable gave a {type(item).__name__}; give pairs of a name and a tensor")
        return self._take(*item)

    def _take(self, name: str, tensor: Any) -> tuple[str, torch.Tensor]:
        check_is_tensor(name, tensor)
        return name, self._whole(tensor.detach()).resolve_neg()

    def later(self) -> Callable[[], torch.Tensor]:
        """Consume the next tensor of a mapping. Return a function that checks and returns the whole tensor.

        A sharded tensor is gathered immediately, because every rank takes part in the gather.
        """
        name, tensor = self._next()
        if is_sharded(tensor):
            whole = self._take(name, tensor)[1]
            return lambda: whole
        return lambda: self._take(name, tensor)[1]

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
        # A tensor that is offloaded to the host is gathered on the device of its process group.
        return (tensor if tensor.device.type == device else tensor.to(device)).full_tensor()

    def are_pushed_by_another_rank(self, has_workers: bool) -> bool:
        """Return whether this process only takes part in gathers.

        The result is True if this rank is not rank 0, and either the tensors are sharded or the rank has no workers.
        """
        return _rank() != 0 and (not has_workers or self._start_sharded())

    def _start_sharded(self) -> bool:
        if self.mapping is not None:
            return any(is_sharded(tensor) for tensor in self.mapping.values())
        return is_sharded(self._peek())

    def device(self) -> torch.device:
        """Return the device of the first tensor; without tensors, return the CPU."""
        first = self._peek()
        return first.device if isinstance(first, torch.Tensor) else torch.device("cpu")

    def _peek(self) -> Any:
        """Return the next tensor without consuming it. If the next item is invalid, return the item unchanged. After
        the last tensor, return None.
        """
        try:
            item = self._next()
        except StopIteration:
            return None
        self._ahead.append(item)
        return item[1] if isinstance(item, tuple) and len(item) == 2 else item

    def gather_rest(self) -> None:
        """Take part in the remaining gathers, since the other ranks wait for this rank, and discard the gathered
        tensors.
        """
        if self.is_broken or not _is_distributed():
            return
        while True:
            try:
                next(self)
            except StopIteration:
                return
            except PushError:
                continue  # an invalid item needs no gather

    @property
    def were_gathered(self) -> bool:
        """Return whether any tensor was sharded; if so, the other ranks wait for `tell`."""
        return self._gathered_on is not None

    def tell(self, word: bytes) -> None:
        """Send the result of the push from rank 0 to the other ranks. `word`: at most `WORD_BYTES`."""
        padded = bytearray(word.ljust(WORD_BYTES, b"\0"))
        distributed.broadcast(torch.frombuffer(padded, dtype=torch.uint8).to(self._gathered_on), src=0)

    def hear(self) -> bytes:
        """On a rank other than 0, return the result of the push. Waits for rank 0."""
        word = torch.empty(WORD_BYTES, dtype=torch.uint8, device=self._gathered_on)
        distributed.broadcast(word, src=0)
        return word.cpu().numpy().tobytes().rstrip(b"\0")


def _bare(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside its wrappers. The tensors of the inner module have Hugging Face names."""
    while isinstance(module, DistributedDataParallel):
        module = module.module
    return module


def check_is_tensor(name: object, value: object) -> None:
    """Raise PushError unless `name` is a string and `value` is a dense tensor of real numbers. Also raise PushError for
    a tensor on the meta device.
    """
    if not isinstance(name, str):
        raise PushError(f"push: a name must be a string (got {name!r:.80}); give Hugging Face names")
    if not isinstance(value, torch.Tensor):
        raise PushError(f"tensor {name:.80}: is a {type(value).__name__}, not a tensor; leave it out")
    if value.is_meta or value.is_quantized or value.is_complex() or value.layout != torch.strided:
        kind = "on the meta device" if value.is_meta else f"of {value.dtype}, {value.layout}"
        raise PushError(f"tensor {name:.80}: is {kind}; only dense tensors of real numbers can be pushed; convert it")


def can_be_read_again(tensors: Tensors) -> bool:
    """Return whether this process can iterate over the tensors a second time without help from the other ranks."""
    if isinstance(tensors, torch.nn.Module):
        tensors = tensors.state_dict()
    return isinstance(tensors, Mapping) and not any(is_sharded(tensor) for tensor in tensors.values())


def is_sharded(tensor: Any) -> bool:
    """Return whether the tensor is a DTensor. Does not import torch's DTensor module."""
    return hasattr(tensor, "full_tensor")


def memory_of(tensor: Any) -> tuple[object, ...]:
    """Return a key for a tensor. The keys of two live tensors are equal if the tensors have the same elements in the
    same memory.
    """
    local = tensor.to_local() if is_sharded(tensor) else tensor
    return local.device, local.data_ptr(), local.dtype, tuple(tensor.shape), local.stride()


def _is_distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _rank() -> int:
    return distributed.get_rank() if _is_distributed() else 0


class Checklist:
    """Checks the pushed tensors against the parameters that the workers want.

    `wanted`: the workers' parameters. `mapping`: all tensors, if they are known in advance. The constructor checks all
    tensors in `mapping`. Raise PushError for a tensor that is unknown, misshapen or missing.
    """

    def __init__(self, wanted: Parameters, mapping: Mapping[str, torch.Tensor] | None) -> None:
        self._wanted = wanted
        self._spellings = spellings_of(wanted)
        self._seen: set[str] = set()
        self._dtype_of = dtypes_of(wanted)
        self._checksums: dict[str, int] = {}
        self._ties = dict(wanted.tied)
        if mapping is not None:
            for name, tensor in mapping.items():
                check_is_tensor(name, tensor)
                self._check(name, tuple(tensor.shape))
            check_complete(mapping.keys(), wanted)
            self._ties = {name: other for name, other in wanted.tied.items() if _are_apart(mapping, name, other)}

    def take(self, name: str, tensor: torch.Tensor) -> bool:
        """Check a tensor. Return whether this tensor must be sent. Raise PushError if the tensor is wrong or was sent
        before.
        """
        self._check(name, tuple(tensor.shape))
        if name in self._seen:
            raise PushError(f"tensor {name}: was sent twice; leave one out")
        self._seen.add(name)
        if name in self._ties or name in self._ties.values():
            self._checksums[name] = tensor_checksum(tensor, self._dtype_of(self._wanted.tied.get(name, name)))
        return self._spellings.shape(name) is not None

    def finish(self) -> None:
        """Raise PushError if a parameter is missing, or if two tensors differ although the worker has tied them."""
        check_complete(self._seen, self._wanted)
        for name, other in self._ties.items():
            if name in self._checksums and self._checksums[name] != self._checksums[other]:
                raise PushError(describe_tie(name, other))

    def _check(self, name: str, shape: Shape) -> None:
        wanted = self._wanted
        if name in wanted.ignored:
            return
        expected = self._spellings.shape(wanted.tied.get(name, name))
        if expected is None:
            raise PushError(describe_unknown(name, wanted))
        if shape != expected:
            raise PushError(
                f"tensor {name}: expected shape {list(expected)}, found {list(shape)}; check that trainer and worker "
                "have the same model"
            )


def _are_apart(mapping: Mapping[str, torch.Tensor], name: str, other: str) -> bool:
    return name in mapping and memory_of(mapping[name]) != memory_of(mapping[other])


MOST_TOLD = 40


@dataclass(frozen=True)
class PushResult:
    """The result of a push.

    `num_bytes`: bytes sent to each worker. `seconds`: duration of each phase. `pause_seconds`: the longest time for
    which the commit prevented a worker's engine from running steps. `is_sparse`: True if only changed elements were
    sent. `left_out`: addresses of workers that were lost; the push continued without these workers. On ranks other than
    0, `left_out` has at most `MOST_TOLD` addresses.
    """

    version: int
    push_id: str
    num_bytes: int
    total_seconds: float
    seconds: dict[str, float]
    pause_seconds: float
    is_sparse: bool
    left_out: list[str] = field(default_factory=list)


def push_on_all_ranks(
    tensors: Tensors, has_workers: bool, push: Callable[[TrainerTensors], PushResult | None]
) -> PushResult | None:
    """Run `push`, and return or raise its result on every rank of the trainer. Return None if no worker needed the
    push.

    If tensors are sharded, only rank 0 pushes. A rank other than 0 does not push if it has no workers. A rank that does
    not push takes part in gathers, and does nothing else.
    """
    with torch.no_grad():
        from_trainer = TrainerTensors(tensors)
        if from_trainer.are_pushed_by_another_rank(has_workers):
            return _follow(from_trainer)
        return _lead(from_trainer, push)


def _lead(tensors: TrainerTensors, push: Callable[[TrainerTensors], PushResult | None]) -> PushResult | None:
    """Push, take part in the remaining gathers, and send the result to the other ranks."""
    try:
        result = push(tensors)
    except Exception as error:
        tensors.gather_rest()
        if tensors.were_gathered and not tensors.is_broken:
            tensors.tell(_failure_word(error))
        raise
    if result is None:
        tensors.gather_rest()
    if tensors.were_gathered:
        tensors.tell(_result_word(result))
    return result


def _follow(tensors: TrainerTensors) -> PushResult | None:
    """Take part in the gathers, and receive the result of the push from rank 0."""
    tensors.gather_rest()
    if not tensors.were_gathered:
        raise ConfigError(
            "push: ranks other than 0 take part only in pushes of sharded tensors, but no tensor is sharded; push from "
            "rank 0 alone"
        )
    word = json.loads(tensors.hear())
    if "error" in word:
        raise PushError(f"failed on rank 0 of the trainer: {word['error']}")
    return word["result"] and PushResult(**word["result"])


def _result_word(result: PushResult | None) -> bytes:
    fields = result and asdict(result) | {"left_out": result.left_out[:MOST_TOLD]}
    return json.dumps({"result": fields}, ensure_ascii=False).encode()


def _failure_word(error: Exception) -> bytes:
    text = str(error) if isinstance(error, TruerollError) else f"{type(error).__name__}: {error}"
    return json.dumps({"error": text[: WORD_BYTES // 4 - 16]}, ensure_ascii=False).encode()[:WORD_BYTES]
