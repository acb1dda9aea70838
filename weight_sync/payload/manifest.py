"""What a push of weights says about itself: the pieces of tensors, the buckets they travel in, and by which way; what
it must bring (`Parameters`), and the words for what is wrong with it.

Owns the vocabulary that publisher, protocol and receiver share, and the checksum of host memory. A push carries every
parameter of the model exactly once, whole or in parts, in the dtype that the worker holds it in; one of adapters alone
says instead which parameters stay what they were. Its tensors are cut into pieces of whole rows (or lists of changed
elements), and the pieces are packed into buckets of bounded size. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, Protocol, TypeAlias

import xxhash
from pydantic import BaseModel, ConfigDict, FailFast, Field, PlainSerializer, PlainValidator, ValidationError

from trueroll.errors import PushError

from ...kernels.spellings import Parts, Spellings

ROW_MULTIPLE = 16
"""Pieces of a matrix begin at multiples of so many rows, since native kernels store that many side by side."""
ALIGNMENT = 64
"""Pieces begin at multiples of so many bytes in their bucket."""
MOST_UNDER_WAY = 2
"""How many buckets a trainer may have announced that are not answered yet."""
MAX_NAME_CHARS = 512
MAX_PATH_CHARS = 4096
MOST_PIECES = 8192
"""In one bucket, so that its message stays short."""

Count = Annotated[int, Field(ge=0, lt=2**63)]
LAST_VERSION = 2**63 - 2
"""The greatest version of weights. 2**63 - 1, the greatest int64, is refused: no version could follow it."""
Version = Annotated[int, Field(ge=0, le=LAST_VERSION)]
Checksum = Annotated[int, Field(ge=0, lt=2**64)]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
Shape: TypeAlias = Annotated[tuple[Count, ...], FailFast(), Field(min_length=1, max_length=8)]
PushId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Gpu = Annotated[str, Field(pattern=r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")]
"""The UUID of a GPU, the same in every process that uses it."""
Kin = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""Equal for workers that may share the memory of their weights."""
IPC_HANDLE_BYTES = 64
SlotBytes = Annotated[int, Field(ge=1, lt=2**40, multiple_of=ALIGNMENT)]
NumSlots = Annotated[int, Field(ge=1, le=2**16)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Rows(_Part):
    """Rows [start, start + length) of the tensor `name`, whose whole shape is `shape`, as bytes of its dtype.

    They lie at [offset, offset + num_bytes) of the bucket. The pieces of a tensor come in the order of its rows.
    `checksum`: None where the bucket has a word sum.
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
    """Changed elements of the tensor `name`: `count` ascending flat indices, int32, then as many values.

    `total`: how many elements of the tensor change in the whole push, over all its pieces; 0 if it is unchanged.
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
    """`num_bytes` bytes that travel at once, and the pieces in them. `index` counts the buckets of a push from 0.

    In host memory each piece has the checksum of its bytes. In the memory of a GPU, where there are only `Rows`, the
    bucket has one of all its bytes instead, gaps between pieces included: `word_sum`, as `tensors.word_sum` defines it.
    """

    index: Count
    num_bytes: Count
    pieces: Annotated[tuple[Piece, ...], FailFast(), Field(max_length=MOST_PIECES)]
    word_sum: Checksum | None = None


CollectiveBackend: TypeAlias = Literal["gloo", "nccl"]


class CollectiveSource(_Part):
    """A process group around the store at `host`:`port`. Buckets are broadcast from rank 0; the reader is `rank`.

    `backend`: gloo for buckets in host memory, nccl for buckets in the memory of GPUs.
    """

    kind: Literal["collective"] = "collective"
    backend: CollectiveBackend = "gloo"
    host: Annotated[str, Field(max_length=MAX_NAME_CHARS)]
    port: Annotated[int, Field(ge=1, le=65535)]
    rank: Annotated[int, Field(ge=1, lt=2**16)]
    world_size: Annotated[int, Field(ge=2, le=2**16)]


class SharedSource(_Part):
    """The POSIX shared memory `name` with slots of `slot_bytes`: bucket i lies in slot i modulo `num_slots`."""

    kind: Literal["shared"] = "shared"
    name: Annotated[str, Field(pattern=r"^trueroll-[0-9a-f]{32}$")]
    slot_bytes: SlotBytes
    num_slots: NumSlots


class CudaIpcSource(_Part):
    """Memory of the GPU `gpu`, shared by the CUDA IPC handle `handle`, with slots as in `SharedSource`."""

    kind: Literal["cuda_ipc"] = "cuda_ipc"
    gpu: Gpu
    handle: Annotated[bytes, Field(min_length=IPC_HANDLE_BYTES, max_length=IPC_HANDLE_BYTES)]
    slot_bytes: SlotBytes
    num_slots: NumSlots


class DiskSource(_Part):
    """A folder with a `MODEL_FILE` and a `MANIFEST_FILE`, readable where the worker runs. It has no buckets."""

    kind: Literal["disk"] = "disk"
    folder: Annotated[str, Field(max_length=MAX_PATH_CHARS)]


class LentSource(_Part):
    """The staged weights of another worker of the same `kin`, which lends them as they lie in its memory: `num_bytes`
    in a file without a name, number `inode`, that its process `pid` has as descriptor `fd`. It has no buckets.
    """

    kind: Literal["lent"] = "lent"
    kin: Kin
    pid: Count
    fd: Count
    inode: Count
    num_bytes: Count


Source: TypeAlias = Annotated[
    CollectiveSource | SharedSource | CudaIpcSource | DiskSource | LentSource, Field(discriminator="kind")
]

MODEL_FILE = "model.safetensors"
MANIFEST_FILE = "trueroll_push.json"


def first_fault(error: ValidationError) -> str:
    """Where the first fault is, and what it is, in few characters. Cheap only where a value can have few faults."""
    fault = error.errors()[0]
    return f"{ascii('.'.join(map(str, fault['loc']))[:80])}: {fault['msg']:.300}"


def _checksums(values: Any) -> dict[str, int]:
    """Stops at the first that is none: pydantic would describe them all."""
    if not isinstance(values, dict):
        raise ValueError("expected a map")
    for name, value in values.items():
        if type(value) is not int or not 0 <= value < 2**64:
            raise ValueError(f"expected an integer in [0, 2**64) for {ascii(name[:80])}, found {value!a:.80}")
    return values


_AS_IT_IS = PlainSerializer(lambda value: value)


def _scales(values: Any) -> tuple[tuple[str, int, float], ...]:
    """Stops at the first that is none, as `_checksums` does."""
    for value in _rows(values, 3):
        name, rank, scale = value
        if type(rank) is not int or not 1 <= rank < 2**16 or type(scale) is not float or not math.isfinite(scale):
            raise ValueError(f"expected a rank and a finite scale for {ascii(name[:80])}, found {value[1:]!a:.80}")
    return tuple(map(tuple, values))


def _base(values: Any) -> tuple[tuple[str, int], ...] | None:
    return None if values is None else tuple(_checksums(dict(_rows(values, 2))).items())


def _rows(values: Any, length: int) -> list[Any] | tuple[Any, ...]:
    """Of a name, which comes once, and other values."""
    if not isinstance(values, list | tuple):
        raise ValueError("expected an array")
    names: set[str] = set()
    for value in values:
        if not isinstance(value, list | tuple) or len(value) != length or not isinstance(value[0], str):
            raise ValueError(f"expected a name and {length - 1} more, found {value!a:.80}")
        if value[0] in names:
            raise ValueError(f"expected each name once, found {ascii(value[0][:80])} twice")
        names.add(value[0])
    return values


class Adapters(_Part):
    """What a push adds to weights W [N, K]: scale * (B [N, rank] times A [rank, K]), by `Backend.merge`.

    `weights`: of each W its name, rank and scale; A and B come as tensors (`factor_names`). `base`: None for a push
    that brings every parameter; else names and checksums: it brings those parameters alone that are not named here,
    beside A and B, and the others are those that the worker had before adapters, whose bytes have these checksums.
    """

    weights: Annotated[tuple[tuple[str, int, float], ...], PlainValidator(_scales), _AS_IT_IS]
    base: Annotated[tuple[tuple[str, int], ...] | None, PlainValidator(_base), _AS_IT_IS] = None

    @property
    def is_alone(self) -> bool:
        """Whether the weights do not come with it."""
        return self.base is not None


def factor_names(name: str) -> tuple[str, str]:
    """What the tensors A and B of a weight's adapter are called."""
    stem = name.removesuffix("weight")
    return f"{stem}lora_A.weight", f"{stem}lora_B.weight"


class FolderManifest(_Part):
    """The content of `MANIFEST_FILE`: which push a folder holds. `checksums`: of each tensor's bytes, by name."""

    format: Literal[1] = 1
    push_id: PushId
    weight_version: Version
    dtype: str
    checksums: Annotated[dict[str, int], PlainValidator(_checksums)]
    adapters: Adapters | None = None


def checksum(data: Any) -> int:
    """The 64-bit XXH3 hash (Collet) of a contiguous buffer: memoryview, bytes or a numpy array."""
    return xxhash.xxh3_64_intdigest(data)


_MOST_NAMES = 10
_MOST_WORDS = 32


class Parameters(Protocol):
    """The parameters that a push must bring. `dtypes`: of those that have another than the push; `parts`: what may come
    in place of some; `tied` and `ignored`: names that may be left out. See `Weights`.
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


def check_complete(names: Collection[str], wanted: Parameters) -> None:
    """Raise PushError unless of every parameter either its own name or those of all its parts are among the names."""
    spellings = spellings_of(wanted)
    parts = spellings.parts_among(names)
    if doubled := sorted(name for name in parts if name in names):
        raise PushError(
            f"push: expected each parameter whole or in parts, but both ways came {list_names(doubled)}; leave one out"
        )
    missing = sorted(name for name in wanted.shapes if name not in names and name not in parts)
    missing += [
        next(part for part in spellings.parts(name) if part not in came)
        for name, came in parts.items()
        if len(came) < spellings.count(name)
    ]
    if missing:
        raise PushError(f"push: expected every parameter, but missing are {list_names(missing)}; push all of them")


def spellings_of(wanted: Parameters) -> Spellings:
    """The names that parameters may come by."""
    return Spellings(wanted.shapes, wanted.parts)


def own_dtypes(wanted: Parameters) -> dict[str, str]:
    """`Parameters.dtypes` by all names that these parameters and their parts may come by."""
    spellings = spellings_of(wanted)
    return {each: dtype for name, dtype in wanted.dtypes.items() for each in (name, *spellings.parts(name))}


def describe_unknown(name: str, wanted: Parameters) -> str:
    """What is wrong with a name that is none of the parameters, and what to do."""
    if name in wanted.tied:
        return f"tensor {name}: expected to be left out, for it is tied to {wanted.tied[name]}; send that one alone"
    if name in wanted.ignored:
        return f"tensor {name}: expected to be left out, for the worker's model does not use it"
    spellings, words = spellings_of(wanted), name.split(".")[:_MOST_WORDS]
    inners = (name.split(".", count)[-1] for count in range(1, len(words)))
    inner = next((inner for inner in inners if spellings.shape(inner) is not None), None)
    if inner is not None:
        prefix = name.removesuffix(inner)[:80]
        return f"tensor {name:.80}: unknown, but {inner} is known; push what is inside the wrapper that adds {prefix!r}"
    return f"tensor {name:.80}: unknown to the worker's model; check that trainer and worker have the same model"


def describe_tie(name: str, other: str) -> str:
    """What is wrong with a tensor that has other values than the one that the worker has tied it to."""
    return (
        f"tensor {name}: expected the values of {other}, which the worker has tied to it, found others; tie them in "
        "the trainer too, or serve a model whose config.json does not tie them"
    )


def list_names(names: list[str]) -> str:
    """Up to ten of the names, and how many there are beside."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
