"""Pushes to a worker that serves a module for multi-token prediction (MTP), which a trainer may push or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine.checkpoints import read_tensors
from engine.drafting.mtp_models import make_mtp_model

from trueroll.errors import PushError
from trueroll.rollout import RolloutClient, WeightPublisher, launch_worker


def test_pushes_of_a_trainer_with_and_without_the_module(tmp_path: Path) -> None:
    """Pushes go over the wire, whole and sparse. A tensor that the trainer never sent before is sent whole."""
    model = make_mtp_model("qwen3_5", tmp_path / "model", dtype="bfloat16")
    tensors = read_tensors(model)
    without = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    settings: dict[str, Any] = dict(device="cpu", num_blocks=128, num_threads=1, speculative="mtp")
    with launch_worker(str(model), **settings) as worker, RolloutClient(worker.address) as client:

        def note() -> str:
            engine = client.health().engine
            assert engine is not None
            return engine["optional_note"]

        def served(name: str) -> int:
            return client.weight_checksums().checksums[name]

        before = served("mtp.fc.weight")
        with WeightPublisher("shared", sparse=True) as publisher:
            publisher.connect([worker.address])
            for version, pushed in enumerate((without, without, tensors, without), 1):
                publisher.push(dict(pushed), version)
                assert bool(note()) == (pushed is without) and served("mtp.fc.weight") == before
            moved = tensors | {"mtp.fc.weight": tensors["mtp.fc.weight"] + 1}
            publisher.push(moved, 5)
            assert not note() and served("mtp.fc.weight") != before
            with pytest.raises(PushError, match="parameters are missing: mtp.norm.weight"):
                publisher.push({name: tensor for name, tensor in moved.items() if name != "mtp.norm.weight"}, 6)


def test_a_borrower_keeps_its_module(tmp_path: Path) -> None:
    """Two workers run on one machine. The second worker maps the memory of the first, which does not contain the
    module.
    """
    model = make_mtp_model("qwen3_5", tmp_path / "model", dtype="bfloat16")
    tensors = read_tensors(model)
    without = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    settings: dict[str, Any] = dict(device="cpu", num_blocks=128, num_threads=1, speculative="mtp")
    with launch_worker(str(model), **settings) as one, launch_worker(str(model), **settings) as other:
        with RolloutClient(one.address) as first, RolloutClient(other.address) as second:
            before = second.weight_checksums().checksums
            with WeightPublisher("shared") as publisher:
                publisher.connect([one.address, other.address])
                for version, pushed in enumerate((without, tensors), 1):
                    publisher.push(dict(pushed), version)
                    for client in (first, second):
                        health = client.health().engine
                        assert health is not None and bool(health["optional_note"]) == (pushed is without)
                        assert client.weight_checksums().checksums == before
