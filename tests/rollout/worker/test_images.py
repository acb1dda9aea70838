"""The worker's store of images, and requests with images through a worker."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_engine import PLACEHOLDER, FakeEngine, FakeTower
from serving import RawClient, WorkerOnThread, serving

from trueroll.engine.media import ImageInput, ImageLimits
from trueroll.errors import InvalidRequestError
from trueroll.rollout.config import WorkerConfig
from trueroll.rollout.protocol import ImageRef, NeedImage, PutImage, part_of, ref_of
from trueroll.rollout.worker.images import SLOWEST, ImageStore, Supplier

TOWER = FakeTower()
SIZE = 3 * (1024 + 8 * 4)
"""The bytes of an image of 2 x 4 patches."""
SECONDS = 10.0


def image(seed: int, start: int = 0, rows: int = 2, columns: int = 4) -> ImageInput:
    source = np.random.default_rng(seed)
    levels = source.integers(0, 256, (rows * columns, 12), np.uint8)
    return ImageInput(start, rows, columns, levels, source.random((3, 256), np.float32))


class Store:
    """A store with questions and time that the test controls. `asked`: the unanswered questions, oldest first."""

    def __init__(self, most_bytes: int = 10 * SIZE, most_part: int = 2**20) -> None:
        self.now = 100.0
        self.asked: list[tuple[bytes, NeedImage]] = []
        self.store = ImageStore(most_bytes, SECONDS, most_part, lambda *each: self.asked.append(each), lambda: self.now)
        self.store.set_limits(ImageLimits(TOWER, 8, 64))

    def want(self, key: str, images: list[ImageInput], *clients: bytes) -> None:
        self.store.add(key, f"id of {key}", None, tuple(map(ref_of, images)))
        for client in clients:
            self.store.offer(key, Supplier(client, "caller"))

    def answer(self, *images: ImageInput, lie: bool = False) -> bytes:
        """Answer the oldest question, and return the connection that was asked."""
        identity, question = self.asked.pop(0)
        [found] = [each for each in images if each.content_hash == question.content_hash]
        data = part_of(found, question.start, question.num_bytes)
        data = bytes(len(data)) if lie else data
        self.store.put(identity, self.part(question, data))
        return identity

    def part(self, question: NeedImage, data: bytes) -> PutImage:
        return PutImage(id=question.id, content_hash=question.content_hash, start=question.start, data=data)

    def take_ready(self) -> list[str]:
        return self.store.take_ready()

    def take_failed(self) -> dict[str, str]:
        failed = {key: str(error) for key, error in self.store.take_failed().items()}
        for key in failed:
            self.store.end(key)
        return failed

    def end(self, *keys: str) -> None:
        for key in keys:
            self.store.end(key)

    def check_is_empty(self) -> None:
        """Nothing may stay behind after all requests have ended and all connections are lost."""
        store = self.store
        assert not store._requests and not store._questions and not store._roomless and not store._orphans
        assert not store._ready and not store._failed and not store._queues
        assert store._contents.keys() == store._unheld.keys()
        kept = sum(content.num_bytes for content in store._contents.values())
        assert store.num_bytes == store._num_unheld_bytes == kept


@pytest.fixture
def make_store(request: pytest.FixtureRequest) -> Callable[..., Store]:
    made = list[Store]()

    def make(**settings: Any) -> Store:
        made.append(Store(**settings))
        return made[-1]

    def check() -> None:
        for store in made:
            for key in list(store.store._requests):
                store.end(key)
            for identity in (b"A", b"B", b"C"):
                store.store.lose(identity)
            store.check_is_empty()

    request.addfinalizer(check)
    return make


def test_an_image_arrives_in_parts_with_its_bits(make_store: Callable[..., Store]) -> None:
    store, given = make_store(most_part=1000), image(1, start=5)
    store.want("a", [given], b"A")
    num_parts = 0
    while store.asked:
        assert store.answer(given) == b"A" and len(store.asked) <= 1
        num_parts += 1
    assert num_parts == -(-SIZE // 1000) and store.take_ready() == ["a"]
    [found] = store.store.images_of("a")
    assert np.array_equal(found.levels, given.levels) and found.levels.dtype == np.uint8
    assert np.array_equal(found.table.view(np.uint32), given.table.view(np.uint32))
    assert (found.start, found.rows, found.columns, found.frames) == (5, 2, 4, 1)
    assert found.content_hash == given.content_hash


def test_an_image_is_asked_for_once_for_all_requests_and_again_after_it_was_evicted(
    make_store: Callable[..., Store],
) -> None:
    store, first, second = make_store(most_bytes=SIZE), image(1), image(2)
    store.want("a", [first, first], b"A")
    store.want("b", [first], b"B")
    assert store.answer(first) == b"A" and store.take_ready() == ["a", "b"] and not store.asked
    store.end("a", "b")
    store.want("c", [first], b"B")
    assert store.take_ready() == ["c"] and not store.asked
    store.want("d", [second], b"A")
    assert not store.asked and store.store.num_bytes == SIZE  # c still needs the room
    store.end("c")
    assert store.answer(second) == b"A" and store.take_ready() == ["d"]
    store.end("d")
    store.want("e", [first], b"A")
    assert store.answer(first) == b"A" and store.take_ready() == ["e"]


def test_each_connection_is_asked_for_one_part_at_a_time(make_store: Callable[..., Store]) -> None:
    store, images = make_store(), [image(i) for i in range(6)]
    store.want("a", images[:3], b"A")
    store.want("b", images[3:], b"B")
    for _ in range(6):
        assert len({identity for identity, _ in store.asked}) == len(store.asked)
        store.answer(*images)
    assert sorted(store.take_ready()) == ["a", "b"]


def test_requests_get_room_in_order_and_for_all_their_images_at_once(make_store: Callable[..., Store]) -> None:
    store, images = make_store(most_bytes=3 * SIZE), [image(i) for i in range(5)]
    store.want("a", images[:2], b"A")
    store.want("b", images[2:4], b"A")
    store.want("c", [images[4]], b"A")  # fits beside a, but would delay b
    while store.asked:
        store.answer(*images)
    assert store.take_ready() == ["a"] and store.store.num_bytes == 2 * SIZE
    store.end("a")
    while store.asked:
        store.answer(*images)
    assert store.take_ready() == ["b", "c"] and store.store.num_bytes == 3 * SIZE


def test_a_request_that_can_never_be_served_is_refused(make_store: Callable[..., Store]) -> None:
    store, tokens = make_store(most_bytes=SIZE), np.full(4, PLACEHOLDER)
    with pytest.raises(InvalidRequestError, match=f"at most max_image_bytes = {SIZE} bytes"):
        store.store.check((ref_of(image(1)), ref_of(image(2, start=2))), tokens)
    with pytest.raises(InvalidRequestError, match=r"images\[0\]: the tokens \[3, 5\)"):
        store.store.check((ref_of(image(1, start=3)),), tokens)
    twice = image(1)
    store.store.check((ref_of(twice), ref_of(image(1, start=2))), tokens)  # one content
    store.store.set_limits(ImageLimits(None, 0, 64))
    with pytest.raises(InvalidRequestError, match=r"at most 0 images \(got 1\)"):
        store.store.check((ref_of(twice),), tokens)


def test_wrong_content_fails_only_the_requests_that_nobody_else_can_supply(make_store: Callable[..., Store]) -> None:
    store, given = make_store(), image(1)
    store.want("liar's", [given], b"A")
    store.want("both's", [given], b"A", b"B")
    store.want("honest", [given], b"B")
    assert store.answer(given, lie=True) == b"A"
    assert list(store.take_failed()) == ["liar's"]
    assert store.answer(given) == b"B" and not store.asked
    assert sorted(store.take_ready()) == ["both's", "honest"]


def test_wrong_content_without_another_client_fails_the_request(make_store: Callable[..., Store]) -> None:
    store, given = make_store(), image(1)
    store.want("a", [image(2), given], b"A")
    store.want("b", [image(3)], b"B")
    store.answer(image(2))
    store.answer(image(3))
    assert store.take_ready() == ["b"]
    store.answer(given, lie=True)
    assert store.take_failed() == {
        "a": "images[1]: the pixels have another hash; send the image that content_hash names"
    }
    assert not store.asked and store.take_ready() == []
    store.want("c", [given], b"C")
    assert store.answer(given) == b"C" and store.take_ready() == ["c"]


def test_a_wrong_size_with_a_right_hash_does_not_harm_the_image(make_store: Callable[..., Store]) -> None:
    store, given = make_store(), image(1)
    ref = ImageRef(start=0, rows=4, columns=2, content_hash=given.content_hash)
    store.store.add("liar's", "liar's", None, (ref,))
    store.store.offer("liar's", Supplier(b"A", None))
    store.want("honest", [given], b"B")
    assert store.answer(given) == b"A" and store.answer(given) == b"B"
    assert store.take_ready() == ["honest"] and list(store.take_failed()) == ["liar's"]


def test_parts_that_were_not_asked_for_are_ignored(make_store: Callable[..., Store]) -> None:
    store, given = make_store(most_part=1000), image(1)
    store.want("a", [given], b"A")
    [(_, question)] = store.asked
    right = part_of(given, 0, 1000)
    store.store.put(b"B", store.part(question, right))
    store.store.put(b"A", store.part(question, right[:-1]))
    store.store.put(b"A", store.part(question, right + b"x"))
    store.store.put(b"A", PutImage(id="a", content_hash=question.content_hash, start=1, data=right))
    store.store.put(b"A", PutImage(id="a", content_hash=bytes(32), start=0, data=right))
    assert len(store.asked) == 1
    while store.asked:
        store.answer(given)
    assert store.take_ready() == ["a"]


def test_a_silent_client_fails_its_own_requests_only(make_store: Callable[..., Store]) -> None:
    store, images = make_store(), [image(i) for i in range(3)]
    store.want("silent", images[:2], b"A")
    store.want("shared", [images[0]], b"A", b"B")
    assert store.store.deadline == store.now + SECONDS
    store.now += SECONDS
    store.store.follow()
    failed = store.take_failed()
    assert list(failed) == ["silent"] and "0 of 3168 bytes" in failed["silent"] and "image_seconds" in failed["silent"]
    store.asked = [each for each in store.asked if each[0] == b"B"]
    assert store.answer(images[0]) == b"B" and store.take_ready() == ["shared"]
    assert store.store.deadline == float("inf")


def test_a_slow_client_cannot_hold_the_room(make_store: Callable[..., Store]) -> None:
    store, given = make_store(most_part=1), image(1)
    store.want("a", [given], b"A")
    begun = store.now
    while not (failed := store.take_failed()):
        store.now += SECONDS - 1  # never silent for too long
        store.store.follow()
        if store.store._questions:
            store.answer(given)
    assert "images: the client has sent" in failed["a"] and store.now < begun + 2 * SECONDS + SIZE / SLOWEST


def test_a_client_that_reconnects_sends_the_image_anew(make_store: Callable[..., Store]) -> None:
    store, given = make_store(most_part=1000), image(1)
    store.want("a", [given], b"A")
    store.answer(given)
    store.store.lose(b"A")
    store.asked.clear()
    store.now += SECONDS - 1
    store.store.follow()
    assert not store.take_failed()
    store.store.offer("a", Supplier(b"B", "caller"))
    assert store.asked[0][1].start == 0
    store.now += SECONDS - 1
    while store.asked:
        assert store.answer(given) == b"B"
    assert store.take_ready() == ["a"]


def test_a_request_without_clients_fails_after_a_while(make_store: Callable[..., Store]) -> None:
    store = make_store()
    store.want("a", [image(1)], b"A")
    store.store.lose(b"A")
    store.now += SECONDS
    assert store.store.deadline <= store.now
    store.store.follow()
    assert list(store.take_failed()) == ["a"] and store.store.num_bytes == 0


def test_a_caller_that_gives_up_does_not_disturb_another_one(make_store: Callable[..., Store]) -> None:
    store, given = make_store(most_part=1000), image(1)
    store.want("a", [given], b"A")
    store.answer(given)
    store.store.offer("a", Supplier(b"B", "second"))
    store.store.withdraw("a", "second")
    while store.asked:
        assert store.answer(given) == b"A"
    assert store.take_ready() == ["a"]


def test_another_caller_goes_on_after_the_asked_caller_gives_up(make_store: Callable[..., Store]) -> None:
    store, given = make_store(most_part=1000), image(1)
    store.store.add("a", "id", None, (ref_of(given),))
    store.store.offer("a", Supplier(b"A", "first"))
    store.store.offer("a", Supplier(b"A", "second"))
    store.answer(given)
    store.store.withdraw("a", "first")
    store.asked.pop(0)
    assert store.asked[0][1].caller == "second"
    while store.asked:
        store.answer(given)
    assert store.take_ready() == ["a"]


def test_the_end_of_a_request_leaves_shared_images_to_the_others(make_store: Callable[..., Store]) -> None:
    store, given = make_store(), image(1)
    store.want("a", [given], b"A")
    store.want("b", [given], b"B")
    store.end("a")
    store.asked.pop(0)
    assert store.answer(given) == b"B" and store.take_ready() == ["b"]
    store.end("b")
    assert store.store.num_bytes == SIZE  # kept for later requests


def test_a_request_that_ends_without_its_images_frees_their_room(make_store: Callable[..., Store]) -> None:
    store = make_store(most_bytes=SIZE)
    store.want("a", [image(1)], b"A")
    store.want("b", [image(2)], b"A")
    store.end("a")
    assert store.store.num_bytes == SIZE and store.asked[-1][1].content_hash == image(2).content_hash


@pytest.mark.parametrize("seed", range(8))  # the images of a request have no fixed order
def test_a_request_that_ends_during_an_upload_is_asked_for_nothing(make_store: Callable[..., Store], seed: int) -> None:
    store, shared, own = make_store(most_part=1000), image(seed), image(100 + seed)
    store.want("a", [shared, own] if seed % 2 else [own, shared], b"A")
    store.want("b", [shared], b"A", b"B")
    store.answer(shared, own)
    store.end("a")
    ids = {question.id for _, question in store.asked[-2:]}
    while store.asked:
        store.answer(shared, own)
    assert "id of b" in ids and store.take_ready() == ["b"]


def test_a_request_does_not_wait_for_a_client_that_lied(make_store: Callable[..., Store]) -> None:
    store, given = make_store(), image(1)
    store.want("a", [given], b"A", b"B")
    assert store.answer(given, lie=True) == b"A" and store.asked[0][0] == b"B"
    store.store.lose(b"B")
    store.asked.clear()
    store.now += SECONDS
    store.store.follow()
    assert list(store.take_failed()) == ["a"] and store.store.num_bytes == 0


def test_a_client_that_lied_may_try_again(make_store: Callable[..., Store]) -> None:
    store, given = make_store(), image(1)
    store.want("liar's", [given], b"A")
    store.want("b", [given], b"B")
    store.answer(given, lie=True)
    assert list(store.take_failed()) == ["liar's"]
    store.store.lose(b"B")
    store.asked.clear()
    store.want("again", [given], b"A")
    assert store.answer(given) == b"A" and sorted(store.take_ready()) == ["again", "b"]


def test_users_do_not_share_pixels(make_store: Callable[..., Store]) -> None:
    store, given = make_store(), image(1)
    for user, client in (("alice", b"A"), ("bob", b"B")):
        store.store.add(user, user, user, (ref_of(given),))
        store.store.offer(user, Supplier(client, None))
    assert [identity for identity, _ in store.asked] == [b"A", b"B"]
    store.answer(given)
    assert store.take_ready() == ["alice"]
    store.answer(given)
    assert store.take_ready() == ["bob"]


# Through a worker.


def submit(raw: RawClient, id: str, images: list[ImageInput], caller: str | None = None, **params: Any) -> None:
    prompt = [1] * 20
    for each in images:
        prompt[each.start : each.start + 2] = [PLACEHOLDER] * 2
    tokens = np.array(prompt, "<i4").tobytes()
    refs = [ref_of(each).model_dump() for each in images]
    raw.send("generate", id=id, prompt_token_ids=tokens, params={"max_tokens": 4, **params}, images=refs, caller=caller)


def supply(raw: RawClient, images: list[ImageInput]) -> tuple[int, dict[str, Any]]:
    """Answer questions until a terminal reply. Return the number of bytes sent, and the reply."""
    by_hash, sent = {each.content_hash: each for each in images}, 0
    while True:
        reply = raw.receive()
        if reply["type"] == "need_image":
            data = part_of(by_hash[reply["content_hash"]], reply["start"], reply["num_bytes"])
            raw.send("put_image", id=reply["id"], content_hash=reply["content_hash"], start=reply["start"], data=data)
            sent += len(data)
        elif reply["type"] in ("done", "error"):
            return sent, reply


def test_a_request_with_images_reaches_the_engine_with_its_pixels(raw: RawClient, engine: FakeEngine) -> None:
    given = [image(1, start=3), image(2, start=7)]
    submit(raw, "a", given)
    sent, reply = supply(raw, given)
    assert reply["type"] == "done" and sent == 2 * SIZE
    [request] = engine.requests
    for found, expected in zip(request.images, given, strict=True):
        assert np.array_equal(found.levels, expected.levels) and np.array_equal(found.table, expected.table)
        assert (found.start, found.content_hash) == (expected.start, expected.content_hash)
    submit(raw, "b", given)
    assert supply(raw, given)[0] == 0  # a repeated image costs only its hash
    assert raw.health()["memory"]["images"] == 2 * SIZE


def test_images_enter_the_seed_and_the_identity_of_a_request(raw: RawClient, engine: FakeEngine) -> None:
    first, second = image(1, start=3), image(2, start=3)
    for id, given in (("a", first), ("a2", first), ("b", second)):
        submit(raw, id, [given])
        assert supply(raw, [given])[1]["type"] == "done"
    submit(raw, "a", [second])
    assert raw.receive()["code"] == "id_conflict"
    raw.send("ack", ids=["a", "b"])
    seeds = {}
    for given in (first, second):
        submit(raw, "same", [given])
        seeds[given.content_hash] = supply(raw, [given])[1]["params"]["seed"]
        raw.send("ack", ids=["same"])
    assert len(set(seeds.values())) == 2


def test_requests_without_images_overtake_requests_that_wait_for_pixels(raw: RawClient, engine: FakeEngine) -> None:
    submit(raw, "a", [image(1)])
    assert raw.receive()["type"] == "need_image"
    raw.generate("b")
    assert [reply["id"] for reply in raw.receive_until("done")] == ["b", "b"]
    raw.send("abort", id="end", request_id="a")
    replies = raw.receive_until("aborted")
    assert replies[-1]["num_samples"] == 1 and raw.health()["requests"]["open"] == 0
    assert [request.id for request in engine.requests] == ["b"]


def test_wrong_pixels_are_answered_with_an_error(raw: RawClient, engine: FakeEngine) -> None:
    submit(raw, "a", [image(1)])
    question = raw.receive()
    data = bytes(question["num_bytes"])
    raw.send("put_image", id="a", content_hash=question["content_hash"], start=0, data=data)
    error = raw.receive()
    assert (error["code"], error["field"]) == ("invalid_request", "images[0]")
    assert not engine.requests and raw.health()["requests"]["open"] == 0


def test_places_are_checked_before_pixels_are_asked_for(raw: RawClient) -> None:
    ref = ref_of(image(1, start=2)).model_dump()
    tokens = np.array([1, 2, 3, 4], "<i4").tobytes()
    raw.send("generate", id="a", prompt_token_ids=tokens, params={}, images=[ref])
    error = raw.receive()
    assert (error["code"], error["field"]) == ("invalid_request", "images[0]") and "placeholder" in error["message"]


def test_a_worker_without_images_says_so(engine: FakeEngine) -> None:
    engine.images = ImageLimits(None, 0, 64)
    with serving(engine) as running, RawClient(running.address) as raw:
        submit(raw, "a", [image(1)])
        error = raw.receive()
    assert error["code"] == "invalid_request" and "at most 0 images" in error["message"]


def test_an_abort_during_an_upload_does_not_disturb_other_requests(raw: RawClient, engine: FakeEngine) -> None:
    for round in range(8):
        shared, own = image(round, start=3), image(100 + round, start=7)
        submit(raw, f"a{round}", [shared, own])
        submit(raw, f"b{round}", [shared])
        assert raw.receive()["type"] == "need_image"
        raw.send("abort", id=f"end{round}", request_id=f"a{round}")
        replies = supply(raw, [shared, own])[1], supply(raw, [shared, own])[1]
        assert [reply["id"] for reply in replies] == [f"a{round}", f"b{round}"]
    assert raw.health()["state"] == "ready"


def test_a_request_that_waits_for_weights_takes_no_room(engine: FakeEngine) -> None:
    early, served = image(1, start=3), image(2, start=3)
    with serving(engine, max_image_bytes=SIZE) as running, RawClient(running.address) as raw:
        tokens = np.array([1, 1, 1, PLACEHOLDER, PLACEHOLDER], "<i4").tobytes()
        demand = dict(min_weight_version=10**6, wait_for_weights=True, images=[ref_of(early).model_dump()])
        raw.send("generate", id="early", prompt_token_ids=tokens, params={"max_tokens": 4}, **demand)
        submit(raw, "served", [served])
        assert supply(raw, [early, served])[1]["id"] == "served"
        assert raw.health()["memory"]["images"] == SIZE and raw.health()["requests"]["open"] == 1
        raw.send("abort", id="end", request_id="early")
        raw.receive_until("aborted")


def test_a_request_submitted_while_the_model_loads_is_checked_later(engine: FakeEngine) -> None:
    may_load = threading.Event()

    def load() -> FakeEngine:
        assert may_load.wait(20)
        return engine

    running = WorkerOnThread(WorkerConfig(), load)
    with RawClient(running.address) as raw:
        submit(raw, "bad", [image(1, start=30)])
        submit(raw, "good", [image(1, start=3)])
        while raw.health()["requests"]["open"] < 2:
            pass
        may_load.set()
        first, second = raw.receive(), supply(raw, [image(1)])[1]
        assert (first["id"], first["type"]) == ("bad", "error") and (second["id"], second["type"]) == ("good", "done")
        running.worker.drain()
        running.join()


def test_requests_with_images_are_refused_once_a_model_without_a_tower_has_loaded(engine: FakeEngine) -> None:
    may_load = threading.Event()
    engine.images = ImageLimits(None, 0, 64)

    def load() -> FakeEngine:
        assert may_load.wait(20)
        return engine

    running = WorkerOnThread(WorkerConfig(), load)
    with RawClient(running.address) as raw:
        submit(raw, "a", [image(1, start=3)])
        submit(raw, "b", [image(1, start=3)])
        while raw.health()["requests"]["open"] < 2:
            pass
        may_load.set()
        assert [(reply["id"], reply["type"]) for reply in (raw.receive(), raw.receive())] == [
            ("a", "error"),
            ("b", "error"),
        ]
        running.worker.drain()
        running.join()
    assert running.error is None


def test_a_drain_ends_requests_that_wait_for_pixels(engine: FakeEngine) -> None:
    with serving(engine) as running, RawClient(running.address) as raw:
        submit(raw, "a", [image(1)])
        assert raw.receive()["type"] == "need_image"
        running.worker.drain()
        running.worker.drain()
        replies = raw.receive_until("done", "error")
        assert replies[-1]["finish_reasons"] == {"abort": 1}


def test_a_thousand_prompts_with_four_images_each_stay_within_the_budget(make_store: Callable[..., Store]) -> None:
    budget = 64 * SIZE
    store, images = make_store(most_bytes=budget), [image(i) for i in range(500)]
    for i in range(1000):
        store.want(f"{i}", [images[(7 * i + j) % 500] for j in range(4)], b"ABC"[i % 3 : i % 3 + 1])
    by_hash, finished, most = {each.content_hash: each for each in images}, list[str](), 0
    while len(finished) < 1000:
        while store.asked:
            store.answer(by_hash[store.asked[0][1].content_hash])
            most = max(most, store.store.num_bytes)
        ready = store.take_ready()
        assert ready, "the store is stuck"
        finished += ready
        store.end(*ready)
    assert most <= budget and len(set(finished)) == 1000
