"""Names of models: what a name stands for, and the hints for names that are nearly right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from trueroll.engine.models.names import check_model, find_config, resolve_model
from trueroll.errors import ModelError


def test_a_local_folder_is_returned_unchanged(tiny_llama: Path) -> None:
    assert resolve_model(str(tiny_llama)) == tiny_llama


NAMES = ["./gone", "../gone", "/gone/model", "~/gone", "~nobody_of_this_name/gone", "a/b/c", "org/name", "gpt2"]


@pytest.mark.parametrize("name", [*NAMES, "", "x" * 5000, "nul\0", "/dev/null/gone"])
def test_a_missing_path_is_not_looked_up_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    with pytest.raises(ModelError, match="but there is no such folder; check the path") as caught:
        resolve_model(name)
    hint = "a model of the Hugging Face hub is written hf://org/name"
    assert str(caught.value).endswith(hint) == (name == "org/name")


def test_a_file_is_not_a_model_folder(tiny_llama: Path) -> None:
    with pytest.raises(ModelError, match="but this is a file; check the path$"):
        resolve_model(str(tiny_llama / "config.json"))


@pytest.mark.parametrize(
    ("name", "repository", "revision"),
    [
        ("hf://org/name", "org/name", None),
        ("hf://Org-1/a_name.v2-x@main", "Org-1/a_name.v2-x", "main"),
        ("hf://org/name@refs/pr/1", "org/name", "refs/pr/1"),
    ],
)
def test_a_model_of_the_hub_is_downloaded_at_its_revision(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, name: str, repository: str, revision: str | None
) -> None:
    asked: list[tuple[str, str | None]] = []

    def download(repo_id: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((repo_id, revision))
        offered = ["config.json", "model-1.safetensors", "tokenizer.model", "merges.txt", "chat_template.jinja"]
        code = [
            "modeling_x.py",
            "tokenizer_x.py",
            "tokenizer.so",
            "pytorch_model.bin",
            "sub/x.json",
            "sub/model.safetensors",
        ]
        allowed = filter_repo_objects(offered + code, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        assert list(allowed) == offered
        return str(tiny_llama)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model(name) == tiny_llama and asked == [(repository, revision)]


@pytest.mark.parametrize(
    "name", ["hf://", "hf://gpt2", "hf://org/name@", "hf://a/b/c", "hf:///etc/passwd", "hf://../up", "hf://org/na me"]
)
def test_a_malformed_hub_name_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    with pytest.raises(ModelError, match="write hf://ORG/NAME or hf://ORG/NAME@REVISION, where"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["hf://nobody/no-such-model", "hf://nobody/no-such-model@v1"])
def test_a_failed_download_is_reported_in_one_line(name: str) -> None:
    with pytest.raises(ModelError, match="the download failed: .*; check the name and the network") as caught:
        resolve_model(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["smolm2", "SmolLM2", "smollm2-135m"])
def test_a_name_that_is_nearly_right_gets_a_suggestion(name: str) -> None:
    with pytest.raises(ModelError, match="no such folder; check the path; did you mean smollm2?"):
        check_model(name)
    with pytest.raises(ModelError, match="did you mean qwen3-0.6b?"):
        find_config("qwen3-0.6")


def test_a_name_is_resolved_without_torch_and_without_the_client_of_the_hub(tmp_path: Path) -> None:
    code = f"import sys; from trueroll.engine.models.names import resolve_model; resolve_model({str(tmp_path)!r})"
    heavy = {"torch", "transformers", "huggingface_hub"}
    look = f"print(sorted({heavy} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-P", "-c", f"{code}; {look}"], capture_output=True, text=True)
    assert found.stdout == "[]\n", found.stderr
