"""The operator, a client that brings the worker back to `ready` from any state that the attack has caused.

A call that is still valid after its mutation changes the worker's state for all clients, which is correct. The operator
resumes the worker, wakes it up, and pushes its original weights if weights are missing or partly overwritten. The
operator also checks that no push of the attack is ever served.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgpack
import torch
from frames import pack
from fuzz.attack import dealer
from fuzz.corpus import CLOSED_PORT, SECONDS
from fuzz.violation import Violation

from trueroll.errors import TruerollError
from trueroll.rollout import WeightPublisher


class Operator:
    """`patience`: seconds that an answer may take. `look`: called while waiting; raises if waiting is useless.

    `longest_wait`: the longest wait for `health`, in seconds. `num_pushes`: how often weights had to be pushed.
    """

    def __init__(
        self, address: str, tensors: Mapping[str, torch.Tensor], patience: float, look: Callable[[], None]
    ) -> None:
        self._socket = dealer(address)
        self._tensors = dict(tensors)
        self._patience = patience
        self._look = look
        self._ids = (f"o-{number}" for number in itertools.count())
        self._publisher = WeightPublisher("shared", timeout=patience)
        self._publisher.connect([address])
        self._served: str | None = None
        self.longest_wait = 0.0
        self.num_pushes = 0

        self._push()  # now the served push is known, and every client has a connection to the worker
        if self._served is None:
            self.close()
            raise Violation("the worker refused the operator's first push, before any attack")

    def ask(self, type: str, **fields: Any) -> dict[str, Any]:
        """Return the only reply to a call."""
        id, started = next(self._ids), time.monotonic()
        self._socket.send(pack({"version": 1, "type": type, "id": id, **fields}))
        while not self._socket.poll(200):
            self._look()
            if time.monotonic() > started + self._patience:
                raise Violation(f"the worker did not answer {type} within {self._patience} s")
        reply = msgpack.unpackb(self._socket.recv())
        if reply["id"] != id:
            raise Violation(f"the operator asked for {id}, and got {reply!r:.300}")
        if type == "health":
            self.longest_wait = max(self.longest_wait, time.monotonic() - started)
        return reply

    def tend(self, ends_pushes: bool) -> bool:
        """Take the next step towards `ready`. Return True if the worker is ready and no push is in progress.

        `ends_pushes`: True to abort a push in progress.
        """
        health = self.ask("health")
        match health["state"]:
            case "asleep" | "waking":
                self.ask("wake_up")
            case "paused":
                self.ask("resume")
            case "dirty":
                self._push()
            case "failed":
                raise Violation("the engine of the worker failed")
            case _ if health["push"] and ends_pushes:
                self.ask("abort_push", push_id=health["push"]["push_id"])
        return health["state"] == "ready" and not health["push"]

    def check_served(self) -> None:
        """Check that the worker serves the operator's weights. Call only while no client changes them."""
        served = self.ask("weights")["push_id"]
        if served != self._served:
            raise Violation(f"the worker serves the push {served}, which is not the operator's ({self._served})")

    def _push(self) -> None:
        try:
            result = self._publisher.push(self._tensors, version=self.num_pushes, allow_older=True)
        except TruerollError:
            return  # a call of the attack changed the state meanwhile; the next `tend` handles the new state
        self._served, self.num_pushes = result.push_id, self.num_pushes + 1

    def start_receiving(self) -> None:
        """Make the worker start its helper process for pushes by gloo, which then stays. This push cannot succeed."""
        place = {"kind": "collective", "host": "127.0.0.1", "port": CLOSED_PORT, "rank": 1, "world_size": 2}
        fields = {"push_id": secrets.token_hex(16), "weight_version": 1, "dtype": self.ask("weights")["dtype"]}
        reply = self.ask("begin_push", **fields, source=place, timeout=SECONDS)
        if reply.get("code") != "push_failed":
            raise Violation(f"the worker was asked to receive from a closed port, and answered {reply!r:.300}")

    def close(self) -> None:
        self._publisher.close()
        self._socket.close()
