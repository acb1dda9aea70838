"""Pushes to workers that serve experts.

The matrices arrive as stacks or one by one, and have the bits of a fresh load.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from proofs import proves
from safetensors.torch import load_file
from serving import WorkerOnThread
from torch import Tensor
from transformers import AutoModelForCausalLM
from weight_sync.transports.gloo_push import warm_up

from tiny import MIXTURES, make_tiny_model
from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.errors import PushError
from trueroll.rollout import WeightPublisher
from trueroll.rollout.config import WorkerConfig
from trueroll.weight_sync.payload.manifest import MODEL_FILE
from trueroll.weight_sync.trainer import sender as sender_module

Weights = dict[str, Tensor]
STACK = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """Start the fork server, because the first push through gloo may exceed the timeouts of these tests."""
    warm_up()


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make buckets smaller than a stack, so that a stack is split."""
    monkeypatch.setattr(sender_module, "BUCKET_BYTES", dict.fromkeys(sender_module.BUCKET_BYTES, 20_000))


@contextmanager
def serving(folder: Path, address: str, **settings: Any) -> Iterator[Engine]:
    config = EngineConfig(model=str(folder), num_blocks=32, num_threads=1, backend="cpu", **settings)
    engine = Engine(config)
    running = WorkerOnThread(WorkerConfig(address=address), lambda: engine)
    while running.worker._vitals.health().state == "loading":
        time.sleep(0.001)
    yield engine
    running.worker.drain()
    running.join()
    engine.close()


@contextmanager
def publishing(address: str, transport: Any, **settings: Any) -> Iterator[WeightPublisher]:
    with WeightPublisher(transport, timeout=20.0, **settings) as publisher:
        publisher.connect([address])
        yield publisher


def dense(engine: Engine) -> Weights:
    return {name: weight.to_dense().clone() for name, weight in engine.weights.tensors.items()}


def assert_equal(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name].to(found[name].dtype)) for name in found)


@pytest.fixture(scope="module")
def trained(mixture_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Weights]]:
    """The tensors of a model with other weights, by family and spelling. The spellings are the names in the module and
    the names in a saved checkpoint.
    """
    found = {}
    for family in MIXTURES:
        model = AutoModelForCausalLM.from_pretrained(mixture_models[family], dtype=torch.float32)
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.mul_(1 + 0.01 * number)
        folder = tmp_path_factory.mktemp(family)
        model.save_pretrained(folder)
        found[family] = {"stacks": model.state_dict(), "as saved": load_file(folder / "model.safetensors")}
    return found


# Each family with one transport, and each transport with Qwen3-MoE.
CASES = [("qwen3_moe", way) for way in ("shared", "collective", "disk")]
CASES += [("qwen3_next_moe", "shared"), ("qwen3_5_moe", "shared"), ("gpt_oss", "shared"), ("gpt_oss", "disk")]


@proves("pushes", backend="cpu", dtype="bfloat16")
@pytest.mark.parametrize(("family", "transport"), CASES)
def test_a_push_in_either_spelling_has_the_bits_of_a_fresh_load(
    mixture_models: dict[str, Path], trained: dict[str, dict[str, Weights]], tmp_path: Path, family: str, transport: str
) -> None:
    address = f"ipc://{tmp_path}/worker"
    settings = dict(folder=tmp_path / "pushes") if transport == "disk" else {}
    stacks, saved = trained[family]["stacks"], trained[family]["as saved"]
    assert (saved.keys() == stacks.keys()) == (family == "gpt_oss")
    with (
        serving(mixture_models[family], address, dtype="bfloat16") as engine,
        publishing(address, transport, **settings) as to,
    ):
        before = dense(engine)
        for version, tensors in enumerate((saved, stacks, iter(saved.items()) if transport == "disk" else saved), 1):
            to.push(tensors, version)
            assert_equal(dense(engine), stacks)
            to.push({name: before[name] for name in stacks}, version, allow_older=True)
            assert_equal(dense(engine), before)
        if transport == "disk":
            to.push(saved, 4)
            [folder] = (tmp_path / "pushes").iterdir()
            written = load_file(folder / MODEL_FILE)
            assert written.keys() == saved.keys()
            assert_equal(written, saved)


def test_a_push_in_place_may_bring_experts_one_by_one(
    mixture_models: dict[str, Path], trained: dict[str, dict[str, Weights]], tmp_path: Path
) -> None:
    address = f"ipc://{tmp_path}/worker"
    with serving(mixture_models["qwen3_moe"], address) as engine, publishing(address, "shared", in_place=True) as to:
        to.push(trained["qwen3_moe"]["as saved"], 1)
        assert_equal(dense(engine), trained["qwen3_moe"]["stacks"])


def test_sparse_pushes_bring_changes_in_either_spelling(
    mixture_models: dict[str, Path], trained: dict[str, dict[str, Weights]], tmp_path: Path
) -> None:
    """A few elements of some experts change, and a whole matrix of another expert. The pushes use one spelling after
    the other.
    """
    address = f"ipc://{tmp_path}/worker"
    saved = {name: tensor.clone() for name, tensor in trained["qwen3_moe"]["as saved"].items()}
    stacks = {name: tensor.clone() for name, tensor in trained["qwen3_moe"]["stacks"].items()}
    prefix = "model.layers.0.mlp.experts."

    def change(value: float) -> None:
        saved[f"{prefix}3.up_proj.weight"][5, 7:9] = stacks[STACK][3, 32 + 5, 7:9] = value
        saved[f"{prefix}0.gate_proj.weight"][31, 63] = stacks[STACK][0, 31, 63] = value
        saved[f"{prefix}7.gate_proj.weight"][:] = stacks[STACK][7, :32] = value
        saved[f"{prefix}6.down_proj.weight"][63, 0] = stacks[f"{prefix}down_proj"][6, 63, 0] = value

    with serving(mixture_models["qwen3_moe"], address) as engine, publishing(address, "shared", sparse=True) as to:
        whole = to.push(saved, 1)
        for version, tensors in enumerate((saved, stacks, stacks, saved), 2):
            change(float(version))
            result = to.push(tensors, version)
            assert result.is_sparse and result.num_bytes < whole.num_bytes / 5
            assert_equal(dense(engine), stacks)


def test_sparse_pushes_to_stacks_with_interleaved_rows(
    mixture_models: dict[str, Path], trained: dict[str, dict[str, Weights]], tmp_path: Path
) -> None:
    address = f"ipc://{tmp_path}/worker"
    stacks = {name: tensor.clone() for name, tensor in trained["gpt_oss"]["stacks"].items()}
    with serving(mixture_models["gpt_oss"], address) as engine, publishing(address, "shared", sparse=True) as to:
        to.push(stacks, 1)
        stacks[STACK][2, 5, 7:9] = 3.0
        stacks[f"{STACK}_bias"][1, 9] = 4.0
        assert to.push(stacks, 2).is_sparse
        assert_equal(dense(engine), stacks)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.experts.5.down_proj.weight"),
            r"missing: .*\.1\..*\.5\.down_proj.weight;",
        ),
        (lambda t: t.update({STACK: torch.zeros(8, 64, 64)}), f"both whole and in parts: {STACK};"),
        (
            lambda t: t.update({"model.layers.0.mlp.experts.8.down_proj.weight": torch.zeros(64, 32)}),
            r"experts.8.down_proj.weight: unknown to the worker's model",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.experts.3.down_proj.weight": torch.zeros(32, 64)}),
            r"experts.3.down_proj.weight: expected shape \[64, 32\], found \[32, 64\]",
        ),
        (
            lambda t: t.update({"module.model.layers.0.mlp.experts.3.down_proj.weight": torch.zeros(64, 32)}),
            r"but model.layers.0.mlp.experts.3.down_proj.weight is known; push the module inside .* .'module.'",
        ),
    ],
    ids=["missing", "both", "too many", "shape", "wrapped"],
)
@pytest.mark.parametrize("known_ahead", [True, False])
def test_experts_that_do_not_fit_are_refused(
    refusing: tuple[Engine, str],
    trained: dict[str, dict[str, Weights]],
    change: Callable[[Weights], Any],
    message: str,
    known_ahead: bool,
) -> None:
    engine, address = refusing
    tensors, before = dict(trained["qwen3_moe"]["as saved"]), dense(engine)
    change(tensors)
    with publishing(address, "shared") as to, pytest.raises(PushError, match=message):
        to.push(tensors if known_ahead else iter(tensors.items()), 1)
    assert_equal(dense(engine), before)


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, str]]:
    folder = tmp_path_factory.mktemp("refusing")
    address = f"ipc://{folder}/worker"
    with serving(make_tiny_model("qwen3_moe", folder / "model"), address) as engine:
        yield engine, address
