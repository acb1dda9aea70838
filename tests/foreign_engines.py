"""A server that speaks the wire formats of vLLM and SGLang, and computes with a model of transformers.

The server's log-probs have the bits of a trainer that computes each sample in one forward pass. Faults are planted by
the fields of `ForeignServer`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoModelForCausalLM

NUM_ALONE = 3
"""An audit sends its requests alone this many times, and then in company."""


@dataclass
class ForeignServer:
    """A running server. `num_asks`: number of requests that an audit sends under one condition. `num_together`: number
    of requests that an audit sends together; the server answers none of them before all have arrived.

    Faults: `dtype` is the engine's dtype. `told`: the distribution of the log-probs. `shifted`: the requests for which
    the server moves each log-prob to the next float32. `keeps_salts` False: all requests share cached prefixes.
    `tells_hits`: whether vLLM's answers have the number of cached tokens, which they lack by default.
    """

    folder: Path
    kind: Literal["vllm", "sglang"] = "vllm"
    dtype: torch.dtype = torch.bfloat16
    told: Literal["raw", "temperature", "processed"] = "processed"
    shifted: Literal["none", "all", "hits", "company", "again"] = "none"
    keeps_salts: bool = True
    tells_hits: bool = False
    num_asks: int = 4
    num_together: int = 6
    url: str = ""
    num_received: int = 0
    _seen: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._model, self._samples = _loaded(self.folder, self.dtype, self.told)
        self._together = threading.Barrier(self.num_together)

    def get(self, path: str) -> Any:
        assert path == "/v1/models"
        return {"object": "list", "data": [{"id": "tiny", "owned_by": self.kind, "max_model_len": 128}]}

    def post(self, path: str, body: dict[str, Any]) -> Any:
        with self._lock:
            self.num_received += 1
            number = self.num_received
        is_alone = number <= NUM_ALONE * self.num_asks
        if not is_alone:
            self._together.wait(60)
        with self._lock:
            return self._vllm(path, body, number) if self.kind == "vllm" else self._sglang(path, body, number)

    def _vllm(self, path: str, body: dict[str, Any], number: int) -> Any:
        assert path == "/v1/completions" and body["model"] == "tiny" and body["return_tokens_as_token_ids"]
        tokens, logprobs, cached = self._sample(body["prompt"], body, body["max_tokens"], body["cache_salt"], number)
        told = {"tokens": [f"token_id:{token}" for token in tokens], "token_logprobs": logprobs}
        usage = {"prompt_tokens_details": {"cached_tokens": cached} if self.tells_hits else None}
        return {"choices": [{"index": 0, "text": "", "logprobs": told}], "usage": usage}

    def _sglang(self, path: str, body: dict[str, Any], number: int) -> Any:
        assert path == "/generate" and body["return_logprob"]
        params = body["sampling_params"]
        tokens, logprobs, cached = self._sample(
            body["input_ids"], params, params["max_new_tokens"], body["extra_key"], number
        )
        rows = [[logprob, token, None] for logprob, token in zip(logprobs, tokens, strict=True)]
        return {"text": "", "output_ids": tokens, "meta_info": {"output_token_logprobs": rows, "cached_tokens": cached}}

    def _sample(
        self, prompt: list[int], params: dict[str, Any], max_tokens: int, salt: str, number: int
    ) -> tuple[list[int], list[float], int]:
        drawn = max_tokens, params["temperature"], params["top_k"]
        is_hit = (key := (salt if self.keeps_salts else "", tuple(prompt))) in self._seen
        self._seen.add(key)
        if (tuple(prompt), drawn) not in self._samples:
            self._samples[tuple(prompt), drawn] = self._generate(prompt, *drawn)
        tokens, logprobs = self._samples[tuple(prompt), drawn]
        turn = (number - 1) // self.num_asks
        is_shifted = dict(none=False, all=True, hits=is_hit, company=turn >= NUM_ALONE, again=turn > 0)[self.shifted]
        found = np.nextafter(logprobs, np.float32(-np.inf)) if is_shifted else logprobs
        return tokens, [float(logprob) for logprob in found], is_hit * len(prompt)

    def _generate(
        self, prompt: list[int], max_tokens: int, temperature: float, top_k: int
    ) -> tuple[list[int], np.ndarray]:
        chance, tokens = torch.Generator().manual_seed(len(prompt)), list[int]()
        for _ in range(max_tokens):
            logits = self._logits(prompt, tokens)[-1]
            if temperature:
                best = (logits / temperature).topk(top_k if top_k > 0 else len(logits))
                tokens.append(int(best.indices[torch.multinomial(best.values.softmax(-1), 1, generator=chance)]))
            else:
                tokens.append(int(logits.argmax()))
        logits = self._logits(prompt, tokens)[len(prompt) - 1 : -1]
        if self.told != "raw":
            logits = logits / (temperature or 1.0)
        if self.told == "processed" and top_k > 0:
            logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
        return tokens, logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()

    def _logits(self, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return self._model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0].float()


@cache
def _loaded(folder: Path, dtype: torch.dtype, told: str) -> tuple[Any, dict[Any, tuple[list[int], np.ndarray]]]:
    """Return the model, and the samples that servers with these fields have computed, which are always the same."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), {}


@contextmanager
def foreign_server(server: ForeignServer) -> Iterator[ForeignServer]:
    """Run the server on threads. Sets its `url`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(server.get(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._answer(server.post(self.path, body))

        def _answer(self, told: Any) -> None:
            text = json.dumps(told).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *arguments: Any) -> None:
            pass

    with served(Handler) as server.url:
        yield server


@contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve HTTP on threads. Yields the URL."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 64

    with Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
