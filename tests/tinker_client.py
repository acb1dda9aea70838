"""A client that makes the calls of the package `tinker` to sample, for tests, with a parser of its protobuf messages.

`make test-agents` runs the package itself. Fields and paths are those of tinker 0.38.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx2
import numpy as np
from http_fronts import Front


class TinkerClient:
    """A session and a sampling session at a front end. `key`: the API key."""

    def __init__(self, front: Front, key: str = "tml-none") -> None:
        self._front, self._key, self.num_sent = front, key, 0
        labels = dict(tags=[], user_metadata={"a": 1}, sdk_version="0.38.0", type="create_session")
        self.session_id: str = self.call("create_session", **labels).json()["session_id"]
        answer = self.begin_sampling(base_model=front.model)
        assert answer.status_code == 200, answer.text
        self.sampling_session_id: str = answer.json()["sampling_session_id"]

    def call(self, path: str, **fields: Any) -> httpx2.Response:
        return self._front.post(f"/api/v1/{path}", fields, Authorization="", **{"X-API-Key": self._key})

    def begin_sampling(self, **fields: Any) -> httpx2.Response:
        named = dict(session_id=self.session_id, sampling_session_seq_id=0, type="create_sampling_session")
        return self.call("create_sampling_session", **named | fields)

    def begin(self, prompt: list[int], sampling: dict[str, Any], /, **fields: Any) -> httpx2.Response:
        """Send a request with the next number, unless `fields` has one."""
        named = dict(
            sampling_session_id=self.sampling_session_id,
            seq_id=self.num_sent,
            num_samples=1,
            prompt={"chunks": [{"tokens": prompt, "type": "encoded_text"}]},
            sampling_params=dict(temperature=1.0, top_k=-1, top_p=1.0) | sampling,
            topk_prompt_logprobs=0,
            topk_sample_logprobs=0,
            prompt_alt_tokens_k=0,
            record_stability_info=False,
            type="sample",
        )
        self.num_sent += 1
        return self.call("asample", **named | fields)

    def retrieve(self, request_id: str, allow_metadata_only: bool = True) -> httpx2.Response:
        return self.call("retrieve_future", request_id=request_id, allow_metadata_only=allow_metadata_only)

    def sample(self, prompt: list[int], sampling: dict[str, Any], /, **fields: Any) -> Sampled:
        """Return the answer to a request."""
        promise = self.begin(prompt, sampling, **fields)
        assert promise.status_code == 200, promise.text
        answer = self.retrieve(promise.json()["request_id"])
        assert answer.headers["content-type"] == "application/x-protobuf", answer.text
        return Sampled.of(answer.content)


@dataclass
class Sampled:
    """A `SampleResponse`. Log-probs are the bytes of float32 values."""

    stop_reasons: list[int]
    token_ids: list[list[int]]
    logprobs: list[bytes]
    tops: list[tuple[list[int], bytes, int, int]]
    prompt_logprobs: bytes | None
    prompt_tops: tuple[list[int], bytes, int, int] | None
    targets: dict[int, list[Any]] | None
    num_cached: int

    @staticmethod
    def of(content: bytes) -> Sampled:
        found = fields_of(content)
        sequences = [fields_of(each) for each in found[1]]
        return Sampled(
            stop_reasons=[each[1][0] for each in sequences],
            token_ids=[np.frombuffer(each[2][0], np.int32).tolist() for each in sequences],
            logprobs=[each[3][0] for each in sequences],
            tops=[tops_of(each[4][0]) for each in sequences if 4 in each],
            prompt_logprobs=found[2][0] if 2 in found else None,
            prompt_tops=tops_of(found[3][0]) if 3 in found else None,
            targets=fields_of(found[5][0]) if 5 in found else None,
            num_cached=found[4][0],
        )


def tops_of(content: bytes) -> tuple[list[int], bytes, int, int]:
    """Return the token ids, the log-probs, the width and the number of rows of a `TopkLogprobs`."""
    found = fields_of(content)
    return np.frombuffer(found[1][0], np.int32).tolist(), found[2][0], found[3][0], found[4][0]


def fields_of(content: bytes) -> dict[int, list[Any]]:
    """Return the values of each field of a protobuf message: integers, or bytes."""
    found = dict[int, list[Any]]()
    place = 0
    while place < len(content):
        tag, place = varint(content, place)
        value, place = varint(content, place)
        assert tag & 7 in (0, 2)
        if tag & 7 == 2:
            assert place + value <= len(content)
            found.setdefault(tag >> 3, []).append(content[place : place + value])
            place += value
        else:
            found.setdefault(tag >> 3, []).append(value)
    return found


def varint(content: bytes, place: int) -> tuple[int, int]:
    """Return an integer, and the place after it."""
    value = shift = 0
    while True:
        byte = content[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place
