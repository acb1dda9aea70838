"""Worker processes with the real engine on tiny models. The examples run as a reader would run them."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from pushing import ask
from refusals import about
from serving import RawClient, WorkerOnThread

from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.outputs.stop_strings import load_vocabulary
from trueroll.engine.request import COLUMNS, LogprobsMode, SampleDelta, SampleOutput
from trueroll.engine.running.loading import load_model
from trueroll.errors import InvalidRequestError, ModelError, TruerollError, WorkerFailedError
from trueroll.kernels.contract import Backend
from trueroll.kernels.cpu.library import load_library
from trueroll.kernels.layer import run_layers
from trueroll.rollout import Grammar, RolloutClient, SamplingParams, WorkerProcess, launch_worker
from trueroll.rollout.config import WorkerConfig
from trueroll.rollout.worker.process import load_engine

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPTS = [[1, 20, 30, 40] * 6, [1, 20, 30, 40] * 6 + [50], [7]]
PARAMS = SamplingParams(n=3, max_tokens=12, top_p=0.9)


@pytest.fixture(scope="module")
def worker(tiny_llama: Path) -> Iterator[WorkerProcess]:
    with launch_worker(str(tiny_llama), num_blocks=256, num_threads=1) as process:
        yield process
    assert process.exit_code == 0


@pytest.fixture
def client(worker: WorkerProcess) -> Iterator[RolloutClient]:
    with RolloutClient(worker.address) as client:
        yield client


def bits(samples: tuple[SampleOutput, ...]) -> list[tuple[tuple[int, ...], bytes]]:
    assert all(sample.logprobs is not None and len(sample.token_ids) for sample in samples)
    return [(tuple(s.token_ids), s.logprobs.tobytes()) for s in samples if s.logprobs is not None]


def test_the_same_request_gives_the_same_bits_from_a_warm_cache(client: RolloutClient) -> None:
    first = client.generate(PROMPTS, PARAMS, seed=5)
    hits = client.stats().engine["prefix_hits"]
    again = client.generate(PROMPTS, PARAMS, seed=5)
    assert client.stats().engine["prefix_hits"] > hits
    assert [bits(group.samples) for group in first] == [bits(group.samples) for group in again]
    assert len(set(bits(first[0].samples))) == 3


@pytest.mark.parametrize("mode", ["processed", "temperature", "raw"])
def test_score_gives_the_bits_of_generate(client: RolloutClient, mode: LogprobsMode) -> None:
    params = SamplingParams(n=2, max_tokens=10, seed=3, temperature=0.7, top_k=20, logprobs=mode)
    (group,) = client.generate([PROMPTS[0]], params)
    filters = {"processed": {"temperature": 0.7, "top_k": 20}, "temperature": {"temperature": 0.7}, "raw": {}}[mode]
    scores = client.score([[*PROMPTS[0], *sample.token_ids] for sample in group.samples], **filters)
    start = len(PROMPTS[0]) - 1
    assert [score.logprobs[start:].tobytes() for score in scores] == [logprobs for _, logprobs in bits(group.samples)]


@pytest.mark.parametrize("mode", ["processed", "temperature", "raw"])
def test_score_with_the_parameters_of_samples_gives_their_bits(client: RolloutClient, mode: LogprobsMode) -> None:
    """The samples have penalties, a bias, bad words, bans and filters."""
    given: dict[str, Any] = dict(n=2, max_tokens=10, seed=3, temperature=0.7, top_p=0.9, min_p=0.01, logprobs=mode)
    given |= dict(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=-0.5, logit_bias={9: 4.0, 8: -100})
    given |= dict(bad_words_token_ids=[[9, 9], [7]], min_tokens=3, stop_token_ids=[*range(100, 300)])
    params = SamplingParams(**given)
    groups = client.generate(PROMPTS, params.model_copy(update={"seed": None}), seed=3)
    plain = client.generate(PROMPTS, SamplingParams(n=2, max_tokens=10, temperature=0.7), seed=3)
    assert [bits(group.samples) for group in groups] != [bits(group.samples) for group in plain], "premise"
    pairs = [
        (len(prompt), [*prompt, *s.token_ids], s) for prompt, g in zip(PROMPTS, groups, strict=True) for s in g.samples
    ]
    starts, sequences, samples = zip(*pairs, strict=True)
    scores = client.score(sequences, distribution=params, start=starts)
    assert [score.logprobs.tobytes() for score in scores] == [logprobs for _, logprobs in bits(samples)]
    temperature = {"processed": 0.7, "temperature": 0.7, "raw": 1.0}[mode]
    again = client.score(sequences, temperature, start=starts)
    are_equal = [score.logprobs.tobytes() for score in again] == [logprobs for _, logprobs in bits(samples)]
    assert are_equal == (mode != "processed"), "premise: the distribution matters"


def test_grammars_on_a_worker(client: RolloutClient) -> None:
    """A refused grammar ends its request only; scores have the bits of the samples and of their kept tokens."""
    grammar = Grammar(regex="[a-c]{3,9}[0-9]+")
    params = SamplingParams(n=2, max_tokens=12, temperature=0.8, structured_outputs=grammar, return_sampling_mask=True)
    with pytest.raises(InvalidRequestError, match="structured_outputs: .*unclosed group"):
        client.generate([PROMPTS[0]], SamplingParams(structured_outputs=Grammar(regex="(a")))
    groups = client.generate(PROMPTS, params, seed=3)
    samples = [sample for group in groups for sample in group.samples]
    pairs = [(prompt, sample) for prompt, group in zip(PROMPTS, groups, strict=True) for sample in group.samples]
    scores = client.score(
        [[*prompt, *sample.token_ids] for prompt, sample in pairs],
        distribution=params,
        start=[len(prompt) for prompt, _ in pairs],
        return_sampling_mask=True,
    )
    assert [score.logprobs.tobytes() for score in scores] == [logprobs for _, logprobs in bits(tuple(samples))]
    for score, sample in zip(scores, samples, strict=True):
        assert sample.kept_counts is not None and (0 < sample.kept_counts).all(), "premise"
        for name in ("kept_counts", "kept_log_mass", "kept_token_ids"):
            assert getattr(score, name).tobytes() == getattr(sample, name).tobytes()
    with pytest.raises(InvalidRequestError, match="excludes token"):
        client.score([[*PROMPTS[0], 5, 5, 5]], distribution=params, start=len(PROMPTS[0]))


def test_score_gives_the_log_probs_of_the_tokens_that_generate_was_asked_for(client: RolloutClient) -> None:
    params = SamplingParams(n=2, max_tokens=10, seed=3, temperature=0.7, top_k=300, target_token_ids=(7, 300, 9))
    (group,) = client.generate([PROMPTS[0]], params)
    sequences = [[*PROMPTS[0], *sample.token_ids] for sample in group.samples]
    targets = [[[300, -1, sample.token_ids[i]] for i in range(len(sample.token_ids))] for sample in group.samples]
    asked: dict[str, Any] = dict(distribution=params, start=len(PROMPTS[0]), target_token_ids=targets)
    for sample, score in zip(group.samples, client.score(sequences, **asked), strict=True):
        found, expected = score.target_logprobs, sample.target_logprobs
        assert found is not None and expected is not None and expected.shape == (len(sample.token_ids), 3)
        assert found[:, 0].tobytes() == expected[:, 1].tobytes() and not found[:, 1].any()
        assert found[:, 2].tobytes() == score.logprobs.tobytes() == np.array(sample.logprobs).tobytes()


def test_score_gives_the_kept_tokens_of_generate(client: RolloutClient) -> None:
    params = SamplingParams(n=2, max_tokens=10, seed=3, temperature=0.7, top_p=0.8, return_sampling_mask=True)
    (group,) = client.generate([PROMPTS[0]], params)
    sequences = [[*PROMPTS[0], *sample.token_ids] for sample in group.samples]
    asked: dict[str, Any] = dict(distribution=params, start=len(PROMPTS[0]), return_sampling_mask=True)
    for sample, score in zip(group.samples, client.score(sequences, **asked), strict=True):
        assert sample.kept_counts is not None and sample.kept_counts.all(), "premise"
        for name in ("logprobs", "kept_counts", "kept_log_mass", "kept_token_ids"):
            assert getattr(score, name).tobytes() == getattr(sample, name).tobytes()


@pytest.mark.parametrize("targets", [[[1]], [[1, 2], [3]], [[1.5], [2.0]], [[512], [1]], [[], []]])
def test_wrong_targets_of_a_score_are_refused(client: RolloutClient, targets: list[list[Any]]) -> None:
    with pytest.raises(InvalidRequestError, match="target_token_ids"):
        client.score([[1, 2, 3]], target_token_ids=[targets])


def test_score_gives_the_top_logprobs_of_generate(client: RolloutClient) -> None:
    params = SamplingParams(n=2, max_tokens=10, seed=3, temperature=0.7, top_k=20, top_logprobs=5)
    (group,) = client.generate([PROMPTS[0]], params)
    sequences = [[*PROMPTS[0], *sample.token_ids] for sample in group.samples]
    scores = client.score(sequences, temperature=0.7, top_k=20, top_logprobs=5)
    start = len(PROMPTS[0]) - 1
    for sample, score in zip(group.samples, scores, strict=True):
        assert sample.logprobs is not None
        assert score.logprobs[start:].tobytes() == sample.logprobs.tobytes()
        for name in ("entropy", "top_token_ids", "top_logprobs"):
            found, expected = getattr(score, name)[start:], getattr(sample, name)
            assert (found.shape, found.tobytes()) == (expected.shape, expected.tobytes())
    (plain,) = client.generate([PROMPTS[0]], params.model_copy(update={"top_logprobs": None}))
    assert bits(group.samples) == bits(plain.samples) and plain.samples[0].entropy is None


def test_the_pieces_of_a_stream_have_the_bits_of_its_samples(client: RolloutClient, tiny_llama: Path) -> None:
    """The requests have a stop string, `top_logprobs`, targets and kept sets."""
    params = SamplingParams(
        n=2, max_tokens=40, top_k=40, top_logprobs=2, target_token_ids=(5, 6, 7), return_sampling_mask=True
    )
    (free, *_) = client.generate(PROMPTS, params, seed=5)
    stop = load_vocabulary(tiny_llama).decode([free.samples[0].token_ids[9]])
    params = params.model_copy(update={"stop": (stop,)})
    expected = client.generate(PROMPTS, params, seed=5)
    pieces: dict[tuple[int, int], list[SampleDelta]] = {}
    for position, event in client.stream(PROMPTS, params, deltas=True, seed=5):
        found = pieces.setdefault((position, event.index), [])
        if isinstance(event, SampleDelta):
            found.append(event)
            continue
        sample = expected[position].samples[event.index]
        assert sum((piece.token_ids for piece in found), []) == event.token_ids == sample.token_ids
        assert sample.kept_counts is not None and (sample.kept_counts == 40).all()
        for name in (column.name for column in COLUMNS):
            told = b"".join(getattr(piece, name).tobytes() for piece in found)
            assert told == getattr(event, name).tobytes() == getattr(sample, name).tobytes()
    reasons = {sample.finish_reason for group in expected for sample in group.samples}
    assert "stop" in reasons and max(map(len, pieces.values())) > 2, "premise: a stop string, and several pieces"


def test_health_names_the_engine(client: RolloutClient) -> None:
    health = client.health()
    assert health.state == "ready" and health.engine is not None
    assert health.engine["backend"] == "cpu" and health.engine["dtype"] == "float32"
    assert health.engine["isa"] == load_library().instruction_set() and health.engine["backend_note"] == ""
    assert health.memory["weights"] > 0 and health.memory["kv_cache"] > 0


def test_health_and_one_log_line_say_why_a_slower_backend_is_used(
    tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(model=str(tiny_llama), dtype="float16", num_blocks=64, num_threads=1)
    worker = WorkerOnThread(WorkerConfig(), lambda: load_engine(config))
    with RawClient(worker.address) as raw:
        while (health := raw.health())["state"] == "loading":
            pass
    worker.worker.drain()
    worker.join()
    wanted = "set dtype to bfloat16 (--dtype bfloat16) or float32"
    note = f"native CPU kernels do not support float16; {wanted}"
    assert (health["engine"]["backend"], health["engine"]["backend_note"]) == ("reference", note)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [f"backend reference, not a faster one: {note}"]


BAD_REQUESTS = [
    ([], {}, "prompts[0]"),
    ([-1], {}, "prompts[0]"),
    ([512], {}, "prompts[0]"),
    ([1] * 1025, {}, "prompts[0]"),
    ([1] * 1000, {"max_tokens": 100}, "prompts[0]"),
    ([1], {"stop_token_ids": (10**6,)}, "stop_token_ids"),
    ([1], {"n": 2000}, "n"),
]


def test_bad_requests_are_refused_while_another_runs_unharmed(client: RolloutClient) -> None:
    long = SamplingParams(max_tokens=990, seed=1, ignore_eos=True)
    expected = client.generate([PROMPTS[0]], long)[0]
    stream = client.stream([[7], PROMPTS[0]], [SamplingParams(max_tokens=1), long])
    assert next(stream)[0] == 0
    for prompt, params, field in BAD_REQUESTS:
        with pytest.raises(InvalidRequestError, check=about(field)):
            client.generate([prompt], SamplingParams(**params))
    assert client.health().requests["open"] == 1
    ((_, sample),) = stream
    assert bits((sample,)) == bits(expected.samples) and sample.finish_reason == "length"


def test_every_open_request_gets_an_error_when_the_engine_fails(tiny_llama: Path) -> None:
    class FailingOps:
        """The ops of a backend, with an attention that fails after `budget` calls."""

        def __init__(self, backend: Backend, budget: int) -> None:
            self.backend, self.budget = backend, budget

        def __getattr__(self, name: str) -> Any:
            return getattr(self.backend, name)

        def layers(self, *inputs: Any) -> Any:
            return run_layers(cast(Backend, self), *inputs)

        def paged_attention(self, *inputs: Any) -> Any:
            self.budget -= 1
            if self.budget < 0:
                raise RuntimeError("broken attention")
            return self.backend.paged_attention(*inputs)

    def make_engine() -> Engine:
        config = EngineConfig(model=str(tiny_llama), num_blocks=256, num_threads=1)
        loaded = load_model(config)
        loaded.model.ops = FailingOps(loaded.backend.ops, budget=20)  # type: ignore[assignment]
        return Engine(config, loaded)

    worker = WorkerOnThread(WorkerConfig(), make_engine)
    with RawClient(worker.address) as raw, RawClient(worker.address) as other:
        raw.generate("done before", max_tokens=2)
        assert raw.receive_until("done", "error")[-1]["type"] == "done"
        ask(raw, "pause")
        raw.generate("open", n=3, max_tokens=400)
        other.generate("open too", max_tokens=400)
        other.health()  # the reply arrives after the worker has accepted the request
        raw.send("resume", id="resume")
        for client, id in ((raw, "open"), (other, "open too")):
            error = client.receive_until("done", "error")[-1]
            assert (error["id"], error["code"]) == (id, "worker_failed") and "broken attention" in error["message"]
    worker.join()
    assert isinstance(worker.error, WorkerFailedError)


def test_sigterm_lets_a_running_request_finish(tiny_llama: Path) -> None:
    with launch_worker(str(tiny_llama), num_blocks=256, num_threads=1) as process:
        with RolloutClient(process.address) as client:
            stream = client.stream([[1], [2]], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=200, seed=1)])
            next(stream)
            process._process.send_signal(signal.SIGTERM)
            assert [sample.finish_reason in ("length", "stop") for _, sample in stream] == [True]


def spoil_missing(folder: Path) -> None:
    shutil.rmtree(folder)


def spoil_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def spoil_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["ElmanForCausalLM"], "model_type": "elman"}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("spoil", [spoil_missing, spoil_weights, spoil_architecture])
def test_a_spoilt_model_folder_raises_and_leaves_no_process(tiny_llama: Path, tmp_path: Path, spoil) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    spoil(folder)
    with pytest.raises(ModelError) as caught:
        launch_worker(str(folder))
    assert isinstance(caught.value, TruerollError) and "; " in str(caught.value), "it says what to do"


def run_example(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=EXAMPLES.parent, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_quickstart_runs(tiny_llama: Path) -> None:
    lines = run_example("examples/quickstart.py", str(tiny_llama)).splitlines()
    assert len(lines) == 17 and "same bits" in lines[-1]


def test_the_raw_client_runs(worker: WorkerProcess, client: RolloutClient) -> None:
    output = run_example("examples/raw_client.py", worker.address)
    samples = [line for line in output.splitlines() if line.startswith("sample ")]
    (group,) = client.generate([[1, 2, 3]], SamplingParams(n=4, max_tokens=16, seed=7))
    assert len(samples) == 4 and "done, seed 7" in output
    for sample in group.samples:
        tokens = tuple(np.asarray(sample.token_ids).tolist())
        assert any(line.startswith(f"sample {sample.index} {sample.finish_reason} {tokens} ") for line in samples)
    while client.health().requests["kept"]:
        pass
