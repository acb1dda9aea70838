"""The other processes of a soak. `soak.py` starts this program: `client ADDRESS`, or `trainer MODEL ADDRESS...`."""

from __future__ import annotations

import itertools
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

PUSH_SECONDS, CLIENT_SECONDS, WORKER_SECONDS = 4.0, 8.0, 60.0
"""Pauses between pushes, and between kills of the client and of the second worker."""
END_SECONDS = 120.0


def train(model: str, *addresses: str) -> None:
    """Push two sets of weights in turn, until a line arrives on stdin. Print a line for each push."""
    import torch
    from safetensors.torch import load_file

    from trueroll.errors import TruerollError
    from trueroll.rollout import WeightPublisher

    torch.set_num_threads(1)
    own = load_file(Path(model) / "model.safetensors")
    sets = [{name: tensor * factor for name, tensor in own.items()} for factor in (1.125, 1.25)]
    with ExitStack() as stack:
        publishers = list[WeightPublisher]()
        for in_flight in ("recompute", "keep"):
            publishers.append(stack.enter_context(WeightPublisher("shared", in_flight=in_flight, on_lost="skip")))
            publishers[-1].connect(addresses)
        print("ready", flush=True)
        for version in itertools.count(1):
            try:
                result = publishers[version // 2 % 2].push(sets[version % 2], version)
                print("pushes without the second worker" if result.left_out else "pushes", flush=True)
            except TruerollError as error:
                print(f"refused pushes: {type(error).__name__}", flush=True)
            if select.select([sys.stdin], [], [], PUSH_SECONDS)[0]:
                return


def disturb(address: str) -> None:
    """Stream from a worker until killed."""
    from trueroll.rollout import RolloutClient, SamplingParams

    with RolloutClient(address) as client:
        for number in itertools.count():
            params = SamplingParams(n=2, max_tokens=60, ignore_eos=True)
            for _ in client.stream([[number % 300 + 3, 4, 5]], params, deltas=True, seed=number):
                pass


class Others:
    """The processes of the trainer, of the client that is killed, and of the second worker, which listens at the
    address `second`.

    `settings`: the settings of the second worker. The constructor returns once the trainer is connected.
    """

    def __init__(self, model: Path, address: str, second: str, settings: dict[str, Any]) -> None:
        self._model, self._address, self._second, self._settings = model, address, second, settings
        self._worker = self._new_worker()
        self._client = self._start("client", address)
        self.trainer = self._start("trainer", str(model), address, second)
        assert self.trainer.stdout is not None and self.trainer.stdout.readline() == b"ready\n"
        os.set_blocking(self.trainer.stdout.fileno(), False)
        self._client_due, self._worker_due = CLIENT_SECONDS, WORKER_SECONDS

    def look(self, now: float) -> Iterator[str]:
        """Kill and restart the client and the second worker if their kills are due. `now`: seconds since the beginning
        of the soak. Yield a description of each event: the kills, and the pushes that the trainer has reported.
        """
        assert self.trainer.stdout is not None
        yield from (self.trainer.stdout.read() or b"").decode().splitlines()
        if now > self._client_due:
            self._end_client()
            self._client, self._client_due = self._start("client", self._address), now + CLIENT_SECONDS
            yield "kills of a client"
        if now > self._worker_due:
            os.kill(self._worker.pid, signal.SIGKILL)
            self._worker.close()
            self._worker, self._worker_due = self._new_worker(), now + WORKER_SECONDS
            yield "kills of a worker"

    def close(self) -> None:
        assert self.trainer.stdin is not None
        self.trainer.stdin.close()
        try:
            self.trainer.wait(END_SECONDS)
        finally:
            self.trainer.kill()
            self._end_client()
            self._worker.close()

    def _new_worker(self) -> Any:
        from trueroll.rollout import launch_worker

        return launch_worker(str(self._model), address=self._second, **self._settings)

    def _end_client(self) -> None:
        self._client.kill()
        self._client.wait()

    @staticmethod
    def _start(*arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, __file__, *arguments]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


if __name__ == "__main__":
    dict(client=disturb, trainer=train)[sys.argv[1]](*sys.argv[2:])
