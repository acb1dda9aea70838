"""`trueroll top`: the content of the view, and how the command exits, with and without a terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from serving import check_group, fake_process

from trueroll.errors import ProtocolError, WorkerLostError
from trueroll.rollout import RolloutClient, SamplingParams, WorkerProcess, protocol
from trueroll.rollout.fleet.totals import all_healths
from trueroll.rollout.tools.top import Look, look_of, top, view

TOP = (sys.executable, "-P", "-c", "from trueroll.rollout.tools.program import main; main()", "top")
ENGINE = {
    "computed_tokens": 1000,
    "computed_prompt_tokens": 400,
    "prefix_queries": 100,
    "prefix_hits": 10,
    "preemptions": 3,
    "pools": ({"window": None, "in_use": 30, "cached": 20, "empty": 10},),
    "drafts": (),
    "shortened_hits": 1100,
    "checkpoints_ready": 5,
    "checkpoints_restored": 6,
    "expert_tokens": b"",
    "samples_finished": {"length": 7},
    "rank_wait_us": 500_000,
}
PUSH = protocol.PushProgress(
    push_id="0" * 32,
    weight_version=5,
    transport="shared",
    phase="begun",
    in_place=False,
    bytes_staged=12_000,
    seconds=0.25,
)


@pytest.fixture
def process() -> Iterator[WorkerProcess]:
    """A worker process with the fake engine, after one finished group of two samples."""
    with fake_process() as process:
        with RolloutClient(process.address) as client:
            check_group(client.generate([[1]], SamplingParams(n=2, max_tokens=5))[0], 2)
        yield process


MODEL = {
    "model": "m",
    "backend": "cpu",
    "live_states": 0,
    "checkpoints": 0,
    "expert_layers": 0,
    "num_experts": 0,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
}
SERVICE = dict(accepted=1, joined=0, finished=6, failed=0, dropped=0)


def look(
    seconds: float, counters: dict[str, Any] | None = None, service: dict[str, int] = SERVICE, **health: Any
) -> Look:
    told: dict[str, Any] = dict(
        id="h",
        state="ready",
        instance="abc",
        seconds_since_progress=2.5,
        weight_version=4,
        requests={"open": 1, "kept": 2, "running": 8, "waiting": 9},
        memory={"process": 4_000_000, "kv_cache": 0},
        limits={},
        engine=MODEL,
    )
    stats = protocol.Stats(id="s", engine=ENGINE if counters is None else counters, service=service)
    return look_of(seconds, protocol.Health(**(told | health)), stats)


def rows(before: Look, now: Look) -> dict[str, str]:
    """Return the view as text: the name of each row, and the text after the name."""
    console = Console(width=200, record=True, file=open(os.devnull, "w"))
    console.print(view(before, now))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    return {name.strip(): rest.strip() for name, _, rest in (line.partition("  ") for line in lines)}


def test_rates_are_differences_between_two_snapshots() -> None:
    growth = {"computed_tokens": 1500, "computed_prompt_tokens": 500, "prefix_queries": 300, "prefix_hits": 160}
    told = rows(look(10.0), look(12.0, {**ENGINE, **growth}))
    assert told["tokens/s"] == "decode 200  prompt 50"
    assert told["prefix hits"] == "now 75.0%  ever 53.3%"
    assert told["requests"] == "open 1  kept 2  running 8  waiting 9  finished 6  failed 0"
    assert told["samples"] == "length 7" and told["preempted"] == "3"
    assert told["memory"] == "process 4.0 MB  kv_cache 0 bytes"
    assert told["worker"] == "abc  weight version 4" and told["state"] == "ready  last progress 2.5 s ago"
    assert "push" not in told


def test_ranks_show_the_share_of_the_time_that_rank_0_waits() -> None:
    for stages, text in ((1, "4"), (2, "8 in 2 stages")):
        model = MODEL | {"tensor_parallel_size": 4, "pipeline_parallel_size": stages}
        before, now = look(10.0, engine=model), look(12.0, {**ENGINE, "rank_wait_us": 700_000}, engine=model)
        assert rows(before, now)["ranks"] == f"{text}  rank 0 waits 10.0% of the time"
    assert "ranks" not in rows(look(10.0), look(12.0))


def test_names_from_outside_do_not_reach_the_terminal() -> None:
    evil, shown = "a\x1b[2J\x07\u202e\nb", r"a\x1b[2J\x07\u202e\nb"
    fields: dict[str, Any] = dict(instance=evil, engine={**MODEL, "model": evil, "backend": evil})
    fields |= dict(requests={"open": 1, evil: 2}, memory={evil: 3})
    counters = {**ENGINE, "samples_finished": {evil: 4}}
    before, now = look(0.0, counters, **fields), look(1.0, counters, **fields)
    before, now = (dataclasses.replace(each, workers={evil: each}) for each in (before, now))
    with io.StringIO() as written:
        Console(width=300, file=written).print(view(before, now))
        text = written.getvalue()
    assert "\x1b" not in text and "\x07" not in text and "\u202e" not in text
    assert text.count(shown) == 7


def test_the_troubles_of_a_fleet_are_shown() -> None:
    alone = look(1.0)
    fleet = dataclasses.replace(alone, health=all_healths([alone.health], ["worker-1: no \x1bspace"]))
    assert rows(look(0.0), fleet)["trouble"] == r"worker-1: no \x1bspace"
    assert "trouble" not in rows(look(0.0), alone)


def test_the_parts_of_the_bar_are_in_proportion_to_the_blocks() -> None:
    bar = rows(look(0.0), look(1.0))["blocks"]
    assert (bar.count("█"), bar.count("▒"), bar.count("░")) == (15, 10, 5)
    assert bar.endswith("in use 30  cached 20  empty 10")


def test_each_window_has_a_bar() -> None:
    windowed = {"window": 4096, "in_use": 3, "cached": 2, "empty": 1}
    now = look(1.0, {**ENGINE, "pools": (*ENGINE["pools"], windowed)})
    assert rows(look(0.0), now)["blocks, window 4,096"].endswith("in use 3  cached 2  empty 1")


def test_drafts_show_how_many_were_accepted() -> None:
    def drafts(count: int, drafted: tuple[int, ...], accepted: tuple[int, ...]) -> dict[str, Any]:
        return {"drafter": "repeats", "drafts": count, "drafted": drafted, "accepted": accepted}

    before = look(0.0, {**ENGINE, "drafts": (drafts(10, (10, 10), (8, 2)),)})
    now = look(1.0, {**ENGINE, "drafts": (drafts(20, (20, 12), (17, 3)),)})
    shown = rows(before, now)["drafts, repeats"]
    assert shown == "accepted now 83.3%  ever 62.5%  tokens per draft 2.00  by position 85.0% 25.0%"
    assert "drafts, repeats" not in rows(look(0.0), look(1.0))


def test_checkpoints_show_for_a_model_that_has_states() -> None:
    told = rows(look(0.0), look(1.0, engine=MODEL | {"live_states": 8, "checkpoints": 40}))
    assert told["checkpoints"] == "5 of 40  6 restored  hits shortened by 1,100 tokens"
    assert "checkpoints" not in rows(look(0.0), look(1.0))


def test_experts_show_how_much_busier_than_the_mean_one_is() -> None:
    model = MODEL | {"expert_layers": 2, "num_experts": 4}

    def told(before: list[int], now: list[int]) -> str:
        looks = [
            look(i, {**ENGINE, "expert_tokens": np.array(counts, "<i8").tobytes()}, engine=model)
            for i, counts in enumerate((before, now))
        ]
        return rows(*looks)["experts"]

    zeros, even, uneven = [0] * 8, [2, 2, 2, 2, 3, 1, 2, 2], [2, 2, 2, 2, 3, 11, 2, 2]
    assert told(zeros, zeros) == "busiest to mean, now -  ever -"
    assert told(zeros, even) == "busiest to mean, now 1.25, 1.50 in layer 1  ever 1.25, 1.50 in layer 1"
    assert told(even, uneven).startswith("busiest to mean, now 2.50, 4.00 in layer 1  ever 1.72, 2.44 in layer 1")
    assert "experts" not in rows(look(0.0), look(1.0))
    with pytest.raises(
        ProtocolError, match="expert_tokens: must have 8 bytes for each of 4 experts in 2 layers .got 24"
    ):
        told(zeros, [1, 2, 3])


def test_rates_without_queries_are_no_error() -> None:
    told = rows(look(0.0), look(1.0, {**ENGINE, "prefix_queries": 0, "prefix_hits": 0, "samples_finished": {}}))
    assert told["prefix hits"].endswith("ever -") and told["samples"] == "none finished"


def test_sleep_and_a_push_in_progress_are_shown() -> None:
    told = rows(look(0.0), look(1.0, state="asleep", sleeping=("weights", "kv_cache"), push=PUSH))
    assert told["state"] == "asleep  asleep: weights, kv_cache  last progress 2.5 s ago"
    assert told["push"] == "version 5 by shared: begun, 12.0 kB staged in 0.2 s"
    in_place = PUSH.model_copy(update={"in_place": True})
    assert rows(look(0.0), look(1.0, push=in_place))["push"].startswith("version 5 by shared, in place: ")


def test_unknown_values_are_left_out_while_loading() -> None:
    loading = look(1.0, {}, state="loading", weight_version=None, seconds_since_progress=None, engine=None)
    told = rows(loading, loading)
    assert told.keys() == {"worker", "state", "requests", "memory"}
    assert told["worker"] == "abc  weight version -" and told["state"] == "loading"
    assert "tokens/s" not in rows(loading, look(2.0)), "there are no earlier counters yet"


def test_markup_in_names_is_shown_literally() -> None:
    odd = "[/]x[bold]"
    counters = {**ENGINE, "samples_finished": {odd: 1}}
    health: dict[str, Any] = dict(
        instance=odd,
        engine=MODEL | {"model": odd, "backend": odd},
        requests={odd: 1},
        memory={odd: 1},
        push=PUSH.model_copy(update={"transport": odd}),
    )
    told = rows(look(0.0, counters, **health), look(1.0, counters, **health))
    assert told["worker"] == f"{odd}  weight version 4" and told["model"] == f"{odd}, backend {odd}"
    assert told["requests"].startswith(f"{odd} 1  finished") and told["memory"] == f"{odd} 1 byte"
    assert told["samples"] == f"{odd} 1" and told["push"].startswith(f"version 5 by {odd}: ")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"service": {"failed": 1}}, "finished: field required"),
        ({"counters": {"preemptions": 1}}, "computed_tokens: field required"),
        ({"counters": {**ENGINE, "prefix_hits": "many"}}, "prefix_hits: must be a valid integer"),
        ({"counters": {**ENGINE, "samples_finished": 7}}, "samples_finished: must be a valid dictionary"),
        ({"engine": {"model": "m"}}, "backend: field required"),
    ],
)
def test_a_missing_or_mistyped_counter_is_one_clear_error(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ProtocolError, match=f"^worker: {words}.*; use the same release of trueroll on both sides$"):
        look(0.0, **changes)


def test_the_counters_of_a_restarted_worker_are_not_compared() -> None:
    restarted = dataclasses.replace(look(1.0), health=look(1.0, instance="def").health)
    assert "tokens/s" not in rows(look(0.0), restarted)
    assert "tokens/s" in rows(look(0.0), look(1.0))


def test_without_a_terminal_one_view_is_printed(process: WorkerProcess) -> None:
    done = subprocess.run([*TOP, process.address, "--interval", "0.1"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, f"connecting to {process.address}, for up to 12 s ...\n")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [words[0] for words in lines].count("worker") == 1
    assert ["samples", "length", "2"] in lines and ["preempted", "0"] in lines
    assert any(words[:2] == ["state", "ready"] for words in lines)
    assert any(words[:2] == ["model", "fake,"] for words in lines)


def test_on_a_terminal_it_goes_on_until_interrupted(process: WorkerProcess) -> None:
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    running = subprocess.Popen(
        [*TOP, process.address, "--interval", "0.1"],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
        # A background process ignores interrupts, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(theirs)
    shown = b""
    try:
        while shown.count(b"tokens/s") < 3:
            shown += os.read(ours, 65536)
        assert running.poll() is None
        running.send_signal(signal.SIGINT)
        _drain(ours)
        assert running.wait(20) == 0
        assert running.stderr is not None and running.stderr.read().startswith(b"connecting to ipc://")
    finally:
        running.kill()
        running.wait()
        os.close(ours)


def _drain(terminal: int) -> None:
    """Read until the other side of the terminal closes, which Linux reports as an error."""
    with contextlib.suppress(OSError):
        while os.read(terminal, 65536):
            pass


def test_a_lost_worker_ends_it_with_the_error(process: WorkerProcess) -> None:
    class Screen:
        """A terminal that kills the worker once the first view is shown."""

        def __init__(self) -> None:
            self.text = ""

        def write(self, text: str) -> int:
            self.text += text
            if "tokens/s" in text:
                process.kill()
            return len(text)

        def flush(self) -> None:
            pass

    screen: Any = Screen()
    console = Console(file=screen, force_terminal=True, width=120)
    with RolloutClient(process.address, timeout=2.0) as client, pytest.raises(WorkerLostError, match="no answer from"):
        top(client, 0.1, console)
    assert "tokens/s" in screen.text


def test_a_wrong_address_or_interval_is_one_clear_line() -> None:
    done = subprocess.run([*TOP, "http://127.0.0.1:1"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "trueroll: address: must be ipc://PATH or tcp://IP:PORT (got 'http://127.0.0.1:1'); an HTTP address belongs "
        "to a front end: give the worker's address, which `trueroll serve` prints"
    ]
    done = subprocess.run([*TOP, "ipc:///nowhere", "--interval", "0"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "--interval" in done.stderr
