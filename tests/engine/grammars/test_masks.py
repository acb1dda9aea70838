"""The child processes for grammars: grammars that fail end alone, and a new child gives the same masks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import about

from trueroll.engine.engine import Engine
from trueroll.engine.grammars import child, masks
from trueroll.engine.grammars.masks import Grammars
from trueroll.engine.grammars.matching import GrammarError, TokenText, Walk
from trueroll.engine.grammars.source import Grammar
from trueroll.engine.models import child_process
from trueroll.engine.models.tokenizer import load_tokenizer
from trueroll.engine.models.trials import Limits
from trueroll.engine.outputs.stop_strings import load_vocabulary
from trueroll.engine.request import Distribution, GenerateRequest, SampleOutput, ScoreOutput, ScoreRequest
from trueroll.engine.running.model_runner import ModelRunner
from trueroll.errors import InvalidRequestError, UnavailableError

from ..drive import bits, drain, generate, make_engine, run, tokens

PROMPT = tokens(20)
JSON: dict[str, Any] = dict(structured_outputs=dict(json_object=True), ignore_eos=False, max_tokens=16, n=2)
CHOICES = ["yes", "no", "maybe"]
CHOICE: dict[str, Any] = dict(structured_outputs=dict(choice=CHOICES), ignore_eos=False)
HOSTILE = dict(structured_outputs=dict(regex="[a-z]*"), ignore_eos=False)
INNOCENT = [generate("json", PROMPT, **JSON), generate("choice", PROMPT, **CHOICE), generate("plain", PROMPT)]


def all_bits(samples: dict[tuple[str, int], SampleOutput]) -> dict[tuple[str, int], object]:
    return {key: (bits(sample), sample.finish_reason) for key, sample in samples.items() if key[0] != "hostile"}


def child_of(engine: Engine) -> int:
    assert engine.grammars._child is not None
    return engine.grammars._child.pid


def end_children(engine: Engine) -> None:
    for each in (engine.grammars._child, engine.grammars._spare):
        assert each is not None
        each.end()


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> dict[tuple[str, int], object]:
    samples = run(make_engine(tiny_llama), INNOCENT)
    text = load_vocabulary(tiny_llama).decode(samples["choice", 0].token_ids)
    assert (text in CHOICES, samples["choice", 0].finish_reason, samples["choice", 0].stop_reason) == (True, "stop", 2)
    return all_bits(samples)


def test_a_killed_child_changes_no_bit(expected: dict[tuple[str, int], object], tiny_llama: Path) -> None:
    engine, outputs, killed = make_engine(tiny_llama), list[Any](), set[int]()
    for request in INNOCENT:
        engine.add(request)
    for step in range(40):
        if step % 3 == 2 and engine.has_unfinished:
            killed.add(child_of(engine))
            os.kill(child_of(engine), signal.SIGKILL)
        outputs += engine.step() if engine.has_unfinished else []
    assert all_bits({(each.request_id, each.index): each for each in outputs}) == expected
    assert len(killed) > 2, "premise"


def test_a_spare_child_takes_over_if_it_lives(tiny_llama: Path) -> None:
    grammars = Grammars(tiny_llama, 512, [2])
    place = grammars.open(Grammar(regex="a+"), [2], [], is_given=False)
    grammars.fill([(place, ())])
    expected = place.next_mask().tobytes()
    for has_spare in (True, False):
        child, spare = grammars._child, grammars._spare
        assert child is not None and spare is not None
        for dead in (child, spare)[: 2 - has_spare]:
            os.kill(dead.pid, signal.SIGKILL)
            while dead.is_alive:
                time.sleep(0.001)
        grammars.fill([(place, ())])
        assert (place.error, place.next_mask().tobytes(), len(place.masks)) == (None, expected, 1)
        assert (grammars._child is spare) == has_spare
    grammars.close()


def test_masks_are_found_while_the_layers_are_computed(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, compute, in_flight = make_engine(tiny_llama), ModelRunner.run, list[bool]()

    def look(self: ModelRunner, *arguments: Any) -> Any:
        in_flight.append(all(place.wait is not None for place in engine.grammars._places))
        return compute(self, *arguments)

    monkeypatch.setattr(ModelRunner, "run", look)
    run(engine, [generate("json", PROMPT, **JSON)])
    assert len(in_flight) > 2 and all(in_flight)


def test_a_child_that_dies_between_a_call_and_its_reply_changes_no_mask(tiny_llama: Path) -> None:
    grammars = Grammars(tiny_llama, 512, [2])
    places = [grammars.open(Grammar(choice=("yes", "no")), [2], [], is_given=False) for _ in range(2)]
    grammars.begin(places)
    expected = [place.next_mask().tobytes() for place in places]
    for _ in range(3):
        grammars.begin(places)
        assert all(place.wait is not None for place in places) and grammars._child is not None
        os.kill(grammars._child.pid, signal.SIGKILL)
        assert [place.next_mask().tobytes() for place in places] == expected
        assert [place.error for place in places] == [None, None]
    grammars.close()


def test_an_unread_reply_is_read_before_the_next_call(tiny_llama: Path) -> None:
    """A step that fails asks for no mask."""
    grammars = Grammars(tiny_llama, 512, [2])
    letters, digits = (grammars.open(Grammar(regex=text), [2], [], is_given=False) for text in ("a+", "1+"))
    grammars.begin([letters])
    grammars.begin([digits])
    assert letters.wait is None and digits.wait is not None
    assert not np.array_equal(letters.next_mask(), digits.next_mask())
    grammars.fill([(digits, ()), (letters, ())])
    assert letters.error is None and digits.error is None
    grammars.close()


def test_only_child_processes_load_the_tokenizer(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a large vocabulary, llguidance holds Python's lock for seconds, and every other request would wait."""
    parent, load = os.getpid(), TokenText.__init__

    def load_elsewhere(*args: Any) -> None:
        assert os.getpid() != parent
        load(*args)

    monkeypatch.setattr(TokenText, "__init__", load_elsewhere)
    with pytest.raises(AssertionError):
        TokenText("{}", 512, [2])
    grammars = Grammars(tiny_llama, 512, [2])
    grammars.prepare(Grammar(regex="a+"))
    grammars.close()


def test_a_tokenizer_that_cannot_be_loaded_refuses_grammars(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    grammars = Grammars(tmp_path, 512, [2])
    for _ in range(2):
        with pytest.raises(
            InvalidRequestError, match="the tokenizer is not supported", check=about("structured_outputs")
        ):
            grammars.prepare(Grammar(regex="a+"))
    assert grammars._trial is None


def test_many_masks_take_several_calls(expected: Any, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask has 64 bytes."""
    engine = make_engine(tiny_llama)
    for request in INNOCENT:
        engine.add(request)
    before = child_of(engine)
    monkeypatch.setattr(masks, "_MOST_CALL_BYTES", 2 * 64)
    monkeypatch.setattr(child_process, "MAX_REPLY_BYTES", 3 * 64)
    found = {(each.request_id, each.index): each for each in drain(engine) if isinstance(each, SampleOutput)}
    assert all_bits(found) == expected and child_of(engine) == before


def test_a_long_text_has_more_time(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, the grammar would seem to be at fault, and would be refused for all users."""
    seconds, begin = list[float](), child_process.ChildProcess.begin

    def listen(self: Any, message: bytes, limit: float, *args: Any, **kwargs: Any) -> Any:
        seconds.append(limit)
        return begin(self, message, limit, *args, **kwargs)

    grammars = Grammars(tiny_llama, 512, [2])
    grammar, [letter] = Grammar(regex="a+"), load_tokenizer(tiny_llama / "tokenizer.json").encode("a").ids
    grammars.prepare(grammar)
    monkeypatch.setattr(child_process.ChildProcess, "begin", listen)
    for count in (1, 50_001):
        grammars.open(grammar, [2], [letter] * count, is_given=False)
    grammars.close()
    assert len(seconds) == 2 and seconds[1] - seconds[0] == pytest.approx(5.0)


def test_samples_end_if_no_process_can_be_started(
    expected: Any, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tiny_llama)
    for request in INNOCENT:
        engine.add(request)
    outputs = engine.step()
    end_children(engine)

    def refuse(*_: Any, **__: Any) -> None:
        raise UnavailableError("cannot start another process")

    with monkeypatch.context() as scarce:
        scarce.setattr(masks, "ChildProcess", refuse)
        outputs += drain(engine)
    found = {(each.request_id, each.index): each for each in outputs if isinstance(each, SampleOutput)}
    assert all_bits(found)["plain", 0] == expected["plain", 0]
    for key in (("json", 0), ("json", 1), ("choice", 0)):
        assert (found[key].finish_reason, found[key].error) == ("error", "cannot start another process")
    assert all_bits(run(engine, INNOCENT)) == expected


def hang(walk: Walk) -> None:
    time.sleep(60)


def crash(walk: Walk) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(walk: Walk) -> None:
    raise GrammarError("the limit of parser items was reached")


@pytest.mark.parametrize(("deed", "error"), [(hang, "or crashes"), (crash, "or crashes"), (fail, "the limit of")])
def test_a_grammar_that_fails_in_mid_run_ends_alone(
    deed: Any, error: str, expected: Any, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The samples of the hostile grammar have the stop token 7. Their walks fail after two tokens."""

    class Hostile(Walk):
        is_hostile = False

        def __init__(self, template: Any, ending: Sequence[int]) -> None:
            super().__init__(template, ending)
            self.is_hostile = 7 in ending

        def masks(self, following: Sequence[int]) -> np.ndarray:
            if self.is_hostile and self.num_tokens == 2:
                deed(self)
            return super().masks(following)

    monkeypatch.setattr(child, "Walk", Hostile)
    monkeypatch.setattr(masks, "STEP_SECONDS", 0.5)
    monkeypatch.setattr(masks, "COMPILE_SECONDS", 0.5)
    engine = make_engine(tiny_llama)
    hostile = generate("hostile", PROMPT, **HOSTILE, n=2, min_tokens=3, stop_token_ids=[7])
    found = run(engine, [hostile, *INNOCENT])
    assert all_bits(found) == expected
    for i in range(2):
        sample = found["hostile", i]
        assert (sample.finish_reason, len(sample.token_ids)) == ("error", 2) and error in str(sample.error)
    if deed is not fail:
        with pytest.raises(InvalidRequestError, match="or crashes", check=about("structured_outputs")):
            engine.add(hostile)


CHAIN = "".join(f"a{i} ::= a{i + 1}\n" for i in range(9_000))
BOMBS: dict[str, dict[str, Any]] = {
    "schema": dict(json={"enum": [{"a": i} for i in range(20_000)]}),
    "ebnf": dict(grammar=f'root ::= a0\n{CHAIN}a9000 ::= "x"'),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_and_remembered(name: str, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = BOMBS[name]
    monkeypatch.setattr(masks, "TRIAL", Limits(cpu_seconds=1, seconds=120, more_bytes=2**30))
    grammars = Grammars(tiny_llama, 512, [2])
    for _ in range(2):
        with pytest.raises(
            InvalidRequestError, match="it needs more than .* or crashes", check=about("structured_outputs")
        ):
            grammars.prepare(Grammar(**bomb))
        assert grammars._trial is None and grammars._child is None
    grammars.prepare(Grammar(regex="a+"))
    assert grammars.find(Grammar(**bomb)) is not None and grammars.find(Grammar(regex="a")) is None


def test_a_grammar_stays_prepared_for_the_request_that_waits(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, after many new grammars, the engine's thread would try this grammar again, between two steps."""
    engine, first, second = make_engine(tiny_llama), Grammar(regex="a+"), Grammar(regex="b+")
    monkeypatch.setattr(masks, "MOST_TEMPLATES", 1)
    held = engine.grammars.prepare(first)
    engine.grammars.prepare(second)
    assert list(engine.grammars._latest) == [second], "premise"
    monkeypatch.setattr(engine.grammars, "_try", None)
    engine.add(generate("a", PROMPT, structured_outputs=first, ignore_eos=False, max_tokens=3))
    del held
    assert engine.grammars.find(second) is None
    assert len(drain(engine)) == 1


@pytest.mark.parametrize(("owner", "work"), [(child, "_try"), (child._Masks, "open")])
def test_a_child_without_memory_is_replaced(
    owner: Any, work: str, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError

    grammars = Grammars(tiny_llama, 512, [2])
    with monkeypatch.context() as full:
        full.setattr(owner, work, fail)
        with pytest.raises(InvalidRequestError, match="or crashes"):
            grammars.prepare(Grammar(regex="a+"))
    grammars.prepare(Grammar(regex="b+"))


def test_without_the_package_a_grammar_is_refused(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "installed_version", lambda: None)
    engine = make_engine(tiny_llama)
    with pytest.raises(InvalidRequestError, match=r"pip install 'trueroll\[grammar\]'"):
        engine.add(INNOCENT[0])
    assert not engine.has_unfinished


def test_tokens_outside_the_grammar_are_refused(tiny_llama: Path) -> None:
    """The grammar may exclude the last token of a score. The log-prob of this token is then -inf."""
    engine = make_engine(tiny_llama)
    found = run(engine, [INNOCENT[1]])["choice", 0]
    whole = [*PROMPT, *found.token_ids]
    distribution = Distribution(structured_outputs=CHOICE["structured_outputs"])
    engine.add(ScoreRequest("s", np.array([*whole[:-1], 9], np.int32), distribution, start=len(PROMPT)))
    [score] = drain(engine)
    assert isinstance(score, ScoreOutput) and found.logprobs is not None
    assert score.logprobs[:-1].tobytes() == found.logprobs[:-1].tobytes() and score.logprobs[-1] == -np.inf
    wrong = np.array([*PROMPT, found.token_ids[0], 9, 9], np.int32)
    for request in (
        ScoreRequest("s", wrong, distribution, start=len(PROMPT)),
        GenerateRequest("g", wrong, generate("g", wrong, **CHOICE).params, num_prior_tokens=3),
    ):
        with pytest.raises(InvalidRequestError, match="excludes token 9 at index 1", check=about("structured_outputs")):
            engine.add(request)
    assert not engine.has_unfinished


def test_a_score_ends_in_an_error_if_its_masks_cannot_be_computed(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tiny_llama)
    text = np.array([*PROMPT, *run(engine, [INNOCENT[1]])["choice", 0].token_ids], np.int32)
    request = ScoreRequest("s", text, Distribution(structured_outputs=CHOICE["structured_outputs"]), start=len(PROMPT))
    engine.add(request)
    end_children(engine)
    monkeypatch.setattr(child, "Walk", None)
    [output] = drain(engine)
    assert isinstance(output, ScoreOutput) and output.finish_reason == "error"
    assert output.error == "structured_outputs: TypeError: 'NoneType' object is not callable"
    assert len(output.logprobs) == 0
