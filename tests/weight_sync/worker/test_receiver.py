"""The receiver alone, with plain tensors: correct pieces reach the staging. A wrong piece is refused with an error that
names the piece.
"""

from __future__ import annotations

import gc
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import FakeStaging, FakeWeights
from pydantic import ValidationError
from weight_sync.transports.stand_ins import gpu

from trueroll.errors import DeadlineError, PushError
from trueroll.rollout import protocol
from trueroll.weight_sync.payload.manifest import (
    MOST_UNDER_WAY,
    Bucket,
    CollectiveSource,
    CudaIpcSource,
    DiskSource,
    Elements,
    Rows,
    SharedSource,
    checksum,
)
from trueroll.weight_sync.payload.tensors import BytePass, raw_bytes, word_sum
from trueroll.weight_sync.transports.policy import PushPolicy
from trueroll.weight_sync.transports.shared import SharedReader, SharedSlots
from trueroll.weight_sync.worker import assembly as assembly_module
from trueroll.weight_sync.worker import receiver as receiver_module
from trueroll.weight_sync.worker.events import Broken, Opened, PushEvent, Reached
from trueroll.weight_sync.worker.receiver import Receiver

SHAPES = {"embed.weight": (384, 1), "layer.weight": (32, 4, 2), "norm.weight": (24,)}
TIED = {"head.weight": "embed.weight"}
PUSH_ID = "0123456789abcdef" * 2
SECONDS = 20
BEGUN, STAGED, VERIFIED = Reached("b", "begun"), Reached("s", "staged"), Reached("v", "verified")


def random_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in SHAPES.items()}


class Feed:
    """A receiver, the shared memory that the receiver reads, and the receiver's events. Calls have the ids `b`, `s` and
    `v`.
    """

    def __init__(self, weights: FakeWeights | None = None, **begin: Any) -> None:
        self.slots = SharedSlots(4096)
        self.weights = weights or FakeWeights(SHAPES, tied=TIED, ignored=("old.bias",))
        self.events: queue.Queue[PushEvent] = queue.Queue()
        fields: dict[str, Any] = dict(id="b", push_id=PUSH_ID, weight_version=7, dtype="bfloat16", timeout=SECONDS)
        fields |= dict(source=self.slots.source(0)) | begin
        self.receiver = Receiver(protocol.BeginPush(**fields), self.weights, self.events.put, "cpu", PushPolicy())
        self.receiver.start()
        self.num_buckets = 0

    def next(self) -> PushEvent:
        return self.events.get(timeout=SECONDS)

    def begin_in_place(self) -> PushEvent:
        assert self.next() == Opened()
        self.receiver.proceed()
        return self.next()

    def rows(self, name: str, tensor: torch.Tensor, start: int = 0, length: int | None = None, at: int = 0) -> Rows:
        """Put rows of a tensor into the next bucket's slot."""
        length = len(tensor) - start if length is None else length
        data = tensor[start : start + length].contiguous().view(-1).view(torch.uint8)
        self._slot[at : at + len(data)] = data
        return Rows(
            name=name,
            shape=tuple(tensor.shape),
            start=start,
            length=length,
            offset=at,
            num_bytes=len(data),
            checksum=checksum(raw_bytes(data)),
        )

    def elements(self, name: str, indices: list[int], values: torch.Tensor, total: int | None = None) -> Elements:
        packed = torch.tensor(indices, dtype=torch.int32).view(torch.uint8), values.view(torch.uint8)
        data = torch.cat(packed)
        self._slot[: len(data)] = data
        return Elements(
            name=name,
            shape=SHAPES[name],
            count=len(indices),
            total=len(indices) if total is None else total,
            offset=0,
            num_bytes=len(data),
            checksum=checksum(raw_bytes(data)),
        )

    @property
    def _slot(self) -> torch.Tensor:
        return self.slots.slots[self.num_buckets % MOST_UNDER_WAY]

    def stage(self, *pieces: Rows | Elements, **changes: Any) -> PushEvent:
        end = max((piece.offset + piece.num_bytes for piece in pieces), default=0)
        bucket = Bucket(index=self.num_buckets, num_bytes=end, pieces=pieces).model_copy(update=changes)
        self.num_buckets += 1
        return self.announce(bucket)

    def announce(self, bucket: Bucket, id: str = "s") -> PushEvent:
        self.receiver.take(protocol.StageBucket(id=id, push_id=PUSH_ID, bucket=bucket))
        return self.next()

    def verify(self, num_buckets: int | None = None) -> PushEvent:
        count = self.num_buckets if num_buckets is None else num_buckets
        self.receiver.take(protocol.VerifyPush(id="v", push_id=PUSH_ID, num_buckets=count))
        return self.next()

    def close(self) -> None:
        self.receiver.close()
        self.receiver.join(SECONDS)
        assert not self.receiver.is_alive()
        self.slots.close()


@pytest.fixture
def feed() -> Iterator[Feed]:
    feed = Feed()
    assert feed.next() == BEGUN
    yield feed
    feed.close()


@pytest.fixture
def sparse_feed() -> Iterator[Feed]:
    feed = Feed(base=PUSH_ID, reject_nonfinite=False)
    assert feed.next() == BEGUN
    yield feed
    feed.close()


def refused(event: PushEvent, *words: str) -> None:
    assert isinstance(event, Broken), event
    assert isinstance(event.error, PushError)
    for word in words:
        assert word in str(event.error)


def test_sent_tensors_are_in_the_staging(feed: Feed) -> None:
    sent = random_tensors()
    embed, layer, norm = (sent[name] for name in SHAPES)
    first = feed.stage(feed.rows("embed.weight", embed, 0, 256), feed.rows("norm.weight", norm, at=1024))
    assert first == STAGED
    assert feed.receiver.progress.phase == "staged"
    assert feed.receiver.progress.bytes_staged == 1024 + norm.nbytes
    assert feed.stage(feed.rows("embed.weight", embed, 256)) == STAGED
    assert feed.stage(feed.rows("layer.weight", layer)) == STAGED
    assert feed.verify() == VERIFIED
    assert feed.receiver.progress.phase == "verified"
    staging = feed.receiver.staging
    assert isinstance(staging, FakeStaging)
    feed.slots.slots[0].fill_(7)  # from now on, nothing may read the slots
    feed.slots.slots[1].fill_(7)
    assert all(torch.equal(staging.tensors[name], tensor) for name, tensor in sent.items())
    assert all(not live.any() for live in feed.weights.live.values())


def test_in_place_the_live_weights_are_written() -> None:
    feed = Feed(in_place=True)
    assert feed.begin_in_place() == BEGUN
    sent = random_tensors()
    for name in SHAPES:
        assert feed.stage(feed.rows(name, sent[name])) == STAGED
    assert feed.verify() == VERIFIED
    assert all(torch.equal(feed.weights.live[name], tensor) for name, tensor in sent.items())
    feed.close()


def test_in_place_nothing_is_staged_before_the_receiver_is_told_to_proceed() -> None:
    feed = Feed(in_place=True)
    assert feed.next() == Opened()
    feed.receiver.take(protocol.VerifyPush(id="v", push_id=PUSH_ID, num_buckets=0))
    feed.close()
    assert feed.events.empty() and feed.receiver.staging is None


def test_in_place_a_missing_source_is_an_error_before_opened(tmp_path: Path) -> None:
    for source in (
        SharedSource(name=f"trueroll-{'0' * 32}", slot_bytes=4096, num_slots=2),
        DiskSource(folder=str(tmp_path)),
    ):
        feed = Feed(in_place=True, source=source)
        assert isinstance(feed.next(), Broken)
        feed.close()
        assert feed.events.empty()


def test_a_bucket_may_overtake_the_one_before_it(feed: Feed) -> None:
    """This happens if the call for the first bucket was lost with a connection and is sent again."""
    sent = random_tensors()
    buckets = []
    for name in ("embed.weight", "norm.weight"):
        piece = feed.rows(name, sent[name])
        buckets.append(Bucket(index=feed.num_buckets, num_bytes=piece.num_bytes, pieces=(piece,)))
        feed.num_buckets += 1
    feed.receiver.take(protocol.StageBucket(id="second", push_id=PUSH_ID, bucket=buckets[1]))
    assert feed.announce(buckets[0], "first") == Reached("first", "staged")
    assert feed.next() == Reached("second", "staged")
    assert feed.stage(feed.rows("layer.weight", sent["layer.weight"])) == STAGED
    assert feed.verify() == VERIFIED
    staging = feed.receiver.staging
    assert isinstance(staging, FakeStaging)
    assert all(torch.equal(staging.tensors[name], tensor) for name, tensor in sent.items())


@pytest.mark.parametrize("index", [2, 7])
def test_a_bucket_that_is_further_ahead_is_refused(feed: Feed, index: int) -> None:
    piece = feed.rows("embed.weight", random_tensors()["embed.weight"])
    refused(feed.stage(piece, index=index), "expected bucket 0", f"got bucket {index}")


@pytest.mark.parametrize("call", ["stage", "verify"])
def test_nothing_more_is_taken_after_verify(feed: Feed, call: str) -> None:
    sent = random_tensors()
    for name in SHAPES:
        feed.stage(feed.rows(name, sent[name]))
    assert feed.verify() == VERIFIED
    assert feed.verify() == VERIFIED  # verify_push may be repeated
    if call == "verify":
        event = feed.verify(num_buckets=len(SHAPES) + 1)
    else:
        event = feed.stage(feed.rows("norm.weight", sent["norm.weight"]))
    refused(event, "arrived after verify_push")


def test_a_corrupt_bucket_is_refused(feed: Feed) -> None:
    piece = feed.rows("embed.weight", random_tensors()["embed.weight"])
    feed.slots.slots[0][100] ^= 1
    refused(feed.stage(piece), "embed.weight", "checksum", "corrupt")
    feed.receiver.join(SECONDS)
    assert feed.receiver.staging is None
    assert feed.events.empty()


def test_a_long_piece_is_checked_and_written_in_parts(feed: Feed, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    class NotedPass(BytePass):
        def update(self, data: torch.Tensor) -> None:
            lengths.append(len(data))
            super().update(data)

    monkeypatch.setattr(assembly_module, "BytePass", NotedPass)
    monkeypatch.setattr(assembly_module, "PART_BYTES", 20)
    monkeypatch.setattr(assembly_module, "is_plain", lambda _: False)  # as without the native library
    sent = random_tensors()
    for name in SHAPES:
        assert feed.stage(feed.rows(name, sent[name])) == STAGED
    assert lengths == [128] * 3 + [1] * 32 + [10, 10, 4], "matrices are cut where kernels can cut them"
    assert feed.verify() == VERIFIED
    staging = feed.receiver.staging
    assert isinstance(staging, FakeStaging)
    assert all(torch.equal(staging.tensors[name], tensor) for name, tensor in sent.items())


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("is_native", [False, True])
def test_wrong_bytes_at_the_end_of_a_long_piece(
    monkeypatch: pytest.MonkeyPatch, in_place: bool, is_native: bool
) -> None:
    """In a push in place, no part of the piece is written. In any other push, the staging is dropped."""
    monkeypatch.setattr(assembly_module, "PART_BYTES", 20)
    if not is_native:
        monkeypatch.setattr(assembly_module, "is_plain", lambda _: False)
    feed = Feed(in_place=in_place)
    assert (feed.begin_in_place() if in_place else feed.next()) == BEGUN
    piece, staging = feed.rows("embed.weight", random_tensors()["embed.weight"]), feed.receiver.staging
    assert isinstance(staging, FakeStaging)
    feed.slots.slots[0][piece.num_bytes - 1] ^= 1
    refused(feed.stage(piece), "embed.weight", "checksum", "corrupt")
    assert staging.staged == (set() if in_place else {"embed.weight"}) and not feed.weights.live["embed.weight"].any()
    feed.close()
    assert feed.receiver.staging is None


@pytest.mark.parametrize("num_bytes", [64, 2**21, 3 * 2**20 + 64])
def test_every_byte_of_a_slot_arrives(num_bytes: int) -> None:
    """Slots may be larger or smaller than the system's huge pages."""
    slots = SharedSlots(num_bytes)
    source = slots.source(0)
    reader = SharedReader(source)
    for index in range(3):
        assert index or not slots.slots[0].any(), "new memory is zero"
        sent = torch.randint(256, (source.slot_bytes,), dtype=torch.uint8)
        slots.slots[index % MOST_UNDER_WAY].copy_(sent)
        assert torch.equal(reader.read(Bucket(index=index, num_bytes=num_bytes, pieces=())), sent)
    reader.close()
    slots.close()


def summed(feed: Feed, *pieces: Rows | Elements) -> dict[str, Any]:
    """Return the keyword arguments of `stage` for the next bucket, which has these pieces and a word sum."""
    end = max(piece.offset + piece.num_bytes for piece in pieces)
    plain = tuple(piece.model_copy(update=dict(checksum=None)) for piece in pieces)
    return dict(pieces=plain, word_sum=word_sum(feed._slot[:end]))


def test_buckets_with_and_without_a_word_sum_may_be_mixed(feed: Feed) -> None:
    sent = random_tensors()
    embed, layer, norm = (sent[name] for name in SHAPES)
    pieces = feed.rows("embed.weight", embed), feed.rows("norm.weight", norm, at=1024)
    assert feed.stage(*pieces, **summed(feed, *pieces)) == STAGED
    assert feed.stage(feed.rows("layer.weight", layer)) == STAGED
    assert feed.verify() == VERIFIED
    staging = feed.receiver.staging
    assert isinstance(staging, FakeStaging)
    assert all(torch.equal(staging.tensors[name], tensor) for name, tensor in sent.items())


@pytest.mark.parametrize("place", [0, 767, 800, 1071])
def test_a_corrupt_bucket_with_a_word_sum_is_refused(feed: Feed, place: int) -> None:
    """The bucket is refused even if only the gap between two pieces is corrupt."""
    sent = random_tensors()
    pieces = feed.rows("embed.weight", sent["embed.weight"]), feed.rows("norm.weight", sent["norm.weight"], at=1024)
    changes = summed(feed, *pieces)
    feed.slots.slots[0][place] ^= 1
    refused(feed.stage(*pieces, **changes), "bucket 0 (embed.weight, norm.weight)", "word sum", "corrupt")
    feed.receiver.join(SECONDS)
    assert feed.receiver.staging is None


def test_a_bucket_has_one_kind_of_checksum() -> None:
    def refuse(change: Callable[[Feed, Rows, Elements], dict[str, Any]], *words: str) -> None:
        feed = Feed(base=PUSH_ID)
        assert feed.next() == BEGUN
        elements = feed.elements("embed.weight", [3], torch.ones(1, dtype=torch.bfloat16))
        rows = feed.rows("embed.weight", random_tensors()["embed.weight"])
        refused(feed.stage(rows, **change(feed, rows, elements)), "embed.weight", *words)
        feed.close()

    refuse(
        lambda feed, rows, _: summed(feed, rows) | dict(word_sum=None),
        "a checksum of the piece or of its bucket",
        "none",
    )
    refuse(lambda feed, rows, _: summed(feed, rows) | dict(pieces=(rows,)), "only the word sum of its bucket")
    refuse(
        lambda feed, _, elements: summed(feed, elements) | dict(num_bytes=elements.num_bytes),
        "rows in a bucket with a word sum",
        "elements",
    )


def test_a_bucket_on_a_gpu_needs_a_word_sum() -> None:
    weights = FakeWeights(SHAPES)
    assembly = assembly_module.Assembly(weights, weights.new_staging(False), False, False, False)
    with pytest.raises(PushError, match="bucket 3: is on meta, where a bucket must have a word sum"):
        assembly.inspect_all(Bucket(index=3, num_bytes=0, pieces=()), torch.empty(8, dtype=torch.uint8, device="meta"))


def test_values_that_are_not_finite_are_found_in_a_bucket_with_a_word_sum() -> None:
    feed = Feed()
    assert feed.next() == BEGUN
    sent = random_tensors()
    sent["norm.weight"][11] = float("nan")
    pieces = feed.rows("embed.weight", sent["embed.weight"]), feed.rows("norm.weight", sent["norm.weight"], at=1024)
    refused(feed.stage(*pieces, **summed(feed, *pieces)), "norm.weight", "finite")
    feed.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(name="unknown.weight"), ["unknown.weight: unknown"]),
        (dict(name="module.embed.weight"), ["module.embed.weight", "wrapper", "'module.'"]),
        (dict(name="head.weight"), ["head.weight", "tied to embed.weight"]),
        (dict(name="old.bias"), ["old.bias", "leave it out"]),
        (dict(shape=(1, 384)), ["embed.weight", "expected shape [384, 1], found [1, 384]"]),
        (dict(shape=(384, 2)), ["embed.weight", "expected shape"]),
        (dict(length=385), ["embed.weight", "384 rows", "[0, 385)"]),
        (dict(start=2**62, length=2**62), ["embed.weight", "384 rows"]),
        (dict(length=0, num_bytes=0), ["embed.weight", "384 rows"]),
        (dict(start=64, length=320, num_bytes=640), ["embed.weight", "a multiple of 128"]),
        (dict(num_bytes=766), ["embed.weight", "768 bytes", "766"]),
        (dict(offset=2), ["embed.weight", "a multiple of 64"]),
        (dict(offset=64), ["embed.weight", "within the bucket's 768 bytes"]),
        (dict(offset=2**62), ["embed.weight", "within the bucket's 768 bytes"]),
    ],
)
def test_a_wrong_piece_is_refused(feed: Feed, change: dict[str, Any], words: list[str]) -> None:
    piece = feed.rows("embed.weight", random_tensors()["embed.weight"])
    refused(feed.stage(piece.model_copy(update=change), num_bytes=768), *words)


def test_rows_out_of_order_are_refused(feed: Feed) -> None:
    piece = feed.rows("embed.weight", random_tensors()["embed.weight"], 128)
    refused(feed.stage(piece), "embed.weight", "rows from 0 on", "rows from 128 on")


@pytest.mark.parametrize("num_bytes", [0, 767, 769, 4097, 2**62])
def test_a_bucket_of_another_size_than_its_pieces_is_refused(feed: Feed, num_bytes: int) -> None:
    piece = feed.rows("embed.weight", random_tensors()["embed.weight"])
    refused(feed.stage(piece, num_bytes=num_bytes), "bytes")


def test_a_bucket_must_fit_its_slot() -> None:
    slots = SharedSlots(4096)
    small = SharedSource(name=slots.source(0).name, slot_bytes=512, num_slots=16)
    feed = Feed(source=small)
    assert feed.next() == BEGUN
    refused(feed.stage(feed.rows("embed.weight", random_tensors()["embed.weight"])), "but a slot has only 512")
    feed.close()
    slots.close()


def test_a_slot_becomes_a_tensor_only_when_it_is_read() -> None:
    """A tensor for each of millions of slots would take gigabytes."""
    slots = SharedSlots(64 * 2**15)  # two slots of whole pages
    slots.slots[1][:64] = 7
    source = slots.source(0).model_copy(update=dict(slot_bytes=64, num_slots=2**16))
    gc.collect()
    before = num_tensors()
    reader = SharedReader(source)
    assert num_tensors() == before + 1
    for index, value in [(2**15, 7), (2**15 + 1, 0), (3 * 2**15, 7)]:
        data = reader.read(Bucket(index=index, num_bytes=64, pieces=()))
        assert data.tolist() == [value] * 64
    reader.close()
    slots.close()


def num_tensors() -> int:
    return sum(type(each) is torch.Tensor for each in gc.get_objects())


@pytest.mark.parametrize("change", [{"num_slots": 2**16 + 1}, {"slot_bytes": 2**40}, {"slot_bytes": 65}])
def test_shared_memory_has_slots_within_bounds(change: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"name": f"trueroll-{'0' * 32}", "slot_bytes": 64, "num_slots": 2**16}
    SharedSource(**fields)
    with pytest.raises(ValidationError, match=[*change][0]):
        SharedSource(**fields | change)


def test_a_tensor_that_comes_twice_is_refused(feed: Feed) -> None:
    norm = random_tensors()["norm.weight"]
    assert feed.stage(feed.rows("norm.weight", norm)) == STAGED
    refused(feed.stage(feed.rows("norm.weight", norm)), "norm.weight", "twice")


def test_a_tensor_that_is_missing_is_refused(feed: Feed) -> None:
    assert feed.stage(feed.rows("norm.weight", random_tensors()["norm.weight"])) == STAGED
    refused(feed.verify(), "missing: embed.weight, layer.weight")


def test_a_tensor_that_is_incomplete_is_refused(feed: Feed) -> None:
    sent = random_tensors()
    feed.stage(feed.rows("norm.weight", sent["norm.weight"]))
    feed.stage(feed.rows("layer.weight", sent["layer.weight"]))
    assert feed.stage(feed.rows("embed.weight", sent["embed.weight"], 0, 128)) == STAGED
    refused(feed.verify(), "embed.weight (128 of 384 rows)")


def test_a_wrong_number_of_buckets_is_refused(feed: Feed) -> None:
    sent = random_tensors()
    for name in SHAPES:
        feed.stage(feed.rows(name, sent[name]))
    refused(feed.verify(num_buckets=4), "4 buckets were sent", "3 arrived")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("has_word_sum", [False, True])
def test_nonfinite_values_are_refused_unless_allowed(value: float, has_word_sum: bool) -> None:
    norm = random_tensors()["norm.weight"]
    norm[11] = value
    events = []
    for feed in (Feed(), Feed(reject_nonfinite=False)):
        assert feed.next() == BEGUN
        pieces = [feed.rows("norm.weight", norm)]
        events.append(feed.stage(*pieces, **(summed(feed, *pieces) if has_word_sum else {})))
        feed.close()
    refused(events[0], "norm.weight", "finite", "reject_nonfinite=False")
    assert events[1] == STAGED


def test_changed_elements_are_staged(sparse_feed: Feed) -> None:
    values = torch.tensor([1.0, -0.0, float("nan")], dtype=torch.bfloat16)
    assert sparse_feed.stage(sparse_feed.elements("embed.weight", [0, 5, 383], values)) == STAGED
    assert sparse_feed.stage(sparse_feed.elements("norm.weight", [], values[:0])) == STAGED
    layer = random_tensors()["layer.weight"]
    assert sparse_feed.stage(sparse_feed.rows("layer.weight", layer)) == STAGED
    assert sparse_feed.verify() == VERIFIED
    staging = sparse_feed.receiver.staging
    assert isinstance(staging, FakeStaging)
    sparse_feed.slots.slots[0].fill_(7)
    [(name, indices, put), (unchanged, none, _)] = staging.elements
    assert (
        (unchanged, len(none)) == ("norm.weight", 0)
        and name == "embed.weight"
        and indices.dtype == torch.int64
        and indices.tolist() == [0, 5, 383]
    )
    assert torch.equal(put.view(torch.int16), values.view(torch.int16))
    assert staging.staged == {"layer.weight"}


@pytest.mark.parametrize("indices", [[5, 5], [5, 4], [-1, 4], [4, 384], [-(2**31), 2**31 - 1]])
def test_indices_must_ascend_within_the_tensor(sparse_feed: Feed, indices: list[int]) -> None:
    values = torch.ones(2, dtype=torch.bfloat16)
    piece = sparse_feed.elements("embed.weight", indices, values)
    refused(sparse_feed.stage(piece), "embed.weight", "ascending indices in [0, 384)")


def test_indices_ascend_over_pieces(sparse_feed: Feed) -> None:
    values = torch.ones(2, dtype=torch.bfloat16)
    assert sparse_feed.stage(sparse_feed.elements("embed.weight", [3, 9], values, total=4)) == STAGED
    refused(sparse_feed.stage(sparse_feed.elements("embed.weight", [9, 10], values, total=4)), "in [10, 384)")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (dict(count=3), "at most 2"),
        (dict(count=0, num_bytes=0), "at least one element"),
        (dict(num_bytes=10), "12 bytes"),
    ],
)
def test_wrong_elements_are_refused(sparse_feed: Feed, change: dict[str, Any], word: str) -> None:
    piece = sparse_feed.elements("embed.weight", [3, 9], torch.ones(2, dtype=torch.bfloat16))
    refused(sparse_feed.stage(piece.model_copy(update=change)), "embed.weight", word)


def test_elements_that_are_too_few_too_many_or_mixed_are_refused() -> None:
    values = torch.ones(2, dtype=torch.bfloat16)
    for second, words in [
        (("total", 5), ["total of 4", "found 5"]),
        (("rows", None), ["more elements", "rows"]),
        (("verify", None), ["missing"]),
    ]:
        feed = Feed(base=PUSH_ID)
        assert feed.next() == BEGUN
        assert feed.stage(feed.elements("embed.weight", [3, 9], values, total=4)) == STAGED
        if second[0] == "total":
            refused(feed.stage(feed.elements("embed.weight", [10, 11], values, total=5)), "embed.weight", *words)
        elif second[0] == "rows":
            refused(feed.stage(feed.rows("embed.weight", random_tensors()["embed.weight"])), "embed.weight", *words)
        else:
            refused(feed.verify(), *words)
        feed.close()


def test_elements_need_a_base(feed: Feed) -> None:
    piece = feed.elements("embed.weight", [3], torch.ones(1, dtype=torch.bfloat16))
    refused(feed.stage(piece), "embed.weight", "no base")


def test_a_push_breaks_off_if_no_call_comes() -> None:
    feed = Feed(timeout=0.2)
    assert feed.next() == BEGUN
    event = feed.next()
    assert isinstance(event, Broken) and isinstance(event.error, DeadlineError)
    assert "0.2 s" in str(event.error)
    feed.receiver.join(SECONDS)
    assert not feed.receiver.is_alive()
    assert feed.receiver.staging is None


def test_a_worker_waits_longer_for_a_group_than_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer can then name the silent worker before another worker reports that the group did not form."""
    limits: list[float] = []

    def no_reader(source: object, push_id: str, timeout: float, join_timeout: float, *_: object) -> None:
        limits.extend((timeout, join_timeout))
        raise PushError("none")

    monkeypatch.setattr(receiver_module, "GlooReader", no_reader)
    feed = Feed(timeout=2.0, source=CollectiveSource(host="127.0.0.1", port=1, rank=1, world_size=2))
    assert isinstance(feed.next(), Broken)
    assert limits[0] == 2.0 and limits[1] >= 3.0
    feed.receiver.join(SECONDS)


def test_a_closed_receiver_frees_everything(feed: Feed) -> None:
    assert feed.stage(feed.rows("norm.weight", random_tensors()["norm.weight"])) == STAGED
    name = feed.slots.source(0).name
    assert mappings_of(name) == 2
    feed.receiver.close()
    feed.receiver.join(SECONDS)
    gc.collect()
    assert not feed.receiver.is_alive() and feed.receiver.staging is None
    assert feed.events.empty()
    assert mappings_of(name) == 1


def mappings_of(name: str) -> int:
    return Path("/proc/self/maps").read_text().count(name)


def test_too_little_memory_for_the_staging_is_an_error() -> None:
    class Full(FakeWeights):
        def new_staging(self, in_place: bool) -> FakeStaging:
            raise MemoryError

    feed = Feed(Full(SHAPES))
    refused(feed.next(), "in_place")
    feed.close()


def test_a_missing_source_is_refused(tmp_path: Path) -> None:
    missing = SharedSource(name=f"trueroll-{'0' * 32}", slot_bytes=4096, num_slots=2)
    nobody = CollectiveSource(host="127.0.0.1", port=1, rank=1, world_size=2)
    elsewhere = CudaIpcSource(gpu=gpu(0), handle=bytes(64), slot_bytes=4096, num_slots=2)
    for source, word in [
        (missing, "shared"),
        (nobody, "collective"),
        (nobody.model_copy(update=dict(backend="nccl")), "collective"),
        (elsewhere, f"the trainer is on GPU {gpu(0)}"),
        (DiskSource(folder=str(tmp_path / "none")), "none"),
        (DiskSource(folder="\0"), "disk"),
    ]:
        feed = Feed(source=source, timeout=1.0)
        refused(feed.next(), word)
        feed.close()


def test_memory_of_another_size_is_refused() -> None:
    slots = SharedSlots(4096)
    wrong = slots.source(0).model_copy(update=dict(slot_bytes=2**40))
    feed = Feed(source=wrong)
    refused(feed.next(), "shared")
    feed.close()
    slots.close()


def test_shared_memory_is_private_and_leaves_no_name() -> None:
    slots = SharedSlots(4096)
    path = Path("/dev/shm") / slots.source(0).name
    assert path.stat().st_mode & 0o777 == 0o600 and path.stat().st_uid == os.geteuid()
    slots.opened()
    assert not path.exists()
    slots.close()


def test_the_next_push_removes_only_the_memory_of_a_killed_trainer() -> None:
    code = (
        "import time; from trueroll.weight_sync.transports.shared import SharedSlots\n"
        "slots = SharedSlots(4096); print(slots.source(0).name, flush=True); time.sleep(3600)"
    )
    alive = SharedSlots(4096)
    with subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        left = Path("/dev/shm") / trainer.stdout.readline().strip()
        SharedSlots(4096).close()
        assert left.exists(), "its trainer still runs"
        trainer.kill()
    SharedSlots(4096).close()
    assert not left.exists() and (Path("/dev/shm") / alive.source(0).name).exists()
    alive.close()


def test_a_receiver_closed_while_a_piece_is_copied_writes_nothing_more() -> None:
    """`close` returns only when no piece is being written. Queued pieces are never written."""
    entered, go_on = threading.Event(), threading.Event()

    class Slow(FakeStaging):
        def rows(self, name: str, start: int, length: int) -> torch.Tensor:
            entered.set()
            go_on.wait(SECONDS)
            return super().rows(name, start, length)

    class SlowWeights(FakeWeights):
        def new_staging(self, in_place: bool) -> FakeStaging:
            return Slow(self.live, in_place)

    feed = Feed(SlowWeights(SHAPES), in_place=True)
    assert feed.begin_in_place() == BEGUN
    sent = random_tensors()
    pieces = feed.rows("norm.weight", sent["norm.weight"]), feed.rows("embed.weight", sent["embed.weight"], at=1024)
    end = pieces[1].offset + pieces[1].num_bytes
    bucket = Bucket(index=0, num_bytes=end, pieces=pieces)
    feed.receiver.take(protocol.StageBucket(id="s", push_id=PUSH_ID, bucket=bucket))
    assert entered.wait(SECONDS)
    closer = threading.Thread(target=feed.receiver.close)
    closer.start()
    while not feed.receiver._writing.is_closed:
        time.sleep(0.001)
    closer.join(0.1)
    assert closer.is_alive()
    go_on.set()
    closer.join(SECONDS)
    feed.receiver.join(SECONDS)
    assert feed.weights.live["norm.weight"].any() and not feed.weights.live["embed.weight"].any()
    assert feed.events.empty()
    feed.slots.close()


def test_closing_does_not_wait_for_the_check_of_a_piece(feed: Feed, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, go_on = threading.Event(), threading.Event()

    class SlowPass(BytePass):
        def update(self, data: torch.Tensor) -> None:
            entered.set()
            go_on.wait(SECONDS)
            super().update(data)

    monkeypatch.setattr(assembly_module, "BytePass", SlowPass)
    piece = feed.rows("norm.weight", random_tensors()["norm.weight"])
    bucket = Bucket(index=0, num_bytes=piece.num_bytes, pieces=(piece,))
    feed.receiver.take(protocol.StageBucket(id="s", push_id=PUSH_ID, bucket=bucket))
    assert entered.wait(SECONDS)
    staging = feed.receiver.staging
    assert isinstance(staging, FakeStaging)
    feed.receiver.close()
    go_on.set()
    feed.receiver.join(SECONDS)
    assert not staging.staged and feed.events.empty()
