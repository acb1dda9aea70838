"""Pushes of LoRA adapters: the worker serves exactly the weights, to the bit, that the trainer computes with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import ATTENTION, HYBRID, LATENT, NEMOTRON, adapt, change
from proofs import proves
from pushing import HandPush
from serving import RawClient
from torch import Tensor

from tiny import make_tiny_model
from trueroll.engine.engine import Engine
from trueroll.errors import ConfigError, PushError
from trueroll.kernels.training import align, merged_weights, token_log_probs
from trueroll.rollout import RolloutClient, SamplingParams, WeightPublisher

from .test_expert_pushes import assert_equal, dense, publishing, serving

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": dict(target_modules="all-linear", modules_to_save=["lm_head", "norm"]),
    "qwen3_5": dict(target_modules=HYBRID, use_rslora=True),
    "qwen3_moe": dict(target_modules=ATTENTION),
    "deepseek_v3": dict(target_modules=LATENT),
    "nemotron_h": dict(target_modules=NEMOTRON),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("adapted")
    return {family: make_tiny_model(family, parent / family) for family in FAMILIES}


@pytest.fixture
def llama(folders: dict[str, Path], tmp_path: Path) -> Iterator[tuple[Engine, str]]:
    """A worker that serves `llama` in bfloat16."""
    address = f"ipc://{tmp_path}/worker"
    with serving(folders["llama"], address, dtype="bfloat16") as engine:
        yield engine, address


def merged(model: Any, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    return dict(merged_weights(model, dtype))


def assert_serves(engine: Engine, model: Any) -> None:
    """Compare bit by bit, tensor by tensor."""
    expected = merged(model, engine.weights.model.dtype)
    assert_equal(dense(engine), {name: expected[name] for name in engine.weights.shapes})


@proves("pushes", backend="cpu", dtype="bfloat16")
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_are_equal_after_twenty_optimizer_steps(folders: dict[str, Path], tmp_path: Path, family: str) -> None:
    address, model = f"ipc://{tmp_path}/worker", adapt(folders[family], **FAMILIES[family])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    align(model)
    prompt, params = list(range(3, 13)), SamplingParams(n=2, max_tokens=6, ignore_eos=True)
    seen = []
    with (
        serving(folders[family], address, dtype="bfloat16") as engine,
        publishing(address, "shared") as to,
        RolloutClient(address) as client,
    ):
        for version in range(1, 21):
            pushed = to.push(model, version, adapters=True)
            [group] = client.generate([prompt], params, seed=version, min_weight_version=version)
            ids = torch.tensor([prompt + sample.token_ids for sample in group.samples])
            with torch.autocast("cpu", torch.bfloat16):
                found = token_log_probs(model, ids)[:, len(prompt) :]
            sampled = np.stack([sample.logprobs for sample in group.samples if sample.logprobs is not None])
            assert found.detach().numpy().tobytes() == sampled.tobytes()
            seen.append(sampled.tobytes())
            (found * torch.tensor([[1.0], [-1.0]])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert len(set(seen)) == 20
        to.push(model, 21, adapters=True)
        assert_serves(engine, model)
        whole = to.push(model, 22)
        assert_serves(engine, model)
        assert whole.num_bytes > 2 * pushed.num_bytes


@pytest.mark.parametrize("transport", ["collective", "relay", "disk"])
def test_every_transport_brings_adapters(
    llama: tuple[Engine, str], folders: Any, tmp_path: Path, transport: str
) -> None:
    (engine, address), model = llama, adapt(folders["llama"], **FAMILIES["llama"])
    settings = dict(folder=tmp_path / "pushes") if transport == "disk" else {}
    with publishing(address, transport, **settings) as to:
        for version, alone in enumerate((True, False, True), 1):
            change(model, seed=version)
            to.push(model, version, adapters=alone)
            assert_serves(engine, model)


def test_an_adapter_may_be_larger_than_its_weight(tmp_path: Path) -> None:
    """An example is the adapter of a gate with a single row, if all linear modules have adapters."""
    folder, address = make_tiny_model("qwen3_5_moe", tmp_path / "model"), f"ipc://{tmp_path}/worker"
    model = adapt(folder, target_modules="all-linear", r=16)
    gate = model.get_base_model().model.layers[0].mlp.shared_expert_gate
    assert gate.lora_A["default"].weight.numel() == 16 * gate.base_layer.weight.numel()
    with serving(folder, address, dtype="bfloat16") as engine, publishing(address, "shared") as to:
        for version, alone in enumerate((True, False), 1):
            change(model, seed=version)
            to.push(model, version, adapters=alone)
            assert_serves(engine, model)


def test_each_push_adds_to_the_weights_before_adapters(llama: tuple[Engine, str], folders: Any) -> None:
    """The adapters move to other modules and back. A weight without an adapter has its base value."""
    (engine, address), first = llama, dense(llama[0])
    configs: tuple[dict[str, Any], ...] = (
        dict(target_modules=["q_proj"]),
        dict(target_modules=["v_proj", "down_proj"], modules_to_save=["lm_head"]),
        dict(target_modules="all-linear"),
        dict(target_modules=["q_proj"], r=2),
    )
    with publishing(address, "shared") as to:
        for version, config in enumerate(configs, 1):
            model = adapt(folders["llama"], seed=version, **config)
            to.push(model, version, adapters=True)
            assert_serves(engine, model)
            changed = {name for name, tensor in dense(engine).items() if not torch.equal(tensor, first[name])}
            assert changed == {*engine.weights.base.kept}
            assert_equal(
                {name: engine.weights.before_adapters(name) for name in first},
                first,
            )


@pytest.mark.parametrize("sparse", [False, True])
def test_adapters_start_anew_after_a_push_of_weights(llama: tuple[Engine, str], folders: Any, sparse: bool) -> None:
    (engine, address), model = llama, adapt(folders["llama"])
    plain = {name: tensor + 1 for name, tensor in dense(engine).items()}
    with publishing(address, "shared", sparse=sparse) as to:
        to.push(plain, 1)
        with pytest.raises(PushError, match="adapters: the adapters were trained on other weights than this worker's"):
            to.push(model, 2, adapters=True)
        assert_equal(dense(engine), plain)
        assert not to.push(model, 2).is_sparse
        assert_serves(engine, model)
        change(model, seed=2)
        to.push(model, 3, adapters=True)
        assert_serves(engine, model)
        assert not to.push(plain, 4).is_sparse, "the worker does not serve the publisher's copy"
        assert_equal(dense(engine), plain)
        assert not engine.weights.base.kept
        plain["model.norm.weight"] = plain["model.norm.weight"] + 1
        assert to.push(plain, 5).is_sparse == sparse
        assert_equal(dense(engine), plain)


def test_adapters_of_a_sleeping_worker(llama: tuple[Engine, str], folders: Any) -> None:
    (engine, address), model = llama, adapt(folders["llama"])
    with publishing(address, "shared") as to, RolloutClient(address) as client:
        to.push(model, 1, adapters=True)
        client.sleep(1)
        client.wake_up()
        assert_serves(engine, model)
        change(model, seed=1)
        to.push(model, 2, adapters=True)
        assert_serves(engine, model)
        client.sleep(2)
        assert not engine.weights.base.kept
        client.wake_up(tags=["weights"])
        with pytest.raises(
            PushError, match="this worker has lost the base weights .*; push the model without adapters=True"
        ):
            to.push(model, 3, adapters=True)
        to.push(model, 3)
        client.wake_up(tags=["kv_cache"])
        change(model, seed=2)
        to.push(model, 4, adapters=True)
        assert_serves(engine, model)


def test_only_weights_with_adapters_take_more_memory(llama: tuple[Engine, str], folders: Any) -> None:
    (engine, address), model = llama, adapt(folders["llama"], target_modules=["q_proj"])
    with publishing(address, "shared") as to, RolloutClient(address) as client:
        before = client.health().memory["weights"]
        for version in (1, 2, 3):
            to.push(model, version, adapters=True)
            after = client.health().memory
            assert after["weights"] - before == 2 * 2 * 64 * 64 and after["staging"] == 0
        to.push(model, 4)
        to.push(dense(engine), 5)
        assert client.health().memory["weights"] == before


def test_restarted_workers_get_adapters_again(folders: dict[str, Path], tmp_path: Path) -> None:
    """A restarted worker gets the adapters from `restore`, which also pushes the base weights, or from the folders of
    the last push and its base.
    """
    address, pushes, model = f"ipc://{tmp_path}/worker", tmp_path / "pushes", adapt(folders["llama"])
    with publishing(address, "shared") as to, publishing(address, "disk", folder=pushes) as by_disk:
        with serving(folders["llama"], address, dtype="bfloat16"):
            to.push(model, 1, adapters=True)
            assert to.restore(model) is None
            by_disk.push(model, 2)
            change(model, seed=1)
            by_disk.push(model, 3, adapters=True)
            assert len([*pushes.iterdir()]) == 2
            to.push(model, 4, adapters=True)
        with serving(folders["llama"], address, dtype="bfloat16") as engine:
            result = to.restore(model)
            assert result is not None and result.version == 4
            assert_serves(engine, model)
        with serving(folders["llama"], address, dtype="bfloat16") as engine:
            for folder in sorted(pushes.iterdir()):
                by_disk.push_folder(folder)
            assert_serves(engine, model)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda m: m.model.embed_tokens.weight.add_(1), r"\(model.embed_tokens.weight differ\); push the model"),
        (lambda m: m.model.layers[0].self_attn.q_proj.lora_A["default"].weight[0].fill_(float("nan")), "finite"),
        (
            lambda m: [p.fill_(1e19) for name, p in m.named_parameters() if "0.self_attn.q_proj.lora_" in name],
            "the sum with its adapter",
        ),
    ],
    ids=["base", "nan", "overflow"],
)
def test_wrong_values_are_refused_and_the_old_weights_are_served(
    llama: tuple[Engine, str], folders: Any, spoil: Any, message: str
) -> None:
    (engine, address), model = llama, adapt(folders["llama"])
    with publishing(address, "shared") as to:
        to.push(model, 1, adapters=True)
        before = dense(engine)
        base, kept = engine.weights.base, dict(engine.weights.base.kept)
        with torch.no_grad():
            spoil(model.get_base_model())
        with pytest.raises(PushError, match=message):
            to.push(model, 2, adapters=True)
        assert_equal(dense(engine), before)
        assert engine.weights.base is base and base.kept == kept
        model = adapt(folders["llama"], seed=3)
        to.push(model, 2, adapters=True)
        assert_serves(engine, model)


NAME = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        (dict(weights=[["nowhere.weight", 4, 1.0]]), "nowhere.weight: unknown to the worker's model"),
        (dict(weights=[["model.norm.weight", 4, 1.0]]), r"only a matrix can have an adapter \(shape \[64\]\)"),
        (
            dict(weights=[[NAME, 2**16 - 1, 1.0]]),
            "A and B together have .* elements .limit .*, 4 times the elements of all weights",
        ),
        (
            dict(weights=[[NAME, 4, 1.0]], base=[]),
            f"{NAME} have adapters, but adapters.base does not list these weights",
        ),
        (dict(weights=[[NAME, 4, 1.0]], base=[[NAME, 7]]), f"{NAME} differ"),
        (dict(weights=[[NAME, 0, 1.0]]), "needs an integer rank and a finite scale"),
        (dict(weights=[[NAME, 4, float("nan")]]), "needs an integer rank and a finite scale"),
        (dict(weights=[[NAME, 4, 1.0]] * 2), "appears twice"),
        (dict(weights=[NAME]), "must have a name and 2 other values"),
        (dict(weights={NAME: [4, 1.0]}), "expected an array"),
        (dict(weights=[], base=[[NAME, -1]]), r"must be an integer in \[0, 2\*\*64\)"),
        (dict(weights=[[NAME, 4, 1.0]], in_place=True), "in_place is not possible with adapters"),
        (dict(weights=[[NAME, 4, 1.0]], base_push="0" * 32), "base is not possible with adapters"),
    ],
)
def test_a_wrong_begin_push_with_adapters_is_refused(
    refusing: tuple[Engine, str], adapters: dict[str, Any], message: str
) -> None:
    engine, address = refusing
    others = {"in_place": adapters.pop("in_place", False), "base": adapters.pop("base_push", None)}
    before, client = dense(engine), RawClient(address)
    with HandPush(client, {}) as push:
        reply = push.begin(dtype="bfloat16", adapters=adapters, **others)
        assert reply["type"] == "error" and re.search(message, reply["message"]), reply
    client.close()
    assert_equal(dense(engine), before)


@pytest.fixture(scope="module")
def refusing(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, str]]:
    address = f"ipc://{tmp_path_factory.mktemp('refusing')}/worker"
    with serving(folders["llama"], address, dtype="bfloat16") as engine:
        yield engine, address


def test_models_that_cannot_be_pushed_as_adapters_are_refused(
    llama: tuple[Engine, str], folders: Any, tmp_path: Path
) -> None:
    (_, address), model = llama, adapt(folders["llama"])
    with publishing(address, "shared") as to:
        with pytest.raises(ConfigError, match="adapters: must be False unless tensors is a PEFT model"):
            to.push(model.get_base_model(), 1, adapters=True)
        with pytest.raises(PushError, match="lora_dropout = 0.1 is not supported"):
            to.push(adapt(folders["llama"], lora_dropout=0.1), 1, adapters=True)
        with model.disable_adapter(), pytest.raises(PushError, match="adapters: no adapter is enabled"):
            to.push(model, 1, adapters=True)
        with pytest.raises(PushError, match="unknown to the worker's model"):
            to.push(adapt(folders["qwen3_moe"]), 1, adapters=True)
    with WeightPublisher(in_place=True) as to, pytest.raises(ConfigError, match="in_place: must be False with"):
        to.push(model, 1)
