"""LoRA adapters on workers with quantized weights. An adapter is added to the values of the quantized base, and the sum
is quantized. Trainer and worker do so alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import ATTENTION, adapt, change
from engine.running.test_ranks import FAMILIES as RANKED
from matrix import thinned
from torch import Tensor

from tiny import make_tiny_model
from trueroll.engine.engine import Engine
from trueroll.errors import OtherBaseError, PushError
from trueroll.kernels.precision import Rounding, roundings, with_quantization
from trueroll.kernels.quantization import FORMATS
from trueroll.kernels.training import align, merged_weights, token_log_probs
from trueroll.rollout import RolloutClient, SamplingParams
from trueroll.rollout.auditing import audit
from trueroll.rollout.publisher import publisher

from .test_expert_pushes import assert_equal, dense, publishing, serving

PROMPT, PARAMS = list(range(3, 13)), SamplingParams(n=2, max_tokens=6, ignore_eos=True)
UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in which the rows of some matrices do not fill whole blocks of 128."""
    return make_tiny_model("llama", tmp_path_factory.mktemp("model"), intermediate_size=320)


def trainer_of(folder: Path, setting: str, seed: int = 0, **config: Any) -> Any:
    settings: dict[str, Any] = dict(target_modules="all-linear") | config
    model = adapt(folder, seed=seed, **settings)
    align(model, quantization=setting)
    return model


def sampled(client: RolloutClient, seed: int, **demand: Any) -> tuple[Tensor, np.ndarray]:
    """Return the ids and the log-probs of a group."""
    [group] = client.generate([PROMPT], PARAMS, seed=seed, **demand)
    ids = torch.tensor([PROMPT + sample.token_ids for sample in group.samples])
    return ids, np.stack([sample.logprobs for sample in group.samples if sample.logprobs is not None])


def recomputed(model: Any, ids: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return token_log_probs(model, ids)[:, len(PROMPT) :]


def base_of(model: Any, name: str) -> Tensor:
    """Return a weight of the trainer without its adapter, in the worker's dtype."""
    return model.get_base_model().get_parameter(f"{name.removesuffix('weight')}base_layer.weight").detach().bfloat16()


def rounded(model: Any, setting: str) -> dict[str, Rounding]:
    return roundings(with_quantization(model.get_base_model()._aligned.spec, setting))


def assert_serves(engine: Engine, model: Any, setting: str) -> None:
    """Compare with the definition, bit by bit: the rounded sum of the adapter and the rounded base."""
    of_weights = rounded(model, setting)
    expected = {
        name: of_weights[name](tensor) if name in of_weights else tensor
        for name, tensor in merged_weights(model, torch.bfloat16)
    }
    assert_equal(dense(engine), {name: expected[name] for name in engine.weights.shapes})


@pytest.mark.parametrize("setting", FORMATS)
@thinned(lambda setting: setting in ("fp8", "int8"))
def test_bits_are_equal_after_optimizer_steps(folder: Path, tmp_path: Path, setting: str) -> None:
    """The trainer has float32 parameters under autocast. Each push has only A and B; the base is never sent."""
    address, model = f"ipc://{tmp_path}/worker", trainer_of(folder, setting)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    with (
        serving(folder, address, dtype="bfloat16", quantization=setting) as engine,
        publishing(address, "shared") as to,
        RolloutClient(address) as client,
    ):
        base, seen = dense(engine), [sampled(client, 1)[1].tobytes()]
        of_weights = engine.weights.num_held
        for version in range(1, 9):
            pushed = to.push(model, version, adapters=True)
            ids, found = sampled(client, version, min_weight_version=version)
            log_probs = recomputed(model, ids)
            assert log_probs.detach().numpy().tobytes() == found.tobytes()
            seen.append(found.tobytes())
            (log_probs * torch.tensor([[1.0], [-1.0]])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert len(set(seen)) == 9, "premise: adapters and steps change the samples"
        to.push(model, 9, adapters=True)
        assert_serves(engine, model, setting)
        assert not torch.equal(dense(engine)[UP], base[UP])
        assert_equal({name: engine.weights.before_adapters(name) for name in base}, base)
        kept = {name: weight.nbytes for name, weight in engine.weights.base.kept.items()}
        assert kept == {name: engine.weights.tensors[name].nbytes for name in kept} and UP in kept
        assert engine.weights.num_held == of_weights + sum(kept.values())
        whole = to.push(model, 10)
        assert_serves(engine, model, setting)
        assert whole.num_bytes > 2 * pushed.num_bytes


@pytest.mark.parametrize("setting", ["fp8", "int8"])
def test_named_adapters_have_the_bits_of_merged_ones(folder: Path, tmp_path: Path, setting: Any) -> None:
    address = f"ipc://{tmp_path}/worker"
    models = {name: trainer_of(folder, setting, seed) for seed, name in enumerate("ab")}
    settings: dict[str, Any] = dict(dtype="bfloat16", quantization=setting)
    with (
        serving(folder, address, adapter_bytes=2**26, **settings) as engine,
        publishing(address, "shared") as to,
        RolloutClient(address) as client,
    ):
        before, [ids, base] = dense(engine), sampled(client, 1)
        with models["a"].disable_adapter():
            assert recomputed(models["a"], ids).detach().numpy().tobytes() == base.tobytes()
        assert not torch.equal(before[UP], base_of(models["a"], UP)), "premise: the base is rounded"
        for version in range(1, 3):
            for seed, (name, model) in enumerate(models.items()):
                change(model, 10 * version + seed)
                to.push(model, version, adapters=True, adapter=name)
            seen = [base.tobytes()]
            for name, model in models.items():
                ids, found = sampled(client, 1, adapter=name, min_weight_version=version)
                assert recomputed(model, ids).detach().numpy().tobytes() == found.tobytes()
                seen.append(found.tobytes())
            assert len(set(seen)) == 3, "premise: each adapter changes the samples"
            assert sampled(client, 1)[1].tobytes() == base.tobytes()
        assert engine.adapters is not None
        [of_one, of_other] = [each.merged_bytes for each in engine.adapters._loaded.values()]
        codes = sum(engine.weights.tensors[name].nbytes for name in engine.adapters._loaded["a"].factors)
        assert codes <= of_one == of_other < 1.5 * codes, "merged weights take as much memory as the codes"
        for name in models:
            client.unload_adapter(name)
        to.push(models["b"], 1, adapters=True)
        assert sampled(client, 1)[1].tobytes() == seen[2], "merged without a name, the same bits"


def test_the_base_is_compared_after_rounding(folder: Path, tmp_path: Path) -> None:
    """A change of the base that disappears in the rounding is accepted. Any other change is refused."""
    address, model = f"ipc://{tmp_path}/worker", trainer_of(folder, "int8", target_modules=ATTENTION)
    weight = model.get_base_model().get_parameter(UP)
    with (
        serving(folder, address, dtype="bfloat16", quantization="int8") as engine,
        publishing(address, "shared") as to,
        RolloutClient(address) as client,
    ):
        to.push(model, 1, adapters=True)
        before = dense(engine)
        with torch.no_grad():
            row = weight[3].bfloat16()
            place = int(row.abs().argsort()[len(row) // 2])
            moved = row[place] * (1 + 2**-7)
            changed, rounding = weight.bfloat16(), rounded(model, "int8")[UP]
            changed[3, place] = moved
            assert not torch.equal(changed, weight.bfloat16()), "premise"
            assert torch.equal(rounding(changed), rounding(weight.bfloat16())), "premise"
            weight[3, place] = float(moved)
        to.push(model, 2, adapters=True)
        assert_equal(dense(engine), before)
        with torch.no_grad():
            weight[3, place] += 1.0
        with pytest.raises(OtherBaseError, match=rf"other weights than this worker's \({UP} differ\); push the model"):
            to.push(model, 3, adapters=True)
        with torch.no_grad():
            weight[3, place] = torch.inf
        with pytest.raises(
            PushError, match=f"tensor {UP}: 1 of .* values are NaN or infinite, which int8 cannot store"
        ):
            to.push(model, 3, adapters=True)
        assert_equal(dense(engine), before)
        with torch.no_grad():
            weight[3, place] = 1.0
        to.push(model, 3)
        change(model, 7)
        to.push(model, 4, adapters=True)
        assert_serves(engine, model, "int8")
        with torch.autocast("cpu", torch.bfloat16):
            assert not audit(model, client, [PROMPT], PARAMS).causes


def test_sums_that_cannot_be_stored_are_refused(folder: Path, tmp_path: Path) -> None:
    """A finite sum may have values that are too far apart for a float16 scale."""
    address, model = f"ipc://{tmp_path}/worker", trainer_of(folder, "awq", target_modules=ATTENTION)
    settings: dict[str, Any] = dict(dtype="bfloat16", quantization="awq", adapter_bytes=2**26)
    with serving(folder, address, **settings) as engine, publishing(address, "shared") as to:
        before = dense(engine)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "0.self_attn.q_proj.lora_" in name:
                    parameter.fill_(1e4)
        for adapter in (None, "a"):
            with pytest.raises(
                PushError, match="q_proj.weight: the sum with its adapter: .*too far apart for a float16"
            ):
                to.push(model, 1, adapters=True, adapter=adapter)
        assert_equal(dense(engine), before)


def test_sums_that_are_not_finite_are_refused_whatever_the_push_accepts(folder: Path, tmp_path: Path) -> None:
    address, model = f"ipc://{tmp_path}/worker", trainer_of(folder, "int8", target_modules=["up_proj"])
    settings: dict[str, Any] = dict(dtype="bfloat16", quantization="int8", adapter_bytes=2**26)
    with (
        serving(folder, address, **settings) as engine,
        publishing(address, "shared", reject_nonfinite=False) as to,
    ):
        to.push(model, 1)
        before = dense(engine)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "layers.0.mlp.up_proj.lora_B" in name:
                    parameter[0, 0] = torch.inf
        pushes: list[dict[str, Any]] = [{}, dict(adapters=True), dict(adapters=True, adapter="a")]
        for arguments in pushes:
            with pytest.raises(
                PushError, match=f"tensor {UP}: the sum with its adapter: .* NaN or infinite, which int8"
            ):
                to.push(model, 2, **arguments)
        assert_equal(dense(engine), before)


def test_a_weight_without_its_adapter_has_its_codes_again(folder: Path, tmp_path: Path) -> None:
    """In awq, quantizing values again gives other bits."""
    address, model = f"ipc://{tmp_path}/worker", trainer_of(folder, "awq", target_modules=["up_proj"])
    settings: dict[str, Any] = dict(dtype="bfloat16", quantization="awq", adapter_bytes=2**26)
    with (
        serving(folder, address, **settings) as engine,
        publishing(address, "shared") as to,
        RolloutClient(address) as client,
    ):
        first, rounding = dense(engine), rounded(model, "awq")[UP]
        assert not torch.equal(rounding(first[UP]), first[UP]), "premise"
        to.push(model, 1, adapters=True)
        assert not torch.equal(dense(engine)[UP], first[UP])
        other = trainer_of(folder, "awq", target_modules=["q_proj"])
        to.push(other, 1, adapters=True, adapter="a")
        assert engine.adapters is not None
        beside = engine.adapters.model_of("a").checkpoint_tensors()
        assert torch.equal(beside[UP].to_dense(), first[UP])
        client.unload_adapter("a")
        to.push(other, 2, adapters=True)
        assert torch.equal(dense(engine)[UP], first[UP])
        assert_serves(engine, other, "awq")


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("setting", ["fp8", "int8", "awq"])
@thinned(lambda setting: setting == "int8")
def test_four_ranks_merge_adapters_as_the_trainer_does(tmp_path: Path, setting: str) -> None:
    folder, address = make_tiny_model("llama", tmp_path / "model", **RANKED["llama"]), f"ipc://{tmp_path}/worker"
    model = adapt(folder, target_modules="all-linear")
    align(model, quantization=setting, pieces=4)
    with (
        serving(folder, address, dtype="bfloat16", quantization=setting, tensor_parallel_size=4) as engine,
        publishing(address, "shared") as to,
        RolloutClient(address) as client,
    ):
        base, seen = dense(engine), [sampled(client, 1)[1].tobytes()]
        for version in range(1, 4):
            change(model, version)
            to.push(model, version, adapters=True)
            ids, found = sampled(client, 1, min_weight_version=version)
            assert recomputed(model, ids).detach().numpy().tobytes() == found.tobytes()
            seen.append(found.tobytes())
        assert len(set(seen)) == 4, "premise: each adapter changes the samples"
        assert_serves(engine, model, setting)
        assert_equal({name: engine.weights.before_adapters(name) for name in base}, base)


def test_workers_with_different_formats_have_different_bases(folder: Path, tmp_path: Path) -> None:
    addresses, model = [f"ipc://{tmp_path}/{name}" for name in "ab"], trainer_of(folder, "fp8")
    with (
        serving(folder, addresses[0], dtype="bfloat16", quantization="fp8"),
        serving(folder, addresses[1], dtype="bfloat16"),
        publishing(addresses[0], "shared") as to,
    ):
        to.connect(addresses)
        with pytest.raises(PushError, match=r"adapters: worker .* stores weights in none, but .* in fp8, so"):
            to.push(model, 1, adapters=True)


def test_a_format_that_only_a_worker_knows_is_named(folder: Path) -> None:
    with pytest.raises(PushError, match="adapters: a worker has quantization 'fp7': quantization must be one of"):
        publisher._roundings_of(trainer_of(folder, "int8"), "fp7")
