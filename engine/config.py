"""The engine's configuration: every setting, its range and its default, frozen and validated once.

Imports no torch, so that the command line can check settings before it loads anything.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from trueroll.errors import ConfigError

from .request import describe_validation_error

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
BackendName = Literal["auto", "cpu", "triton", "reference"]


class EngineConfig(BaseModel):
    """Settings of one engine. Unknown keys and values out of range raise ConfigError.

    `model`: a folder in Hugging Face format, `hf://ORG/NAME[@REVISION]`, or `smollm2`. `dtype` `auto`: that of
    config.json, or float32 if it names none; weights stored in another are converted. `backend` `auto`: `cpu` or, on a
    GPU, `triton` where they serve the model, else `reference`. KV memory is `num_blocks` blocks of `block_size` tokens,
    or as many as `kv_memory` bytes hold; with neither given, what `max_num_seqs` sequences of `max_model_len` tokens
    need, but at most a quarter of the memory that is available. `block_size` is even, since native kernels store tokens
    in pairs. `max_model_len` None: what the model was trained for. `max_num_batched_tokens`: the token budget of a
    step. `cuda_graphs`: whether decode steps on a GPU run as graphs. `num_threads` None: torch's choice. Results depend
    on `model`, `dtype`, `device`, `backend` and its instruction set alone.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    model: str
    dtype: Dtype = "auto"
    device: str = "cpu"
    backend: BackendName = "auto"
    block_size: int = Field(default=16, ge=2, multiple_of=2)
    num_blocks: int | None = Field(default=None, ge=1)
    kv_memory: int | None = Field(default=None, ge=1)
    max_model_len: int | None = Field(default=None, ge=2)
    max_num_seqs: int = Field(default=64, ge=1)
    max_num_batched_tokens: int = Field(default=512, ge=1)
    enable_prefix_caching: bool = True
    cuda_graphs: bool = True
    num_threads: int | None = Field(default=None, ge=1, le=1024)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(describe_validation_error(error)) from None

    @model_validator(mode="after")
    def _combinations_work(self) -> EngineConfig:
        if self.num_blocks is not None and self.kv_memory is not None:
            raise ValueError("num_blocks, kv_memory: expected at most one of them, found both; they set the same thing")
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs: expected at most max_num_batched_tokens = {self.max_num_batched_tokens}, so that every "
                f"running sequence can decode in each step, found {self.max_num_seqs}"
            )
        return self
