"""The paths of requests in metrics and logs. The path of a session contains the session's capability, a secret that
gives access to the session. Capabilities are removed from the paths.
"""

from __future__ import annotations

SESSIONS = "/sessions"
SESSION = "/sessions/{id}"
TINKER = "/api/v1"
"""The common prefix of the paths of the Tinker API."""
SAMPLER = f"{TINKER}/samplers/{{id}}"


def capability_in(path: str) -> str | None:
    """Return the session's capability in a path; None if the path contains no capability."""
    before, _, rest = path.partition(f"{SESSIONS}/")
    return None if before else rest.partition("/")[0] or None


def without_capability(path: str) -> str:
    """Return a path with `{id}` in place of a session's capability."""
    if path.startswith(SAMPLER.removesuffix("{id}")):
        return SAMPLER
    capability = capability_in(path)
    return path if capability is None else SESSION + path[len(f"{SESSIONS}/{capability}") :]
