"""The members of a fleet, for its clients and publishers.

The process that runs the fleet publishes the members through its `Fleet` object, or through a file that is replaced at
every change. Instead of a fleet, a fixed list of worker addresses is also supported. Imports neither ray nor zmq.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import stat
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, get_args, runtime_checkable

from trueroll.errors import ConfigError, brief, said

from ...weight_sync.payload.manifest import LAST_VERSION
from .small_file import check_printable, open_regular, read_text

Standing: TypeAlias = Literal["serving", "joining", "leaving"]
MOST_FILE_BYTES = 2**21
"""Maximum size of a fleet's file, enough for 1,024 workers with an error text each."""
MOST_NOTE_BYTES = 2**10
_PUSH_ID = re.compile("[0-9a-f]{32}")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Member:
    """A worker of a fleet.

    - `name`: name of the worker's slot in the fleet. A worker that replaces a lost worker has the same name.
    - `incarnation`: id of the worker's process, different for each replacement; empty if unknown.
    - `standing`: `serving` (may get requests), `joining` (does not have the fleet's weights yet) or `leaving` (ends
      once its requests have finished).
    - `trouble`: error of the last attempt to give the worker the fleet's weights; empty if the attempt succeeded.
    """

    name: str
    address: str
    incarnation: str = ""
    standing: Standing = "serving"
    trouble: str = ""

    @property
    def key(self) -> str:
        """Identifier of the worker's process, built from name, incarnation and address."""
        return f"{self.name}#{self.incarnation}@{self.address}"

    @property
    def told(self) -> str:
        """The worker's name, followed by the text of `trouble`."""
        return f"{self.name}: {self.trouble}"


class Membership(Protocol):
    """A source of the current members of a fleet."""

    def members(self) -> Sequence[Member]:
        """Return the members, with unique names. The method is called often, from any thread, and must not block."""
        ...


@dataclass(frozen=True)
class PushNote:
    """A push that all workers of a fleet have committed. `push_id`: 32 hex digits, unique to this push."""

    version: int
    push_id: str


@runtime_checkable
class KeepsPush(Protocol):
    """A supervisor that records pushes, so that the replacement of a lost worker gets the current weights."""

    def note_push(self, note: PushNote) -> None:
        """Record that all workers now serve this push. If all workers are lost at once, this record is the fleet's only
        record of the push.
        """
        ...


FleetArg: TypeAlias = Membership | str | Path | Sequence[str]
"""A fleet: a `Membership` such as `Fleet`, the path of a fleet's file, a list of worker addresses, or a string with
comma-separated addresses.
"""


class Addresses:
    """A fixed list of workers."""

    def __init__(self, addresses: Sequence[str]) -> None:
        listed = list(addresses)
        if not listed or not all(isinstance(address, str) and address for address in listed):
            raise ConfigError(f"fleet: must be a list with at least one worker address (got {brief(addresses)})")
        if len(set(listed)) != len(listed):
            raise ConfigError(f"fleet: {brief(listed)} has an address twice; give each worker once")
        self._members = tuple(Member(address, address) for address in listed)

    def members(self) -> Sequence[Member]:
        return self._members


class FleetFile:
    """A membership that reads the members from a file that `write_members` wrote."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._seen: tuple[int, int] | None = None
        self._members: tuple[Member, ...] = ()
        self._read()

    def members(self) -> Sequence[Member]:
        """Return the members. While the file cannot be read, return the last known members."""
        try:
            self._read()
        except ConfigError:
            if self._seen is None:
                raise
        return self._members

    def note_push(self, note: PushNote) -> None:
        """Write a push note beside the fleet's file. The process that runs the fleet reads the note. Raise ConfigError
        if the write fails.
        """
        try:
            mode = stat.S_IMODE(self._path.stat().st_mode)  # the note gets the mode of the fleet's file
            _replace(version_file(self._path), json.dumps(asdict(note)), mode)
        except OSError as error:
            raise ConfigError(
                f"fleet: cannot write into the folder of {self._path} ({error}); give trainers write permission"
            ) from None

    def _read(self) -> None:
        try:
            with open_regular(self._path) as file:
                status = os.fstat(file.fileno())
                if (seen := (status.st_ino, status.st_mtime_ns)) == self._seen:
                    return
                self._members = _members_in(read_text(file, MOST_FILE_BYTES))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"fleet: {self._path} is not a valid fleet file: {said(error)}; give the file that Fleet or `trueroll "
                "fleet` writes, or the addresses of workers"
            ) from None
        self._seen = seen


def _members_in(text: str) -> tuple[Member, ...]:
    """Parse the members. Raise ValueError or RecursionError if the text is not a valid fleet file."""
    content = json.loads(text)
    check_printable(content)
    if not isinstance(content, dict) or not isinstance(content.get("members"), list):
        raise ValueError("the file is not a JSON map with a list of members")
    members = tuple(map(_member_of, content["members"]))
    if len({member.name for member in members}) != len(members):
        raise ValueError("the file has a member twice")
    return members


def _member_of(entry: Any) -> Member:
    names = {field.name for field in fields(Member)}
    if not isinstance(entry, dict) or not entry.keys() <= names:
        raise ValueError(f"a member must be a map with the keys {', '.join(sorted(names))} (got {brief(entry)})")
    if not all(isinstance(value, str) for value in entry.values()):
        raise ValueError("a field of a member is not a string")
    if not (entry.get("name") and entry.get("address")):
        raise ValueError("a member has no name or no address")
    if entry.get("standing", "serving") not in get_args(Standing):
        raise ValueError(
            f"a member's standing must be one of {', '.join(get_args(Standing))} (got {brief(entry['standing'])})"
        )
    return Member(**entry)


def write_members(path: Path, members: Sequence[Member], mode: int = 0o600) -> None:
    """Replace the fleet's file atomically. The file has addresses but no keys. `mode`: permission bits of the file,
    before the umask is applied.
    """
    _replace(path, json.dumps({"members": [asdict(member) for member in members]}), mode)


class MembersFile:
    """The file of a fleet, written by the process that runs the fleet.

    `is_stale`: True if the last write failed. After a failed write, the next call to `tell` writes again.
    """

    def __init__(self, path: Path, mode: int) -> None:
        self.is_stale = False
        self._path, self._mode = path, mode
        self._told: Sequence[Member] | None = None

    def tell(self, members: Sequence[Member]) -> None:
        """Write the members to the file if they have changed. If writes keep failing, log only the first failure."""
        if members == self._told and not self.is_stale and self._path.exists():
            return
        try:
            write_members(self._path, members, self._mode)
            self._told, self.is_stale = members, False
        except OSError as error:
            if not self.is_stale:
                log.error("cannot write %s (%s); clients that read the file miss changes", self._path, error.strerror)
            self.is_stale = True

    def remove(self) -> None:
        """Remove the file if it exists."""
        self._path.unlink(missing_ok=True)


def version_file(path: Path) -> Path:
    """Return the path of the push note, a file that records the last push. The push note is in the same folder as the
    fleet's file `path`. Trainers in other processes write the push note.
    """
    return path.with_name(f"{path.name}.version")


def noted_push(path: Path) -> PushNote | None:
    """Return the push that the push note records; None if the note is missing or malformed."""
    try:
        with open_regular(version_file(path)) as file:
            content = json.loads(read_text(file, MOST_NOTE_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or content.keys() != {"version", "push_id"}:
        return None
    version, push_id = content["version"], content["push_id"]
    if type(version) is not int or not 0 <= version <= LAST_VERSION or not isinstance(push_id, str):
        return None
    return PushNote(version, push_id) if _PUSH_ID.fullmatch(push_id) else None


def _replace(path: Path, text: str, mode: int) -> None:
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def is_fleet(target: str) -> bool:
    """Return False if a string is the address of one worker. Return True for several addresses, and for the path of a
    fleet's file.
    """
    return "://" not in target or "," in target


def membership_of(fleet: FleetArg) -> Membership:
    """Return the membership of a fleet. Raise ConfigError if the argument `fleet` is invalid."""
    if isinstance(fleet, str) and "://" in fleet:
        return Addresses([address.strip() for address in fleet.split(",")])
    if isinstance(fleet, str | Path):
        return FleetFile(fleet)
    if isinstance(fleet, Sequence):
        return Addresses(fleet)
    if not callable(getattr(fleet, "members", None)):
        raise ConfigError(
            f"fleet: must be a Fleet, the file of a fleet, or the addresses of workers (got {brief(fleet)})"
        )
    return fleet
