"""Backend selection: which backend an engine uses, and the note in the log if a faster backend exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from tiny import make_tiny_model
from trueroll.engine.engine import Engine
from trueroll.errors import ConfigError
from trueroll.kernels.cpu import library as native
from trueroll.kernels.cpu.library import Library, load_library
from trueroll.kernels.training import align, aligned_with

from .drive import bits, generate, make_engine, run, score, tokens


def chosen(engine: Engine) -> tuple[str, str]:
    return engine.info.backend, engine.info.backend_note


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Library:
        raise OSError("_native.so was not built")

    monkeypatch.setattr(native, "load_library", fail)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_auto_takes_the_native_kernels(tiny_model: Path, native_library: Library, dtype: str) -> None:
    engine = make_engine(tiny_model, dtype=dtype)
    assert chosen(engine) == ("cpu", "")
    assert engine.info.isa == native_library.instruction_set()


def test_a_requested_backend_is_used(tiny_llama: Path, backend: str) -> None:
    assert chosen(make_engine(tiny_llama, backend=backend)) == (backend, "")


def test_without_the_library_auto_falls_back_and_says_why(tiny_llama: Path, no_library: None) -> None:
    engine, requests = make_engine(tiny_llama), [generate("r", tokens(20), n=2)]
    cause = "native CPU kernels cannot be loaded: _native.so was not built"
    note = f"{cause}; install trueroll again without TRUEROLL_NATIVE=0"
    assert chosen(engine) == ("reference", note)
    expected = run(make_engine(tiny_llama, backend="reference"), requests)
    assert {k: bits(s) for k, s in run(engine, requests).items()} == {k: bits(s) for k, s in expected.items()}


def test_without_the_library_cpu_is_refused(tiny_llama: Path, no_library: None) -> None:
    with pytest.raises(ConfigError, match="backend cpu cannot .*: .*_native.so was not built; install trueroll"):
        make_engine(tiny_llama, backend="cpu")


@pytest.mark.parametrize(
    ("overrides", "dtype", "reason"),
    [
        ({}, "float16", r"do not support float16; set dtype to bfloat16 \(--dtype bfloat16\) or float32$"),
        (dict(head_dim=20), "float32", "need a head size that is a multiple of 16 up to 512 .got 20"),
        (dict(head_dim=528), "float32", "need a head size that is a multiple of 16 up to 512 .got 528"),
    ],
)
def test_a_model_that_the_native_kernels_do_not_serve_is_refused(
    tmp_path: Path, overrides: dict[str, Any], dtype: str, reason: str
) -> None:
    model = make_tiny_model("llama", tmp_path, **overrides)
    backend, note = chosen(make_engine(model, dtype=dtype))
    assert backend == "reference" and re.search(reason, note)
    with pytest.raises(ConfigError, match=f"backend cpu cannot .*: .*{reason}"):
        make_engine(model, dtype=dtype, backend="cpu")


@pytest.mark.parametrize(("sizes", "found"), [(dict(hidden_size=72), 72), (dict(moe_intermediate_size=24), 24)])
def test_experts_that_the_native_kernels_do_not_serve_are_refused(
    tmp_path: Path, sizes: dict[str, Any], found: int
) -> None:
    model = make_tiny_model("qwen3_moe", tmp_path, **sizes)
    reason = "experts of intermediate and hidden sizes that are multiples of 16"
    engine = make_engine(model)
    backend, note = chosen(engine)
    assert backend == "reference" and f"{reason} (got {found}); use the backend 'reference'" in note
    assert len(score(engine, tokens(5))) == 4
    with pytest.raises(ConfigError, match=f"backend cpu cannot .*: .*{reason}"):
        make_engine(model, backend="cpu")
    aligned = AutoModelForCausalLM.from_pretrained(model)
    with pytest.raises(ConfigError, match=reason):
        align(aligned, backend="cpu")
    align(aligned)
    assert aligned_with(aligned).backend == "reference"


def test_the_environment_names_the_instruction_set(
    tiny_llama: Path, native_library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, scores = tokens(150), []
    for name in native_library.instruction_sets():
        monkeypatch.setenv("TRUEROLL_CPU_ISA", name)
        load_library.cache_clear()
        engine = make_engine(tiny_llama)
        assert engine.info.isa == name
        scores.append(score(engine, ids))
    assert "portable" in native_library.instruction_sets()
    for found in scores:
        np.testing.assert_allclose(found, scores[0], atol=1e-4)


def test_an_unknown_instruction_set_is_refused(
    tiny_llama: Path, native_library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUEROLL_CPU_ISA", "mmx")
    load_library.cache_clear()
    names = ", ".join(native_library.instruction_sets())
    with pytest.raises(ConfigError, match=rf"must be one of this machine's instruction sets: {names} .got 'mmx'"):
        make_engine(tiny_llama)
    assert chosen(make_engine(tiny_llama, backend="reference")) == ("reference", "")
