"""Settings of the front end. Does not import starlette or h11, so that settings can be checked before these packages
are imported.
"""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from trueroll.errors import ConfigError, brief

from ...engine.request import from_validation

API_KEY_VARIABLE = "TRUEROLL_HTTP_API_KEY"


class HttpConfig(BaseModel):
    """Settings of the front end. Unknown keys and out-of-range values raise ConfigError.

    `address`: address of the worker, or path of a fleet's file. `host`, `port`: IP and port to listen on; port 0 means
    any free port. `tokenizer`: the model that provides the tokenizer and the chat template; None means the served
    model, which must then be `smollm2` or a folder on this machine. `model_name`: the name that clients use for the
    model; None means the name that the worker uses for the model. `api_key_file`: a file with the key that clients must
    send; None means the environment variable `TRUEROLL_HTTP_API_KEY`, if set. `clients_file`: a file with a role, a
    user and a key for each client; these keys replace the single key that all clients share.

    `sglang`: whether to serve SGLang's paths, too. `vllm`: whether to serve the paths of vLLM and SkyRL for updates of
    weights, too. `tinker`: whether to serve the Tinker API, too.

    `otlp_traces_endpoint`: URL of an OTLP receiver over HTTP, such as `http://localhost:4318/v1/traces`, for the
    OpenTelemetry spans of requests; None means no spans.

    `max_body_bytes`, `body_seconds`: maximum length of a request body in bytes, and maximum time until the body has
    arrived. `max_unfinished_bytes`: maximum total size, in bytes, of the bodies that are incomplete or not parsed yet;
    None means 8 times `max_body_bytes`. `max_body_chunks`: maximum number of chunks of a body. `max_body_elements`:
    maximum parsing cost of the JSON elements in a body (see `elements.WEIGHTS`). `max_text_chars`: maximum total number
    of characters in the texts of a request. `max_answer_bytes`: maximum estimated length, in bytes, of an answer that
    is not a stream. `max_image_pixels`: maximum number of pixels of an image in a conversation. `max_image_bytes`:
    maximum total size, in bytes, of all images in memory. `max_open_requests`: maximum number of concurrent requests
    that generate, score, tokenize, detokenize or export samples. `max_sessions`: maximum number of open sessions.
    `max_session_bytes`: maximum total size, in bytes, of all sessions in memory. `session_seconds`: time after which a
    session without requests is deleted. `drain_seconds`: time for which open requests may continue after SIGTERM or
    Ctrl-C.

    `max_connections`: maximum number of open connections; None means half of the file descriptors that the process may
    open, minus 64, but at most 2048. `max_head_bytes`, `max_head_lines`, `head_seconds`: maximum length of a request's
    head in bytes and in lines, and maximum time until the head has arrived. `keep_alive_seconds`: time for which an
    idle connection stays open. `write_seconds`: a connection is cut if the client reads less than 64 KiB of a pending
    answer within this time. `linger_seconds`: time for which a refused connection discards incoming data before it
    closes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    address: str
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    tokenizer: str | None = None
    model_name: str | None = Field(None, min_length=1)
    api_key_file: str | None = None
    clients_file: str | None = None
    sglang: bool = False
    vllm: bool = False
    tinker: bool = False
    otlp_traces_endpoint: str | None = None
    max_body_bytes: int = Field(16 * 2**20, ge=1024, le=2**30)
    max_unfinished_bytes: int | None = Field(None, ge=1024)
    body_seconds: float = Field(60.0, gt=0.0)
    max_body_chunks: int = Field(16384, ge=1)
    max_head_bytes: int = Field(2**15, ge=1024, le=2**20)
    max_head_lines: int = Field(256, ge=8)
    max_connections: int | None = Field(None, ge=1)
    head_seconds: float = Field(10.0, gt=0.0)
    keep_alive_seconds: float = Field(75.0, gt=0.0)
    write_seconds: float = Field(30.0, gt=0.0)
    linger_seconds: float = Field(2.0, gt=0.0)
    max_body_elements: int = Field(2**19, ge=1024)
    max_text_chars: int = Field(2**22, ge=1024)
    max_answer_bytes: int = Field(2**29, ge=2**16)
    max_image_pixels: int = Field(2**26, ge=1024, le=2**30)
    max_image_bytes: int = Field(2**32, ge=2**28)
    max_open_requests: int = Field(4096, ge=1)
    max_sessions: int = Field(4096, ge=1)
    max_session_bytes: int = Field(2**32, ge=2**20)
    session_seconds: float = Field(3600.0, gt=0.0)
    drain_seconds: int = Field(30, ge=0)

    def __init__(self, **values: object) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise from_validation(ConfigError, error) from None

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _endpoint_is_a_url(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not re.fullmatch(r"https?://[^/@\s]+(/\S*)?", endpoint):
            example = "http://localhost:4318/v1/traces"
            raise ValueError(f"otlp_traces_endpoint: must be a URL such as {example} (got {brief(endpoint)})")
        return endpoint

    @model_validator(mode="after")
    def _one_body_has_room(self) -> HttpConfig:
        if self.max_unfinished_bytes is not None and self.max_unfinished_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_unfinished_bytes: {self.max_unfinished_bytes} is less than max_body_bytes "
                f"({self.max_body_bytes}), so the longest body could never be read; raise max_unfinished_bytes"
            )
        return self
