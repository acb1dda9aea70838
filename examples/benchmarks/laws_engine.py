"""The experiments of `laws_report.py` that need no worker. These experiments measure an engine in this process: the
host's work in a step, the ops, and the prefix cache.

Costs are CPU seconds of this process, or bytes. In experiments that measure only the host, stand-ins replace the model
and the sampler and take no time.
"""

from __future__ import annotations

import gc
import json
import random
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from trueroll.engine.cache.prefix_cache import PrefixCache
from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.models.decoder import ModelOutput
from trueroll.engine.request import ContentSpan, GenerateRequest, SampleOutput, SamplingParams
from trueroll.engine.running.loading import load_dummy
from trueroll.engine.running.model_runner import LaneState
from trueroll.rollout.garbage import bound_pauses

Costs = dict[str, float]
BLOCK_SIZE, ROWS, STEPS = 16, 64, 24
RUN = 32
"""Number of blocks in each cached prefix."""
VOCAB = 8192
MODEL: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    vocab_size=VOCAB,
    max_position_embeddings=2**18,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tie_word_embeddings=True,
    torch_dtype="float32",
    eos_token_id=0,
)


def write_model(folder: Path, **changes: Any) -> Path:
    """Write a configuration, and a tokenizer with a token for each byte and words for the other ids."""
    folder.mkdir(parents=True, exist_ok=True)
    config = MODEL | changes
    (folder / "config.json").write_text(json.dumps(config))
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = (words + [f"w{i}" for i in range(len(words), config["vocab_size"])])[: config["vocab_size"]]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def cpu_seconds(call: Callable[[], object]) -> float:
    """Return the CPU time of a call in this process."""
    start = time.process_time()
    call()
    return time.process_time() - start


@contextmanager
def new_engine(max_num_seqs: int, max_model_len: int, num_blocks: int, **settings: Any) -> Iterator[Engine]:
    """An engine of the tiny model with random weights on one thread."""
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            model=str(write_model(Path(folder))),
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            num_threads=1,
            **settings,
        )
        engine = Engine(config, load_dummy(config))
        yield engine
        engine.close()


@contextmanager
def host(max_num_seqs: int, max_model_len: int, num_blocks: int, **settings: Any) -> Iterator[Engine]:
    """An engine with a model and a sampler that take no time. Each token is random, and never ends a sample."""
    settings = dict(backend="reference", max_num_batched_tokens=max(8192, max_num_seqs)) | settings
    with new_engine(max_num_seqs, max_model_len, num_blocks, **settings) as engine:
        executor: Any = engine._executor
        executor._lanes = LaneState(max_num_seqs, torch.device("cpu"))
        hidden, rng = torch.zeros(1, MODEL["hidden_size"]), np.random.default_rng(0)
        executor._runner.forward = lambda token_ids, *_: ModelOutput(hidden.expand(len(token_ids), -1), {})

        def draw(_: object, wanted: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            count = len(wanted.rows)
            token_ids = torch.from_numpy(rng.integers(1, VOCAB, count))
            return token_ids, torch.zeros(count), torch.ones(count, dtype=torch.bool)

        executor._sampler.next_tokens = draw
        yield engine


def prompt(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, VOCAB, size, np.int32)


def request(name: object, tokens: np.ndarray, spans: tuple[ContentSpan, ...] = (), **params: Any) -> GenerateRequest:
    fields = dict(seed=0, ignore_eos=True) | params
    return GenerateRequest(str(name), tokens, SamplingParams(**fields), spans=spans)


def finish(engine: Engine) -> list[SampleOutput]:
    """Step until all requests have finished."""
    found = list[Any]()
    while engine.has_unfinished:
        found += engine.step()
    return found


def first_token(engine: Engine, asked: GenerateRequest) -> None:
    """Add a request, and step until its first token is drawn. The request must ask for more than one token."""
    engine.add(asked)
    engine.stream(asked.id)
    while not engine.take_deltas():
        engine.step()


def begin(engine: Engine, requests: Sequence[GenerateRequest]) -> None:
    """Add requests, and step until each request has a token. Each request must ask for more tokens than are drawn
    meanwhile.
    """
    missing = {each.id for each in requests}
    for each in requests:
        engine.add(each)
        engine.stream(each.id)
    while missing:
        assert not engine.step()
        missing -= {delta.request_id for delta in engine.take_deltas()}


def context(size: int) -> Costs:
    """Measure a prompt of `size` tokens: computing it, finding it in the cache, and the decode steps after it.

    Raise RuntimeError unless the samples after a cache hit have the same bits as the sample after the miss.
    """
    with new_engine(4, size + 64, size // BLOCK_SIZE + 16, backend="auto") as engine:
        tokens = prompt(size, size)
        miss = cpu_seconds(lambda: first_token(engine, request("miss", tokens, max_tokens=STEPS + 1)))
        steps = [cpu_seconds(engine.step) for _ in range(STEPS - 1)]
        [computed] = finish(engine)
        hits = []
        for i in range(3):
            hits.append(cpu_seconds(lambda i=i: first_token(engine, request(i, tokens, max_tokens=STEPS + 1))))
            [found] = finish(engine)
            _check_hit(computed, found, size)
    return {"context: miss": miss, "context: hit": median(hits), "context: decode step": median(steps)}


def _check_hit(computed: SampleOutput, found: SampleOutput, size: int) -> None:
    assert computed.logprobs is not None and found.logprobs is not None
    if computed.num_cached_tokens or found.num_cached_tokens < size - BLOCK_SIZE:
        raise RuntimeError(f"premise: a hit of {found.num_cached_tokens} tokens, of {size}")
    if computed.token_ids != found.token_ids or computed.logprobs.tobytes() != found.logprobs.tobytes():
        raise RuntimeError(f"a hit of {found.num_cached_tokens} tokens has other bits than the miss")


def long_among_short(size: int) -> Costs:
    """Measure the host's time for a step that decodes one context of `size` tokens and 63 contexts of 32 tokens."""
    with host(ROWS, size + 128, size // BLOCK_SIZE + 16 * ROWS) as engine:
        short = [request(i, prompt(i, 32), max_tokens=STEPS + 64) for i in range(1, ROWS)]
        begin(engine, [request("long", prompt(0, size), max_tokens=STEPS + 64), *short])
        return {"context: host of a step, 63 others": median(cpu_seconds(engine.step) for _ in range(STEPS))}


def waiting(size: int) -> Costs:
    """Measure the costs of `size` waiting requests, while 64 other requests decode."""
    requests = [request(i, prompt(i, 2 * BLOCK_SIZE), max_tokens=2) for i in range(size)]
    with host(ROWS, 256, ROWS * 16) as engine:
        begin(engine, [request(f"runs {i}", prompt(size + i, BLOCK_SIZE), max_tokens=128) for i in range(ROWS)])
        add = cpu_seconds(lambda: [engine.add(each) for each in requests])
        step = median(cpu_seconds(engine.step) for _ in range(STEPS))
        ids = [each.id for each in requests]
        random.Random(0).shuffle(ids)
        abort = cpu_seconds(lambda: [engine.abort(each) for each in ids])
        for each in requests:
            engine.add(each)
        while engine.stats().num_waiting == size:
            engine.step()
        serve = cpu_seconds(lambda: finish(engine))
    found = {"add": add, "a step meanwhile": step, "abort": abort, "serve": serve}
    return {f"waiting: {name}": cost for name, cost in found.items()}


def same_prefix(size: int) -> Costs:
    """Measure the cost of serving `size` requests that arrive at once and share a prefix of 32 blocks."""
    shared = prompt(0, 32 * BLOCK_SIZE)
    with host(ROWS, 1024, 64 * ROWS) as engine:
        for i in range(size):
            engine.add(request(i, np.concatenate((shared, prompt(i + 1, BLOCK_SIZE))), max_tokens=2))
        return {"waiting: serve, one prefix": cpu_seconds(lambda: finish(engine))}


def blocks(size: int) -> Costs:
    """Measure a prefix cache of `size` blocks, in a separate process. Look-ups and evictions are timed for some of the
    blocks, and the times are scaled to all blocks.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_blocks, size).result()


def _blocks(size: int) -> Costs:
    bound_pauses()
    count, rng = size // RUN, np.random.default_rng(0)
    cache = PrefixCache({None: count * RUN}, BLOCK_SIZE)
    before = psutil.Process().memory_info().rss
    fill, kept = 0.0, list[np.ndarray]()
    for start in range(0, count, 1000):
        tokens = rng.integers(0, 2**31 - 1, (min(1000, count - start), RUN * BLOCK_SIZE), np.int32)
        fill += cpu_seconds(lambda tokens=tokens: _publish(cache, tokens))
        kept.append(tokens[:: max(1, count // 4000)].copy())
    held = psutil.Process().memory_info().rss - before
    known = np.concatenate(kept)
    rng.shuffle(known)
    scale = count / len(known)
    found = scale * cpu_seconds(lambda: _find(cache, known))
    fresh = rng.integers(0, 2**31 - 1, known.shape, np.int32)
    evicted = scale * cpu_seconds(lambda: _publish(cache, fresh))
    assert cache.tables.pools[0].evictions == fresh.size // BLOCK_SIZE
    gc.callbacks.clear()
    gc.unfreeze()  # libraries print a warning about objects that are not freed at exit
    costs = {"fill": fill, "look up": found, "evict and fill": evicted, "memory": float(held)}
    return {f"blocks: {name}": cost for name, cost in costs.items()}


def _publish(cache: PrefixCache, prefixes: np.ndarray) -> None:
    for row in prefixes:
        table = cache.tables.allocate((), RUN)
        cache.publish(cache.identity.new_chain(None), array("i", row.tobytes()), table, RUN * BLOCK_SIZE)
        cache.tables.release(table)


def _find(cache: PrefixCache, prefixes: np.ndarray) -> None:
    for row in prefixes:
        tokens = array("i", row.tobytes())
        hits = cache.lookup(cache.identity.new_chain(None), tokens, len(tokens))
        assert len(hits) == RUN
        cache.tables.release(cache.tables.allocate(hits, 0))


def group(size: int) -> Costs:
    """Measure a group of `size` samples of 16 tokens each, after a prompt of 256 tokens."""
    tokens = 16 * BLOCK_SIZE
    with host(1024, 512, 1024 * 3 + 64) as engine:
        engine.add(request("served", prompt(0, tokens), n=size, max_tokens=16))
        serve = cpu_seconds(lambda: finish(engine))
        begin(engine, [request("aborted", prompt(1, tokens), n=size, max_tokens=16)])
        abort = cpu_seconds(lambda: engine.abort("aborted"))
        engine.add(request("never begun", prompt(2, tokens), n=size, max_tokens=16))
        early = cpu_seconds(lambda: engine.abort("never begun"))
    return {"group: serve": serve, "group: abort": abort, "group: abort before it starts": early}


def of_params(name: str, params: Callable[[int], dict[str, Any]]) -> Callable[[int], Costs]:
    """Return an experiment that draws 16 samples of 32 tokens. `params`: returns the sampling parameters for a size."""

    def experiment(size: int) -> Costs:
        fields = params(size)
        with new_engine(16, 256, 512, backend="auto") as engine:
            for i in range(16):
                engine.add(request(i, prompt(i, 64), max_tokens=32, **fields))
            return {name: cpu_seconds(lambda: finish(engine))}

    return experiment


def stop_strings(size: int) -> dict[str, Any]:
    return dict(stop=tuple(f"a stop string {i:2}" for i in range(size)))


def stop_tokens(size: int) -> dict[str, Any]:
    """Return parameters with `size` stop tokens, none of which can be drawn, because only other tokens are allowed."""
    return dict(stop_token_ids=tuple(range(4000, 4000 + size)), allowed_token_ids=tuple(range(4000)))


def spans(size: int) -> Costs:
    """Measure the host's time for a prompt of 16,384 tokens that contains `size` content spans, as a cache miss and as
    a hit.
    """
    length = 2**14
    step = length // size
    placed = tuple(ContentSpan(i * step, i * step + 8, i.to_bytes(32, "little")) for i in range(size))
    with host(4, length + 64, length // BLOCK_SIZE + 16) as engine:

        def ask(name: str) -> float:
            asked = request(name, prompt(0, length), spans=placed, max_tokens=1)
            return cpu_seconds(lambda: (engine.add(asked), finish(engine)))

        miss = ask("miss")
        return {"spans: miss": miss, "spans: hit": median(ask(f"hit {i}") for i in range(3))}


def adapters(size: int) -> Costs:
    """Measure a step of 64 decoding sequences, each with one of `size` named adapters."""
    with new_engine(ROWS, 256, ROWS * 16, backend="auto", adapter_bytes=2**28) as engine:
        for i in range(size):
            _load_adapter(engine, str(i))
        asked = [request(i, prompt(i, 32), max_tokens=STEPS + 32) for i in range(ROWS)]
        begin(engine, [replace(each, adapter=str(i % size)) for i, each in enumerate(asked)])
        return {"adapters: a step of 64": median(cpu_seconds(engine.step) for _ in range(STEPS // 2))}


def _load_adapter(engine: Engine, name: str) -> None:
    rank, generator = 4, torch.Generator().manual_seed(int(name))
    chosen = {own: shape for own, shape in engine.weights.shapes.items() if "_proj" in own and len(shape) == 2}
    assert engine.adapters is not None and chosen
    staging = engine.adapters.new_staging(name)
    staging.adapt({own: (f"{own}.a", f"{own}.b", rank, 0.5) for own in chosen}, alone=True)
    for own, (rows, columns) in chosen.items():
        for part, shape in ((f"{own}.a", (rank, columns)), (f"{own}.b", (rows, rank))):
            staging.rows(part, 0, shape[0]).copy_(torch.empty(*shape).normal_(generator=generator) * 0.2)
    assert all(staging.merge(own) for own in staging.to_merge())
    engine.commit_adapter(staging, name, 1, "recompute")
