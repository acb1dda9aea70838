"""What is asked of the ops here is asked of them on a GPU as well, by tests/gpu."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import pytest

from ..gpu import test_ops as on_a_gpu
from . import test_accuracy, test_contract, test_joined_ops, test_recurrence

# A GPU has none of them.
ABOUT_THREADS = {"test_attention_does_not_depend_on_threads"}
WITH_CASES_OF_ITS_OWN = {"test_attention_does_not_depend_on_chunks_or_company"}


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
