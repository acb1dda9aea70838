"""The root of trueroll's one exception tree, and the errors the engine itself raises.

Every class carries a `code`, the word that stands for it on the wire (`docs/protocol.md`). Every message says what was
expected, what was found and what to do. `trueroll.rollout.errors` adds the errors of the service to the same tree.
This module imports nothing, so that a client can use it without torch.
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
