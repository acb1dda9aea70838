"""A front end of a fleet gives the same answers as a front end of one worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_engine import SLOW_STEP
from http_fronts import front_end
from serving import fake_process

from trueroll.rollout import FleetClient, WorkerProcess, launch_worker
from trueroll.rollout.client.membership import Member, write_members

BODY = {"prompt": [5, 6, 7], "n": 3, "max_tokens": 6, "seed": 5, "temperature": 1.0, "logprobs": 1}


@pytest.fixture
def workers(tiny_llama: Path) -> Iterator[list[WorkerProcess]]:
    with ExitStack() as stack:
        yield [stack.enter_context(launch_worker(str(tiny_llama), device="cpu", num_blocks=64)) for _ in range(2)]


def test_completions_and_the_lifecycle_go_to_all_workers(
    workers: list[WorkerProcess], tiny_llama: Path, tmp_path: Path
) -> None:
    file = tmp_path / "fleet.json"
    write_members(file, [Member(f"worker-{i}", worker.address) for i, worker in enumerate(workers)])
    with (
        front_end(workers[0].address, tokenizer=str(tiny_llama)) as one,
        front_end(str(file), tokenizer=str(tiny_llama)) as many,
        (client := FleetClient(file)),
    ):
        first, second = (front.post("/v1/completions", {"model": front.model, **BODY}).json() for front in (one, many))
        assert first["choices"] == second["choices"] and len(first["choices"]) == 3
        for _ in range(4):
            many.post("/v1/completions", {"model": many.model, **BODY, "prompt": [9, 9]})
        assert many.post("/sleep?mode=keep").status_code == 200
        assert {health.state for health in client.healths().values()} == {"asleep"}
        assert many.get("/is_sleeping").json() == {"is_sleeping": True}
        assert many.post("/wake_up").json()["state"] == "ready"
        update = many.post("/update_weights", {"weight_dir": str(tiny_llama), "weight_version": 7})
        assert update.json()["weight_version"] == 7, update.text
        assert [health.weight_version for health in client.healths().values()] == [7, 7]
        assert many.metric("trueroll_weight_version") == 7


def test_a_stream_goes_on_when_its_worker_is_lost(chat_model: Path, tmp_path: Path, forked_workers: None) -> None:
    file = tmp_path / "fleet.json"
    with ExitStack() as stack:
        workers = [stack.enter_context(fake_process(address=f"ipc://{tmp_path}/{i}.sock")) for i in range(2)]
        members = {f"worker-{i}": Member(f"worker-{i}", worker.address) for i, worker in enumerate(workers)}
        write_members(file, [*members.values()])
        front = stack.enter_context(front_end(str(file), tokenizer=str(chat_model)))
        stack.enter_context(client := FleetClient(file))
        create = partial(front.openai().completions.create, model="fake", extra_body={"return_token_ids": True})
        fields: dict[str, Any] = {**BODY, "prompt": [1, SLOW_STEP], "n": 2, "max_tokens": 30}
        whole = create(**fields).choices
        pieces: dict[int, list[Any]] = {0: [], 1: []}
        lost: list[str] = []
        for event in create(**fields, stream=True):
            [choice] = event.choices
            pieces[choice.index].append(choice)
            if len(pieces[0]) == 3 and not lost:
                lost = [name for name, health in client.healths().items() if health.requests["open"]]
                workers[int(lost[0][-1])].kill()
                write_members(file, [member for name, member in members.items() if name not in lost])
    assert len(lost) == 1, "the request was in flight"
    for choice in whole:
        found = pieces[choice.index]
        assert "".join(piece.text for piece in found) == choice.text
        assert sum((piece.token_ids for piece in found), []) == choice.token_ids
        assert sum((piece.logprobs.token_logprobs for piece in found), []) == choice.logprobs.token_logprobs
