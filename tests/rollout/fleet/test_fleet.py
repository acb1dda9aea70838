"""A fleet on a real Ray cluster. All tests of this file share one cluster."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import pytest
import ray
from chaos.campaign import STRICT, VICTIMS, Campaign, check_samples, plan
from chaos.work import MOMENTS, BrokenPromise, bits, write_old_push
from chaos.work import PROMPTS as WORKLOAD
from matrix import thinned
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file

from tiny import make_tiny_model
from trueroll.errors import (
    ConfigError,
    IllegalStateError,
    ModelError,
    PushError,
    TruerollError,
    WorkerFailedError,
    WorkerLostError,
)
from trueroll.rollout import Fleet, FleetClient, Group, SamplingParams, WeightPublisher
from trueroll.rollout.fleet import ray_cluster as ray_cluster_module
from trueroll.rollout.fleet.config import read_config
from trueroll.rollout.fleet.ray_access import asks_for_token
from trueroll.rollout.fleet.ray_cluster import Cluster, WorkerActor
from trueroll.rollout.fleet.slots import Slots
from trueroll.rollout.fleet.totals import FleetHealth
from trueroll.rollout.protocol import Health

SETTINGS: dict[str, Any] = dict(device="cpu", num_threads=1, num_blocks=256)
PARAMS = SamplingParams(n=2, max_tokens=8, ignore_eos=True)
PROMPTS = [[i, 5, 6] for i in range(1, 7)]
EXAMPLES = Path(__file__).parents[3] / "examples"
CLI = "from trueroll.rollout.tools.program import main; main()"
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file by which the chaos campaign recognizes its workers."""
    file = tmp_path_factory.mktemp("chaos") / "fleet.json"
    os.environ["TRUEROLL_CHAOS"] = str(file)  # inherited by Ray's processes
    local = Cluster(None)  # used by every fleet of this process
    yield file
    local.close()
    del os.environ["TRUEROLL_CHAOS"]


@pytest.fixture(scope="module")
def fleet(cluster: Path, tiny_llama: Path) -> Iterator[Fleet]:
    """A fleet of workers with drafts, so that the tests of failovers cover drafts."""
    file = cluster.parent / "members.json"
    with Fleet(str(tiny_llama), 2, metrics_port=0, file=file, speculative="ngram", **SETTINGS) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def client(fleet: Fleet) -> Iterator[FleetClient]:
    with (client := FleetClient(fleet)):
        yield client


def load_example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


def tokens(client: FleetClient) -> list[list[list[int]]]:
    return [[s.token_ids for s in group.samples] for group in client.generate(PROMPTS, PARAMS, seed=3)]


def wait_until(holds: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_all_workers_serve_and_are_children_of_their_actors(fleet: Fleet, client: FleetClient) -> None:
    tokens(client)
    assert fleet.num_serving == 2 and {*client.healths()} == {"worker-0", "worker-1"} == {*fleet.pids()}
    assert all(stats.service["finished"] > 0 for stats in client.all_stats().values())
    for actor, worker in fleet.pids().values():
        assert psutil.Process(worker).nice() == psutil.Process().nice(), "it has the same priority"
        assert psutil.Process(worker).ppid() == actor != os.getpid()


@pytest.mark.parametrize("victim", ["actor", "worker"])
def test_a_worker_that_is_killed_is_replaced(fleet: Fleet, client: FleetClient, victim: str) -> None:
    expected, before = tokens(client), fleet.members()
    drafts = [each for stats in client.all_stats().values() for each in stats.engine["drafts"]]
    assert sum(sum(each["accepted"]) for each in drafts) > 0, "premise: the workers drafted"
    actor, worker = fleet.pids()["worker-0"]
    os.kill(actor if victim == "actor" else worker, signal.SIGKILL)
    assert tokens(client) == expected
    wait_until(lambda: fleet.num_serving == 2 and fleet.members() != before)
    assert tokens(client) == expected
    wait_until(lambda: not psutil.pid_exists(actor) and not psutil.pid_exists(worker))
    assert fleet.reports()["worker-0"].restarts > 0


@pytest.mark.parametrize("victim", ["follower", "actor"])
@thinned(lambda victim: victim == "follower")  # every run kills an actor with one rank
def test_an_actor_runs_a_worker_with_several_ranks(
    cluster: Path, client: FleetClient, tiny_llama: Path, victim: str
) -> None:
    """The worker gives the samples of workers with one rank. All of its processes are replaced if one is killed."""
    with Fleet(str(tiny_llama), 1, tensor_parallel_size=2, **SETTINGS) as fleet, FleetClient(fleet) as of_ranks:
        actor, worker = fleet.pids()["worker-0"]
        followers = psutil.Process(worker).children()
        assert len(followers) == 1
        assert tokens(of_ranks) == tokens(client)
        os.kill(actor if victim == "actor" else followers[0].pid, signal.SIGKILL)
        assert tokens(of_ranks) == tokens(client)
        wait_until(lambda: fleet.num_serving == 1 and fleet.pids()["worker-0"][1] != worker)
        lost = (worker, *[each.pid for each in followers])
        wait_until(lambda: not any(map(psutil.pid_exists, lost)))


def test_a_worker_lost_while_the_others_sleep_is_replaced_when_they_wake_up(
    fleet: Fleet, client: FleetClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[bool] = []
    are_asleep = Slots.are_asleep.fget
    assert are_asleep is not None

    def look(slots: Slots) -> bool:
        looks.append(are_asleep(slots))
        return looks[-1]

    expected = tokens(client)
    client.sleep()
    wait_until(lambda: {report.health and report.health.state for report in fleet.reports().values()} == {"asleep"})
    _, worker = fleet.pids()["worker-1"]
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: fleet.num_serving == 1)
    restarts = fleet.reports()["worker-1"].restarts
    monkeypatch.setattr(Slots, "are_asleep", property(look))
    wait_until(lambda: len(looks) >= 3)  # the keeper has checked whether another worker may start
    assert all(looks)
    assert [member.name for member in fleet.members()] == ["worker-0"] and "worker-1" not in fleet.pids()
    assert fleet.reports()["worker-1"].restarts == restarts
    with pytest.raises(IllegalStateError, match="scale: all workers are asleep"):
        fleet.scale(3)
    client.wake_up()
    fleet.scale(2)
    assert tokens(client) == expected


def test_leaving_workers_finish_their_requests(fleet: Fleet, client: FleetClient) -> None:
    fleet.scale(3)
    wait_until(lambda: len(client.healths()) == 3)
    long = SamplingParams(n=2, max_tokens=400, ignore_eos=True)
    is_over = threading.Event()
    found: list[Group] = []

    def generate() -> None:
        for i in count():  # a new worker gets no requests before its first health check
            if is_over.is_set():
                break
            found.extend(client.generate([[*prompt, i % 100] for prompt in PROMPTS], long, seed=3))

    thread = threading.Thread(target=generate, daemon=True)
    thread.start()
    wait_until(lambda: sum(health.requests["open"] > 0 for health in client.healths().values()) == 3)
    fleet.scale(2)
    is_over.set()
    thread.join()
    assert {len(sample.token_ids) for group in found for sample in group.samples} == {400}
    assert [member.name for member in fleet.members()] == ["worker-0", "worker-1"]
    assert fleet.reports()["worker-1"].standing == "serving"


def test_scale_raises_if_the_fleet_is_closed_meanwhile(cluster: Path, tiny_llama: Path) -> None:
    fleet = Fleet(str(tiny_llama), 1, **SETTINGS)
    threading.Timer(0.2, fleet.close).start()
    with pytest.raises(TruerollError, match="closed; make a new one"):
        fleet.scale(2)


def test_one_scrape_has_the_metrics_of_all_workers(fleet: Fleet, client: FleetClient) -> None:
    url = f"http://127.0.0.1:{fleet.metrics_port}"
    wait_until(lambda: all(report.stats is not None for report in fleet.reports().values()))
    text = urllib.request.urlopen(f"{url}/metrics").read().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    workers = {sample.labels["worker"] for sample in families["trueroll_requests_finished"].samples}
    assert workers == {"worker-0", "worker-1"}
    serving = {sample.labels["standing"]: sample.value for sample in families["trueroll_fleet_workers"].samples}
    assert serving == {"starting": 0, "joining": 0, "serving": 2, "leaving": 0}
    assert {sample.labels["worker"] for sample in families["trueroll_fleet_restarts"].samples} == workers
    assert b'"state": "ready"' in urllib.request.urlopen(f"{url}/healthz").read()


@pytest.mark.parametrize("told", ["the fleet", "its file"])
@thinned(lambda told: told == "its file")  # other tests connect a publisher to the fleet
def test_workers_wait_for_weights_that_all_lost_right_after_a_push(
    cluster: Path, fleet: Fleet, client: FleetClient, tiny_llama: Path, told: str
) -> None:
    """The trainer is in the process of the fleet, or has only the fleet's file. The folder of weights contains a push
    of an earlier run.
    """
    tensors = {name: tensor * 1.25 for name, tensor in load_file(tiny_llama / "model.safetensors").items()}
    write_old_push(fleet._weights.folder.path, tiny_llama, ("0" if told == "the fleet" else "1") * 32)
    before, version = fleet.pids(), max(health.weight_version or 0 for health in client.healths().values()) + 1
    with WeightPublisher("shared") as publisher:
        publisher.connect_fleet(fleet if told == "the fleet" else cluster.parent / "members.json")
        publisher.push(tensors, version)
        for _, worker in before.values():
            os.kill(worker, signal.SIGKILL)
        wait_until(lambda: len(fleet.pids()) == 2 and not {*fleet.pids().values()} & {*before.values()})
        wait_until(lambda: [member.standing for member in fleet.members()] == ["joining"] * 2)
        with pytest.raises(IllegalStateError, match=rf"of version {version} .* publisher.restore\(model\)"):
            fleet.scale(2)
        assert [member.standing for member in fleet.members()] == ["joining"] * 2
        publisher.restore(tensors)
        fleet.scale(2)
    wait_until(lambda: fleet.num_serving == 2)
    assert {health.weight_version for health in client.healths().values()} == {version}


def troubles_of(health: Health) -> tuple[str, ...]:
    assert isinstance(health, FleetHealth)
    return health.troubles


def test_a_failing_hand_over_is_raised_and_reported(
    fleet: Fleet, client: FleetClient, tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with WeightPublisher("shared") as publisher:
        publisher.connect_fleet(fleet)
        publisher.push(load_file(tiny_llama / "model.safetensors"), 3)
    joins = fleet._weights.folder.path / "joins"
    joins.rmdir()
    joins.write_text("")
    for call in (lambda: fleet.scale(3), lambda: fleet.scale(3)):
        with pytest.raises(PushError, match="worker-2: could not get the weights .* in 3 attempts: weights_folder"):
            call()
    wait_until(lambda: troubles_of(client.health()) != ())
    assert troubles_of(client.health()) == troubles_of(fleet.health())
    assert "worker-2: weights_folder: cannot create" in troubles_of(fleet.health())[0]
    url = f"http://127.0.0.1:{fleet.metrics_port}"
    assert b"cannot create" in urllib.request.urlopen(f"{url}/healthz").read()
    text = urllib.request.urlopen(f"{url}/metrics").read().decode()
    (failures,) = re.findall(r'trueroll_fleet_failed_hand_overs_total{worker="worker-2"} (\d+)', text)
    given_up = [
        record for record in caplog.records if record.levelname == "ERROR" and "could not get" in record.message
    ]
    assert int(failures) == 6 and len(given_up) == 2
    joins.unlink()
    fleet.scale(3)
    assert troubles_of(fleet.health()) == () and {h.weight_version for h in client.healths().values()} == {3}
    _assert_a_joining_worker_leaves(fleet)


def _assert_a_joining_worker_leaves(fleet: Fleet) -> None:
    slots = fleet._slots
    slot: Any = next(slot for slot in slots if slot.name == "worker-2")
    joins, may_end, has_ended = threading.Event(), threading.Event(), threading.Event()

    async def attempt(*_: object) -> str:
        joins.set()
        await asyncio.to_thread(may_end.wait)
        has_ended.set()
        return "done"

    def standing() -> list[str]:
        return [member.standing for member in fleet.members() if member.name == "worker-2"]

    slot.joining.attempt = attempt
    slots.stand(slot, "joining")
    joins.wait()
    thread = threading.Thread(target=fleet.scale, args=(2,))
    thread.start()
    wait_until(lambda: standing() == ["leaving"])
    with patch.object(slots, "stand", wraps=slots.stand) as stand:
        may_end.set()
        thread.join()
    assert has_ended.is_set(), "premise"
    assert not stand.called and standing() == []


ORPHAN = """
import asyncio, os, psutil, signal, time
parent = os.getpid()
if os.fork():
    os._exit(0)
while os.getppid() == parent:
    time.sleep(0.01)
from trueroll.rollout.fleet.ray_cluster import Cluster
assert "RAY_RAYLET_PID" not in os.environ
cluster = Cluster(None)
[raylet] = [child for child in psutil.Process().children() if child.name() == "raylet"]
raylet.kill()
raylet.wait()
assert not cluster.is_alive()


async def main():
    signal.signal(signal.SIGTERM, lambda *_: print("told to end", flush=True))
    await cluster.reconnect()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.1)
    print(os.getppid(), cluster.is_alive(), flush=True)
    cluster.close()


asyncio.run(main())
"""


def test_a_fleet_of_a_service_manager_outlives_its_raylet_and_gets_sigterm() -> None:
    found = subprocess.run([sys.executable, "-P", "-c", ORPHAN], stdout=subprocess.PIPE, text=True).stdout
    assert found.endswith("\ntold to end\n1 True\n")  # premise: the parent is process 1


THREAD = """
import asyncio, os, threading, time
from trueroll.rollout.fleet.ray_cluster import Cluster, ray
clusters = []
thread = threading.Thread(target=lambda: clusters.append(Cluster(None)))
thread.start()
thread.join()
while os.path.exists(f"/proc/self/task/{thread.native_id}"):  # until all that depends on the thread has ended
    time.sleep(0.01)
print(clusters[0].is_alive(), flush=True)
another = Cluster(None)
clusters[0].close()
print(another.is_alive(), another.is_there, ray.is_initialized(), flush=True)
asyncio.run(another.reconnect())
print(another.is_alive(), another.is_there, flush=True)
another.close()
"""


def test_a_cluster_outlives_its_thread_and_is_restarted_if_another_fleet_ends_it() -> None:
    found = subprocess.run([sys.executable, "-P", "-c", THREAD], stdout=subprocess.PIPE, text=True).stdout
    assert found.endswith("True\nFalse False False\nTrue True\n")


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
@thinned(lambda end: end == signal.SIGTERM)
def test_from_the_shell_a_fleet_joins_a_cluster_and_ends_with_its_process(
    cluster: Path, tiny_llama: Path, tmp_path: Path, end: signal.Signals
) -> None:
    file, config = tmp_path / "fleet.json", tmp_path / "fleet.toml"
    address = ray.get_runtime_context().gcs_address
    config.write_text(
        f'model = "{tiny_llama}"\nnum_workers = 1\nray_address = "{address}"\nfile = "{file}"\n'
        'device = "cpu"\nnum_blocks = 64\nnum_threads = 1\n'
    )
    local = Cluster(None).local
    assert local is not None
    environment = os.environ | local.variables
    command = [sys.executable, "-P", "-c", CLI, "fleet", str(config)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == f"ready workers=1 fleet={file}\n".encode()
        with (client := FleetClient(file)):
            worker = client.healths()["worker-0"]
            assert worker.state == "ready"
            pid = next(p.pid for p in psutil.process_iter() if _has_socket(p, file))
        shown = subprocess.run([sys.executable, "-P", "-c", CLI, "top", str(file)], capture_output=True, text=True)
        assert "1 workers" in shown.stdout and re.search(r"^worker-0 +ready +version 0 ", shown.stdout, re.M)
        process.send_signal(end)
        assert process.wait(60) == (0 if end == signal.SIGTERM else -9)
        assert file.exists() == (end == signal.SIGKILL)
        wait_until(lambda: not psutil.pid_exists(pid))
    finally:
        process.kill()
        if process.stdout is not None:
            process.stdout.close()


def _has_socket(process: psutil.Process, file: Path) -> bool:
    """Return whether a process is the worker that is named in the file."""
    try:
        path = file.read_text().split("ipc://")[1].split('"')[0]
        is_worker = "trueroll.rollout.worker.process" in process.cmdline()
        return is_worker and any(connection.laddr == path for connection in process.net_connections("unix"))
    except (psutil.Error, IndexError, OSError):
        return False


OPEN_CLUSTER = """
import logging, os, ray
os.environ["RAY_AUTH_MODE"] = "disabled"
there = ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=80 * 2**20)
from trueroll.errors import ConfigError
from trueroll.rollout.fleet.ray_cluster import Cluster
for address in (None, there.address_info["gcs_address"]):
    try:
        Cluster(address)
    except ConfigError as error:
        print(error, flush=True)
    logging.basicConfig(format="%(levelname)s %(message)s")
    Cluster(address, without_authentication=True)
    ray.shutdown() if address else None
"""


def test_a_cluster_that_asks_for_no_token_needs_a_setting_and_warns(cluster: Path) -> None:
    assert asks_for_token(ray.get_runtime_context().gcs_address)
    done = subprocess.run([sys.executable, "-P", "-c", OPEN_CLUSTER], capture_output=True, text=True)
    refusal = r"fleet: the Ray cluster at \S+ asks for no token: .* set ray_without_authentication=True"
    assert len(re.findall(refusal, done.stdout)) == 2, done.stderr
    assert len(re.findall(r"WARNING fleet: the Ray cluster at \S+ asks for no token", done.stderr)) == 2


def test_without_a_cluster_ray_is_not_called(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of Ray would start another cluster."""
    there = Cluster(None)
    actor = WorkerActor(there, 0.0, 0.0, {})

    async def lose_and_ask() -> None:
        with pytest.raises(ConfigError):
            await there.reconnect()
        await actor.stop(5.0)
        with pytest.raises(WorkerLostError, match="its Ray cluster was lost"):
            await actor.pids()

    monkeypatch.setattr(there, "_connect", fail_to_connect)
    monkeypatch.setattr(ray_cluster_module, "_shut_down", lambda: None)  # keep the shared cluster
    monkeypatch.setattr(ray, "kill", pytest.fail)
    asyncio.run(lose_and_ask())
    monkeypatch.undo()
    there._is_reconnecting = False
    actor.kill()


def fail_to_connect() -> None:
    raise ConfigError("fleet: expected a Ray cluster, found none")


def test_settings_that_cannot_work_are_reported_at_once(cluster: Path, tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        Fleet(str(tmp_path / "nowhere"), 1, **SETTINGS)
    with pytest.raises(ConfigError, match="block_size"):
        Fleet(str(tiny_llama), 1, block_size=3, **SETTINGS)
    with pytest.raises(ConfigError, match="num_workers: .* 1 .got 0"):
        Fleet(str(tiny_llama), 0, **SETTINGS)
    with pytest.raises(ConfigError, match="hang_seconds: .* 0 .got -1"):
        Fleet(str(tiny_llama), 1, hang_seconds=-1.0, **SETTINGS)
    with pytest.raises(ConfigError, match="cpu: unknown"):
        Fleet(str(tiny_llama), 1, cpu=1.0, **SETTINGS)
    with pytest.raises(ConfigError, match="address: a fleet gives each worker its own address"):
        Fleet(str(tiny_llama), 1, address="tcp://127.0.0.1:*", **SETTINGS)
    with pytest.raises(WorkerFailedError, match="not ready within startup_timeout"):
        Fleet(str(tiny_llama), 1, startup_timeout=0.1, **SETTINGS)
    with pytest.raises(ConfigError, match="file: the folder of .* does not exist"):
        Fleet(str(tiny_llama), 1, file=tmp_path / "nowhere" / "fleet.json", **SETTINGS)
    with pytest.raises(ConfigError, match="weights_folder: cannot create or write to the folder"):
        Fleet(str(tiny_llama), 1, weights_folder=tiny_llama / "config.json", **SETTINGS)
    config = tmp_path / "fleet.toml"
    for text, found in (("model = 1", "model"), ("mode = 'x'", "mode"), ("=", "TOML")):
        config.write_text(text)
        with pytest.raises(ConfigError, match=found):
            read_config(config)


def test_a_short_chaos_campaign(cluster: Path, tiny_llama: Path) -> None:
    """`make chaos` runs 200 rounds, and also kills raylets."""
    rounds = [("actor", "stage"), ("all", "generate"), ("folder", "score")]
    campaign = Campaign(tiny_llama, cluster, seed=1, **STRICT)
    try:
        campaign.run(rounds)
        campaign.close()
    finally:
        campaign.fleet.close()
    assert campaign.numbers.rounds == len(rounds)


def test_the_campaign_notices_lost_stale_mixed_and_different_samples() -> None:
    def group(*versions: int, token: int = 7) -> Any:
        spans = [SimpleNamespace(version=version) for version in versions]
        return SimpleNamespace(
            samples=[SimpleNamespace(token_ids=[token], logprobs=np.zeros(1, np.float32), weight_versions=spans)]
        )

    groups = [group(2) for _ in WORKLOAD]
    expected = bits(groups)
    check_samples(groups, {2}, lambda version: expected)
    for found, message in [
        (groups[1:], f"{len(WORKLOAD)} prompts got {len(WORKLOAD) - 1} groups"),
        ([group(1), *groups[1:]], "weight versions {1}, not one of {2}"),
        ([group(1, 2), *groups[1:]], "weight versions {1, 2}, not one of {2}"),
        ([*groups[1:], group(2, token=8)], "the samples differ"),
    ]:
        with pytest.raises(BrokenPromise, match=re.escape(message)):
            check_samples(found, {2}, lambda version: expected)


def test_the_long_campaign_kills_everything_at_each_moment() -> None:
    for seed in range(4):
        rounds = plan(seed, 200)
        assert len(rounds) == 200 and {(v, m) for v in VICTIMS for m in MOMENTS} == {*rounds}


@pytest.mark.exhaustive  # `tests/examples` kills a worker of the example, and the campaign above one of a fleet
def test_the_example_trainer_survives_a_loss_with_the_same_metrics(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metrics are compared with those of an undisturbed run with one worker."""
    model = make_tiny_model("llama", tmp_path / "tiny", dtype="bfloat16")
    grpo = load_example("grpo")
    fields: dict[str, Any] = dict(steps=3, seed=1, prompts=2, model=str(model), checkpoint_every=3)
    fields |= dict(unaligned=False, staleness=0, sleep=0, resume=False)
    grpo.main(tmp_path / "one", **fields)
    killed: list[int] = []

    class Disturbed(FleetClient):
        """A client that kills a worker during each call of `generate`."""

        def __init__(self, fleet: Fleet, **settings: Any) -> None:
            super().__init__(fleet, **settings)
            self.fleet = fleet

        def generate(self, *args: Any, **settings: Any) -> Any:
            if self.fleet.num_serving == 2:
                name = f"worker-{len(killed) % 2}"
                killed.append(self.fleet.pids()[name][1])
                threading.Timer(0.005, os.kill, (killed[-1], signal.SIGKILL)).start()
            return super().generate(*args, **settings)

    monkeypatch.setattr(grpo, "FleetClient", Disturbed)
    grpo.main(tmp_path / "two", workers=2, **fields)
    assert killed
    assert (tmp_path / "two" / "metrics.csv").read_bytes() == (tmp_path / "one" / "metrics.csv").read_bytes()
