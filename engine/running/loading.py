"""Load the model that a configuration names, and derive the limits of the model: lengths, blocks and bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import psutil
import torch

from trueroll.errors import ConfigError, ModelError, brief

from ...kernels.cache_formats import AUTO
from ...kernels.contract import Backend, Weight
from ...kernels.families import describe
from ...kernels.pieces import with_pieces
from ...kernels.precision import EXPERTS_SUFFIX, NONE, with_kv_cache_dtype, with_quantization
from ...kernels.quantization import format_of
from ...kernels.ranks import RankedOps, part_of, stage_of
from ...kernels.selection import SelectedBackend, select_backend
from ...kernels.specs import DecoderSpec, is_of_mtp
from ...kernels.spellings import Spellings
from ...kernels.stored import Stored, stored_in
from ..config import EngineConfig
from ..grammars.matching import installed_version
from ..models.decoder import Decoder
from ..models.dummy import fill_randomly
from ..models.eos import find_eos_tokens
from ..models.folders import refuse_what_is_no_model
from ..models.loader import Checkpoint, check_checkpoint, checkpoint_names, copy_checkpoint, read_config
from ..models.names import find_config, resolve_model
from ..models.quantized.layouts import LAYOUTS, Layout
from .experts import route_format
from .planner import Sizes, Storage, plan_memory, scratch_bytes
from .ranks import Links, Topology
from .weight_memory import Build, LocalWeights, Place, WeightMemory
from .weights import WeightStore

log = logging.getLogger(__name__)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, its backend, and the end-of-sequence tokens named in the model folder. `links`: how this rank
    reaches the other ranks, if the model is only this rank's part.

    Several engines can share a loaded model, as long as no engine commits other weights or puts the weights to sleep.
    """

    folder: Path
    weights: WeightStore
    backend: SelectedBackend
    eos_token_ids: tuple[int, ...]
    links: Links | None = None

    @property
    def model(self) -> Decoder:
        """The decoder with the live weights."""
        return self.weights.model

    def drafts_with_mtp(self, config: EngineConfig) -> bool:
        """Return whether an engine with this configuration drafts with the model's MTP module."""
        return config.wants_mtp and self.model.spec.serves_mtp

    @property
    def dtype_name(self) -> str:
        """The dtype of weights and KV cache, such as `bfloat16`."""
        return self.weights.dtype


@dataclass(frozen=True)
class EngineInfo:
    """The properties and limits of an engine, fixed at start-up.

    `isa`: the instruction set that the backend uses. `pieces`, `quantization`, `kv_cache_dtype`: as in `DecoderSpec`.
    `backend_note`: the reason why a faster backend is not used, or empty. `torch_version`: the version of the torch
    package.

    `windows`: the attention windows of the model's layers, in tokens. In `windows`, None stands for the layers without
    a window, and comes first. Layers with the same window share a pool of blocks. `num_blocks`: the number of KV blocks
    for the first window. `window_blocks`: the number of KV blocks for each window after the first.

    `live_states`, `checkpoints`, `state_interval`, `state_bytes`: as in `MemoryPlan`; 0 for models without recurrent
    layers. `expert_layers`: the number of layers with experts. `num_experts`: the number of experts per layer.
    `experts_per_token`: the number of experts to which a layer routes each token. `route_bytes`: the size of one
    token's recorded experts, in bytes. `expert_layers`, `num_experts`, `experts_per_token` and `route_bytes` are 0 for
    models without experts.

    `host_blocks`, `host_states`: as in `MemoryPlan`.

    `tensor_parallel_size`: the number of ranks in each stage. `pipeline_parallel_size`: the number of stages. With
    several ranks, `weight_bytes` is the size of rank 0's weights; `kv_bytes` and `state_bytes` are upper bounds for
    each rank. `token_bytes`: the bytes of a rank's KV cache for each token, summed over the layers with the first
    window.

    `max_images`, `max_image_patches`: the limits on images, as in `EngineConfig`. `adapter_bytes`, `max_record_bytes`:
    the limits on named adapters and on records, as in `EngineConfig`. `llguidance`: the version of the package that
    computes the masks of grammars; None if the package is not installed.

    `scratch_bytes`: the approximate memory of the largest step, in bytes. `warm_up_seconds`: the duration of the
    warm-up, which compiles kernels, plans memory and captures CUDA graphs after the weights are loaded.
    """

    model: str
    architecture: str
    device: str
    dtype: str
    backend: str
    isa: str
    pieces: int
    torch_version: str
    backend_note: str
    num_threads: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    weight_bytes: int
    kv_bytes: int
    max_record_bytes: int
    token_bytes: int = 0
    live_states: int = 0
    checkpoints: int = 0
    state_interval: int = 0
    state_bytes: int = 0
    expert_layers: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    route_bytes: int = 0
    windows: tuple[int | None, ...] = (None,)
    window_blocks: tuple[int, ...] = ()
    host_blocks: tuple[int, ...] = ()
    host_states: int = 0
    scratch_bytes: int = 0
    warm_up_seconds: float = 0.0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    max_images: int = 0
    max_image_patches: int = 0
    adapter_bytes: int = 0
    llguidance: str | None = None
    quantization: str = NONE
    kv_cache_dtype: str = AUTO

    @property
    def num_slots(self) -> int:
        """The number of slots for recurrent states: live states and checkpoints."""
        return self.live_states + self.checkpoints

    @property
    def blocks_by_window(self) -> tuple[int, ...]:
        """The number of blocks in the pool of each window."""
        return self.num_blocks, *self.window_blocks

    @property
    def host_slots(self) -> tuple[int, ...]:
        """The number of slots of the host tier for each window and, for a model with recurrent layers, for states;
        empty without a host tier.
        """
        return self.host_blocks + (self.host_states,) * bool(self.host_blocks and self.live_states)


@dataclass(frozen=True)
class _Plan:
    """The properties of a model, determined before memory is allocated.

    `spec`: the whole decoder. `stored`: how the checkpoint stores its weights. `builds`: one function for each rank,
    which creates the rank's model. `links`: as in `LoadedModel`.
    """

    folder: Path
    stored: Stored
    spec: DecoderSpec
    builds: tuple[Build, ...]
    dtype: torch.dtype
    device: torch.device
    backend: SelectedBackend
    eos_token_ids: tuple[int, ...]
    links: Links | None

    @property
    def build(self) -> Build:
        """Creates the model of this process."""
        return self.builds[0 if self.links is None else self.links.everyone.rank.index]

    def outlines(self) -> list[Decoder]:
        """Return the models of all ranks on torch's meta device, without memory."""
        return [build(partial(torch.empty, dtype=self.dtype, device="meta")) for build in self.builds]


class AllocatedModel(NamedTuple):
    """A model, and the checkpoint from which its weights are still to be read."""

    loaded: LoadedModel
    checkpoint: Checkpoint

    def read(self) -> LoadedModel:
        """Read the weights. Raise ModelError if a file can no longer be read."""
        copy_checkpoint(self.checkpoint, self.loaded.weights.to_load)
        return self.loaded


def load_model(config: EngineConfig, links: Links | None = None) -> LoadedModel:
    """Load a model and its backend. See `allocate_model`."""
    return allocate_model(config, links).read()


def allocate_model(config: EngineConfig, links: Links | None = None, place: Place | None = None) -> AllocatedModel:
    """Allocate the memory of a model, and return the model and its backend.

    The weights are uninitialized until `AllocatedModel.read`. `links`: if given, allocate only this rank's part of the
    model; the rank reaches the other ranks through `links`. `place`: where to allocate the weights; by default, in this
    process.

    Raise ConfigError if the device or the backend is missing or cannot serve the model. Raise ModelError if the model
    cannot be loaded. The checkpoint is checked before memory is allocated.
    """
    plan = _plan(config, _find_model, links)
    outlines = plan.outlines()
    tensors = {name: tensor for each in outlines for name, tensor in each.checkpoint_tensors().items()}
    outline = outlines[0]
    names = outline.spec.own_name, outline.stack_parts(), outline.tied_tensors()
    layout = LAYOUTS[plan.stored.layout]
    checkpoint = check_checkpoint(plan.folder, tensors, outline.ignored_tensors(), *names, layout)
    if config.dtype == "auto":
        _warn_of_conversion(plan, checkpoint)
    if plan.spec.kv_cache_dtype not in (AUTO, *plan.backend.ops.CACHE_FORMATS):
        log.warning(
            "kv_cache_dtype: the backend %s stores the values of %s in %s, so the KV cache takes as much memory as "
            "with auto",
            plan.backend.name,
            plan.spec.kv_cache_dtype,
            _name(plan.dtype),
        )
    if config.quantization == "auto":
        _check_stored(plan, checkpoint, tensors)
    elif checkpoint.quantized and plan.spec.quantization == NONE:
        log.warning(
            "%s: %d matrices are stored in %s and are dequantized to %s; pushes must be in %s too, without scales",
            plan.folder,
            len(checkpoint.quantized),
            layout.format.name,
            _name(plan.dtype),
            _name(plan.dtype),
        )
    left_out = (() if plan.spec.quantizes_activations else plan.stored.activations) + plan.stored.cache
    if left_out:
        log.warning(
            "%s: config.json asks for %s; activations keep %s all the same, and kv_cache_dtype sets the KV cache",
            plan.folder,
            " and for ".join(left_out),
            _name(plan.dtype),
        )
    return AllocatedModel(_allocate(plan, place), checkpoint)


def _check_stored(plan: _Plan, checkpoint: Checkpoint, tensors: Mapping[str, Weight]) -> None:
    """Raise ConfigError if `auto` would quantize a weight that the checkpoint does not store in quantized form."""
    stored = checkpoint.quantized.keys() | checkpoint.packed.keys()
    stacks = {part.stack for name in stored if (part := checkpoint.spellings.part(name)) is not None}
    plain = [name for name, each in tensors.items() if format_of(each) and name not in stored and name not in stacks]
    if plain:
        setting = plan.spec.quantization
        has_choice = plan.spec.experts and not setting.endswith(EXPERTS_SUFFIX)
        others = f"{setting}, {setting}{EXPERTS_SUFFIX}" if has_choice else setting
        raise ConfigError(
            f"quantization: auto would quantize {len(plain)} weights that {plan.folder} does not store in {setting}, "
            f"such as {plain[0]}; set quantization to {others} or none",
            field="quantization",
            value="auto",
        )


def outline(config: EngineConfig) -> Decoder:
    """Return the model that `config.model` names, on torch's meta device (without memory). With several ranks, return
    the part of the rank with the most weights.

    Accepts the same names and raises the same errors as `load_dummy`. Raise ConfigError if the model cannot be divided
    among the ranks that `config` asks for.
    """
    plan, topology = _plan(config, find_config), Topology.of(config)
    specs = specs_of_ranks(plan.spec, topology, plan.backend.ops)
    empty = partial(torch.empty, dtype=plan.dtype, device="meta")
    return max((Decoder(spec, plan.backend.ops, empty) for spec in specs), key=lambda model: model.num_bytes)


def load_dummy(config: EngineConfig) -> LoadedModel:
    """Return a model with random weights, and its backend.

    `config.model`: the model's configuration, in one of the forms that `find_config` accepts. Raise the same errors as
    `load_model`.
    """
    loaded = _allocate(_plan(config, find_config))
    fill_randomly(loaded.weights.tensors, loaded.model.spec, loaded.model.device)
    return loaded


def engine_info(config: EngineConfig, loaded: LoadedModel, available: int) -> EngineInfo:
    """Return the properties of an engine with this configuration and `available` bytes for its KV cache.

    Raise ConfigError if the model or the memory cannot support the configuration.
    """
    model, max_model_len = loaded.model, find_max_model_len(config, loaded.model.spec)
    spec = model.spec.serving(loaded.drafts_with_mtp(config), model.spec.serves_tower)
    storage = Storage.of(model.dtype, model.ops.HOLDS_VALUES, model.ops.CACHE_FORMATS)
    sizes = Sizes.of(spec, storage, config.block_size, config.num_drafts)
    routes = route_format(model.spec)
    plan = plan_memory(config, sizes, max_model_len, available, routes.row_bytes if routes else 0)
    return EngineInfo(
        model=config.model,
        architecture=model.spec.architecture,
        device=str(model.device),
        dtype=loaded.dtype_name,
        backend=loaded.backend.name,
        isa=loaded.backend.ops.instruction_set(),
        pieces=model.spec.pieces,
        quantization=model.spec.quantization,
        kv_cache_dtype=model.spec.kv_cache_dtype,
        torch_version=str(torch.__version__),
        backend_note=loaded.backend.note,
        num_threads=torch.get_num_threads(),
        vocab_size=model.spec.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        max_model_len=max_model_len,
        block_size=config.block_size,
        num_blocks=plan.num_blocks,
        windows=model.spec.windows,
        window_blocks=plan.window_blocks,
        host_blocks=plan.host_blocks,
        host_states=plan.host_states,
        live_states=plan.live_states,
        checkpoints=plan.checkpoints,
        state_interval=plan.state_interval,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        weight_bytes=model.num_bytes,
        kv_bytes=plan.kv_bytes,
        max_record_bytes=config.max_record_bytes,
        token_bytes=sizes.block // sizes.block_size,
        state_bytes=plan.state_bytes,
        expert_layers=routes.layers if routes else 0,
        num_experts=routes.num_experts if routes else 0,
        experts_per_token=routes.top_k if routes else 0,
        route_bytes=routes.row_bytes if routes else 0,
        scratch_bytes=scratch_bytes(model.spec, model.dtype, config),
        max_images=config.max_images,
        max_image_patches=config.max_image_patches,
        adapter_bytes=config.adapter_bytes,
        llguidance=installed_version(),
    )


def _find_model(name: str) -> Path:
    folder = resolve_model(name)
    refuse_what_is_no_model(folder)
    return folder


def _plan(config: EngineConfig, find_folder: Callable[[str], Path], links: Links | None = None) -> _Plan:
    device = _device(config.device)
    folder = find_folder(config.model)
    raw = read_config(folder)
    spec = _describe(folder, raw)
    stored = stored_in(raw)
    if config.pieces is not None:
        spec = with_pieces(spec, config.pieces)
    spec = with_quantization(spec, stored.setting if config.quantization == "auto" else config.quantization)
    spec = with_kv_cache_dtype(spec, config.kv_cache_dtype)
    eos_token_ids = find_eos_tokens(folder, raw, spec.vocab_size)
    dtype = _dtype(config, folder, spec.dtype)
    backend = select_backend(config.backend, device, dtype, spec)
    spec = spec.serving(
        _serves_mtp(config, folder, spec, backend.ops, LAYOUTS[stored.layout]), _serves_tower(config, folder, spec)
    )
    specs = [spec]
    if links is not None:
        specs = specs_of_ranks(spec, links.topology, backend.ops)
    if links is not None and links.topology.tensor > 1:
        ops = RankedOps(backend.ops, links.stage, specs[links.everyone.rank.index].head_range[0])
        backend = replace(backend, ops=cast(Backend, ops))
    builds = tuple(partial(Decoder, each, backend.ops) for each in specs)
    return _Plan(folder, stored, spec, builds, dtype, device, backend, eos_token_ids, links)


def specs_of_ranks(spec: DecoderSpec, topology: Topology, ops: Backend) -> list[DecoderSpec]:
    """Return the part of the model that each rank computes. Raise ConfigError if the model cannot be divided among the
    configured ranks.
    """
    places = [(topology.rank(index), topology.stage(index)) for index in range(topology.size)]
    return [stage_of(part_of(spec, rank, ops.HEAD_SECTION), stage) for rank, stage in places]


def _serves_mtp(config: EngineConfig, folder: Path, spec: DecoderSpec, ops: Backend, layout: Layout) -> bool:
    """Return whether to load the model's MTP module.

    Raise ConfigError if `speculative` is `mtp` but the model has no supported MTP module.
    """
    if not config.wants_mtp:
        return False
    found = spec.mtp is not None and _has_module(folder, spec, ops, layout)
    if config.speculative == "mtp" and not found:
        raise ConfigError(
            f"speculative: {folder} has no module for multi-token prediction (MTP) that trueroll supports; set "
            "speculative to auto, ngram or off"
        )
    return found


def _serves_tower(config: EngineConfig, folder: Path, spec: DecoderSpec) -> bool:
    """Return whether to load the model's vision tower. Raise ConfigError if `max_images` asks for a tower, but the
    model has no tower that can be served.
    """
    if not config.max_images:
        return False
    if obstacle := tower_obstacle(spec):
        raise ConfigError(f"max_images must be 0, because config.json of {folder} {obstacle} (got {config.max_images})")
    return True


def tower_obstacle(spec: DecoderSpec) -> str:
    """Return a text that says what a model's configuration lacks to serve images; the text is empty if nothing is
    missing.
    """
    if spec.tower is None:
        return "has no vision tower"
    if not spec.tower.sees_span and not any(rotation.axes for rotation in spec.rotations):
        return "has no mrope_section, which M-RoPE needs for images"
    return ""


def _has_module(folder: Path, spec: DecoderSpec, ops: Backend, layout: Layout) -> bool:
    """Return whether a folder has exactly the tensors of the MTP module. If the folder has no weight files, assume that
    the module is present.
    """
    if (names := checkpoint_names(folder)) is None:
        return True
    model = Decoder(spec.serving(mtp=True, tower=False), ops, partial(torch.empty, dtype=spec.dtype, device="meta"))
    wanted = {name: tuple(model.checkpoint_tensors()[name].shape) for name in model.optional_tensors()}
    parts = {name: each for name, each in model.stack_parts().items() if name in wanted}
    found = {layout.matrix_of(name) for name in names if is_of_mtp(name) and not layout.is_left_out(name)}
    spellings = Spellings(wanted, parts)
    whole = {name for name in wanted if name in found or found.issuperset([*spellings.parts(name)] or [name])}
    return whole == wanted.keys() and all(spellings.shape(name) is not None for name in found)


def _describe(folder: Path, raw: dict[str, Any]) -> DecoderSpec:
    try:
        return describe(raw)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from error.__cause__


def _warn_of_conversion(plan: _Plan, checkpoint: Checkpoint) -> None:
    others = {_name(dtype): count for dtype, count in checkpoint.converted.items()}
    if not others:
        return
    log.warning(
        "%s: the model is served in %s, the dtype of config.json (by default float32), but %d of %d tensors are "
        "stored in %s and are converted; correct config.json, or set dtype to the dtype to serve, such as --dtype %s",
        plan.folder,
        _name(plan.dtype),
        sum(others.values()),
        sum(map(len, checkpoint.files.values())),
        ", ".join(others),
        next((name for name in others if name != "float64"), "float32"),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _allocate(plan: _Plan, place: Place | None = None) -> LoadedModel:
    """Return the model with uninitialized weights, and its backend."""
    if place is None:
        memory: WeightMemory = LocalWeights(plan.build, plan.dtype, plan.device)
    else:
        memory = place(plan.builds, plan.dtype, plan.device)
    _check_memory(plan, memory.num_bytes)
    try:
        weights = WeightStore(memory)
    except (RuntimeError, MemoryError) as error:  # torch raises RuntimeError
        raise ModelError(f"{plan.folder}: the weights do not fit into memory: {error}; use a smaller model") from None
    return LoadedModel(plan.folder, weights, plan.backend, plan.eos_token_ids, plan.links)


def _check_memory(plan: _Plan, needed: int) -> None:
    """Raise ModelError if the weights do not fit into host memory.

    Without this check of host memory, the allocation would succeed and the system would later kill the process, because
    hosts overcommit memory.
    """
    if plan.device.type == "cpu" and needed > (available := available_memory(plan.device)):
        raise ModelError(
            f"{plan.folder}: the weights need {needed} bytes, but only {available} bytes of memory are available; use "
            "a smaller model"
        )


def _dtype(config: EngineConfig, folder: Path, own: torch.dtype) -> torch.dtype:
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    if own not in _DTYPES:
        raise ModelError(
            f"{folder}: dtype in config.json must be float32, bfloat16 or float16 (got {brief(own)}); set the worker's "
            "dtype to one of these"
        )
    return own


def find_max_model_len(config: EngineConfig, spec: DecoderSpec) -> int:
    """Return the maximum length of a sequence. Raise ConfigError if `max_model_len` exceeds the model's limit."""
    limit = spec.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len must be at most {limit}, the length that the model was trained for (got "
            f"{config.max_model_len})"
        )
    return config.max_model_len or limit


def uses_graphs(config: EngineConfig, loaded: LoadedModel) -> bool:
    """Return whether decode steps run as CUDA graphs."""
    can_exchange = loaded.links is None or loaded.links.can_capture
    return config.cuda_graphs and loaded.backend.can_capture and can_exchange


def available_memory(device: torch.device) -> int:
    """Return the available memory, in bytes, of a GPU or of the host."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device: torch cannot use {name!r} here: {error}; use another device, such as cpu") from None
    if device.type == "meta":
        raise ConfigError("device: torch cannot compute on 'meta'; use another device, such as cpu")
    return device
