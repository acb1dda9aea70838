"""Images of requests: the worker asks for parts of their pixels, and the client answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq
from fake_engine import FakeTower
from frames import pack

from trueroll.engine.media import ImageInput
from trueroll.errors import InvalidRequestError, ProtocolError
from trueroll.rollout import RolloutClient, SamplingParams, protocol

from .test_odd_replies import DONE, HEALTH, SAMPLE

PROMPT = [1, 500, 500, 2]
ONE = DONE | dict(params=SamplingParams(n=1, seed=1).model_dump())
CONTENT_BYTES = 3 * 4 * 256 + 4 * 6 * 48


def random_image(seed: int = 0, start: int = 1) -> ImageInput:
    """Return an image of 4 x 6 patches with 3 * 4 * 4 levels each."""
    random = np.random.default_rng(seed)
    levels, table = random.integers(0, 256, (24, 48), np.uint8), random.standard_normal((3, 256), np.float32)
    return ImageInput(start, 4, 6, levels, table)


class Peer:
    """A process at `address` that answers health calls, and otherwise does what a test tells it to do."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self._context, self._address = context, address
        self._bind()

    def receive(self) -> dict[str, Any]:
        """Return the next message that is no health call. The field `frame` has the bytes of the message."""
        while True:
            assert self._socket.poll(60_000), "the client sends nothing"
            if message := self.answer_health():
                return message

    def answer_health(self) -> dict[str, Any] | None:
        self._identity, frame = self._socket.recv_multipart()
        message = msgpack.unpackb(frame)
        if message["type"] != "health":
            return message | {"frame": frame}
        self.send("health", id=message["id"], **HEALTH)
        return None

    def send(self, type: str, **fields: Any) -> None:
        told = {"version": protocol.PROTOCOL_VERSION, "type": type, **fields}
        self._socket.send_multipart([self._identity, pack(told)])

    def ask(self, request: dict[str, Any], start: int, num_bytes: int, **fields: Any) -> None:
        """Ask for a part of the first image of a request."""
        wanted = dict(id=request["id"], caller=request["caller"], content_hash=request["images"][0]["content_hash"])
        self.send("need_image", **(wanted | dict(start=start, num_bytes=num_bytes) | fields))

    def finish(self, request: dict[str, Any]) -> None:
        """Send a group of one sample."""
        ids = dict(id=request["id"], caller=request["caller"])
        self.send("sample", **SAMPLE, index=0, **ids)
        self.send("done", **ONE, **ids)

    def disconnect(self) -> None:
        self._socket.close(linger=0)
        self._bind()

    def serve(self, script: Callable[[Peer], None], ended: threading.Event, errors: list[BaseException]) -> None:
        try:
            script(self)
        except BaseException as error:
            errors.append(error)
        while not ended.is_set():
            if self._socket.poll(20):
                self.answer_health()
        self._socket.close(linger=0)

    def _bind(self) -> None:
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(self._address)


@contextmanager
def client_of(folder: Path, script: Callable[[Peer], None]) -> Iterator[RolloutClient]:
    """Return a client of a peer that runs `script`. At the end, the script must have succeeded."""
    ended, errors = threading.Event(), []
    address = f"ipc://{folder}/worker.sock"
    with zmq.Context() as context:
        thread = threading.Thread(target=Peer(context, address).serve, args=(script, ended, errors))
        thread.start()
        try:
            with RolloutClient(address, timeout=60.0) as client:
                yield client
        finally:
            ended.set()
            thread.join()
    if errors:
        raise errors[0]


def content_of(image: ImageInput) -> bytes:
    return image.table.astype("<f4").tobytes() + image.levels.tobytes()


def test_the_worker_gets_the_parts_that_it_asks_for(tmp_path: Path) -> None:
    image, other = random_image(), random_image(1, start=3)
    parts: list[dict[str, Any]] = []

    def script(peer: Peer) -> None:
        request = peer.receive()
        assert request["images"] == [protocol.ref_of(each).model_dump() for each in (image, other)]
        assert len(request["frame"]) < 1000, "the pixels are not in the request"
        for start in range(0, CONTENT_BYTES, 1000):
            peer.ask(request, start, min(1000, CONTENT_BYTES - start))
            parts.append(peer.receive())
        peer.ask(request, 5, 7, content_hash=other.content_hash)
        parts.append(peer.receive())
        peer.finish(request)

    with client_of(tmp_path, script) as client:
        [group] = client.generate([[1, 500, 2, 500]], media=[[image, other]])
    *whole, last = parts
    assert [(part["type"], part["start"]) for part in whole] == [("put_image", 1000 * i) for i in range(len(whole))]
    assert {part["content_hash"] for part in whole} == {image.content_hash}
    content = b"".join(part["data"] for part in whole)
    assert content == content_of(image) and last["data"] == content_of(other)[5:12]
    found = protocol.image_of(protocol.ref_of(image), bytearray(content), FakeTower(patch_size=4))
    assert found.content_hash == image.content_hash and (found.levels == image.levels).all()
    assert group.images == (image, other) and group.prompt_token_ids.tolist() == [1, 500, 2, 500]
    assert group.prompt_token_ids.dtype == np.int32


@pytest.mark.parametrize("call", ["stream", "score", "continue_samples"])
def test_each_call_sends_images(tmp_path: Path, call: str) -> None:
    image = random_image()

    def script(peer: Peer) -> None:
        for _ in range(1 if call != "continue_samples" else 2):
            request = peer.receive()
            peer.ask(request, 0, CONTENT_BYTES)
            assert peer.receive()["data"] == content_of(image)
            if request["type"] == "generate":
                peer.send("sample", **(SAMPLE | dict(finish_reason="abort", logprobs=b"")), index=0, id=request["id"])
                peer.send("done", **ONE, id=request["id"])
            else:
                peer.send("scores", id=request["id"], logprobs=b"", finish_reason="stop", weight_versions=())
            while peer.receive()["type"] != "ack":
                pass

    with client_of(tmp_path, script) as client:
        if call == "stream":
            assert len(list(client.stream([PROMPT], media=[[image]]))) == 1
        elif call == "score":
            assert len(client.score([PROMPT], media=[[image]])) == 1
        else:
            [group] = client.generate([PROMPT], media=[[image]])
            prompts, media = [group.prompt_token_ids], [group.images]
            assert len(client.continue_samples(prompts, group.samples, media=media)) == 1


def test_a_question_about_a_request_that_was_given_up_is_answered_with_an_abort(tmp_path: Path) -> None:
    """Without an answer, the worker would wait for the connection, and then fail its other requests."""
    image = random_image()

    def script(peer: Peer) -> None:
        request = peer.receive()
        for other in (dict(id="nobody"), dict(caller="another")):
            peer.ask(request, 0, 10, **other)
            abort = peer.receive()
            told = {"id": abort["request_id"], "caller": abort["caller"]}
            assert told == {"id": request["id"], "caller": request["caller"]} | other and abort["type"] == "abort"
        peer.ask(request, 3, 10)
        part = peer.receive()
        assert (part["type"], part["id"], part["start"]) == ("put_image", request["id"], 3)
        peer.finish(request)
        assert peer.receive()["type"] == "ack"
        peer.ask(request, 0, 10)  # the request has ended
        messages = {message["type"]: message for message in (peer.receive(), peer.receive())}  # in any order
        assert messages["abort"]["request_id"] == request["id"]
        peer.finish(messages["generate"])

    with client_of(tmp_path, script) as client:
        assert client.generate([PROMPT], media=[[image]])[0].images == (image,)
        assert client.generate([[1]])[0].images == ()


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        (dict(content_hash=bytes(32)), ProtocolError, "need_image: the worker asks for image 0000.*has no such image"),
        (
            dict(start=CONTENT_BYTES - 9),
            InvalidRequestError,
            rf"^prompts\[0\]: images: the worker's model needs at least {CONTENT_BYTES + 1} bytes .*4 x 6 patches .got "
            rf"{CONTENT_BYTES}.; preprocess the image with this model",
        ),
        (dict(start=10**9), InvalidRequestError, "needs at least 1000000010 bytes"),
    ],
    ids=["unknown image", "cut part", "empty part"],
)
def test_a_question_without_an_answer_ends_only_its_request(
    tmp_path: Path, fields: dict[str, Any], kind: type[Exception], text: str
) -> None:
    def script(peer: Peer) -> None:
        requests = [peer.receive(), peer.receive()]
        peer.ask(requests[0], **(dict(start=0, num_bytes=10) | fields))
        abort = peer.receive()
        assert (abort["type"], abort["request_id"]) == ("abort", requests[0]["id"])
        assert abort["caller"] == requests[0]["caller"] is not None
        peer.finish(requests[1])

    with client_of(tmp_path, script) as client:
        error, group = client.generate([PROMPT, PROMPT], media=[[random_image()], []], errors="return")
        assert isinstance(error, kind) and not isinstance(group, Exception)
        with pytest.raises(kind, match=text):
            raise error


def test_after_a_reconnect_the_worker_may_ask_again(tmp_path: Path) -> None:
    image = random_image()

    def script(peer: Peer) -> None:
        first = peer.receive()
        peer.ask(first, 0, 1000)
        assert peer.receive()["start"] == 0
        peer.disconnect()
        second = peer.receive()
        assert second["frame"] == first["frame"], "the same request gives the same message"
        peer.ask(second, 0, CONTENT_BYTES)
        assert peer.receive()["data"] == content_of(image)
        peer.finish(second)

    with client_of(tmp_path, script) as client:
        assert len(client.generate([PROMPT], media=[[image]])[0].samples) == 1


def test_an_equal_call_gives_an_equal_message(tmp_path: Path) -> None:
    requests: list[dict[str, Any]] = []

    def script(peer: Peer) -> None:
        while len(requests) < 2:
            if (message := peer.receive())["type"] == "generate":
                peer.finish(message)
                requests.append(message)

    with client_of(tmp_path, script) as client:
        for _ in range(2):
            client.generate([PROMPT], media=[[random_image()]], request_ids=["r"])
    first, second = ({name: each[name] for name in each.keys() - {"caller", "frame"}} for each in requests)
    assert first == second and first["images"][0]["content_hash"] == random_image().content_hash
