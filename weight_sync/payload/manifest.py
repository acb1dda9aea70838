"""The description of a push: pieces of tensors, buckets, sources, and the parameters that the push must contain.

Owns the types that publisher, protocol and receiver share, the texts of errors about names, and the checksum of host
memory. A push contains every parameter of the model exactly once, whole or in parts, in the dtype that the worker uses.
An adapters-only push contains only some parameters, and lists the parameters that stay unchanged. Tensors are cut into
pieces, which consist of whole rows or of changed elements. Pieces are packed into buckets of bounded size. Imports no
torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, Protocol, TypeAlias

import xxhash
from pydantic import BaseModel, ConfigDict, FailFast, Field, PlainSerializer, PlainValidator, ValidationError

from trueroll.errors import PushError

from ...kernels.spellings import Parts, Spellings

ROW_MULTIPLE = 128
"""A piece of a matrix begins at a multiple of this many rows. Native kernels store 16 rows side by side, and workers
quantize blocks of 128 rows.
"""
ALIGNMENT = 64
"""A piece begins at a multiple of this many bytes in its bucket."""
MOST_UNDER_WAY = 2
"""Limit on buckets in flight: announced by the trainer, but not yet acknowledged by the workers. `relay` has a limit of
its own.
"""
MAX_NAME_CHARS = 512
MAX_PATH_CHARS = 4096
MOST_PIECES = 8192
"""Limit on the pieces in a bucket, and thereby on the length of the bucket's message."""

Count = Annotated[int, Field(ge=0, lt=2**63)]
LAST_VERSION = 2**63 - 2
"""The largest weight version. 2**63 - 1, the largest int64, is refused because no version could follow it."""
Version = Annotated[int, Field(ge=0, le=LAST_VERSION)]
Checksum = Annotated[int, Field(ge=0, lt=2**64)]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
Shape: TypeAlias = Annotated[tuple[Count, ...], FailFast(), Field(min_length=1, max_length=8)]
PushId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
AdapterName = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]{1,256}$")]
"""The name of a LoRA adapter that a worker serves beside its base weights."""
Gpu = Annotated[str, Field(pattern=r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")]
"""The UUID of a GPU, the same in every process that uses it."""
Kin = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""An identifier that is equal for workers that may share the memory of their weights."""
IPC_HANDLE_BYTES = 64
SlotBytes = Annotated[int, Field(ge=1, lt=2**40, multiple_of=ALIGNMENT)]
NumSlots = Annotated[int, Field(ge=1, le=2**16)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Rows(_Part):
    """Rows [start, start + length) of the tensor `name`, as bytes in the tensor's dtype.

    `shape`: the shape of the whole tensor. The bytes are at [offset, offset + num_bytes) of the bucket. The pieces of a
    tensor are sent in the order of the tensor's rows. `checksum`: checksum of the piece's bytes; None if the bucket
    has one checksum of all its bytes instead (`Bucket.word_sum`).
    """

    kind: Literal["rows"] = "rows"
    name: Name
    shape: Shape
    start: Count
    length: Count
    offset: Count
    num_bytes: Count
    checksum: Checksum | None


class Elements(_Part):
    """Changed elements of the tensor `name`: `count` ascending flat indices (int32), then `count` values.

    `total`: the number of the tensor's changed elements in all pieces of the push; 0 for an unchanged tensor.
    """

    kind: Literal["elements"] = "elements"
    name: Name
    shape: Shape
    count: Count
    total: Count
    offset: Count
    num_bytes: Count
    checksum: Checksum


Piece: TypeAlias = Annotated[Rows | Elements, Field(discriminator="kind")]


class Bucket(_Part):
    """A bucket: `num_bytes` bytes that are sent together, and the pieces that these bytes hold. `index`: number of the
    bucket in the push, counted from 0.

    In host memory, each piece has a checksum of its bytes. In GPU memory, all pieces are `Rows`, and the bucket has one
    checksum of all its bytes instead: `word_sum` (see `tensors.word_sum`). The word sum includes the gap bytes between
    pieces.
    """

    index: Count
    num_bytes: Count
    pieces: Annotated[tuple[Piece, ...], FailFast(), Field(max_length=MOST_PIECES)]
    word_sum: Checksum | None = None


CollectiveBackend: TypeAlias = Literal["gloo", "nccl"]


class CollectiveSource(_Part):
    """A process group. The members of the group meet at the store `host`:`port`. Rank 0 broadcasts the buckets; the
    reader has rank `rank`.

    `backend`: gloo for buckets in host memory, nccl for buckets in GPU memory.
    """

    kind: Literal["collective"] = "collective"
    backend: CollectiveBackend = "gloo"
    host: Annotated[str, Field(max_length=MAX_NAME_CHARS)]
    port: Annotated[int, Field(ge=1, le=65535)]
    rank: Annotated[int, Field(ge=1, lt=2**16)]
    world_size: Annotated[int, Field(ge=2, le=2**16)]


class RelaySource(_Part):
    """A trainer at `host`:`port`. The workers receive the buckets from the trainer, and pass the buckets on to each
    other.

    `token`: a secret of the push. All members of the push prove to each other that they know the secret. `position`:
    the worker's index among the workers that get buckets. `num_slots`: limit on buckets in flight.
    """

    kind: Literal["relay"] = "relay"
    host: Annotated[str, Field(max_length=MAX_NAME_CHARS)]
    port: Annotated[int, Field(ge=1, le=65535)]
    token: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    position: Annotated[int, Field(ge=0, lt=2**16)]
    num_slots: Annotated[int, Field(ge=1, le=16)]


class SharedSource(_Part):
    """The POSIX shared memory `name`, divided into slots of `slot_bytes` bytes. Bucket i is in slot i % `num_slots`."""

    kind: Literal["shared"] = "shared"
    name: Annotated[str, Field(pattern=r"^trueroll-[0-9a-f]{32}$")]
    slot_bytes: SlotBytes
    num_slots: NumSlots


class CudaIpcSource(_Part):
    """Memory of the GPU `gpu`, shared through the CUDA IPC handle `handle`. For slots see `SharedSource`."""

    kind: Literal["cuda_ipc"] = "cuda_ipc"
    gpu: Gpu
    handle: Annotated[bytes, Field(min_length=IPC_HANDLE_BYTES, max_length=IPC_HANDLE_BYTES)]
    slot_bytes: SlotBytes
    num_slots: NumSlots


class DiskSource(_Part):
    """A folder with a `MODEL_FILE` and a `MANIFEST_FILE`, readable on the worker's machine. A disk source has no
    buckets.
    """

    kind: Literal["disk"] = "disk"
    folder: Annotated[str, Field(max_length=MAX_PATH_CHARS)]


class PeftSource(_Part):
    """A folder with a LoRA adapter in PEFT's format, readable on the worker's machine. A PEFT source has no buckets.

    Only a push with a named adapter can use this source. The folder does not say which base the adapter was trained on.
    """

    kind: Literal["peft"] = "peft"
    folder: Annotated[str, Field(max_length=MAX_PATH_CHARS)]


class ChainSource(_Part):
    """Folders of full checkpoints and deltas (`weight_sync.deltas`). `place`: the folder or the URL that contains these
    folders. The worker stages the version of the push. The source has no buckets.
    """

    kind: Literal["chain"] = "chain"
    place: Annotated[str, Field(max_length=MAX_PATH_CHARS)]


class LentSource(_Part):
    """The staged weights of another worker with the same `kin`. The other worker lends its weights, so that this worker
    can map them without a copy.

    The weights are `num_bytes` bytes in an unnamed file with inode number `inode`, which process `pid` has open as file
    descriptor `fd`. `has_optional`: whether the weights include the optional parameters. A push through lent memory has
    no buckets.
    """

    kind: Literal["lent"] = "lent"
    kin: Kin
    pid: Count
    fd: Count
    inode: Count
    num_bytes: Count
    has_optional: bool = True


Source: TypeAlias = Annotated[
    CollectiveSource | RelaySource | SharedSource | CudaIpcSource | DiskSource | PeftSource | ChainSource | LentSource,
    Field(discriminator="kind"),
]

MODEL_FILE = "model.safetensors"
MANIFEST_FILE = "trueroll_push.json"


def first_fault(error: ValidationError) -> str:
    """Return the location and message of the first validation error, shortened. The function is slow for data with many
    validation errors.
    """
    fault = error.errors()[0]
    return f"{ascii('.'.join(map(str, fault['loc']))[:80])}: {fault['msg']:.300}"


def _checksums(values: Any) -> dict[str, int]:
    """Validate a map of checksums. Stop at the first error, since pydantic would describe every error."""
    if not isinstance(values, dict):
        raise ValueError("expected a map")
    for name, value in values.items():
        if type(value) is not int or not 0 <= value < 2**64:
            raise ValueError(f"the checksum of {ascii(name[:80])} must be an integer in [0, 2**64) (got {value!a:.80})")
    return values


_AS_IT_IS = PlainSerializer(lambda value: value)


def _scales(values: Any) -> tuple[tuple[str, int, float], ...]:
    """Validate rows that consist of a name, a rank and a scale. Stop at the first error, as `_checksums` does."""
    for value in _rows(values, 3):
        name, rank, scale = value
        if type(rank) is not int or not 1 <= rank < 2**16 or type(scale) is not float or not math.isfinite(scale):
            raise ValueError(f"{ascii(name[:80])} needs an integer rank and a finite scale (got {value[1:]!a:.80})")
    return tuple(map(tuple, values))


def _base(values: Any) -> tuple[tuple[str, int], ...] | None:
    return None if values is None else tuple(_checksums(dict(_rows(values, 2))).items())


def _rows(values: Any, length: int) -> list[Any] | tuple[Any, ...]:
    """Validate an array of rows. Each row must have a unique name and `length` - 1 other values."""
    if not isinstance(values, list | tuple):
        raise ValueError("expected an array")
    names: set[str] = set()
    for value in values:
        if not isinstance(value, list | tuple) or len(value) != length or not isinstance(value[0], str):
            raise ValueError(f"each row must have a name and {length - 1} other values (got {value!a:.80})")
        if value[0] in names:
            raise ValueError(f"the name {ascii(value[0][:80])} appears twice")
        names.add(value[0])
    return values


class Adapters(_Part):
    """The adapters of a push. Each adapter adds scale * (B [N, rank] times A [rank, K]) to a weight W [N, K]. See
    `Backend.merge`.

    `weights`: (name, rank, scale) for each W; A and B are sent as tensors (see `factor_names`). `base`: None for a push
    with every parameter; in an adapters-only push, (name, checksum) of each parameter that the push does not send. For
    the parameters in `base`, the worker uses the values that it had before any adapter was added. The checksums of the
    worker's values must match the checksums in `base`.
    """

    weights: Annotated[tuple[tuple[str, int, float], ...], PlainValidator(_scales), _AS_IT_IS]
    base: Annotated[tuple[tuple[str, int], ...] | None, PlainValidator(_base), _AS_IT_IS] = None

    @property
    def is_alone(self) -> bool:
        """Return whether the push contains adapters but no base weights."""
        return self.base is not None


def factor_names(name: str) -> tuple[str, str]:
    """Return the names of the tensors A and B of a weight's adapter."""
    stem = name.removesuffix("weight")
    return f"{stem}lora_A.weight", f"{stem}lora_B.weight"


class FolderManifest(_Part):
    """The content of `MANIFEST_FILE`: the push that a folder holds. `checksums`: checksum of each tensor, by name."""

    format: Literal[1] = 1
    push_id: PushId
    weight_version: Version
    dtype: str
    checksums: Annotated[dict[str, int], PlainValidator(_checksums)]
    adapters: Adapters | None = None


def checksum(data: Any) -> int:
    """Return the 64-bit XXH3 hash (Collet) of a contiguous buffer: memoryview, bytes or a numpy array."""
    return xxhash.xxh3_64_intdigest(data)


_MOST_NAMES = 10
_MOST_WORDS = 32


class Parameters(Protocol):
    """The parameters that a push must contain.

    `dtype`: dtype of the push. `dtypes`: the parameters that are not pushed in `dtype`, as a map from a parameter's
    name to its own dtype. `parts`: the parts that may be sent instead of a whole parameter. `tied`, `ignored`: names
    that a push may omit. `optional`: parameters that a push may omit, but only all of them together. See `Weights`.
    """

    @property
    def dtype(self) -> str: ...
    @property
    def dtypes(self) -> Mapping[str, str]: ...
    @property
    def shapes(self) -> Mapping[str, Shape]: ...
    @property
    def parts(self) -> Parts: ...
    @property
    def tied(self) -> Mapping[str, str]: ...
    @property
    def ignored(self) -> Collection[str]: ...
    @property
    def optional(self) -> Collection[str]: ...


def check_complete(names: Collection[str], wanted: Parameters) -> None:
    """Raise PushError unless `names` lists every parameter exactly once, either by the parameter's name or by the names
    of all its parts. All optional parameters together may be missing.
    """
    spellings = spellings_of(wanted)
    parts = spellings.parts_among(names)
    if doubled := sorted(name for name in parts if name in names):
        text = f"push: tensors sent both whole and in parts: {list_names(doubled)}; send each tensor whole or in parts"
        raise PushError(text)
    has_optional = any(name in names or name in parts for name in wanted.optional)
    needed = [name for name in wanted.shapes if has_optional or name not in wanted.optional]
    missing = sorted(name for name in needed if name not in names and name not in parts)
    missing += [
        next(part for part in spellings.parts(name) if part not in came)
        for name, came in parts.items()
        if len(came) < spellings.count(name)
    ]
    if missing:
        raise PushError(f"push: parameters are missing: {list_names(missing)}; push every parameter")


def spellings_of(wanted: Parameters) -> Spellings:
    """Return the names under which parameters may be sent."""
    return Spellings(wanted.shapes, wanted.parts)


def own_dtypes(wanted: Parameters) -> dict[str, str]:
    """Return the dtype of each parameter that is not pushed in the common dtype (`Parameters.dtypes`). The keys of the
    result are the names of the parameters that have a dtype of their own, and the names of their parts.
    """
    spellings = spellings_of(wanted)
    return {each: dtype for name, dtype in wanted.dtypes.items() for each in (name, *spellings.parts(name))}


def describe_unknown(name: str, wanted: Parameters) -> str:
    """Return an error text, with advice, for a name that is not a parameter's name."""
    if name in wanted.tied:
        return f"tensor {name}: is tied to {wanted.tied[name]}; leave it out and send only that tensor"
    if name in wanted.ignored:
        return f"tensor {name}: is not used by the worker's model; leave it out"
    spellings, words = spellings_of(wanted), name.split(".")[:_MOST_WORDS]
    inners = (name.split(".", count)[-1] for count in range(1, len(words)))
    inner = next((inner for inner in inners if spellings.shape(inner) is not None), None)
    if inner is not None:
        prefix = name.removesuffix(inner)[:80]
        return f"tensor {name:.80}: unknown, but {inner} is known; push the module inside the wrapper ({prefix!r})"
    return f"tensor {name:.80}: unknown to the worker's model; check that trainer and worker have the same model"


def describe_tie(name: str, other: str) -> str:
    """Return an error text for a tensor that differs from another tensor although the worker ties the two."""
    return (
        f"tensor {name}: differs from {other}, but the worker ties these tensors; tie them in the trainer too, or "
        "serve a model with a config.json that does not tie them"
    )


def list_names(names: list[str]) -> str:
    """Return a text with at most ten of `names`, followed by the number of omitted names."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
