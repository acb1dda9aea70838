"""Compare the formats of low precision with compressed-tensors and torchao, which must be installed.

    pip install --no-deps --target FOLDER compressed-tensors==0.20.1 torchao==0.18 loguru==0.7.3
    PYTHONPATH=FOLDER python examples/benchmarks/formats_check.py

The first table has a line for each format, package and matrix. Formats with quantized activations store their weights
as other formats do, so for these formats the table compares only the quantized activations, with those of
compressed-tensors; each row of the matrix is a token. The matrix `random` has a million normally distributed numbers.
The matrix `boundary` has every number of the format, the midpoints between adjacent numbers, and the float32 numbers
next to all of these, multiplied by several factors. The matrix `tiny` has the same numbers, multiplied by a factor so
small that scales reach their lower limit. The table counts

- `values`: the elements for which the package computes a different value from the codes and scales of
  `kernels.quantization`;
- `codes`: the elements for which the package computes a different code with the same scales;
- `scales`: the scales that differ if the package computes them by its own rule.

The second table has a line for each checkpoint layout. compressed-tensors writes a tiny model in the layout. The table
counts the elements for which the worker reads a different value than compressed-tensors. For the layout of AutoAWQ, the
packed words are random, and compressed-tensors' converter reads them.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.lifecycle.forward import quantize as quantize_with
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor
from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, unpack_uint4
from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, nvfp4_quantize, per_tensor_amax_to_scale
from torchao.quantization.quant_primitives import (
    MappingType,
    _choose_scale_float8,
    _dequantize_affine_float8,
    _quantize_affine_float8,
    choose_qparams_affine,
    dequantize_affine,
    quantize_affine,
)
from transformers import LlamaConfig, LlamaForCausalLM

from trueroll.engine.config import EngineConfig
from trueroll.engine.models.quantized.layouts import LAYOUTS, Matrix
from trueroll.engine.running.loading import load_model
from trueroll.kernels.dynamic import quantize_rows
from trueroll.kernels.quantization import FORMATS, Format, Quantized, quantize

ROWS, COLUMNS = 1024, 1024
FACTORS, TINY = (2.0**-20, 0.0007, 0.3, 1.0, 3.7, 2.0**10), 2.0**-130
PRESETS = {
    "fp8_channel": "FP8_DYNAMIC",
    "fp8_block": "FP8_BLOCK",
    "int8": "W8A8",
    "mxfp8": "MXFP8A16",
    "mxfp4": "MXFP4A16",
    "nvfp4": "NVFP4A16",
    "int4_symmetric": "W4A16",
    "int4": "W4A16_ASYM",
}
STORED = {"fp8_channel": "float-quantized", "fp8_block": "float-quantized", "int8": "int-quantized"}
STORED |= {"mxfp8": "mxfp8-quantized", "mxfp4": "mxfp4-pack-quantized", "nvfp4": "nvfp4-pack-quantized"}
STORED |= {"int4_symmetric": "pack-quantized", "int4": "pack-quantized"}
LAYOUT_OF = {"fp8": "fp8_block", "awq": "int4"}
LAYOUT_WITH_ACTIVATIONS = {"fp8_dynamic": "fp8_channel", "int8_dynamic": "int8"}


class Counts(NamedTuple):
    """The numbers of values, codes and scales that differ. None means that the package does not compute codes or
    scales.
    """

    values: int
    codes: int | None
    scales: int | None


def boundary(format: Format, factors: tuple[float, ...] = FACTORS) -> Tensor:
    """Return a matrix of the boundary values of a format. The first element of each group is the format's largest
    number, which fixes the scale of the group.
    """
    if format.element == "e4m3":
        numbers = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    elif format.element == "e2m1":
        numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    else:
        numbers = torch.arange(128 if format.element == "int8" else 16).float()
    points = torch.cat((numbers, (numbers[1:] + numbers[:-1]) / 2))
    ends = torch.tensor([-torch.inf, torch.inf])
    points = torch.cat((points, *(torch.nextafter(points, end.expand(len(points))) for end in ends)))
    points = torch.cat((points, -points))
    points = points[points.abs() <= numbers[-1]]
    width = 31 if format.columns == 32 else 15 if format.columns == 16 else 127
    rows = torch.nn.functional.pad(points, (0, -len(points) % width)).view(-1, width)
    rows = torch.cat((numbers[-1].expand(len(rows), 1), rows), 1)
    wide = torch.cat([rows * factor for factor in factors])
    if format.scale == "e4m3":  # 128 rows share a row scale
        return wide.repeat_interleave(128, 0)
    return wide.repeat_interleave(format.rows, 0).repeat(1, 128 // wide.shape[1])


def tiny(format: Format) -> Tensor:
    """Return the boundary values, multiplied by a factor so small that scales reach their lower limit."""
    return boundary(format, (TINY,))


def random(format: Format) -> Tensor:
    """Return a matrix of normal numbers with a standard deviation from 2**-16 to 2**8 in each row."""
    generator = torch.Generator().manual_seed(0)
    size = torch.rand(ROWS // 128, 1, generator=generator).repeat_interleave(128, 0)
    return torch.randn(ROWS, COLUMNS, generator=generator) * 2.0 ** (size * 24 - 16)


def count(left: Tensor, right: Tensor) -> int:
    """Return the number of elements with different bits."""
    assert left.shape == right.shape, (left.shape, right.shape)
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[left.element_size()]
    return int((left.contiguous().view(kind) != right.to(left.dtype).contiguous().view(kind)).sum())


def scales_of(ours: Quantized) -> Tensor:
    """Return float32 scales, one for each block."""
    return ours.float_scales()[:: ours.format.rows] if ours.format.rows > 1 else ours.float_scales()


def by_compressed_tensors(matrix: Tensor, format: Format, ours: Quantized) -> Counts:
    args: QuantizationArgs = preset_name_to_scheme(PRESETS[LAYOUT_OF.get(format.name, format.name)], []).weights
    scales, zeros = scales_of(ours), None
    divisor = None if ours.row_scales is None else 1 / ours.row_scales[:1]
    if ours.zeros is not None:
        zeros = ours.zeros.float() - 8
    numbers = ours.numbers() if zeros is None else ours.codes.float() - 8
    values = dequantize(numbers, scales, zeros, args, torch.float32)
    usable = torch.where(scales == 0, 1.0, scales)  # compressed-tensors has no scale of 0
    codes = quantize_with(matrix, usable, zeros, args, torch.float32)
    low, high = torch.aminmax(_blocks(matrix, format), dim=-1)
    theirs, _ = calculate_qparams(low, high, args, divisor)
    of_blocks = scales if ours.scales.dtype == torch.uint8 else ours.scales[:: format.rows]
    return Counts(
        count(ours.values(), values),
        int((numbers != codes).sum()),
        count(of_blocks, theirs.to(of_blocks.dtype)),
    )


def activations_by_compressed_tensors(matrix: Tensor, format: Format) -> Counts:
    scheme = preset_name_to_scheme(PRESETS[LAYOUT_WITH_ACTIVATIONS[format.name]], [])
    args: QuantizationArgs = scheme.input_activations
    ours = quantize_rows(matrix, format)
    scales = ours.scales[:, None]
    values = dequantize(ours.numbers, scales, None, args, torch.float32)
    codes = quantize_with(matrix, scales, None, args, torch.float32)
    theirs, _ = calculate_qparams(*torch.aminmax(matrix, dim=1, keepdim=True), args)
    return Counts(count(ours.numbers * scales, values), int((ours.numbers != codes).sum()), count(scales, theirs))


def _blocks(matrix: Tensor, format: Format) -> Tensor:
    group = format.group(matrix.shape[1])
    rows = matrix.unflatten(1, (-1, group)).unflatten(0, (-1, format.rows))
    return rows.transpose(1, 2).flatten(2)


def by_torchao(matrix: Tensor, format: Format, ours: Quantized) -> Counts:
    group, scales = format.group(matrix.shape[1]), scales_of(ours)
    numbers = ours.numbers()
    if format.scale == "e8m0":
        kind = torch.float8_e4m3fn if format.element == "e4m3" else torch.float4_e2m1fn_x2
        powers, stored = to_mx(matrix, kind, 32)
        codes = (
            stored.float() if format.element == "e4m3" else f4_unpacked_to_f32(unpack_uint4(stored.view(torch.uint8)))
        )
        own = ours.codes.view(kind) if format.element == "e4m3" else ours.codes[:, ::2] | ours.codes[:, 1::2] << 4
        values = to_dtype(own, ours.scales.view(torch.float8_e8m0fnu), kind, 32, torch.float32)
        differ = (powers.view(torch.uint8) != ours.scales).repeat_interleave(32, 1)
        return Counts(
            count(ours.values(), values),
            count(numbers[~differ], codes[~differ]),
            count(ours.scales, powers.view(torch.uint8)),
        )
    if format.scale == "e4m3":
        assert ours.row_scales is not None
        theirs, stored = nvfp4_quantize(matrix, 16, ours.row_scales[0])
        codes = f4_unpacked_to_f32(unpack_uint4(stored.view(torch.uint8)))
        packed = ours.codes[:, ::2] | ours.codes[:, 1::2] << 4
        tensor = NVFP4Tensor(packed, ours.scales, 16, torch.float32, ours.row_scales[0])
        same = (theirs.view(torch.uint8) == ours.scales.view(torch.uint8)).repeat_interleave(16, 1)
        return Counts(
            count(ours.values(), tensor.dequantize(torch.float32)),
            count(numbers[same], codes[same]),
            count(ours.scales, theirs)
            + count(ours.row_scales[:1], per_tensor_amax_to_scale(matrix.abs().amax())[None]),
        )
    if format.element == "e4m3":
        theirs = _choose_scale_float8(matrix, [format.rows, group])
        codes = _quantize_affine_float8(matrix, scales)
        values = _dequantize_affine_float8(ours.codes.view(torch.float8_e4m3fn), scales)
        return Counts(count(ours.values(), values), count(numbers, codes.float()), count(scales, theirs))
    block, low, high = [1, group], *((-127, 127) if format.element == "int8" else (0, 15))
    zeros = torch.zeros_like(scales) if ours.zeros is None else ours.zeros.float()
    kind = torch.int8 if format.element == "int8" else torch.uint8
    own = ours.codes.view(kind)
    mapping = "symmetric" if format.element == "int8" else "asymmetric"
    theirs, _ = choose_qparams_affine(matrix, MappingType[mapping.upper()], block, kind, low, high, 2.0**-126)
    codes = quantize_affine(matrix, block, scales, zeros, kind, low, high)
    values = dequantize_affine(own, block, scales, zeros, kind, low, high)
    return Counts(count(ours.values(), values), count(own, codes), count(ours.scales, theirs.view(scales.shape)))


def table_of_formats() -> Table:
    table = Table("format", "package", "matrix", "elements", "values", "codes", "scales")
    packages: dict[str, Callable[[Tensor, Format, Quantized], Counts]] = {
        "compressed-tensors": by_compressed_tensors,
        "torchao": by_torchao,
    }
    for format in (each for each in FORMATS.values() if each.activations is None):
        for package, compare in packages.items():
            for make in (random, boundary, tiny):
                matrix = make(format)
                step = 128 if format.scale == "e4m3" else len(matrix)
                found = [
                    compare(part, format, quantize(part, format)) for part in matrix.split(step) if len(part) == step
                ]
                sums = (sum(each) for each in zip(*found, strict=True))
                table.add_row(format.name, package, make.__name__, f"{matrix.numel():,}", *map("{:,}".format, sums))
    for format in (each for each in FORMATS.values() if each.activations is not None):
        for make in (random, boundary, tiny):
            matrix = make(format)
            counts = activations_by_compressed_tensors(matrix, format)
            row = f"{format.name}, activations", "compressed-tensors", make.__name__, f"{matrix.numel():,}"
            table.add_row(*row, *map("{:,}".format, counts))
    return table


def compressed(weight: Tensor, layout: str) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors that compressed-tensors stores for a matrix, and the float32 values that compressed-tensors
    reads from them.
    """
    scheme = preset_name_to_scheme(PRESETS[layout], [])
    format = LAYOUTS[layout].format
    low, high = torch.aminmax(_blocks(weight, format), dim=-1)
    divisor = generate_gparam(low.amin(), high.amax()) if format.name == "nvfp4" else None
    scales, zeros = calculate_qparams(low, high, scheme.weights, divisor)
    if format.name == "awq":
        scales = scales.bfloat16().float()
    state = dict(weight=weight, weight_scale=scales, weight_zero_point=zeros.to(torch.int8))
    if divisor is not None:
        state["weight_global_scale"] = divisor
    compressor = BaseCompressor.get_value_from_registry(STORED[layout])
    stored = compressor.compress(state, scheme)
    values = compressor.decompress(stored, scheme)["weight"]
    return {name: tensor.contiguous() for name, tensor in stored.items()}, values.float()


def table_of_checkpoints(folder: Path) -> Table:
    table = Table("layout", "elements", "values that differ in float32", "in bfloat16")
    torch.manual_seed(0)
    sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, vocab_size=512)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2))
    raw = model.config.to_dict() | dict(architectures=["LlamaForCausalLM"])
    for layout in PRESETS:
        stored, expected = dict[str, Tensor](), dict[str, Tensor]()
        for name, tensor in model.state_dict().items():
            if tensor.dim() != 2 or name.endswith(("embed_tokens.weight", "lm_head.weight")):
                stored[name] = tensor
                continue
            members, expected[name] = compressed(tensor, layout)
            stored |= {name.removesuffix("weight") + member: each for member, each in members.items()}
        scheme = preset_name_to_scheme(PRESETS[layout], ["Linear"])
        groups = {"group_0": scheme.model_copy(update=dict(format=STORED[layout]))}
        config = QuantizationConfig(
            config_groups=groups, format=STORED[layout], quantization_status="compressed", ignore=["lm_head"]
        )
        save_file(stored, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(raw | dict(quantization_config=config.model_dump(mode="json"))))
        counts = []
        for dtype in (torch.float32, torch.bfloat16):
            settings = dict(model=str(folder), quantization="auto", dtype=str(dtype).removeprefix("torch."))
            weights = load_model(EngineConfig(**settings)).weights.tensors
            counts.append(sum(count(weights[name].to_dense(), each.to(dtype)) for name, each in expected.items()))
        elements = sum(each.numel() for each in expected.values())
        table.add_row(layout, f"{elements:,}", *map("{:,}".format, counts))
    table.add_row("awq", *map("{:,}".format, count_awq()))
    return table


def count_awq() -> tuple[int, int, int]:
    """Read random packed words in AutoAWQ's layout, with compressed-tensors' converter and with trueroll's loader."""
    generator, (rows, columns) = torch.Generator().manual_seed(0), (ROWS, COLUMNS)
    words, zeros = (
        torch.randint(-(2**31), 2**31, (size, rows // 8), generator=generator).to(torch.int32)
        for size in (columns, columns // 128)
    )
    scales = torch.rand(columns // 128, rows, generator=generator).half()
    numbers, of_groups, centers = AutoAWQConverter()._convert_gemm_module(words, scales, zeros)
    args = preset_name_to_scheme("W4A16_ASYM", []).weights
    expected = dequantize(numbers.float(), of_groups.float(), centers, args, torch.float32)
    layout = LAYOUTS["awq"]
    tensors = dict(zeros=zeros, scales=scales)
    fields = {kind: member.read(tensors[kind], (rows, columns)) for kind, member in layout.others.items()}
    found = Matrix(layout, (rows, columns), fields).part(words, range(rows), range(columns)).values()
    return found.numel(), count(found, expected), count(found.bfloat16(), expected.bfloat16())


def main() -> None:
    """Print both tables."""
    logging.disable(logging.WARNING)
    console = Console(width=120)
    console.print(table_of_formats())
    with tempfile.TemporaryDirectory() as folder:
        console.print(table_of_checkpoints(Path(folder)))


if __name__ == "__main__":
    main()
