"""How config.json says that a checkpoint is stored, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from trueroll.errors import ModelError
from trueroll.kernels.precision import SETTINGS
from trueroll.kernels.stored import Stored, stored_in

AWQ = dict(quant_method="awq", bits=4, group_size=128, zero_point=True, version="gemm", modules_to_not_convert=None)
FP8 = dict(quant_method="fp8", weight_block_size=[128, 128])
NVFP4 = dict(quant_method="modelopt", quant_algo="NVFP4", ignore=["lm_head"])


def weights(format: str, type: str, num_bits: int, strategy: str, **others: Any) -> dict[str, Any]:
    """Return a configuration of compressed-tensors, with the entries that published files have."""
    own = dict(type=type, num_bits=num_bits, strategy=strategy, symmetric=True, dynamic=False, group_size=None)
    own |= dict(block_structure=None, actorder=None, observer="minmax", observer_kwargs={}) | others
    group = dict(targets=["Linear"], weights=own, input_activations=None, output_activations=None)
    found = dict(quant_method="compressed-tensors", format=format, config_groups={"group_0": group}, ignore=["lm_head"])
    return found | dict(quantization_status="compressed", kv_cache_scheme=None, sparsity_config={}, transform_config={})


COMPRESSED = {
    "fp8_channel": (weights("float-quantized", "float", 8, "channel"), "fp8_channel"),
    "fp8_channel alone": (weights("naive-quantized", "float", 8, "channel", group_size=-1), "fp8_channel"),
    "fp8_block": (weights("float-quantized", "float", 8, "block", block_structure=[128, 128]), "fp8"),
    "int8": (weights("int-quantized", "int", 8, "channel"), "int8"),
    "mxfp8": (weights("mxfp8-quantized", "float", 8, "group", group_size=32), "mxfp8"),
    "mxfp4": (weights("mxfp4-pack-quantized", "float", 4, "group", group_size=32), "mxfp4"),
    "nvfp4": (weights("nvfp4-pack-quantized", "float", 4, "tensor_group", group_size=16), "nvfp4"),
    "int4_symmetric": (weights("pack-quantized", "int", 4, "group", group_size=128), "awq"),
    "int4": (weights("pack-quantized", "int", 4, "group", group_size=128, symmetric=False, actorder="weight"), "awq"),
}


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors(name: str) -> None:
    config, setting = COMPRESSED[name]
    assert stored_in({"quantization_config": config}) == Stored(name.split()[0], setting)
    assert setting in SETTINGS


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, Stored()),
        ({"quantization_config": {}}, Stored()),
        ({"quantization_config": FP8}, Stored("fp8", "fp8")),
        ({"text_config": {"quantization_config": dict(quant_method="mxfp4")}}, Stored("fp8", "mxfp4:experts")),
        ({"quantization_config": AWQ}, Stored("awq", "awq")),
        ({"text_config": {}, "quantization_config": AWQ | {"version": "GEMM"}}, Stored("awq", "awq")),
        ({"quantization_config": NVFP4}, Stored("modelopt-nvfp4", "nvfp4", ("activations in NVFP4",))),
    ],
)
def test_other_methods(config: dict[str, Any], expected: Stored) -> None:
    assert stored_in(config) == expected


@pytest.mark.parametrize(
    ("layout", "type", "setting"), [("fp8_channel", "float", "fp8_dynamic"), ("int8", "int", "int8_dynamic")]
)
def test_activations_per_token(layout: str, type: str, setting: str) -> None:
    """Other activations are left out, and the setting then has plain activations."""
    found, plain = COMPRESSED[layout]
    group = found["config_groups"]["group_0"]
    own = dict(num_bits=8, type=type, dynamic=True, strategy="token", symmetric=True, group_size=None)
    changes: list[dict[str, Any]] = [{}, dict(type="x"), dict(num_bits=4), dict(dynamic=False), dict(dynamic="local")]
    changes += [dict(strategy=each) for each in ("tensor", "channel", "group")] + [dict(symmetric=False)]
    for change in changes:
        groups = {"group_0": group | dict(input_activations=own | change)}
        stored = stored_in({"quantization_config": found | dict(config_groups=groups)})
        assert (stored.layout, stored.setting) == (layout, plain if change else setting)
        assert len(stored.activations) == 1, "the loader warns unless the setting has activations"
    for other in ("int", "float"):
        group = COMPRESSED["fp8_block"][0]["config_groups"]["group_0"] | dict(input_activations=own | dict(type=other))
        config = COMPRESSED["fp8_block"][0] | dict(config_groups={"group_0": group})
        assert stored_in({"quantization_config": config}).setting == "fp8"


def test_what_is_left_out_is_told() -> None:
    found = weights("int-quantized", "int", 8, "channel")
    found["config_groups"]["group_0"]["input_activations"] = dict(num_bits=8, type="int", dynamic=True)
    found["config_groups"]["group_1"] = found["config_groups"]["group_0"]
    found["kv_cache_scheme"] = dict(num_bits=8, type="float")
    texts = ("activations in 8 bits ('int')",), ("keys and values in 8 bits ('float')",)
    assert stored_in({"quantization_config": found}) == Stored("int8", "int8", *texts)
    dynamic = dict(num_bits=8, type="int", dynamic=True, strategy="token", symmetric=True)
    found["config_groups"]["group_0"]["input_activations"] = dynamic
    assert stored_in({"quantization_config": found}) == Stored("int8", "int8_dynamic", *texts)
    found["config_groups"]["group_1"] = dict(weights=found["config_groups"]["group_0"]["weights"])
    assert stored_in({"quantization_config": found}) == Stored("int8", "int8", *texts), "not in all groups"
    inputs = dict(num_bits=4, type="float")
    groups = {"group_0": dict(weights=dict(num_bits=4, group_size=16), input_activations=inputs)}
    own = NVFP4 | dict(config_groups=groups, kv_cache_quant_algo="FP8")
    found = stored_in({"quantization_config": own})
    assert (found.activations, found.cache) == (("activations in 4 bits ('float')",), ("keys and values in 'FP8'",))
    assert stored_in({"quantization_config": FP8 | dict(activation_scheme="dynamic")}).activations


INT4 = COMPRESSED["int4"][0]
GROUP = INT4["config_groups"]["group_0"]


def changed(**weights: Any) -> dict[str, Any]:
    return INT4 | dict(config_groups={"group_0": GROUP | dict(weights=GROUP["weights"] | weights)})


METHODS = "must be awq, compressed-tensors, fp8, modelopt or mxfp4"
REFUSED: list[tuple[Any, str]] = [
    (
        dict(quant_method="gptq", bits=4),
        rf"{METHODS} \(got 'gptq'\); serve a checkpoint in bfloat16, which the setting",
    ),
    ("awq", r"quant_method in quantization_config of config.json must be .* \(got 'awq'\)"),
    (dict(quant_method=["awq"]), rf"{METHODS} \(got \['awq'\]\)"),
    (AWQ | dict(bits=8), r"bits in quantization_config of config.json must be 4 \(got 8\); serve"),
    (AWQ | dict(group_size=64), r"group_size in .* must be 128 \(got 64\)"),
    (AWQ | dict(zero_point=False), r"zero_point in .* must be True \(got False\)"),
    (AWQ | dict(version="gemv"), r"version in .* must be gemm or GEMM \(got 'gemv'\)"),
    (NVFP4 | dict(quant_algo="NVFP4_AWQ"), r"quant_algo in .* must be NVFP4 \(got 'NVFP4_AWQ'\)"),
    (NVFP4 | dict(config_groups={"a": {"weights": {"group_size": 32}}}), r"group_size in .* must be 16 \(got 32\)"),
    (NVFP4 | dict(config_groups={"a": 5}), r"group_size in .* must be 16 \(got None\)"),
    (
        INT4 | dict(quantization_status="calibration"),
        r"quantization_status in .* must be compressed or frozen \(got 'cal",
    ),
    (INT4 | dict(moe_sparsity_config={"a": 1}), r"moe_sparsity_config in .* must be None or {} \(got a map of 1\)"),
    (INT4 | dict(transform_config={"a": 1}), r"transform_config in .* must be None or {} \(got a map of 1\)"),
    (INT4 | dict(sparsity_config={"format": "marlin-24"}), r"sparsity_config in .* must be None or {}"),
    (INT4 | dict(config_groups={}), r"config_groups in .* must be a map of groups \(got a map of 0\)"),
    (INT4 | dict(config_groups=[GROUP]), r"config_groups in .* must be a map of groups"),
    (INT4 | dict(config_groups={"a": 5}), r"a group of config_groups in .* must describe weights \(got 5\)"),
    (INT4 | dict(config_groups={"a": {"targets": []}}), r"a group of config_groups in .* must describe weights"),
    (INT4 | dict(config_groups={"a": GROUP | dict(output_activations={})}), r"output_activations in .* must be None"),
    (changed(group_size=32), r"'pack-quantized' with 4 bits \('int', 'group' of 32, asymmetric\), which is not supp"),
    (
        changed(num_bits=8),
        r"'pack-quantized' with 8 bits \('int', 'group' of 128, asymmetric\), .* or a checkpoint in a form that",
    ),
    (changed(strategy="channel", group_size=None), r"with 4 bits \('int', 'channel', asymmetric\), which is not"),
    (changed(actorder="group"), r"actorder in .* must be None or False or weight or static \(got 'group'\)"),
    (changed(dynamic=True), r"dynamic in .* must be False or None \(got True\)"),
    (changed(num_bits=[4] * 10**4, type={}), r"with \[4, 4, 4, 4, 4, 4, \.\.\.\] bits \(a map of 0, 'group' of 128"),
    (weights("float-quantized", "float", 8, "tensor"), r"'float-quantized' with 8 bits \('float', 'tensor', symm"),
    (weights("mixed-precision", "float", 8, "channel"), r"store weights as 'mixed-precision' with 8 bits"),
    (
        INT4 | dict(config_groups={"a": GROUP, "b": GROUP | dict(weights=GROUP["weights"] | dict(symmetric=True))}),
        r"config_groups in .* must store all weights in one way \(got int4 and int4_symmetric\)",
    ),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_variants_are_refused(config: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        stored_in({"quantization_config": config})
    assert len(str(caught.value)) < 600
