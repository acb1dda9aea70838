"""The fields of requests to vLLM's and SkyRL's paths, and the paths that are refused."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from trueroll.errors import InvalidRequestError, brief

from ....weight_sync.deltas.places import is_url
from ....weight_sync.deltas.skyrl import skyrl_folder
from ....weight_sync.payload.manifest import MAX_PATH_CHARS, AdapterName, Version
from ..adapters import FolderPath
from ..errors import HttpError
from ..fields import Fields, checked, given

_ADVICE = (
    'write a checkpoint and send update_info {"path": FOLDER}, set SkyRL\'s weight_sync_backend to delta, or push with '
    "WeightPublisher (see docs/skyrl.md)"
)
REFUSED = {
    "/start_draft_weight_update": "a separate update of a draft model is not supported; update the model only",
    "/collective_rpc": "calls functions of vLLM's workers by name; use the paths of docs/skyrl.md",
    "/update_weight_version": "a version names the weights that were pushed with it; push weights as a new version",
    "/skyrl/v1/generate": (
        "is not supported; turn off enable_return_routed_experts and enable_return_sample_support_set in SkyRL, "
        "which then calls /inference/v1/generate"
    ),
}
"""Paths of vLLM and SkyRL that are refused, with the reason or the alternative."""


def _absolute(place: str) -> str:
    if not (place.startswith("/") or is_url(place)) or "\0" in place:
        raise ValueError(f"must be an absolute path or a URL (got {brief(place)})")
    return place


Place = Annotated[str, Field(max_length=MAX_PATH_CHARS), AfterValidator(_absolute)]


class InitFields(Fields):
    """Fields of `/init_weight_transfer_engine`. `init_info`: see `check_init`."""

    init_info: dict[str, Any]


class InitInfo(Fields):
    """The `init_info` that SkyRL sends before updates by deltas. The fields of `init_info` have no effect, because the
    worker reads the deltas directly into memory.
    """

    base_model_path: str = ""
    local_checkpoint_dir: str = ""
    cloud_download_workers: int = 0
    checkpoint_load_format: str = ""
    multi_thread_safetensors_max_workers: int = 0


class VersionInfo(Fields):
    """Fields of `/fetch_weights`, and of the `update_info` that SkyRL sends for deltas.

    `target_version`: the version to stage or to commit. `sync_dir`: the folder or URL of the chain of deltas, in which
    each version has a folder. `uri`: the folder of the version in the chain; can be given instead of `sync_dir`.
    `version`: if given, must be equal to `target_version`.
    """

    target_version: Version
    version: Version | None = None
    sync_dir: Place | None = None
    uri: Place | None = None

    @property
    def place(self) -> str:
        """The folder or URL of the chain. Raise InvalidRequestError if the fields contradict each other."""
        if self.version not in (None, self.target_version):
            raise _contradiction("version", f"target_version is {self.target_version}", self.version)
        folder = skyrl_folder(self.target_version)
        named = None if self.sync_dir is None else self.sync_dir.rstrip("/")
        if self.uri is None:
            if named is None:
                raise InvalidRequestError("sync_dir: is missing; give the folder of the deltas", field="sync_dir")
            return named
        place = self.uri.removesuffix(f"/{folder}")
        if place == self.uri or named not in (None, place):
            raise _contradiction("uri", f"it must be sync_dir with /{folder}", self.uri)
        return place


class PathInfo(Fields):
    """The `update_info` that a trainer sends for a checkpoint. `path`: the folder with the checkpoint, on the front
    end's machine.
    """

    path: FolderPath


class InfoFields(Fields):
    """Fields of `/update_weights` between `/start_weight_update` and `/finish_weight_update`. `update_info`: see
    `read_update`.
    """

    update_info: dict[str, Any]


class FinishFields(Fields):
    """Fields of `/finish_weight_update`. `weight_version`: the version as a decimal number; None means the fetched
    version or, for a checkpoint, the served version plus 1.
    """

    weight_version: str | None = None


class NoFields(Fields):
    """A request that must not have any fields."""


class LoadFields(Fields):
    """Fields of `/skyrl/v1/load_lora_adapter`. The adapter `lora_name` is loaded from the folder `lora_path`, and
    replaces a loaded adapter with the same name.
    """

    lora_name: AdapterName
    lora_path: FolderPath


def check_init(body: dict[str, Any]) -> None:
    """Raise HttpError if the body of a request to `/init_weight_transfer_engine` asks for a transfer between GPUs."""
    info = checked(InitFields, body).init_info
    _refuse_others("init_info", info, InitInfo)
    checked(InitInfo, given(info, set(), {}))


def read_update(body: dict[str, Any]) -> VersionInfo | PathInfo:
    """Return the version or the folder that the body of a request to `/update_weights` names. Raise HttpError if the
    fields are not supported.
    """
    info = checked(InfoFields, body).update_info
    kind: type[VersionInfo | PathInfo] = PathInfo if "path" in info else VersionInfo
    _refuse_others("update_info", info, kind)
    return checked(kind, given(info, set(), {}))


def _refuse_others(name: str, info: dict[str, Any], kind: type[Fields]) -> None:
    """Raise HttpError if `info` has fields of vLLM's other transfers, which need NCCL, CUDA IPC or RDMA."""
    if others := sorted(info.keys() - kind.model_fields.keys()):
        text = f"{name}: {brief(others[0])} is for transfers by NCCL, CUDA IPC or RDMA, which are refused; {_ADVICE}"
        raise HttpError(400, text, field=name, code="unsupported_parameter")


def _contradiction(name: str, expected: str, value: Any) -> InvalidRequestError:
    return InvalidRequestError(f"{name}: {brief(value)} is wrong, because {expected}", field=name, value=value)
