"""The weights of a fleet for a worker that joins it: from the folder that a push by disk wrote, or from another worker.

Owns: what it writes, in `joins` in a folder that all workers reach, until it has been handed over.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trueroll.errors import ConfigError, OtherBaseError, PushError, TruerollError

from ...weight_sync.payload.manifest import MANIFEST_FILE
from ...weight_sync.transports.disk import PRIVATE
from .. import protocol
from ..client.client import AsyncRolloutClient
from ..client.membership import Member, Membership
from ..network.keys import Key


@dataclass(frozen=True)
class WeightFolder:
    """`path`: where pushes by disk are, and where workers may write."""

    path: Path

    def make(self) -> None:
        """Raise ConfigError where no worker's weights could be written."""
        try:
            self.path.mkdir(PRIVATE, parents=True, exist_ok=True)
            (self.path / "joins").mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"weights_folder: expected a folder that can be written to, found {error}; give another one"
            ) from None

    def pushes(self) -> Iterator[Path]:
        """The pushes in it that were written to their end."""
        if self.path.is_dir():
            found = (path for path in self.path.glob("version-*") if path.suffix != ".tmp")
            yield from (path for path in found if (path / MANIFEST_FILE).is_file())

    def new(self) -> Path:
        """A folder of its own for one worker's weights."""
        folder = self.path / "joins" / secrets.token_hex(8)
        folder.mkdir(mode=0o755, parents=True)
        return folder


@dataclass(frozen=True)
class _Only:
    """Of the members of `fleet` the one at `address`, while it is there."""

    fleet: Membership
    address: str

    def members(self) -> Sequence[Member]:
        return [member for member in self.fleet.members() if member.address == self.address]


async def hand_over(
    client: AsyncRolloutClient,
    peer: AsyncRolloutClient | None,
    oldest: int,
    folder: WeightFolder,
    fleet: Membership,
    keys: tuple[Key | None, Key | None],
) -> bool:
    """Bring the worker of `client`, a member of `fleet`, to the weights of `peer`'s, or without one to some of version
    `oldest` or later. Returns whether it serves them now. Raise what the worker that joins raises.
    """
    joining = _Only(fleet, client.address)
    own = await _weights(client)
    if peer is None:
        if own.weight_version >= oldest:
            return True
        return await _push_newest(joining, oldest, folder, keys)
    try:
        theirs = await _weights(peer)
        if theirs.push_id == own.push_id and theirs.weight_version == own.weight_version:
            return True
        if theirs.push_id is None:  # asleep without weights, until a push brings others
            return False
        await _push_of(joining, peer, theirs, folder, keys)
    except TruerollError:
        if (await client.health()).state == "failed":
            raise
        return False  # the peer was lost, or got newer weights meanwhile
    return await have_the_same(client, peer)


async def have_the_same(client: AsyncRolloutClient, peer: AsyncRolloutClient) -> bool:
    """Whether two workers serve the same weights. False if one does not answer."""
    try:
        own, theirs = await asyncio.gather(_weights(client), _weights(peer))
    except TruerollError:
        return False
    return (own.push_id, own.weight_version) == (theirs.push_id, theirs.weight_version)


async def _weights(client: AsyncRolloutClient) -> protocol.Weights:
    reply = await client.ask(protocol.GetWeights(id=protocol.new_id()))
    assert isinstance(reply, protocol.Weights)
    return reply


async def _push_of(
    joining: _Only,
    peer: AsyncRolloutClient,
    theirs: protocol.Weights,
    folder: WeightFolder,
    keys: tuple[Key | None, Key | None],
) -> None:
    assert theirs.push_id is not None
    for path in folder.pushes():
        if path.name.endswith(theirs.push_id[:8]):
            with suppress(PushError):  # a newer push has taken its place
                return await asyncio.to_thread(_push, joining, path, folder, keys)
    new = folder.new()
    try:
        await peer.ask(protocol.SaveWeights(id=protocol.new_id(), folder=str(new)))
        (path,) = new.iterdir()
        await asyncio.to_thread(_push, joining, path, folder, keys)
    finally:
        shutil.rmtree(new, ignore_errors=True)


async def _push_newest(joining: _Only, oldest: int, folder: WeightFolder, keys: tuple[Key | None, Key | None]) -> bool:
    path = max(folder.pushes(), key=_version, default=None)
    if path is None or _version(path) < oldest:
        return False
    try:
        await asyncio.to_thread(_push, joining, path, folder, keys)
    except OtherBaseError:
        return False  # adapters alone, and nobody has what they are added to, until a push brings it
    return True


def _version(path: Path) -> int:
    return int(path.name.split("-")[1])


def _push(joining: _Only, path: Path, folder: WeightFolder, keys: tuple[Key | None, Key | None]) -> None:
    """On a thread: the publisher blocks, and imports torch. If it is of adapters alone, what they are added to may be
    in another folder of a push.
    """
    from ..publisher.publisher import WeightPublisher

    with WeightPublisher("shared", server_public_key=keys[0], client_key=keys[1]) as publisher:
        publisher.connect_fleet(joining)
        try:
            publisher.push_folder(path, allow_older=True)
        except OtherBaseError:
            before = max((other for other in folder.pushes() if other != path), key=_version, default=None)
            if before is None:
                raise
            publisher.push_folder(before, allow_older=True)
            publisher.push_folder(path, allow_older=True)
