"""Pushes to workers with quantized weights. The trainer pushes bfloat16, and each worker quantizes once."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import adapt, load
from matrix import thinned

from tiny import make_tiny_model
from trueroll.engine.config import EngineConfig
from trueroll.errors import ConfigError, PushError
from trueroll.kernels.cache_formats import CACHE_FORMATS
from trueroll.kernels.precision import roundings
from trueroll.kernels.quantization import FORMATS
from trueroll.kernels.training import align, token_log_probs
from trueroll.rollout import RolloutClient, SamplingParams
from trueroll.rollout.auditing import audit
from trueroll.rollout.config import WorkerConfig, check_saving
from trueroll.rollout.fleet.config import split_settings
from trueroll.weight_sync.trainer.sender import BUCKET_BYTES

from .test_expert_pushes import assert_equal, dense, publishing, serving

PROMPT, PARAMS = list(range(3, 13)), SamplingParams(n=2, max_tokens=6, ignore_eos=True)
STEPS = 20
FAMILIES = ("llama", "qwen3_moe", "qwen3_5", "deepseek_v3")


IN_EVERY_RUN = (
    *(("llama", "quantization", name) for name in ("fp8", "int8", "nvfp4", "fp8_dynamic")),
    ("llama", "kv_cache_dtype", "int8"),
    ("deepseek_v3", "kv_cache_dtype", "fp8"),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """In the model `llama`, the rows of some matrices do not fill whole blocks of 128."""
    parent = tmp_path_factory.mktemp("models")
    sizes: dict[str, dict[str, Any]] = {"llama": dict(intermediate_size=320)}
    return {family: make_tiny_model(family, parent / family, **sizes.get(family, {})) for family in FAMILIES}


@pytest.fixture(scope="module")
def folder(folders: dict[str, Path]) -> Path:
    return folders["llama"]


def trainer_of(folder: Path, quantization: str = "none", kv_cache_dtype: str = "auto") -> Any:
    model = load(folder, torch.float32)
    align(model, quantization=quantization, kv_cache_dtype=kv_cache_dtype)
    return model


@pytest.mark.parametrize(
    ("kind", "setting"),
    [*product(["quantization"], FORMATS), *product(["kv_cache_dtype"], CACHE_FORMATS)],
)
@pytest.mark.parametrize("family", FAMILIES)
@thinned(lambda family, kind, setting: (family, kind, setting) in IN_EVERY_RUN)
def test_bits_are_equal_after_twenty_optimizer_steps(
    folders: dict[str, Path], tmp_path: Path, family: str, kind: str, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer has float32 parameters under autocast, and large matrices come in several buckets."""
    monkeypatch.setitem(BUCKET_BYTES, "shared", 2**16)
    settings: dict[str, Any] = {kind: setting}
    folder, address = folders[family], f"ipc://{tmp_path}/worker"
    model, plain = trainer_of(folder, **settings), trainer_of(folder)
    optimizer, seen = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    with (
        serving(folder, address, dtype="bfloat16", **settings) as engine,
        publishing(address, "shared") as to,
        RolloutClient(address) as client,
    ):
        for version in range(1, STEPS + 1):
            to.push(model, version)
            [group] = client.generate([PROMPT], PARAMS, seed=version, min_weight_version=version)
            ids = torch.tensor([PROMPT + sample.token_ids for sample in group.samples])
            with torch.autocast("cpu", torch.bfloat16):
                found = token_log_probs(model, ids)[:, len(PROMPT) :]
            sampled = np.stack([sample.logprobs for sample in group.samples if sample.logprobs is not None])
            assert found.detach().numpy().tobytes() == sampled.tobytes()
            if version == 1:
                with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
                    unrounded = token_log_probs(plain, ids)[:, len(PROMPT) :]
                assert unrounded.numpy().tobytes() != sampled.tobytes(), "premise: the format changes values"
            seen.append(sampled.tobytes())
            (found * torch.tensor([[1.0], [-1.0]])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert len(set(seen)) == STEPS, "premise: each step changes the samples"
        to.push(model, STEPS + 1)
        rounded = roundings(model._aligned.spec)
        tensors, dtype_of = model.state_dict(), engine.weights.dtype_of
        pushed = {name: tensors[name].to(dtype_of(name)) for name in engine.weights.shapes}
        expected = {name: rounded[name](each) if name in rounded else each for name, each in pushed.items()}
        assert_equal(dense(engine), expected)
        if kind == "quantization":
            assert any(not torch.equal(expected[name], pushed[name]) for name in rounded), "premise: values are rounded"
            assert engine.weights.num_bytes < sum(each.nbytes for each in pushed.values())


def test_what_cannot_be_quantized_is_refused(folder: Path, tmp_path: Path) -> None:
    """Pushes of NaN and of single elements are refused. The old weights remain served."""
    address, model = f"ipc://{tmp_path}/worker", trainer_of(folder, "fp8")
    with (
        serving(folder, address, dtype="bfloat16", quantization="fp8") as engine,
        publishing(address, "shared", sparse=True) as to,
        RolloutClient(address) as client,
    ):
        to.push(model, 1)
        before, weight = dense(engine), model.model.layers[0].mlp.up_proj.weight
        with torch.no_grad():
            weight[130, 7] += 1.0
            with pytest.raises(PushError, match=r"up_proj.weight: single elements .* in fp8 cannot be replaced"):
                to.push(model, 2)
            weight[130, 7] = torch.nan
        with publishing(address, "shared", reject_nonfinite=False) as plain:
            with pytest.raises(PushError, match=r"up_proj.weight: 1 of \d+ values are NaN or infinite, which fp8"):
                plain.push(model, 2)
        assert_equal(dense(engine), before)
        assert client.health().weight_version == 1


@pytest.mark.parametrize("setting", ["int8", "fp8"])
def test_an_adapted_trainer_agrees_after_a_push_of_merged_weights(folder: Path, tmp_path: Path, setting: str) -> None:
    address, model = f"ipc://{tmp_path}/worker", adapt(folder, target_modules="all-linear")
    align(model, quantization=setting)
    with (
        serving(folder, address, dtype="bfloat16", quantization=setting),
        publishing(address, "shared") as to,
        RolloutClient(address) as client,
        torch.autocast("cpu", torch.bfloat16),
    ):
        to.push(model, 1)
        found = audit(model, client, [PROMPT], PARAMS)
    assert not found.causes and found.num_different == 0 and found.num_tokens > 0


def test_an_audit_names_another_quantization_and_other_weights(folder: Path, tmp_path: Path) -> None:
    address, model = f"ipc://{tmp_path}/worker", trainer_of(folder, "fp8").bfloat16()
    other = trainer_of(folder, "int8").bfloat16()
    with (
        serving(folder, address, dtype="bfloat16", quantization="fp8"),
        RolloutClient(address) as client,
    ):
        assert not audit(model, client, [PROMPT], PARAMS).causes
        [cause] = audit(other, client, [PROMPT], PARAMS).causes
        assert cause.name == "quantization" and 'call align(model, quantization="fp8")' in cause.text
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
        [cause] = audit(model, client, [PROMPT], PARAMS).causes
        assert cause.name == "weights" and "layers.0.mlp.up_proj" in cause.text


@pytest.mark.parametrize("setting", ["nvfp4", "awq:experts", "auto"])
def test_formats_that_do_not_keep_values_are_not_saved(setting: Any, tmp_path: Path) -> None:
    """In a fleet, a restarted worker gets the weights of another worker. `fp8` keeps its values."""
    with pytest.raises(ConfigError, match=f"save_folder: weights in quantization {setting} may not have the same bits"):
        check_saving(WorkerConfig(save_folder=str(tmp_path)), EngineConfig(model="m", quantization=setting))
    check_saving(WorkerConfig(save_folder=str(tmp_path)), EngineConfig(model="m", quantization="fp8"))
    with pytest.raises(ConfigError, match=f"quantization: {setting} is not supported in a fleet"):
        split_settings(dict(model="m", num_workers=1, quantization=setting))
