"""`trueroll audit MODEL URL` names exactly the planted fault of an engine, over the wires of vLLM and SGLang."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from functools import cache, partial
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from foreign_engines import ForeignServer, foreign_server, served
from http_fronts import front_end
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tiny import make_tiny_model
from trueroll.errors import ConfigError, ModelError, ProtocolError, UnavailableError
from trueroll.rollout import launch_worker
from trueroll.rollout.foreign import audit as module
from trueroll.rollout.foreign import trainer, wire
from trueroll.rollout.foreign.audit import HIT, HIT_IN_COMPANY, MISS, MISS_IN_COMPANY, EngineAudit, audit_engine
from trueroll.rollout.foreign.engines import Ask, CompletionsEngine, find_engine
from trueroll.rollout.foreign.wire import Wire
from trueroll.rollout.tools import cli

PROMPTS = [[*range(3, 43)], [*range(7, 19)]]
MAX_TOKENS = 6
KEY = "a-key-of-sixteen-characters"
_load = cache(trainer.load_trainer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("foreign") / "model", dtype="bfloat16")


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name a proxy that does not exist: an audit must not use it."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")


@pytest.fixture(autouse=True)
def small_audits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Audits with few requests, which read each checkpoint once for all tests."""
    monkeypatch.setattr(module, "NUM_OTHERS", 2)
    monkeypatch.setattr(trainer, "load_trainer", lambda *arguments: deepcopy(_load(*arguments)))


def audited(folder: Path, **faults: Any) -> EngineAudit:
    served_folder = faults.pop("served", folder)
    with foreign_server(ForeignServer(served_folder, **faults)) as server:
        found = audit_engine(str(folder), server.url, PROMPTS, MAX_TOKENS)
    assert server.num_received == 3 * server.num_asks + 2 * server.num_together
    return found


def names(found: EngineAudit) -> list[str]:
    return [cause.name for cause in found.causes]


@pytest.mark.parametrize("kind, told", [("vllm", "processed"), ("sglang", "temperature")])
def test_an_engine_that_computes_as_the_trainer_has_no_cause(folder: Path, kind: Any, told: Any) -> None:
    found = audited(folder, kind=kind, told=told, tells_hits=True)
    assert (names(found), found.dtype, found.distribution) == ([], "bfloat16", told), str(found)
    assert [each.plain.num_different for each in found.conditions] == [0] * 5
    assert all(each.aligned.num_different for each in found.conditions), "transformers and aligned ops differ"
    prompts = 2 * sum(map(len, PROMPTS))
    assert [each.num_cached for each in found.conditions] == [0, 0, prompts, 0, prompts]
    lines = str(found).splitlines()
    assert len(lines) == 7 and lines[-1] == "No cause of differences was found."
    assert lines[1].startswith("miss, alone: aligned ") and "transformers 0 of 24 differ" in lines[1]
    assert "against miss, alone: 0 of 12 greedy tokens and the bits of 0 log-probs change" in lines[5]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_another_dtype_is_named(folder: Path, dtype: str) -> None:
    found = audited(folder, dtype=getattr(torch, dtype))
    assert (names(found), found.dtype) == (["dtype"], dtype), str(found)
    assert f"the differences have the size of {dtype}" in str(found) and "--dtype bfloat16" in str(found)
    assert not found.conditions[0].plain.num_different, "the trainer in the engine's dtype has the engine's bits"


def test_other_weights_are_named(folder: Path, tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.up_proj.weight.mul_(1.5)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    found = audited(folder, served=tmp_path)
    assert names(found) == ["weights"], str(found)


def test_log_probs_without_the_temperature_are_named(folder: Path) -> None:
    found = audited(folder, told="raw")
    assert (names(found), found.distribution) == (["distribution"], "raw"), str(found)
    assert not found.conditions[0].plain.num_different and "--logprobs-mode processed_logprobs" in str(found)


@pytest.mark.parametrize(
    "shifted, cause", [("hits", "cache"), ("company", "batch"), ("again", "nondeterminism"), ("all", "rounding")]
)
def test_circumstances_that_change_bits_are_named(folder: Path, shifted: Any, cause: str) -> None:
    found = audited(folder, shifted=shifted)
    assert names(found) == [cause], str(found)
    changed = [each.name for each in found.conditions if each.change]
    expected = {"hits": [HIT, HIT_IN_COMPANY], "company": [MISS_IN_COMPANY, HIT_IN_COMPANY], "all": []}
    assert changed == expected.get(shifted, [each.name for each in found.conditions if each.name != MISS])
    assert all(each.change.num_bits == 12 and not each.change.num_other for each in found.conditions if each.change)


def test_an_engine_that_ignores_salts_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="has cache hits for requests with new salts"):
        audited(folder, keeps_salts=False, tells_hits=True)


def test_a_fleet_of_trueroll_has_the_bits_of_the_aligned_trainer(
    folder: Path, tmp_path: Path, forked_workers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "audit_engine", partial(audit_engine, prompts=PROMPTS, max_tokens=MAX_TOKENS))
    key_file, picture = tmp_path / "key", tmp_path / "audit.png"
    key_file.write_text(f"{KEY}\n")
    key_file.chmod(0o600)
    settings: dict[str, Any] = {"num_blocks": 64, "num_threads": 1}
    with launch_worker(str(folder), **settings) as one, launch_worker(str(folder), **settings) as two:
        with front_end(f"{one.address},{two.address}", api_key_file=str(key_file)) as front:
            arguments = ["audit", str(folder), front.url]
            with pytest.raises(
                ProtocolError, match="HTTP status 401: .* give the server's API key with --api-key-file"
            ):
                CliRunner().invoke(cli.app, arguments, catch_exceptions=False)
            arguments += ["--api-key-file", str(key_file), "--plot", str(picture)]
            shown = CliRunner().invoke(cli.app, arguments)
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert lines[0].startswith("trueroll (") and lines[0].endswith("after its filters; trainer in bfloat16")
    assert [line.partition(": ")[2].startswith("aligned 0 of 24 differ") for line in lines[1:6]] == [True] * 5
    assert all("0 of 12 greedy tokens and the bits of 0 log-probs change" in line for line in lines[2:6])
    assert "; 0 cached prompt tokens" in lines[1] and "; 64 cached prompt tokens" in lines[3]
    assert picture.read_bytes().startswith(b"\x89PNG")


class _Rude(BaseHTTPRequestHandler):
    """Answers each path with another fault. Refuses requests to /key without the key."""

    def do_GET(self) -> None:
        if self.path in ("/silent", "/slow"):
            if self.path == "/slow":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n[")
            self.rfile.read(1)  # until the client gives up
            return
        if self.path == "/dead":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n[1")
            return
        if self.path == "/line":
            self.wfile.write(b"\x1b[2J" + b"x" * 1000 + b"\r\n")
            return
        statuses = {"/redirect": 302, "/missing": 404, "/key": 401}
        has_key = self.headers["Authorization"] == "Bearer the-key"
        self.send_response(200 if has_key else statuses.get(self.path, 200))
        self.send_header("Location", "/v1/models")
        self.end_headers()
        try:
            self.wfile.write({"/long": b"[" + b" " * 64, "/deep": b"[" * 100_000}.get(self.path, b'{"data": []}'))
        except OSError:
            pass

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def rude() -> Iterator[str]:
    with served(_Rude) as url:
        yield url


REFUSED = {
    "/redirect": "GET /redirect was refused with HTTP status 302",
    "/missing": "HTTP status 404: .* give the URL of a server of vLLM, SGLang or `trueroll http`",
    "/key": "HTTP status 401: .* give the server's API key with --api-key-file",
    "/deep": "the answer to GET /deep is not valid JSON",
}


def test_answers_are_bounded_and_checked(rude: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProtocolError, match="the answer to /v1/models does not have the documented form"):
        find_engine(Wire(rude))
    for path, text in REFUSED.items():
        with pytest.raises(ProtocolError, match=text):
            Wire(rude).get(path)
    with pytest.raises(UnavailableError, match="did not answer within 0.05 s, for GET /silent"):
        Wire(rude, seconds=0.05).get("/silent")
    with pytest.raises(UnavailableError, match="did not finish its answer to GET /slow"):
        Wire(rude, seconds=0.2).get("/slow")
    with pytest.raises(UnavailableError, match=r"sent no complete answer \(IncompleteRead"):
        Wire(rude).get("/dead")
    with pytest.raises(UnavailableError, match=r"\\x1b\[2J") as caught:
        Wire(rude).get("/line")
    assert len(str(caught.value)) < 500 and str(caught.value).isprintable()
    with pytest.raises(UnavailableError, match="cannot be reached"):
        Wire("http://127.0.0.1:1").get("/v1/models")
    assert Wire(rude, "the-key").get("/key") == {"data": []}
    monkeypatch.setattr(wire, "MAX_ANSWER_BYTES", 64)
    with pytest.raises(ProtocolError, match="the answer to GET /long has more than 64 bytes"):
        Wire(rude).get("/long")


def test_a_tls_handshake_ends_in_time() -> None:
    """The server accepts the connection, and sends a byte now and then that never completes a record."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            with listener.accept()[0] as connection, suppress(OSError):
                for byte in b"\x16\x03\x03\x40\x00" + bytes(200):
                    connection.sendall(bytes([byte]))
                    time.sleep(0.05)

        thread = Thread(target=drip)
        thread.start()
        with pytest.raises(UnavailableError, match=r"did not answer within 0.3 s, for GET /v1/models"):
            Wire(f"https://127.0.0.1:{listener.getsockname()[1]}", seconds=0.3).get("/v1/models")
        thread.join()


def test_ports_and_hosts_of_urls(rude: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[tuple[str, int]]()

    def connect(self: HTTPConnection) -> None:
        found.append((self.host, self.port))
        raise ConnectionRefusedError

    with pytest.raises(UnavailableError, match="cannot be reached"):
        Wire(f"http://{'a' * 64}.invalid").get("/")  # too long for a part of a domain name
    monkeypatch.setattr(HTTPConnection, "connect", connect)
    for url in ("http://[::1]", "https://[::1]", "http://[::1]:8000", "https://a"):
        with pytest.raises(UnavailableError):
            Wire(url).get("/")
    assert found == [("::1", 80), ("::1", 443), ("::1", 8000), ("a", 443)]


ASK = Ask((1, 2, 3), 2, 0.0, -1, "salt")
WRONG = {
    "a log-prob too few": ({"tokens": ["token_id:1", "token_id:2"], "token_logprobs": [-1.0]}, 0),
    "too many tokens": ({"tokens": ["token_id:1"] * 3, "token_logprobs": [-1.0] * 3}, 0),
    "no token": ({"tokens": [], "token_logprobs": []}, 0),
    "text instead of ids": ({"tokens": ["a"], "token_logprobs": [-1.0]}, 0),
    "a huge id": ({"tokens": [f"token_id:{2**31}"], "token_logprobs": [-1.0]}, 0),
    "NaN": ({"tokens": ["token_id:1"], "token_logprobs": [float("nan")]}, 0),
    "-Infinity": ({"tokens": ["token_id:1"], "token_logprobs": [float("-inf")]}, 0),
    "a probability": ({"tokens": ["token_id:1"], "token_logprobs": [0.5]}, 0),
    "null": ({"tokens": ["token_id:1"], "token_logprobs": [None]}, 0),
    "a huge integer": ({"tokens": ["token_id:1"], "token_logprobs": [-(10**400)]}, 0),
    "more cached tokens than the prompt has": ({"tokens": ["token_id:1"], "token_logprobs": [-1.0]}, 4),
    "no log-probs": (None, 0),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_samples_of_another_form_are_refused(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told, cached = WRONG[wrong]
    answer = {"choices": [{"logprobs": told}], "usage": {"prompt_tokens_details": {"cached_tokens": cached}}}
    monkeypatch.setattr(Wire, "post", lambda *_: json.loads(json.dumps(answer)))
    with pytest.raises(ProtocolError, match="the answer to /v1/completions does not have the documented form"):
        CompletionsEngine(Wire("http://a"), "vLLM", "m", None).sample(ASK)


def test_a_model_with_another_vocabulary_is_refused(folder: Path) -> None:
    with foreign_server(ForeignServer(folder)) as server:
        server.get = lambda path: {"data": [{"id": "tiny", "owned_by": "vllm"}]}  # type: ignore[method-assign]
        server.post = lambda path, body: {  # type: ignore[method-assign]
            "choices": [{"logprobs": {"tokens": ["token_id:100000"], "token_logprobs": [-1.0]}}]
        }
        with pytest.raises(ConfigError, match="the engine drew token 100000; give the checkpoint of the model tiny"):
            audit_engine(str(folder), server.url, PROMPTS, MAX_TOKENS)


def test_a_checkpoint_in_another_dtype_is_refused(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "float8_e4m3fn"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="float8_e4m3fn"):
        trainer.Trainer(str(tmp_path))


@pytest.mark.parametrize(
    "url", ["http://", "http://a/v1", "http://a?b", "http://a:b", "http://a b", "ftp://a", "http://u:p@a"]
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"give http://HOST:PORT"):
        Wire(url)


def test_other_servers_are_refused(folder: Path) -> None:
    with foreign_server(ForeignServer(folder)) as server:
        server.kind = "llamacpp"  # type: ignore[assignment]
        with pytest.raises(ConfigError, match="owned by 'llamacpp'; an audit supports the servers of vllm, sglang"):
            find_engine(Wire(server.url))
