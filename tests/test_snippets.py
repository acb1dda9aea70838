"""Every Python and shell block of the README and of the guides runs on SmolLM2, or has a comment with the reason why it
cannot.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import indent
from typing import Any
from unittest import SkipTest

import pytest
import transformers
from http_fronts import front_end
from sybil import Document, Example
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser
from vision_models import make_vision_model

from trueroll.rollout import RolloutClient, WeightPublisher, launch_worker, resolve_model

ROOT = Path(__file__).parent.parent
GUIDES = """quickstart clients sessions agents training recipes images drafts trl verl verifiers http fleet deploy
    migration adapters"""
PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in GUIDES.split())]


def refuse(example: Example) -> None:
    raise AssertionError(f"{example.path}:{example.line}: a shell block needs a reason why it is not run")


def blocks(page: Path) -> list[Example]:
    """Return the blocks of a page, and the comments that skip blocks, in order."""
    parsers = PythonCodeBlockParser(), CodeBlockParser("sh", refuse), SkipParser()
    return [*Document.parse(str(page), *parsers).examples()]


@contextmanager
def given_for(name: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the variables that the blocks of a page expect to exist. `url`: the front end that replaces the page's.
    `folder`: an empty folder, for a vision model.
    """
    if name not in ("clients", "http"):
        yield {}
        return
    with launch_worker("smollm2", device="cpu", max_model_len=256) as worker:
        if name == "http":
            with front_end(worker.address) as front:
                yield dict(url=front.url)
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(resolve_model("smollm2"))
            with RolloutClient(worker.address) as client:
                given = dict(worker=worker, client=client, model=model, WeightPublisher=WeightPublisher)
                yield given | dict(folder=str(with_processor(make_vision_model("qwen3_vl", folder))))


def with_processor(folder: Path) -> Path:
    """Add the settings of an image processor to the folder of a vision model."""
    sizes = dict(patch_size=4, merge_size=2, temporal_patch_size=2, size=dict(shortest_edge=64, longest_edge=4096))
    settings = dict(image_processor_type="Qwen2VLImageProcessorFast", **sizes)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def check_results(name: str, found: dict[str, Any], printed: str) -> None:
    """Check what the text of a page says about the results of its blocks."""
    if name == "README":
        assert "\nTrue\n" in printed
        differences = [
            entry.get("sampling/sampling_logp_difference/max") for entry in found["trainer"].state.log_history
        ]
        assert differences[:3] == [0.0] * 3
        claimed = "largest difference of log-probs: 0.0, ratios: 1.0 to 1.0\n"
        assert (
            printed.count(claimed) == 3
            and f"The program prints `{claimed.strip()}`" in (ROOT / "README.md").read_text()
        )
    if name == "quickstart":
        assert printed.count("the largest |ratio - 1| is 0.0\n") == 3
    if name == "clients":
        assert found["client"].health().weight_version == 8
        assert len(found["scores"]) == 4 and len(found["group"].images) == 1


@pytest.mark.timeout(280)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_runs_or_says_why_not(page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, copy = page.read_text(), tmp_path / page.name
    skips = re.findall(r"<!--- skip: (.*) -->", text)
    assert [skip for skip in skips if not re.fullmatch(r'next "\w.{9,}"', skip)] == []
    with given_for(page.stem, tmp_path / "model") as given:
        copy.write_text(text.replace("http://127.0.0.1:8000", given.get("url", "")))
        examples = blocks(copy)
        fenced = re.findall(r"^ *```(?:python|sh)$", text, re.M)
        assert len(examples) == len(fenced) + len(skips), "a block that is not found is not run"
        found: dict[str, Any] = examples[0].namespace if examples else {}
        found |= given
        for example in examples:
            with suppress(SkipTest):
                example.evaluate()
        check_results(page.stem, found, capsys.readouterr().out)


def test_the_blocks_about_verifiers_are_lines_of_its_program() -> None:
    page, program = ((ROOT / name).read_text() for name in ("docs/verifiers.md", "examples/verifiers_grpo.py"))
    shown = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert len(shown) == 3
    for block in shown:
        assert block in program or indent(block, "    ") in program
