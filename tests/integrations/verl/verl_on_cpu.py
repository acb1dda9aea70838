"""Makes verl run on a CPU: set `VERL_USE_EXTERNAL_MODULES=verl_on_cpu` and `VERL_PLATFORM=cpu`.

verl has no platform for a CPU, and loads a critic only with flash attention, which needs a GPU. On a GPU this module is
not needed. The module does not affect the rollout. The module also hides TRL from verl, because verl would import a
class that TRL no longer has. The tests' environment has TRL 1.16.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForTokenClassification
from verl.plugin.platform import PlatformBase, PlatformRegistry
from verl.utils import import_utils

import_utils.is_trl_available = lambda: False
init_process_group = torch.distributed.init_process_group


def init_on_a_cpu(backend: str, **options: Any) -> None:
    """Start torch.distributed with gloo. verl names gloo for the CPU and the platform's backend; here both are gloo."""
    init_process_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **options)


torch.distributed.init_process_group = init_on_a_cpu
load_token_classifier = AutoModelForTokenClassification.from_pretrained


def load_on_a_cpu(*arguments: Any, **options: Any) -> Any:
    """Load a critic with the attention that its config names, not with flash attention as verl requests."""
    return load_token_classifier(*arguments, **options | {"attn_implementation": None})


AutoModelForTokenClassification.from_pretrained = load_on_a_cpu

MODULE = SimpleNamespace(
    **{name: getattr(torch.cpu, name) for name in torch.cpu.__all__},
    get_device_name=lambda *_: "CPU",
    empty_cache=lambda: None,
    memory_allocated=lambda *_: 0,
    memory_reserved=lambda *_: 0,
    max_memory_allocated=lambda *_: 0,
    max_memory_reserved=lambda *_: 0,
    mem_get_info=lambda *_: (0, 1),
    manual_seed=torch.manual_seed,
    get_rng_state=lambda *_: torch.get_rng_state(),
    set_rng_state=lambda state, *_: torch.set_rng_state(state),
)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """A platform with one device. Ray counts one fake GPU for this device."""

    device_name = "cpu"
    vendor_name = "none"
    device_module = MODULE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
