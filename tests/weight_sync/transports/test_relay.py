"""Relayed pushes: the bytes arrive, whichever worker is lost, and whatever strangers send."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any

import psutil
import pytest
import torch

from trueroll.errors import ConfigError, DeadlineError, PushError
from trueroll.weight_sync.payload.manifest import Bucket, RelaySource
from trueroll.weight_sync.transports import relay as relay_module
from trueroll.weight_sync.transports import relay_reader as relay_reader_module
from trueroll.weight_sync.transports import relay_server as relay_server_module
from trueroll.weight_sync.transports.policy import PushPolicy
from trueroll.weight_sync.transports.relay import DONE, NUM_SLOTS, WELCOME, RelaySlots
from trueroll.weight_sync.transports.relay_reader import RelayReader
from trueroll.weight_sync.transports.relay_server import FRAME, HELLO, JOIN, STREAM
from trueroll.weight_sync.transports.sockets import listen

from .gloo_push import held_by, wait_until

SECONDS = 20.0
SLOT_BYTES = 10_000
MOST_FRAME_BYTES = 1000
SIZES = (10_000, 0, 1, 1000, 9_999, 10_000, 3000, 0, 10_000)
ME = psutil.Process()


@pytest.fixture(autouse=True)
def _small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (relay_server_module, relay_reader_module):
        monkeypatch.setattr(module, "MOST_FRAME_BYTES", MOST_FRAME_BYTES)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Assert that a push leaves no thread and no socket behind. Threads of earlier tests may end in the meantime."""
    before = held_by(ME)
    yield
    wait_until(
        lambda: all(now <= then for now, then in zip(held_by(ME), before, strict=True)),
        lambda: f"{before} before, {held_by(ME)} after",
    )


def bucket(index: int) -> Bucket:
    return Bucket(index=index, num_bytes=SIZES[index], pieces=())


def content(index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randint(0, 256, (SIZES[index],), dtype=torch.uint8, generator=generator)


class Push:
    """A trainer, and real and hand-made workers."""

    def __init__(self, num_workers: int, timeout: float = SECONDS) -> None:
        self.timeout = timeout
        self.lost: list[int] = []
        self.slots = RelaySlots(SLOT_BYTES, "127.0.0.1", num_workers, timeout, self.lost.append)
        self.slots.open()
        self.readers: list[RelayReader] = []
        self.others = ExitStack()
        self.num_sent = 0

    def reader(self, position: int, **changes: Any) -> RelayReader:
        source = self.slots.source(position).model_copy(update=changes)
        self.readers.append(RelayReader(source, self.timeout, PushPolicy(), lambda: False))
        return self.readers[-1]

    def hand_made(self, position: int, port: int, host: str = "127.0.0.1") -> socket.socket:
        """Join as a worker with a server that listens on `port`."""
        joined = self.others.enter_context(socket.create_connection(self.place, SECONDS, (host, 0)))
        joined.sendall(HELLO.pack(self.slots._token, JOIN, position, port))
        return joined

    @property
    def place(self) -> tuple[str, int]:
        return "127.0.0.1", self.slots._server.port

    def send(self) -> None:
        """Send the next bucket."""
        data, slot = content(self.num_sent), self.num_sent % NUM_SLOTS
        self.slots.wait(slot)
        self.slots.slots[slot][: len(data)] = data
        if len(data):
            self.slots.send(slot, len(data))
        self.num_sent += 1

    def run(self, *readers: RelayReader, until: int = len(SIZES)) -> None:
        """Send buckets up to `until`. All readers must get the right bytes."""
        while self.num_sent < until:
            self.send()
            for reader in readers:
                check(reader, self.num_sent - 1)

    def close(self) -> None:
        for reader in self.readers:
            reader.close()
        self.others.close()
        self.slots.close()
        self.slots.close()


def check(reader: RelayReader, index: int) -> None:
    data = reader.read(bucket(index))
    assert torch.equal(data[: SIZES[index]], content(index)), index


@pytest.fixture
def new_push() -> Iterator[Callable[..., Push]]:
    with ExitStack() as pushes:
        yield lambda *args, **fields: pushes.enter_context(closing(Push(*args, **fields)))


def test_all_workers_get_the_bytes_and_the_trainer_sends_them_once(new_push: Callable[..., Push]) -> None:
    push = new_push(4)
    third, first, fourth, second = [push.reader(position) for position in (2, 0, 3, 1)]
    readers = [first, second, third, fourth]
    push.slots.opened()
    push.run(*readers, until=1)
    assert len(push.slots._server._served) == 1, "one worker receives from the trainer"
    push.run(*readers)
    assert [len(reader._server._served) for reader in readers if reader._server] == [1, 1, 1, 0]
    for reader in (*readers, *readers):
        reader.close()
    wait_until(lambda: "relay-watch" not in [thread.name for thread in threading.enumerate()])
    assert push.lost == [], "a worker that closes its connection in order is not lost"


def test_chains_are_bounded_and_workers_of_one_machine_are_neighbours(
    new_push: Callable[..., Push], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "MOST_IN_CHAIN", 3)
    push, told = new_push(5), []
    joined = [push.hand_made(i, 1000 + i, host) for i, host in enumerate(["127.0.0.1", "127.0.0.2"] * 2)]
    assert all(each.recv(1) == WELCOME for each in joined)
    push.slots.opened()
    for each in joined:
        length = int.from_bytes(each.recv(2), "big")
        told.append([tuple(member) for member in json.loads(each.recv(length))])
    first, third, second = ("127.0.0.1", 1000), ("127.0.0.2", 1001), ("127.0.0.1", 1002)
    assert told == [[], [second, first], [first], []] and third[0] != first[0]


@pytest.mark.parametrize("is_closed_between", [False, True])
def test_the_rest_of_a_chain_goes_on_without_its_middle(new_push: Callable[..., Push], is_closed_between: bool) -> None:
    push = new_push(3, timeout=2.0)
    first, middle, last = (push.reader(position) for position in range(3))
    push.slots.opened()
    push.run(first, middle, last, until=3)
    if is_closed_between:
        middle.close()
    push.run(first, last)  # without a close, the middle is silent: it waits until its worker announces the bucket


FAULTS: dict[str, Callable[[bytes], bytes]] = {
    "closes at once": lambda data: b"",
    "closes in a header": lambda data: FRAME.pack(0, 1000)[:5],
    "closes in a frame": lambda data: FRAME.pack(0, 1000) + data[:500],
    "closes after a frame": lambda data: FRAME.pack(0, 1000) + data[:1000],
    "sends another bucket": lambda data: FRAME.pack(1, 1000) + data[:1000],
    "sends an empty frame": lambda data: FRAME.pack(0, 0),
    "sends a frame that is too long": lambda data: FRAME.pack(0, MOST_FRAME_BYTES + 1) + data[: MOST_FRAME_BYTES + 1],
    "sends more than the bucket": lambda data: b"".join(
        FRAME.pack(0, 900) + (data + bytes(1000))[at : at + 900] for at in range(0, 10_800, 900)
    ),
    "sends garbage": lambda data: b"GET / HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("fault", [*FAULTS, "is silent", "does not listen"])
def test_a_worker_with_a_fault_is_replaced_as_a_source(new_push: Callable[..., Push], fault: str) -> None:
    push = new_push(2, timeout=0.8 if fault == "is silent" else SECONDS)
    with listen("127.0.0.1") as listener:
        joined, reader = push.hand_made(0, listener.getsockname()[1]), push.reader(1)
        assert joined.recv(1) == WELCOME
        if fault == "does not listen":
            listener.close()
        push.slots.opened()
        push.send()
        reader.prepare(bucket(0))
        if fault != "does not listen":
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(SECONDS)
                assert connection.recv(HELLO.size) == HELLO.pack(push.slots._token, STREAM, 0, 0)
                if fault == "is silent":
                    assert connection.recv(1) == b"", "the reader has left"
                else:
                    connection.sendall(FAULTS[fault](content(0).numpy().tobytes()))
                    with suppress(OSError):  # the reader may have left already
                        connection.shutdown(socket.SHUT_WR)
                        assert connection.recv(1) == b"", "the reader has left"
        check(reader, 0)
        push.run(reader)


def test_a_push_that_is_closed_before_its_watch_runs_ends_quietly(
    new_push: Callable[..., Push], monkeypatch: pytest.MonkeyPatch
) -> None:
    started, faults = list[threading.Thread](), list[Any]()
    monkeypatch.setattr(threading, "excepthook", faults.append)
    push = new_push(1)
    assert push.hand_made(0, 1000).recv(1) == WELCOME
    monkeypatch.setattr(relay_module, "_start", lambda start: started.append(start.__self__))
    push.slots.opened()
    push.slots.close()
    [watch] = started
    watch.start()
    watch.join(SECONDS)
    assert not watch.is_alive() and not faults and not push.lost


def test_a_lost_worker_is_reported_and_one_that_leaves_in_order_is_not(new_push: Callable[..., Push]) -> None:
    push = new_push(3)
    killed, leaving, reader = push.hand_made(2, 1000), push.hand_made(1, 1001), push.reader(0)
    assert killed.recv(1) == leaving.recv(1) == WELCOME
    push.slots.opened()
    leaving.sendall(DONE)
    leaving.close()
    killed.close()
    wait_until(lambda: bool(push.lost))
    push.run(reader)
    assert push.lost == [2]


def test_without_the_trainer_the_push_ends_with_an_error(new_push: Callable[..., Push]) -> None:
    push = new_push(2)
    readers = [push.reader(position) for position in (0, 1)]
    push.slots.opened()
    push.run(*readers, until=2)
    push.slots.close()
    for reader in readers:
        with pytest.raises(DeadlineError, match=r"^relay: cannot receive from the trainer at .*; push again$"):
            reader.read(bucket(2))


def test_a_bucket_that_does_not_arrive_meets_the_timeout(new_push: Callable[..., Push]) -> None:
    push = new_push(1, timeout=0.1)
    reader = push.reader(0)
    push.slots.opened()
    with pytest.raises(DeadlineError, match=r"^relay: .*(did not arrive within 0.1 s|no answer); push again$"):
        reader.read(bucket(0))


# Strangers.

STRANGERS: dict[str, Callable[[bytes], bytes]] = {
    "another token": lambda token: HELLO.pack(bytes(16), STREAM, 0, 0),
    "another kind": lambda token: HELLO.pack(token, 9, 0, 0),
    "garbage": lambda token: b"GET / HTTP/1.1\r\nHost: here\r\nAccept: */*\r\n\r\n",
    "a bucket that is gone": lambda token: HELLO.pack(token, STREAM, 0, 0),
    "a hello that does not end": lambda token: HELLO.pack(token, STREAM, 0, 0)[:-1],
    "a late join": lambda token: HELLO.pack(token, JOIN, 1, 1000),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_strangers_are_sent_away_by_trainer_and_workers(
    new_push: Callable[..., Push], monkeypatch: pytest.MonkeyPatch, stranger: str
) -> None:
    monkeypatch.setattr(relay_server_module, "HELLO_SECONDS", 0.2)
    push = new_push(2)
    reader = push.reader(0)
    push.slots.opened()
    push.run(reader, until=7)
    assert reader._server is not None
    for port in (push.slots._server.port, reader._server.port):
        with socket.create_connection(("127.0.0.1", port), SECONDS) as connection:
            connection.sendall(STRANGERS[stranger](push.slots._token))
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""
    push.run(reader)


@pytest.mark.parametrize(("position", "port"), [(0, 1000), (2, 1000), (1, 0), (1, 2**16)])
def test_joins_that_cannot_be_right_are_refused(new_push: Callable[..., Push], position: int, port: int) -> None:
    push = new_push(2)
    reader = push.reader(0)
    assert push.hand_made(position, port).recv(1) == b""
    push.slots.opened()
    push.run(reader)


def test_the_number_of_connections_is_limited(new_push: Callable[..., Push]) -> None:
    push = new_push(1)
    reader, most = push.reader(0), relay_reader_module._MOST_CONNECTIONS
    push.slots.opened()
    assert reader._server is not None
    place = "127.0.0.1", reader._server.port
    hello = HELLO.pack(push.slots._token, STREAM, 0, 0)
    with ExitStack() as stack:
        for _ in range(most):
            stack.enter_context(socket.create_connection(place, SECONDS)).sendall(hello)
        assert reader._server is not None
        wait_until(lambda: reader._server is not None and len(reader._server._served) == most)
        with socket.create_connection(place, SECONDS) as one_more:
            assert one_more.recv(1) == b""
        push.run(reader)


# Trainers.


def told_by(answer: Callable[[socket.socket], None]) -> str:
    """Return the error of a worker that joins a hand-made trainer. `answer`: sends the trainer's answer."""
    with listen("127.0.0.1") as listener:
        host, port = listener.getsockname()
        source = RelaySource(host=host, port=port, token="0" * 32, position=0, num_slots=NUM_SLOTS)

        def run() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.recv(HELLO.size)
                answer(connection)
                connection.recv(1)

        thread = threading.Thread(target=run)
        thread.start()
        with (
            pytest.raises(PushError) as error,
            closing(RelayReader(source, 0.5, PushPolicy(), lambda: False)) as reader,
        ):
            reader.read(bucket(0))
        thread.join()
        return str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"not JSON", "JSONDecodeError"),
        (b"[" * 5000, "Error"),
        (b"{}", "invalid list"),
        (b'[["127.0.0.1"]]', "invalid list"),
        (b'[["127.0.0.1", 0]]', "invalid list"),
        (b'[["127.0.0.1", true]]', "invalid list"),
        (json.dumps([["127.0.0.1", 1]] * 33).encode(), "invalid list"),
        (b'[["10.0.0.1", 1000]]', "may not connect to the host '10.0.0.1'"),
    ],
)
def test_wrong_lists_of_members_are_refused(text: bytes, words: str) -> None:
    def answer(connection: socket.socket) -> None:
        connection.sendall(WELCOME + len(text).to_bytes(2, "big") + text)

    assert words in told_by(answer)


def test_a_trainer_that_does_not_answer_as_one_is_an_error() -> None:
    assert "cannot join the push" in told_by(lambda connection: connection.sendall(b"?"))
    assert "cannot join the push" in told_by(lambda connection: connection.shutdown(socket.SHUT_RDWR))
    assert "cannot join the push" in told_by(lambda connection: None)
    with listen("127.0.0.1") as listener:
        port = listener.getsockname()[1]
    source = RelaySource(host="127.0.0.1", port=port, token="0" * 32, position=0, num_slots=NUM_SLOTS)
    with pytest.raises(PushError, match="cannot join the push at .*refused"):
        RelayReader(source, SECONDS, PushPolicy(), lambda: False)


def test_a_closed_push_ends_the_wait_for_the_trainer() -> None:
    with listen("127.0.0.1") as silent:
        host, port = silent.getsockname()
        source = RelaySource(host=host, port=port, token="0" * 32, position=0, num_slots=NUM_SLOTS)
        start = time.monotonic()
        with pytest.raises(PushError, match="was closed"):
            RelayReader(source, SECONDS, PushPolicy(), lambda: time.monotonic() > start + 0.05)
        assert time.monotonic() < start + SECONDS / 2


def test_members_listen_at_one_address(new_push: Callable[..., Push]) -> None:
    before = listening()
    push = new_push(1)
    reader = push.reader(0)
    assert reader._server is not None
    assert listening() - before == {("127.0.0.1", push.slots._server.port), ("127.0.0.1", reader._server.port)}


def listening() -> set[tuple[str, int]]:
    return {each.laddr for each in ME.net_connections("tcp") if each.status == psutil.CONN_LISTEN}


def test_a_host_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^host: '192.0.2.1' is not an address of this machine"):
        RelaySlots(SLOT_BYTES, "192.0.2.1", 1, SECONDS, lambda position: None)
