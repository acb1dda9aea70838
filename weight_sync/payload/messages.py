"""The messages of a push, and the words that all messages of the wire protocol are made of.

`rollout.protocol` takes them into its unions, and owns their form on the wire. Imports no torch.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from ...engine.request import InFlight
from .manifest import Adapters, Bucket, Gpu, Kin, LentSource, PushId, Source, Version

MAX_ID_CHARS = 128

State: TypeAlias = Literal["loading", "ready", "paused", "draining", "asleep", "waking", "updating", "dirty", "failed"]
PushPhase: TypeAlias = Literal["begun", "staged", "verified", "committed", "aborted"]
Id = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]
Count = Annotated[int, Field(ge=0)]
DtypeName = Annotated[str, Field(max_length=80)]
Seconds = Annotated[float, Field(gt=0.0, le=86400.0)]


class Message(BaseModel):
    """A message, or a part of one: what is unknown, mistyped or out of its range is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class BeginPush(Message):
    """Begins a push of weights, and ends one that was under way before.

    `base`: the push whose weights the changed elements of this one refer to; None for a push that brings every tensor
    whole. `adapters`: what is added to the weights that it brings or, for a push of adapters alone, to those that the
    worker had before adapters. `allow_older`: also if the version is not later than the one that is served.
    `in_place`: write into the live weights, for want of memory: once the source is open, nothing is generated until the
    commit, and `in_flight` says what becomes of running requests; `drain` takes at most `drain_timeout` seconds.
    `lends`: put the weights where workers of the same kin can map them, too. `timeout`: seconds that each other wait of
    this push may take.
    """

    type: Literal["begin_push"] = "begin_push"
    id: Id
    push_id: PushId
    weight_version: Version
    base: PushId | None = None
    adapters: Adapters | None = None
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
        """Whether the push brings every tensor whole, and no adapters."""
        return self.base is None and self.adapters is None


class StageBucket(Message):
    """Announces a bucket. Its reply says that the bytes were copied and are right, so that its place is free again."""

    type: Literal["stage_bucket"] = "stage_bucket"
    id: Id
    push_id: PushId
    bucket: Bucket


class VerifyPush(Message):
    """Asks whether every parameter has arrived exactly once, in `num_buckets` buckets."""

    type: Literal["verify_push"] = "verify_push"
    id: Id
    push_id: PushId
    num_buckets: Count


class CommitPush(Message):
    """Asks to serve the verified weights from the next step on. `in_flight` `drain` takes at most `timeout` seconds."""

    type: Literal["commit_push"] = "commit_push"
    id: Id
    push_id: PushId
    in_flight: InFlight = "recompute"
    timeout: Seconds = 600.0


class AbortPush(Message):
    """Asks to forget a push. One that is not known counts as aborted; one that is committed stays so, and says it."""

    type: Literal["abort_push"] = "abort_push"
    id: Id
    push_id: PushId


class GetWeights(Message):
    type: Literal["weights"] = "weights"
    id: Id


class Weights(Message):
    """What a push must bring, and what is served now.

    `dtype`: of pushes; `dtypes`: of parameters that come in another. `shapes`: of every parameter, by its Hugging Face
    name. `parts`: of those that are stacks of matrices, one for each expert, and may come in parts instead: what the
    parts of one matrix are called, in the order of their rows, of which each has as many, with the expert's number in
    place of `{}`. `tied`: names that are copies of a parameter, and of which; `ignored`: further names that may be left
    out. `push_id`: the push that is served, None for the model's own
    checkpoint or while no complete weights are there. `gpu`: the GPU that they are on, None for a CPU. `kin`: equal for
    workers that may share the memory of their weights, None for one that cannot. `instance`: see `Health`.
    """

    type: Literal["weights"] = "weights"
    id: Id
    dtype: str
    dtypes: dict[str, str]
    shapes: dict[str, tuple[Count, ...]]
    parts: dict[str, tuple[str, ...]]
    tied: dict[str, str]
    ignored: tuple[str, ...]
    weight_version: Count
    push_id: PushId | None
    gpu: Gpu | None
    kin: Kin | None
    instance: str


class PushStatus(Message):
    """Ends a begin_push, stage_bucket, verify_push, commit_push or abort_push: how far the push has come.

    `state` and `weight_version` are the worker's. `pause_seconds`: how long the commit kept the engine from stepping;
    None before it. `lent`: where to find the weights, of a worker that has verified and `lends`.
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
    """A push under way, as `Health` shows it. `bytes_staged` and `seconds` count from its beginning."""

    push_id: PushId
    weight_version: Count
    transport: str
    phase: PushPhase
    in_place: bool
    bytes_staged: Count
    seconds: float


PushCall: TypeAlias = BeginPush | StageBucket | VerifyPush | CommitPush | AbortPush
