"""Drafts change no bit on a GPU, beside a worker without drafts that uses CUDA graphs and steps ahead."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trueroll.engine.config import EngineConfig
from trueroll.engine.running.loading import load_dummy

from ..engine.drafting.test_exactness import Prophet, known_texts, make, parts, requests, some_were_rejected
from ..engine.drive import run
from .moved import DEVICE, cut_config, sized


@pytest.mark.parametrize("name", sized(["qwen3-0.6b", "qwen3-moe-0.3b"], ["qwen3-0.6b"]))
def test_drafts_change_no_bit(name: str, tmp_path: Path) -> None:
    settings = dict(model=str(cut_config(name, tmp_path)), device=str(DEVICE), backend="triton", max_model_len=512)
    loaded = load_dummy(EngineConfig(**settings))
    plain = make(loaded, settings, None)
    asked = requests(plain.info.num_experts > 0)[sized(slice(None), slice(1, 2))]
    expected = run(plain, asked)
    known = known_texts(asked, expected)
    for most in sized((1, 3, 8), (3,)):
        engine = make(loaded, settings, Prophet(known, np.random.default_rng(most)), num_speculative_tokens=most)
        found = run(engine, asked)
        assert some_were_rejected(engine)
        assert {key: parts(sample) for key, sample in found.items()} == {k: parts(s) for k, s in expected.items()}
