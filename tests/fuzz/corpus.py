"""Valid messages of every type, in the orders in which clients send them. The mutations start from these messages.

Owns: the ids of the attack, which all begin with `x-`, and the shared memory that the attack's pushes name. No push of
the corpus brings more than one tensor, so no push can be committed. No message of the corpus aborts requests of other
clients.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fuzz.images import BY_HASH, FALSEHOODS, draw_image, prompt_with, put_image
from fuzz.trees import unpack

from trueroll.weight_sync.payload.manifest import checksum
from trueroll.weight_sync.transports.shared import SharedSlots

MAX_TOKEN = 500
"""Below the vocabulary size of every attacked model."""
CLOSED_PORT = 9
NO_FOLDER = "no-such-folder"
SECONDS = 0.1
"""Maximum seconds that a call waits. Longer waits would only delay the good requests."""

Message = dict[str, Any]


class Memory:
    """The smallest of the worker's tensors, in shared memory. The bytes differ from those that the worker serves."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        name = min(tensors, key=lambda name: tensors[name].nbytes)
        tensor = tensors[name]
        self._slots = SharedSlots(4096)
        data = torch.full_like(tensor, 7.0).reshape(-1).view(torch.uint8)
        self._slots.slots[0][: len(data)] = data
        self.source = self._slots.source(0).model_dump()
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.piece = {"kind": "rows", "name": name, "shape": list(tensor.shape), "start": 0, "length": len(tensor)}
        self.piece |= {"offset": 0, "num_bytes": len(data), "checksum": checksum(data.numpy())}

    def close(self) -> None:
        self._slots.close()


@dataclass
class Corpus:
    """Draws scripts: ordered lists of messages of one client. `prefix`: prefix of all ids. `images`: True to draw only
    messages about images.
    """

    rng: random.Random
    memory: Memory
    prefix: str = "x-"
    images: bool = False
    _count: int = 0

    def script(self) -> list[Message]:
        weights = _IMAGE_WEIGHTS if self.images else _WEIGHTS
        [kind] = self.rng.choices(list(weights), list(weights.values()))
        messages = [{"version": 1, **message} for message in kind(self)]
        if self.rng.random() < 0.1:
            self.rng.shuffle(messages)
        if self.rng.random() < 0.1:
            messages.append(self.rng.choice(messages))
        return messages

    def generate(self) -> list[Message]:
        rng = self.rng
        params: Message = {"max_tokens": rng.randrange(1, 5), "n": rng.choice((1, 1, 2, 3))}
        params["seed"] = rng.getrandbits(64)
        for name, choices in _PARAMS.items():
            if rng.random() < 0.2:
                params[name] = rng.choice(choices)
        if params.get("logprobs", "raw") is None:
            params.pop("top_logprobs", None)
        if params["seed"] % 5 == 0:
            params |= {"structured_outputs": GRAMMARS[params["seed"] % len(GRAMMARS)], "ignore_eos": False}
        if params["seed"] % 7 == 1 and params.get("logprobs", "raw") is not None:
            params |= {"target_token_ids": [3, 7, 3], "return_sampling_mask": True}
        message = {"type": "generate", "id": self._id(), "prompt_token_ids": self._tokens(1), "params": params}
        if params["seed"] % 11 == 0:
            message["adapter"] = "a"
        if rng.random() < 0.1:
            message["num_prior_tokens"] = 1
        if params["seed"] % 7 == 0:
            message["spans"] = [[0, 1, bytes(32)]]
        if params["seed"] % 5 == 0:
            message["deltas"] = True
            message["delta_seconds"] = params["seed"] % 11 / 8
            message["while_connected"] = params["seed"] % 2 == 0
        demand = {} if "adapter" in message else self._demand()  # the adapter never comes
        return [message | self._named() | demand]

    def score(self) -> list[Message]:
        rng = self.rng
        message = {"type": "score", "id": self._id(), "token_ids": self._tokens(2)}
        message["distribution"] = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01}
        if rng.random() < 0.5:
            message["distribution"] |= {name: rng.choice(choices) for name, choices in _EDITS.items()}
        if rng.random() < 0.2:
            message |= {"start": rng.choice((1, 1, 2, 7, 2**63 - 1)), "return_sampling_mask": True}
        if rng.random() < 0.2:
            ids = [rng.choice((-2, -1, 0, 1, MAX_TOKEN + 1)) for _ in range(rng.choice((0, 1, 2, 3, 6, 1030)))]
            message["target_token_ids"] = np.array(ids, "<i4").tobytes()
        return [message | {"cache_salt": rng.choice((None, "salt"))} | self._named() | self._demand()]

    def _demand(self) -> Message:
        """Return, rarely, a demand for served weights, or for missing weights without a wait."""
        if self.rng.random() < 0.9:
            return {}
        choices = {"min_weight_version": 0, "wait_for_weights": True}, {"min_weight_version": 10**9}
        return self.rng.choice(choices)

    def _named(self) -> Message:
        """Return, rarely, a name for the caller of a request or an abort."""
        return {"caller": self.rng.choice((None, "caller-1", "caller-2"))} if self.rng.random() < 0.1 else {}

    def request_and_end(self) -> list[Message]:
        """Return a request, an abort of the request, and an ack, in any order."""
        [request] = self.generate() if self.rng.random() < 0.7 else self.score()
        which = {"index": self.rng.choice((None, 0, 1))} if self.rng.random() < 0.7 else self._named()
        abort = {"type": "abort", "id": self._id(), "request_id": request["id"], **which}
        messages = [request, abort, {"type": "ack", "ids": [request["id"]]}]
        self.rng.shuffle(messages)
        return messages

    def request_with_images(self) -> list[Message]:
        """Return a request with images. Its references may be false."""
        rng = self.rng
        [message] = self.generate() if rng.random() < 0.7 else self.score()
        images = [draw_image(rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        tokens, refs = prompt_with(images, rng, MAX_TOKEN)
        if rng.random() < 0.4:
            rng.choice(FALSEHOODS)(rng, tokens, refs)
        if rng.random() < 0.9:
            message.pop("spans", None)
        name = "token_ids" if message["type"] == "score" else "prompt_token_ids"
        return [message | {name: np.array(tokens, "<i4").tobytes(), "images": refs}]

    def request_for_unknown_pixels(self) -> list[Message]:
        """Return a request with an image that no worker can have."""
        tokens, refs = prompt_with([draw_image(self.rng)], self.rng, MAX_TOKEN)
        refs[0]["content_hash"] = self.rng.randbytes(32)
        fields = {"token_ids": np.array(tokens, "<i4").tobytes(), "images": refs, "distribution": {}}
        return [{"version": 1, **self._call("score", **fields)}]

    def upload(self) -> list[Message]:
        """Return a request with images, followed by some of these messages in any order: its pixels, sent without
        waiting for the question; an abort; an ack; the request again.
        """
        [request] = self.request_with_images()
        known = [BY_HASH[ref["content_hash"]] for ref in request["images"] if ref["content_hash"] in BY_HASH]
        others = [put_image(request["id"], image) for image in known[:2]]
        others.append({"type": "abort", "id": self._id(), "request_id": request["id"], **self._named()})
        others += {"type": "ack", "ids": [request["id"]]}, request
        return [request, *self.rng.sample(others, self.rng.randrange(1, len(others) + 1))]

    def put_image(self) -> list[Message]:
        """Return a part of an image. The worker has probably not asked for this part, or has asked another client."""
        rng = self.rng
        message = put_image(self._late_id(), draw_image(rng))
        data = message["data"]
        starts = [{"start": start} for start in (1, len(data), 2**20, 2**63 - 1, 2**64 - 1)]
        other_data = [{"data": each} for each in (data[:-1], data + b"x", data[:1], bytes(len(data)))]
        return [message | rng.choice(({}, {"content_hash": rng.randbytes(32)}, *starts, *other_data))]

    def abort(self) -> list[Message]:
        return [{"type": "abort", "id": self._id(), "request_id": self._late_id(), "index": 0}]

    def ack(self) -> list[Message]:
        return [{"type": "ack", "ids": [self._late_id() for _ in range(self.rng.randrange(4))]}]

    def question(self) -> list[Message]:
        return [{"type": self.rng.choice(("health", "stats", "weights", "checksums")), "id": self._id()}]

    def invalidate(self) -> list[Message]:
        return [self._call("invalidate")]

    def save(self) -> list[Message]:
        return [self._call("save_weights", folder="/nowhere")]

    def unload(self) -> list[Message]:
        return [self._call("unload_adapter", name="a")]

    def pause(self) -> list[Message]:
        return [self._call("pause"), *self.generate(), self._call("resume")]

    def drain(self) -> list[Message]:
        return [*self.generate(), self._call("drain", timeout=SECONDS), self._call("resume")]

    def sleep(self) -> list[Message]:
        tags = self.rng.choice((["weights"], ["kv_cache"], ["weights", "kv_cache"]))
        in_flight = self.rng.choice(("recompute", "drain"))
        level = self.rng.choice((1, 1, 2))
        call = self._call("sleep", level=level, tags=tags, in_flight=in_flight, timeout=SECONDS)
        return [call, *self.generate(), self._call("wake_up", tags=tags)]

    def push(self) -> list[Message]:
        """Return each phase of a push. The push names one tensor with correct bytes."""
        push_id = f"{self.rng.getrandbits(128):032x}"
        bucket = {"index": 0, "num_bytes": self.memory.piece["num_bytes"], "pieces": [dict(self.memory.piece)]}
        phases = [
            self._begin(push_id, self._source()),
            self._call("stage_bucket", push_id=push_id, bucket=bucket | {"word_sum": None}),
            self._call("verify_push", push_id=push_id, num_buckets=1),
            self._call("commit_push", push_id=push_id, in_flight="recompute", timeout=SECONDS),
            self._call("abort_push", push_id=push_id),
        ]
        return phases[self.rng.choice((0, 0, 0, 1, 2, 3, 4)) :][: self.rng.randrange(1, 6)]

    def _begin(self, push_id: str, source: Message) -> Message:
        fields = {"weight_version": 10**6 + self.rng.randrange(9), "base": None, "dtype": self.memory.dtype}
        fields["allow_older"] = self.rng.random() < 0.5
        flags = {"in_place": self.rng.random() < 0.2, "in_flight": "recompute", "drain_timeout": SECONDS}
        waits = {"reject_nonfinite": self.rng.random() < 0.5, "timeout": SECONDS}
        if source["kind"] == "peft":
            fields["adapter"] = "a"
        return self._call("begin_push", push_id=push_id, source=source, **fields, **flags, **waits)

    def _source(self) -> Message:
        choice = self.rng.random()
        if choice < 0.6:
            return dict(self.memory.source)
        if choice < 0.7:
            return self.memory.source | {"name": f"trueroll-{self.rng.getrandbits(128):032x}"}
        if choice < 0.82:
            return {"kind": "disk", "folder": NO_FOLDER}
        if choice < 0.84:
            return {"kind": "chain", "place": NO_FOLDER}
        if choice < 0.86:
            return {"kind": "peft", "folder": NO_FOLDER}
        if choice < 0.96:
            gpu = "01234567-89ab-cdef-0123-456789abcdef"
            return {"kind": "cuda_ipc", "gpu": gpu, "handle": bytes(64), "slot_bytes": 4096, "num_slots": 2}
        place = {"host": "127.0.0.1", "port": CLOSED_PORT}
        if choice < 0.99:
            return {"kind": "relay", **place, "token": "0" * 32, "position": 0, "num_slots": 4}
        return {"kind": "collective", "backend": "gloo", **place, "rank": 1, "world_size": 2}

    def _call(self, type: str, **fields: Any) -> Message:
        return {"type": type, "id": self._id(), **fields}

    def _id(self) -> str:
        if self.rng.random() < 0.05:
            return self._late_id()
        self._count += 1
        return f"{self.prefix}{self._count}"

    def _late_id(self) -> str:
        return f"{self.prefix}{max(0, self._count - self.rng.randrange(50))}"

    def _tokens(self, least: int) -> bytes:
        return np.array([self.rng.randrange(MAX_TOKEN) for _ in range(least + self.rng.randrange(8))], "<i4").tobytes()


GRAMMARS: tuple[dict[str, Any], ...] = (
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"json": '{"$ref": "#/$defs/x", "$defs": {"x": {"type": "array", "items": {"$ref": "#/$defs/x"}}}}'},
    {"json_object": True, "disable_any_whitespace": True},
    {"regex": r"[a-f]{1,9}(x|\d+)*"},
    {"choice": ["yes", "no", "\n"]},
    {"grammar": 'root ::= a | "(" root ")"\na ::= [0-9]+'},
)
_EDITS: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0, 1.2, 0.5),
    "presence_penalty": (0.0, -2.0),
    "frequency_penalty": (0.0, 2),
    "logit_bias": ([], [[3, 100.0]], [[5, -100], [7, 0.5]]),
    "allowed_token_ids": (None, [3], list(range(0, 500, 7))),
    "bad_words_token_ids": ([], [[3]], [[7, 8], [9]]),
}
_PARAMS: dict[str, tuple[Any, ...]] = _EDITS | {
    "min_tokens": (0, 1),
    "temperature": (0, 0.0, 0.5, 2.0),
    "top_k": (-1, 1, 40),
    "top_p": (0.5, 1.0),
    "min_p": (0.0, 0.2),
    "stop_token_ids": ([], [3], [7, 8, 9]),
    "stop": ([], ["a"], ["ab", "c"]),
    "ignore_eos": (True, False),
    "logprobs": ("processed", "temperature", "raw", None),
    "top_logprobs": (None, 0, 3),
    "cache_salt": (None, "salt"),
}
_WEIGHTS: dict[Callable[[Corpus], list[Message]], float] = {
    Corpus.generate: 30,
    Corpus.score: 15,
    Corpus.request_and_end: 10,
    Corpus.abort: 5,
    Corpus.ack: 5,
    Corpus.question: 10,
    Corpus.invalidate: 1,
    Corpus.save: 1,
    Corpus.unload: 1,
    Corpus.pause: 1,
    Corpus.drain: 1,
    Corpus.sleep: 2,
    Corpus.push: 10,
    Corpus.request_with_images: 14,
    Corpus.upload: 4,
    Corpus.put_image: 4,
}
_IMAGE_WEIGHTS: dict[Callable[[Corpus], list[Message]], float] = {
    Corpus.request_with_images: 60,
    Corpus.upload: 20,
    Corpus.put_image: 20,
}


def is_tame(frames: list[bytes]) -> bool:
    """Return whether the attack may send this message.

    A tame message aborts no requests of other clients, reads no file, and does not wait for the network or for weights.
    """
    if len(frames) > 1 or not any(word in frames[0] for word in (b"abort", b"source", b"wait_for_weights")):
        return True
    fields = unpack(frames[0]) or {}
    if fields.get("in_flight") == "abort":
        return False
    waits = fields.get("wait_for_weights") is True
    if waits and (fields.get("min_weight_version") != 0 or fields.get("adapter") is not None):
        return False
    source = fields.get("source")
    if not isinstance(source, dict):
        return True
    if source.get("kind") in ("disk", "peft", "chain"):
        folder = source.get("place" if source["kind"] == "chain" else "folder")
        return not isinstance(folder, str) or "/" not in folder
    return source.get("kind") not in ("collective", "relay") or _fails_soon(fields, source)


def _fails_soon(begin: Message, source: Message) -> bool:
    waits = begin.get("timeout"), begin.get("drain_timeout")
    return (source.get("host"), source.get("port"), *waits) == ("127.0.0.1", CLOSED_PORT, SECONDS, SECONDS)
