"""The example with long contexts, on short contexts."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "benchmarks" / "long_context.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    sys.path.insert(0, str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("long_context", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["long_context"] = module  # its dataclasses look up their annotations here
    spec.loader.exec_module(module)
    sys.path.remove(str(SCRIPT.parent))
    return module


def test_the_answers_follow_from_the_context(script: ModuleType) -> None:
    needle, hops = script.generate(4000, 2, seed=3)
    assert needle["context"] == hops["context"] and 3900 < len(needle["context"]) < 4100
    for question, links in ((needle, 0), (hops, script.HOPS - 1)):
        name = question["question"].removeprefix("Where does ").removesuffix(" live?")
        for _ in range(links):
            [rest] = question["context"].split(f"{name} lives where ")[1:]
            name = rest.split(" ")[0]
        place = question[f"choice_{question['answer']}"]
        assert f"{name} lives in {place}. " in question["context"]
        assert len({question[f"choice_{letter}"] for letter in script.LETTERS}) == 4


def test_hits_have_the_bits_of_misses(script: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    common = dict(model=None, questions=2, contexts=1, max_new=3, chars=1.0, threads=1)
    script.main(**common, tokens=1000, write=file, read_from=None)
    first = capsys.readouterr().out
    assert first.count("1 of 1") == 2 and "9" in first.split("hit rate")[1]
    script.main(**common, tokens=1000, write=None, read_from=file)
    assert capsys.readouterr().out.count("1 of 1") == 2
    several = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text(json.dumps(several))  # as LongBench v2 is published
    assert script.read(file) == several
    del several[1]["choice_C"]
    file.write_text(json.dumps(several))
    with pytest.raises(script.typer.BadParameter, match="question 1 lacks the field choice_C"):
        script.read(file)
