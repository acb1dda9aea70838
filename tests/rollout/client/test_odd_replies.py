"""Replies that a client does not expect, from another release of trueroll or from a process that is not a worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from frames import pack

from trueroll.errors import ProtocolError
from trueroll.rollout import RolloutClient, SamplingParams, protocol

HEALTH = dict(
    state="ready",
    instance="i",
    seconds_since_progress=0.0,
    weight_version=1,
    requests={},
    memory={},
    limits={"max_message_bytes": 2**20},
    engine=None,
)
SAMPLE = dict(token_ids=b"", logprobs=None, finish_reason="stop", seed=1, num_cached_tokens=0, weight_versions=())
DONE = dict(params=SamplingParams(n=2, seed=1).model_dump(), num_prompt_tokens=1, finish_reasons={})
REPLIES = {
    "sample": SAMPLE | {"index": 0},
    "done": DONE,
    "scores": dict(logprobs=b"", finish_reason="stop", weight_versions=()),
    "aborted": dict(request_id="r", num_samples=0),
    "status": dict(state="ready", weight_version=1),
    "deltas": {},
    "stats": dict(engine={}, service={}),
}


@contextmanager
def answering(folder: Path, *replies: tuple[str, dict[str, Any]]) -> Iterator[RolloutClient]:
    """Return a client of a peer that answers health calls, and all other calls with these types and fields."""
    ended = threading.Event()

    def serve(router: zmq.Socket[bytes]) -> None:
        while not ended.is_set():
            if router.poll(20):
                identity, frame = router.recv_multipart()
                asked = msgpack.unpackb(frame)
                for type, fields in [("health", HEALTH)] if asked["type"] == "health" else replies:
                    told = {"version": protocol.PROTOCOL_VERSION, "type": type, "id": asked.get("id"), **fields}
                    if type == "deltas":
                        part = dict(id=told.pop("id"), index=0, start=1, token_ids=bytes(4), logprobs=None)
                        told["samples"] = (part,)
                    router.send_multipart([identity, pack(told)])

    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0  # do not wait for a client that has closed
        router.bind(f"ipc://{folder}/worker.sock")
        thread = threading.Thread(target=serve, args=(router,))
        thread.start()
        try:
            with RolloutClient(f"ipc://{folder}/worker.sock", timeout=20.0) as client:
                yield client
        finally:
            ended.set()
            thread.join()


CALLS: dict[str, tuple[Callable[[RolloutClient], Any], str, list[str]]] = {
    "generate": (lambda client: client.generate([[1]]), "sample or done", ["status", "scores", "deltas"]),
    "score": (lambda client: client.score([[1, 2]]), "scores", ["sample", "done", "stats", "deltas"]),
    "abort": (lambda client: client.abort("r"), "aborted", ["status", "done"]),
    "stats": (lambda client: client.stats(), "stats", ["aborted", "sample"]),
    "pause": (lambda client: client.pause(), "status", ["stats", "scores"]),
}


@pytest.mark.parametrize(("call", "reply"), [(call, reply) for call in CALLS for reply in CALLS[call][2]])
def test_a_reply_of_the_wrong_type_is_an_error(tmp_path: Path, call: str, reply: str) -> None:
    ask, expected, _ = CALLS[call]
    right = [(type, REPLIES[type]) for type in expected.split(" or ")]
    with answering(tmp_path, (reply, REPLIES[reply]), *right) as client:
        words = f"reply: the worker sent {reply} instead of {expected}; use the same release of trueroll on both sides"
        with pytest.raises(ProtocolError, match=f"^(.*: )?{words}$"):
            ask(client)
        assert client.health().instance == "i", "the connection still works"


def test_deltas_with_missing_tokens_are_an_error(tmp_path: Path) -> None:
    with answering(tmp_path, ("deltas", {})) as client:
        with pytest.raises(ProtocolError, match="sample 0: a delta begins at token 1, but earlier tokens"):
            list(client.stream([[1]], deltas=True))
        assert client.health().instance == "i", "the connection still works"


@pytest.mark.parametrize("indices", [(), (1,), (0, 2), (0, 1, 2)])
def test_a_group_with_wrong_sample_indices_is_an_error(tmp_path: Path, indices: tuple[int, ...]) -> None:
    samples = [("sample", SAMPLE | {"index": index}) for index in indices]
    with answering(tmp_path, *samples, ("done", DONE)) as client:
        words = (
            rf"request 'r': the worker sent {len(indices)} samples .* instead of samples 0 to 1; use the same release"
        )
        with pytest.raises(ProtocolError, match=words):
            client.generate([[1]], SamplingParams(n=2), request_ids=["r"])


def test_the_same_samples_in_any_order_are_a_group(tmp_path: Path) -> None:
    samples = [("sample", SAMPLE | {"index": index}) for index in (1, 0)]
    with answering(tmp_path, *samples, ("done", DONE)) as client:
        (group,) = client.generate([[1]], SamplingParams(n=2))
    assert [sample.index for sample in group.samples] == [0, 1]
