"""Every check of ops in tests/kernels also runs on a GPU, in tests/gpu."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from inspect import signature
from types import ModuleType

import pytest

from ..gpu import test_ops as on_a_gpu
from . import test_accuracy, test_contract, test_joined_ops, test_recurrence

# These checks do not apply to a GPU.
ABOUT_THREADS = {"test_attention_does_not_depend_on_threads"}
WITH_CASES_OF_ITS_OWN = {
    "test_attention_does_not_depend_on_chunks_or_company",
    "test_attention_within_spans_does_not_depend_on_chunks_or_company",
}


def checks_of(module: ModuleType) -> set[str]:
    return {name for name in vars(module) if name.startswith("test_")}


@pytest.mark.parametrize("module", [test_accuracy, test_contract, test_joined_ops, test_recurrence])
def test_every_check_of_ops_runs_on_a_gpu(module: ModuleType) -> None:
    given = [*on_a_gpu.ROW_CHECKS, *on_a_gpu.OTHER_CHECKS]
    checks = {(check.func if isinstance(check, partial) else check).__name__ for check in given}
    assert len(checks_of(module)) > 8
    assert checks_of(module) - checks_of(on_a_gpu) - checks == (
        ABOUT_THREADS | WITH_CASES_OF_ITS_OWN if module is test_contract else set()
    )


@pytest.mark.parametrize("check", [*on_a_gpu.ROW_CHECKS, *on_a_gpu.OTHER_CHECKS], ids=on_a_gpu.name_of)
def test_gpu_checks_get_all_arguments(check: Callable[..., None]) -> None:
    signature(check).bind("ops of one dtype")


@pytest.mark.parametrize(
    "module,names",
    [
        (test_joined_ops, ["test_qkv", "test_layers", "test_next_tokens", "test_next_token_statistics"]),
        (test_accuracy, ["test_attention", "test_attention_with_window_and_soft_cap"]),
    ],
)
def test_checks_with_their_own_cases_take_the_given_arguments(module: ModuleType, names: list[str]) -> None:
    for name in names:
        assert list(signature(getattr(on_a_gpu, name)).parameters) == list(signature(getattr(module, name)).parameters)


def test_a_gpu_has_every_fixture_that_its_tests_ask_for() -> None:
    command = [sys.executable, "-P", "-m", "pytest", "--setup-plan", "-qq", on_a_gpu.__file__]
    environment = os.environ | {"TRUEROLL_REHEARSAL": "1"}
    planned = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert planned.returncode == 0 and "test_layers_with_experts" in planned.stdout, planned.stdout[-2000:]
