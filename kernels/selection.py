"""Select the backend for a model on a device. Each backend reports whether it can serve a model, and if not, the
reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

from trueroll.errors import ConfigError

from .contract import Backend
from .specs import DecoderSpec

BACKENDS = ("cpu", "triton", "reference")


@dataclass(frozen=True)
class SelectedBackend:
    """The backend for a model.

    `note`: the reason why `auto` fell back to a slower backend; an empty string if `auto` did not fall back.
    `can_capture`: whether a CUDA graph can capture the backend's calls.
    """

    name: str
    ops: Backend
    note: str
    can_capture: bool = False


def select_backend(
    name: str, device: torch.device, dtype: torch.dtype, spec: DecoderSpec | None = None
) -> SelectedBackend:
    """Return the backend called `name`. For `auto`, return the best backend for the device and the decoder.

    `spec`: the decoder's spec; None to select a backend for the ops alone. Raise ConfigError if no backend has this
    name, if the backend cannot serve the decoder, or if TRUEROLL_CPU_ISA names an instruction set that this machine
    lacks.
    """
    if name not in ("auto", *BACKENDS):
        raise ConfigError(f"backend must be one of auto, {', '.join(BACKENDS)} (got {name!r})")
    fastest = "cpu" if device.type == "cpu" else "triton"
    wanted = fastest if name == "auto" else name
    if wanted == "reference":
        return _select("reference", device, "")
    obstacle = _obstacle(wanted, device, dtype, spec)
    if not obstacle:
        return _select(wanted, device, "")
    if name == wanted:
        raise ConfigError(f"backend {name} cannot serve this model on {device}: {obstacle}")
    return _select("reference", device, obstacle)


def _obstacle(name: str, device: torch.device, dtype: torch.dtype, spec: DecoderSpec | None) -> str:
    """Return the reason why the backend cannot serve this decoder; an empty string if it can."""
    from . import cpu, triton

    return (triton if name == "triton" else cpu).obstacle(device, dtype, spec)


def _select(name: str, device: torch.device, note: str) -> SelectedBackend:
    return SelectedBackend(name, _ops(name), note, name == "triton" and device.type == "cuda")


def _ops(name: str) -> Backend:
    if name == "cpu":
        from .cpu import backend as cpu

        return cast(Backend, cpu)
    if name == "triton":
        from .triton import backend as triton

        return cast(Backend, triton)
    from . import reference

    return cast(Backend, reference)
