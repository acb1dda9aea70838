"""The folder in which a worker saves its weights, so that the worker can serve them again after a restart.

Owns the lock on the folder, the record of the saved weights, and all names in the folder. Does not own the content of
the weights (`saver`). Imports no torch.

    lock                          locked while a worker uses the folder
    saved.json                    the record, which names the saved push
    weights/version-V-PUSH        the weights, in the format of a push by disk
    base/version-V-PUSH           the weights before adapters were added, in the same format; only with adapters

Guarantees:

- The record names only folders that are complete and synced to the disk. If the process or the machine stops at any
  moment, the folder has either the old record or the new record, and all folders that this record names.
- At most one worker on a machine uses the folder. The lock ends with the process, even if the process is killed.
- Nothing is written, read or removed in the folder except the four entries listed in this docstring. Names come from
  the push id and the version, never from a text in a file.
- The worker's user owns the folder and its files, and no other user can write them. The record is bounded before it is
  parsed.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import stat
from io import FileIO
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trueroll.errors import ConfigError

from ..payload.manifest import PushId, Version, first_fault
from ..transports.durable import PRIVATE, explained, sync
from ..transports.policy import check_owner

MOST_RECORD_BYTES = 2**16
_RECORD, _LOCK, _WEIGHTS, _BASE = "saved.json", "lock", "weights", "base"
_FOLDER_NAME = re.compile(r"version-\d+-[0-9a-f]{8}(\.tmp)?")
_FILE_MODE = 0o600


class SavedPush(BaseModel):
    """Id and version of a push that is saved."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    push_id: PushId
    weight_version: Version

    @property
    def name(self) -> str:
        """The name that `FolderWriter` gives to the folder of this push."""
        return f"version-{self.weight_version}-{self.push_id[:8]}"


class SavedRecord(BaseModel):
    """The saved weights. `model`, `dtype`, `quantization`: the worker's settings. `push`: the push that the weights
    come from. `base`: None if no adapters were added to the weights. Otherwise, the push after which the weights
    without adapters were saved; the name of the folder with the weights without adapters is `base.name`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1] = 1
    model: Annotated[str, Field(max_length=4096)]
    dtype: Annotated[str, Field(max_length=80)]
    quantization: Annotated[str, Field(max_length=80)]
    push: SavedPush
    base: SavedPush | None = None


class SavedFolder:
    """The folder `path`, which is created if it does not exist. `record`: the saved weights; None if there are none.

    Raise ConfigError if another worker uses the folder, if the folder or the record belongs to another user or can be
    written by another user, or if the record is invalid.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path).absolute()
        self._lock: int | None = None
        try:
            self._make()
            self._lock = self._take_lock()
            self.record = self._read_record()
            self.remove_others()
        except OSError as error:
            self.close()
            raise ConfigError(f"save_folder: cannot use {self._path} ({error}); give another folder") from None
        except BaseException:
            self.close()
            raise

    def __str__(self) -> str:
        return str(self._path)

    @property
    def record_path(self) -> Path:
        return self._path / _RECORD

    @property
    def weights(self) -> Path:
        """The parent folder of saved weights."""
        return self._path / _WEIGHTS

    @property
    def base(self) -> Path:
        """The parent folder of saved weights from before adapters were added."""
        return self._path / _BASE

    def replace_record(self, record: SavedRecord) -> None:
        """Make `record` the record, and remove all other weights. The folders that `record` names must be complete.
        Raise PushError if the record cannot be written.
        """
        new = self.record_path.with_name(f"{_RECORD}.tmp")
        with explained(self._path):
            with open(new, "w", encoding="utf-8", opener=_open_private) as file:
                file.write(record.model_dump_json())
                file.flush()
                os.fsync(file.fileno())
            new.replace(self.record_path)
            sync(self._path)
        self.record = record
        self.remove_others()

    def remove_others(self) -> None:
        """Remove all weights, finished or not, that the record does not name."""
        record = self.record
        for parent, saved in ((self.weights, record and record.push), (self.base, record and record.base)):
            for folder in parent.iterdir() if parent.is_dir() else ():
                is_ours = _FOLDER_NAME.fullmatch(folder.name) is not None and not folder.is_symlink()
                if is_ours and (saved is None or folder.name != saved.name):
                    shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Release the lock. Idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _make(self) -> None:
        for folder in (self._path, self.weights, self.base):
            folder.mkdir(PRIVATE, parents=folder is self._path, exist_ok=True)
            check_owner(folder.stat(), str(folder))
        sync(self._path)

    def _take_lock(self) -> int:
        # Forked processes do not inherit a lock of lockf. With flock, they would keep the lock of a killed worker.
        lock = _open_private(str(self._path / _LOCK), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            raise ConfigError(
                f"save_folder: another worker uses {self._path}; give each worker its own folder, or wait until the "
                "other worker has ended"
            ) from None
        return lock

    def _read_record(self) -> SavedRecord | None:
        if not os.path.lexists(self.record_path):
            return None
        with open(self.record_path, "rb", buffering=0, opener=_open_private) as file:
            text = _read_bounded(file, str(self.record_path))
        try:
            return SavedRecord.model_validate(json.loads(text.decode()))
        except (ValueError, RecursionError) as error:
            cause = first_fault(error) if isinstance(error, ValidationError) else f"{error!s:.300}"
            raise ConfigError(
                f"save_folder: {self.record_path} is not a record of saved weights: {cause}; remove {self._path} to "
                "start with the checkpoint"
            ) from None


def _read_bounded(file: FileIO, path: str) -> bytes:
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise PermissionError(f"{path} is not a regular file")
    check_owner(status, path)
    text = file.read(MOST_RECORD_BYTES + 1)
    if len(text) > MOST_RECORD_BYTES:
        raise ConfigError(
            f"save_folder: {path} has more than {MOST_RECORD_BYTES} bytes, so it is not a record of saved weights; "
            "give the folder of a worker"
        )
    return text


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, _FILE_MODE)
