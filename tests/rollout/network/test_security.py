"""Access control, and isolation of clients from each other: keys, roles, users, connections, memory."""

from __future__ import annotations

import errno
import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import msgpack
import numpy as np
import psutil
import pytest
import torch
import zmq
import zmq.auth
from fake_engine import MAX_MODEL_LEN, FakeEngine
from frames import pack
from machines import NOBODY, give_away
from serving import FaultyWorker, RawClient, WorkerOnThread, check_group, fake_process, serving
from zmq.utils.monitor import recv_monitor_message

from trueroll.engine.request import GenerateRequest, SamplingParams
from trueroll.errors import (
    ConfigError,
    ForbiddenError,
    InvalidRequestError,
    PushError,
    TruerollError,
    UnavailableError,
    UnknownRequestError,
    UnreadError,
    WorkerLostError,
)
from trueroll.rollout import RolloutClient, WeightPublisher, protocol
from trueroll.rollout.client import connection
from trueroll.rollout.config import WorkerConfig
from trueroll.rollout.network import router as gate_module
from trueroll.rollout.network import router as router_module
from trueroll.rollout.network.keys import Client, client_keys, read_clients, server_keys
from trueroll.rollout.network.router import MAX_AHEAD_BYTES, MAX_SILENT, Gate, Outboxes, Peer, Router
from trueroll.rollout.worker.admission import MOST_CALLERS
from trueroll.rollout.worker.ledger import Entry, Ledger, Submission, scoped
from trueroll.rollout.worker.worker import Vitals, Worker

from .certificates import Certificates, make_certificates

MIB = 2**20
_READY = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"
OPENING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16) + b"\0" + bytes(31) + bytes([4, len(_READY)]) + _READY
"""The first bytes from a client without keys (RFC 23 of ZMQ)."""
KEYS = ("server_public", "server_secret", "client_public", "client_secret")


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return make_certificates(tmp_path, {"alice": "generate", "bob": "generate", "trainer": "control"})


@pytest.fixture
def worker(engine: FakeEngine, certificates: Certificates) -> Iterator[WorkerOnThread]:
    with serving(engine, **certificates.settings) as worker:
        yield worker


@pytest.fixture
def enter(worker: WorkerOnThread, certificates: Certificates) -> Iterator[Callable[[str], RolloutClient]]:
    """A function that connects a client of the worker by name."""
    clients: list[RolloutClient] = []

    def enter(name: str) -> RolloutClient:
        clients.append(RolloutClient(worker.address, timeout=20.0, **certificates.client(name)))
        return clients[-1]

    yield enter
    for client in clients:
        client.close()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can reach and write to."""
    with tempfile.TemporaryDirectory(prefix="trueroll-test-") as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def as_nobody(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Run a script as an unprivileged user. The modules are imported before the switch to that user, because the user
    may be unable to read Python's files.
    """
    assert os.geteuid() == 0, "only root can start a process as another user: run this test as root"
    drop = f"import os, sys, msgpack, zmq; os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
    command = [sys.executable, "-c", drop + code, *arguments]
    return subprocess.Popen(
        command, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


# Keys.


def test_tcp_on_loopback_needs_no_setup_for_its_user_and_refuses_clients_without_keys(engine: FakeEngine) -> None:
    with serving(engine, address="tcp://127.0.0.1:*") as worker:
        with RolloutClient(worker.address) as client:
            check_group(client.generate([[1]], SamplingParams(n=2))[0], 2)
            client.pause()
            client.resume()
        with zmq.Context.instance().socket(zmq.DEALER) as keyless:
            keyless.linger = 0
            keyless.connect(worker.address)
            generate(keyless, "a")
            assert keyless.poll(500) == 0
    assert [isinstance(request, GenerateRequest) and request.params.n for request in engine.requests] == [2]


def test_another_user_of_the_machine_gets_no_answer(engine: FakeEngine, open_folder: Path) -> None:
    code = (
        "socket = zmq.Context().socket(zmq.DEALER); socket.LINGER = 0; socket.RCVTIMEO = 1000\n"
        "if sys.argv[2]:\n"
        "    socket.CURVE_SERVERKEY = sys.argv[2].encode()\n"
        "    socket.CURVE_PUBLICKEY, socket.CURVE_SECRETKEY = zmq.curve_keypair()\n"
        "socket.connect(sys.argv[1]); socket.send(msgpack.packb({'version': 1, 'type': 'health', 'id': 'a'}))\n"
        "try: print('got', len(socket.recv()))\n"
        "except zmq.Again: print('silence')\n"
    )
    keys = server_keys(WorkerConfig(address="tcp://127.0.0.1:*"))
    assert keys is not None
    for address in ("tcp://127.0.0.1:*", f"ipc://{open_folder}/worker.sock"):
        with serving(engine, address=address) as worker:
            for key in ("", keys.public.decode()) if address.startswith("tcp") else ("",):
                told, complaints = as_nobody(code, worker.address, key).communicate(timeout=60)
                assert told == "silence\n", complaints


def test_a_restarted_worker_has_the_same_keys_on_loopback(engine: FakeEngine) -> None:
    with serving(engine, address="tcp://127.0.0.1:*") as worker:
        address = worker.address
        client = RolloutClient(address)
        instance = client.health().instance
    with serving(FakeEngine(), address=address), client:
        assert client.health().instance != instance


def test_a_loopback_key_file_that_is_not_private_and_valid_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    config = WorkerConfig(address="tcp://127.0.0.1:*")
    made: list[Any] = []
    threads = [threading.Thread(target=lambda: made.append(server_keys(config))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8 and len({keys.secret for keys in made}) == 1
    (file,) = (tmp_path / "trueroll").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600 and made[0].secret.decode() not in repr(made[0])
    for spoil in (
        lambda: file.chmod(0o644),
        lambda: (file.chmod(0o600), file.write_text("{}")),
        lambda: file.write_text("[" * 100_000),
        lambda: file.write_text(json.dumps(dict.fromkeys(KEYS, 7))),
        lambda: file.write_text(json.dumps(dict.fromkeys(KEYS, "short"))),
        lambda: (file.unlink(), file.symlink_to("/dev/zero")),
        lambda: (file.unlink(), os.mkfifo(file, 0o600)),
        lambda: (file.unlink(), tmp_path.joinpath("trueroll").chmod(0o777)),
    ):
        spoil()
        with pytest.raises(ConfigError, match="keys: cannot use .* your private file of keys"):
            RolloutClient("tcp://127.0.0.1:1")


def test_a_loopback_key_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    server_keys(WorkerConfig(address="tcp://127.0.0.1:*"))
    give_away(tmp_path / "trueroll", monkeypatch)
    with pytest.raises(ConfigError, match=f"owner is user {NOBODY}"):
        RolloutClient("tcp://127.0.0.1:1")


def test_abstract_sockets_are_refused() -> None:
    for make in (lambda: WorkerConfig(address="ipc://@name"), lambda: RolloutClient("ipc://@name")):
        with pytest.raises(ConfigError, match="abstract socket"):
            make()


def test_an_ipc_socket_is_private_and_replaces_no_file(engine: FakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "worker.sock"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="exists and is not a socket"):
        Worker(WorkerConfig(address=f"ipc://{path}"), lambda: engine)
    assert path.read_text() == "precious"
    path.unlink()
    before = os.umask(0)
    try:
        with serving(engine, address=f"ipc://{path}"):
            assert path.is_socket() and path.stat().st_mode & 0o077 == 0
    finally:
        assert os.umask(before) == 0


# The identity of the worker.


def test_a_client_refuses_a_worker_of_another_user(open_folder: Path) -> None:
    code = (
        "router = zmq.Context().socket(zmq.ROUTER); router.bind(sys.argv[1]); print('bound', flush=True)\n"
        "identity, frame = router.recv_multipart()\n"
        "router.send_multipart([identity, msgpack.packb({'version': 1, 'type': 'error', 'id': None, 'code': 'x',"
        " 'message': 'I am the worker'})])\n"
        "sys.stdin.read()\n"
    )
    address = f"ipc://{open_folder}/worker.sock"
    squatter = as_nobody(code, address)
    try:
        assert squatter.stdout is not None and squatter.stdout.readline() == "bound\n"
        with RolloutClient(address) as client, pytest.raises(ForbiddenError, match=f"runs as user {NOBODY}"):
            client.health()
    finally:
        squatter.communicate()


def test_a_client_sends_nothing_to_a_server_without_the_key() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as squatter:
        squatter.linger = 0
        port = squatter.bind_to_random_port("tcp://127.0.0.1")
        with RolloutClient(f"tcp://127.0.0.1:{port}", timeout=0.5) as client:
            with pytest.raises(WorkerLostError):
                client.generate([[1]])
        assert squatter.poll(0) == 0


# Roles.


def test_a_client_with_an_unknown_key_gets_an_error_at_once(enter: Callable[[str], RolloutClient]) -> None:
    with pytest.raises(ForbiddenError, match="does not know this client's key"):
        enter("stranger").health()
    check_group(enter("alice").generate([[1]], SamplingParams(n=2))[0], 2)


CONTROL_CALLS: dict[str, dict[str, Any]] = {
    "pause": {},
    "resume": {},
    "drain": {},
    "sleep": {},
    "wake_up": {},
    "invalidate": {},
    "save_weights": dict(folder="/nowhere"),
    "unload_adapter": dict(name="a"),
    "weights": {},
    "checksums": {},
    "begin_push": dict(
        push_id="0" * 32, weight_version=1, dtype="float32", source={"kind": "disk", "folder": "/nowhere"}
    ),
    "stage_bucket": dict(push_id="0" * 32, bucket={"index": 0, "num_bytes": 0, "pieces": []}),
    "verify_push": dict(push_id="0" * 32, num_buckets=0),
    "commit_push": dict(push_id="0" * 32),
    "abort_push": dict(push_id="0" * 32),
}
FREE_CALLS = {"generate", "score", "abort", "ack", "put_image", "health", "stats"}


def test_every_call_is_listed_as_free_or_as_control() -> None:
    assert CONTROL_CALLS.keys() | FREE_CALLS == set(protocol.message_types(protocol.FromClient))
    assert not CONTROL_CALLS.keys() & FREE_CALLS


def test_the_role_generate_may_not_make_control_calls(
    worker: WorkerOnThread, certificates: Certificates, engine: FakeEngine
) -> None:
    answers: dict[str, dict[str, Any]] = {}
    for name in ("alice", "trainer"):
        with certificates.raw(name, worker.address) as dealer:
            answers[name] = {}
            for type, fields in CONTROL_CALLS.items():
                dealer.send(pack({"version": 1, "type": type, "id": f"{name}-{type}", **fields}))
                assert dealer.poll(20_000), type
                reply = msgpack.unpackb(dealer.recv())
                answers[name][type] = reply.get("code", reply["type"])
    assert set(answers["alice"].values()) == {"forbidden"} and "forbidden" not in answers["trainer"].values()
    assert answers["trainer"]["sleep"] == "status"


def test_the_role_generate_may_make_all_free_calls(enter: Callable[[str], RolloutClient], engine: FakeEngine) -> None:
    alice = enter("alice")
    check_group(alice.generate([[1]], SamplingParams(n=2))[0], 2)
    assert len(alice.score([[1, 2, 3]])[0].logprobs) == 2
    assert alice.health().state == "ready" and alice.stats().service["accepted"] == 2
    with pytest.raises(ForbiddenError, match="needs the role 'control', but alice has 'generate'"):
        alice.pause()


def test_the_role_control_may_push_and_the_role_generate_may_not(
    worker: WorkerOnThread, certificates: Certificates, engine: FakeEngine
) -> None:
    tensors = {name: torch.ones(shape) for name, shape in engine.weights.shapes.items()}
    with WeightPublisher("shared", **certificates.client("alice")) as publisher:
        publisher.connect([worker.address])
        with pytest.raises(PushError, match="needs the role 'control', but alice"):
            publisher.push(tensors, version=8)
    with WeightPublisher("shared", **certificates.client("trainer")) as publisher:
        publisher.connect([worker.address])
        assert publisher.push(tensors, version=9).version == 9
    assert worker.worker._vitals.health().weight_version == 9


# Users.


def ask(dealer: zmq.Socket[bytes], type: str, **fields: Any) -> None:
    dealer.send(pack({"version": 1, "type": type, **fields}))


def receive(dealer: zmq.Socket[bytes]) -> dict[str, Any]:
    assert dealer.poll(20_000)
    return msgpack.unpackb(dealer.recv())


def generate(dealer: zmq.Socket[bytes], id: str, **params: Any) -> None:
    tokens = np.array([1, 2, 3], "<i4").tobytes()
    ask(dealer, "generate", id=id, prompt_token_ids=tokens, params={"max_tokens": 4, "seed": 7, **params})


def test_users_may_use_the_same_request_ids(
    worker: WorkerOnThread, certificates: Certificates, engine: FakeEngine
) -> None:
    engine.gate.clear()
    with certificates.raw("alice", worker.address) as alice, certificates.raw("bob", worker.address) as bob:
        ask(alice, "abort", id="1", request_id="b")
        assert receive(alice)["code"] == "unknown_request"
        generate(alice, "a")
        ask(alice, "health", id="h")
        assert receive(alice)["type"] == "health"
        ask(bob, "abort", id="1", request_id="a")  # the same id as alice's request
        assert receive(bob)["code"] == "unknown_request"
        generate(bob, "a", max_tokens=3)  # other content, which would be a conflict if it came from the same user
        ask(bob, "ack", ids=["a"])
        ask(bob, "abort", id="2", request_id="a", caller="nobody")
        ask(bob, "health", id="h")
        while receive(bob)["type"] != "health":
            pass
        engine.gate.set()
        for dealer, count in ((alice, 4), (bob, 3)):
            sample = receive(dealer)
            assert sample["id"] == "a" and len(sample["token_ids"]) == 4 * count
            assert receive(dealer)["type"] == "done"
        ask(bob, "ack", ids=["a"])
        generate(bob, "a", max_tokens=3)
        assert receive(bob)["type"] == "sample" and receive(bob)["type"] == "done"
        assert len(engine.requests) == 3, "bob acknowledged only his own result"
        generate(alice, "a")
        assert receive(alice)["type"] == "sample" and receive(alice)["type"] == "done"
    assert len(engine.requests) == 3, "alice's result was kept"


def test_users_share_no_cached_prefixes(
    enter: Callable[[str], RolloutClient], worker: WorkerOnThread, engine: FakeEngine
) -> None:
    guess = SamplingParams(cache_salt="user:alice")
    for name, params in (("alice", None), ("alice", None), ("bob", None), ("bob", guess), ("alice", guess)):
        done = enter(name).generate([[1]], params)[0]
        assert done.params.cache_salt == (params.cache_salt if params else None)
    enter("alice").score([[1, 2]])
    salts = [
        request.params.cache_salt if isinstance(request, GenerateRequest) else request.cache_salt
        for request in engine.requests
    ]
    alice, again, bob, guessed, shared, scored = salts
    assert alice == again == scored and guessed == shared and len({alice, bob, guessed, None}) == 4


def test_a_seed_does_not_depend_on_the_user(enter: Callable[[str], RolloutClient]) -> None:
    first, second = (enter(name).generate([[1]], request_ids=["a"])[0] for name in ("alice", "bob"))
    assert first.params.seed == second.params.seed


def test_a_named_client_may_not_set_its_own_identity(worker: WorkerOnThread, certificates: Certificates) -> None:
    """Replies are addressed to identities, so another connection must not be able to take over an identity."""
    with certificates.raw("alice", worker.address, identity=b"me") as alice:
        ask(alice, "health", id="a")
        reply = receive(alice)
        assert reply["code"] == "forbidden" and "must not choose the identity" in reply["message"]


def test_a_worker_with_roles_leaks_no_thread_and_no_descriptor(engine: FakeEngine, certificates: Certificates) -> None:
    def counts() -> tuple[int, int]:
        gc.collect()
        return threading.active_count(), psutil.Process().num_fds()

    def visit() -> None:
        with serving(FakeEngine(), **certificates.settings) as worker:
            with RolloutClient(worker.address, **certificates.client("alice")) as client:
                client.health()

    visit()
    before = counts()
    for _ in range(3):
        visit()
    assert counts() == before


# Key files.


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "has no clients; add at least one"),
        ("# only a comment\n", "has no clients"),
        ("admin alice KEY\n", "line 1: must contain a role"),
        ("\ngenerate alice\n", "line 2: must contain a role"),
        ("generate a/b KEY\n", "line 1: must contain a role"),
        (f"generate {'a' * 65} KEY\n", "line 1: must contain a role"),
        ("generate alice short\n", "40 Z85 characters"),
        ("generate alice KEY\ncontrol bob KEY\n", "line 2: this key appears twice"),
        ("\udcff", "clients_file: cannot use .* give a text file"),
    ],
)
def test_a_clients_file_is_checked(text: str, fault: str, tmp_path: Path) -> None:
    file = tmp_path / "clients"
    file.write_bytes(text.replace("KEY", zmq.curve_keypair()[0].decode()).encode(errors="surrogateescape"))
    file.chmod(0o600)
    with pytest.raises(ConfigError, match=fault):
        read_clients(str(file))


def test_a_user_may_have_several_keys(tmp_path: Path) -> None:
    keys = [zmq.curve_keypair()[0].decode() for _ in range(2)]
    (file := tmp_path / "clients").write_text(f"control ann.b@c-d_1 {keys[0]}\n  generate ann.b@c-d_1 {keys[1]}  \n")
    file.chmod(0o600)
    assert read_clients(str(file)) == {
        keys[0]: Client("ann.b@c-d_1", "control"),
        keys[1]: Client("ann.b@c-d_1", "generate"),
    }
    file.chmod(0o666)
    with pytest.raises(ConfigError, match="only you can write"):
        read_clients(str(file))
    with pytest.raises(ConfigError, match="clients_file"):
        read_clients(str(tmp_path))


def test_keys_must_be_given_in_pairs(certificates: Certificates) -> None:
    for name in ("curve_secret_key_file", "clients_file"):
        settings = {key: value for key, value in certificates.settings.items() if key != name}
        with pytest.raises(ConfigError, match="together"):
            WorkerConfig(**settings)
    for name in ("server_public_key", "client_key"):
        arguments = {key: value for key, value in certificates.client("alice").items() if key != name}
        with pytest.raises(ConfigError, match="together"):
            RolloutClient("tcp://127.0.0.1:1", **arguments)
    Path(certificates.client("alice")["client_key"]).chmod(0o640)
    with pytest.raises(ConfigError, match="client_key: .* only you can read.* chmod 600"):
        RolloutClient("tcp://127.0.0.1:1", **certificates.client("alice"))


def test_a_key_is_given_as_text_as_bytes_or_as_a_file(certificates: Certificates, tmp_path: Path) -> None:
    given = certificates.client("alice")
    public, file = given["server_public_key"], Path(given["client_key"])
    secret = zmq.auth.load_certificate(file)[1]
    assert secret is not None
    expected = client_keys("tcp://127.0.0.1:1", public, file)
    (tmp_path / "worker.key").write_text(f'metadata\ncurve\n    public-key = "{public}"\n')
    for key in (public, public.encode(), tmp_path / "worker.key", str(tmp_path / "worker.key")):
        for own in (secret.decode(), secret, file, str(file)):
            assert client_keys("tcp://127.0.0.1:1", key, own) == expected


@pytest.mark.parametrize("cut", [0, 39])
def test_no_error_shows_a_secret_key(certificates: Certificates, cut: int) -> None:
    given = certificates.client("alice")
    _, secret = zmq.auth.load_certificate(given["client_key"])
    assert secret is not None
    with pytest.raises(ConfigError, match=f"^client_key: must be the 40 Z85.* text of {80 - cut} characters") as caught:
        client_keys("tcp://127.0.0.1:1", given["server_public_key"], (2 * secret.decode())[cut:])
    assert secret.decode()[-20:] not in str(caught.value)


def test_the_default_socket_needs_no_keys() -> None:
    assert server_keys(WorkerConfig()) is None


# Connections.


def test_silent_connections_neither_use_up_descriptors_nor_lock_out_clients() -> None:
    with fake_process(address="tcp://127.0.0.1:*", max_connections=80) as worker:
        process = psutil.Process(worker.pid)
        with RolloutClient(worker.address) as before:
            before.health()
            num_fds, num_threads = process.num_fds(), process.num_threads()
            silent = [socket.create_connection(("127.0.0.1", port_of(worker.address))) for _ in range(200)]
            for _ in range(3):
                with RolloutClient(worker.address) as client:
                    check_group(client.generate([[1]])[0], 1)
            assert before.health().state == "ready"
            assert process.num_fds() <= num_fds + MAX_SILENT + 4
            for each in silent:
                each.close()
            while process.num_fds() > num_fds:
                time.sleep(0.01)
            assert process.num_threads() == num_threads and before.health().state == "ready"


def test_no_more_connections_than_allowed(engine: FakeEngine) -> None:
    with serving(engine, max_connections=2) as worker:
        with RawClient(worker.address) as first, RawClient(worker.address) as second:
            assert first.health() and second.health()
            with RawClient(worker.address) as third:
                third.socket.set(zmq.RCVTIMEO, 300)
                with pytest.raises(zmq.Again):
                    third.health()
                first.close()
                third.socket.set(zmq.RCVTIMEO, 20_000)
                assert third.health()["state"] == "ready"
                assert second.health()["state"] == "ready"


def test_connections_leave_half_of_the_descriptors_free() -> None:
    code = (
        "import resource, sys, time; resource.setrlimit(resource.RLIMIT_NOFILE, (120, 120))\n"
        "sys.path.insert(0, sys.argv[1]); from fake_engine import FakeEngine; from serving import serving\n"
        "with serving(FakeEngine(), address='tcp://127.0.0.1:*') as worker:\n"
        "    print(worker.address, flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-P", "-c", code, str(Path(__file__).parents[2])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        address = process.stdout.readline().strip()
        silent = [socket.create_connection(("127.0.0.1", port_of(address))) for _ in range(100)]
        with RolloutClient(address) as client:
            check_group(client.generate([[1]])[0], 1)
            assert psutil.Process(process.pid).num_fds() < 100
        for each in silent:
            each.close()
        process.stdin.close()
    assert process.returncode == 0


def test_a_worker_without_descriptors_goes_on() -> None:
    with fake_process() as worker, RolloutClient(worker.address) as client:
        client.health()
        used = max(int(name) for name in os.listdir(f"/proc/{worker.pid}/fd")) + 1
        resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, (used, used))
        assert resource.prlimit(worker.pid, resource.RLIMIT_NOFILE) == (used, used)
        for _ in range(3):
            assert client.health().state == "ready"
            check_group(client.generate([[1]])[0], 1)


def test_a_system_error_fails_only_the_message_that_met_it(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(vitals: Vitals, id: str) -> protocol.Stats:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Vitals, "stats", refused)
    worker = FaultyWorker(WorkerConfig(), engine)
    thread = threading.Thread(target=worker.run)
    thread.start()
    with RolloutClient(worker.address) as client:
        with pytest.raises(UnavailableError, match="Too many open files"):
            client.stats()
        check_group(client.generate([[1]])[0], 1)
    worker.drain()
    thread.join(20)
    assert not thread.is_alive()


def test_the_gate_leaves_a_reused_descriptor_alone() -> None:
    """The connection ended before the gate could close it, so its descriptor may already belong to another file."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        gate = Gate(router, 10, lambda identity: None)
        router.bind_to_random_port("tcp://127.0.0.1")
        reader, writer = os.pipe()
        here, there = socket.socketpair()
        before = psutil.Process().num_fds()
        for fd in (reader, here.fileno(), 10**6):
            gate._end(fd)
        assert psutil.Process().num_fds() == before
        there.send(b"alive")
        assert here.recv(5) == b"alive" and os.write(writer, b"x") == 1
        for fd in (reader, writer):
            os.close(fd)
        here.close()
        there.close()
        gate.close()


# Memory.


def test_pings_in_a_flood_from_a_closed_connection_do_not_abort_the_worker() -> None:
    """If its receive queue is full, libzmq would abort the process in this case."""
    health = pack({"version": 1, "type": "health", "id": "a"})
    message, ping = bytes([0, len(health)]) + health, b"\x04\x07\x04PING\0\0"
    with fake_process() as worker, RolloutClient(worker.address) as client:
        client.health()
        for _ in range(20):
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(worker.address.removeprefix("ipc://"))
                raw.sendall(OPENING)
                raw.recv(64)
                os.kill(worker.pid, signal.SIGSTOP)
                raw.setblocking(False)
                with suppress(BlockingIOError):
                    while True:
                        raw.send(message * 100 + ping * 50)
                os.kill(worker.pid, signal.SIGCONT)
        assert client.health().state == "ready"


def test_a_peer_of_an_older_protocol_is_served(engine: FakeEngine) -> None:
    """For a peer of an older protocol, ZMQ reports no descriptor of the connection."""
    health = pack({"version": 1, "type": "health", "id": "a"})
    with serving(engine) as worker, socket.socket(socket.AF_UNIX) as raw:
        raw.connect(worker.address.removeprefix("ipc://"))
        raw.sendall(b"\x01\0" + bytes([len(health) + 1]) + b"\0" + health)  # ZMTP 1: no identity, then a message
        raw.settimeout(20)
        received = b""
        while b"instance" not in received:
            assert (more := raw.recv(4096))
            received += more


def test_a_message_without_an_end_is_cut_off() -> None:
    """ZMQ limits the size of each part of a message, but neither their number nor their sum."""
    part = b"\x03" + MIB.to_bytes(8, "big") + bytes(MIB)  # more parts follow
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        gate = Gate(router, 10, lambda identity: None)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(OPENING)
            raw.sendall(part * (MAX_AHEAD_BYTES // MIB // 2))
            gate.follow()
            gate.look()
            raw.sendall(part)  # the connection is still open
            raw.settimeout(0.01)  # recv notices the end at once, a sender with a full window much later
            while not is_cut_off(raw):
                with suppress(OSError):
                    raw.sendall(part)
                gate.look()
        gate.close()


def is_cut_off(raw: socket.socket) -> bool:
    try:
        return raw.recv(4096) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_a_client_may_submit_more_at_once_than_its_window(engine: FakeEngine) -> None:
    prompts = [[1] * 1000] * 20
    with serving(engine, address="tcp://127.0.0.1:*") as worker, RolloutClient(worker.address) as client:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(connection, "WINDOW_BYTES", 10_000)
            with pytest.raises(InvalidRequestError, match="max_model_len"):
                client.generate(prompts)
            groups = client.generate([[1] * 400] * 200, SamplingParams(max_tokens=2))
    assert len(groups) == len(engine.requests) == 200


def test_a_worker_that_shuts_down_delivers_queued_replies(engine: FakeEngine) -> None:
    engine.flow.clear()
    with serving(engine) as worker, RawClient(worker.address) as raw:
        for number in range(3000):
            raw.generate(str(number), n=1, max_tokens=400)
        while len(worker.worker._book.ledger.open) < 3000:
            time.sleep(0.001)
        worker.worker.drain()
        worker.worker.drain()
        ended = {reply["id"] for _ in range(6000) if (reply := raw.receive())["type"] == "done"}
        assert len(ended) == 3000


def test_unfinished_messages_take_little_memory() -> None:
    with fake_process(address="tcp://127.0.0.1:*") as worker, RolloutClient(worker.address) as client:
        process = psutil.Process(worker.pid)
        client.health()
        before = process.memory_info().rss
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(15) + b"\0" + bytes(31)
        assert len(greeting) == 64
        connections = []
        for _ in range(8):
            connection = socket.create_connection(("127.0.0.1", port_of(worker.address)))
            connection.sendall(greeting)
            with pytest.raises(OSError):  # the worker hangs up
                connection.sendall(b"\x06" + (63 * MIB).to_bytes(8, "big"))
                for _ in range(63):
                    connection.sendall(bytes(MIB))
            connections.append(connection)
        assert process.memory_info().rss - before < 100 * MIB
        assert client.health().state == "ready"
        for connection in connections:
            connection.close()


def test_a_prompt_that_cannot_be_computed_is_refused_while_paused(engine: FakeEngine) -> None:
    with serving(engine) as worker, RolloutClient(worker.address) as client:
        client.pause()
        with pytest.raises(InvalidRequestError, match=f"max_model_len = {MAX_MODEL_LEN}"):
            client.generate([[1] * 500_000])
        with pytest.raises(InvalidRequestError, match=f"max_model_len = {MAX_MODEL_LEN}"):
            client.score([[1] * 500_000])
        assert client.health().requests["open"] == 0
        client.resume()


def test_queued_requests_are_limited_in_bytes(engine: FakeEngine) -> None:
    with serving(engine, max_queued_bytes=10_000) as worker, RawClient(worker.address) as raw:
        raw.send("pause", id="p")
        raw.receive()
        for i in range(12):
            raw.generate(str(i), prompt=[1] * 100)
        errors = [raw.receive()]
        while raw.socket.poll(200):
            errors.append(raw.receive())
        assert {error["code"] for error in errors} == {"queue_full"} and 2 <= len(errors) < 12
        assert "max_queued_bytes = 10000" in errors[0]["message"]
        raw.send("resume", id="r")
        replies = [raw.receive() for _ in range(1 + 2 * (12 - len(errors)))]
        assert sum(reply["type"] == "done" for reply in replies) == 12 - len(errors)
        raw.generate("more", prompt=[1] * 100)
        assert raw.receive_until("done", "error")[-1]["type"] == "done", "finished requests take no room"


def test_submissions_and_aborts_that_wait_for_one_request_are_limited(engine: FakeEngine) -> None:
    engine.gate.clear()
    with serving(engine, max_queued_requests=3) as worker, RawClient(worker.address) as raw:
        for _ in range(5):
            raw.generate("a")
        assert [raw.receive()["code"] for _ in range(2)] == ["queue_full"] * 2
        assert engine.at_gate.wait(timeout=20)
        for number in range(5):
            raw.send("abort", id=str(number), request_id="a", index=None)
        codes = [raw.receive()["code"] for _ in range(2)]
        assert codes == ["queue_full"] * 2, "pending aborts are limited too"
        engine.gate.set()
        while raw.receive_until("done", "error", "aborted")[-1]["type"] != "aborted":
            pass


def test_a_client_that_does_not_read_is_dropped_and_harms_nobody(engine: FakeEngine) -> None:
    with serving(engine, max_unread_bytes=MIB) as worker, RolloutClient(worker.address) as other:
        with RawClient(worker.address) as raw:
            raw.generate("a", n=64, max_tokens=200)
            raw.receive_until("done")
            repeat = pack(
                dict(
                    version=1,
                    type="generate",
                    id="a",
                    prompt_token_ids=np.array([1, 2, 3], "<i4").tobytes(),
                    params=dict(max_tokens=200, n=64, seed=7),
                    caller=None,
                )
            )
            for _ in range(2000):
                raw.socket.send(repeat)
            check_group(other.generate([[1]])[0], 1)
            num_errors, reply = 0, {"type": ""}
            while reply["type"] != "done" or reply["id"] != "b":
                reply = raw.receive()
                if reply["type"] == "error":
                    assert reply["id"] is None and "max_unread_bytes" in reply["message"]
                    assert reply["code"] == UnreadError.code
                    num_errors += 1
                    raw.generate("b")  # the earlier messages may cause a second drop
            assert num_errors > 0
    assert len(engine.requests) == 3


def test_connections_of_the_user_with_most_unread_bytes_are_dropped() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.set(zmq.ROUTER_MANDATORY, 1)
        router.set(zmq.SNDHWM, 1)
        router.bind("inproc://router")
        readers, lost = [], []
        for identity in (b"alice-1", b"alice-2", b"alice-3", b"bob"):
            reader = context.socket(zmq.DEALER)
            reader.set(zmq.IDENTITY, identity)
            reader.set(zmq.RCVHWM, 1)
            reader.connect("inproc://router")
            reader.send(b"here")
            router.recv_multipart()
            readers.append(reader)
        outboxes = Outboxes(router, 5000, lost.append, lambda identity: identity.split(b"-")[0])
        for _ in range(4):
            for identity in (b"alice-1", b"alice-2", b"alice-3", b"bob", b"bob"):
                outboxes.send(identity, bytes(400))
        assert lost == []
        outboxes.report_lost()
        assert lost and b"bob" not in lost and not outboxes.is_dropped(b"bob")
        for reader in readers:
            reader.close(linger=0)


def test_the_callers_of_a_kept_result_are_limited(engine: FakeEngine) -> None:
    with serving(engine) as worker, RawClient(worker.address) as raw:
        for number in range(MOST_CALLERS + 1):
            raw.generate("a", caller=str(number))
            reply = raw.receive_until("done", "error")[-1]
        assert reply["code"] == "queue_full" and "callers of request 'a'" in reply["message"]


def test_queued_replies_to_a_slow_reader_arrive_in_order(engine: FakeEngine) -> None:
    with serving(engine) as worker, RawClient(worker.address) as raw:
        raw.socket.set(zmq.RCVHWM, 1)
        for number in range(3000):
            raw.send("health", id=str(number))
        while worker.worker._router._outboxes.is_empty:
            time.sleep(0.001)
        assert [raw.receive()["id"] for _ in range(3000)] == [str(number) for number in range(3000)]


def test_an_error_without_an_id_ends_all_calls(engine: FakeEngine) -> None:
    """A client that does not read gets an error without an id when it is dropped."""
    engine.gate.clear()
    with serving(engine) as worker, RolloutClient(worker.address) as client:
        results: list[TruerollError] = []

        def call() -> None:
            try:
                client.generate([[1]])
            except TruerollError as error:
                results.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        while not (entries := list(worker.worker._book.ledger.open.values())) or not entries[0].subscribers:
            time.sleep(0.001)
        [(identity, *_)] = entries[0].subscribers
        error = protocol.error_message(None, UnreadError("read"))
        worker.worker._router.send(identity, protocol.encode(error))
        thread.join(20)
        assert [type(result) for result in results] == [UnreadError]
        engine.gate.set()


def test_an_internal_key_of_a_request_gives_no_access_to_it(
    worker: WorkerOnThread, certificates: Certificates, enter: Callable[[str], RolloutClient], engine: FakeEngine
) -> None:
    engine.gate.clear()
    with certificates.raw("alice", worker.address) as alice:
        generate(alice, "a")
        while "alice/a" not in worker.worker._book.ledger.open:
            time.sleep(0.001)
        with pytest.raises(UnknownRequestError, match="has the id 'alice/a'"):
            enter("trainer").abort("alice/a")
        ask(alice, "abort", id="1", request_id="a", index=7)
        ask(alice, "health", id="2")
        assert receive(alice)["type"] == "health", "the abort was read before it"
        engine.gate.set()
        replies = [receive(alice) for _ in range(3)]
        assert [reply["finish_reason"] for reply in replies if reply["type"] == "sample"] == ["length"]
        assert [reply["message"] for reply in replies if reply["type"] == "error"] == [
            "abort: request 'a', sample 7 is not running"
        ]


# New and ended connections.


class Monitor:
    """A monitor with events from the test instead of the socket.

    `gone`: identities that the gate has reported as gone.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: deque[tuple[int, int]] = deque()
        self.gone: list[bytes] = []
        monkeypatch.setattr(gate_module, "recv_monitor_message", self._receive)

    def _receive(self, *_: Any) -> dict[str, int]:
        if not self.events:
            raise zmq.Again
        event, fd = self.events.popleft()
        return {"event": event, "value": fd}

    def come(self, fd: int) -> None:
        self.events.append((zmq.EVENT_ACCEPTED, fd))

    def go(self, fd: int) -> None:
        self.events.append((zmq.EVENT_DISCONNECTED, fd))


@pytest.fixture
def monitor(monkeypatch: pytest.MonkeyPatch) -> Monitor:
    return Monitor(monkeypatch)


@pytest.fixture
def gate(monitor: Monitor) -> Iterator[Gate]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        gate = Gate(router, 1000, monitor.gone.append)
        yield gate
        gate.close()


ANN, BOB = b"\0ann", b"\0bob"


def test_late_messages_are_not_attributed_to_the_next_connection_on_the_descriptor(
    gate: Gate, monitor: Monitor
) -> None:
    monitor.come(7)
    assert gate.heard(7, ANN, 0, 1)
    monitor.go(7)
    monitor.come(7)
    gate.follow()
    assert monitor.gone == [ANN]
    assert not gate.heard(7, ANN, 0, 1)
    assert gate.heard(7, BOB, 1, 1) and not gate.heard(7, ANN, 0, 1) and gate.heard(7, BOB, 1, 1)
    monitor.go(7)
    gate.follow()
    assert monitor.gone == [ANN, BOB] and not gate.heard(7, BOB, 1, 1)


def test_a_connection_that_ended_unheard_is_gone_once_its_successor_is_heard(gate: Gate, monitor: Monitor) -> None:
    for fd in (7, 8):
        monitor.come(fd)
        monitor.go(fd)
        monitor.come(fd)
    assert gate.heard(7, ANN, 0, 1), "it may be the open connection"
    assert gate.heard(7, BOB, 1, 1) and monitor.gone == [ANN]
    assert not gate.heard(7, ANN, 0, 1) and gate.heard(7, BOB, 1, 1)
    assert gate.heard(8, b"\0eve", 3, 1) and not gate.heard(8, b"\0dan", 2, 1)


def test_a_reused_custom_identity_is_open_again_after_its_first_end(gate: Gate, monitor: Monitor) -> None:
    monitor.come(7)
    assert gate.heard(7, b"me", 0, 1)
    monitor.go(7)
    monitor.come(7)
    assert gate.heard(7, b"me", 1, 1) and monitor.gone == [b"me"]
    gate.follow()
    assert monitor.gone == [b"me"]


@pytest.mark.parametrize("has_numbers", [True, False])
def test_no_open_connection_is_reported_gone_and_every_end_is_reported(
    has_numbers: bool, gate: Gate, monitor: Monitor
) -> None:
    """Receive messages and read the monitor in random order."""
    random, num_connections, num_refused = Random(7), 0, 0
    there: dict[int, int] = {}
    waiting: list[tuple[int, int]] = []
    last_heard: dict[bytes, int] = {}
    for _ in range(20_000):
        fd = random.randrange(3)
        match random.randrange(4):
            case 0 if fd in there:
                del there[fd]
                monitor.go(fd)
            case 0:
                there[fd] = num_connections = num_connections + 1
                monitor.come(fd)
            case 1 if fd in there:
                waiting.append((fd, there[fd]))
            case 2 if waiting:
                at, number = waiting.pop(random.randrange(len(waiting)))
                identity = b"\0" + number.to_bytes(4, "big")
                if gate.heard(at, identity, number if has_numbers else None, 1):
                    last_heard[identity] = len(monitor.gone)
                else:
                    num_refused += 1
                    assert there.get(at) != number
            case 3 if random.random() < 0.3:
                gate.follow()
    for fd in there:
        monitor.go(fd)
    gate.follow()
    assert len(last_heard) > 500 and num_refused > 100
    assert all(identity in monitor.gone[heard_at:] for identity, heard_at in last_heard.items())


def test_bytes_of_an_ended_connection_do_not_count_for_its_successor(gate: Gate, monitor: Monitor) -> None:
    monitor.come(7)
    monitor.go(7)
    monitor.come(7)
    gate.heard(7, ANN, 0, 1000)
    gate.heard(7, BOB, 1, 10)
    first = gate._taken[7]
    gate.heard(7, BOB, 1, 10)
    assert gate._taken[7] == 2 * first and 10 <= first < 1000


def received(router: Router) -> tuple[Peer, list[bytes]]:
    while (message := router.receive()) is None:
        time.sleep(0.001)
    return message


def test_a_client_on_a_reused_descriptor_is_heard(certificates: Certificates) -> None:
    lost: list[bytes] = []
    router = Router(WorkerConfig(**certificates.settings), lost.append)
    gate, descriptors = router._gate, []
    hear = gate.heard
    gate.heard = lambda fd, *rest: (descriptors.append(fd), hear(fd, *rest))[1]  # type: ignore[method-assign]
    num_shared = 0
    try:
        for _ in range(20):
            with certificates.raw("alice", router.address) as alice:
                alice.set(zmq.LINGER, 20_000)
                for _ in range(3):
                    alice.send(b"alice")
                first, _ = received(router)
            while first.identity not in lost:
                router.maintain()
            with certificates.raw("bob", router.address) as bob:
                while len(gate._taken) == len(gate._heard):
                    router.maintain()
                late = [received(router)[0] for _ in range(2)]
                assert [peer.is_gone for peer in late] == [True, True] and not first.is_gone
                for _ in range(2):
                    bob.send(b"bob")
                    peer, frames = received(router)
                    assert frames == [b"bob"] and not peer.is_gone and peer.client.user == "bob"
                assert router._user_of(peer.identity) == "bob"
            while peer.identity not in lost:
                router.maintain()
            num_shared += descriptors[-1] == descriptors[-3]
        assert num_shared > 0, "premise: a descriptor was reused"
        assert len(lost) == len(set(lost)) == 40, "each end is reported once"
        assert router._user_of(peer.identity) == peer.identity, "the user of an ended connection is forgotten"
    finally:
        router.close()


def test_requests_of_a_named_client_that_is_gone_are_ignored(certificates: Certificates) -> None:
    engine = FakeEngine()
    worker = FaultyWorker(WorkerConfig(**certificates.settings), engine)
    try:
        generate = protocol.Generate(id="a", prompt_token_ids=bytes(4), params=SamplingParams())
        for user, is_gone, is_open in (("alice", True, False), (None, True, True), ("alice", False, True)):
            peer = Peer(b"\0abcd", Client(user, "generate"), is_gone)
            worker._dispatch.take(peer, [protocol.encode(generate)])
            assert (scoped(user, "a") in worker._book.ledger.open) == is_open
    finally:
        worker._close_system()


def test_requests_with_while_connected_end_however_the_disconnect_is_noticed(certificates: Certificates) -> None:
    """The worker notices the disconnect in one of two ways: a reply cannot be delivered, or the end is already known
    when a message is read.
    """
    worker = FaultyWorker(WorkerConfig(**certificates.settings), FakeEngine())
    try:
        for id, is_gone, ends in (("a", False, True), ("b", True, True), ("c", False, False), ("d", True, False)):
            waits: dict[str, Any] = dict(min_weight_version=1, wait_for_weights=True, while_connected=ends)
            fields: dict[str, Any] = dict(prompt_token_ids=bytes(4), params=SamplingParams(), **waits)
            peer = Peer(b"\0abcd", Client(None, "control"), is_gone)
            worker._dispatch.take(peer, [protocol.encode(protocol.Generate(id=id, **fields))])
        assert [*worker._book.ledger.open] == ["a", "c", "d"]
        worker._book._tell(b"\0abcd", protocol.Deltas(samples=()))
        worker._router.maintain()
        assert not worker._book.ledger.open and not worker._book.ledger.kept, "requests that wait for weights end too"
    finally:
        worker._close_system()


def test_a_users_connections_count_as_one_user(certificates: Certificates) -> None:
    router = Router(WorkerConfig(**certificates.settings), lambda identity: None)
    try:
        identities = {}
        for name in ("alice", "bob", "alice"):
            with certificates.raw(name, router.address) as dealer:
                dealer.send(b"here")
                identities[received(router)[0].identity] = name
                users = [router._user_of(identity) for identity in identities]
                assert users[-1] == name, "the user that `Outboxes` sees"
        assert len(identities) == 3
    finally:
        router.close()


def handshake(dealer: zmq.Socket[bytes], address: str) -> int:
    """Connect, and return the ZMQ event with which the handshake ends."""
    ends = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    monitor = dealer.get_monitor_socket(ends)
    dealer.connect(address)
    assert monitor.poll(20_000)
    event = recv_monitor_message(monitor)["event"]
    dealer.disable_monitor()
    monitor.close(linger=0)
    return event


def test_no_client_is_admitted_while_the_authenticator_is_stopped(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    authenticators, authenticate = [], router_module._authenticate
    monkeypatch.setattr(
        router_module, "_authenticate", lambda *args: authenticators.append(authenticate(*args)) or authenticators[0]
    )
    router = Router(WorkerConfig(**certificates.settings), lambda identity: None)
    try:
        for name in ("alice", "stranger"):
            with certificates.raw(name, None) as dealer:
                is_known = handshake(dealer, router.address) == zmq.EVENT_HANDSHAKE_SUCCEEDED
                assert is_known == (name == "alice"), "premise: the authenticator works"
        [authenticator] = authenticators
        authenticator.stop()
        for name in ("alice", "stranger"):
            with certificates.raw(name, None) as dealer:
                assert handshake(dealer, router.address) == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    finally:
        router.close()


def test_a_handshake_has_a_time_limit(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "HANDSHAKE_MS", 50)
    with serving(engine, address="tcp://127.0.0.1:*") as worker:
        with socket.create_connection(("127.0.0.1", port_of(worker.address))) as silent:
            silent.settimeout(20)  # ZMQ's own limit is 30 s
            while silent.recv(64):
                pass


# The cost of messages.


def test_the_loop_does_other_work_between_two_messages(engine: FakeEngine) -> None:
    have_come = threading.Event()

    class Slow(FaultyWorker):
        turns: list[int] = []

        def _handle(self, peer: Peer, message: protocol.Call) -> None:
            have_come.wait(20)
            self.turns[-1] += 1
            time.sleep(0.02)
            super()._handle(peer, message)

        def _take_events(self) -> None:
            self.turns.append(0)
            super()._take_events()

    worker = Slow(WorkerConfig(), engine)
    thread = threading.Thread(target=worker.run)
    thread.start()
    with RawClient(worker.address) as raw:
        for number in range(10):
            raw.send("stats", id=str(number))
        have_come.set()
        for _ in range(10):
            raw.receive()
    worker.drain()
    thread.join(20)
    assert max(Slow.turns) == 1 and sum(Slow.turns) == 10


def test_the_role_generate_may_send_fewer_elements(
    worker: WorkerOnThread, certificates: Certificates, engine: FakeEngine
) -> None:
    most = 2**13
    texts = {}
    for name in ("alice", "trainer"):
        with certificates.raw(name, worker.address) as dealer:
            generate(dealer, "a", stop_token_ids=list(range(4096)), stop=[str(number) for number in range(64)])
            assert receive(dealer)["type"] == "sample" and receive(dealer)["type"] == "done", "the most that it needs"
            ask(dealer, "ack", ids=[[]] * most)
            texts[name] = receive(dealer)["message"]
    assert f"{most} elements" in texts["alice"] and "elements" not in texts["trainer"]


def test_a_disconnect_costs_only_the_requests_that_the_client_waited_for(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    visited: list[bytes] = []
    lose = Entry.lose
    monkeypatch.setattr(Entry, "lose", lambda entry, identity: (visited.append(identity), lose(entry, identity))[1])
    engine.flow.clear()
    with serving(engine) as worker, RawClient(worker.address) as one, RawClient(worker.address) as other:
        for number in range(50):
            one.generate(str(number))
        one.health()
        other.generate("7")
        other.health()
        entries = list(worker.worker._book.ledger.open.values())
        for _ in range(20):
            with RawClient(worker.address) as passing:
                passing.health()
        other.close()
        while len(entries[7].subscribers) == 2:
            time.sleep(0.001)
        assert len(visited) == 1
        one.close()
        while any(entry.subscribers for entry in entries):
            time.sleep(0.001)
        assert len(visited) == 51


def test_waiting_submissions_are_counted_and_found() -> None:
    """Submit, disconnect, withdraw and reply in random order."""
    random, ledger = Random(3), Ledger(2, 100_000)
    made: list[Entry] = []
    for step in range(5000):
        user, id = random.choice(["ann", None]), random.choice("abc")
        identity, caller = random.choice([ANN, BOB, b"\0eve"]), random.choice([None, "x", "\N{GRINNING FACE}"])
        key = scoped(user, id)
        message = protocol.Generate(id=id, prompt_token_ids=bytes(4), params=SamplingParams())
        entry = ledger.find(user, message)
        match random.randrange(8):
            case 0 | 1 | 2 if entry is None:
                made.append(ledger.add(user, message, message.params))
                ledger.subscribe(made[-1], Submission(identity, caller))
            case 0 | 1 | 2:
                assert entry is not None
                ledger.join(entry)
                ledger.subscribe(entry, Submission(identity, caller))
            case 3 if key in ledger.open:
                ledger.awaited.add(ledger.open[key], ledger.open[key].successors, Submission(identity, caller))
            case 4:
                ledger.awaited.lose(identity)
                assert not any(identity in each.subscribers or identity in each.successors for each in made)
            case 5 if caller is not None:
                ledger.withdraw(key, caller)
            case 6 if key in ledger.open:
                ending = ledger.open[key]
                ledger.end_sample(ending, "length")
                ledger.finish(key)
                ledger.awaited.release(ending, ending.successors)
            case 7 if key in ledger.open and step % 3 == 0:
                ending = ledger.open[key]
                ledger.fail(key)
                ledger.awaited.release(ending, ending.subscribers)
                ledger.awaited.release(ending, ending.successors)
        waiting = [(each, submission) for each in made for submission in [*each.subscribers, *each.successors]]
        assert ledger.awaited.num_bytes == sum(submission.num_bytes for _, submission in waiting)
        found = {(each, identity) for identity, entries in ledger.awaited._entries.items() for each in entries}
        assert found == {(each, submission.identity) for each, submission in waiting} and all(
            ledger.awaited._entries.values()
        )
        assert ledger.kept.num_bytes == sum(each.num_bytes for each in ledger.kept)
        made = [each for each in made if each.key in ledger.open]
    assert ledger.stats.finished > 50 and ledger.stats.dropped > 5 and ledger.stats.failed > 20


# The memory of names and strings.


def test_waiting_submissions_are_limited_in_bytes(engine: FakeEngine) -> None:
    engine.gate.clear()
    with serving(engine, max_queued_bytes=10_000) as worker, RawClient(worker.address) as raw:
        for id in "ab":
            raw.generate(id)
        assert engine.at_gate.wait(timeout=20)
        raw.send("abort", id="1", request_id="a")
        for number in range(60):
            raw.generate("ab"[number % 2], caller=f"{number:0100}")
        raw.send("health", id="h")
        *errors, _ = raw.receive_until("health")
        assert {error["code"] for error in errors} == {"queue_full"}
        assert all("max_queued_bytes = 10000 is exceeded" in error["message"] for error in errors)
        joined, after = (
            worker.worker._book.ledger.open["b"].subscribers,
            worker.worker._book.ledger.open["a"].successors,
        )
        assert len(joined) > 5 and len(after) > 5 and len(joined) + len(after) == 61 - len(errors) < 10_000 // 100
        engine.gate.set()
        replies = [raw.receive() for _ in range(3 + 2 * (61 - len(errors)))]
        assert sum(reply["type"] == "done" for reply in replies) == 62 - len(errors)
        raw.send("health", id="after")  # its reply shows that the worker has processed all earlier messages
        assert raw.receive()["id"] == "after"
        assert worker.worker._book.ledger.awaited.num_bytes == 0


def test_the_callers_of_a_kept_result_count_as_bytes(engine: FakeEngine) -> None:
    with serving(engine, max_kept_bytes=20_000) as worker, RawClient(worker.address) as raw:
        for number in range(30):
            raw.generate("a", caller=f"{number:03}" + "\N{GRINNING FACE}" * 120)
            raw.receive_until("done")
    assert 1 < len(engine.requests) < 5, "the result was kept for a while and then dropped"


def test_strings_count_by_their_size_in_memory(engine: FakeEngine) -> None:
    stop = ["\N{GRINNING FACE}" * 1000 + str(number) for number in range(64)]
    with serving(engine, max_queued_bytes=sum(map(sys.getsizeof, stop))) as worker, RawClient(worker.address) as raw:
        raw.generate("a", stop=stop)
        assert raw.receive_until("done", "error")[-1]["code"] == "queue_full"
        raw.generate("b", stop=["x" * 1000 + str(number) for number in range(64)])
        assert raw.receive_until("done", "error")[-1]["type"] == "done"
