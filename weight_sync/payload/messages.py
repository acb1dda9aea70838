"""The messages of a push, and the base types of all messages in the wire protocol.

`rollout.protocol` adds these messages to its unions of message types, and owns the format of messages on the wire.
Imports no torch.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from ...engine.request import InFlight
from .manifest import AdapterName, Adapters, Bucket, Gpu, Kin, LentSource, PushId, Source, Version

MAX_ID_CHARS = 128

State: TypeAlias = Literal["loading", "ready", "paused", "draining", "asleep", "waking", "updating", "dirty", "failed"]
PushPhase: TypeAlias = Literal["begun", "staged", "verified", "committed", "aborted"]
Id = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]
Count = Annotated[int, Field(ge=0)]
DtypeName = Annotated[str, Field(max_length=80)]
Seconds = Annotated[float, Field(gt=0.0, le=86400.0)]


class Message(BaseModel):
    """Base class of messages and of parts of messages. Unknown fields, wrong types and values out of range are
    refused.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class BeginPush(Message):
    """Call that begins a push of weights. A `begin_push` call aborts any other push that is still in progress.

    - `base`: id of the push that the changed elements are relative to; None for a push of whole tensors.
    - `adapters`: the adapters that the worker adds to the weights of this push. In an adapters-only push, the adapters
      are added to the weights that the worker had before any adapter was added.
    - `adapter`: the name under which the worker serves the adapters, beside its base weights. If `adapter` is set, the
      push either contains adapters only, and may have any source, or comes from a folder in PEFT's format. If `adapter`
      is set, `weight_version` is the version of this adapter. Requests choose the adapter by its name.
    - `allow_older`: accept a version that is not later than the served version.
    - `in_place`: write into the live weights, for workers without memory for a second set of weights. From the time
      when the worker opens the push's source until the commit, the worker generates no tokens.
    - `in_flight`: with `in_place`, what happens to running requests when the push begins. If `in_flight` is `drain`,
      the drain may take up to `drain_timeout` seconds. If `in_flight` is `keep`, `verify_push` is refused while a
      request with `one_version` is unfinished, so that the push fails before any worker commits.
    - `lends`: put the weights into memory that other workers with the same `kin` can map.
    - `timeout`: limit in seconds on each wait in this push, except drains of running requests.
    """

    type: Literal["begin_push"] = "begin_push"
    id: Id
    push_id: PushId
    weight_version: Version
    base: PushId | None = None
    adapters: Adapters | None = None
    adapter: AdapterName | None = None
    allow_older: bool = False
    dtype: DtypeName
    source: Source
    in_place: bool = False
    in_flight: InFlight = "recompute"
    drain_timeout: Seconds = 600.0
    reject_nonfinite: bool = True
    lends: bool = False
    timeout: Seconds = 60.0

    @property
    def is_whole(self) -> bool:
        """Return whether the push sends every tensor whole, without adapters."""
        return self.base is None and self.adapters is None and self.adapter is None


class StageBucket(Message):
    """Call that announces a bucket. A successful reply means that the bytes are correct and copied. The memory that
    held the bucket in transit, such as a slot of `SharedSource`, is then free for another bucket.
    """

    type: Literal["stage_bucket"] = "stage_bucket"
    id: Id
    push_id: PushId
    bucket: Bucket


class VerifyPush(Message):
    """Call that checks whether `num_buckets` buckets have arrived, and whether every parameter has arrived exactly
    once.
    """

    type: Literal["verify_push"] = "verify_push"
    id: Id
    push_id: PushId
    num_buckets: Count


class CommitPush(Message):
    """Call that makes the worker serve the verified weights, beginning with the engine's next step.

    `in_flight`: what happens to running requests; `keep` is refused while a request with `one_version` is unfinished.
    `timeout`: limit in seconds on the drain of running requests, if `in_flight` is `drain`.
    """

    type: Literal["commit_push"] = "commit_push"
    id: Id
    push_id: PushId
    in_flight: InFlight = "recompute"
    timeout: Seconds = 600.0


class AbortPush(Message):
    """Call that aborts a push. Aborting an unknown push is a no-op. Aborting a committed push has no effect, and the
    reply shows the phase `committed`.
    """

    type: Literal["abort_push"] = "abort_push"
    id: Id
    push_id: PushId


class GetWeights(Message):
    type: Literal["weights"] = "weights"
    id: Id


class Weights(Message):
    """The parameters that a push must contain, and the version of the weights that the worker serves.

    - `dtype`: dtype of pushes. `dtypes`: maps the name of each parameter that is not pushed in `dtype` to the
      parameter's own dtype.
    - `shapes`: shape of every parameter, by its Hugging Face name.
    - `parts`: the stacks of experts' matrices that may be sent in parts. Each stack is mapped to the names of the parts
      of one matrix. The parts' names are in the order of the matrix's rows. All parts of a matrix have the same number
      of rows. In the names, `{}` stands for the number of the expert.
    - `tied`: maps the name of each copy of a parameter to the parameter's name. `ignored`: other names that a push may
      omit. `optional`: parameters that a push may omit, but only all of them together; the worker then keeps its
      current values of these parameters.
    - `renamed`, `respelled`, `left_out`: how the trainer's names become the names in `shapes` (`spellings.own_name`).
    - `quantization`: the format in which the worker stores weights, such as `fp8`, or `none`. The worker quantizes the
      pushed weights. In a push of adapters, the checksums of base weights are computed from the values that the
      weights have after quantization.
    - `adapters`: the version of each named adapter that the worker serves.
    - `push_id`: id of the served push; None for the model's own checkpoint, or if the worker has no complete weights.
    - `gpu`: UUID of the weights' GPU; None on a CPU.
    - `kin`: a value that is equal for workers that may share the memory of their weights; None if this worker cannot
      share memory.
    - `instance`: see `Health`.
    """

    type: Literal["weights"] = "weights"
    id: Id
    dtype: str
    dtypes: dict[str, str]
    shapes: dict[str, tuple[Count, ...]]
    parts: dict[str, tuple[str, ...]]
    tied: dict[str, str]
    ignored: tuple[str, ...]
    optional: tuple[str, ...] = ()
    renamed: dict[str, str] = {}
    respelled: dict[str, str] = {}
    left_out: tuple[str, ...] = ()
    quantization: str = "none"
    weight_version: Count
    adapters: dict[str, Count] = {}
    push_id: PushId | None
    gpu: Gpu | None
    kin: Kin | None
    instance: str


class PushStatus(Message):
    """Reply to begin_push, stage_bucket, verify_push, commit_push and abort_push: the phase of the push.

    `state`, `weight_version`: the worker's state, and the version of its base weights. `pause_seconds`: how long the
    commit prevented the engine from running steps; None before the commit. `lent`: the memory that the worker lends,
    once it has verified a push with `lends`.
    """

    type: Literal["push_status"] = "push_status"
    id: Id
    push_id: PushId
    phase: PushPhase
    state: State
    weight_version: Count
    pause_seconds: float | None = None
    lent: LentSource | None = None


class PushProgress(Message):
    """A push in progress, as `Health` reports it. `bytes_staged` and `seconds` count from the start of the push."""

    push_id: PushId
    weight_version: Count
    transport: str
    phase: PushPhase
    in_place: bool
    bytes_staged: Count
    seconds: float


PushCall: TypeAlias = BeginPush | StageBucket | VerifyPush | CommitPush | AbortPush
