"""What a worker lets a push make it do: which folders it reads, and which hosts it connects to."""

from __future__ import annotations

import ipaddress
import logging
import os
import stat
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from trueroll.errors import PushError

log = logging.getLogger(__name__)

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True)
class PushPolicy:
    """`folder`: pushes by disk come from inside it, whoever wrote them; None: from folders that belong to the user the
    worker runs as, and that nobody else can write.

    `hosts`: where collective pushes may have their store beside loopback: IPs, networks such as 10.0.0.0/8, or names,
    which are compared and not looked up.
    """

    folder: str | None = None
    hosts: tuple[str, ...] = ()

    def open_files(self, folder: str, names: Sequence[str]) -> list[FileIO]:
        """The regular files `names` in the folder of a push, open for reading; the caller closes them.

        Never waits for the other end of a pipe. Raise PushError if the push may not make the worker read them, with
        one text whatever the cause is, so that no client learns from it which files there are; the log has the cause.
        """
        try:
            parent = self._open_folder(folder)
            try:
                return self._open_in(parent, names)
            finally:
                os.close(parent)
        except (OSError, ValueError) as error:
            log.warning("push by disk from %r: refused, for %s", folder, error)
            raise PushError(
                f"disk: expected the folder of a push that this worker may read, found none at {folder}; it must lie "
                f"inside the worker's --push-folder or, without one, belong to the worker's user (uid {os.geteuid()}) "
                "and be writable by nobody else, as its files must; the worker's log says more"
            ) from None

    def check_writable(self, folder: str) -> None:
        """Raise PushError unless the worker may be made to write into a folder: one that it would read a push from."""
        try:
            opened = self._open_folder(folder)
            try:
                if self.folder is None:
                    _check_owner(os.fstat(opened), "the folder")
            finally:
                os.close(opened)
        except (OSError, ValueError) as error:
            log.warning("weights to be written into %r: refused, for %s", folder, error)
            raise PushError(
                f"disk: expected a folder that this worker may write into, found none at {folder}; it must lie inside "
                f"the worker's --push-folder or, without one, belong to the worker's user (uid {os.geteuid()}) and be "
                "writable by nobody else; the worker's log says more"
            ) from None

    def check_host(self, host: str) -> None:
        """Raise PushError unless a push may make the worker connect to `host`, an IP or a name. Looks nothing up."""
        if host == "localhost" or _is_loopback(host) or any(_covers(entry, host) for entry in self.hosts):
            return
        raise PushError(
            f"collective: expected a host of loopback or among the worker's push_hosts, found {host!r}; push from one, "
            "or start the worker with --push-hosts that has it"
        )

    def _open_folder(self, folder: str) -> int:
        if self.folder is not None:
            return _open_inside(self.folder, folder)
        return os.open(folder, _FOLDER)

    def _open_in(self, parent: int, names: Sequence[str]) -> list[FileIO]:
        """What is open is checked, not what a path meant before: nobody can exchange it in between."""
        if self.folder is None:
            _check_owner(os.fstat(parent), "the folder")
        with ExitStack() as opened:
            files = [opened.enter_context(_open_file(name, parent)) for name in names]
            for name, file in zip(names, files, strict=True):
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise PermissionError(f"{name} is no regular file")
                if self.folder is None:
                    _check_owner(status, name)
            opened.pop_all()
        return files


def _open_inside(root: str, folder: str) -> int:
    """Go down from `root`, following no link: what is reached lies inside it, whatever is renamed meanwhile."""
    root = os.path.realpath(root, strict=True)
    parts = Path(os.path.realpath(folder, strict=True)).relative_to(root).parts
    opened = os.open(root, _FOLDER)
    for part in parts:
        parent = opened
        try:
            opened = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
        finally:
            os.close(parent)
    return opened


def _open_file(name: str, parent: int) -> FileIO:
    return open(name, "rb", buffering=0, opener=lambda path, flags: os.open(path, flags | _FILE, dir_fd=parent))


def _check_owner(status: os.stat_result, name: str) -> None:
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{name} belongs to uid {status.st_uid}")
    if status.st_mode & _WRITABLE_BY_OTHERS:
        raise PermissionError(f"{name} has mode {stat.S_IMODE(status.st_mode):04o}: others can write it; chmod go-w")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _covers(entry: str, host: str) -> bool:
    """Whether the entry is that host, or a network that it lies in."""
    if entry == host:
        return True
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False
