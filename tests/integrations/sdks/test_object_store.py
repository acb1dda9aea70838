"""Chains of deltas in an object store: a worker reads them from a server with the protocol of S3, through s3fs."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs
import torch
from moto.server import ThreadedMotoServer
from safetensors.torch import load_file

from tiny import make_tiny_model
from trueroll.errors import PushError
from trueroll.rollout import RolloutClient, WeightPublisher, launch_worker
from trueroll.weight_sync.payload.tensors import tensor_checksum

URL = "s3://runs/grpo"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[s3fs.S3FileSystem]:
    """An empty bucket on a local server. The environment, also that of workers, names the server."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    settings = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in (settings | {"AWS_ENDPOINT_URL": f"http://{host}:{port}"}).items():
        monkeypatch.setenv(name, value)
    files = s3fs.S3FileSystem(skip_instance_cache=True)
    files.mkdir("runs")
    yield files
    server.stop()


def test_a_late_worker_reads_a_chain_from_an_object_store(
    bucket: s3fs.S3FileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first worker gets every push. The second is 20 versions behind, and then has the same weights to the bit."""
    model = make_tiny_model("qwen2", tmp_path / "model", dtype="bfloat16")
    weights: dict[str, Any] = load_file(model / "model.safetensors")
    settings: dict[str, Any] = dict(num_blocks=64, device="cpu", num_threads=1)
    chain = tmp_path / "chain"
    with (
        launch_worker(str(model), **settings) as first,
        launch_worker(str(model), push_urls=[URL], **settings) as late,
        WeightPublisher("delta", folder=chain, full_every=50) as publisher,
        RolloutClient(first.address) as current,
        RolloutClient(late.address) as behind,
    ):
        publisher.connect([first.address])
        for version in range(1, 22):
            weights = {name: tensor.clone() for name, tensor in weights.items()}
            for tensor in weights.values():
                tensor.view(-1)[version % tensor.numel()] += torch.tensor(1.0, dtype=tensor.dtype)
            publisher.push(weights, version)
        bucket.put(str(chain), "runs/grpo", recursive=True)
        publisher.connect([late.address])
        publisher.pull(URL, 1).commit()
        assert behind.health().weight_version == 1
        with publisher.pull(URL, 21) as staged:
            assert behind.health().weight_version == 1, "premise: the worker serves its old weights"
            staged.commit()
        assert behind.health().weight_version == 21
        expected = {name: tensor_checksum(tensor, tensor.dtype) for name, tensor in weights.items()}
        for client in (current, behind):
            found = client.weight_checksums().checksums
            assert found == {name: expected[name] for name in found} and len(found) > 10
        bucket.rm("runs/grpo/weight_v000021", recursive=True)
        with pytest.raises(PushError, match="cannot read s3://runs/grpo/weight_v000021/model.safetensors"):
            publisher.pull(URL, 21, allow_older=True)
        publisher.connect([first.address])
        with pytest.raises(PushError, match="may not read 's3://runs/grpo'; .*--push-urls"):
            publisher.pull(URL, 20, allow_older=True)
