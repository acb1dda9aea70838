"""The rules for pushes: the folders that a worker may read and write, and the hosts and URLs that a worker may connect
to.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
    """The folders and hosts that a push may use.

    `folder`: the folder of a `disk` push must be inside this folder; any user may own the files. If `folder` is None,
    the worker reads only folders and files that belong to the worker's user and that no other user can write.

    `hosts`: the hosts, in addition to loopback, that a worker may connect to: the host of the store of a
    collective push, and the hosts of the trainer and of the other workers of a relayed push. Each entry is an IP, a
    network such as 10.0.0.0/8, or a name. Names are compared as text, without a DNS lookup.

    `urls`: the URL of a chain of deltas must be one of these URLs, or be below one of these URLs, such as
    s3://bucket/run.
    """

    folder: str | None = None
    hosts: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()

    def open_files(self, folder: str, names: Sequence[str]) -> list[FileIO]:
        """Open regular files for reading: the files `names` in the folder of a push. The caller closes the files.

        Opening a named pipe does not block. Raise PushError if the worker may not read the files. The error has the
        same text for every cause, so that a client cannot find out which files exist. The log contains the cause of the
        error.
        """
        with self._refusing(folder), self._opened(folder) as parent:
            return self._open_in(parent, names)

    def open_if_there(self, folder: str, name: str) -> FileIO | None:
        """Open one file as `open_files` does. Return None if there is no such folder, or no such file in it."""
        with self._refusing(folder):
            try:
                with self._opened(folder) as parent:
                    return self._open_in(parent, [name])[0]
            except FileNotFoundError:
                return None

    def check_url(self, url: str) -> None:
        """Raise PushError unless a worker may read a chain of deltas at `url`."""
        path, allowed = url.partition("://")[2], [each.rstrip("/") for each in self.urls]
        is_plain = "::" not in url and ".." not in path.split("/") and not set("?#\\%") & set(url) and url.isprintable()
        if not is_plain or not any(url == each or url.startswith(f"{each}/") for each in allowed):
            raise PushError(
                f"chain: the worker may not read {url!a:.200}; start the worker with a --push-urls setting that "
                "includes this URL, or give a URL below an allowed URL, without '..', '::', '?', '#', '%' and "
                "backslashes"
            )

    def check_writable(self, folder: str) -> None:
        """Raise PushError unless the worker may write into a folder. The rules for writing are the same as the rules
        for reading a push.
        """
        try:
            with self._opened(folder) as opened:
                if self.folder is None:
                    check_owner(os.fstat(opened), "the folder")
        except (OSError, ValueError) as error:
            log.warning("writing weights into %r refused: %s", folder, error)
            raise PushError(
                f"disk: cannot write into {folder}; choose a folder inside the worker's --push-folder. Without "
                f"--push-folder, the folder must belong to the worker's user (uid {os.geteuid()}), and no other user "
                "may write it. The worker's log has the cause"
            ) from None

    def check_host(self, host: str, transport: str) -> None:
        """Raise PushError unless a worker may connect to `host` for a push by `transport`. `host` is an IP or a name.
        Does no DNS lookup.
        """
        if host == "localhost" or _is_loopback(host) or any(_covers(entry, host) for entry in self.hosts):
            return
        raise PushError(
            f"{transport}: the worker may not connect to the host {host!r}, which is not in its push_hosts; start the "
            "worker with a --push-hosts setting that includes this host, or push from an allowed host"
        )

    @contextmanager
    def _refusing(self, folder: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            log.warning("push by disk from %r refused: %s", folder, error)
            raise PushError(
                f"disk: cannot read a push from {folder}. If the worker has --push-folder, use a folder inside that "
                "folder. Without --push-folder, the folder and its files must belong to the worker's user (uid "
                f"{os.geteuid()}), and no other user may write them. The worker's log has the cause"
            ) from None

    @contextmanager
    def _opened(self, folder: str) -> Iterator[int]:
        opened = self._open_folder(folder)
        try:
            yield opened
        finally:
            os.close(opened)

    def _open_folder(self, folder: str) -> int:
        if self.folder is not None:
            return _open_inside(self.folder, folder)
        return os.open(folder, _FOLDER)

    def _open_in(self, parent: int, names: Sequence[str]) -> list[FileIO]:
        """Open the files, then check the open files themselves, so that no file can be replaced between the two
        steps.
        """
        if self.folder is None:
            check_owner(os.fstat(parent), "the folder")
        with ExitStack() as opened:
            files = [opened.enter_context(_open_file(name, parent)) for name in names]
            for name, file in zip(names, files, strict=True):
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise PermissionError(f"{name} is not a regular file")
                if self.folder is None:
                    check_owner(status, name)
            opened.pop_all()
        return files


def _open_inside(root: str, folder: str) -> int:
    """Open `folder` step by step from `root`, without following links. The result is inside `root`, even if folders are
    renamed.
    """
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


def check_owner(status: os.stat_result, name: str) -> None:
    """Raise PermissionError unless a file or folder belongs to this process's user and no other user can write it."""
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{name} belongs to uid {status.st_uid}")
    if status.st_mode & _WRITABLE_BY_OTHERS:
        raise PermissionError(
            f"{name} has mode {stat.S_IMODE(status.st_mode):04o}: other users can write it; chmod go-w"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _covers(entry: str, host: str) -> bool:
    """Return whether an entry of `hosts` is this host, or a network that contains this host."""
    if entry == host:
        return True
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False
