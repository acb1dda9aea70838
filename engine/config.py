"""The engine's configuration: every setting, its range and its default, validated once and immutable.

This module does not import torch, so that the command line can check settings before it loads a model.
"""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from trueroll.errors import ConfigError

from .request import MAX_SPANS, from_validation

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
BackendName = Literal["auto", "cpu", "triton", "reference"]
Quantization = Literal[
    "none",
    "auto",
    "fp8",
    "fp8_channel",
    "int8",
    "mxfp8",
    "mxfp4",
    "nvfp4",
    "awq",
    "int8_dynamic",
    "fp8_dynamic",
    "fp8:experts",
    "fp8_channel:experts",
    "int8:experts",
    "mxfp8:experts",
    "mxfp4:experts",
    "nvfp4:experts",
    "awq:experts",
    "int8_dynamic:experts",
    "fp8_dynamic:experts",
]

KvCacheDtype = Literal["auto", "int8", "fp8"]


class Defaults(NamedTuple):
    """The default settings that depend on the device."""

    max_num_seqs: int
    max_num_batched_tokens: int
    kv_memory_fraction: float


def defaults_of(device: str) -> Defaults:
    """Return the defaults for `device`: one set for CUDA devices, another for all other devices."""
    return Defaults(256, 8192, 0.9) if device.startswith("cuda") else Defaults(64, 512, 0.25)


_OF_DEVICE: Any = None  # a placeholder until the device is known


class EngineConfig(BaseModel):
    """The settings of one engine. Unknown keys and values out of range raise ConfigError.

    The only settings that affect the bits of samples are `model`, `dtype`, `quantization`, `kv_cache_dtype`, `device`,
    `backend` and `pieces`. In addition to these settings, only the instruction set that the backend uses affects the
    bits of samples.

    `model`: a folder in Hugging Face format, `hf://ORG/NAME[@REVISION]`, or `smollm2`. `max_model_len`: the longest
    context in tokens; None: the length that the model was trained for. `dtype`: `auto` is the dtype in config.json, or
    float32 if config.json has no dtype. Weights stored in another dtype are converted. `backend`: `auto` selects
    `triton` on a GPU and `cpu` elsewhere, but falls back to `reference` for a model that the selected backend cannot
    serve.

    `quantization`: the format in which weights are stored (`kernels.precision`), such as `fp8`. The worker quantizes
    the weights of a checkpoint and of each push. With `none`, weights have the bits that a trainer pushes; the matrices
    of a quantized checkpoint are dequantized. `auto` keeps the matrices of a quantized checkpoint as they are stored,
    and quantizes pushes to the same format; for other checkpoints, `auto` is `none`. With `int8_dynamic` and
    `fp8_dynamic`, matrix products also quantize their activations, token by token (`kernels.dynamic`). Only the
    backends `cpu` and `reference` support these two formats. A trainer must use the same quantization as the engine.

    `kv_cache_dtype`: how keys and values are stored: `auto` stores the values in the model's dtype, `int8` and `fp8`
    store codes of 8 bits (`kernels.cache_formats`). Each key and value is quantized once, when it is computed. A
    trainer must use the same `kv_cache_dtype` as the engine. The backends `triton` and `reference` store the quantized
    values in the model's dtype, so `int8` and `fp8` save no memory with these backends.

    `block_size`: tokens per KV block; must be even, because native kernels store tokens in pairs. At most one of
    `num_blocks`, `kv_memory` and `kv_memory_fraction` sets the size of the KV cache. `num_blocks`: the number of
    blocks. `kv_memory`: the bytes for blocks and recurrent states. `kv_memory_fraction`: the memory for blocks and
    recurrent states, as a fraction of the available memory. By default, the cache holds `max_num_seqs` sequences of
    `max_model_len` tokens, but takes at most 0.9 of the available memory on a GPU and 0.25 on a CPU. On a GPU, the
    available memory is the memory that remains free after weights, CUDA graphs and the largest step are allocated.

    `host_cache_bytes`: the maximum size, in bytes, of the host tier of each rank, in host memory; 0: no host tier. The
    host tier holds cached blocks and state checkpoints that the device has no memory for. On a GPU, the memory is
    pinned.

    `max_num_seqs`: the maximum number of sequences that run at the same time; None: 256 on a GPU, 64 on a CPU.
    `max_num_batched_tokens`: the token budget of a step; None: 8192 on a GPU, 512 on a CPU.

    `state_interval`, `decode_state_interval` and `state_budget` apply only to models with recurrent layers.
    `state_interval`: the number of tokens between the state checkpoints of a prompt. Cached prefixes are resumed from
    checkpoints. If `state_interval` is None, the interval is chosen so that a checkpoint takes at most as much memory
    as the blocks between two checkpoints. `decode_state_interval`: the number of tokens between state checkpoints while
    decoding; 0: no checkpoints are taken. `state_budget`: the maximum number of checkpoints held at a time; None: one
    for every `state_interval` tokens of KV cache.

    `speculative`: how tokens are drafted for speculative decoding; drafting does not change the bits of samples.
    `ngram` drafts tokens that repeat earlier text: the prompt, the sample itself or other samples of the prompt. `mtp`
    drafts with the model's module for multi-token prediction. For each sample and step, `auto` selects the drafter that
    expects more accepted tokens; for a model without an MTP module, `auto` is `ngram`. `num_speculative_tokens`: the
    maximum number of tokens drafted for a sample in one step.

    `tensor_parallel_size`: the number of ranks among which each layer is divided; a power of two, at most `pieces`.
    `pipeline_parallel_size`: the number of stages into which the layers are divided: at most 8, and at most the number
    of layers. Each stage has `tensor_parallel_size` ranks. The bits of samples do not depend on the numbers of ranks
    and stages. `devices`: the devices of the ranks, separated by commas, such as `cuda:0,cuda:1`; a device may have
    several ranks. If `devices` is None and `device` is `cuda`, each rank has a GPU of its own. If `devices` is None
    and `device` has another value, such as `cpu` or `cuda:1`, all ranks share this device. `exchange`: how ranks
    exchange tensors. `shared` uses host memory. `group` uses a process group of torch: NCCL on GPUs, gloo on a CPU.
    With `symmetric`, each GPU reads the memory of the other GPUs. `auto` is `group` if each rank has a GPU of its own,
    otherwise `shared`.

    `pieces`: tensor parallelism splits some sums; each of these sums is computed in this number of pieces (1, 2, 4 or
    8). A different number of pieces gives samples with different bits. If `pieces` is None, the engine uses the number
    that suits the model (`kernels.pieces`). A trainer must use the same number of pieces as the engine.

    `max_images`: the maximum number of images in a prompt. If `max_images` is 0, the vision tower is not loaded. If
    `max_images` is above 0, the model must have a vision tower. `max_image_patches`: the maximum number of patches of
    an image. `image_cache_bytes`: the maximum total size, in bytes, of the encoded images on each rank; this memory is
    needed in addition to the KV cache.

    `adapter_bytes`: the memory for named adapters, in bytes, in addition to the KV cache; 0: no named adapters. The
    adapter memory holds the matrices A and B of every loaded adapter, and merged weights for the most recently used
    adapters. The merged weights of an adapter are as large as the weights that it changes. With several ranks,
    `adapter_bytes` must be 0.

    `max_record_bytes`: the maximum total size, in bytes, of the records of unfinished samples and scores, in host
    memory. Records are the columns that `top_logprobs`, `target_token_ids` and `return_sampling_mask` request, and all
    columns of scores that run. If the records exceed the limit after a step, the sample or score with the most record
    bytes ends with the finish reason `error`. A worker also applies `max_record_bytes`, as a separate limit, to the
    replies that it stores for unfinished requests.

    `cuda_graphs`: whether decode steps on a GPU run as CUDA graphs. `num_threads`: the number of threads that torch
    uses, for all ranks together; None: torch's default.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    model: str
    dtype: Dtype = "auto"
    quantization: Quantization = "none"
    kv_cache_dtype: KvCacheDtype = "auto"
    device: str = "cpu"
    backend: BackendName = "auto"
    block_size: int = Field(default=16, ge=2, multiple_of=2)
    num_blocks: int | None = Field(default=None, ge=1)
    kv_memory: int | None = Field(default=None, ge=1)
    kv_memory_fraction: float | None = Field(default=None, gt=0, le=1)
    host_cache_bytes: int = Field(default=0, ge=0)
    max_model_len: int | None = Field(default=None, ge=2)
    max_num_seqs: int = Field(default=_OF_DEVICE, ge=1)
    max_num_batched_tokens: int = Field(default=_OF_DEVICE, ge=1)
    state_interval: int | None = Field(default=None, ge=2)
    decode_state_interval: int = Field(default=0, ge=0)
    state_budget: int | None = Field(default=None, ge=0)
    enable_prefix_caching: bool = True
    max_images: int = Field(default=0, ge=0, le=MAX_SPANS)
    max_image_patches: int = Field(default=16384, ge=1, le=2**20)
    image_cache_bytes: int = Field(default=2**29, ge=1)
    adapter_bytes: int = Field(default=0, ge=0)
    max_record_bytes: int = Field(default=2**33, ge=1)
    cuda_graphs: bool = True
    speculative: Literal["off", "auto", "ngram", "mtp"] = "off"
    num_speculative_tokens: int = Field(default=4, ge=1, le=64)
    tensor_parallel_size: int = Field(default=1, ge=1, le=8)
    pipeline_parallel_size: int = Field(default=1, ge=1, le=8)
    devices: str | None = None
    exchange: Literal["auto", "shared", "group", "symmetric"] = "auto"
    pieces: int | None = Field(default=None, ge=1, le=8)
    num_threads: int | None = Field(default=None, ge=1, le=1024)

    def __init__(self, **values: Any) -> None:
        defaults = defaults_of(str(values.get("devices") or values.get("device")))
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if values.get(name) is None:
                values[name] = getattr(defaults, name)
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise from_validation(ConfigError, error) from None

    @property
    def keeps_values(self) -> bool:
        """Return whether quantized weights that are dequantized and quantized again have the same bits as before. The
        result is False for `auto`, because `auto` may select a format without this property.
        """
        return not self.quantization.startswith(("nvfp4", "awq", "auto"))

    @property
    def num_ranks(self) -> int:
        """The number of ranks in all stages together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def rank_devices(self) -> list[str]:
        """The device of each rank."""
        if self.devices is not None:
            return [name.strip() for name in self.devices.split(",")]
        one_each = self.device == "cuda" and self.num_ranks > 1
        return [f"cuda:{index}" if one_each else self.device for index in range(self.num_ranks)]

    @property
    def rank_exchange(self) -> Literal["shared", "group", "symmetric"]:
        """How ranks exchange tensors: `exchange`, with `auto` resolved."""
        if self.exchange != "auto":
            return self.exchange
        found = self.rank_devices
        own_gpus = all(name.startswith("cuda") for name in found) and len(set(found)) == len(found)
        return "group" if own_gpus else "shared"

    @property
    def num_steps(self) -> int:
        """The number of steps that may be in flight, each in a different stage. With speculative decoding, only one
        step may be in flight.
        """
        return 1 if self.num_drafts else self.pipeline_parallel_size

    @property
    def num_drafts(self) -> int:
        """The maximum number of tokens drafted for a sample in a step; 0 if `speculative` is `off`."""
        return 0 if self.speculative == "off" else self.num_speculative_tokens

    @property
    def encoded_bytes(self) -> int:
        """The memory of each rank for encoded images; 0 if the vision tower is not loaded."""
        return self.image_cache_bytes if self.max_images else 0

    @property
    def wants_mtp(self) -> bool:
        """Return whether to draft with the model's MTP module, if there is one."""
        return self.speculative in ("mtp", "auto")

    @property
    def wants_repeats(self) -> bool:
        """Return whether to draft tokens that repeat earlier text."""
        return self.speculative in ("ngram", "auto")

    @model_validator(mode="after")
    def _combinations_work(self) -> EngineConfig:
        sizes = ("num_blocks", "kv_memory", "kv_memory_fraction")
        if len(given := [name for name in sizes if getattr(self, name) is not None]) > 1:
            raise ValueError(
                f"{' and '.join(given)} each set the size of the KV cache; set at most one of {', '.join(sizes)}"
            )
        for name in ("state_interval", "decode_state_interval"):
            if (interval := getattr(self, name)) and interval % self.block_size:
                raise ConfigError(
                    f"{name} must be a multiple of block_size = {self.block_size} (got {interval}), because "
                    "checkpoints are taken at block boundaries",
                    field=name,
                    value=interval,
                )
        self._check_devices()
        if self.host_cache_bytes and not self.enable_prefix_caching:
            raise ConfigError(
                f"host_cache_bytes must be 0 if enable_prefix_caching is false (got {self.host_cache_bytes}), because "
                "the host tier holds only cached prefixes",
                field="host_cache_bytes",
                value=self.host_cache_bytes,
            )
        if self.adapter_bytes and self.num_ranks > 1:
            raise ConfigError(
                f"adapter_bytes must be 0 with several ranks (got {self.adapter_bytes} and {self.num_ranks} ranks), "
                "because only a worker with a single rank serves named adapters",
                field="adapter_bytes",
                value=self.adapter_bytes,
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

    def _check_devices(self) -> None:
        """Raise ConfigError if `devices` does not name a device for each rank, or if the ranks cannot use the named
        devices.
        """
        names = self.rank_devices
        is_known = all(re.fullmatch("cpu|cuda:[0-9]{1,2}", name) for name in names) and len({n[:3] for n in names}) == 1
        if self.devices is not None and (self.num_ranks == 1 or len(names) != self.num_ranks or not is_known):
            raise ConfigError(
                f"devices must list {self.num_ranks} devices of the same kind, one per rank, such as cuda:0,cuda:1 "
                f"(got {self.devices!r}); for a single rank, set device",
                field="devices",
                value=self.devices,
            )
        shares = names[0] != "cpu" and len({*names}) < len(names)
        if self.num_ranks > 1 and shares and self.exchange in ("group", "symmetric"):
            raise ConfigError(
                f"exchange: {self.exchange} needs a separate GPU for each rank (got {', '.join(names)}); set exchange "
                "to shared",
                field="exchange",
                value=self.exchange,
            )
