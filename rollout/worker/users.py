"""What is a user's own: the names of requests, and cached prefixes. `user` None: all clients are one."""

from __future__ import annotations


def scoped(user: str | None, id: str) -> str:
    """The name of a user's id among those of all users. A user's name has no slash in it."""
    return id if user is None else f"{user}/{id}"


def salt_of(user: str | None, cache_salt: str | None) -> str | None:
    """The salt that a request is computed with, for the one that it asks for.

    Without one of its own, a user's requests share prefixes with each other alone, and no other user can name the salt
    that they share them by. One that users agree on lets them share.
    """
    if user is None:
        return cache_salt
    return f"user:{user}" if cache_salt is None else f"named:{cache_salt}"
