"""Valid requests for every path of a front end. The HTTP mutations start from these requests. No request of the corpus
aborts requests of other clients. The folders of weights named in requests contain no weights.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fuzz.corpus import GRAMMARS, MAX_TOKEN, NO_FOLDER


@dataclass(frozen=True)
class Request:
    """A request. `body`: None for a request without a body."""

    method: str
    target: str
    body: dict[str, Any] | None = None


@dataclass
class HttpCorpus:
    """Draws requests."""

    rng: random.Random

    def request(self) -> Request:
        [kind] = self.rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
        return kind(self)

    def completion(self) -> Request:
        rng = self.rng
        prompt = rng.choice((self._text(), self._tokens(), [self._tokens(), self._tokens()], [self._text()] * 2))
        body = {"prompt": prompt, "max_tokens": rng.randrange(1, 5), **self._sampling()}
        body |= {"logprobs": rng.choice((0, 2))} if rng.random() < 0.3 else {}
        body |= {"echo": True} if rng.random() < 0.1 else {}
        body |= self._stream() if "echo" not in body else {}
        return Request("POST", "/v1/completions", body | _of_prompt(body, "stream" in body))

    def chat(self) -> Request:
        rng = self.rng
        messages: list[dict[str, Any]] = [{"role": "user", "content": self._text()}]
        if rng.random() < 0.3:
            call = {"type": "function", "id": "c", "function": {"name": "f", "arguments": '{"a": 1}'}}
            messages += [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "3"}]
        if rng.random() < 0.2:
            messages[0]["content"] = [{"type": "text", "text": self._text()}] * 2
        body = {"messages": messages, "max_completion_tokens": rng.randrange(1, 5), **self._sampling()}
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        body |= {"tools": tools, "tool_choice": "auto"} if rng.random() < 0.2 else {}
        body |= {"chat_template_kwargs": {"thinks": True}} if rng.random() < 0.1 else {}
        body |= {"logprobs": True, "top_logprobs": 2} if rng.random() < 0.3 else {}
        return Request("POST", "/v1/chat/completions", body | self._stream())

    def generate(self) -> Request:
        params = {"max_tokens": self.rng.randrange(1, 5), "logprobs": 1, **self._sampling()}
        body = {"token_ids": self._tokens(), "sampling_params": params} | self._stream()
        params |= _of_prompt(params, "stream" in body)
        return Request("POST", "/inference/v1/generate", body)

    def sglang(self) -> Request:
        rng = self.rng
        params = {"max_new_tokens": rng.randrange(1, 5), "sampling_seed": rng.getrandbits(40), "ignore_eos": True}
        prompt = rng.choice(
            ({"input_ids": self._tokens()}, {"text": self._text()}, {"input_ids": [self._tokens()] * 2})
        )
        body = {**prompt, "sampling_params": params, "return_logprob": rng.random() < 0.5}
        body |= {"rid": "r"} if rng.random() < 0.2 else {}
        body |= {"stream": True} if rng.random() < 0.3 else {}
        others = (
            Request("POST", "/abort_request", {"rid": "r"}),
            Request("POST", "/continue_generation", {}),
            Request("POST", "/flush_cache"),
            Request("GET", rng.choice(("/server_info", "/model_info", "/get_weight_version", "/v1/loads"))),
            Request(
                "POST", "/pull_weights", {"source_dir": NO_FOLDER, "local_checkpoint_dir": "", "target_version": 9}
            ),
            Request("POST", "/load_lora_adapter", {"lora_name": "a", "lora_path": NO_FOLDER}),
            Request("POST", "/update_weights_from_tensor", {"serialized_named_tensors": ["gASV"]}),
        )
        return rng.choice(others) if rng.random() < 0.4 else Request("POST", "/generate", body)

    def vllm(self) -> Request:
        rng = self.rng
        version = {"target_version": 9, "version": 9, "sync_dir": NO_FOLDER, "uri": f"{NO_FOLDER}/delta-00000009"}
        update = rng.choice((version, {"path": NO_FOLDER}, {"names": ["a"], "dtype_names": ["x"], "shapes": [[1]]}))
        return rng.choice(
            (
                Request("POST", "/init_weight_transfer_engine", {"init_info": {"base_model_path": "x"}}),
                Request("POST", "/fetch_weights", version),
                Request("POST", "/start_weight_update"),
                Request("POST", "/update_weights", {"update_info": update}),
                Request("POST", "/finish_weight_update", {"weight_version": "9"}),
                Request("POST", "/skyrl/v1/load_lora_adapter", {"lora_name": "a", "lora_path": NO_FOLDER}),
                Request("GET", rng.choice(("/weight_info", "/get_world_size?include_dp=true"))),
                Request("POST", "/collective_rpc", {"method": "f", "kwargs": {}}),
            )
        )

    def tinker(self) -> Request:
        rng = self.rng
        prompt = {"chunks": [{"type": "encoded_text", "tokens": self._tokens()}]}
        sample = {"num_samples": 2, "prompt": prompt, "sampling_params": {"max_tokens": 3, "seed": 5}, "seq_id": 1}
        return rng.choice(
            (
                Request("POST", "/api/v1/client/config", {}),
                Request("POST", "/api/v1/create_session", {"tags": [], "sdk_version": "0.38.0"}),
                Request("POST", "/api/v1/create_sampling_session", {"session_id": "s", "base_model": "x"}),
                Request("POST", "/api/v1/asample", {"sampling_session_id": "s", **sample}),
                Request("POST", "/api/v1/retrieve_future", {"request_id": "f"}),
                Request("POST", "/api/v1/forward_backward", {"model_id": "m"}),
            )
        )

    def adapter(self) -> Request:
        name = self.rng.choice(("load", "unload"))
        folder = {"lora_path": NO_FOLDER} if name == "load" else {}
        return Request("POST", f"/v1/{name}_lora_adapter", {"lora_name": "a", **folder})

    def tokenize(self) -> Request:
        kind = self.rng.choice(({"prompt": self._text()}, {"messages": [{"role": "user", "content": self._text()}]}))
        return Request("POST", "/tokenize", {**kind, "return_token_strs": True})

    def detokenize(self) -> Request:
        return Request("POST", "/detokenize", {"tokens": self._tokens()})

    def look(self) -> Request:
        paths = (
            "/health",
            "/metrics",
            "/v1/models",
            "/v1/models/x",
            "/is_paused",
            "/is_sleeping",
            "/",
            "/ui",
            "/ui/page.js",
        )
        return Request("GET", self.rng.choice((*paths, "/ui/live?since=0&after=0", "/ui/group?group=1")))

    def page(self) -> Request:
        number = self.rng.randrange(1, 400)
        if self.rng.random() < 0.5:
            return Request("GET", f"/ui/tokens?group={number}&sample=0&start=0")
        return Request("POST", "/ui/score", {"group": number, "sample": 0})

    def lifecycle(self) -> Request:
        tags = self.rng.choice(("weights", "kv_cache"))
        targets = ("/pause?mode=keep", "/resume", f"/sleep?mode=keep&level=1&tags={tags}", "/wake_up")
        return Request("POST", self.rng.choice((*targets, "/reset_prefix_cache", "/resume", "/wake_up")))

    def update(self) -> Request:
        return Request("POST", "/update_weights", {"weight_dir": NO_FOLDER, "weight_version": 10**6})

    def _sampling(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"seed": self.rng.getrandbits(63)}
        for name, choices in _FIELDS.items():
            if self.rng.random() < 0.15:
                fields[name] = self.rng.choice(choices)
        if fields["seed"] % 5 < 2:
            name, grammars = (("structured_outputs", GRAMMARS), ("response_format", _FORMATS))[fields["seed"] % 5]
            fields |= {name: grammars[fields["seed"] % len(grammars)], "ignore_eos": False}
            fields |= {"allowed_token_ids": [], "bad_words": []}  # with a grammar, they may leave no token to draw
        if fields["seed"] % 7 == 1:
            fields |= {"target_token_ids": [3, 7, 3], "return_sampling_mask": True}
        return fields

    def _stream(self) -> dict[str, Any]:
        usage = {"stream_options": {"include_usage": True}} if self.rng.random() < 0.5 else {}
        return {"stream": True, **usage} if self.rng.random() < 0.4 else {}

    def _text(self) -> str:
        return self.rng.choice(("x", "Once upon a time", "é\U0001f600", "a" * 40, "<tool_call>", "\0", "say\nit"))

    def _tokens(self) -> list[int]:
        return [self.rng.randrange(MAX_TOKEN) for _ in range(1 + self.rng.randrange(8))]


def _of_prompt(fields: dict[str, Any], is_stream: bool) -> dict[str, Any]:
    """Return, rarely, fields for records of the prompt, which a stream does not have."""
    records = {"prompt_logprobs": 2, "prompt_logprob_start": 0, "prompt_sampling_mask": True}
    return records if fields["seed"] % 7 == 2 and not is_stream else {}


_FORMATS: tuple[dict[str, Any], ...] = (
    {"type": "text"},
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}},
)
_FIELDS: dict[str, tuple[Any, ...]] = {
    "n": (1, 2, 3),
    "temperature": (0, 0.5, 2.0),
    "top_p": (0.5, 1.0),
    "top_k": (0, -1, 40),
    "min_p": (0.0, 0.2),
    "min_tokens": (0, 1),
    "stop": ("a", ["ab", "c"], []),
    "stop_token_ids": ([], [3]),
    "ignore_eos": (True, False),
    "cache_salt": ("salt",),
    "frequency_penalty": (0, 2),
    "repetition_penalty": (1, 1.5),
    "logit_bias": ({}, {"7": 100, "3": -100.0}),
    "allowed_token_ids": ([], [3, 7, 9]),
    "bad_words": ([], ["a", "say\nit"], ["\U0001f600", " "]),
    "user": ("somebody",),
    "skip_special_tokens": (True, False),
}
_WEIGHTS: dict[Callable[[HttpCorpus], Request], float] = {
    HttpCorpus.completion: 18,
    HttpCorpus.chat: 15,
    HttpCorpus.generate: 15,
    HttpCorpus.sglang: 12,
    HttpCorpus.vllm: 4,
    HttpCorpus.tinker: 6,
    HttpCorpus.adapter: 2,
    HttpCorpus.tokenize: 8,
    HttpCorpus.detokenize: 6,
    HttpCorpus.look: 10,
    HttpCorpus.page: 5,
    HttpCorpus.lifecycle: 4,
    HttpCorpus.update: 1,
}
_ENDS_OTHERS = re.compile(rb"/(?:pause|sleep)(?!\?mode=keep[ &])|abort_all|/abort_requests")
"""Matches a request that would abort other clients' requests, which every client with access may send."""


def is_tame(data: bytes) -> bool:
    """Return whether the attack may send these bytes, because they do not abort requests of other clients."""
    return _ENDS_OTHERS.search(data) is None
