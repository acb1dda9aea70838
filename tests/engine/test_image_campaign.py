"""Random prompts with images, served in random circumstances, give the bits of each request served alone. An ordinary
run plays one round. `make images` sets a number of tokens for each model.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vision_models import GRIDS, MODELS

from trueroll.engine.engine import Engine
from trueroll.engine.media import ImageInput
from trueroll.engine.request import GenerateRequest, Output, SampleOutput, SamplingParams, ScoreOutput, ScoreRequest
from trueroll.engine.running.loading import LoadedModel
from trueroll.kernels.specs import TowerSpec
from trueroll.rollout.tools.verify import EVENTS

from .drive import tokens
from .test_images import engine_of, image_of, loaded_model, prompt_of, tower_of

LEAST_TOKENS = int(os.environ.get("TRUEROLL_IMAGE_TOKENS", "0"))
NUM_REQUESTS = 24 if LEAST_TOKENS else 10
MOST_TOKENS = 100 if LEAST_TOKENS else 16
NUM_CACHED = 480 if LEAST_TOKENS else 240
"""The tokens for which the KV cache has room: enough for one sample."""
Request = GenerateRequest | ScoreRequest
Bits = dict[tuple[str, int], tuple[bytes, ...]]


def random_requests(random: np.random.Generator, tower: TowerSpec, pool: Sequence[ImageInput]) -> list[Request]:
    """Return requests with prompts that share texts and images."""
    found = list[Request]()
    for i in range(NUM_REQUESTS):
        images = [pool[j] for j in random.integers(0, len(pool), random.choice([0, 1, 1, 2, 3]))]
        prompt, placed = prompt_of(tower, images, seed=int(random.integers(0, 2)), lead=int(random.choice([5, 30, 30])))
        if random.random() < 0.1:
            found.append(ScoreRequest(f"{i}", prompt, images=placed))
            continue
        params: dict[str, Any] = dict(n=int(random.integers(1, 9)), max_tokens=int(random.integers(1, MOST_TOKENS)))
        params |= dict(seed=i, ignore_eos=True, temperature=float(random.choice([0.0, 0.7, 1.0])))
        if random.random() < 0.3:
            params |= dict(top_k=int(random.integers(1, 50)), top_p=0.95)
        found.append(GenerateRequest(f"{i}", prompt, SamplingParams(**params), images=placed))
    return found


def next_turns(requests: Sequence[Request], expected: Bits) -> list[Request]:
    """Return further questions after the first samples of some requests, about the same images."""
    found = list[Request]()
    for request in requests[::4]:
        if isinstance(request, GenerateRequest):
            said = np.frombuffer(expected[request.id, 0][0], np.int32)
            prompt = np.concatenate([request.prompt_token_ids, said, tokens(7, seed=3)])
            params = request.params.model_copy(update={"n": 1})
            found.append(replace(request, id=f"{request.id} again", prompt_token_ids=prompt, params=params))
    return found


def bits_of(outputs: Sequence[Output]) -> Bits:
    found = Bits()
    for output in outputs:
        assert output.logprobs is not None
        logprobs = np.asarray(output.logprobs, np.float32).tobytes()
        if isinstance(output, ScoreOutput):
            found[output.request_id, -1] = (logprobs,)
        else:
            assert isinstance(output, SampleOutput) and output.finish_reason == "length"
            found[output.request_id, output.index] = np.array(output.token_ids, np.int32).tobytes(), logprobs
    return found


def alone(loaded: LoadedModel, requests: Sequence[Request]) -> Bits:
    """Return the results of each request in an engine that has no other request and no cache."""
    engine, outputs = engine_of(loaded, enable_prefix_caching=False, num_blocks=2000, max_model_len=800), list[Output]()
    for request in requests:
        engine.add(request)
        while engine.has_unfinished:
            outputs += engine.step()
    return bits_of(outputs)


def random_engine(random: np.random.Generator, loaded: LoadedModel, pool: Sequence[ImageInput]) -> Engine:
    """Return an engine with little memory. All requests can be served, but few of them at a time."""
    tower = loaded.model.spec.served_tower
    assert tower is not None
    most = max(tower.num_tokens(image.rows, image.columns) for image in pool)
    block_size = int(random.choice([8, 16]))
    num_seqs = int(random.choice([4, 16]))
    return engine_of(
        loaded,
        block_size=block_size,
        num_blocks=NUM_CACHED // block_size,
        max_model_len=800,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_seqs + int(random.choice([most, 3 * most, 300])),
        image_cache_bytes=int(random.choice([1, 2, 10])) * most * tower.row_size * loaded.model.dtype.itemsize,
        state_interval=int(random.choice([block_size, 4 * block_size])),
        speculative=str(random.choice(["off", "ngram"])),
        host_cache_bytes=int(random.choice([0, 2**24])),
    )


def together(engine: Engine, random: np.random.Generator, requests: Sequence[Request]) -> Bits:
    """Return the results of requests that arrive at random times, with random events."""
    left, outputs = [requests[i] for i in random.permutation(len(requests))], list[Output]()
    while left or engine.has_unfinished:
        while left and random.random() < 0.4:
            engine.add(left.pop())
        outputs += engine.step()
        if random.random() < 0.01:
            outputs += EVENTS[str(random.choice(["interruption", "push", "sleep"]))](engine)
    engine.check_integrity()
    return bits_of(outputs)


@pytest.mark.parametrize("family", MODELS if LEAST_TOKENS else ["qwen3_5", "gemma3"])
def test_no_bit_differs_in_random_circumstances(family: str, tmp_path: Path) -> None:
    counts, rounds = Counter[str](), 0
    while counts["tokens"] < LEAST_TOKENS or rounds < 2:
        random = np.random.default_rng(rounds)
        loaded = loaded_model(family, ("float32", "bfloat16")[rounds % 2], tmp_path / family)
        tower, grids = tower_of(loaded.folder), GRIDS[family]
        pool = [image_of(tower, grids[i % len(grids)], seed=int(random.integers(1000))) for i in range(4)]
        requests = random_requests(random, tower, pool)
        expected = alone(loaded, requests)
        again = next_turns(requests, expected)
        expected |= alone(loaded, again)
        engine = random_engine(random, loaded, pool)
        assert together(engine, random, [*requests, *again]) == expected, f"round {rounds}"
        stats = engine.stats()
        counts += Counter(
            tokens=sum(len(bits[0]) // 4 for (_, index), bits in expected.items() if index >= 0),
            hits=stats.prefix_hits,
            restored=stats.host_restored,
            preemptions=stats.preemptions,
            recomputed=stats.recomputed,
            encoded=stats.images_encoded,
            evictions=stats.image_evictions,
        )
        rounds += 1
    print(f"{family}: {rounds} rounds, 0 bits differ, {dict(counts)}")
    premises = ["hits", "restored", "recomputed", "evictions", *(["preemptions"] if LEAST_TOKENS else [])]
    assert all(counts[name] > 0 for name in premises), f"premise: {counts}"
