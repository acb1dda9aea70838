"""Every promise of docs/security.md names its tests, and these tests exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "security.md").read_text()
WITHOUT_PROMISES = {"What is not promised", "Reporting a problem"}
LIMITS = ("What users can still learn and do", "A client that may connect can still")
"""Beginnings of paragraphs that are not promises, but limits of a promise."""


def blocks() -> Iterator[str]:
    """Yield the paragraphs and the list items of all sections with promises."""
    for section in PAGE.split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        if title not in WITHOUT_PROMISES:
            for paragraph in re.split(r"\n\n|\n(?=- )", re.sub(r"^\[\d+\]: .*$", "", text, flags=re.M).strip()):
                yield paragraph.strip()


def is_promise(block: str) -> bool:
    """Return whether a block is a promise that needs tests. The tests of a table are named in the paragraph before or
    after the table. The tests of a list are named in the list's items.
    """
    return bool(block) and not block.startswith(("|", *LIMITS)) and not block.endswith(":")


def definitions() -> dict[str, tuple[Path, str]]:
    found = re.findall(r'^\[(\d+)\]: \.\./(\S+) "(\w+)"$', PAGE, re.M)
    assert len({number for number, _, _ in found}) == len(found)
    return {number: (ROOT / path, test) for number, path, test in found}


def test_every_promise_names_its_tests() -> None:
    promises = list(filter(is_promise, blocks()))
    assert len(promises) > 30
    assert [block for block in promises if not re.search(r"Tests?:\s+(\[\d+\](,\s+)?)+\.$", block)] == []


def test_every_named_test_exists() -> None:
    tests = definitions()
    named = {number for block in blocks() for number in re.findall(r"\[(\d+)\]", block)}
    assert named == tests.keys()
    missing = [
        f"{path}::{test}"
        for path, test in tests.values()
        if not path.is_file() or not re.search(rf"^(async )?def {test}\(", path.read_text(), re.M)
    ]
    assert missing == []


@pytest.mark.parametrize(
    "page", sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")]), ids=lambda page: page.stem
)
def test_every_code_block_begins_and_ends_on_lines_of_their_own(page: Path) -> None:
    fences = [line for line in page.read_text().splitlines() if "```" in line]
    assert all(re.fullmatch(r" *```\w*", line) for line in fences) and len(fences) % 2 == 0
