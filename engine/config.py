"""The engine's configuration: every setting, its range and its default, frozen and validated once.

Imports no torch, so that the command line can check settings before it loads anything.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from trueroll.errors import ConfigError

from .request import from_validation

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
BackendName = Literal["auto", "cpu", "triton", "reference"]


class Defaults(NamedTuple):
    """The default settings that depend on the device."""

    max_num_seqs: int
    max_num_batched_tokens: int
    kv_memory_fraction: float


def defaults_of(device: str) -> Defaults:
    """Return the defaults for a CUDA device or for any other device."""
    return Defaults(256, 8192, 0.9) if device.startswith("cuda") else Defaults(64, 512, 0.25)


_OF_DEVICE: Any = None  # a placeholder until the device is known


class EngineConfig(BaseModel):
    """The settings of one engine. Unknown keys and values out of range raise ConfigError.

    The bits of samples depend only on `model`, `dtype`, `device`, `backend` and the instruction set of the backend.

    `model`: a folder in Hugging Face format, `hf://ORG/NAME[@REVISION]`, or `smollm2`. `max_model_len`: the longest
    context in tokens; None: the length that the model was trained for. `dtype`: `auto` is the dtype in config.json, or
    float32 if config.json names none; weights stored in another dtype are converted. `backend`: `auto` is `cpu`, or
    `triton` on a GPU, if that backend can serve the model; otherwise `reference`.

    `block_size`: tokens per KV block; even, because native kernels store tokens in pairs. The KV cache has `num_blocks`
    blocks, or as many as fit beside the recurrent states in `kv_memory` bytes, or as many as fit in the share
    `kv_memory_fraction` of the available memory. If none of these is set, the cache holds `max_num_seqs` sequences of
    `max_model_len` tokens, but takes at most 0.9 of the available memory on a GPU and 0.25 on a CPU. On a GPU,
    available memory is the free memory beside the weights, the largest step and the CUDA graphs.

    `max_num_seqs`: the most samples that run at the same time; None: 256 on a GPU, 64 on a CPU.
    `max_num_batched_tokens`: the token budget of a step; None: 8192 on a GPU, 512 on a CPU.

    The following three are for models with recurrent layers. `state_interval`: tokens between the state checkpoints of
    a prompt, from which prefixes are resumed; None: an interval at which checkpoints take no more memory than the
    blocks between them. `decode_state_interval`: tokens between state checkpoints while decoding; 0: no checkpoints.
    `state_budget`: the most checkpoints held at a time; None: one per `state_interval` tokens of the blocks.

    `cuda_graphs`: whether decode steps on a GPU run as CUDA graphs. `num_threads`: threads of torch; None: torch's
    choice.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    model: str
    dtype: Dtype = "auto"
    device: str = "cpu"
    backend: BackendName = "auto"
    block_size: int = Field(default=16, ge=2, multiple_of=2)
    num_blocks: int | None = Field(default=None, ge=1)
    kv_memory: int | None = Field(default=None, ge=1)
    kv_memory_fraction: float | None = Field(default=None, gt=0, le=1)
    max_model_len: int | None = Field(default=None, ge=2)
    max_num_seqs: int = Field(default=_OF_DEVICE, ge=1)
    max_num_batched_tokens: int = Field(default=_OF_DEVICE, ge=1)
    state_interval: int | None = Field(default=None, ge=2)
    decode_state_interval: int = Field(default=0, ge=0)
    state_budget: int | None = Field(default=None, ge=0)
    enable_prefix_caching: bool = True
    cuda_graphs: bool = True
    speculative: Literal["off", "ngram"] = "off"
    num_speculative_tokens: int = Field(default=4, ge=1, le=64)
    num_threads: int | None = Field(default=None, ge=1, le=1024)

    def __init__(self, **values: Any) -> None:
        defaults = defaults_of(str(values.get("device")))
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if values.get(name) is None:
                values[name] = getattr(defaults, name)
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise from_validation(ConfigError, error) from None

    @model_validator(mode="after")
    def _combinations_work(self) -> EngineConfig:
        sizes = ("num_blocks", "kv_memory", "kv_memory_fraction")
        if len(given := [name for name in sizes if getattr(self, name) is not None]) > 1:
            raise ValueError(f"{' and '.join(given)} set the same thing; give at most one of {', '.join(sizes)}")
        for name in ("state_interval", "decode_state_interval"):
            if (interval := getattr(self, name)) and interval % self.block_size:
                raise ConfigError(
                    f"{name} must be a multiple of block_size = {self.block_size} (got {interval}), because "
                    "checkpoints are taken at block boundaries",
                    field=name,
                    value=interval,
                )
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_seqs must be at most max_num_batched_tokens = {self.max_num_batched_tokens}, so that every "
                f"running sequence can decode in each step (got {self.max_num_seqs})",
                field="max_num_seqs",
                value=self.max_num_seqs,
                limit=self.max_num_batched_tokens,
            )
        return self
