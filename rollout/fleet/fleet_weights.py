"""The weights that the workers of a fleet must serve, and how a joining worker gets these weights.

Owns: the folder through which joining workers get weights, and the record of the last push that all workers committed,
no matter which publisher sent it. Does not own: when a worker joins (`Keeper`), or how often the fleet tries to give a
worker the weights (`Joining`).
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

from trueroll.errors import IllegalStateError, TruerollError

from .. import protocol
from ..client.client import AsyncRolloutClient
from ..client.membership import Membership, PushNote, noted_push, version_file
from .hand_over import Keys, WeightFolder, hand_over, have_the_same

log = logging.getLogger(__name__)


class FleetWeights:
    """The weights of a fleet.

    `file`: the fleet's file; trainers in other processes write push notes beside this file. `fleet`: the members.
    `noted`: the recorded push. If no other worker serves, a joining worker must get the weights of this push. None
    means the weights of the checkpoint.
    """

    def __init__(self, folder: WeightFolder, file: Path | None, fleet: Membership, keys: Keys) -> None:
        self.folder = folder
        self.noted: PushNote | None = None
        self._noted_in_file: PushNote | None = None
        self._num_notes = 0
        self._file = file
        self._fleet = fleet
        self._keys = keys

    def note(self, push: PushNote) -> None:
        """Record that all workers now serve this push. Thread-safe."""
        self.noted, self._num_notes = push, self._num_notes + 1

    def read_note(self) -> None:
        """Read the push note that a trainer in another process wrote beside the fleet's file. If the push is new,
        record the push.
        """
        noted = None if self._file is None else noted_push(self._file)
        if noted is not None and noted != self._noted_in_file:
            self._noted_in_file = noted
            self.note(noted)

    def remove_note(self) -> None:
        """Remove the push note beside the fleet's file."""
        if self._file is not None:
            version_file(self._file).unlink(missing_ok=True)

    async def note_served(self, client: AsyncRolloutClient, version: int | None) -> None:
        """Record the push that a worker serves, if this push is newer than the recorded push. `version`: the weight
        version in the worker's health report.
        """
        if not self._is_newer(version):
            return
        num_notes = self._num_notes
        with suppress(IllegalStateError):  # the worker has no weights at the moment
            weights = await client.ask(protocol.GetWeights(id=protocol.new_id()))
            assert isinstance(weights, protocol.Weights)
            is_newer = num_notes == self._num_notes and self._is_newer(weights.weight_version)
            if is_newer and weights.push_id is not None:
                self.noted = PushNote(weights.weight_version, weights.push_id)

    def _is_newer(self, version: int | None) -> bool:
        return (version or 0) > (0 if self.noted is None else self.noted.version)

    def are_pushed_to(self, health: protocol.Health) -> bool:
        """Return whether a worker that waits for a push is receiving a push, or already has weights that are at least
        as new as the recorded push. If no push is recorded, return True. `health`: the health of the waiting worker.
        """
        is_older = self.noted is not None and (health.weight_version or 0) < max(1, self.noted.version)
        return health.push is not None or health.state == "updating" or not is_older

    async def hand_over(
        self, client: AsyncRolloutClient, peer: AsyncRolloutClient | None, noted: PushNote | None
    ) -> bool:
        """See `hand_over`."""
        return await hand_over(client, peer, noted, self.folder, self._fleet, self._keys)

    async def are_the_same(self, client: AsyncRolloutClient, peer: AsyncRolloutClient) -> bool:
        """Return whether two workers serve the same weights. If a worker does not answer, log a warning and return
        False.
        """
        try:
            return await have_the_same(client, peer)
        except TruerollError as error:
            log.warning("fleet: handing weights over again, because two workers could not be compared: %s", error)
            return False
