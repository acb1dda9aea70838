"""Records of sessions: what they contain, which files are refused, and what a replay finds."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_templates import TEMPLATES, make_chat_folder
from rich.console import Console
from serving import WorkerOnThread
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tiny import make_tiny_model
from trueroll.engine.config import EngineConfig
from trueroll.engine.request import Columns, SampleOutput, WeightSpan, as_fields, empty_columns
from trueroll.errors import IllegalStateError, InvalidRequestError, WorkerLostError
from trueroll.rollout import FleetClient, RolloutClient, SamplingParams, WeightPublisher
from trueroll.rollout.config import WorkerConfig
from trueroll.rollout.sessions import record as records
from trueroll.rollout.sessions.forest import Drawn, Forest, place_of
from trueroll.rollout.sessions.messages import Message
from trueroll.rollout.sessions.record import read_record
from trueroll.rollout.sessions.session import Session
from trueroll.rollout.sessions.templates import Opening
from trueroll.rollout.text import TextModel
from trueroll.rollout.tools import cli
from trueroll.rollout.tools import replay as replaying
from trueroll.rollout.worker.process import load_engine

END = "<|im_end|>"
SECRET = "a-salt-that-no-record-tells"
STOP = '\\"]}[[,:é'
"""Characters that the bounds on a line must not count, because they are in a string."""


def user(text: str) -> dict[str, Any]:
    return dict(role="user", content=text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("record")
    return make_chat_folder(root / "chat", TEMPLATES["qwen2_5"], END, make_tiny_model("qwen3_moe", root / "model"))


@pytest.fixture(scope="module")
def workers(folder: Path) -> Iterator[list[RolloutClient]]:
    """Clients of two workers with the same weights."""
    config = EngineConfig(model=str(folder), num_blocks=256, num_threads=1, backend="cpu")
    with ExitStack() as stack:
        running = [WorkerOnThread(WorkerConfig(), lambda: load_engine(config)) for _ in range(2)]
        yield [stack.enter_context(RolloutClient(each.address)) for each in running]
        for each in running:
            each.worker.drain()
            each.join()
            assert each.error is None


@pytest.fixture(scope="module")
def content(workers: list[RolloutClient], folder: Path) -> bytes:
    """The record of a session with a branch, a twin, all kinds of columns, and answers that were cut and that ended."""
    with closing(TextModel(str(folder))) as texts:
        stop = texts.encode(END, False)[0]
        shared: dict[str, Any] = dict(max_tokens=6, temperature=0.7, top_k=50, cache_salt=SECRET, stop=(STOP,))
        sampling = SamplingParams(**shared, logit_bias=((stop, 9.0),), return_routed_experts=True)
        session = Session(workers[0], texts, seed=3, sampling=sampling)
        history = [user("go")]
        for i in range(4):
            own: dict[str, Any] = dict(top_logprobs=2, target_token_ids=(1, 2)) if i == 1 else {}
            answer = session.chat(history, return_sampling_mask=i == 2, ignore_eos=i == 3, **own)
            history += [answer.message, user("more words")]
        session.chat([*history[:3], user("a branch")])
        session.chat(history[:1])
        session.close()
        content = session.record()
        found = read_record(io.BytesIO(content))
        assert [request.node for request in found.requests] == [
            node.id for node in session._session._forest.drawn_nodes()
        ]
        told = [(entry["prompt_token_ids"], entry["generation_token_ids"]) for entry in session.token_entries()]
        assert [(each.prompt_token_ids(), each.sample.token_ids) for each in found.requests] == told
        ends = {each.sample.finish_reason for each in found.requests}
        assert ends == {"stop", "length"} and (found.model, found.seed) == (str(folder), 3)
        return content


def replayed(content: bytes, client: RolloutClient, version: int | None = None) -> tuple[bool, str]:
    console = Console(file=io.StringIO(), width=250)
    passed = replaying.replay(read_record(io.BytesIO(content)), client, version, console)
    assert isinstance(console.file, io.StringIO)
    return passed, console.file.getvalue()


def changed(content: bytes, number: int, change: Callable[[dict[str, Any]], None]) -> bytes:
    """Return a record with a change of one line. The first line is 0."""
    lines = content.splitlines()
    line = json.loads(lines[number])
    change(line)
    lines[number] = json.dumps(line).encode()
    return b"\n".join(lines) + b"\n"


def flip(line: dict[str, Any], name: str, byte: int) -> None:
    """Flip the lowest bit of a byte of a column."""
    array = line["routed_experts"] if name == "routed_experts" else line["columns"][name]
    data = bytearray(base64.b64decode(array["data"]))
    data[byte] ^= 1
    array["data"] = base64.b64encode(data).decode()


def test_a_record_has_neither_texts_nor_salts(content: bytes) -> None:
    assert SECRET.encode() not in content and b"more words" not in content
    assert all(json.loads(line)["params"]["stop"] == [STOP] for line in content.splitlines()[1:])


def test_another_worker_draws_the_recorded_bits(workers: list[RolloutClient], content: bytes) -> None:
    with FleetClient([client.asynchronous.address for client in workers]) as fleet:
        assert replayed(content, fleet)[0]
    for client in workers:
        passed, printed = replayed(content, client)
        assert passed and " 6 equal " in printed, printed
        assert "compared: 0 tokens, 0 log-probs, 0 other records and 0 ends differ; 0 requests failed\n" in printed


def test_the_command_replays_a_file(workers: list[RolloutClient], content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "record.jsonl"
    file.write_bytes(content)
    arguments = ["replay", str(file), workers[1].asynchronous.address]
    assert CliRunner().invoke(cli.app, arguments).exit_code == 0
    assert CliRunner().invoke(cli.app, [*arguments, "--weight-version", "5"]).exit_code == 1
    file.write_bytes(b"{}\n")
    refused = CliRunner().invoke(cli.app, arguments)
    assert refused.exit_code == 1 and "record: line 1: format: must be" in str(refused.exception)


@pytest.mark.parametrize(
    ("number", "name", "byte", "where", "counts"),
    [
        (4, "logprobs", 4, r"token 1: \d+ with log-prob 0x", "0 tokens, 1 log-probs, 0 other records"),
        (2, "top_logprobs", 0, "top_logprobs, row 0", "0 tokens, 0 log-probs, 1 other records"),
        (3, "kept_token_ids", 0, "kept_token_ids, row 0", "0 tokens, 0 log-probs, 1 other records"),
        (1, "routed_experts", 0, "routed_experts, row 0", "0 tokens, 0 log-probs, 1 other records"),
    ],
)
def test_a_flipped_bit_is_found(
    workers: list[RolloutClient], content: bytes, number: int, name: str, byte: int, where: str, counts: str
) -> None:
    passed, printed = replayed(changed(content, number, lambda line: flip(line, name, byte)), workers[1])
    assert not passed and " 5 equal " in printed and counts in printed
    [row] = [line for line in printed.splitlines() if json.loads(content.splitlines()[number])["node"] in line]
    assert re.search(where, row), row


def test_other_tokens_ends_and_failures_are_found(workers: list[RolloutClient], content: bytes) -> None:
    def other_token(line: dict[str, Any]) -> None:
        line["token_ids"][-1] ^= 1

    def unknown_token(line: dict[str, Any]) -> None:
        line["new_token_ids"][0] = 10**6

    passed, printed = replayed(changed(content, 6, other_token), workers[1])
    assert not passed and "compared: 1 tokens, 0 log-probs, 0 other records and 0 ends differ" in printed
    passed, printed = replayed(changed(content, 6, lambda line: line.update(stop_reason="x")), workers[1])
    assert not passed and "0 other records and 1 ends differ" in printed and "end: " in printed
    passed, printed = replayed(changed(content, 6, lambda line: line["params"].update(max_tokens=1)), workers[1])
    assert not passed and "became no token" in printed
    passed, printed = replayed(changed(content, 6, unknown_token), workers[1])
    assert not passed and "1 requests failed" in printed and "failed: " in printed and " 5 equal " in printed


def test_requests_of_other_weights_are_told_apart(workers: list[RolloutClient], content: bytes, folder: Path) -> None:
    node = json.loads(content.splitlines()[3])["node"]
    other = changed(content, 3, lambda line: line.update(weight_versions=[[0, 0, 1], [4, 1, len(line["token_ids"])]]))
    passed, printed = replayed(other, workers[1])
    assert passed and " 5 equal " in printed
    reason = "version 0 and 4 of the weights drew them, not version 0"
    assert f"1 requests not compared, because {reason}: {node}\n" in printed
    kept = changed(content, 3, lambda line: line.update(old_kv=[[0, 1, len(line["token_ids"])]]))
    passed, printed = replayed(kept, workers[1])
    assert passed and " 5 equal " in printed
    assert "1 requests not compared, because some tokens were drawn over" in printed
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with WeightPublisher("shared") as publisher:
        publisher.connect([workers[1].asynchronous.address])
        publisher.push(model, version=4)
        passed, printed = replayed(content, workers[1])
        assert not passed and "6 requests not compared" in printed and "nothing was compared" in printed
        assert replayed(content, workers[1], version=0)[0], "the same weights under another number"
        with torch.no_grad():
            model.lm_head.weight.mul_(1.125)
        publisher.push(model, version=5)
        passed, printed = replayed(content, workers[1], version=0)
        assert not passed and " 0 log-probs" not in printed and "nothing was compared" not in printed


def test_requests_of_adapters_are_not_replayed(workers: list[RolloutClient], content: bytes) -> None:
    adapted = changed(content, 2, lambda line: line.update(adapter="a"))
    is_equal, printed = replayed(adapted, workers[0])
    assert is_equal and "1 requests not compared, because the adapter 'a' drew them" in printed


def refusal(content: bytes) -> str:
    with pytest.raises(InvalidRequestError) as raised:
        read_record(io.BytesIO(content))
    return str(raised.value)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", "line 1: missing"),
        (b"\x80\n", "line 1: not valid JSON"),
        (b"[1]\n", r"line 1: must be a JSON object \(got \[1\]\)"),
        (b"[" * 10**5, "line 1: lists and objects are nested more than 8 deep"),
        (b'{"a":"' + b'\\"' * 10**5, "line 1: not valid JSON"),
        (b"{" + b",:" * 2**21 + b"1", "line 1: too many elements"),
        (b'{"format":"other"}\n', "line 1: format: must be 'trueroll session record'"),
        (b'{"format":"trueroll session record","version":2}\n', r"line 1: version: must be 1 \(got 2\)"),
        (b'{"format":"trueroll session record","version":1}\n', "line 1: model: field required"),
    ],
)
def test_what_is_no_record_is_refused(content: bytes, error: str) -> None:
    assert error.replace("\\", "") in refusal(content)


@pytest.mark.parametrize(
    ("number", "change", "error"),
    [
        (1, dict(extra=1), "line 2: extra: unknown parameter"),
        (1, dict(node=""), "line 2: node: must"),
        (1, dict(parent="0" * 32), "line 2: parent: '00000000"),
        (1, dict(drops_last=True), "line 2: parent: None is not"),
        (1, dict(new_token_ids=[]), "line 2: new_token_ids: the prompt must have 1 to"),
        (1, dict(new_token_ids=[2**31]), "line 2: new_token_ids.0: must be"),
        (1, dict(token_ids=[]), "line 2: token_ids: "),
        (1, dict(params=dict(top_q=1)), "line 2: params: top_q: unknown parameter"),
        (1, dict(params=dict(seed=1, n=2)), "line 2: params: n must be 1, and seed must be given (got 2 and 1)"),
        (1, dict(params=dict(n=1)), "line 2: params: n must be 1, and seed must be given (got 1 and None)"),
        (1, dict(params=dict(seed=1, logprobs=None)), "line 2: columns: must be [] (got ['logprobs'])"),
        (1, dict(weight_versions=[[0, 0, 1]]), "line 2: weight_versions: must cover the"),
        (1, dict(weight_versions=[[0, 0, 1, 2]]), "line 2: weight_versions.0: must"),
        (1, dict(old_kv=[[0, 0, 0]]), "line 2: old_kv: must name some of the"),
        (1, dict(finish_reason="abort"), "line 2: finish_reason: must be 'stop' or 'length'"),
        (1, dict(columns=dict(logprobs=dict(data="?", dtype="float32", shape=[1]))), "line 2: logprobs: data is not"),
        (1, dict(columns=dict(logprobs=dict(data="", dtype="float32", shape=[2**62] * 3))), "0 bytes are not float32"),
        (1, dict(columns=dict(logprobs=dict(data="", dtype="float32", shape=[0]))), "line 2: logprobs: must have"),
        (1, dict(columns=dict(logprobs=dict(data="", dtype="int32", shape=[0]))), "line 2: logprobs: must be float32"),
        (
            1,
            dict(columns=dict(logprobs=dict(data="", dtype="float32", shape=[0, 2**62, 2]))),
            "0 bytes are not float32",
        ),
        (1, dict(columns=dict(logprobs=1)), "line 2: logprobs: must be an object (got 1)"),
        (1, dict(columns={f"c{i}": 1 for i in range(2**16)}), "line 2: columns: must be ['logprobs'] (got ['c0', "),
        (1, dict(routed_experts=dict(data="", dtype="uint8", shape=[0, 1, 1])), "line 2: routed_experts: must be null"),
        (2, dict(parent=None), "line 3: routed_experts: must be null"),
    ],
)
def test_a_malformed_line_is_refused(content: bytes, number: int, change: dict[str, Any], error: str) -> None:
    assert error in refusal(changed(content, number, lambda line: line.update(change)))


@pytest.mark.parametrize("place", ["", "params", "routed_experts"])
def test_one_of_many_unknown_names_is_told(content: bytes, place: str) -> None:
    """pydantic alone would report an error for each name."""
    names = {f"name {i}": 1 for i in range(1000)}
    told = refusal(changed(content, 1, lambda line: (line[place] if place else line).update(names)))
    assert "name 0: unknown parameter" in told and "name 1" not in told and "more" not in told


def drawn_with(**params: Any) -> Drawn:
    """A drawn message with 3 tokens of 3 versions."""
    sample = SampleOutput(
        request_id="r",
        index=0,
        token_ids=[1, 2, 3],
        logprobs=np.zeros(3, np.float32),
        finish_reason="stop",
        seed=1,
        num_cached_tokens=0,
        weight_versions=tuple(WeightSpan(i, i, i + 1) for i in range(3)),
        stop_reason=3,
    )
    return Drawn(Opening("", "", (5, 6)), 2, sample, b"", 0, SamplingParams(**params))


def record_of(*drawn: Drawn) -> bytes:
    """The record of a session with these answers to the same message."""
    forest, message = Forest(1, 100, 2**30), Message({"role": "user", "content": "go"})
    for each in drawn:
        base, _ = forest.find("", [])
        ordinal = forest.reserve(place_of(base, [message]), 1)
        forest.add(base, [message], Message({"role": "assistant", "content": "a"}), replace(each, ordinal=ordinal))
    return records.write_record(forest, "m", 1)


@pytest.mark.parametrize(
    "params",
    [
        {},
        dict(allowed_token_ids=range(1000), stop=STOP, stop_token_ids=range(1000)),
        dict(logit_bias=dict.fromkeys(range(1000), 1.0), bad_words_token_ids=[[i] for i in range(1000)]),
        dict(target_token_ids=range(1000), stop=[f"{i}{STOP}" for i in range(64)]),
        dict(structured_outputs=dict(choice=[f"{i}{STOP}" for i in range(1000)])),
        dict(structured_outputs=dict(json={"type": "object", "properties": {str(i): {} for i in range(1000)}})),
    ],
)
def test_the_writer_counts_at_least_the_elements_that_the_reader_counts(params: dict[str, Any]) -> None:
    params = {name: [*value] if isinstance(value, range) else value for name, value in params.items()}
    drawn = drawn_with(**params)
    drawn = replace(drawn, sample=replace(drawn.sample, **as_fields(columns_with_rows(drawn.params, 3))))
    lines = record_of(drawn).splitlines()
    found, bound = records._checked_elements(2, lines[1]), records._num_elements(drawn)
    assert found <= bound and bound - found < 2 * records._OTHER_ELEMENTS
    [request] = read_record(io.BytesIO(b"\n".join(lines))).requests
    assert request.params.model_copy(update=dict(seed=None)) == drawn.params


def columns_with_rows(params: SamplingParams, rows: int) -> Columns:
    """The columns for parameters, filled with zeros."""
    return {name: np.zeros((rows, *each.shape[1:]), each.dtype) for name, each in empty_columns(params).items()}


def test_a_prompt_may_lack_the_last_token_of_its_parent() -> None:
    """As with GLM, where the token that ends an answer begins the next message."""
    forest, go = Forest(1, 100, 2**30), Message({"role": "user", "content": "go"})
    base, _ = forest.find("", [])
    openings = Opening("", "", (5, 6)), Opening("", "", (7,), dropped=True), Opening("", "", (8,))
    for opening, prompt_len in zip(openings, (2, 5, 9), strict=True):
        ordinal = forest.reserve(place_of(base, [go]), 1)
        drawn = replace(drawn_with(), opening=opening, prompt_len=prompt_len, ordinal=ordinal)
        base = forest.add(base, [go], Message({"role": "assistant", "content": "a"}), drawn)
    found = read_record(io.BytesIO(records.write_record(forest, "m", 1))).requests
    assert [each.prompt_token_ids() for each in found] == [
        [5, 6],
        [5, 6, 1, 2, 7],
        [5, 6, 1, 2, 7, 1, 2, 3, 8],
    ]
    assert [(each.drops_last, each.prompt_len) for each in found] == [(False, 2), (True, 5), (False, 9)]


def test_no_more_lines_are_written_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a record that is too large is bounded, too."""
    size, told = len(record_of(drawn_with())), []
    line_of = records._told
    monkeypatch.setattr(records, "_told", lambda *given: told.append(given) or line_of(*given))
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", size)
    with pytest.raises(IllegalStateError, match="bytes or more"):
        record_of(*[drawn_with()] * 20)
    assert len(told) == 2


@pytest.mark.parametrize("name", ["MAX_REQUESTS", "MAX_PROMPT_TOKENS", "MAX_ELEMENTS", "MAX_RECORD_ELEMENTS"])
def test_what_cannot_be_read_is_not_written(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, name, 1)
    with pytest.raises(IllegalStateError, match=r"would have \d+ .*\(limit 1\)"):
        record_of(*[drawn_with()] * 2)


def test_bounds(content: bytes, workers: list[RolloutClient], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = content.splitlines(keepends=True)
    assert "line 8: the node" in refusal(content + lines[6])
    with monkeypatch.context() as patch:
        patch.setattr(records, "MAX_REQUESTS", 5)
        assert "line 7: too many requests (limit 5)" in refusal(content)
    with monkeypatch.context() as patch:
        patch.setattr(records, "MAX_LINE_BYTES", len(lines[0]))
        assert f"line 2: too many bytes (limit {len(lines[0])})" in refusal(content)
    with monkeypatch.context() as patch:
        patch.setattr(records, "MAX_RECORD_BYTES", len(content) - 1)
        assert "line 7: the file has too many bytes" in refusal(content)
    num_elements = sum(records._checked_elements(1, line) for line in lines)
    with monkeypatch.context() as patch:
        patch.setattr(records, "MAX_RECORD_ELEMENTS", num_elements)
        assert len(read_record(io.BytesIO(content)).requests) == 6
        patch.setattr(records, "MAX_RECORD_ELEMENTS", num_elements - 1)
        assert "line 7: the file has too many elements" in refusal(content)
    with closing(TextModel(str(folder))) as texts:
        session = Session(workers[0], texts, seed=3, sampling=SamplingParams(max_tokens=2))
        assert read_record(io.BytesIO(session.record())).requests == []
        session.chat([user("go")])
        for name in ("MAX_REQUESTS", "MAX_LINE_BYTES", "MAX_RECORD_BYTES"):
            with monkeypatch.context() as patch, pytest.raises(IllegalStateError, match="record would have"):
                patch.setattr(records, name, 0)
                session.record()


def test_requests_are_sent_in_batches(
    workers: list[RolloutClient], content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = read_record(io.BytesIO(content)).requests
    assert [request.prompt_len for request in found] == [len(request.prompt_token_ids()) for request in found]
    monkeypatch.setattr(replaying, "BATCH_REQUESTS", 3)
    assert [len(batch) for batch in replaying._batches(found)] == [3, 3]
    monkeypatch.setattr(replaying, "BATCH_TOKENS", found[0].prompt_len + found[1].prompt_len)
    assert [len(batch) for batch in replaying._batches(found)][:2] == [2, 1]
    assert sum(replaying._batches(found), []) == found
    assert replayed(content, workers[0])[0]


def test_a_replay_that_ends_early_shows_what_it_found(
    workers: list[RolloutClient], content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lost:
        """A worker that is lost after the first call. The weights change during this call."""

        health = workers[0].health
        num_calls = 0

        def generate(self, prompts: list[list[int]], params: list[SamplingParams], errors: Any) -> list[Any]:
            self.num_calls += 1
            if self.num_calls > 1:
                return [WorkerLostError("worker: lost")] * len(prompts)
            first, second = workers[0].generate(prompts, params, errors=errors)
            [sample] = second.samples
            spans = WeightSpan(0, 0, 1), WeightSpan(9, 1, len(sample.token_ids))
            return [first, replace(second, samples=(replace(sample, weight_versions=spans),))]

    monkeypatch.setattr(replaying, "BATCH_REQUESTS", 2)
    console, found = Console(file=io.StringIO(), width=250), read_record(io.BytesIO(content))
    with pytest.raises(WorkerLostError, match="worker: lost"):
        replaying.replay(found, Lost(), 0, console)  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue()
    assert (
        " 1 equal " in printed and "1 requests not compared, because version 0 and 9 of the weights drew the" in printed
    )
    assert "4 requests not compared, because the replay ended early: " in printed


def test_columns_of_another_model_differ(content: bytes) -> None:
    """A worker of another model may return other columns, or columns of another shape or dtype."""
    request = read_record(io.BytesIO(content)).requests[0]
    sample, routes = request.sample, request.sample.routed_experts
    assert routes is not None and len(routes) > 2
    assert replaying.compare(request, sample).is_equal
    for other in (routes.astype(np.uint16), routes[:, :1], routes[:0], None):
        assert replaying.compare(request, replace(sample, routed_experts=other)).others == len(routes)
    assert replaying.compare(request, replace(sample, routed_experts=routes[:-2])).others == 2
