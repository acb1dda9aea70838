"""The vision tower of a transformers model, computed with the trainer's ops.

Each part of the tower belongs to a module that `align` changes. The module is called once, with the rows of all images
of a batch, and reads its parameters during the call, so that hooks of wrappers run. All ranks of a trainer therefore
call the same modules equally often, whatever images they have. The modules are called for a batch without images too,
and their parameters then get gradients of zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from trueroll.errors import AlignmentError
from trueroll.versions import untested

from .adapters import copies_of
from .aligned import as_computed, forward_dtype, ops_of, parameter, place
from .autograd import GradientTowerOps
from .specs import TowerSpec
from .towers import Compute, Part, TowerParts, describe_parts, encode, finish
from .training_images import PackedImages
from .wrappers import unwrapped

_Run: TypeAlias = Callable[[Any, Tensor], Tensor]
_MODEL = "model."
"""The prefix of the names of the tower's weights: the name of the module that holds the tower and the decoder."""
_ROOT_WORDS = 2
"""The number of words in the name of a tower or projector, such as `model.visual`."""


def encode_images(model: Any, spec: TowerSpec, images: PackedImages | None, device: torch.device) -> Tensor:
    """Return the embeddings of all images, [tokens, row_size]. Without images, the result has no rows and is on
    `device`. `model`: the aligned module of transformers that holds the tower and the decoder.
    """
    parts = _trained_parts(model, spec)

    def run(_: Any, patches: Tensor) -> Tensor:
        if images is not None:
            return finish(encode(spec, parts.map(lambda part: part.run), patches, images.grids))
        for part in parts:
            patches = part.idle(patches)
        return patches.sum() + patches.new_zeros(0, spec.row_size)

    patches = torch.zeros(0, 1, device=device) if images is None else images.patches
    return _submodule(model, _root_of(spec.names["patch"]))(patches, run)


def part_forward(self: Any, x: Tensor, run: _Run) -> Tensor:
    """The forward pass of an aligned part: return run(self, x)."""
    return run(self, x)


def tower_modules(model: Any, spec: TowerSpec) -> Iterator[nn.Module]:
    """Yield the modules of a tower to which `align` gives `part_forward` as their forward pass, each module once."""
    modules = [_submodule(model, _root_of(spec.names["patch"])), *(part.module for part in _trained_parts(model, spec))]
    for module in dict.fromkeys(modules):
        yield from copies_of(unwrapped(module))


def check_tower(model: Any, spec: TowerSpec) -> None:
    """Raise AlignmentError unless the model's tower has the parameters that the spec requires."""
    for part in _trained_parts(model, spec):
        for copy in copies_of(unwrapped(part.module)):
            part.part.make(partial(parameter, copy, part.prefix))


class _TrainedPart(NamedTuple):
    """A part, and its module in the model, which may be inside a wrapper. The names of the module's parameters begin
    with `prefix`.
    """

    part: Part
    module: Any
    prefix: str

    def run(self, compute: Compute, x: Tensor) -> Tensor:
        """Run the part (`towers.RunPart`)."""

        def inside(module: Any, x: Tensor) -> Tensor:
            x, ops = self._begin(module, x)
            return compute(ops, self.part.make(partial(self._read, module, x, ops)), x)

        return self.module(x, inside)

    def idle(self, x: Tensor) -> Tensor:
        """Call the part's module without rows: x and the result have shape [0, n]. The result has the dtype of the
        parameters.
        """

        def inside(module: Any, x: Tensor) -> Tensor:
            (x, ops), weights = self._begin(module, x), list[Tensor]()
            # Only this part's weights: ranks reduce the gradients of a module after each call.
            self.part.make(lambda name, *shape: weights.append(self._read(module, x, ops, name, *shape)))
            return _Idle.apply(x, *weights)  # type: ignore[return-value]

        return self.module(x, inside)

    def _begin(self, module: Any, x: Tensor) -> tuple[Tensor, GradientTowerOps]:
        """Return the part's input and its ops. The input of the first part is converted from float32."""
        if self.part.role == "patch":
            x = x.to(forward_dtype(next(module.parameters())))
        return x, GradientTowerOps(ops_of(module, x).backend)

    def _read(self, module: Any, x: Tensor, ops: GradientTowerOps, name: str, *shape: int) -> Tensor:
        parameter(module, self.prefix, name, *shape)
        return as_computed(name, *place(module, self.prefix, name), x, ops)


class _Idle(Function):
    """A tensor without elements that depends on weights. The gradients of these weights are zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.weights = [(weight.shape, weight.dtype, weight.device) for weight in weights]
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.weights)


def _trained_parts(model: Any, spec: TowerSpec) -> TowerParts:
    """Return the parts of a model's tower, as `_TrainedPart`."""

    def find(part: Part) -> _TrainedPart:
        name = _module_of(model, spec.names[part.role]).format(part.number)
        return _TrainedPart(part, _submodule(model, name), f"{name}.")

    return describe_parts(spec).map(find)


def _module_of(model: Any, name: str) -> str:
    """Return the name of the module that `align` changes for the weight `name`: a numbered module, else the module
    below the tower or projector, else the tower or projector itself. Trainers put wrappers around modules of these
    three kinds.
    """
    root, words = _root_of(name), name.split(".")
    if "{}" in words:
        return ".".join(words[: words.index("{}") + 1])
    word = words[_ROOT_WORDS]
    return f"{root}.{word}" if isinstance(getattr(_submodule(model, root), word, None), nn.Module) else root


def _root_of(name: str) -> str:
    return ".".join(name.split(".")[:_ROOT_WORDS])


def _submodule(model: Any, name: str) -> Any:
    try:
        return model.get_submodule(name.removeprefix(_MODEL))
    except AttributeError:
        raise AlignmentError(untested("transformers", f"{type(model).__name__} has no module {name}")) from None
