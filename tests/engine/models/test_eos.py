"""End-of-sequence tokens: the tokens that each file of a model folder adds, and the limits of a hostile tokenizer."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

from trueroll.engine.config import EngineConfig
from trueroll.engine.models.eos import find_eos_tokens
from trueroll.engine.running.loading import load_model
from trueroll.errors import ModelError

from ..drive import generate, make_engine, run, tokens

VOCAB_SIZE = 512
ADDED = dict(id=7, content="<|im_end|>", special=True)
TOKENIZER = dict(added_tokens=[ADDED], model=dict(type="BPE", vocab={"</s>": 9, "far": 600, "<|im_end|>": 8}))
Files = dict[str, Any]


def write(folder: Path, files: Files) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def found(folder: Path, **files: Any) -> tuple[int, ...]:
    write(folder, files)
    return find_eos_tokens(folder, files.get("config", {}), VOCAB_SIZE)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (dict(config=dict(eos_token_id=2)), (2,)),
        (dict(config=dict(eos_token_id=2), generation_config=dict(eos_token_id=[5, 6], top_k=3)), (5, 6, 2)),
        (dict(config=dict(eos_token_id=[2, 3]), generation_config=dict(top_k=3)), (2, 3)),
        (dict(config=dict(eos_token_id=[2, 3]), generation_config=dict(eos_token_id=3)), (3, 2)),
        (dict(generation_config=dict(eos_token_id=0)), (0,)),
        (dict(tokenizer_config=dict(eos_token="<|im_end|>"), tokenizer=TOKENIZER), (7,)),
        (dict(tokenizer_config=dict(eos_token="</s>"), tokenizer=TOKENIZER), (9,)),
        (dict(tokenizer_config=dict(eos_token=dict(content="</s>", lstrip=True)), tokenizer=TOKENIZER), (9,)),
        (dict(special_tokens_map=dict(eos_token="</s>"), tokenizer=TOKENIZER), (9,)),
        (
            dict(
                tokenizer_config=dict(eos_token=None),
                special_tokens_map=dict(eos_token=dict(content="</s>")),
                tokenizer=TOKENIZER,
            ),
            (9,),
        ),
        (
            dict(
                tokenizer_config=dict(eos_token="<|im_end|>"),
                special_tokens_map=dict(eos_token="</s>"),
                tokenizer=TOKENIZER,
            ),
            (7,),
        ),
        (
            dict(
                config=dict(eos_token_id=2),
                generation_config=dict(eos_token_id=[2, 3]),
                tokenizer_config=dict(eos_token="<|im_end|>"),
                tokenizer=TOKENIZER,
            ),
            (2, 3, 7),
        ),
    ],
)
def test_every_file_adds_the_tokens_that_it_names(
    tmp_path: Path, files: Files, expected: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    assert found(tmp_path, **files) == expected
    assert not caplog.records


def test_the_log_says_which_file_named_which_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = dict(config=dict(eos_token_id=[2, 7]), generation_config=dict(eos_token_id=3))
    with caplog.at_level("INFO"):
        found(tmp_path, **files, tokenizer_config=dict(eos_token="<|im_end|>"), tokenizer=TOKENIZER)
    expected = "samples end at the tokens 3 (generation_config.json), 2 (config.json), 7 (config.json, tokenizer.json)"
    assert caplog.messages == [f"{tmp_path}: {expected}"]


@pytest.mark.parametrize("files", [{}, dict(config=dict(eos_token_id=None)), dict(generation_config={})])
def test_a_model_without_an_eos_token_is_warned_of(
    tmp_path: Path, files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    assert found(tmp_path, **files) == ()
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "samples end only at max_tokens, stop_token_ids and stop" in record.getMessage()
    assert "set eos_token_id in generation_config.json" in record.getMessage()


LEFT_OUT = {
    "no id": (dict(tokenizer_config=dict(eos_token="<end>"), tokenizer=TOKENIZER), "'<end>' has no id .no such token"),
    "no file": (dict(tokenizer_config=dict(eos_token="<end>")), "'<end>' has no id .no such file"),
    "outside": (dict(tokenizer_config=dict(eos_token="far"), tokenizer=TOKENIZER), r"has id 600, outside \[0, 512\)"),
    "negative": (
        dict(tokenizer_config=dict(eos_token="x"), tokenizer=dict(model=dict(vocab=dict(x=-1)))),
        r"has id -1, outside \[0, 512\)",
    ),
    "strange": (
        dict(tokenizer_config=dict(eos_token="x"), tokenizer=dict(added_tokens={"x": 1}, model=["x"])),
        "has no id .no such token",
    ),
    "strange ids": (
        dict(
            tokenizer_config=dict(eos_token="x"),
            tokenizer=dict(added_tokens=["x", dict(content="x", id=True)], model=dict(vocab=dict(x="1"))),
        ),
        "has no id .no such token",
    ),
    "long": (dict(tokenizer_config=dict(eos_token="\x1b" * 10**5), tokenizer=TOKENIZER), "has no id .no such token"),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_a_token_that_the_model_cannot_draw_is_skipped_with_a_warning(
    tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    files, message = LEFT_OUT[case]
    assert found(tmp_path, **files, config=dict(eos_token_id=2)) == (2,)
    [record] = caplog.records
    text = record.getMessage()
    assert record.levelname == "WARNING" and len(text) < 1000 and text.isprintable()
    assert re.search(message, text), text


@pytest.mark.parametrize("value", [7, ["</s>"], True, {}, dict(content=7)])
@pytest.mark.parametrize("file", ["tokenizer_config", "special_tokens_map"])
def test_an_invalid_eos_token_is_refused(tmp_path: Path, file: str, value: object) -> None:
    with pytest.raises(ModelError, match=f"{file}.json: eos_token must be a string, or an object with"):
        found(tmp_path, **{file: dict(eos_token=value)}, tokenizer=TOKENIZER)


TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "tokenizer.json")


@pytest.mark.timeout(30)  # opening the FIFO would wait for a writer
@pytest.mark.parametrize("file", TOKENIZER_FILES)
@pytest.mark.parametrize("content", [None, b"{", b"[]", b"[" * 10**5, b"\xff"])
def test_an_unreadable_tokenizer_file_is_refused(tmp_path: Path, file: str, content: bytes | None) -> None:
    if file == "tokenizer.json":
        write(tmp_path, dict(tokenizer_config=dict(eos_token="</s>")))
    if content is None:
        os.mkfifo(tmp_path / file)
    else:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(ModelError, match=f"{file}: (must|is not valid JSON|the JSON is)") as caught:
        found(tmp_path)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("file", TOKENIZER_FILES)
def test_a_tokenizer_out_of_proportion_is_refused(tmp_path: Path, file: str) -> None:
    if file == "tokenizer.json":
        write(tmp_path, dict(tokenizer_config=dict(eos_token="</s>")))
    (tmp_path / file).touch()
    os.truncate(tmp_path / file, 2**26 + 1)
    with pytest.raises(ModelError, match=f"{file}: file is too large: 67108865 bytes"):
        found(tmp_path)


def test_the_tokenizer_is_not_read_unless_it_names_a_token(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"{")
    assert found(tmp_path, tokenizer_config=dict(auto_map="x.py"), config=dict(eos_token_id=2)) == (2,)


def test_a_turn_ends_where_the_tokenizer_says(tiny_llama: Path, tmp_path: Path) -> None:
    """In some models, config.json names the end of a text, and the tokenizer names the end of a turn."""
    free = run(make_engine(tiny_llama), [generate("r", tokens(20))])["r", 0].token_ids
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    end_of_turn = free[3]
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end_of_turn)
    tokenizer.save_pretrained(folder)
    engine = make_engine(folder)
    assert engine.info.eos_token_ids == (2, end_of_turn)
    sample = run(engine, [generate("r", tokens(20), ignore_eos=False)])["r", 0]
    assert sample.finish_reason == "stop" and sample.token_ids == free[: free.index(end_of_turn) + 1]
    assert run(engine, [generate("r", tokens(20))])["r", 0].token_ids == free


@pytest.mark.parametrize("value", [True, [2, False], 2.0, [[2]], {"a": 2}, list(range(257)), ["x" * 10**5], "</s>"])
@pytest.mark.parametrize("file", ["config", "generation_config"])
def test_eos_token_id_is_an_id_or_a_short_list(tmp_path: Path, file: str, value: object) -> None:
    message = f"{file}.json: eos_token_id must be a token id or a list of at most 256"
    with pytest.raises(ModelError, match=message) as caught:
        found(tmp_path, **{file: dict(eos_token_id=value)})
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("value", [-1, 512, 2**70, 10**4000, [2, -5]])
@pytest.mark.parametrize("file", ["config", "generation_config"])
def test_eos_token_id_is_in_the_vocabulary(tiny_llama: Path, tmp_path: Path, file: str, value: object) -> None:
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    raw = json.loads((folder / f"{file}.json").read_text())
    write(folder, {file: raw | dict(eos_token_id=value)})
    with pytest.raises(ModelError, match=rf"{file}.json: eos_token_id must be in \[0, 512\) .got ") as caught:
        load_model(EngineConfig(model=str(folder)))
    assert len(str(caught.value)) < 1000
