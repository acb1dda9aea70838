"""Named adapters of one worker: several trainers push to it, and each recomputes the bits of its own adapter."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import ATTENTION, adapt, change
from serving import wait_until

from trueroll.errors import ConfigError, IllegalStateError, InvalidRequestError, PushError, StaleWeightsError
from trueroll.kernels.training import align, token_log_probs
from trueroll.rollout import RolloutClient, SamplingParams, WeightPublisher

from .test_expert_pushes import publishing, serving

PROMPT, PARAMS = list(range(3, 43)), SamplingParams(n=2, max_tokens=6, ignore_eos=True)
SETTINGS: dict[str, Any] = dict(dtype="bfloat16", adapter_bytes=2**26)


@pytest.fixture
def worker(tiny_llama: Path, tmp_path: Path) -> Iterator[str]:
    address = f"ipc://{tmp_path}/worker"
    with serving(tiny_llama, address, **SETTINGS):
        yield address


def sampled(client: RolloutClient, adapter: str | None, seed: int, **demand: Any) -> tuple[torch.Tensor, np.ndarray]:
    """Return the ids and the log-probs of a group."""
    [group] = client.generate([PROMPT], PARAMS, seed=seed, adapter=adapter, **demand)
    ids = torch.tensor([PROMPT + sample.token_ids for sample in group.samples])
    return ids, np.stack([sample.logprobs for sample in group.samples if sample.logprobs is not None])


def recomputed(model: Any, ids: torch.Tensor) -> np.ndarray:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return token_log_probs(model, ids)[:, len(PROMPT) :].numpy()


@pytest.mark.parametrize("transport", ["shared", "disk", "relay"])
def test_each_trainer_recomputes_the_bits_of_its_adapter(
    worker: str, tiny_llama: Path, transport: Any, tmp_path: Path
) -> None:
    models = {name: adapt(tiny_llama, seed=seed) for seed, name in enumerate("abc")}
    for model in models.values():
        align(model)
    folder = dict(folder=tmp_path / "pushes") if transport == "disk" else {}
    with publishing(worker, transport, **folder) as to, RolloutClient(worker) as client:
        _, base = sampled(client, None, seed=1)
        for version in range(1, 4):
            for seed, (name, model) in enumerate(models.items()):
                change(model, 10 * version + seed)
                to.push(model, version, adapters=True, adapter=name)
            seen = [base]
            for name, model in models.items():
                ids, found = sampled(client, name, seed=version, min_weight_version=version)
                assert recomputed(model, ids).tobytes() == found.tobytes()
                [score, _] = client.score(ids.tolist(), start=len(PROMPT), adapter=name)
                assert score.logprobs.tobytes() == found[0].tobytes()
                seen.append(found)
            assert len({each.tobytes() for each in seen}) == 4
            assert sampled(client, None, seed=1)[1].tobytes() == base.tobytes()
        assert client.health().adapters == dict.fromkeys("abc", 3) and client.health().weight_version == 0


def test_a_push_takes_over_running_requests_of_its_adapter(worker: str, tiny_llama: Path) -> None:
    model = adapt(tiny_llama)
    long = SamplingParams(max_tokens=200, ignore_eos=True)
    with publishing(worker, "shared") as to, RolloutClient(worker) as client:
        to.push(model, 1, adapters=True, adapter="a")
        found: dict[str | None, Any] = {}

        def generate(adapter: str | None) -> None:
            [found[adapter]] = client.generate([PROMPT], long, seed=1, adapter=adapter)

        threads = [threading.Thread(target=generate, args=(adapter,)) for adapter in ("a", None)]
        for thread in threads:
            thread.start()
        wait_until(lambda: client.stats().engine["computed_tokens"] > 2 * len(PROMPT) + 20)
        client.pause()
        change(model, 9)
        to.push(model, 2, adapters=True, adapter="a")
        client.resume()
        for thread in threads:
            thread.join()
    [own], [other] = found["a"].samples, found[None].samples
    assert [span.version for span in own.weight_versions] == [1, 2]
    assert [span.version for span in other.weight_versions] == [0]


def test_requests_can_wait_for_a_version_of_their_adapter(worker: str, tiny_llama: Path) -> None:
    model = adapt(tiny_llama)
    with publishing(worker, "shared") as to, RolloutClient(worker) as client:
        to.push(model, 5, adapters=True, adapter="a")
        with pytest.raises(StaleWeightsError, match=r"needs version 6 or later of adapter 'a', .* serves version 5"):
            client.generate([PROMPT], PARAMS, adapter="a", min_weight_version=6)
        with pytest.raises(StaleWeightsError, match=r"needs version 1 or later of adapter 'b', .* serves no version"):
            client.generate([PROMPT], PARAMS, adapter="b", min_weight_version=1)
        waits = client.asynchronous.generate([PROMPT], PARAMS, adapter="b", min_weight_version=2, wait_for_weights=True)
        thread = threading.Thread(target=lambda: to.push(model, 2, adapters=True, adapter="b"))
        thread.start()
        [group] = client.wait(waits)
        thread.join()
        assert [span.version for span in group.samples[0].weight_versions] == [2]


def test_refusals_change_nothing(worker: str, tiny_llama: Path) -> None:
    model = adapt(tiny_llama)
    with publishing(worker, "shared") as to, RolloutClient(worker) as client:
        to.push(model, 4, adapters=True, adapter="a")
        expected = sampled(client, "a", seed=1)[1].tobytes()
        with pytest.raises(PushError, match="version 4 is not newer than the served version 4"):
            to.push(model, 4, adapters=True, adapter="a")
        with pytest.raises(PushError, match="named adapters belong to the present weights .*'a'.*; unload"):
            to.push(model, 9)
        with pytest.raises(ConfigError, match="adapter: must be None unless adapters is set"):
            to.push(model, 9, adapter="b")
        with pytest.raises(IllegalStateError, match="sleep: named adapters belong to the present weights"):
            client.sleep(2)
        with pytest.raises(InvalidRequestError, match="adapter 'b' is not loaded"):
            client.generate([PROMPT], PARAMS, adapter="b")
        with pytest.raises(InvalidRequestError, match="unload_adapter: adapter 'b' is not loaded"):
            client.unload_adapter("b")
        whole = adapt(tiny_llama, target_modules=ATTENTION, modules_to_save=["lm_head"])
        with pytest.raises(PushError, match=r"named adapter has matrices A and B only, .*lm_head"):
            to.push(whole, 1, adapters=True, adapter="b")
        with publishing(worker, "shared", in_flight="keep") as keeping:
            with pytest.raises(PushError, match="keep is not possible with a named adapter"):
                keeping.push(model, 5, adapters=True, adapter="a")
        assert client.health().adapters == {"a": 4}
        assert sampled(client, "a", seed=1)[1].tobytes() == expected
        client.unload_adapter("a")
        assert client.health().adapters == {}
        to.push(model, 9)
        assert client.health().weight_version == 9
        assert sampled(client, None, seed=1)[1].tobytes() == expected, "merged without a name, the same bits"


def test_a_worker_without_memory_for_adapters_refuses_them(tiny_llama: Path, tmp_path: Path) -> None:
    address, model = f"ipc://{tmp_path}/worker", adapt(tiny_llama)
    with serving(tiny_llama, address, dtype="bfloat16"), publishing(address, "shared") as to:
        with pytest.raises(PushError, match="no memory for named adapters; start it with adapter_bytes"):
            to.push(model, 1, adapters=True, adapter="a")
    with serving(tiny_llama, address, dtype="bfloat16", adapter_bytes=1000), publishing(address, "shared") as to:
        with pytest.raises(PushError, match=r"adapter 'a' needs \d+ bytes \(limit 1000, adapter_bytes\)"):
            to.push(model, 1, adapters=True, adapter="a")
        assert isinstance(to, WeightPublisher)


def test_a_folder_of_peft_is_served_with_the_bits_of_a_push(worker: str, tiny_llama: Path, tmp_path: Path) -> None:
    model = adapt(tiny_llama)
    folder = tmp_path / "saved"
    model.save_pretrained(folder)
    with publishing(worker, "shared") as to, RolloutClient(worker) as client:
        to.push(model, 1, adapters=True, adapter="pushed")
        assert client.load_adapter("read", folder).weight_version == 0
        assert client.health().adapters == {"pushed": 1, "read": 1}
        expected = sampled(client, "pushed", seed=1)[1].tobytes()
        assert sampled(client, "read", seed=1)[1].tobytes() == expected != sampled(client, None, seed=1)[1].tobytes()
        change(model, 5)
        model.save_pretrained(folder)
        client.load_adapter("read", folder)
        assert client.health().adapters == {"pushed": 1, "read": 2}
        assert sampled(client, "read", seed=1)[1].tobytes() != expected
        with pytest.raises(PushError, match="version 2 is not newer"):
            client.load_adapter("read", folder, 2)
        with pytest.raises(PushError, match="cannot read a push from"):
            client.load_adapter("other", tmp_path)
        assert client.health().adapters == {"pushed": 1, "read": 2}
