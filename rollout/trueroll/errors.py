"""The one tree of exceptions: whatever trueroll raises on purpose, in whichever folder, is a `TruerollError`.

Every class carries a `code`, the word that stands for it on the wire (`docs/protocol.md`). Every message says what was
expected, what was found and what to do. Imports nothing, so that each folder, and a client without torch, can use it.
"""


class TruerollError(Exception):
    """Root of every error that trueroll raises on purpose."""

    code = "internal"


class ConfigError(TruerollError):
    """A configuration value, or a combination of them, cannot work."""

    code = "invalid_config"


class ModelError(TruerollError):
    """A model folder is missing, incomplete, inconsistent or of an unsupported architecture."""

    code = "invalid_model"


class InvalidRequestError(TruerollError):
    """A request can never be served as it stands; nothing was started for it."""

    code = "invalid_request"


class UnknownRequestError(TruerollError):
    """A request id, or a sample index of it, names nothing that is running."""

    code = "unknown_request"


class ProtocolError(TruerollError):
    """A message is not what the protocol prescribes: frames, MessagePack, type, version or fields."""

    code = "invalid_message"


class MessageTooLargeError(TruerollError):
    """A message is longer than the worker accepts."""

    code = "message_too_large"


class IdConflictError(TruerollError):
    """A request id is in use for a request with other content."""

    code = "id_conflict"


class QueueFullError(TruerollError):
    """The worker holds as much unfinished work as it accepts: requests, their samples or bytes, calls, or who waits."""

    code = "queue_full"


class UnreadError(TruerollError):
    """The client did not read its replies, and the worker gave them up; ask again."""

    code = "unread"


class ForbiddenError(TruerollError):
    """The client's role or its connection does not allow this call, its key is unknown, or the worker is another
    user's.
    """

    code = "forbidden"


class UnavailableError(TruerollError):
    """The worker is in a state in which it accepts no new requests."""

    code = "unavailable"


class WorkerFailedError(TruerollError):
    """The worker's engine failed; the request was not finished, and the process is ending."""

    code = "worker_failed"


class IllegalStateError(TruerollError):
    """The worker is in a state in which this call makes no sense; the text names it."""

    code = "illegal_state"


class DeadlineError(TruerollError):
    """Something did not happen within the time it was given."""

    code = "deadline_exceeded"


class PushError(TruerollError):
    """A push of weights was refused or broke off; the text says what was wrong, and with which tensor."""

    code = "push_failed"


class StaleWeightsError(TruerollError):
    """The worker serves older weights than the request demands, as one does that was started anew; push again."""

    code = "stale_weights"


class VersionGapError(PushError):
    """A push of changed elements refers to weights that the worker does not serve; push every tensor whole."""

    code = "version_gap"


class WorkerLostError(TruerollError):
    """Nothing answers at the worker's address, or another process does. Raised by the client, never sent."""

    code = "worker_lost"


class RequestAbortedError(TruerollError):
    """A score request was aborted before it had a result. Raised by the client, never sent."""

    code = "aborted"
