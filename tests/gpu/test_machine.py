"""The versions that the tests ran with, and the matrix instruction that each loaded kernel uses."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import triton
from triton.runtime.jit import JITFunction

from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.running.loading import load_dummy
from trueroll.kernels.selection import select_backend

from ..engine.drive import generate, run, tokens
from .moved import DEVICE, IS_REHEARSAL, cut_config
from .test_decode import requests

NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
SETTINGS = ("CUDA_", "NVIDIA_", "PYTORCH_", "TORCH_", "TRITON_")
# Names of matrix instructions in the machine code of each GPU generation. An instruction has 16 columns of K, and any
# number of features and tokens.
INSTRUCTIONS = {8: r"HMMA\.16816", 9: r"HGMMA\.64x\d+x16"}
MULTIPLYING = {"qwen2.5-7b": {"products", "attention"}, "qwen3-moe-0.3b": {"products", "attention", "experts"}}
"""For each model, the kernel modules with a matrix product that the model uses. All kernel modules with a matrix
product are listed.
"""


def test_versions_and_driver(record_property: Callable[[str, str], None]) -> None:
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}, Triton "
    record_property("found", f"{versions}{triton.__version__}, transformers {transformers.__version__}")
    settings = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)]
    record_property("found", f"settings: {', '.join(settings)}")
    record_property("found", select_backend("triton", DEVICE, torch.bfloat16).ops.instruction_set())
    if not IS_REHEARSAL:
        gpus = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, check=True).stdout.splitlines()
        assert len(gpus) >= torch.cuda.device_count() > 0
        record_property("found", "; ".join(gpus))


@pytest.fixture
def loaded_kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """All kernels of this project that run in the test, by hash of the compiled kernel."""
    seen: dict[str, Any] = {}
    run_kernel: Callable[..., Any] = JITFunction.run

    def note(function: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        kernel = run_kernel(function, *args, warmup=warmup, **options)
        if function.fn.__module__.startswith("trueroll.") and not warmup:
            seen[kernel.hash] = (f"{function.fn.__module__.rsplit('.', 1)[1]}.{function.fn.__name__}", kernel)
        return kernel

    monkeypatch.setattr(JITFunction, "run", note)
    return seen


@pytest.mark.parametrize("name", MULTIPLYING)
def test_each_loaded_kernel_multiplies_by_one_instruction(
    gpu: torch.device,
    name: str,
    tmp_path: Path,
    loaded_kernels: dict[str, Any],
    record_property: Callable[[str, str], None],
) -> None:
    """Checks the kernels of two layers of a model, for prompts and for 1 to 520 decodes."""
    expected = INSTRUCTIONS[torch.cuda.get_device_capability(gpu)[0]]
    config = EngineConfig(
        model=str(cut_config(name, tmp_path)),
        device="cuda",
        backend="triton",
        max_model_len=8192,
        max_num_seqs=520,
        max_num_batched_tokens=8192,
        cuda_graphs=False,
    )
    engine = Engine(config, load_dummy(config))
    run(engine, requests())
    run(engine, [generate("long", tokens(6000), top_k=5, top_p=0.9, top_logprobs=4, max_tokens=3)])
    instructions: defaultdict[str, set[str]] = defaultdict(set)
    for kernel_name, kernel in loaded_kernels.values():
        found = set(re.findall(r"\b(?:HMMA|HGMMA|UTC\w*MMA)\.\w+", kernel.asm["sass"]))
        print(f"{kernel_name}: {kernel.n_regs} registers, {kernel.n_spills} spilled, {sorted(found) or 'no product'}")
        instructions[kernel_name] |= found
    multiplying = {kernel_name: found for kernel_name, found in instructions.items() if found}
    modules = {kernel_name.split(".")[0] for kernel_name in multiplying}
    assert modules == MULTIPLYING[name], "premise: products were found"
    assert all(re.fullmatch(expected, each) for found in multiplying.values() for each in found), multiplying
    assert [each for each, kernel in loaded_kernels.values() if kernel.n_spills] == []
    shapes = sorted(set().union(*multiplying.values()))
    record_property("found", f"{len(loaded_kernels)} kernels loaded, none spills; {', '.join(shapes)}")
