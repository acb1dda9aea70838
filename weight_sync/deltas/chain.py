"""The shortest way through a chain: from the served version, or from a full checkpoint, to the wanted version. Pure
functions.

A worker goes back from the wanted version, from delta to base, until it finds its own version or a full checkpoint.
Each base is older than its delta, so the search ends. If the folders have ids of pushes, each base must be the very
push that its delta changes, because the checksums of a delta do not cover the tensors that the delta leaves out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from trueroll.errors import PushError

from .index import Delta, Index

MOST_FOLDERS = 1024
"""Limit on the number of folders that lead to a version."""


class Served(NamedTuple):
    """The complete weights that a worker serves. `push_id`: the id of the push that delivered the weights; None for the
    model's checkpoint.
    """

    version: int
    push_id: str | None


def find_way(
    read: Callable[[int], Index], version: int, served: Served | None, push_id: str | None = None
) -> list[Index]:
    """Return the folders that lead to `version`, the oldest first. The first folder is a full checkpoint, or a delta to
    the served weights.

    `read`: reads the index of a version; raises PushError if the folder is missing or incomplete. `served`: None if the
    worker has no complete weights. `push_id`: the id that the push of `version` must have; None to accept any push.
    Raise PushError if the chain does not lead to `version`, or if a folder holds a push other than the
    needed push.
    """
    found: list[Index] = []
    while len(found) < MOST_FOLDERS:
        found.append(index := _read(read, found, version, served))
        _check_push(index, push_id)
        if index.delta is None or is_base(index.delta, served):
            return found[::-1]
        version, push_id = index.delta.base_version, index.delta.base_push_id
    raise PushError(
        f"chain: {MOST_FOLDERS} deltas lead to version {found[0].version}, without a full checkpoint among them (limit "
        f"{MOST_FOLDERS}); write full checkpoints more often (full_every)"
    )


def is_base(delta: Delta, served: Served | None) -> bool:
    """Return whether a delta changes the served weights. If the delta has no ids of pushes, versions are compared, and
    only the checksums of the result tell whether the weights are the same.
    """
    if served is None or (delta.base_push_id is not None and delta.base_push_id != served.push_id):
        return False
    return delta.base_version == served.version


def _check_push(index: Index, push_id: str | None) -> None:
    if None not in (index.push_id, push_id) and index.push_id != push_id:
        raise PushError(
            f"chain: {index.folder} holds push {index.push_id}, but push {push_id} is needed, so the "
            "folder was replaced; write a full checkpoint, or push the whole weights once"
        )


def _read(read: Callable[[int], Index], later: list[Index], version: int, served: Served | None) -> Index:
    try:
        return read(version)
    except PushError as error:
        if not later:
            raise
        serves = "serves no complete weights" if served is None else f"serves version {served.version}"
        raise PushError(
            f"chain: {later[-1].folder} is a delta to version {version}, and this worker {serves}, but "
            f"{later[-1].folder_of(version)} cannot be used: {error}. Write a full checkpoint, or push the whole "
            "weights once"
        ) from None
