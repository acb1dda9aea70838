"""What a worker lets a push make it do: which folders it reads, and which hosts it connects to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PushPolicy:
    """`folder`: pushes by disk come from inside it; None: from folders that belong to the user the worker runs as.

    `hosts`: where collective pushes may have their store beside loopback: IPs, networks such as 10.0.0.0/8, or names,
    which are compared and not looked up.
    """

    folder: str | None = None
    hosts: tuple[str, ...] = ()
