"""Finds the folder of the model or configuration that a user names.

Owns nothing. Imports torch and the hub's client only when a model must be converted or downloaded, so that a wrong name
fails at once.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path

from trueroll.errors import ModelError, said

from .files import local_path
from .smollm2 import SMOLLM2, smollm2_folder

HUB = "hf://"
CONFIG_FILE = "config.json"
_CONFIGS = Path(__file__).parent / "configs"
_ON_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+\Z", re.ASCII)
_DOWNLOADED = ["*.json", "*.jinja", "*.txt", "*.model", "model*.safetensors"]
_MAX_NEAR_CHARS = 100


def resolve_model(name: str) -> Path:
    """Return the folder of a model.

    `name`: `smollm2`, a local folder, or a model of the Hugging Face hub in the form `hf://ORG/NAME` or
    `hf://ORG/NAME@REVISION`. A model of the hub is downloaded if necessary. No code is downloaded. Raise ModelError if
    the folder does not exist, or if the download fails.
    """
    check_model(name)
    if name == SMOLLM2:
        return smollm2_folder()
    return _download(name) if name.startswith(HUB) else Path(name).expanduser()


def check_model(name: str) -> None:
    """Raise ModelError if the name is malformed or the folder does not exist. Downloads and converts nothing."""
    if name.startswith(HUB):
        _split(name)
        return
    path = local_path(name)
    if name == SMOLLM2 or (path is not None and path.is_dir()):
        return
    found = "there is no such folder" if path is None else "this is a file"
    hint = _suggestion(name, [SMOLLM2])
    if path is None and _ON_HUB.match(name):
        hint = f"; a model of the Hugging Face hub is written {HUB}{name}"
    raise ModelError(f"{name}: a model is a folder in Hugging Face format, but {found}; check the path{hint}")


def find_config(name: str) -> Path:
    """Return the folder of a configuration.

    `name`: a config.json, a folder with a config.json, or the name of a shipped configuration. Raise ModelError if
    `name` has none of these forms.
    """
    shipped = {folder.name: folder for folder in _CONFIGS.iterdir()}
    path = local_path(name)
    folder = shipped.get(name) or (path.parent if path is not None and path.name == CONFIG_FILE else path)
    if folder is None or not (folder / CONFIG_FILE).is_file():
        raise ModelError(
            f"{name}: must be a {CONFIG_FILE}, a folder with a {CONFIG_FILE}, or one of {', '.join(sorted(shipped))}; "
            f"check the path{_suggestion(name, shipped)}"
        )
    return folder


def _suggestion(name: str, known: Collection[str]) -> str:
    """Return a suggestion for the end of an error: the known name most similar to `name`; empty if none is similar."""
    near = get_close_matches(name.lower()[:_MAX_NEAR_CHARS], known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _split(name: str) -> tuple[str, str | None]:
    """Return the repository and the revision of a model on the hub. Raise ModelError if the name is malformed."""
    repository, at, revision = name.removeprefix(HUB).partition("@")
    if not _ON_HUB.match(repository) or bool(at) != bool(revision):
        raise ModelError(
            f"{name}: is not the name of a model on the Hugging Face hub; write {HUB}ORG/NAME or "
            f"{HUB}ORG/NAME@REVISION, where the revision is a commit, a tag or a branch"
        )
    return repository, revision or None


def _download(name: str) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    repository, revision = _split(name)
    try:
        folder = huggingface_hub.snapshot_download(
            repository, revision=revision, allow_patterns=_DOWNLOADED, ignore_patterns=["*/*"]
        )
    except (OSError, ValueError, HfHubHTTPError) as error:
        cause = said(error).rstrip(".")
        raise ModelError(
            f"{name}: the download failed: {cause}; check the name and the network, or give a local folder"
        ) from error
    return Path(folder)
