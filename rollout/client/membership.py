"""Who is in a fleet: all that its clients and publishers have to be told.

Whoever keeps workers running says it, by an object (`Fleet`), by a file that is replaced at every change, or once and
for all by addresses. Imports neither ray nor zmq.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from trueroll.errors import ConfigError, brief

Standing: TypeAlias = Literal["serving", "joining", "leaving"]


@dataclass(frozen=True)
class Member:
    """A worker of a fleet. `name`: of its place in it, which one that replaces it gets too. `incarnation`: differs for
    each process that has the place, empty if that is not known. `standing`: it may be asked (`serving`), has not the
    fleet's weights yet (`joining`), or ends once it has finished what it has (`leaving`).
    """

    name: str
    address: str
    incarnation: str = ""
    standing: Standing = "serving"

    @property
    def key(self) -> str:
        """Of its process, among those that have been there."""
        return f"{self.name}#{self.incarnation}@{self.address}"


class Membership(Protocol):
    """What tells who is in a fleet."""

    def members(self) -> Sequence[Member]:
        """Each name once. Called often, from any thread: it must not wait."""
        ...


@runtime_checkable
class KeepsVersion(Protocol):
    """Whoever replaces workers, and has to know which weights they must not serve any more."""

    def note_version(self, version: int) -> None:
        """All serve a push of that version now. It may be lost with all of them before anybody has looked at them."""
        ...


FleetArg: TypeAlias = Membership | str | Path | Sequence[str]
"""A `Membership`, such as a `Fleet`; the file that one writes; or the addresses of workers, with commas between them in
one string.
"""


class Addresses:
    """Workers that are always the same."""

    def __init__(self, addresses: Sequence[str]) -> None:
        listed = list(addresses)
        if not listed or not all(isinstance(address, str) and address for address in listed):
            raise ConfigError(f"fleet: expected the addresses of its workers, found {brief(addresses)}; give a list")
        if len(set(listed)) != len(listed):
            raise ConfigError(f"fleet: expected each worker once, found {brief(listed)}; leave the others out")
        self._members = tuple(Member(address, address) for address in listed)

    def members(self) -> Sequence[Member]:
        return self._members


class FleetFile:
    """The members that a file names, as `write_members` wrote it last."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._seen: tuple[int, int] | None = None
        self._members: tuple[Member, ...] = ()
        self._read()

    def members(self) -> Sequence[Member]:
        """Those of before while the file cannot be read."""
        try:
            self._read()
        except ConfigError:
            if self._seen is None:
                raise
        return self._members

    def note_version(self, version: int) -> None:
        """For the process that keeps the fleet, which looks for it beside its file. Raise ConfigError."""
        try:
            mode = stat.S_IMODE(self._path.stat().st_mode)  # who reads the one reads the other
            _replace(version_file(self._path), str(version), mode)
        except OSError as error:
            raise ConfigError(
                f"fleet: expected a folder that trainers may write to around {self._path}, found {error}; allow it"
            ) from None

    def _read(self) -> None:
        try:
            with open(self._path, encoding="utf-8") as file:
                status = os.fstat(file.fileno())
                if (seen := (status.st_ino, status.st_mtime_ns)) == self._seen:
                    return
                fields = json.load(file)
            self._members = tuple(Member(**member) for member in fields["members"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"fleet: expected the file of a fleet, found {self._path}: {error}; give the one that Fleet or "
                "`trueroll fleet` was told to write, or the addresses of workers"
            ) from None
        self._seen = seen


def write_members(path: Path, members: Sequence[Member], mode: int = 0o600) -> None:
    """Replace the file as a whole. It holds addresses alone, no key. `mode`: of the file, less the umask."""
    _replace(path, json.dumps({"members": [asdict(member) for member in members]}), mode)


def version_file(path: Path) -> Path:
    """Where a trainer in another process notes what it has pushed to the fleet with the file `path`."""
    return path.with_name(f"{path.name}.version")


def noted_version(path: Path) -> int:
    """The version that was noted there; 0 if none was."""
    try:
        return int(version_file(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0


def _replace(path: Path, text: str, mode: int) -> None:
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(draft, path)


def is_fleet(target: str) -> bool:
    """Whether a string means a fleet: a file, or several addresses; not the address of one worker."""
    return "://" not in target or "," in target


def membership_of(fleet: FleetArg) -> Membership:
    """What tells who is in a fleet, whichever way it is given. Raise ConfigError."""
    if isinstance(fleet, str) and "://" in fleet:
        return Addresses([address.strip() for address in fleet.split(",")])
    if isinstance(fleet, str | Path):
        return FleetFile(fleet)
    if isinstance(fleet, Sequence):
        return Addresses(fleet)
    if not callable(getattr(fleet, "members", None)):
        raise ConfigError(
            f"fleet: expected a Fleet, its file or addresses of workers, found {brief(fleet)}; give one of these"
        )
    return fleet
