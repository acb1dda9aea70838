"""Drafts of the module for multi-token prediction (MTP): they change no bit, and nothing is lost by hits and forks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matrix import thinned
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5TextRotaryEmbedding

from tiny import make_tiny_model
from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.running.loading import LoadedModel
from trueroll.engine.running.mtp import MtpRunner
from trueroll.engine.running.sampler import Sampler
from trueroll.errors import ConfigError, PushError
from trueroll.weight_sync.payload.manifest import check_complete

from ..checkpoints import read_tensors, stage, stage_rows
from ..drive import generate, run, tokens
from .mtp_models import FAMILIES, FILE, make_mtp_model
from .test_exactness import parts, requests, some_were_rejected

pytestmark = pytest.mark.usefixtures("steps_ahead")


def make(model: Path, loaded: LoadedModel | None = None, **settings: Any) -> Engine:
    """Return an engine that drafts with the MTP module, as many tokens as it may."""
    defaults: dict[str, Any] = dict(
        speculative="mtp", num_blocks=512, num_threads=1, max_num_seqs=8, num_speculative_tokens=3
    )
    config = EngineConfig(model=str(model), **(defaults | settings))
    return Engine(config, loaded, draft_always=True)


def plain(model: Path) -> Engine:
    return Engine(EngineConfig(model=str(model), num_blocks=512, num_threads=1, max_num_seqs=8))


@thinned(lambda steps_ahead, family, dtype: steps_ahead or family == "qwen3_5_moe")
@pytest.mark.parametrize("family, dtype", [*((family, "float32") for family in FAMILIES), ("qwen3_5_moe", "bfloat16")])
def test_drafts_of_the_module_change_no_bit(family: str, dtype: str, tmp_path: Path) -> None:
    model = make_mtp_model(family, tmp_path / "model", dtype=dtype)
    baseline = plain(model)
    asked = requests(baseline.info.num_experts > 0)
    expected = {key: parts(sample) for key, sample in run(baseline, asked).items()}
    for most in (1, 4):
        engine = make(model, num_speculative_tokens=most)
        assert {key: parts(sample) for key, sample in run(engine, asked).items()} == expected
        assert some_were_rejected(engine) and engine.stats().drafts[0].drafter == "mtp"


def accepted(engine: Engine, before: tuple[int, ...] = (0, 0, 0)) -> tuple[int, ...]:
    """Return the number of accepted tokens for each position of a draft, since `before`."""
    return tuple(now - then for now, then in zip(engine.stats().drafts[0].accepted, before, strict=True))


@thinned(lambda steps_ahead, family: steps_ahead or family == "qwen3_5_moe")
@pytest.mark.parametrize("family", FAMILIES)
def test_acceptance_after_a_hit_equals_that_after_a_miss(family: str, tmp_path: Path) -> None:
    """The prompts have every length up to two blocks, so that hits end within a block, at its end and behind it."""
    engine = make(make_mtp_model(family, tmp_path / "model"), block_size=4, state_interval=4)
    for length in range(5, 14):
        asked = [generate(f"{length}", tokens(length, seed=length), n=3, max_tokens=25, temperature=0.7)]
        before = accepted(engine)
        run(engine, asked)
        first, hits = accepted(engine, before), engine.stats().prefix_hits
        run(engine, asked)
        assert engine.stats().prefix_hits > hits and accepted(engine, before) == tuple(2 * each for each in first)
    assert min(accepted(engine)) > 50


def test_chunks_preemptions_and_interruptions_lose_no_draft(tmp_path: Path) -> None:
    """Sequences are computed again or in pieces, and the module makes the same guesses."""
    model = make_mtp_model("qwen3_5", tmp_path / "model")
    asked = [generate(str(i), tokens(21 + i, seed=i // 2), n=2, max_tokens=30, seed=i) for i in range(6)]
    roomy = make(model)
    expected = {key: parts(sample) for key, sample in run(roomy, asked).items()}
    small: dict[str, Any] = dict(num_blocks=26, block_size=4, max_num_seqs=6, max_num_batched_tokens=24)
    engine = make(model, **small, state_interval=8, decode_state_interval=8, state_budget=16)
    assert {key: parts(sample) for key, sample in run(engine, asked).items()} == expected
    stats, [drafts] = engine.stats(), engine.stats().drafts
    assert stats.preemptions > 0 and stats.prefix_hits > 0 and stats.checkpoints_restored > 0
    [others] = roomy.stats().drafts
    # Limits of blocks, budget and checkpoints cut drafts, so the later positions are drafted less often.
    assert drafts.accepted[0] / drafts.drafted[0] > 0.9 * others.accepted[0] / others.drafted[0]


class Reference:
    """The module in float32, by transformers' layers, without a cache."""

    def __init__(self, folder: Path) -> None:
        self.decoder: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.weights = load_file(folder / FILE)
        config = self.decoder.config
        self.rotary = Qwen3_5TextRotaryEmbedding(config)
        self.layer = Qwen3_5DecoderLayer(config, 3).eval()
        prefix = "mtp.layers.0."
        self.layer.load_state_dict(
            {name.removeprefix(prefix): each for name, each in self.weights.items() if name.startswith(prefix)}
        )

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.weights[name])

    @torch.no_grad()
    def hidden(self, token_ids: Tensor) -> Tensor:
        """Return the module's hidden states after its last norm, for the tokens of one sequence."""
        states = self.decoder.model(token_ids[None]).last_hidden_state[0]
        before = torch.cat((torch.zeros_like(states[:1]), states[:-1]))
        embedded = self.decoder.model.embed_tokens(token_ids)
        halves = (
            self.norm(embedded, "mtp.pre_fc_norm_embedding.weight"),
            self.norm(before, "mtp.pre_fc_norm_hidden.weight"),
        )
        x, places = torch.cat(halves, 1) @ self.weights["mtp.fc.weight"].T, torch.arange(len(token_ids))
        mask = torch.full((len(x), len(x)), -torch.inf).triu(1)
        out = self.layer(
            x[None],
            position_embeddings=self.rotary(x[None], places[None]),
            attention_mask=mask[None, None],
            position_ids=places[None],
        )
        return self.norm((out[0] if isinstance(out, tuple) else out)[0], "mtp.norm.weight")


def test_the_module_computes_what_transformers_layers_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are random, so that the test detects swapped halves, and a token or a hidden state of another
    position.
    """
    model = make_mtp_model("qwen3_5", tmp_path / "model", scale=1.0)
    randomize(model)
    computed: list[tuple[Tensor, Tensor]] = []
    compute = MtpRunner._compute

    def noting(runner: MtpRunner, token_ids: Tensor, *others: Any) -> Tensor:
        computed.append((token_ids, compute(runner, token_ids, *others)))
        return computed[-1][1]

    monkeypatch.setattr(MtpRunner, "_compute", noting)
    engine = make(model, max_num_batched_tokens=16, num_speculative_tokens=1)
    prompt = tokens(40, seed=1)
    sample = run(engine, [generate("a", prompt, max_tokens=1)])["a", 0]
    assert len(sample.token_ids) == 1 and len(computed) == 3, "premise: three chunks"
    found = torch.cat([hidden for _, hidden in computed])
    expected = Reference(model).hidden(torch.from_numpy(prompt).long())
    assert (found - expected).abs().max() < 1e-3 * expected.abs().max()


def randomize(folder: Path) -> None:
    weights, generator = load_file(folder / FILE), torch.Generator().manual_seed(3)
    for name, weight in weights.items():
        if name.startswith("mtp."):
            spread = 0.3 if weight.dim() == 1 else weight.shape[1] ** -0.5
            weight.normal_(std=spread, generator=generator)
    save_file(weights, folder / FILE, {"format": "pt"})


def test_later_tokens_are_drafted_from_the_output_after_the_norm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_mtp_model("qwen3_5", tmp_path / "model")
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    compute = MtpRunner._compute

    def noting(runner: MtpRunner, token_ids: Tensor, positions: Tensor, before: Tensor, pages: Any) -> Tensor:
        inputs.append(before.clone())
        outputs.append(compute(runner, token_ids, positions, before, pages))
        return outputs[-1]

    engine = make(model, num_speculative_tokens=3)
    engine.add(generate("a", tokens(9), max_tokens=20))
    engine.step()
    monkeypatch.setattr(MtpRunner, "_compute", noting)
    engine.step()
    assert len(inputs) == 4, "premise: three drafted tokens, then a step"
    assert torch.equal(inputs[1], outputs[0]) and torch.equal(inputs[2], outputs[1])
    assert torch.equal(inputs[3][0], inputs[0][0]), "the step computes the last token again, from the same state"


def test_drafted_tokens_are_drawn_with_the_noise_of_their_sample(tmp_path: Path) -> None:
    """With the request's own noise, a drafter with nearly the decoder's distribution is nearly always right."""
    model = make_mtp_model("qwen3_5", tmp_path / "model", scale=0.002)
    asked = [generate("a", tokens(9), n=8, max_tokens=40, temperature=1.5)]
    noisy, greedy = make(model), make(model)
    run(noisy, asked)
    draw = Sampler.draw

    def by_argmax(sampler: Sampler, hidden: Tensor, draws: Any) -> Any:
        if (draws.lanes < 0).all() and len(draws.rows) == len(hidden):
            records = draws.records.copy()
            records["target"] = -1
            draws = replace(draws, records=records)
        return draw(sampler, hidden, draws)

    mtp = greedy._executor._runner.mtp  # type: ignore[attr-defined]
    drafting = mtp.draft
    mtp.draft = lambda step, sampler: drafting(step, _Argmax(sampler))
    run(greedy, asked)
    shares = [sum(e.stats().drafts[0].accepted) / sum(e.stats().drafts[0].drafted) for e in (noisy, greedy)]
    assert shares[0] > 0.6 and shares[0] > 1.5 * shares[1], shares


class _Argmax:
    """A sampler that draws the most probable token."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def draw(self, hidden: Tensor, draws: Any) -> Any:
        logits = self._sampler.ops.lm_head(hidden, self._sampler.head)
        return type("Drawing", (), {"token_ids": logits.argmax(-1)})


def test_sleep_drops_the_memory_of_the_module(tmp_path: Path) -> None:
    engine = make(make_mtp_model("qwen3_5", tmp_path / "model"))
    asked = [generate("a", tokens(30), n=2, max_tokens=20)]
    expected = {key: parts(sample) for key, sample in run(engine, asked).items()}
    held = engine.memory()["kv_cache"]
    without = plain(tmp_path / "model")
    run(without, asked)
    assert held > without.memory()["kv_cache"]
    engine.sleep(1, ["weights", "kv_cache"], "drain")
    assert engine.memory()["kv_cache"] == 0
    engine.wake_up(["weights", "kv_cache"])
    before = accepted(engine)
    assert {key: parts(sample) for key, sample in run(engine, asked).items()} == expected
    assert accepted(engine, before) == before


def test_models_without_a_module_are_refused(tmp_path: Path) -> None:
    for family in ("llama", "qwen3_5", "qwen3_next"):
        model = make_tiny_model(family, tmp_path / family)
        with pytest.raises(ConfigError, match="speculative: .* has no module for multi-token prediction"):
            make(model)
        assert [drafts.drafter for drafts in make(model, speculative="auto").stats().drafts] == ["repeats"]


def test_modules_that_are_not_supported_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The modules are one without one of its tensors, one with a second layer, and one with its own embeddings."""
    caplog.set_level("INFO", "trueroll")
    model = make_mtp_model("qwen3_next_moe", tmp_path / "model")
    tensors = read_tensors(model)
    assert [drafts.drafter for drafts in make(model, speculative="auto").stats().drafts] == ["repeats", "mtp"]
    lacking = {name: tensor for name, tensor in tensors.items() if name != "mtp.fc.weight"}
    part = {name: tensor for name, tensor in tensors.items() if name != "mtp.layers.0.mlp.experts.3.up_proj.weight"}
    assert len(part) == len(tensors) - 1
    for changed in (
        lacking,
        part,
        tensors | {"mtp.layers.1.input_layernorm.weight": torch.zeros(64)},
        tensors | {"mtp.embed_tokens.weight": torch.zeros(512, 64)},
    ):
        save_file(changed, model / FILE, {"format": "pt"})
        with pytest.raises(ConfigError, match="has no module for multi-token prediction"):
            make(model)
        caplog.clear()
        assert [drafts.drafter for drafts in make(model, speculative="auto").stats().drafts] == ["repeats"]
        count = sum(name.startswith("mtp.") for name in changed)
        assert f"{count} tensors of the checkpoint are not used: mtp." in caplog.text


def test_the_better_drafter_is_chosen_for_each_sample_and_step(tmp_path: Path) -> None:
    """One prompt repeats itself, and the other prompt does not."""
    model = make_mtp_model("qwen3_5", tmp_path / "model")
    asked = [generate("a", np.tile(tokens(6), 6), max_tokens=60), generate("b", tokens(30), n=3, max_tokens=60)]
    expected = {key: parts(sample) for key, sample in run(plain(model), asked).items()}
    engine = make(model, speculative="auto")
    for _ in range(2):
        assert {key: parts(sample) for key, sample in run(engine, asked).items()} == expected
    repeats, mtp = engine.stats().drafts
    assert (repeats.drafter, mtp.drafter) == ("repeats", "mtp")
    assert min(repeats.num_accepted, mtp.num_accepted) > 10
    assert sum(sample.num_drafted_tokens for sample in run(engine, asked).values()) > 0


def test_the_memory_of_the_module_is_planned(tmp_path: Path) -> None:
    model = make_mtp_model("qwen3_5", tmp_path / "model")
    engine, without = make(model, kv_memory=2**20, num_blocks=None), plain(model)
    info = engine.info
    per_block = info.kv_bytes // info.num_blocks
    # keys and values of 16 tokens in a layer of 2 heads of 16 elements, and 4 states of 64 elements
    assert per_block - without.info.kv_bytes // without.info.num_blocks == 4 * (2 * 16 * 2 * 16 + 4 * 64)
    assert info.kv_bytes + info.state_bytes <= 2**20
    found = loaded_bytes(engine)
    assert np.isclose(found, per_block, rtol=0.0), "the planned bytes are those that are allocated"


def loaded_bytes(engine: Engine) -> float:
    """Return the bytes of a block, from the shapes of the tensors."""
    runner = engine._executor._runner  # type: ignore[attr-defined]
    of_layers = zip(runner.groups, runner.memories, strict=True)
    caches = [cache for group, memory in of_layers if group == 0 for cache in memory]
    tensors = [*runner.mtp._memory, runner.mtp._hidden, *caches]
    return sum(tensor.nbytes / len(tensor) for tensor in tensors)


def is_of_mtp(name: str) -> bool:
    return name.startswith("mtp.")


@pytest.mark.parametrize("in_place", [False, True])
def test_a_push_without_the_module_keeps_it(in_place: bool, tmp_path: Path) -> None:
    """The worker keeps the module even through a sleep that drops the weights. A push with the module replaces it."""
    model = make_mtp_model("qwen3_5", tmp_path / "model")
    engine, tensors = make(model), read_tensors(model)
    asked = [generate("a", tokens(30), n=2, max_tokens=30)]
    expected = {key: parts(sample) for key, sample in run(engine, asked).items()}
    first = accepted(engine)
    without = {name: tensor for name, tensor in tensors.items() if not is_of_mtp(name)}
    assert engine.weights.optional == tensors.keys() - without.keys() and engine.weights.optional_note == ""
    if in_place:
        for level in (1, 2, 2):
            engine.sleep(level, ["weights"], "drain")
        engine.wake_up(["weights"])
    for version, pushed, kept in ((0, without, True), (0, tensors, False), (0, without, True)):
        engine.commit_weights(stage(engine, pushed, in_place), version, "drain")
        assert bool(engine.weights.optional_note) == kept
        before = accepted(engine)
        assert {key: parts(sample) for key, sample in run(engine, asked).items()} == expected
        assert accepted(engine, before) == first
    other = tensors | {name: torch.zeros_like(tensor) for name, tensor in tensors.items() if is_of_mtp(name)}
    engine.commit_weights(stage(engine, other, in_place), 0, "drain")
    before = accepted(engine)
    assert {key: parts(sample) for key, sample in run(engine, asked).items()} == expected
    assert sum(accepted(engine, before)) < sum(first) / 4, "the module guesses nothing now"


def test_half_a_module_is_refused(tmp_path: Path) -> None:
    model = make_mtp_model("qwen3_5_moe", tmp_path / "model")
    weights, names = make(model).weights, set(read_tensors(model))
    check_complete(names, weights)
    check_complete({name for name in names if not is_of_mtp(name)}, weights)
    for missing in ("mtp.fc.weight", "mtp.layers.0.mlp.experts.7.down_proj.weight"):
        with pytest.raises(PushError, match=f"parameters are missing: {missing}"):
            check_complete(names - {missing}, weights)
    with pytest.raises(PushError, match="parameters are missing: model.norm.weight"):
        check_complete({name for name in names if is_of_mtp(name)} | names - {"model.norm.weight"}, weights)


def test_a_borrower_keeps_its_module(tmp_path: Path) -> None:
    """The lender's memory has no module, or has the pushed module."""
    model = make_mtp_model("qwen3_5", tmp_path / "model")
    lender, borrower = make(model), make(model)
    tensors = read_tensors(model)
    own = tensors["mtp.fc.weight"]
    without = {name: tensor for name, tensor in tensors.items() if not is_of_mtp(name)}
    for pushed in (without, tensors | {"mtp.fc.weight": own + 1}):
        staging = lender.weights.new_lendable()
        stage_rows(staging, pushed)
        assert staging.has_optional == (pushed is not without)
        borrowed = borrower.weights.borrow(staging.lend(), staging.has_optional)
        for engine, staged in ((lender, staging), (borrower, borrowed)):
            engine.commit_weights(staged, 0, "drain")
            assert torch.equal(engine.weights.served("mtp.fc.weight"), pushed.get("mtp.fc.weight", own))
            assert bool(engine.weights.optional_note) == (pushed is without)


def test_a_module_that_was_half_overwritten_must_be_pushed(tmp_path: Path) -> None:
    model = make_mtp_model("qwen3_5", tmp_path / "model")
    engine, tensors = make(model), read_tensors(model)
    without = {name: tensor for name, tensor in tensors.items() if not is_of_mtp(name)}
    broken = engine.weights.new_staging(in_place=True)
    broken.rows("mtp.fc.weight", 0, 64).copy_(tensors["mtp.fc.weight"] + 1)
    broken.drop()
    assert not engine.weights.optional
    with pytest.raises(ValueError, match="mtp.fc.weight is missing"):
        engine.commit_weights(stage(engine, without, True), 1, "drain")
    engine.commit_weights(stage(engine, tensors, True), 1, "drain")
    assert engine.weights.optional and not engine.weights.optional_note
    engine.commit_weights(stage(engine, without, True), 2, "drain")
    assert engine.weights.optional_note


def test_every_state_that_is_read_is_that_of_the_token_before(tmp_path: Path) -> None:
    """Every draft is wrong, so each step continues from the state of its first row. The 9 + 20 tokens fill several
    blocks.
    """
    model = make_mtp_model("qwen3_5", tmp_path / "model", scale=0.5)
    engine = make(model, num_speculative_tokens=3, block_size=4)
    mtp = engine._executor._runner.mtp  # type: ignore[attr-defined]
    draft, states, seen = mtp.draft, mtp._states, list[Tensor]()
    mtp.draft = lambda step, sampler: [[(token + 1) % 512 for token in found] for found in draft(step, sampler)]
    mtp._states = lambda places: seen.append(states(places)) or seen[-1]
    sample = run(engine, [generate("a", tokens(9), max_tokens=20)])["a", 0]
    assert engine.stats().drafts[0].num_accepted == 0, "premise: every draft is wrong"
    fed = torch.tensor([*tokens(9), *sample.token_ids])
    with torch.no_grad():
        expected = Reference(model).decoder.model(fed[None]).last_hidden_state[0]
    assert (seen[0] == 0).all(), "there is no state before the first token"
    distances = [(expected - state).abs().amax(1) for state in seen[1:]]
    assert max(float(each.min()) for each in distances) < 1e-3
    # After the prompt's second chunk: a draft and then a step from the same state, until drafting pauses.
    read = [7, *np.repeat(np.arange(8, 24), 2).tolist(), 24, 25, 26]
    assert [int(each.argmin()) for each in distances] == read
