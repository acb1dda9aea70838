"""The way through a chain, as a table: which folders a worker reads, from the version that it serves."""

from __future__ import annotations

import pytest

from trueroll.errors import PushError
from trueroll.weight_sync.deltas.chain import MOST_FOLDERS, Served, find_way
from trueroll.weight_sync.deltas.index import Delta, Index, folder_name, parse_index

IDS = [f"{number:032x}" for number in range(20)]


def full(version: int, push_id: str | None = None) -> Index:
    return Index(version, {}, push_id=push_id)


def delta(version: int, base: int, push_id: str | None = None, base_push_id: str | None = None) -> Index:
    return Index(version, {}, "xxh3-128", Delta(base, "xor", base_push_id), push_id)


SLIME = [delta(version, version - 1) for version in range(1, 4)]
MIXED = [full(4), delta(5, 4), delta(6, 5), full(7), delta(10, 7), delta(12, 10)]
OWN = [full(4, IDS[4]), delta(5, 4, IDS[5], IDS[4]), delta(6, 5, IDS[6], IDS[5])]


def way(folders: list[Index], version: int, served: Served | None) -> list[int]:
    by_version = {index.version: index for index in folders}

    def read(wanted: int) -> Index:
        if wanted not in by_version:
            raise PushError(f"{folder_name(wanted)} is missing")
        return by_version[wanted]

    return [index.version for index in find_way(read, version, served)]


@pytest.mark.parametrize(
    ("folders", "version", "served", "expected"),
    [
        (SLIME, 3, Served(0, None), [1, 2, 3]),
        (SLIME, 3, Served(2, IDS[1]), [3]),
        (MIXED, 12, Served(10, None), [12]),
        (MIXED, 12, Served(8, None), [7, 10, 12]),  # a version between two folders is not part of the chain
        (MIXED, 12, Served(6, None), [7, 10, 12]),  # the full checkpoint comes first
        (MIXED, 12, None, [7, 10, 12]),
        (MIXED, 6, Served(4, None), [5, 6]),
        (MIXED, 6, Served(12, None), [4, 5, 6]),  # back to an older version
        (MIXED, 7, Served(6, None), [7]),
        (OWN, 6, Served(5, IDS[5]), [6]),
        (OWN, 6, Served(5, IDS[9]), [4, 5, 6]),  # another push of the same version
        (OWN, 6, Served(5, None), [4, 5, 6]),
        (OWN, 6, Served(4, IDS[5]), [4, 5, 6]),
    ],
)
def test_the_way_to_a_version(folders: list[Index], version: int, served: Served | None, expected: list[int]) -> None:
    assert way(folders, version, served) == expected


@pytest.mark.parametrize(
    ("folders", "served", "text"),
    [
        (SLIME, None, "weight_v000001 is a delta to version 0, and this worker serves no complete weights, but"),
        (SLIME, Served(7, None), "serves version 7, but weight_v000000 cannot be used: weight_v000000 is missing"),
        (
            SLIME[:1] + SLIME[2:],
            Served(1, None),
            "weight_v000003 is a delta to version 2, .* weight_v000002 is missing",
        ),
        ([], Served(1, None), "weight_v000003 is missing"),
    ],
)
def test_a_gap_is_named(folders: list[Index], served: Served | None, text: str) -> None:
    with pytest.raises(PushError, match=text):
        way(folders, 3, served)


def test_a_way_has_a_limit() -> None:
    folders = [delta(version, version - 1) for version in range(1, MOST_FOLDERS + 2)]
    assert len(way(folders, MOST_FOLDERS, Served(0, None))) == MOST_FOLDERS
    with pytest.raises(PushError, match="1024 deltas lead to version 1025, without a full checkpoint"):
        way(folders, MOST_FOLDERS + 1, Served(0, None))


@pytest.mark.parametrize("index", [full(4, IDS[0]), full(123456789), delta(5, 2), delta(6, 5, IDS[1], IDS[2])])
def test_an_index_is_read_as_it_was_written(index: Index) -> None:
    assert parse_index(index.to_json().encode(), index.version) == index


GOOD = (
    '{"metadata": {"version": "000003", "base_version": "000002", "delta_encoding": "xor", "compression_format": '
    '"zstd", "checksum_format": "xxh3-128"}, "weight_map": {"a": "model-00000-of-00001.safetensors"}}'
)
BAD = {
    "nothing": ("", "Expecting value"),
    "no map": ("[]", "it is not a JSON map"),
    "deep": ("[" * 100_000, "recursion"),
    "no files": ('{"metadata": {}}', "it has no weight_map"),
    "metadata": ('{"metadata": 1, "weight_map": {}}', "its metadata is not a map"),
    "another version": (GOOD.replace("000003", "000004"), "describes version 4, so this version is there twice"),
    "no version": (GOOD.replace('"000003"', '"three"'), "version is 'three', not a version such as"),
    "a number": (GOOD.replace('"000003"', "3"), "version is 3, not a version"),
    "a huge version": (GOOD.replace("000002", "9" * 19), "base_version is '9999999999999999999'"),
    "its own base": (GOOD.replace("000002", "000003"), "version 3 is based on version 3, which is not older"),
    "a cycle": (GOOD.replace("000002", "000005"), "version 3 is based on version 5, which is not older"),
    "encoding": (GOOD.replace('"xor"', '"add"'), r"delta_encoding is 'add', .*supported: xor, overwrite"),
    "encoding list": (GOOD.replace('"xor"', '["xor"]'), r"delta_encoding is \['xor'\]"),
    "compression": (GOOD.replace('"zstd"', '"lz4"'), "compression_format is 'lz4', .*supported: zstd"),
    "checksum": (GOOD.replace('"xxh3-128"', '"md5"'), "checksum_format is 'md5', .*blake3, adler32"),
    "a path": (GOOD.replace("model-0", "../model-0"), "which is not the name of a safetensors file"),
    "another file": (GOOD.replace(".safetensors", ".bin"), "which is not the name of a safetensors file"),
    "an id": (GOOD.replace('"base_version"', '"base_push_id": "x", "base_version"'), "base_push_id is 'x', not 32"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_index_is_refused(name: str) -> None:
    text, found = BAD[name]
    assert parse_index(GOOD.encode(), 3).delta == Delta(2, "xor"), "premise: only the change is wrong"
    with pytest.raises(PushError, match=rf"weight_v000003/model.safetensors.index.json is not usable: .*{found}"):
        parse_index(text.encode(), 3)
