"""An engine with several ranks, each in a process of its own, gives the bits of an engine on one device."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import numpy as np
import psutil
import pytest
import torch
from matrix import thinned
from torch import Tensor

from tiny import make_tiny_model
from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.parallel import exchange, leader
from trueroll.engine.parallel.agreement import Agreement
from trueroll.engine.parallel.exchange import SLOT_BYTES, RankError, Segment
from trueroll.engine.parallel.leader import Followers
from trueroll.engine.parallel.wire import Channel
from trueroll.engine.request import GenerateRequest, SampleOutput, ScoreOutput, ScoreRequest
from trueroll.engine.running.executor import StepResults
from trueroll.engine.running.loading import EngineInfo
from trueroll.engine.running.ranks import Topology
from trueroll.engine.running.sampler import Drawn
from trueroll.errors import ConfigError, ModelError
from trueroll.kernels.ranks import Finish, Rank, RankedOps

from .drafting.mtp_models import make_mtp_model
from .drive import generate, tokens
from .running.test_ranks import FAMILIES

pytestmark = pytest.mark.usefixtures("forked_ranks")
SIZES: dict[str, Any] = dict(
    num_blocks=24,
    block_size=8,
    state_interval=8,
    state_budget=24,
    max_num_batched_tokens=64,
    max_num_seqs=16,
    num_threads=1,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model("qwen3_5_moe", tmp_path_factory.mktemp("model"), **FAMILIES["qwen3_5_moe"]))


@contextmanager
def engine_of(model: str, size: int, stages: int = 1, **settings: Any) -> Iterator[Engine]:
    ranks = dict(tensor_parallel_size=size, pipeline_parallel_size=stages)
    engine = Engine(EngineConfig(model=model, **ranks, **(SIZES | settings)))
    try:
        yield engine
    finally:
        engine.close()


def asked() -> list[GenerateRequest | ScoreRequest]:
    shared = tokens(40)
    return [
        generate("a", np.concatenate((shared, tokens(9, seed=1))), n=3, max_tokens=40, return_routed_experts=True),
        generate("b", np.concatenate((shared, tokens(30, seed=2))), n=2, max_tokens=30, temperature=0.7, top_p=0.9),
        generate("c", tokens(70, seed=3), max_tokens=40, temperature=0.0, top_logprobs=3),
        ScoreRequest("d", tokens(50, seed=4)),
        ScoreRequest("e", tokens(40, seed=5), top_logprobs=0),
    ]


def run(
    engine: Engine, times: int = 2, requests: Sequence[GenerateRequest | ScoreRequest] | None = None
) -> list[tuple[Any, ...]]:
    """Run the requests, by default twice, and return the bits of their outputs. The second run hits the prefix
    cache. `requests`: by default those of `asked`.
    """
    found = []
    for _ in range(times):
        for request in requests or asked():
            engine.add(request)
        while engine.has_unfinished:
            found += [bits(output) for output in engine.step()]
    return sorted(found)


def bits(output: Any) -> tuple[Any, ...]:
    if isinstance(output, ScoreOutput):
        assert output.logprobs is not None
        entropy = b"" if output.entropy is None else output.entropy.tobytes()
        return output.request_id, 0, output.logprobs.tobytes(), entropy
    assert isinstance(output, SampleOutput) and output.logprobs is not None
    routes = b"" if output.routed_experts is None else output.routed_experts.tobytes()
    tops = b"" if output.top_logprobs is None else output.top_logprobs.tobytes()
    return output.request_id, output.index, tuple(output.token_ids), output.logprobs.tobytes(), routes, tops


def test_engines_with_several_ranks_give_the_same_bits_and_statistics(model: str) -> None:
    found, stats, infos = dict[int, Any](), dict[int, Any](), dict[int, EngineInfo]()
    for size in (1, 4):
        with engine_of(model, size) as engine:
            found[size], stats[size], infos[size] = run(engine), engine.stats(), engine.info
            assert engine.info.tensor_parallel_size == size and engine.info.pieces == 4
    assert infos[4].weight_bytes < infos[1].weight_bytes
    assert infos[4].kv_bytes * 2 == infos[1].kv_bytes, "two of four ranks share a key-value head"
    assert infos[4].state_bytes * 4 == infos[1].state_bytes
    assert found[4] == found[1] and len(found[1]) == 16
    assert stats[4] == stats[1] and stats[1].steps > 2 * 64, "premise: the ranks compared their checksums"
    assert stats[1].preemptions > 0 and stats[1].prefix_hits > 0 and stats[1].checkpoints_restored > 0, "premise"


@pytest.mark.parametrize("quantization", ["fp8_dynamic", "int8_dynamic"])
def test_ranks_of_the_library_exchange_the_scales_of_activations(
    model: str, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers run in one call of the library."""

    def fail(*_: Any) -> None:
        raise AssertionError("premise: the library exchanges the largest magnitudes")

    monkeypatch.setattr(RankedOps, "_peaks", fail)
    request, found = generate("a", tokens(60), n=2, max_tokens=6), dict[int, Any]()
    for size in (1, 2):
        with engine_of(model, size, dtype="bfloat16", quantization=quantization) as engine:
            found[size] = run(engine, 1, [request])
    assert found[2] == found[1] and len(found[1]) == 2


@thinned(lambda size, stages: size == 2)
@pytest.mark.parametrize(("size", "stages"), [(1, 4), (2, 2)])
def test_engines_with_stages_give_the_same_bits(model: str, size: int, stages: int) -> None:
    with engine_of(model, 1) as one, engine_of(model, size, stages, host_cache_bytes=2**24) as several:
        expected = run(one)
        in_flight, settle = set[int](), several._pipeline._settle_next

        def noting() -> Any:
            in_flight.add(1 + len(several._pipeline._queued))
            return settle()

        several._pipeline._settle_next = noting  # type: ignore[method-assign]
        assert run(several) == expected
        assert max(in_flight) == stages, "premise: each stage computes another step"
        several.check_integrity()
        stats, info = several.stats(), several.info
        assert (info.tensor_parallel_size, info.pipeline_parallel_size, info.pieces) == (size, stages, 4)
        assert several.memory()["weights"] < 1.03 * one.memory()["weights"]
        assert several.memory()["kv_cache"] < 1.5 * one.memory()["kv_cache"]
        assert stats.host_restored > 0 and stats.checkpoints_on_host > 0, "premise: each rank restores its own part"
        assert 2**23 < several.memory()["host_cache"] <= 4 * 2**24
    assert stats.preemptions > 0 and stats.prefix_hits > 0 and stats.checkpoints_restored > 0, "premise"


@thinned(lambda speculative, size, stages: speculative == "mtp")
@pytest.mark.parametrize(("speculative", "size", "stages"), [("ngram", 2, 1), ("mtp", 2, 2)])
def test_drafts_and_the_mtp_module_on_ranks(speculative: str, size: int, stages: int, tmp_path: Path) -> None:
    model = str(make_mtp_model("qwen3_5_moe", tmp_path / "model", **FAMILIES["qwen3_5_moe"]))
    found, drafts = list[Any](), list[Any]()
    for ranks in ((1, 1), (size, stages)):
        sizes = dict(tensor_parallel_size=ranks[0], pipeline_parallel_size=ranks[1])
        engine = Engine(EngineConfig(model=model, speculative=speculative, **sizes, **SIZES), draft_always=True)
        try:
            outputs = run(engine, times=1)
            engine.sleep(1, ["weights", "kv_cache"], "drain")
            assert engine.memory()["kv_cache"] == 0
            engine.wake_up(["weights", "kv_cache"])
            found.append(outputs + run(engine, times=1))
            drafts.append(engine.stats().drafts)
        finally:
            engine.close()
    assert found[0] == found[1] and drafts[0] == drafts[1]
    assert sum(drafts[0][0].accepted) > 20, "premise"


class Disagreement:
    """An exchange with another rank that has another checksum."""

    rank, native = Rank(0, 2), None

    def gather(self, x: Tensor) -> list[Tensor]:
        return [x, x + 1]

    def add(self, own: Tensor, finish: Finish) -> Tensor:
        raise NotImplementedError


def test_a_rank_with_other_results_is_named() -> None:
    agreement, results = (
        Agreement(Disagreement(), 2),
        StepResults(Drawn(tokens(1), np.array([-0.5], np.float32), np.array([True]), {}, {}, {}), [], None, b""),
    )
    step: Any = SimpleNamespace(token_ids=tokens(3), positions=np.arange(3))
    for _ in range(63):
        agreement.add(step, results)
    with pytest.raises(
        RankError, match=r"ranks \[1\] differ from rank 0 in inputs, tokens or log-probs .* up to step 64"
    ):
        agreement.add(step, results)


@pytest.mark.parametrize("length", [1, SLOT_BYTES // 4, SLOT_BYTES // 4 + 1, SLOT_BYTES // 2 + 3])
def test_tensors_of_any_size_are_gathered(length: int) -> None:
    """Three calls use both sides of the memory; the ranks are threads of this process."""
    file = os.memfd_create("ranks")

    def gather(index: int) -> bool:
        exchange = Segment(Topology(4, 1), file, lambda: None).links(index).everyone
        found = []
        for call in range(3):
            own = torch.arange(length, dtype=torch.float32) + 10 * call + index
            expected = [torch.arange(length, dtype=torch.float32) + 10 * call + rank for rank in range(4)]
            found.append(all(map(torch.equal, exchange.gather(own), expected)))
        return all(found)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(gather, range(4)))
    os.close(file)


@pytest.mark.parametrize("length", [1, SLOT_BYTES // 4, SLOT_BYTES // 4 + 1, SLOT_BYTES // 2 + 3])
def test_tensors_of_any_size_are_passed_on(length: int) -> None:
    file = os.memfd_create("ranks")
    sent = [torch.arange(length, dtype=torch.float32) + 10 * call for call in range(5)]

    def compute(index: int) -> list[Tensor]:
        links, found = Segment(Topology(1, 3), file, lambda: None).links(index), list[Tensor]()
        for each in sent:
            x = each
            if links.before is not None:
                x = torch.empty_like(each)
                links.before.receive(x)
            if links.after is not None:
                links.after.send(x)
            found.append(x)
        return found

    with ThreadPoolExecutor(3) as pool:
        assert all(
            torch.equal(*pair) for found in pool.map(compute, range(3)) for pair in zip(found, sent, strict=True)
        )
    os.close(file)


def children() -> list[psutil.Process]:
    """Return the processes of the other ranks."""
    started = [child for child in psutil.Process().children() if "trueroll.engine.parallel.follower" in child.cmdline()]
    return started + [psutil.Process(rank.pid) for rank in forked.ranks if rank.poll() is None]


@pytest.fixture
def started_ranks(forked_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the other ranks as trueroll does, for tests of the start."""
    monkeypatch.setattr(leader, "subprocess", subprocess)


def test_a_killed_rank_is_named_and_no_process_is_left(model: str) -> None:
    with engine_of(model, 4) as engine:
        for request in asked():
            engine.add(request)
        for _ in range(5):
            engine.step()
        killed = children()[1]
        killed.send_signal(signal.SIGKILL)
        with pytest.raises(RankError, match=rf"rank 2 of 4 \(process {killed.pid}\) ended with exit code -9"):
            while engine.has_unfinished:
                engine.step()
    assert children() == []


def compute(engine: Engine) -> None:
    while engine.has_unfinished:
        engine.step()


def commit(engine: Engine) -> None:
    engine.commit_weights(engine.weights.new_staging(in_place=False), 1, "abort")


def fall_asleep(engine: Engine) -> None:
    engine.sleep(1, ["weights", "kv_cache"], "abort")


@pytest.mark.parametrize(
    ("size", "stages", "hung", "act"),
    [(2, 1, 1, compute), (1, 3, 2, compute), (2, 1, 1, commit), (1, 2, 1, fall_asleep)],
)
def test_a_rank_that_hangs_is_named(
    size: int,
    stages: int,
    hung: int,
    act: Callable[[Engine], None],
    model: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With three stages, rank 0 waits for rank 1, which waits for rank 2."""
    monkeypatch.setattr(exchange, "MOST_SECONDS", 2.0)
    monkeypatch.setattr(leader, "SECONDS_TO_END", 0.5)
    with engine_of(model, size, stages) as engine:
        engine.add(asked()[0])
        engine.step()
        engine.settle()
        children()[hung - 1].send_signal(signal.SIGSTOP)
        with pytest.raises(RankError, match=rf"ranks \[{hung}\] of {size * stages} did not answer within 2 s"):
            act(engine)
    assert children() == []


def start_hampered(model: str, hamper: Callable[[psutil.Process], object], **settings: Any) -> None:
    """Start an engine with two ranks. As soon as there is a follower, `hamper` its process."""

    def wait_and_hamper() -> None:
        while not (found := children()):
            time.sleep(0.01)
        hamper(found[0])

    with ThreadPoolExecutor(1) as pool:
        hampered = pool.submit(wait_and_hamper)
        try:
            with engine_of(model, 2, **settings):
                pass
        finally:
            hampered.result()
            assert children() == []


@pytest.mark.usefixtures("started_ranks")
def test_a_rank_that_hangs_while_the_engine_starts_is_named(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MOST_SECONDS_TO_START", 3.0)
    monkeypatch.setattr(leader, "SECONDS_TO_END", 0.5)
    with pytest.raises(RankError, match=r"ranks \[1\] of 2 did not answer within 3 s"):
        start_hampered(model, lambda follower: follower.send_signal(signal.SIGSTOP))


@pytest.mark.usefixtures("started_ranks")
def test_a_rank_without_memory_is_named(model: str) -> None:
    """Each rank reserves about 4 GiB for its KV cache, and rank 1 may map half of that."""
    sizes = dict(num_blocks=2**15, block_size=1024, state_interval=1024)
    with pytest.raises(RankError, match=r"rank 1 of 2 \(process \d+\) failed: .*memory"):
        start_hampered(model, lambda follower: follower.rlimit(psutil.RLIMIT_AS, (2**31, 2**31)), **sizes)


def drop_a_step(followers: Followers, name: str, content: object, sent: list[tuple[str, object]]) -> None:
    """Do not send the tenth message to rank 1."""
    for follower in followers._all:
        if follower.index != 1 or len(sent) != 10:
            follower.channel.send(name, content)


def repeat_a_step(followers: Followers, name: str, content: object, sent: list[tuple[str, object]]) -> None:
    """Send rank 1 the step before, from the tenth message on."""
    for follower in followers._all:
        is_behind = follower.index == 1 and len(sent) > 10
        follower.channel.send(*(sent[-2] if is_behind else (name, content)))


@pytest.mark.parametrize(
    ("send", "error"),
    [
        (drop_a_step, r"ranks \[0?,? ?1\] (of 2 did not answer|differ)"),
        (repeat_a_step, r"ranks \[1\] differ from rank 0 in inputs, tokens or log-probs .* up to step 64"),
    ],
)
def test_a_rank_that_computes_other_steps_is_named(
    send: Any, error: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "MOST_SECONDS", 2.0)
    sent = list[tuple[str, object]]()

    def sabotaged(followers: Followers, name: str, content: object = None) -> None:
        sent.append((name, content))
        send(followers, name, content, sent)

    with engine_of(model, 2) as engine:
        monkeypatch.setattr(Followers, "send", sabotaged)
        # Steps of one token each, so that tensors have the same shapes.
        engine.add(generate("a", tokens(20), max_tokens=100, ignore_eos=True))
        with pytest.raises(RankError, match=error):
            while engine.has_unfinished:
                engine.step()


def test_a_leader_that_has_ended_is_noticed_while_its_messages_are_pending() -> None:
    ours, theirs = socket.socketpair()
    follower, leader = Channel(ours, 1.0), Channel(theirs, 1.0)
    leader.send("compute")
    assert not follower.is_closed()
    leader.close()
    assert follower.is_closed()
    assert follower.receive() == ("compute", None)
    with pytest.raises(EOFError):
        follower.receive()
    follower.close()


def test_followers_end_with_the_leader(model: str) -> None:
    """The leader is a process that is killed."""
    pid = os.fork()
    if pid == 0:
        os.execv(
            sys.executable,
            [
                sys.executable,
                "-c",
                "import sys, time; from trueroll.engine.engine import Engine; from trueroll.engine.config import "
                f"EngineConfig; e = Engine(EngineConfig(model={model!r}, tensor_parallel_size=2, num_blocks=24)); "
                "time.sleep(600)",
            ],
        )
    process = psutil.Process(pid)
    until = time.monotonic() + 60
    while not (found := [c for c in process.children() if "trueroll.engine.parallel.follower" in c.cmdline()]):
        assert time.monotonic() < until
        time.sleep(0.05)
    process.kill()
    os.waitpid(pid, 0)
    _, alive = psutil.wait_procs(found, 30)
    assert alive == []


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (dict(devices="cpu"), r"devices must list 2 devices of the same kind, one per rank, .*got 'cpu'"),
        (dict(devices="cpu,cuda:0"), r"devices must list 2 devices of the same kind"),
        (dict(devices="cuda:x,cuda:0"), r"devices must list 2 devices of the same kind"),
        (
            dict(devices="cuda:0,cuda:0", exchange="group"),
            "exchange: group needs a separate GPU for each rank .got cuda:0, cuda:0",
        ),
        (dict(tensor_parallel_size=1, devices="cpu"), "for a single rank, set device"),
    ],
)
def test_devices_that_ranks_cannot_use_are_refused(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        EngineConfig(**(dict(model="a", tensor_parallel_size=2) | settings))


def test_missing_gpus_are_named() -> None:
    config = EngineConfig(model="a", tensor_parallel_size=2, devices="cuda:0,cuda:99")
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: 2 ranks need the GPUs \[0, 99\], but torch finds"):
        Engine(config)


def test_what_cannot_be_served_is_refused(model: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="must be a power of two up to 4 for this model, because its number of pieces .* .got 8"
    ):
        Engine(EngineConfig(model=model, tensor_parallel_size=8))
    with pytest.raises(ConfigError, match="must be 1 for this model, because its number of pieces"):
        Engine(EngineConfig(model=model, tensor_parallel_size=2, pieces=1))
    with pytest.raises(ModelError, match="nothing"):
        Engine(EngineConfig(model=str(tmp_path / "nothing"), tensor_parallel_size=2))
    assert children() == []
