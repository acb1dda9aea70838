"""Hostile tokenizers: tokenizers that would take disproportionate time or memory are refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from trueroll.engine.models.tokenizer import check_decoder, load_tokenizer
from trueroll.engine.models.trials import Limits, TrialError, attempt
from trueroll.engine.outputs.stop_strings import load_vocabulary
from trueroll.errors import InvalidRequestError, ModelError


def replace(found: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: found}, "content": content}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "decoders": list(steps)}


DOUBLING = sequence(*[replace("a", "aa")] * 30)
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        {"type": "BPEDecoder", "suffix": "</w>"},
        {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True},
        sequence(replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}, STRIP),
        sequence(replace("[0-9]", "x", "Regex"), replace("\u2581", "")),
    ],
)
def test_decoders_in_wide_use_are_accepted(decoder: dict[str, Any]) -> None:
    check_decoder(decoder)


@pytest.mark.parametrize(
    ("decoder", "found"),
    [
        (DOUBLING, "more than 16 times as long .in step Replace"),
        (sequence(sequence(DOUBLING)), "more than 16 times as long .in step Replace"),
        (replace("", "a" * 16), "more than 16 times as long"),
        (replace(".", "a" * 16, "Regex"), "more than 16 times as long"),
        (replace("a", "a" * 17), "more than 16 times as long"),
        (sequence(*[{"type": "BPEDecoder", "suffix": ""}] * 5), "more than 16 times as long .in step BPEDecoder"),
        (sequence(*[{"type": "WordPiece", "prefix": "#", "cleanup": False}] * 5), "in step WordPiece"),
        (sequence(*[dict(type="CTC", pad_token="p", word_delimiter_token="", cleanup=False)] * 5), "in step CTC"),
        (replace("(a+)+$", "a", "Regex"), "uses the regular expression .*, which may be slow"),
        (sequence(*[STRIP] * 100), "more than 64 steps"),
        ({"type": "Other"}, "a step of the unknown type 'Other'"),
    ],
)
def test_decoders_out_of_proportion_are_refused(decoder: dict[str, Any], found: str) -> None:
    with pytest.raises(ModelError, match=found):
        check_decoder(decoder)


def changed(tiny_llama: Path, folder: Path, **settings: Any) -> Path:
    """Return a copy of a model's folder with a changed tokenizer.json."""
    shutil.copytree(tiny_llama, folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return path


def test_a_worker_does_not_use_a_decoder_that_doubles_a_letter_30_times(tiny_llama: Path, tmp_path: Path) -> None:
    path = changed(tiny_llama, tmp_path / "model", decoder=DOUBLING)
    with pytest.raises(InvalidRequestError, match="16 times as long .* or use stop_token_ids"):
        load_vocabulary(path.parent)


def test_a_token_that_is_too_long_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    path = changed(tiny_llama, tmp_path / "model", added_tokens=[{"id": 600, "content": "x" * 4097, **flags}])
    with pytest.raises(ModelError, match="a token with 4097 characters .limit 4096."):
        load_tokenizer(path)


def spin() -> None:
    while True:
        pass


@pytest.mark.parametrize(
    ("work", "seconds", "found"),
    [
        (lambda: bytearray(2**40), 60, "needs more than 1 s of processor time and 64 MiB of memory, or crashes"),
        (spin, 60, "needs more than 1 s of processor time"),
        (os.abort, 60, "or crashes"),
        (lambda: 1 / 0, 60, "ZeroDivisionError: division by zero"),
        (lambda: os.kill(os.getpid(), signal.SIGSTOP), 1, "or crashes"),
    ],
    ids=["memory", "time", "abort", "raise", "stop"],
)
def test_a_trial_ends_within_its_limits_and_leaves_no_process(
    work: Callable[[], Any], seconds: int, found: str
) -> None:
    before = psutil.Process().children()
    with pytest.raises(TrialError, match=found):
        attempt(work, Limits(cpu_seconds=1, seconds=seconds, more_bytes=2**26))
    assert psutil.Process().children() == before


def test_a_successful_trial_changes_nothing_in_this_process() -> None:
    done: list[int] = []
    attempt(lambda: done.append(1))
    assert done == []
