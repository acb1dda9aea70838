"""Takes the buckets of a push in, in their order, and knows when all are there.

Owns: which bucket comes next, and the reading end that they come by. Does not own: where pieces go (`assembly`), nor
what is answered (`receiver`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import torch

from trueroll.errors import PushError

from ..payload.manifest import Bucket
from ..payload.messages import StageBucket
from ..transports.ends import Reader
from .assembly import Assembly, content_of
from .call_queue import CallQueue
from .writing import Writing


class Intake:
    """Reads buckets with `reader` into `assembly`, each piece while `writing` allows it. `staged` is told the bytes of
    each bucket that is there. `num_buckets`: how many are there.
    """

    def __init__(
        self,
        reader: Reader,
        assembly: Assembly,
        calls: CallQueue,
        writing: Writing,
        staged: Callable[[int], None],
    ) -> None:
        self.num_buckets = 0
        self._reader, self._assembly = reader, assembly
        self._calls, self._writing, self._staged = calls, writing, staged
        self._early: StageBucket | None = None

    def stage(self, call: StageBucket) -> Iterator[str]:
        """Take the bucket of a call in, and one behind it that came too early: yield the id of each call that is done.
        Raise PushError for a bucket out of turn.
        """
        if self._early is None and call.bucket.index == self.num_buckets + 1:
            self._early = call  # the one before it was lost with a connection, and is sent again
            return
        self._take(call.bucket)
        yield call.id
        if self._early is not None:
            early, self._early = self._early, None
            yield from self.stage(early)

    def finish(self, num_buckets: int) -> None:
        """All buckets are there, but for those that nobody announces. Raise PushError if anything is missing."""
        if num_buckets != self.num_buckets:
            raise PushError(f"verify: expected {self.num_buckets} buckets, as arrived, found {num_buckets}")
        for bucket, read in self._reader.read_unannounced():
            self._assembly.check(bucket)  # before memory is taken for it
            self._add(bucket, read())
        self._assembly.finish()

    def _take(self, bucket: Bucket) -> None:
        if bucket.index != self.num_buckets:
            raise PushError(f"bucket: expected bucket {self.num_buckets}, found bucket {bucket.index}; push again")
        self._assembly.check(bucket)
        data = self._reader.read(bucket)
        self._prepare_next()
        self._add(bucket, data)
        self.num_buckets += 1

    def _prepare_next(self) -> None:
        """Let the next bucket come while this one is copied, if it is announced; if it is wrong, its turn tells."""
        ahead = self._calls.look_ahead()
        if isinstance(ahead, StageBucket) and ahead.bucket.index == self.num_buckets + 1:
            with suppress(PushError):
                self._assembly.check(ahead.bucket)
                self._reader.prepare(ahead.bucket)

    def _add(self, bucket: Bucket, data: torch.Tensor) -> None:
        self._assembly.inspect_all(bucket, data)
        for piece in bucket.pieces:
            content = content_of(piece, data)
            self._assembly.inspect(piece, content)
            with self._writing.guarded():
                self._assembly.add(piece, content)
        self._staged(bucket.num_bytes)
