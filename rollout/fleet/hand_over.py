"""Give a joining worker the weights of its fleet (a hand-over), from the folder of a `disk` push or from another
worker.

Owns: the weights that a worker writes for a hand-over, until the hand-over ends. The weights for hand-overs are in the
subfolder `joins` of a folder that all workers can reach. Guarantees: even if the folder has weights of an earlier run,
no worker gets these old weights, because pushes have unique ids.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trueroll.errors import ConfigError, OtherBaseError, PushError

from ...weight_sync.payload.manifest import MANIFEST_FILE, Adapters, FolderManifest
from ...weight_sync.transports.disk import PRIVATE, read_manifest
from .. import protocol
from ..client.client import AsyncRolloutClient
from ..client.membership import Member, Membership, PushNote
from ..network.keys import Key

Keys = tuple[Key | None, Key | None]
_PUSH_FOLDER = re.compile(r"version-(\d+)-([0-9a-f]{8})")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WeightFolder:
    """A folder of `disk` pushes, to which workers may also write their weights.

    `bases`: ids of pushes that workers got only as base weights for adapters. `without_base`: ids of adapter-only
    pushes for which no push in the folder has the base weights. Missing base weights cannot appear later, because they
    would belong to an older push.
    """

    path: Path
    bases: set[str] = field(default_factory=set, compare=False)
    without_base: set[str] = field(default_factory=set, compare=False)

    def make(self) -> None:
        """Create the folder. Raise ConfigError if weights cannot be written to the folder."""
        try:
            self.path.mkdir(PRIVATE, parents=True, exist_ok=True)
            (self.path / "joins").mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"weights_folder: cannot create or write to the folder ({error}); give another folder"
            ) from None

    def find(self, push_id: str) -> Path | None:
        """Return the folder of the push `push_id`; None if there is no complete push with this id."""
        named = (path for path in self._pushes() if path.name.endswith(push_id[:8]))
        return next((path for path in named if read_manifest(path).push_id == push_id), None)

    def find_base(self, adapters: Adapters) -> Path:
        """Return the folder of a push with the base weights of `adapters`. Raise OtherBaseError if no push has the base
        weights of `adapters`.
        """
        for path in self._pushes():
            try:
                if _has_base(read_manifest(path), adapters):
                    return path
            except PushError as error:
                log.warning("fleet: skipping the push in %s: %s", path, error)
        raise OtherBaseError(f"adapters: no push in {self.path} has the base weights of these adapters")

    def _pushes(self) -> list[Path]:
        """Return the folders of all complete pushes, the newest version first. Raise PushError if the folder cannot be
        read.
        """
        try:
            found = [(match, path) for path in self.path.iterdir() if (match := _PUSH_FOLDER.fullmatch(path.name))]
            newest = sorted(found, key=lambda pair: int(pair[0][1]), reverse=True)
            return [path for _, path in newest if (path / MANIFEST_FILE).is_file()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise PushError(
                f"weights_folder: cannot read {self.path} ({error.strerror}); check the permissions"
            ) from None

    def new(self) -> Path:
        """Create a new folder for the weights of one worker. Raise PushError if the folder cannot be created."""
        folder = self.path / "joins" / secrets.token_hex(8)
        try:
            folder.mkdir(mode=0o755, parents=True)
        except OSError as error:
            raise PushError(
                f"weights_folder: cannot create {folder} ({error.strerror}); check the permissions and the free space"
            ) from None
        return folder


@dataclass(frozen=True)
class _Only:
    """A membership with only one member, the worker at `address`. Once the worker at `address` has left `fleet`, the
    membership is empty.
    """

    fleet: Membership
    address: str

    def members(self) -> Sequence[Member]:
        return [member for member in self.fleet.members() if member.address == self.address]


async def hand_over(
    client: AsyncRolloutClient,
    peer: AsyncRolloutClient | None,
    noted: PushNote | None,
    folder: WeightFolder,
    fleet: Membership,
    keys: Keys,
) -> bool:
    """Give a worker the weights of the fleet: the weights of a peer or, without a peer, the weights of the last push.

    `client`: client of the joining worker; this worker is a member of `fleet`. `peer`: client of a serving worker, or
    None. `noted`: the last push; None means the weights of the checkpoint. Return True if the worker now serves the
    weights of the fleet. Return False if no copy of the weights is left and the worker must wait for a push. Raise
    TruerollError if the hand-over fails.
    """
    joining = _Only(fleet, client.address)
    own = await _weights(client)
    if peer is None:
        if noted is None or own.push_id == noted.push_id:
            return True
        is_newer = own.push_id is not None and own.weight_version >= noted.version
        if is_newer and own.push_id not in folder.bases:  # the trainer that pushed these weights wrote no note
            return True
        return await asyncio.to_thread(_push_noted, joining, noted.push_id, folder, keys)
    theirs = await _weights(peer)
    if theirs.push_id == own.push_id and theirs.weight_version == own.weight_version:
        return True
    if theirs.push_id is None:  # the peer has no weights until the next push
        return False
    if not await asyncio.to_thread(_push_found, joining, theirs.push_id, folder, keys):
        await _push_saved(joining, peer, folder, keys)
    return await have_the_same(client, peer)


async def have_the_same(client: AsyncRolloutClient, peer: AsyncRolloutClient) -> bool:
    """Return whether two workers serve the same weights."""
    own, theirs = await asyncio.gather(_weights(client), _weights(peer))
    return (own.push_id, own.weight_version) == (theirs.push_id, theirs.weight_version)


async def _weights(client: AsyncRolloutClient) -> protocol.Weights:
    reply = await client.ask(protocol.GetWeights(id=protocol.new_id()))
    assert isinstance(reply, protocol.Weights)
    return reply


def _push_noted(joining: _Only, push_id: str, folder: WeightFolder, keys: Keys) -> bool:
    """Push weights to the joining worker, from the folder of the recorded push. Return False if the push is missing,
    or if the push has only adapters and the base weights are missing.
    """
    path = None if push_id in folder.without_base else folder.find(push_id)
    if path is None:
        return False
    try:
        _push(joining, path, folder, keys)
    except OtherBaseError as error:  # the push has only adapters, and their base is missing until the next push
        folder.without_base.add(push_id)
        log.warning("fleet: %s cannot be handed over: %s", path, error)
        return False
    return True


def _push_found(joining: _Only, push_id: str, folder: WeightFolder, keys: Keys) -> bool:
    """Push weights to the joining worker, from the folder of an earlier push. On failure, log the error and return
    False, so that a peer writes the weights instead.
    """
    path = None
    try:
        path = folder.find(push_id)
        if path is None:
            return False
        _push(joining, path, folder, keys)
    except PushError as error:
        if path is None or path.exists():  # otherwise, a newer push has replaced the folder
            log.warning(
                "fleet: cannot use the folder of push %s, so another worker writes the weights: %s", push_id, error
            )
        return False
    return True


async def _push_saved(joining: _Only, peer: AsyncRolloutClient, folder: WeightFolder, keys: Keys) -> None:
    """Make a peer write its weights to a new folder, then push this folder to the joining worker."""
    new = folder.new()
    try:
        await peer.ask(protocol.SaveWeights(id=protocol.new_id(), folder=str(new)))
        found = _content_of(new)
        if len(found) != 1:
            raise ConfigError(
                f"weights_folder: the worker at {peer.address} wrote its weights to {new}, but this machine does not "
                "see them; give a folder that all machines share"
            )
        await asyncio.to_thread(_push, joining, found[0], folder, keys)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _content_of(folder: Path) -> list[Path]:
    """Return the paths in a folder. Raise PushError if the folder cannot be read."""
    try:
        return list(folder.iterdir())
    except OSError as error:
        raise PushError(f"weights_folder: cannot read {folder} ({error.strerror}); check the permissions") from None


def _has_base(manifest: FolderManifest, adapters: Adapters) -> bool:
    """Compare checksums, and return whether a push contains the base weights that the adapters need."""
    if manifest.adapters is not None and manifest.adapters.is_alone:
        return False
    found = [(manifest.checksums[name], value) for name, value in adapters.base or () if name in manifest.checksums]
    return bool(found) and all(own == value for own, value in found)


def _push(joining: _Only, path: Path, folder: WeightFolder, keys: Keys) -> None:
    """Push a folder to the joining worker. If the folder has only adapters and the worker lacks the base weights, push
    the base weights first. Call this function on a separate thread, because the publisher blocks and imports torch.
    """
    from ..publisher.publisher import WeightPublisher

    with WeightPublisher("shared", server_public_key=keys[0], client_key=keys[1]) as publisher:
        publisher.connect_fleet(joining)
        try:
            publisher.push_folder(path, allow_older=True)
        except OtherBaseError:
            adapters = read_manifest(path).adapters
            assert adapters is not None
            base = folder.find_base(adapters)
            folder.bases.add(read_manifest(base).push_id)
            publisher.push_folder(base, allow_older=True)
            publisher.push_folder(path, allow_older=True)
