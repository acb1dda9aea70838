"""The preprocessed images of requests: ask clients for images, check the content of the images, and keep the content
within a memory budget.

A request names its images by their hashes. If the store lacks the content of an image, it asks a client for the
content, part by part, and reports when a request has all its images. The store keeps the content until the request
ends, because the engine may need the content again. After the request has ended, the content stays until other images
need the memory. Therefore an image that is used again is usually not sent again.

Owns: the content, the requests that wait for content, and the questions to clients. Does not own: the requests
(`book`), the connections, or encoded images (the engine).

Guarantees:

- The content of all images together takes at most `max_image_bytes`. Memory is reserved in the order in which requests
  arrive, and for all images of a request at once. So two requests never wait for each other's memory.
- A request gets exactly the content that its hashes name. If a client sends wrong content, a request that needs the
  right content fails only if no other client can send the right content. Users do not share content.
- Content is accepted only from the connection that was asked for the content. Each connection is asked for one part at
  a time.
- If a client is silent for `image_seconds`, or slower than `SLOWEST` on average, only its own requests fail. So no
  request waits forever, and no client occupies memory forever.
"""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

import numpy as np

from trueroll.errors import InvalidRequestError, TruerollError

from ...engine.media import ImageInput, ImageLimits, new_content_hash
from ..protocol import MOST_PART_BYTES, ImageRef, NeedImage, PutImage, image_of, num_content_bytes

SLOWEST = 2**16
"""The lowest average rate at which a client may send an image, in bytes per second. In addition to the time that an
image takes at this rate, each image has `image_seconds`.
"""


class _Key(NamedTuple):
    """The key of an image's content. The hash alone is not enough as a key. A client may name a wrong size, and a user
    that knows only the hash of another user's image must not get answers about this image.
    """

    user: str | None
    content_hash: bytes
    rows: int
    columns: int
    frames: int

    @classmethod
    def of(cls, ref: ImageRef, user: str | None) -> _Key:
        return cls(user, ref.content_hash, ref.rows, ref.columns, ref.frames)


class Supplier(NamedTuple):
    """A client that has the images of a request: the identity of its connection, and the caller."""

    identity: bytes
    caller: str | None


@dataclass(eq=False)
class _Content:
    """The content of an image. `holders`: the keys of the requests that need the content. `data`: None until the first
    part arrives. `asked`: the connection that sends the content now.
    """

    key: _Key
    ref: ImageRef
    num_bytes: int
    holders: dict[str, None] = field(default_factory=dict)
    data: bytearray | None = None
    digest: Any = None
    num_received: int = 0
    asked: bytes | None = None

    @property
    def is_complete(self) -> bool:
        return self.num_received == self.num_bytes

    def restart(self) -> None:
        """Drop the parts that have arrived."""
        self.data, self.digest, self.num_received, self.asked = None, None, 0, None

    def put(self, data: bytes) -> None:
        """Append a part."""
        if self.data is None:
            self.data, self.digest = bytearray(self.num_bytes), new_content_hash(self.ref)
        self.data[self.num_received : self.num_received + len(data)] = data
        self.digest.update(data)
        self.num_received += len(data)


@dataclass(eq=False)
class _Wanting:
    """A request and its images.

    `names`: the keys of the images' content, in the order of the prompt and of `refs`. `suppliers`: the clients that
    wait for the request and can send its images. `missing`: the content that has not arrived. `has_room`: memory for
    all images is reserved. `deadline`: the time at which the request fails if no client offers to send its images
    until then; infinite while a client waits for the request, and before memory is reserved.
    """

    id: str
    key: str
    refs: tuple[ImageRef, ...]
    names: tuple[_Key, ...]
    suppliers: dict[Supplier, None] = field(default_factory=dict)
    missing: set[_Key] = field(default_factory=set)
    has_room: bool = False
    deadline: float = inf

    @property
    def is_waiting(self) -> bool:
        return not self.has_room or bool(self.missing)

    def supplier_on(self, identity: bytes) -> Supplier | None:
        """Return the first client of the request on the connection `identity`; None if there is no such client."""
        return next((each for each in self.suppliers if each.identity == identity), None)


class _Question(NamedTuple):
    """A question to a client for one part of an image. `begun`: the time of the first question for this image's
    content.
    """

    content: _Content
    supplier: Supplier
    key: str
    num_bytes: int
    begun: float
    deadline: float


class ImageStore:
    """The images of open requests and, as long as there is memory, the images of ended requests.

    `most_bytes`, `seconds`: `max_image_bytes` and `image_seconds` of the worker. `most_part`: the maximum size of a
    part. `ask`: sends a question to a connection. `clock`: returns the time in seconds. `num_bytes`: the size of all
    content, including content that has not arrived.
    """

    def __init__(
        self,
        most_bytes: int,
        seconds: float,
        most_part: int,
        ask: Callable[[bytes, NeedImage], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_bytes = 0
        self._most_bytes, self._seconds, self._ask, self._now = most_bytes, seconds, ask, clock
        self._most_part = min(most_part, MOST_PART_BYTES)
        self._limits: ImageLimits | None = None
        self._requests: dict[str, _Wanting] = {}
        self._roomless: dict[str, None] = {}
        self._contents: dict[_Key, _Content] = {}
        self._unheld: OrderedDict[_Key, None] = OrderedDict()  # complete and unused, least recently used first
        self._num_unheld_bytes = 0
        self._questions: dict[bytes, _Question] = {}
        self._orphans: dict[str, None] = {}  # requests with a deadline, because no client waits
        # The content that each connection may be asked for, in order. May name content that has arrived since.
        self._queues: defaultdict[bytes, dict[_Key, None]] = defaultdict(dict)
        self._ready: dict[str, None] = {}
        self._failed: dict[str, TruerollError] = {}

    @property
    def deadline(self) -> float:
        """The next time at which `follow` must be called, in monotonic seconds."""
        questions = (question.deadline for question in self._questions.values())
        return min(*questions, *(self._requests[key].deadline for key in self._orphans), inf, inf)

    def take_ready(self) -> list[str]:
        """Return the keys of the requests that have become ready since the previous call. A request is ready when all
        its images have arrived.
        """
        ready, self._ready = self._ready, {}
        return list(ready)

    def take_failed(self) -> dict[str, TruerollError]:
        """Return the errors of the requests that failed since the last call, by key. A request fails if its images
        cannot arrive. The caller must end the failed requests.
        """
        failed, self._failed = self._failed, {}
        return failed

    def images_of(self, key: str) -> tuple[ImageInput, ...]:
        """Return the images of a request that is ready."""
        assert self._limits is not None and self._limits.tower is not None
        images = list[ImageInput]()
        request = self._requests[key]
        for ref, name in zip(request.refs, request.names, strict=True):
            data = self._contents[name].data
            assert data is not None
            images.append(image_of(ref, data, self._limits.tower))
        return tuple(images)

    @property
    def has_limits(self) -> bool:
        """Return whether `set_limits` was called."""
        return self._limits is not None

    def set_limits(self, limits: ImageLimits) -> None:
        """Set the limits once the model has loaded. No request may be added before this call."""
        self._limits = limits

    def check(self, refs: tuple[ImageRef, ...], token_ids: np.ndarray) -> None:
        """Raise InvalidRequestError if a request with these images can never be served. Checks nothing before the model
        has loaded.
        """
        if self._limits is not None:
            self._limits.check(refs, token_ids)
            self._check_size(refs)

    def add(self, key: str, id: str, user: str | None, refs: tuple[ImageRef, ...]) -> None:
        """Add a request that needs images and has passed `check`. `id`: the id that `user` gave to the request. To add
        clients that can supply the images, call `offer`.
        """
        self._requests[key] = _Wanting(id, key, refs, tuple(_Key.of(ref, user) for ref in refs))
        self._roomless[key] = None
        self._give_room()

    def offer(self, key: str, supplier: Supplier) -> None:
        """Add a client that waits for the results of a request, so that the store can ask this client for the request's
        images. No-op if the request lacks no images.
        """
        if (request := self._requests.get(key)) is None or not request.is_waiting:
            return
        self._queues[supplier.identity]  # adds an empty queue, which tells `lose` about the connection
        request.suppliers[supplier] = None
        request.deadline = inf
        self._orphans.pop(key, None)
        if request.has_room:
            self._queue(request, supplier)

    def withdraw(self, key: str, caller: str | None) -> None:
        """Remove a caller that no longer waits for a request."""
        if request := self._requests.get(key):
            for supplier in [each for each in request.suppliers if each.caller == caller]:
                self._remove(request, supplier)

    def lose(self, identity: bytes) -> None:
        """Remove a connection that has ended."""
        if identity not in self._queues:
            return
        self._leave(identity)
        del self._queues[identity]

    def end(self, key: str) -> None:
        """Release the images of a request that has ended. No-op for a request without images."""
        request = self._requests.pop(key, None)
        if request is None:
            return
        for pending in (self._roomless, self._orphans, self._ready, self._failed):
            pending.pop(key, None)
        contents = [self._contents[name] for name in dict.fromkeys(request.names)] if request.has_room else []
        for content in contents:
            del content.holders[key]
        for content in contents:
            if not content.holders:
                self._release(content)
            elif content.asked is not None and self._questions[content.asked].key == key:
                self._stop(content.asked)
                self._ask_anyone(content)
        for identity in {supplier.identity for supplier in request.suppliers}:
            self._ask_next(identity)
        self._give_room()

    def put(self, identity: bytes, message: PutImage) -> None:
        """Handle a part of an image. A part that the connection was not asked for is ignored."""
        question = self._questions.get(identity)
        if question is None:
            return
        content = question.content
        expected = content.ref.content_hash, content.num_received, question.num_bytes
        if (message.content_hash, message.start, len(message.data)) != expected:
            return
        content.put(message.data)
        if not content.is_complete:
            self._ask_for_part(content, question.supplier, question.key, question.begun)
            return
        del self._questions[identity]
        content.asked = None
        if content.digest.digest() == content.ref.content_hash:
            self._finish(content)
        else:
            self._reject(identity, content)
        self._ask_next(identity)

    def follow(self) -> None:
        """Drop clients that are silent or too slow, and fail requests that have had no client for too long."""
        now = self._now()
        for identity, question in list(self._questions.items()):
            if now >= question.deadline and self._questions.get(identity) is question:
                self._leave(identity, self._silence(question))
                self._queues.pop(identity, None)
        for key in [key for key in self._orphans if now >= self._requests[key].deadline]:
            self._fail(key, "no client is connected that can send the image; send the request again")

    # Room.

    def _check_size(self, refs: tuple[ImageRef, ...]) -> None:
        if (total := sum({_Key.of(ref, None): self._size_of(ref) for ref in refs}.values())) > self._most_bytes:
            raise InvalidRequestError(
                f"images: the pixels of a request may have at most max_image_bytes = {self._most_bytes} bytes (got "
                f"{total}); send fewer or smaller images, or raise the worker's max_image_bytes",
                field="images",
                value=total,
                limit=self._most_bytes,
            )

    def _size_of(self, ref: ImageRef) -> int:
        assert self._limits is not None and self._limits.tower is not None
        return num_content_bytes(ref, self._limits.tower)

    def _give_room(self) -> None:
        """Reserve memory for the images of requests, in order, until the images of a request do not fit."""
        while self._roomless:
            request = self._requests[key := next(iter(self._roomless))]
            sizes = {name: self._size_of(ref) for name, ref in zip(request.names, request.refs, strict=True)}
            if not self._make_room(sizes):
                return
            del self._roomless[key]
            self._hold(request, sizes)
            if not request.missing:
                self._complete(request)
            elif not request.suppliers:
                request.deadline, self._orphans[key] = self._now() + self._seconds, None
            for supplier in list(request.suppliers):
                self._queue(request, supplier)

    def _make_room(self, sizes: dict[_Key, int]) -> bool:
        """Evict content until there is memory for new content of the given sizes. If eviction cannot make enough room,
        evict nothing and return False.
        """
        excess = self.num_bytes + sum(size for name, size in sizes.items() if name not in self._contents)
        excess -= self._most_bytes
        if excess > self._num_unheld_bytes:
            return False
        evicted = list[_Key]()
        for name in self._unheld:
            if excess <= 0:
                break
            if name not in sizes:
                evicted.append(name)
                excess -= self._contents[name].num_bytes
        if excess > 0:
            return False
        for name in evicted:
            self._drop(name)
        return True

    def _hold(self, request: _Wanting, sizes: dict[_Key, int]) -> None:
        request.has_room = True
        for name, ref in zip(request.names, request.refs, strict=True):
            if name not in self._contents:
                self._contents[name] = _Content(name, ref, sizes[name])
                self.num_bytes += sizes[name]
            content = self._contents[name]
            content.holders[request.key] = None
            self._use(content)
            if not content.is_complete:
                request.missing.add(name)

    def _release(self, content: _Content) -> None:
        """Keep complete content until other images need the memory. Drop incomplete content."""
        if content.is_complete:
            self._unheld[content.key] = None
            self._num_unheld_bytes += content.num_bytes
        else:
            if content.asked is not None:
                self._stop(content.asked)
            self._drop(content.key)

    def _drop(self, name: _Key) -> None:
        content = self._contents.pop(name)
        self._use(content)
        self.num_bytes -= content.num_bytes

    def _use(self, content: _Content) -> None:
        """Remove content from the list of evictable content, because a request holds the content or because the content
        is dropped.
        """
        if content.key in self._unheld:
            del self._unheld[content.key]
            self._num_unheld_bytes -= content.num_bytes

    # Questions.

    def _queue(self, request: _Wanting, supplier: Supplier) -> None:
        """Ask a client, now or later, for the content that a request lacks."""
        queue = self._queues[supplier.identity]
        for name in request.names:
            if name in request.missing:
                queue[name] = None
        self._ask_next(supplier.identity)

    def _ask_next(self, identity: bytes) -> None:
        """Ask a connection for the first content in its queue that is still missing and that no other connection
        sends.
        """
        if identity in self._questions:
            return
        queue, waiting = self._queues.get(identity, {}), dict[_Key, None]()
        while queue:
            name = next(iter(queue))
            del queue[name]
            content = self._contents.get(name)
            if content is None or content.is_complete:
                continue
            if content.asked is not None:
                waiting[name] = None
            elif found := self._supplier_of(content, identity):
                self._ask_for_part(content, found[1], found[0], self._now())
                break
        queue |= waiting

    def _supplier_of(self, content: _Content, identity: bytes) -> tuple[str, Supplier] | None:
        """Find a request that needs the content and has a client on the connection. Return the request's key and the
        client; None if there is no such request.
        """
        for key in content.holders:
            if supplier := self._requests[key].supplier_on(identity):
                return key, supplier
        return None

    def _ask_for_part(self, content: _Content, supplier: Supplier, key: str, begun: float) -> None:
        num_bytes = min(content.num_bytes - content.num_received, self._most_part)
        content.asked = supplier.identity
        deadline = min(self._now() + self._seconds, begun + self._seconds + content.num_bytes / SLOWEST)
        self._questions[supplier.identity] = _Question(content, supplier, key, num_bytes, begun, deadline)
        self._ask(
            supplier.identity,
            NeedImage(
                id=self._requests[key].id,
                content_hash=content.ref.content_hash,
                start=content.num_received,
                num_bytes=num_bytes,
                caller=supplier.caller,
            ),
        )

    def _stop(self, identity: bytes) -> None:
        """End the question to a connection, and forget the parts that have arrived."""
        self._questions.pop(identity).content.restart()

    def _ask_anyone(self, content: _Content) -> None:
        """Ask a free connection for content that no connection is sending."""
        for key in content.holders:
            for supplier in self._requests[key].suppliers:
                self._queues[supplier.identity][content.key] = None
                self._ask_next(supplier.identity)
                if content.asked is not None:
                    return

    def _finish(self, content: _Content) -> None:
        for key in content.holders:
            request = self._requests[key]
            request.missing.discard(content.key)
            if not request.missing:
                self._complete(request)

    def _complete(self, request: _Wanting) -> None:
        self._ready[request.key] = None
        self._orphans.pop(request.key, None)
        request.suppliers.clear()

    # Clients that leave or fail.

    def _reject(self, identity: bytes, content: _Content) -> None:
        """Handle content that does not have the requested hash. The connection no longer supplies the requests that
        need this content. Fail the requests that no other connection can supply.
        """
        content.restart()
        for key in list(content.holders):
            request = self._requests[key]
            for supplier in [each for each in request.suppliers if each.identity == identity]:
                self._remove(request, supplier)
                if not request.suppliers:
                    self._fail(key, "the pixels have another hash; send the image that content_hash names", content)
        self._ask_anyone(content)

    def _remove(self, request: _Wanting, supplier: Supplier) -> None:
        """Remove a client of a request. If the client was sending content for the request, ask another client for this
        content.
        """
        del request.suppliers[supplier]
        if not request.suppliers and request.has_room and request.missing:
            request.deadline, self._orphans[request.key] = self._now() + self._seconds, None
        question = self._questions.get(supplier.identity)
        if question is not None and (question.supplier, question.key) == (supplier, request.key):
            self._stop(supplier.identity)
            self._ask_anyone(question.content)
            self._ask_next(supplier.identity)

    def _leave(self, identity: bytes, silence: str | None = None) -> None:
        """Remove a connection from all requests. `silence`: the error text for requests that have no other client; None
        if these requests may wait until the client reconnects.
        """
        question = self._questions.get(identity)
        if question is not None:
            self._stop(identity)
        for request in list(self._requests.values()):
            for supplier in [each for each in request.suppliers if each.identity == identity]:
                self._remove(request, supplier)
                if silence is not None and request.is_waiting and not request.suppliers:
                    self._fail(request.key, silence)
        if question is not None and question.content.key in self._contents:
            self._ask_anyone(question.content)

    def _silence(self, question: _Question) -> str:
        content = question.content
        return (
            f"the client has sent {content.num_received} of {content.num_bytes} bytes of an image, and then too little "
            f"for {self._seconds} seconds (image_seconds); send the request again, or raise image_seconds"
        )

    def _fail(self, key: str, text: str, content: _Content | None = None) -> None:
        names = self._requests[key].names
        index = None if content is None else names.index(content.key)
        field = "images" if index is None else f"images[{index}]"
        self._failed[key] = InvalidRequestError(f"{field}: {text}", field=field)
