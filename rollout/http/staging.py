"""A weight version that the worker stages in one request and commits in a later request.

A worker has read and verified a staged version, but does not serve the version before the commit. The version comes
from a chain of deltas: a folder or URL with a subfolder for each version.

Owns: at most one staged version, with the publisher that staged the version. Promises: a commit serves exactly the
staged version. If staging or a commit fails, the staged version is dropped, and the worker serves its previous weights.

A staged version is dropped if it is not committed within `STAGED_SECONDS`. A later commit of this version is refused.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trueroll.errors import PushError

from .lifecycle import Lifecycle

if TYPE_CHECKING:
    from ..publisher.publisher import WeightPublisher
    from ..publisher.staged import Staged

STAGED_SECONDS = 600.0
"""Maximum time, in seconds, from the staging of a version to its commit. A trainer with several engines commits only
after the slowest engine has staged the version.
"""


@dataclass(frozen=True)
class Pulled:
    """Version `version` of the chain at `place`. `is_served`: whether the worker already served this version when this
    object was created. If `is_served` is true, nothing is staged.
    """

    place: str
    version: int
    is_served: bool


class Staging:
    """The staged version. Callers of all methods except `close` hold `lifecycle.push_lock`. `pulled`: the version that
    was last staged or committed; None if no version was staged or committed, or if the version was dropped.
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self.pulled: Pulled | None = None
        self._held: tuple[WeightPublisher, Staged] | None = None

    async def stage(self, place: str, version: int, reads_chain: bool) -> None:
        """Make the worker stage a version, and drop any other staged version. Staging the staged version again is a
        no-op. `reads_chain`: see `WeightPublisher.pull`. Raise PushError if the worker cannot stage the version.
        """
        if self.pulled == Pulled(place, version, is_served=False):
            return
        await self.drop()
        self._held = await asyncio.to_thread(self._stage, place, version, reads_chain)
        self.pulled = Pulled(place, version, is_served=False)

    async def note_served(self, place: str, version: int) -> None:
        """Record that the worker already serves a version, so that the version need not be staged."""
        await self.drop()
        self.pulled = Pulled(place, version, is_served=True)

    async def commit(self, version: int | None) -> None:
        """Make the worker serve the staged version. No-op if the worker already serves this version.

        `version`: the version that the caller expects; None means any version. Call this function only after a version
        was staged. Raise PushError if another version is staged, or if the commit fails.
        """
        pulled = self.pulled
        assert pulled is not None
        if version not in (None, pulled.version):
            raise _wrong(f"version {pulled.version} was pulled (got {version}); pull the version to commit", version)
        if pulled.is_served:
            return await self._check_serves(pulled.version)
        assert self._held is not None
        (publisher, staged), self._held, self.pulled = self._held, None, None
        try:
            await asyncio.to_thread(staged.commit)
        finally:
            await asyncio.to_thread(publisher.close)
        self.pulled = Pulled(pulled.place, pulled.version, is_served=True)

    async def drop(self) -> None:
        """Make the worker drop the staged version, if there is one."""
        held, self._held, self.pulled = self._held, None, None
        if held is not None:
            publisher, staged = held
            try:
                await asyncio.to_thread(staged.abort)
            finally:
                await asyncio.to_thread(publisher.close)

    async def close(self) -> None:
        """Drop the staged version at the end of the front end."""
        async with self._lifecycle.push_lock:
            await self.drop()

    def _stage(self, place: str, version: int, reads_chain: bool) -> tuple[WeightPublisher, Staged]:
        """Stage a version. Call this function on a separate thread, because the publisher blocks."""
        publisher = self._lifecycle.open_publisher(STAGED_SECONDS)
        try:
            return publisher, publisher.pull(place, version, reads_chain=reads_chain)
        except BaseException:
            publisher.close()
            raise

    async def _check_serves(self, version: int) -> None:
        """Raise PushError if the worker no longer serves a version that an earlier call has committed."""
        served = (await self._lifecycle.report()).weight_version
        if served != version:
            text = f"version {version} was committed earlier, and version {served} has replaced it; pull the version "
            raise _wrong(f"{text}to commit", version)


def _wrong(found: str, version: int | None) -> PushError:
    return PushError(f"weight_version: {found}", field="weight_version", value=version)
