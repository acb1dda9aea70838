"""Exchange of tensors between ranks through libraries that only move bytes. The libraries are the process groups of
torch.distributed (NCCL on GPUs, gloo on a CPU), and torch's symmetric memory, in which a GPU reads the memory of other
GPUs.

The ranks find each other through a file, not through a port. gloo connects through the loopback interface, and so does
NCCL unless `NCCL_SOCKET_IFNAME` is set.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed
from torch import Tensor

from trueroll.errors import ConfigError

from ...kernels.ranks import Finish, Rank, fold
from ..running.ranks import Links
from .exchange import RankError

c10d: Any = torch.distributed  # torch documents stores and groups, but does not export them
MOST_SECONDS_TO_JOIN = 600.0
ONE_SHOT_BYTES = 2**20
"""Tensors with more bytes are added in two steps: each rank adds a share of the rows and applies `finish` to the sums,
then the ranks gather the results.
"""
BUFFER_BYTES = 64 * 2**20
_NO_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "NCCL_SOCKET_IFNAME": "lo"}
_environment = threading.Lock()


class GroupExchange:
    """The `Exchange` of a rank of a process group, and the `Link` between two ranks. `check()`: raises an exception if
    another rank has ended.
    """

    native = None

    def __init__(self, rank: Rank, name: str, check: Callable[[], object]) -> None:
        self.rank, self._name, self._check, self._group = rank, name, check, cast(Any, None)

    def join(self, store: Any, device: torch.device) -> None:
        """Join the process group. Raise RankError if the other ranks do not join in time."""
        store = c10d.PrefixStore(self._name, store)
        try:
            self._group = (_nccl if device.type == "cuda" else _gloo)(store, self.rank, device)
        except RuntimeError as error:
            raise _failure(self._check, f"the ranks could not connect: {error}") from error

    def gather(self, x: Tensor) -> Sequence[Tensor]:
        """See `Exchange.gather`."""
        out = x.new_empty(self.rank.size * x.numel())
        self._wait(self._group._allgather_base(out, x.contiguous().view(-1)))
        return out.view(self.rank.size, *x.shape).unbind()

    def add(self, own: Tensor, finish: Finish) -> Tensor:
        """See `Exchange.add`."""
        if own.nbytes <= ONE_SHOT_BYTES:
            return finish(fold(self.gather(own)), 0)
        size, (rows, columns) = self.rank.size, own.shape
        share = -(-rows // size)
        sent = own if share * size == rows else torch.cat((own, own.new_zeros(share * size - rows, columns)))
        found = torch.empty_like(sent)
        self._wait(self._group.alltoall_base(found.view(-1), sent.view(-1), [], []))
        return joined(self, fold(found.view(size, share, columns).unbind()), finish, rows)

    def send(self, x: Tensor) -> None:
        """See `Link.send`."""
        self._wait(self._group.send([x.contiguous().view(-1)], 1, 0))

    def receive(self, out: Tensor) -> None:
        """See `Link.receive`."""
        self._wait(self._group.recv([out.view(-1)], 0, 0))

    def abort(self) -> None:
        """End the operations of the group on a GPU, so that the process can end."""
        if isinstance(self._group, getattr(c10d, "ProcessGroupNCCL", ())):
            self._group.abort()

    def _wait(self, work: Any) -> None:
        """Wait for an operation. On a GPU, the current stream waits, not this thread."""
        try:
            work.wait()
        except RuntimeError as error:
            raise _failure(self._check, f"the ranks could not exchange tensors: {error}") from error


def joined(exchange: GroupExchange | SymmetricExchange, own: Tensor, finish: Finish, rows: int) -> Tensor:
    """Apply `finish` to the rows that this rank has summed, then gather the finished rows of all ranks. `rows`: the
    number of rows of all ranks together. `own`: this rank's share, which may end with padding.
    """
    start = exchange.rank.index * len(own)
    made = finish(own[: max(0, min(len(own), rows - start))], start)
    if len(made) < len(own):
        made = torch.cat((made, made.new_zeros(len(own) - len(made), *made.shape[1:])))
    return torch.cat([*exchange.gather(made)])[:rows]


class Handle(Protocol):
    """The interface of torch's symmetric memory: the buffers of all ranks, and a barrier on the current stream."""

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> Tensor: ...

    def barrier(self, channel: int = 0) -> None: ...


class SymmetricExchange:
    """The `Exchange` of a rank on a GPU that can read the buffers of the other ranks. `fold_peers(sums)`: returns the
    same bits as `kernels.ranks.fold(sums)`, in one kernel.

    A rank writes to its buffer between two barriers. The write and both barriers run on the GPU's stream, so a CUDA
    graph can capture any number of calls.
    """

    native = None

    def __init__(self, rank: Rank, name: str, fold_peers: Callable[[Sequence[Tensor]], Tensor]) -> None:
        self.rank, self._name, self._fold, self._handle = rank, name, fold_peers, cast(Handle, None)

    def join(self, store: Any, device: torch.device) -> None:
        """Allocate this rank's buffer, and map the buffers of the other ranks. Raise ConfigError if torch cannot
        allocate or map the buffers.
        """
        try:
            memory: Any = cast(Any, torch._C)._distributed_c10d._SymmetricMemory
            memory.set_group_info(self._name, *self.rank, c10d.PrefixStore(self._name, store))
            buffer = memory.empty_strided_p2p((BUFFER_BYTES,), (1,), torch.uint8, device, self._name)
            self._handle = memory.rendezvous(buffer)
        except (AttributeError, RuntimeError) as error:
            text = f"exchange: torch cannot use symmetric memory on {device}: {error}; use group or shared"
            raise ConfigError(text, field="exchange", value="symmetric") from error

    def abort(self) -> None:
        """Do nothing, because a barrier in flight ends with the process."""

    def gather(self, x: Tensor) -> Sequence[Tensor]:
        """See `Exchange.gather`."""
        flat = x.contiguous().view(-1)
        out = x.new_empty(self.rank.size, flat.numel())
        most = BUFFER_BYTES // x.element_size()
        for start in range(0, flat.numel(), most):
            part = flat[start : start + most]
            for index, peer in enumerate(self._shared(part)):
                out[index, start : start + len(part)] = peer
        return out.view(self.rank.size, *x.shape).unbind()

    def add(self, own: Tensor, finish: Finish) -> Tensor:
        """See `Exchange.add`."""
        most = max(1, BUFFER_BYTES // own[:1].nbytes) if len(own) else 1
        parts = [self._add(own[start : start + most], finish, start) for start in range(0, max(1, len(own)), most)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _add(self, own: Tensor, finish: Finish, start: int) -> Tensor:
        """Add rows that fit into the buffer. `start`: the index of the first row."""
        peers, rows = self._shared(own), len(own)
        if own.nbytes <= ONE_SHOT_BYTES:
            return finish(self._fold(peers), start)
        share = -(-rows // self.rank.size)
        first = min(rows, self.rank.index * share)
        mine = self._fold([peer[first : first + share] for peer in peers])
        if len(mine) < share:
            mine = torch.cat((mine, mine.new_zeros(share - len(mine), own.shape[1])))
        return joined(self, mine, lambda total, at: finish(total, start + at), rows)

    def _shared(self, x: Tensor) -> list[Tensor]:
        """Write a tensor to this rank's buffer. Return the tensors of all ranks. The returned tensors are valid until
        the next call.
        """
        peers = [self._handle.get_buffer(index, x.shape, x.dtype) for index in range(self.rank.size)]
        self._handle.barrier()  # all ranks have finished reading the buffers
        peers[self.rank.index].copy_(x)
        self._handle.barrier()
        return peers


class Connections:
    """A rank's exchanges through libraries, which replace the exchanges in `links`. `kind`: how the ranks of a stage
    exchange tensors, `group` or `symmetric`. Stages are linked by process groups.
    """

    def __init__(self, links: Links, kind: str, check: Callable[[], object]) -> None:
        topology, index = links.topology, links.everyone.rank.index
        rank, before, after = topology.rank(index), topology.before(index), topology.after(index)
        self._before = None if before is None else GroupExchange(Rank(1, 2), f"link{index}", check)
        self._stage: GroupExchange | SymmetricExchange | None = None
        if topology.tensor > 1:
            name = f"stage{topology.stage(index).index}"
            self._stage = GroupExchange(rank, name, check) if kind == "group" else _symmetric(rank, name)
        self._after = None if after is None else GroupExchange(Rank(0, 2), f"link{after}", check)
        stage = links.stage if self._stage is None else self._stage
        self.links = links._replace(stage=stage, before=self._before, after=self._after)

    def join(self, folder: Path, device: torch.device) -> None:
        """Connect this rank with the other ranks. The ranks find each other through a file in `folder`."""
        store = c10d.FileStore(str(folder / "store"), -1)
        store.set_timeout(timedelta(seconds=MOST_SECONDS_TO_JOIN))
        for exchange in self._all:
            exchange.join(store, device)

    def abort(self) -> None:
        """End the exchanges in flight."""
        for exchange in self._all:
            exchange.abort()

    @property
    def _all(self) -> list[GroupExchange | SymmetricExchange]:
        return [each for each in (self._before, self._stage, self._after) if each is not None]


def _symmetric(rank: Rank, name: str) -> SymmetricExchange:
    from ...kernels.triton.peers import fold_peers

    return SymmetricExchange(rank, name, fold_peers)


def _failure(check: Callable[[], object], text: str) -> RankError:
    """Return the error of a failed exchange. If `check` raises an error within two seconds, because a rank has ended,
    the error of `check` is raised instead, because it names the cause.
    """
    for _ in range(20):
        check()
        time.sleep(0.1)
    return RankError(text)


def _gloo(store: Any, rank: Rank, device: torch.device) -> Any:
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=MOST_SECONDS_TO_JOIN)
    return c10d.ProcessGroupGloo(store, rank.index, rank.size, options)


def _nccl(store: Any, rank: Rank, device: torch.device) -> Any:
    if not hasattr(c10d, "ProcessGroupNCCL"):
        raise ConfigError(
            "exchange: this build of torch has no NCCL; set exchange to shared", field="exchange", value="group"
        )
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=MOST_SECONDS_TO_JOIN)
    with _variables(_NO_WATCHDOG):
        group = c10d.ProcessGroupNCCL(store, rank.index, rank.size, options)
        group.eager_connect_single_device(device)
    return group


@contextmanager
def _variables(wanted: dict[str, str]) -> Iterator[None]:
    """Set the given environment variables inside the `with` block, except the variables that are already set. NCCL
    reads the variables when a group is created. The variables turn off the watchdog of NCCL groups, which would kill
    the process if a rank hangs. Instead of the watchdog, the leader ends the ranks.
    """
    with _environment:
        added = {name: value for name, value in wanted.items() if name not in os.environ}
        os.environ.update(added)
        try:
            yield
        finally:
            for name in added:
                del os.environ[name]
