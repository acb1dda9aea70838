"""The paths of requests as the front end counts and logs them: without the capabilities in them."""

from __future__ import annotations

SESSIONS = "/sessions"
SESSION = "/sessions/{id}"


def without_capability(path: str) -> str:
    """Return a path with `{id}` in place of a session's capability."""
    head, _, rest = path.removeprefix(f"{SESSIONS}/").partition("/")
    if not path.startswith(f"{SESSIONS}/") or not head:
        return path
    return f"{SESSION}/{rest}" if rest else SESSION


def capability_in(path: str) -> str | None:
    """Return the capability in a path; None if the path needs none."""
    return path.split("/")[2] if without_capability(path) != path else None
