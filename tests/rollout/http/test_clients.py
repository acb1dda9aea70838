"""Clients with their own keys: the paths of each role, isolation of users' samples and prefixes, and the clients
file.
"""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from fake_engine import FakeEngine
from http_fronts import Front, error_of, front_end
from serving import serving

from trueroll.errors import ConfigError
from trueroll.rollout import RolloutClient, SamplingParams, WorkerProcess
from trueroll.rollout.http import clients, guard
from trueroll.rollout.http.agents.registry import Registry
from trueroll.rollout.http.app import make_app
from trueroll.rollout.http.clients import GENERATE_PATHS, Clients, clients_of
from trueroll.rollout.http.config import API_KEY_VARIABLE, HttpConfig
from trueroll.rollout.http.paths import SAMPLER, SESSION, TINKER
from trueroll.rollout.http.sglang.control import REFUSED
from trueroll.rollout.http.tinker.promises import Promises
from trueroll.rollout.http.tinker.routes import REST
from trueroll.rollout.http.vllm.routes import vllm_routes
from trueroll.rollout.network.keys import OWNER, Client

ALICE, BOB, OPERATOR = (f"{name}-0123456789abcdef" for name in ("alice", "bob", "operator"))
TEXT = f"# the clients\n\ngenerate alice {ALICE}\ngenerate bob {BOB}\ncontrol operator {OPERATOR}\n"
PROMPT = list(range(100, 164))
CONTROL_PATHS = {
    *("/pause", "/resume", "/sleep", "/wake_up", "/update_weights", "/reset_prefix_cache"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
}
SGLANG_CONTROL_PATHS = {
    *("/abort_request", "/pause_generation", "/continue_generation", "/flush_cache", "/pull_weights"),
    *("/release_memory_occupation", "/resume_memory_occupation", "/update_weights_from_disk", *REFUSED),
    *("/load_lora_adapter", "/unload_lora_adapter"),
}
SGLANG_PATHS = SGLANG_CONTROL_PATHS | {
    *("/generate", "/health_generate", "/server_info", "/get_server_info", "/model_info", "/get_model_info"),
    *("/get_weight_version", "/v1/loads", "/get_load"),
}
VLLM_PATHS = {path for path, *_ in vllm_routes(MagicMock())} - CONTROL_PATHS
TINKER_PATHS = {path for path in GENERATE_PATHS if path.startswith(f"{TINKER}/")}
BY_CAPABILITY = {
    *(SESSION, f"{SESSION}/samples", f"{SESSION}/reward", f"{SESSION}/v1/models", f"{SESSION}/v1/chat/completions"),
    *(f"{SESSION}/v1/messages", f"{SESSION}/v1/messages/count_tokens", f"{SESSION}/v1/responses"),
}
"""The paths that need a session's capability instead of a key."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "clients"
    file.write_text(TEXT)
    file.chmod(0o600)
    return file


@pytest.fixture(scope="module")
def named(worker: WorkerProcess, file: Path) -> Iterator[Front]:
    with front_end(worker.address, clients_file=str(file)) as front:
        yield front


def ask(front: Front, key: str, **fields: object) -> int:
    """Complete the prompt, and return how many of its tokens were cached."""
    front.key = key
    response = front.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2, "seed": 1, **fields})
    response.raise_for_status()
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_role_opens_only_its_paths(chat_model: Path, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    fake = FakeEngine()
    with (
        serving(fake) as running,
        front_end(running.address, clients_file=str(file), tokenizer=str(chat_model), sglang=True) as front,
    ):
        front.key = ALICE
        assert front.post("/v1/completions", {"prompt": [1]}).status_code == 200
        assert front.post("/generate", {"input_ids": [1]}).status_code == 200
        open_paths = ("/v1/models", "/v1/models/fake", "/metrics", "/is_paused", "/is_sleeping", "/ui/live", "/health")
        for path in (*open_paths, "/server_info", "/model_info", "/get_weight_version", "/v1/loads"):
            assert front.get(path).status_code == 200, path
        for path in sorted(CONTROL_PATHS | SGLANG_CONTROL_PATHS):
            refused = front.post(path)
            assert refused.status_code == 403 and error_of(refused)["code"] == "forbidden", path
            assert f"{path} needs the role 'control'" in error_of(refused)["message"]
        assert front.post("/%70ause").status_code == 403 and front.get("/nowhere").status_code == 404
        assert fake.actions == []
        front.key = OPERATOR
        assert front.post("/reset_prefix_cache").status_code == 200
        assert front.post("/v1/completions", {"prompt": [1]}).status_code == 200
        assert fake.actions == [("invalidate",)]
        for key in ("none", ALICE[:-1], f"{ALICE}x", f"{ALICE} {BOB}", "operator"):
            front.key = key
            assert front.post("/v1/completions", {"prompt": [1]}).status_code == 401
    assert not any(key in caplog.text for key in (ALICE, BOB, OPERATOR))


def test_a_new_path_is_open_to_control_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new path is open only to the role `control`, until the path is added to GENERATE_PATHS."""
    served: set[str] = set()
    monkeypatch.setattr("trueroll.rollout.http.app.Guard", lambda *given: served.update(given[-1]))
    monkeypatch.setattr("trueroll.rollout.http.app.Pages", lambda *given: FakePages())
    keyless = guard.OPEN_PATHS | GENERATE_PATHS | {"/v1/models/{name:path}"} | BY_CAPABILITY
    _app(Clients({}))
    assert served - keyless == CONTROL_PATHS and served & (SGLANG_PATHS | VLLM_PATHS | TINKER_PATHS) == set()
    _app(Clients({}), sglang=True)
    assert served - keyless == CONTROL_PATHS | SGLANG_CONTROL_PATHS
    assert served >= SGLANG_PATHS and served & (VLLM_PATHS | TINKER_PATHS) == set()
    served.clear()
    _app(Clients({}), vllm=True)
    assert served - keyless == CONTROL_PATHS | VLLM_PATHS - {"/weight_info", "/get_world_size", "/finish_session"}
    assert served >= VLLM_PATHS and served & TINKER_PATHS == set()
    served.clear()
    _app(Clients({}), promises=Promises(HttpConfig(address="ipc://x")))
    assert served - keyless == CONTROL_PATHS | {REST}, "REST only refuses"
    assert served >= TINKER_PATHS >= {SAMPLER} and len(TINKER_PATHS) == 12


def _app(clients: Clients, promises: Promises | None = None, **settings: Any) -> Any:
    config = HttpConfig(address="ipc://x", **settings)
    counters, registry = guard.Counters(), Registry(config)
    none: Any = None
    pages: Any = FakePages()
    return make_app(none, pages, none, config, clients, counters, registry, none, None, promises)


def test_a_path_with_a_line_end_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard knows no role for a path with a line end. If the line end were ignored, any client could reach the real
    path.
    """
    monkeypatch.setattr("trueroll.rollout.http.app.Pages", lambda *given: FakePages())
    named = Clients({ALICE.encode(): Client("alice", "generate")})
    app = _app(named)

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: MutableMapping[str, object]) -> None:
        statuses.extend([message["status"]] if "status" in message else [])

    statuses: list[object] = []
    for path in ("/pause", "/pause\n", "/update_weights\n", "/v1/completions\n"):
        headers = [(b"host", b"x"), (b"authorization", f"Bearer {ALICE}".encode())]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
        asyncio.run(app(scope, receive, send))  # type: ignore[arg-type]
    assert statuses == [403, 404, 404, 404]


class FakePages:
    """Stands in for the objects with handlers."""

    def __getattr__(self, name: str) -> object:
        return lambda request: None


def test_users_share_no_prefixes_unless_they_agree(named: Front, client: RolloutClient) -> None:
    assert ask(named, ALICE) == 0 and ask(named, ALICE) > 32
    assert ask(named, BOB) == 0, "bob cannot see whether alice sent this prompt"
    assert ask(named, OPERATOR) == 0
    assert ask(named, ALICE, cache_salt="between us") == 0 and ask(named, BOB, cache_salt="between us") > 32
    [group] = client.generate([PROMPT], SamplingParams(max_tokens=2, cache_salt="between us"))
    assert group.samples[0].num_cached_tokens == 0
    assert ask(named, BOB, cache_salt="x" * 1024) == 0


def test_a_user_cannot_name_the_salt_of_another_user() -> None:
    front_ends = Clients({}), Clients({})
    alice, bob = Client("alice", "generate"), Client("bob", "generate")
    plain = SamplingParams()
    own = [each.salted(alice, plain).cache_salt for each in front_ends]
    assert own[0] == front_ends[0].salted(alice, plain).cache_salt != own[1]
    assert own[0] != front_ends[0].salted(bob, SamplingParams(cache_salt=own[0])).cache_salt
    assert front_ends[0].salted(OWNER, plain) is plain


def test_the_page_shows_users_their_own_samples(named: Front) -> None:
    ask(named, ALICE, seed=7)
    mine = named.get("/ui/live").json()["groups"][-1]
    at = f"/ui/group?group={mine['id']}"
    assert named.get(at).json()["seed"] == "7"
    named.key = BOB
    assert mine["id"] not in [group["id"] for group in named.get("/ui/live").json()["groups"]]
    for refused in (
        named.get(at),
        named.get(f"/ui/tokens?group={mine['id']}"),
        named.post("/ui/score", {"group": mine["id"], "sample": 0}),
    ):
        assert refused.status_code == 404
    named.key = OPERATOR
    assert named.get(at).json()["seed"] == "7"
    named.key = ALICE
    scored = named.post("/ui/score", {"group": mine["id"], "sample": 0})
    assert scored.status_code == 200


def test_a_key_is_compared_with_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    compare = clients.hmac.compare_digest
    monkeypatch.setattr(clients.hmac, "compare_digest", lambda a, b: bool(compared.append(b)) or compare(a, b))
    named = Clients({key.encode(): Client(key[:3], "generate") for key in (ALICE, BOB, OPERATOR)})
    for header in (f"Bearer {ALICE}", f"bearer {OPERATOR}", f"Basic {BOB}", "Bearer", ""):
        compared.clear()
        found = named.find(header)
        assert len(compared) == 3 and {len(each) for each in compared} == {32}
        assert (found is not None) == header.lower().startswith("bearer ")
    assert ALICE.encode() not in repr(vars(named)).encode()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "has no clients; add at least one"),
        (f"generate alice {ALICE}\nboth bob {BOB}", "line 2: must contain a role"),
        (f"{ALICE} alice generate", "line 1: must contain a role"),
        (f"generate {ALICE}", "line 1: must contain a role"),
        (f"generate alice {ALICE}\ncontrol bob {ALICE}", "line 2: this key appears twice"),
        ("generate alice short", "line 1: a key must have at least 16 printable ASCII characters"),
        (f"generate alice {'é' * 20}", "line 1: a key must have at least 16 printable ASCII characters"),
        ("\n".join(f"generate alice {ALICE}{i}" for i in range(1025)), "1025 keys are too many"),
        ("#" * 2**18 + "#", "has more than 262144 bytes"),
    ],
)
def test_the_clients_file_is_checked_and_errors_do_not_reveal_its_keys(
    text: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    file = tmp_path / "clients"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match=fault) as caught:
        clients_of(HttpConfig(address="ipc://x", clients_file=str(file)))
    assert "0123456789abcdef" not in str(caught.value)


@pytest.mark.parametrize("bits", [stat.S_IRGRP, stat.S_IROTH, stat.S_IWGRP])
def test_a_file_that_others_can_read_is_refused(bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    file = tmp_path / "clients"
    file.write_text(TEXT)
    file.chmod(0o600 | bits)
    config = HttpConfig(address="ipc://x", host="0.0.0.0", clients_file=str(file))
    with pytest.raises(ConfigError, match="clients_file: .* a file that belongs to you and that only you can read"):
        clients_of(config)
    file.chmod(0o600)
    assert clients_of(config).find(f"Bearer {BOB}") == Client("bob", "generate")
    monkeypatch.setenv(API_KEY_VARIABLE, "another")
    with pytest.raises(ConfigError, match="clients_file: cannot be combined with the key in TRUEROLL_HTTP_API_KEY"):
        clients_of(config)
