"""The loader: reads the settings of a model folder, and copies its tensors into memory.

Owns nothing permanently: files are closed when a function returns. The loader has no code for particular architectures:
the caller names the tensors and their destinations. Guarantees: the whole checkpoint is checked before the first tensor
is copied. Besides the destinations, memory holds at most `_MAX_OPEN_BYTES` of tensors, plus one tensor or one expert's
matrix. For quantized matrices, memory also holds the scales and zero points of one file's matrices, and dequantized
rows (at most `_MAX_OPEN_BYTES` or 128 rows). While rows are dequantized, temporary tensors take as much memory again as
the dequantized rows.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from trueroll.errors import ModelError, brief, said

from ...kernels.contract import Weight
from ...kernels.quantization import format_of
from ...kernels.shards import Shard, is_stack
from ...kernels.spellings import Parts, Shape, Spellings
from .files import check_file, read_json
from .folders import INDEX_FILE, SINGLE_FILE, no_weights
from .mxfp4 import packed_shapes, quantized
from .quantized.layouts import LAYOUTS, Layout, Matrix, Member, Rows, UnfitError, row_ranges

MAX_HEADER_BYTES = 20 * 2**20
"""The size limit for all headers of a checkpoint together, and for the index file. The headers of 100,000 tensors take
12 MB. A decoder has a few thousand tensors, or tens of thousands if each expert is stored separately. Kimi K2 has
140,000: the matrices of its experts, and their scales.
"""
MAX_FILES = 1024
"""The maximum number of files of a checkpoint. 1024 files of 5 GB each hold 5 TB."""
_MAX_OPEN_BYTES = 2**26
_SECONDS_BETWEEN_LINES = 10.0
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PACKED = "U8"
_MAX_NAMES = 10
_MAX_NAME_CHARS = 200
log = logging.getLogger(__name__)


class _Found(NamedTuple):
    """A tensor, as described in the header of its file. `name`: the tensor's name in the file."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str


class Checkpoint(NamedTuple):
    """The tensors to copy.

    `files`: maps each file to the tensors to copy from it. Each tensor is listed as a pair (name in the file, name in
    the decoder). A quantized matrix is listed with the name of the tensor that stores the matrix's codes. `quantized`:
    maps each matrix in `files` that is stored in `layout` to the matrix's tensors other than the codes. `packed`: the
    stacks that are stored as MXFP4, with their blocks and scales. `spellings`: the decoder's names. `converted`: maps
    each stored dtype to the number of tensors in `files` that must be converted from this dtype, not counting quantized
    matrices. `swapped`: the stacks that are stored with rows and columns swapped, compared with the decoder's layout.
    """

    files: dict[Path, list[tuple[str, str]]]
    layout: Layout
    quantized: dict[str, dict[str, _Found]]
    packed: dict[str, tuple[_Found, _Found]]
    spellings: Spellings
    converted: Counter[torch.dtype]
    swapped: frozenset[str]


class _Piece(NamedTuple):
    """A piece to copy: a tensor of a file, one expert's matrix in such a tensor, or some `rows` of a matrix that is or
    will be quantized. `weight`: the destination of the piece's values. `is_swapped`: the matrix is stored with rows and
    columns swapped. `matrix`: the scales of the whole matrix, if the matrix is stored in a quantized form.
    """

    name: str
    weight: Any
    expert: int | None = None
    is_swapped: bool = False
    rows: range | None = None
    matrix: Matrix | None = None


@dataclass
class _Wanted:
    """The tensors that a checkpoint must have.

    `shapes`: maps the name of each tensor to its shape. For a stack that is stored in parts, `shapes` has the parts
    that were found, and `missing` has the number of missing parts. `quantized`: the matrices in `shapes` that are
    stored in `layout`, each with the names of its tensors. `packed`: the stacks that are stored as MXFP4, with the
    names of their two tensors. `packed_shapes`: the shapes of the tensors named in `packed`. `doubled`: the stacks that
    are stored in more than one form, with the names of the tensors or matrices of all forms.
    """

    layout: Layout
    shapes: dict[str, Shape] = field(default_factory=dict)
    quantized: dict[str, dict[str, str]] = field(default_factory=dict)
    packed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    packed_shapes: dict[str, Shape] = field(default_factory=dict)
    missing: dict[str, int] = field(default_factory=dict)
    doubled: dict[str, set[str]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        expected: Mapping[str, Weight],
        found: Mapping[str, Sequence[_Found]],
        spellings: Spellings,
        swapped: Collection[str],
        layout: Layout,
    ) -> _Wanted:
        wanted, names = cls(layout), {*found, *map(layout.matrix_of, found)}
        parts = spellings.parts_among(names)
        for name, weight in expected.items():
            packed = packed_shapes(name, weight.own_shape) if is_stack(weight) else {}
            shape = _swap(weight.shape) if name in swapped else tuple(weight.shape)
            forms = {name: shape}, parts.get(name, {}), packed
            there = [form for form in forms if not names.isdisjoint(form)]
            if len(there) > 1:
                wanted.doubled[name] = {one for form in there for one in form}
            if there and there[0] is packed:
                blocks, scales = packed
                wanted.packed[name] = blocks, scales
                wanted.packed_shapes.update(packed)
            else:
                wanted.shapes.update(there[0] if there else forms[0])
            if there and there[0] is forms[1]:
                wanted.missing[name] = spellings.count(name) - len(forms[1])
        matrices = {name: layout.names(name) for name, shape in wanted.shapes.items() if len(shape) == 2}
        wanted.quantized = {
            name: tensors
            for name, tensors in matrices.items()
            if (codes := tensors.get("codes")) in found
            and (codes != name or found[name][0].dtype in layout.codes.dtypes)
        }
        return wanted

    @property
    def tensors(self) -> dict[str, tuple[Shape, Collection[str]]]:
        """The shape of each tensor, and the dtypes that it may have."""
        found: dict[str, tuple[Shape, Collection[str]]] = {
            name: (shape, _DTYPES) for name, shape in self.shapes.items() if name not in self.quantized
        }
        for matrix, names in self.quantized.items():
            rows, columns = self.shapes[matrix]
            for kind, member in self.layout.members.items():
                found[names[kind]] = member.shape(rows, columns), member.dtypes
        return found | {name: (shape, [_PACKED]) for name, shape in self.packed_shapes.items()}


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json in a model folder. Raise ModelError if the file is missing or invalid."""
    return read_json(folder / "config.json")


def read_checkpoint(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a folder's safetensors files one at a time, each with its name in the file.

    Raise ModelError if a file is missing or broken, or if headers are too large.
    """
    files = _checkpoint_files(folder)
    _check_headers(folder, files)
    for file in files:
        with _open(file) as checkpoint:
            for name in checkpoint.keys():
                yield name, checkpoint.get_tensor(name)


def checkpoint_names(folder: Path) -> set[str] | None:
    """Return the names of all tensors that a folder's safetensors file or index lists; None if the folder has neither.

    Raise ModelError in the same cases as `read_checkpoint`.
    """
    if os.path.lexists(folder / SINGLE_FILE):
        _check_headers(folder, [folder / SINGLE_FILE])
        with _open(folder / SINGLE_FILE) as checkpoint:
            return set(checkpoint.keys())
    if not os.path.lexists(folder / INDEX_FILE):
        return None
    weight_map = read_json(folder / INDEX_FILE, MAX_HEADER_BYTES).get("weight_map")
    return set(weight_map) if isinstance(weight_map, dict) else set()


def copy_checkpoint(checkpoint: Checkpoint, destinations: Mapping[str, Weight]) -> int:
    """Copy each tensor of a checkpoint to the weight with the same name, or to the matching part of a stack. Return the
    number of bytes that were read.

    `destinations`: maps names in the decoder to weights. Tensors without a destination are skipped. If a destination is
    a `Shard`, only the shard's part of the tensor is read.

    The tensors are converted to the dtypes and devices of their destinations. Every few seconds, the log reports how
    much is left to copy. Raise ModelError if a file can no longer be read, or if scales are damaged.
    """
    told, num_bytes = time.monotonic(), 0
    for number, (file, names) in enumerate(checkpoint.files.items(), 1):
        matrices = _read_matrices(checkpoint, [own for _, own in names if own in checkpoint.quantized])
        num_bytes += sum(each.nbytes for each in matrices.values())
        left = [
            piece
            for name, own in names
            if (weight := _destination(own, checkpoint, destinations)) is not None
            for piece in _pieces(name, weight, own in checkpoint.swapped, matrices.get(own))
        ]
        while left:
            # The file is reopened repeatedly, because everything read from an open file stays in memory.
            with _open(file) as opened:
                num_bytes += _copy_some(file, opened, left)
            if time.monotonic() - told >= _SECONDS_BETWEEN_LINES:
                told = time.monotonic()
                log.info(
                    "loading weights: file %d of %d, %d tensors of it left", number, len(checkpoint.files), len(left)
                )
    for name, (blocks, scales) in checkpoint.packed.items():
        if name in destinations:
            num_bytes += _unpack(blocks, scales, destinations[name])
    return num_bytes


def _destination(name: str, checkpoint: Checkpoint, destinations: Mapping[str, Weight]) -> Any | None:
    part = checkpoint.spellings.part(name)
    if part is None:
        return destinations.get(name)
    stack: Any = destinations.get(part.stack)
    return None if stack is None else stack.part(part.expert, part.start, part.shape[0])


def _pieces(name: str, weight: Any, is_swapped: bool, matrix: Matrix | None) -> list[_Piece]:
    """Return the pieces in which a tensor is copied. A stack has one piece for the matrix of each expert that the
    destination holds. A matrix that is or will be quantized has one piece for each range of rows. Any other tensor is
    one piece.
    """
    if is_stack(weight):
        return [_Piece(name, weight.narrow(0, expert, 1), expert, is_swapped) for expert in weight.experts]
    if matrix is None and format_of(weight) is None:
        return [_Piece(name, weight)]
    ranges = row_ranges(tuple(weight.shape), _MAX_OPEN_BYTES)
    return [_Piece(name, weight.narrow(0, rows.start, len(rows)), rows=rows, matrix=matrix) for rows in ranges]


def _copy_some(file: Path, opened: Any, pieces: list[_Piece]) -> int:
    """Copy pieces and remove them from the list, until `_MAX_OPEN_BYTES` bytes are read. Return the number of bytes
    that were read. Raise ModelError for values that a weight cannot store.
    """
    num_bytes = 0
    while pieces and num_bytes < _MAX_OPEN_BYTES:
        piece = pieces.pop()
        try:
            num_bytes += _copy_piece(opened, piece)
        except ValueError as error:
            raise _damaged(file, piece.name, error) from None
    return num_bytes


def _copy_piece(opened: Any, piece: _Piece) -> int:
    stored, weight, rows = opened.get_slice(piece.name), piece.weight, piece.rows
    if rows is not None and piece.matrix is not None:
        return _copy_quantized(Rows(stored, piece.matrix, rows), weight)
    if rows is None and piece.expert is None and isinstance(weight, Shard):
        return weight.read(stored)
    tensor = stored[_part_of(piece)] if rows or piece.expert is not None else opened.get_tensor(piece.name)
    weight.copy_(tensor.transpose(1, 2) if piece.is_swapped else tensor)
    return tensor.nbytes


def _part_of(piece: _Piece) -> slice:
    if piece.rows is not None:
        return slice(piece.rows.start, piece.rows.stop)
    assert piece.expert is not None, "a piece is rows, an expert's matrix or a whole tensor"
    return slice(piece.expert, piece.expert + 1)


def _copy_quantized(rows: Rows, weight: Any) -> int:
    """Copy rows of a quantized matrix. If the weight has codes of the same kind, the codes are copied unchanged. Return
    the number of bytes of codes that were read.
    """
    format, own = rows.format, format_of(weight)
    if isinstance(weight, Shard) and weight.format is None:
        return weight.read(rows) // torch.float32.itemsize * format.bits // 8
    found = rows.quantized()
    weight.copy_(replace(found, format=own) if own is not None and own.stores(format) else found.values())
    return found.shape.numel() * format.bits // 8


def _read_matrices(checkpoint: Checkpoint, names: Sequence[str]) -> dict[str, Matrix]:
    """Return the scales and zero points of quantized matrices, by the names of the matrices. Scales and zero points may
    be in any of the checkpoint's files. Each file is opened once.

    Raise ModelError if one of these tensors has an invalid value.
    """
    layout, shapes = checkpoint.layout, {name: checkpoint.spellings.shape(name) or () for name in names}
    fields: dict[str, dict[str, torch.Tensor]] = {name: {} for name in names}
    wanted = [(name, kind, each) for name in names for kind, each in checkpoint.quantized[name].items()]
    for file in dict.fromkeys(each.file for _, _, each in wanted):
        with _open(file) as opened:
            for name, kind, each in wanted:
                if each.file == file:
                    fields[name][kind] = _read_field(opened, each, layout.others[kind], shapes[name])
    return {name: Matrix(layout, shapes[name], fields[name]) for name in names}


def _read_field(opened: Any, found: _Found, member: Member, shape: Shape) -> torch.Tensor:
    try:
        return member.read(opened.get_tensor(found.name), shape).clone()
    except UnfitError as error:
        raise ModelError(f"{found.file}: {found.name}: {error}; serve a checkpoint in bfloat16") from None
    except ValueError as error:
        raise _damaged(found.file, found.name, error) from None


def _damaged(file: Path, name: str, error: object) -> ModelError:
    return ModelError(
        f"{file}: {name}: {error}; the checkpoint is damaged; download it again, or convert it again from finite "
        "weights"
    )


def _unpack(blocks: _Found, scales: _Found, stack: Any) -> int:
    """Copy, expert by expert, a stack that is stored as MXFP4. Return the number of bytes that were read. Blocks and
    scales may be in different files.

    Raise ModelError if a scale is NaN.
    """
    count, num_bytes = stack.shape[0], 0
    at_once = max(1, _MAX_OPEN_BYTES * count // math.prod(blocks.shape))
    for start in range(0, count, at_once):
        with _open(blocks.file) as of_blocks, _open(scales.file) as of_scales:
            tensors = of_blocks.get_slice(blocks.name), of_scales.get_slice(scales.name)
            for expert in set(range(start, min(start + at_once, count))).intersection(stack.experts):
                stored = [tensor[expert : expert + 1] for tensor in tensors]
                num_bytes += sum(each.nbytes for each in stored)
                try:
                    found = quantized(*(each[0] for each in stored))
                except ValueError as error:
                    raise _damaged(scales.file, scales.name, f"expert {expert}: {error}") from None
                if format_of(stack) is found.format:
                    stack.put_quantized(expert, found)
                    continue
                matrix = found.values()[None]
                stack.narrow(0, expert, 1).copy_(matrix.transpose(1, 2) if stack.layout.transposed else matrix)
    return num_bytes


def check_checkpoint(
    folder: Path,
    expected: Mapping[str, Weight],
    ignored: Collection[str],
    own_name: Callable[[str], str | None] = str,
    parts: Parts | None = None,
    tied: Mapping[str, str] | None = None,
    layout: Layout = LAYOUTS["fp8"],
) -> Checkpoint:
    """Find the tensors of `expected` in the folder's safetensors files, and check all tensors in these files.

    The function reads the headers of all files. The function reads values only to compare copies with their originals.
    Only the shapes and dtypes of `expected` are used. `ignored`: names of tensors to skip. `own_name(name)`: translates
    a tensor's name in a file to the name used in `expected`, `parts`, `tied` and `ignored`, or returns None to skip the
    tensor. `parts`: the parts in which stacks may be stored. A stack may also be stored as MXFP4. A matrix, or a
    part of a stack, may also be stored in the layout `layout`. `tied`: maps the name of each copy that a checkpoint may
    have to the name of the original. The result leaves out copies.

    Raise ModelError if a file is missing or invalid, or if headers are too large. Raise ModelError if a tensor is
    missing or unknown, is stored twice or in two forms, or has the wrong shape or dtype. Also raise ModelError if a
    copy differs from its original.
    """
    files = _checkpoint_files(folder)
    _check_headers(folder, files)
    found = _read_headers(files, lambda name: None if layout.is_left_out(name) else own_name(name))
    spellings = Spellings({name: tuple(weight.shape) for name, weight in expected.items()}, parts or {})
    swapped = _swapped(folder, found, expected)
    wanted = _Wanted.of(expected, found, spellings, swapped, layout)
    tied = tied or {}
    _check_tensors(folder, found, wanted, {*ignored, *tied}, spellings)
    _check_copies(folder, found, tied)
    names: dict[Path, list[tuple[str, str]]] = {}
    for name in sorted(wanted.shapes):
        [tensor] = found[wanted.quantized[name]["codes"] if name in wanted.quantized else name]
        names.setdefault(tensor.file, []).append((tensor.name, name))
    packed = {name: (found[blocks][0], found[scales][0]) for name, (blocks, scales) in wanted.packed.items()}
    quantized = {
        name: {kind: found[tensors[kind]][0] for kind in layout.others} for name, tensors in wanted.quantized.items()
    }
    stored = {name: _DTYPES[found[name][0].dtype] for name in wanted.shapes if name not in quantized}
    converted = Counter(dtype for name, dtype in stored.items() if dtype != _dtype_of(name, expected, spellings))
    return Checkpoint(names, layout, quantized, packed, spellings, converted, swapped)


def _swapped(folder: Path, found: dict[str, list[_Found]], expected: Mapping[str, Weight]) -> frozenset[str]:
    """Return the stacks that a checkpoint has with rows and columns swapped: all stacks with a layout that allows the
    swap, or none.

    A stack of square matrices fits with and without the swap. The two stacks of a layer are never both square, so the
    other stack shows whether rows and columns are swapped. Raise ModelError if the checkpoint has only the square
    stacks.
    """
    stacks = {name: weight for name, weight in expected.items() if is_stack(weight) and weight.layout.or_transposed}
    shapes = [(tuple(weight.shape), found[name][0].shape) for name, weight in stacks.items() if name in found]
    if shapes and all(shape == stored == _swap(shape) for shape, stored in shapes):
        raise ModelError(
            f"{folder}: the experts' matrices of shape {list(shapes[0][0])} are square, so it is unclear whether their "
            "rows and columns are swapped; save both gate_up_proj and down_proj of a layer as whole tensors"
        )
    is_swapped = bool(shapes) and all(_swap(shape) == stored for shape, stored in shapes)
    return frozenset(stacks) if is_swapped else frozenset()


def _swap(shape: Sequence[int]) -> tuple[int, ...]:
    count, rows, columns = shape
    return count, columns, rows


def _dtype_of(name: str, expected: Mapping[str, Weight], spellings: Spellings) -> torch.dtype:
    """Return the dtype of the weight that a checkpoint's tensor is copied to. The tensor may be a part of a stack."""
    part = spellings.part(name)
    return expected[name if part is None else part.stack].dtype


def _checkpoint_files(folder: Path) -> list[Path]:
    if os.path.lexists(folder / SINGLE_FILE):
        return [folder / SINGLE_FILE]
    index = folder / INDEX_FILE
    if not os.path.lexists(index):
        raise no_weights(folder)
    weight_map = read_json(index, MAX_HEADER_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{index}: must have a weight_map from tensor names to file names; save the model again")
    names = sorted(set(weight_map.values()))
    if len(names) > MAX_FILES:
        raise ModelError(f"{index}: names {len(names)} files (limit {MAX_FILES}); save the model in fewer files")
    outside = [name for name in names if not _is_plain(name)]
    if outside:
        raise ModelError(
            f"{index}: {brief(outside[0])} is not the name of a .safetensors file in this folder; check the origin of "
            "the model"
        )
    return [folder / name for name in names]


def _is_plain(name: str) -> bool:
    return name.endswith(".safetensors") and name.isprintable() and "/" not in name


def _check_headers(folder: Path, files: Sequence[Path]) -> None:
    """Check the total size of the headers before parsing. Parsing a header takes up to 50 times as much memory as the
    header.
    """
    num_bytes = sum(_header_bytes(file) for file in files)
    if num_bytes > MAX_HEADER_BYTES:
        raise ModelError(
            f"{folder}: the headers of the safetensors files are too large: {num_bytes} bytes (limit "
            f"{MAX_HEADER_BYTES}); no supported model needs such headers; check where the folder comes from"
        )


def _header_bytes(file: Path) -> int:
    check_file(file)
    try:
        with file.open("rb") as opened:
            header, rest = int.from_bytes(opened.read(8), "little"), os.fstat(opened.fileno()).st_size - 8
    except OSError as error:
        raise _incomplete(file, error) from None
    if header > rest:
        raise _incomplete(file, f"the header should have {header} bytes, but only {rest} bytes follow")
    return header


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as checkpoint:
            yield checkpoint
    except (OSError, SafetensorError) as error:
        raise _incomplete(file, error) from error


def _incomplete(file: Path, found: object) -> ModelError:
    return ModelError(f"{file}: is not a complete safetensors file: {said(found)}; download or save the model again")


def _read_headers(files: Sequence[Path], own_name: Callable[[str], str | None]) -> dict[str, list[_Found]]:
    """For each name in the decoder, return the tensors that were found in the checkpoint. In a valid checkpoint, each
    name has one tensor.
    """
    headers: dict[str, list[_Found]] = {}
    unused: list[str] = []
    for file in files:
        with _open(file) as checkpoint:
            for name in checkpoint.keys():
                if (own := own_name(name)) is None:
                    unused.append(name)
                    continue
                tensor = checkpoint.get_slice(name)
                headers.setdefault(own, []).append(_Found(name, file, tuple(tensor.get_shape()), tensor.get_dtype()))
    if unused:
        log.info("%d tensors of the checkpoint are not used: %s", len(unused), _list_names(sorted(unused)))
    return headers


def _check_tensors(
    folder: Path, found: dict[str, list[_Found]], wanted: _Wanted, ignored: Collection[str], spellings: Spellings
) -> None:
    tensors, matrix_of = wanted.tensors, wanted.layout.matrix_of
    in_doubled = {name for names in wanted.doubled.values() for name in names}
    both = {name: (shape, found[name][0]) for name, (shape, _) in tensors.items() if name in found}
    of_dtypes: dict[str, list[str]] = {}
    for name, (_, dtypes) in tensors.items():
        of_dtypes.setdefault(f"not of {', '.join(dtypes)}", []).extend(_not_of(dtypes, [name], found))
    faults = {
        "missing": sorted(tensors.keys() - found.keys() - in_doubled) + _incomplete_stacks(wanted, spellings),
        "unknown": sorted(
            name for name in found.keys() - tensors.keys() - set(ignored) if matrix_of(name) not in in_doubled
        ),
        "there more than once": sorted(name for name, several in found.items() if len(several) > 1),
        "there in more than one form": sorted(wanted.doubled),
        "of the wrong shape": [
            f"{name} (expected {list(shape)}, found {brief(list(tensor.shape))})"
            for name, (shape, tensor) in both.items()
            if shape != tensor.shape
        ],
        **of_dtypes,
    }
    described = [f"{len(names)} {fault}: {_list_names(names)}" for fault, names in faults.items() if names]
    if described:
        raise ModelError(
            f"{folder}: the tensors do not fit the model that config.json describes: {'; '.join(described)}; "
            "check that config.json and the safetensors files belong together"
        )


def _check_copies(folder: Path, found: dict[str, list[_Found]], tied: Mapping[str, str]) -> None:
    for copy, original in tied.items():
        if copy in found and (original not in found or not _are_equal(found[copy][0], found[original][0])):
            raise ModelError(
                f"{folder}: {copy} differs from {original}, but config.json ties the two tensors; set "
                "tie_word_embeddings to false in config.json, or remove the tensor that is not used"
            )


def _are_equal(one: _Found, other: _Found) -> bool:
    """Return whether two tensors of a checkpoint have the same dtype and the same bits."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    count, *columns = one.shape
    step = max(1, _MAX_OPEN_BYTES // (4 * max(1, math.prod(columns))))
    for start in range(0, count, step):
        rows = slice(start, start + step)
        # The files are reopened repeatedly, as in `copy_checkpoint`.
        with _open(one.file) as of_one, _open(other.file) as of_other:
            parts = (file.get_slice(name)[rows] for file, name in ((of_one, one.name), (of_other, other.name)))
            left, right = (part.contiguous().view(torch.uint8) for part in parts)
            if not torch.equal(left, right):
                return False
    return True


def _incomplete_stacks(wanted: _Wanted, spellings: Spellings) -> list[str]:
    """Describe each incomplete stack by its first missing part and the number of missing parts."""
    return [
        f"{next(part for part in spellings.parts(name) if part not in wanted.shapes)} ({count} of "
        f"{spellings.count(name)} "
        f"parts of {name})"
        for name, count in wanted.missing.items()
        if count and name not in wanted.doubled
    ]


def _not_of(dtypes: Collection[str], names: Collection[str], found: dict[str, list[_Found]]) -> list[str]:
    """Describe the tensors with a dtype that is not in `dtypes`."""
    return [
        f"{name} ({found[name][0].dtype})" for name in names if name in found and found[name][0].dtype not in dtypes
    ]


def _list_names(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMES
    listed = (
        name if name.isprintable() and len(name) <= _MAX_NAME_CHARS else brief(name) for name in names[:_MAX_NAMES]
    )
    return ", ".join(listed) + (f" and {more} more" if more > 0 else "")
