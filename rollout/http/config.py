"""Settings of the front end. Imports neither starlette nor h11, so that they are checked before either is loaded."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from trueroll.errors import ConfigError

from ...engine.request import from_validation

API_KEY_VARIABLE = "TRUEROLL_HTTP_API_KEY"


class HttpConfig(BaseModel):
    """Settings of the front end. Unknown keys and values out of range raise ConfigError.

    `address`: the worker's, or the file of a fleet. `host`, an IP, and `port`, 0 for any free one: where it listens.
    `tokenizer`: the model whose tokenizer and chat template are used; None: the one that is served, where that is a
    folder of this machine. `model_name`: what clients call the model; None: as the worker calls it. `api_key_file`: a
    file with the key that clients must send; None: that in the environment variable `API_KEY_VARIABLE`, if it is set.
    `clients_file`: a file with a role, a user and a key for each client, in place of the one key.

    `max_body_bytes`: of a request, which may take `body_seconds`; all bodies that are unfinished or not parsed yet hold
    at most `max_unfinished_bytes`, None: 8 times `max_body_bytes`. `max_body_elements`: what the elements of a body may
    cost, see `elements.WEIGHTS`. `max_text_chars`: of all texts of a request. `max_answer_bytes`: of an answer that is
    not a stream, as estimated. `max_open_requests`: how many requests for tokens or text may be open at a time.
    `drain_seconds`: how long open requests may go on after SIGTERM or Ctrl-C.

    `max_connections`: at a time; None: half of the descriptors that the process may open, at most 2048. A head has at
    most `max_head_bytes` in `max_head_lines` lines and arrives within `head_seconds`, and a body in at most
    `max_body_chunks` chunks. An answered connection is kept for `keep_alive_seconds`; one whose client takes nothing of
    an answer for `write_seconds` is cut; a refused one drops what still comes for `linger_seconds`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    address: str
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    tokenizer: str | None = None
    model_name: str | None = Field(None, min_length=1)
    api_key_file: str | None = None
    clients_file: str | None = None
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
    max_open_requests: int = Field(4096, ge=1)
    drain_seconds: int = Field(30, ge=0)

    def __init__(self, **values: object) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise from_validation(ConfigError, error) from None

    @model_validator(mode="after")
    def _one_body_has_room(self) -> HttpConfig:
        if self.max_unfinished_bytes is not None and self.max_unfinished_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_unfinished_bytes: {self.max_unfinished_bytes} is less than max_body_bytes, "
                f"{self.max_body_bytes}, so that the longest body could never arrive; give at least as many"
            )
        return self
