"""`audit` finds planted differences between a trainer and a worker, names each cause, and says what to change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import adapt
from kernels.backends import Implementation
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from tiny import make_tiny_model
from trueroll.errors import AlignmentError, ConfigError
from trueroll.kernels.cpu.library import load_library
from trueroll.kernels.training import align, token_log_probs, unalign
from trueroll.rollout import (
    Audit,
    Grammar,
    RolloutClient,
    SamplingParams,
    WeightPublisher,
    WorkerProcess,
    audit,
    auditing,
    launch_worker,
)
from trueroll.rollout.grammar import GrammarMasks
from trueroll.rollout.tools import cli, pictures

PROMPTS = [[*range(3, 20)], [7, 8]]
PARAMS = SamplingParams(n=3, max_tokens=12, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("audited") / "model", dtype="bfloat16")


@pytest.fixture(scope="module")
def worker(folder: Path, forked_workers: None) -> Iterator[WorkerProcess]:
    with launch_worker(str(folder), num_blocks=64, num_threads=1) as worker:
        yield worker


@pytest.fixture(scope="module")
def client(worker: WorkerProcess) -> Iterator[RolloutClient]:
    with RolloutClient(worker.address) as client:
        yield client


@pytest.fixture
def model(folder: Path) -> Any:
    """The trainer's model: float32 weights, aligned."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    align(model)
    return model


def run(model: Any, client: RolloutClient, **options: Any) -> Audit:
    with torch.autocast("cpu", torch.bfloat16):
        return audit(model, client, PROMPTS, options.pop("params", PARAMS), **options)


def the_cause(found: Audit, name: str) -> str:
    """Return the text of the cause `name`. Check that there is no other cause, and that log-probs differ."""
    assert [cause.name for cause in found.causes] == [name], str(found)
    assert 0 < found.num_different <= found.num_tokens == 72 and found.largest > 0 and found.place is not None
    assert f"- {name}: {found.causes[0].text}" in str(found)
    return found.causes[0].text


def test_an_aligned_model_has_no_differences(model: Any, client: RolloutClient) -> None:
    for each in (model, checkpoint_wrapper(model)):
        found = run(each, client)
        assert (found.num_different, found.largest, found.place, found.causes, found.tensors) == (0, 0, None, (), ())
        assert str(found) == "All 72 log-probs have the same bits on both sides."


def test_an_unaligned_model_is_found(model: Any, client: RolloutClient) -> None:
    unalign(model)
    assert "call align(model)" in the_cause(run(model, client), "alignment")


def test_the_dtype_of_an_unaligned_model_includes_its_own_autocast(model: Any, client: RolloutClient) -> None:
    """accelerate adds an autocast to the model's own forward pass."""
    unalign(model)
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    the_cause(audit(model, client, PROMPTS, PARAMS), "alignment")


def test_a_forward_pass_without_autocast_is_found(model: Any, client: RolloutClient) -> None:
    text = the_cause(audit(model, client, PROMPTS, PARAMS), "dtype")
    assert "the worker computes in bfloat16, the trainer in float32" in text and "torch.autocast" in text


def test_another_backend_is_found(model: Any, client: RolloutClient) -> None:
    unalign(model)
    align(model, "reference")
    text = the_cause(run(model, client), "backend")
    assert 'the worker uses the backend cpu, the trainer uses reference; call align(model, "cpu")' in text


@pytest.fixture
def other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change the trainer's bits. Two instruction sets or numbers of pieces may give the same bits for a small model."""

    def log_probs(*arguments: Any, **options: Any) -> torch.Tensor:
        found = token_log_probs(*arguments, **options)
        return torch.where(found == 0, found, torch.nextafter(found, torch.tensor(-torch.inf)))

    monkeypatch.setattr(auditing, "token_log_probs", log_probs)


def test_another_instruction_set_is_found(model: Any, client: RolloutClient, other_bits: None) -> None:
    best = load_library().instruction_set()
    assert best != "portable", "premise: the worker uses a better instruction set"
    with Implementation("cpu", "portable").chosen():
        text = the_cause(run(model, client), "instruction set")
    assert f"the worker uses the instruction set {best}, the trainer uses portable; set TRUEROLL_CPU_ISA" in text


def test_another_number_of_pieces_is_found(model: Any, client: RolloutClient, other_bits: None) -> None:
    unalign(model)
    align(model, pieces=1)
    text = the_cause(run(model, client), "pieces")
    assert text == (
        "the worker computes sums in 4 pieces, the trainer in 1; call align(model, pieces=4), or serve with pieces=1"
    )


def test_another_kv_cache_dtype_is_found(model: Any, client: RolloutClient) -> None:
    unalign(model)
    align(model, kv_cache_dtype="int8")
    text = the_cause(run(model, client), "kv_cache_dtype")
    assert text == (
        "the worker's kv_cache_dtype is auto, the trainer's is int8; call "
        'align(model, kv_cache_dtype="auto"), or serve with kv_cache_dtype="int8"'
    )


def test_a_changed_tensor_is_found(model: Any, client: RolloutClient) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    with torch.no_grad():
        model.get_parameter(name).mul_(1.01)
    found = run(model, client)
    assert found.tensors == (name,)
    text = f"its own checkpoint, since nothing was pushed, which has different values in {name};"
    assert text in the_cause(found, "weights")


def test_another_temperature_and_another_distribution_are_found(model: Any, client: RolloutClient) -> None:
    cold = PARAMS.model_copy(update=dict(temperature=0.5))
    text = the_cause(run(model, client, params=cold, temperature=1.0), "distribution")
    assert "temperature 0.5 (logprobs='processed'), but the trainer divides logits by 1; use params" in text
    filtered = PARAMS.model_copy(update=dict(top_k=5))
    assert "sample with logprobs='temperature'" in the_cause(
        run(model, client, params=filtered, temperature=1.0), "distribution"
    )


def test_filters_and_edits_are_no_difference_for_an_aligned_model(model: Any, client: RolloutClient) -> None:
    edits = dict(repetition_penalty=1.2, logit_bias=((7, 3.0),), bad_words_token_ids=((9,), (7, 7)), min_tokens=4)
    found = run(model, client, params=PARAMS.model_copy(update=dict(top_p=0.9, temperature=0.8, **edits)))
    assert (found.num_different, found.causes) == (0, ())


def test_a_grammar_is_no_difference_with_its_masks(model: Any, client: RolloutClient, folder: Path) -> None:
    params = SamplingParams(max_tokens=12, seed=5, structured_outputs=Grammar(regex="[a-z]+ [a-z]+"))
    engine: Any = client.health().engine
    masks = GrammarMasks(params, AutoTokenizer.from_pretrained(folder), engine)
    found = run(model, client, params=params, masks=masks)
    assert (found.num_different, found.causes) == (0, ())
    with pytest.raises(AlignmentError, match="masks must be given"):
        run(model, client, params=params)


def test_the_command_compares_a_checkpoint_with_the_served_weights(
    folder: Path, worker: WorkerProcess, tmp_path: Path
) -> None:
    result = CliRunner().invoke(cli.app, ["audit", str(folder), worker.address])
    assert (result.exit_code, result.stdout) == (0, "All 384 log-probs have the same bits on both sides.\n")
    other = make_tiny_model("llama", tmp_path / "other", dtype="bfloat16", rms_norm_eps=0.1)
    result = CliRunner().invoke(cli.app, ["audit", str(other), worker.address])
    assert result.exit_code == 1 and "- unknown: none of the compared properties explains" in result.stdout


def test_the_command_draws_the_differences_of_both_trainers(
    folder: Path, worker: WorkerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[Any, str]] = []
    plot = pictures.plot_differences

    def noted(audits: Any, title: str, file: Path) -> None:
        drawn.append((audits, title))
        plot(audits, title, file)

    monkeypatch.setattr(pictures, "plot_differences", noted)
    picture = tmp_path / "differences.png"
    result = CliRunner().invoke(cli.app, ["audit", str(folder), worker.address, "--plot", str(picture)])
    assert result.exit_code == 0, "only the aligned trainer decides"
    assert "All 384 log-probs have the same bits" in result.stdout
    assert "Without alignment: " in result.stdout and "- alignment: the model uses the ops" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    [((aligned, plain), title)] = drawn
    assert title.startswith(f"{folder}, bfloat16, backend cpu (")
    assert (aligned.is_aligned, plain.is_aligned) == (True, False)
    assert [len(row) for row in plain.differences] == [32] * 12
    assert not any(row.any() for row in aligned.differences) and plain.num_different > 0
    assert max(abs(row).max() for row in plain.differences) == pytest.approx(plain.largest)


def test_an_unsupported_wrapper_is_found(model: Any, client: RolloutClient) -> None:
    """The audit still compares the weights."""
    text = the_cause(run(torch.nn.DataParallel(model), client), "alignment")
    assert text.startswith("a DataParallel wraps the aligned model") and "compute them with token_log_probs" in text


def test_inputs_that_cannot_be_compared_are_refused(model: Any, client: RolloutClient, tmp_path: Path) -> None:
    small = make_tiny_model("llama", tmp_path / "small", vocab_size=64)
    with pytest.raises(ConfigError, match="model: its vocabulary has 64 tokens, but the worker's vocabulary has 512"):
        run(AutoModelForCausalLM.from_pretrained(small), client)
    with pytest.raises(ConfigError, match="prompts: the list is empty; give at least one prompt"):
        audit(model, client, [])
    with pytest.raises(ConfigError, match=r"log_probs: must have the shape of input_ids, \[6, 29\] \(got \[6, 28\]\)"):
        run(model, client, log_probs=lambda ids, mask: torch.zeros(len(ids), ids.shape[1] - 1))


def test_differences_from_the_trainers_own_code_have_an_unknown_cause(model: Any, client: RolloutClient) -> None:
    def shifted(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.full(ids.shape, -1.0)

    text = the_cause(run(model, client, log_probs=shifted), "unknown")
    assert "none of the compared properties explains the differences" in text


def test_nan_is_the_largest_difference(model: Any, client: RolloutClient) -> None:
    place = 0, 2, 7
    token = len(PROMPTS[0]) + place[2]

    def broken(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found = token_log_probs(model, ids, mask)
        found[0, token] -= 1.0
        found[place[1], token] = torch.nan
        return found

    found = run(model, client, log_probs=broken)
    assert (found.num_different, found.largest, found.place) == (2, torch.inf, place), str(found)


def test_stale_weights_and_adapters_are_found(folder: Path, forked_workers: None) -> None:
    """The audit detects an older version by its number and by its tensors. An adapter that was not pushed is detected
    by the tensors.
    """
    model = adapt(folder, target_modules=["q_proj"])
    align(model)
    with (
        launch_worker(str(folder), num_blocks=64, num_threads=1) as worker,
        RolloutClient(worker.address) as client,
        WeightPublisher() as publisher,
    ):
        publisher.connect([worker.address])
        names = tuple(f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1))
        found = run(model, client)
        assert found.tensors == names and "weights" in str(found)
        publisher.push(model, 1, adapters=True)
        found = run(model, client, version=1)
        assert found.num_different == 0 and not found.causes, str(found)
        assert not run(torch.nn.DataParallel(model), client).tensors, "adapters inside an unsupported wrapper are found"
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * parameter.requires_grad)
        found = run(model, client, version=2)
        assert [cause.name for cause in found.causes] == ["version", "weights"] and found.tensors == names
        assert "the worker serves version 1, but the trainer pushed version 2; push again" in str(found)

        def pushing(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            publisher.push(model, 2, adapters=True)
            return token_log_probs(model, ids, mask)

        text = the_cause(run(model, client, log_probs=pushing), "version")
        assert text == "the worker served versions [1, 2] during the audit; audit again without pushes"


@pytest.mark.parametrize("family", ["mistral4", "afmoe"])
def test_a_folder_of_any_family_is_audited(tmp_path: Path, family: str, forked_workers: None) -> None:
    """Mistral 4 has no automatic class for causal models. transformers would round the correction bias of AFMoE."""
    folder = make_tiny_model(family, tmp_path, dtype="bfloat16")
    with launch_worker(str(folder), num_blocks=64, num_threads=1) as worker, RolloutClient(worker.address) as client:
        [found] = auditing.audit_folder(str(folder), client, PROMPTS, PARAMS)
    assert (found.num_different, found.causes, found.num_tokens) == (0, (), 72)
