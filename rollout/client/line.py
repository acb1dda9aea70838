"""A socket to one worker that is opened anew whenever its connection ends.

Owns: the DEALER socket, the tasks that read it and follow what becomes of it, and the event loop and the process that
it belongs to. Does not own: what the frames mean, nor who waits for them.

Promise: what answers is the worker that was meant: it has the key that it should have, or runs as this user or root.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Protocol

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from trueroll.errors import ConfigError, ForbiddenError, TruerollError

from ..config import check_address
from ..network.keys import Key, client_keys, use_curve
from .loop_thread import wrong_process

LINGER_MS = 200
SETTLE_SECONDS = 0.05
"""The end of a connection is told a moment before its last messages can be read."""
RETRY_MS = 200
HEARTBEAT_MS = 10_000


class Listener(Protocol):
    """Whom a line tells what happens to it. What is raised ends the line."""

    def heard(self, frame: bytes) -> None:
        """The worker has sent a frame."""
        ...

    def connected(self) -> None:
        """There is a connection, by which nothing was sent yet."""
        ...

    def disconnected(self) -> None:
        """There is no connection, or not the one that was."""
        ...

    def failed(self, error: TruerollError) -> None:
        """A task of the line has failed: nothing is heard any more."""
        ...


class Line:
    """A line to `address`, for which `server_public_key` and `client_key` are those of a client."""

    def __init__(self, address: str, server_public_key: Key | None, client_key: Key | None, listener: Listener) -> None:
        check_address(address, has_keys=server_public_key is not None)
        self.address = address
        self._keys = client_keys(address, server_public_key, client_key)
        self._listener = listener
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._home: tuple[int, asyncio.AbstractEventLoop] | None = None

    @property
    def is_open(self) -> bool:
        """Whether it was opened and not closed since."""
        return bool(self._tasks)

    def open(self) -> None:
        """Connect, from the running event loop. Raise ConfigError for an address that cannot be connected to."""
        self._home = os.getpid(), asyncio.get_running_loop()
        self._context = zmq.asyncio.Context()
        self._connect()

    def send(self, frame: bytes) -> None:
        """Send a frame by the connection that there is."""
        self._socket.send(frame)

    def spawn(self, name: str, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a task as long as the line is open."""
        self._tasks[name] = asyncio.create_task(coroutine)
        self._tasks[name].add_done_callback(self._on_task_end)

    async def close(self) -> None:
        """Disconnect, if the line is open."""
        tasks, self._tasks = self._tasks, {}
        if not tasks:
            return
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        self._socket.disable_monitor()
        self._context.destroy(linger=LINGER_MS)

    def not_at_home(self) -> TruerollError | None:
        """What is wrong with a call from here: another process, or another event loop, than those that opened it."""
        if self._home is None:
            return None
        pid, loop = self._home
        if error := wrong_process(pid):
            return error
        with suppress(RuntimeError):  # none runs: the garbage collector closes a stream
            if asyncio.get_running_loop() is loop:
                return None
        return TruerollError(
            "client: expected a call in the event loop of its first one, found another loop; make a client in each, or "
            "use RolloutClient"
        )

    def _connect(self) -> None:
        """A socket for one connection: what could not be sent by it shall not go to whoever is there next.

        It does where the event loop stands still for longer than `RETRY_MS` just then: the socket connects by itself.
        """
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.RECONNECT_IVL, RETRY_MS)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.IPV6, "[" in self.address)
        self._socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.set(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
        if self._keys is not None:
            use_curve(self._socket, self._keys)
        monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED
        )
        try:
            self._socket.connect(self.address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"address: cannot connect to {self.address}: {error.strerror}; correct it") from None
        self.spawn("read", self._read())
        self.spawn("follow", self._follow(monitor))

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            known = error if isinstance(error, TruerollError) else TruerollError(f"client: broke down ({error!r})")
            self._listener.failed(known)

    async def _read(self) -> None:
        while True:
            frame = await self._socket.recv(copy=False)
            self._check_worker(frame)
            self._listener.heard(frame.bytes)

    def _check_worker(self, frame: zmq.Frame) -> None:
        """Raise ForbiddenError if no keys vouch for it, and another user has taken the place of the worker."""
        if self._keys is not None:
            return
        uid = int(str(frame.get("Peer-Address")).split(":")[1])
        if uid not in (os.geteuid(), 0):
            raise ForbiddenError(
                f"worker: expected one of user {os.geteuid()} or of root at {self.address}, found one of user {uid}; "
                "choose an address in a folder of your own, or use keys"
            )

    async def _follow(self, monitor: Any) -> None:
        while True:
            event = await recv_monitor_message(monitor)
            self._listener.disconnected()
            if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise ForbiddenError(
                    f"worker: expected the one at {self.address} to know this client's key, found that it does not; "
                    "add its public key to the worker's clients_file and start the worker anew"
                )
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._listener.connected()
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                return await self._connect_anew()

    async def _connect_anew(self) -> None:
        """The connection has ended: read what came by it, and make another one."""
        reader = self._tasks["read"]
        await asyncio.sleep(SETTLE_SECONDS)
        while int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN and not reader.done():
            await asyncio.sleep(0)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        self._socket.disable_monitor()
        self._socket.close(linger=0)
        self._connect()
