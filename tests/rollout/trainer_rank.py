"""One of the two trainer ranks that `test_wrapped_trainers.py` starts: `trainer_rank.py RANK PORT SETTINGS`. Both ranks
run all cases. Each rank writes its results to a file: for each case the arguments of `Found`, or the text of the error
for a refused wrapper.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, distributed
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForImageTextToText
from transformers.models.afmoe.modeling_afmoe import AfmoePreTrainedModel

sys.path.append(str(Path(__file__).parents[1]))
from adapters import ATTENTION, LATENT, NEMOTRON, adapt

from trueroll.engine.models.loader import read_config
from trueroll.errors import AlignmentError
from trueroll.kernels.training import align, aligned_with, merged_weights, token_log_probs, token_statistics, unalign
from trueroll.kernels.wrappers import text_decoder, unwrapped
from trueroll.rollout import RolloutClient, SamplingParams, WeightPublisher

LENS = (40, 33, 5, 17, 1, 21)
POLICY: dict[str, Any] = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
ADAPTED: dict[str, Any] = {
    "llama": "all-linear",
    "deepseek_v3": LATENT,
    "nemotron_h": NEMOTRON,
    "mistral3": ATTENTION,
}
"""Families with LoRA, and the modules with adapters."""
CHOOSING = ("expert_bias", "correction_bias")
"""The ends of the names of parameters that only choose experts, so that they have no gradient."""
PROMPTS = [[1, 20, 30, 40] * 6, [1, 20, 30, 40] * 6 + [50], [7]]
STEPS = 2


@dataclass
class Found:
    """The result of a case.

    - `count`: number of compared log-probs
    - `differences`: number of log-probs with different bits, by variation
    - `errors`: for each parameter the error of its gradient and the bound for it
    """

    count: int
    differences: dict[str, int]
    errors: dict[str, tuple[float, float]]


def load(folder: str, dtype: torch.dtype = torch.float32) -> Any:
    kind = getattr(transformers, read_config(Path(folder))["architectures"][0])
    return kind.from_pretrained(folder, dtype=dtype)


def aligned(folder: str, dtype: torch.dtype = torch.float32) -> Any:
    model = load(folder, dtype).train()
    align(model)
    return model


# Each of these functions wraps an aligned model as a trainer does.


def sharded(model: Any, whole: bool = False, **settings: Any) -> Any:
    settings = dict(mp_policy=MixedPrecisionPolicy(**POLICY)) | settings
    for layer in [] if whole else text_decoder(unwrapped(model)).layers:
        fully_shard(layer, **settings)
    return fully_shard(model, **settings)


def offloaded(model: Any) -> Any:
    return sharded(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


def sharded_masters(model: Any) -> Any:
    return sharded(model, mp_policy=MixedPrecisionPolicy())


def sharded_by_accelerate(model: Any) -> Any:
    """Shard a model as accelerate does on GPUs: the embedding is separate, norm and head are together, and all outputs
    are rounded. On a CPU, accelerate does not shard.
    """
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    wrap: dict[str, Any] = dict(auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False)
    plugin: Any = FullyShardedDataParallelPlugin(fsdp_version=2, **wrap)
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy.output_dtype == torch.bfloat16, "premise: outputs are rounded"
    state = SimpleNamespace(fsdp_plugin=plugin)
    device = dict(device=torch.device("cpu"), is_main_process=False, mixed_precision="bf16")
    return fsdp2_prepare_model(SimpleNamespace(state=state, **device), model)


def prepared(model: Any) -> Any:
    from accelerate import Accelerator

    found = Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    assert type(found) is DistributedDataParallel and "forward" in vars(found.module), "premise: both are wrapped"
    return found


def checkpointed(model: Any) -> Any:
    model.gradient_checkpointing_enable()
    return sharded(model)


def checkpointed_by_torch(model: Any) -> Any:
    layers = text_decoder(unwrapped(model)).layers
    for i, layer in enumerate(layers):
        layers[i] = checkpoint_wrapper(layer)
    return sharded(model)


def sharded_before(model: Any) -> Any:
    unalign(model)
    checkpointed_by_torch(model)
    align(model)
    unalign(model)
    align(model)
    return model


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "fsdp": sharded,
    "fsdp whole": partial(sharded, whole=True),
    "fsdp offloaded": offloaded,
    "fsdp by accelerate": sharded_by_accelerate,
    "fsdp before align": sharded_before,
    "fsdp checkpointed": checkpointed,
    "fsdp checkpointed by torch": checkpointed_by_torch,
    "fsdp autocast": sharded_masters,
    "ddp autocast": DistributedDataParallel,
    "ddp static autocast": partial(DistributedDataParallel, static_graph=True),
    "accelerate": prepared,
}


def autocast(name: str) -> Any:
    return torch.autocast("cpu", torch.bfloat16, enabled="autocast" in name)


@contextmanager
def accumulating(model: Any) -> Iterator[None]:
    """Inside the context, do not reduce gradients across ranks."""
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def sequences(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(3, 500, (n,), generator=generator) for n in LENS]


def loss(log_probs: Tensor, rank: int, start: int = 0) -> Tensor:
    """Return the loss of tokens from `start` on. Weights differ between tokens and between ranks."""
    weights = torch.linspace(-1, 1 + rank, sum(LENS), dtype=torch.float64)
    return (log_probs * weights[start : start + len(log_probs)].to(log_probs.dtype)).sum()


def packed(model: Any, rows: list[Tensor]) -> Tensor:
    return token_log_probs(model, torch.cat(rows), lengths=[len(row) for row in rows])


def positioned(model: Any, rows: list[Tensor]) -> Tensor:
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    return token_log_probs(model, torch.cat(rows)[None], position_ids=positions[None])[0]


def padded(model: Any, rows: list[Tensor]) -> Tensor:
    ids = F.pad(pad_sequence(rows, batch_first=True, padding_value=-1), (3, 2), value=-1)
    found = token_log_probs(model, ids.clamp(min=0), ids >= 0)
    return found[ids >= 0]


@cache
def expected_log_probs(folder: str, rank: int) -> Tensor:
    """Return the log-probs of an unwrapped bfloat16 model, which have the bits of a worker."""
    exact = [weight.equal(weight.bfloat16().float()) for weight in load(folder).parameters()]
    assert not all(exact), "premise: float32 weights are not bfloat16 values"
    with torch.no_grad():
        return packed(aligned(folder, torch.bfloat16), sequences(rank))


def accumulated(model: Any, rows: list[Tensor], size: int, rank: int) -> Tensor:
    """Return the log-probs of all rows, with a backward pass for each micro-batch of `size` rows."""
    parts: list[Tensor] = []
    for i in range(0, len(rows), size):
        is_last = i + size >= len(rows)
        with nullcontext() if is_last else accumulating(model):
            part = packed(model, rows[i : i + size])
            loss(part, rank, sum(map(len, parts))).backward()
        parts.append(part.detach())
    return torch.cat(parts)


def differences(found: Tensor, expected: Tensor) -> int:
    assert found.dtype == expected.dtype == torch.float32 and found.shape == expected.shape
    return int((found.view(torch.int32) != expected.view(torch.int32)).sum())


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def plain_names(model: Any) -> Iterator[tuple[str, Any]]:
    for name, parameter in model.named_parameters():
        yield name.removeprefix("module.").replace("_checkpoint_wrapped_module.", ""), parameter


@cache
def exact_gradients(folder: str) -> dict[str, Tensor]:
    """Return the gradients of the mean of both ranks' losses, computed with plain torch in float64 from bfloat16
    weights.
    """
    model = load(folder, torch.bfloat16).double()
    for rank in (0, 1):
        parts = [F.pad(torch.log_softmax(model(row[None]).logits[0], -1), (0, 0, 1, 0)) for row in sequences(rank)]
        picked = [part[:-1].gather(1, row[:, None])[:, 0] for part, row in zip(parts, sequences(rank), strict=True)]
        (loss(torch.cat(picked), rank) / 2).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@cache
def single_gradients(folder: str) -> dict[str, Tensor]:
    """Return the gradients of the mean of both ranks' losses, from an aligned model in a single process."""
    model = aligned(folder)
    for rank in (0, 1):
        with torch.autocast("cpu", torch.bfloat16):
            found = packed(model, sequences(rank))
        (loss(found, rank) / 2).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


def compare(name: str, folder: str, rank: int) -> Found:
    """Test a wrapped model with all kinds of batches.

    Errors of gradients may be twice as large as in a single process.
    """
    rows, expected = sequences(rank), expected_log_probs(folder, rank)
    model = WRAPPERS[name](aligned(folder))
    with autocast(name):
        found = {f"micro-batches of {size}": accumulated(model, rows, size, rank) for size in (6, 2)}
        gradients = {name: whole(parameter.grad) / 2 for name, parameter in plain_names(model)}  # two sizes
        with torch.no_grad():
            found |= {batch.__name__: batch(model, rows) for batch in (positioned, padded)}
    exact, single = exact_gradients(folder), single_gradients(folder)
    assert all(gradient.dtype == torch.float32 for gradient in gradients.values())
    errors = {name: (error(gradients[name], exact[name]), 2 * error(single[name], exact[name])) for name in exact}
    return Found(len(expected), {what: differences(each, expected) for what, each in found.items()}, errors)


def sharded_beside_biases(model: Any) -> Any:
    """Shard a model, but not the float32 biases of its routers, which the policy would round."""
    biases = {each for name, each in model.named_parameters() if name.endswith(CHOOSING)}
    assert biases, "premise: biases are parameters"
    return sharded(model, ignored_params=biases)


SHARDED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "afmoe": ("fsdp", sharded_beside_biases),
    "ernie4_5_moe": ("fsdp autocast", sharded_masters),
}
"""How trainers shard families with float32 parameters that a policy would round."""


def compare_family(family: str, folder: str, rank: int) -> Found:
    """Test a model that is sharded by layers. Gradients match a single process up to one bfloat16 rounding."""
    name, shard = SHARDED.get(family, ("fsdp", sharded))
    rows, model = sequences(rank), shard(aligned(folder))
    with autocast(name):
        found = packed(model, rows)
        loss(found, rank).backward()
    single, beside = single_gradients(folder), unwrapped(model)._aligned.spec.beside
    trained = [each for each in plain_names(model) if not each[0].startswith(beside) and not each[0].endswith(CHOOSING)]
    errors = {name: (error(whole(each.grad), single[name].double()), 2**-8) for name, each in trained}
    with autocast(name):
        columns = token_statistics(model, torch.cat(rows), lengths=LENS, top_logprobs=2)
    each, expected = {"log_probs": found.detach(), "statistics": columns.logprobs}, expected_log_probs(folder, rank)
    return Found(len(expected), {what: differences(part, expected) for what, part in each.items()}, errors)


def adapted(family: str, folder: str) -> Any:
    """Return an aligned model with LoRA, and with a norm that is trained without an adapter."""
    config: dict[str, Any] = dict(target_modules=ADAPTED[family], modules_to_save=["norm", "norm_f"])
    model = adapt(Path(folder), **config).train()
    align(model)
    return model


def compare_adapted(family: str, folder: str, rank: int) -> Found:
    """Compare log-probs and merged weights of a sharded model. A previous forward pass has left some of the weights
    unsharded and rounded.
    """
    model, bare = checkpointed_by_torch(adapted(family, folder)), adapted(family, folder)
    with torch.no_grad():
        sampled = packed(model, sequences(rank))
        with torch.autocast("cpu", torch.bfloat16):
            expected_log_probs = packed(bare, sequences(rank))
    whole = [name for name, each in model.named_parameters() if not hasattr(each, "full_tensor")]
    assert any("embed" in name for name in whole), "premise: the embedding is left whole"
    found, expected = (dict(merged_weights(each, torch.float32)) for each in (model, bare))
    merged = {name: differences(found[name], each) for name, each in expected.items()}
    return Found(len(expected), merged | {"log_probs": differences(sampled, expected_log_probs)}, {})


def train_and_push(name: str, folder: str, rank: int, address: str, version: int, adapters: bool = False) -> Found:
    """Train on samples of a worker, and compare the log-probs of worker and trainer after each push. At first the
    worker has the weights of the previous case, so the first push of adapters is repeated with all weights.
    """
    model = WRAPPERS[name](adapted("llama", folder) if adapters else aligned(folder))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)
    found: dict[str, int] = {}
    count = 0
    with RolloutClient(address) as client, WeightPublisher(timeout=60.0) as publisher:
        for step in range(STEPS + 1):
            if rank == 0:
                connect = publisher.connect_fleet if adapters else publisher.connect
                connect([address])
            if rank == 0 or not isinstance(model, DistributedDataParallel):
                publisher.push(model, version + step, allow_older=True, adapters=adapters)
            distributed.barrier()
            groups = client.generate(PROMPTS, SamplingParams(n=2, max_tokens=10), seed=step * 2 + rank)
            pairs = [(prompt, one) for prompt, group in zip(PROMPTS, groups, strict=True) for one in group.samples]
            rows = [torch.tensor([*prompt, *sample.token_ids]) for prompt, sample in pairs]
            with autocast(name):
                engine = client.health().engine
                assert engine is not None and aligned_with(model)._asdict().items() <= engine.items()
                log_probs = packed(model, rows)
            parts = log_probs.detach().split([len(row) for row in rows])
            expected = [torch.tensor(sample.logprobs) for _, sample in pairs]
            each = [part[-len(one) :] for part, one in zip(parts, expected, strict=True)]
            found[f"step {step}"] = differences(torch.cat(each), torch.cat(expected))
            count += sum(map(len, expected))
            (-log_probs.mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            distributed.barrier()
    return Found(count, found, {})


# Each of these functions wraps an aligned model with a vision tower.


def sharded_by_layers(model: Any) -> Any:
    """Shard all units that a trainer may find: the layers of tower and decoder, and the embeddings of SigLIP."""
    names = {"Qwen3VLVisionBlock", "Qwen3VLTextDecoderLayer", "SiglipVisionEmbeddings", "SiglipEncoderLayer"}
    names |= {"Gemma3DecoderLayer"}
    units = [module for module in model.modules() if type(module).__name__ in names]
    for unit in units:
        fully_shard(unit, mp_policy=MixedPrecisionPolicy(**POLICY))
    return fully_shard(model, mp_policy=MixedPrecisionPolicy(**POLICY))


def sharded_by_parts(model: Any) -> Any:
    """Shard tower and decoder, and recompute the layers of both in the backward pass."""
    model.gradient_checkpointing_enable()
    for part in (model.model.visual, model.model.language_model):
        fully_shard(part, mp_policy=MixedPrecisionPolicy(**POLICY))
    return fully_shard(model, mp_policy=MixedPrecisionPolicy(**POLICY))


WITH_TOWER: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "tower, fsdp by layers": ("qwen3_vl", sharded_by_layers),
    "tower, fsdp by parts": ("qwen3_vl", sharded_by_parts),
    "tower, ddp autocast": ("qwen3_vl", DistributedDataParallel),
    "tower of gemma, fsdp by layers": ("gemma3", sharded_by_layers),
}


def with_tower(folder: str, dtype: torch.dtype = torch.float32) -> Any:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).train()
    align(model)
    return model


def prompts_with_images(model: Any, rank: int) -> tuple[list[Tensor], list[list[Any]]]:
    """Return two sequences and their images. Rank 1 has no images."""
    tower = model._aligned.spec.tower
    from engine.test_images import image_of, prompt_of

    grids = [tower.grid or (4, 6), tower.grid or (10, 4)] if rank == 0 else []
    found = [prompt_of(tower, [image_of(tower, grid, seed)], seed) for seed, grid in enumerate(grids)]
    found = found or [prompt_of(tower, [], seed, lead=20) for seed in (5, 6)]
    return [torch.from_numpy(prompt).long() for prompt, _ in found], [list(images) for _, images in found]


def log_probs_with_images(model: Any, inside: Any, rank: int) -> Tensor:
    rows, media = prompts_with_images(inside, rank)
    return token_log_probs(model, torch.cat(rows), lengths=[len(row) for row in rows], media=media)


@cache
def expected_with_images(folder: str, rank: int) -> Tensor:
    """Return the log-probs of an unwrapped bfloat16 model, which have the bits of a worker."""
    model = with_tower(folder, torch.bfloat16)
    with torch.no_grad():
        return log_probs_with_images(model, model, rank)


@cache
def single_tower_gradients(folder: str) -> dict[str, Tensor]:
    """Return the gradients of the mean of both ranks' losses, from a single process."""
    model = with_tower(folder)
    for rank in (0, 1):
        with torch.autocast("cpu", torch.bfloat16):
            (log_probs_with_images(model, model, rank).mean() / 2).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def compare_tower(name: str, folder: str, rank: int) -> Found:
    """Test a wrapped model with a tower. First, only rank 0 has images, then only rank 1. The gradients match those of
    a single process up to one bfloat16 rounding.
    """
    bare, single = with_tower(folder), single_tower_gradients(folder)
    model, differing, count = WITH_TOWER[name][1](bare), dict[str, int](), 0
    for turn in (0, 1):
        own = (rank + turn) % 2
        with autocast(name):
            found = log_probs_with_images(model, bare, own)
        differing[f"turn {turn}"] = differences(found.detach(), expected_with_images(folder, own))
        count += len(found)
        (found.mean() / 2).backward()
    scale = max(gradient.norm() for gradient in single.values())
    assert all(gradient.any() for gradient in single.values()), "premise: the tower is trained"
    found_gradients = {name: whole(each.grad) for name, each in plain_names(model)}
    errors = {name: (float((found_gradients[name] - each).norm() / scale), 2**-8) for name, each in single.items()}
    return Found(count, differing, errors)


# Each of these functions wraps an aligned model in an unsupported way.


def sharded_inside(model: Any) -> Any:
    fully_shard(model.model.layers[1].mlp)
    return sharded(model)


def sharded_as_in_fsdp1(model: Any) -> Any:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def parallel_tensors(model: Any) -> Any:
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"model.layers.0.mlp.up_proj": ColwiseParallel()})
    return model


def with_a_wide_head(model: Any) -> Any:
    fully_shard(model.lm_head, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    return sharded(model)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "sharded inside": sharded_inside,
    "fsdp1": sharded_as_in_fsdp1,
    "tensor parallel": parallel_tensors,
    "wide head": with_a_wide_head,
    "rounded bias": sharded,
}


def refusal(name: str, folder: str, rank: int) -> str:
    try:
        packed(REFUSED[name](aligned(folder)), sequences(rank))
    except AlignmentError as error:
        return str(error)
    return "none"


def cases(rank: int, settings: dict[str, Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    folders, address = settings["folders"], settings["address"]
    for name in WRAPPERS:
        yield name, partial(compare, name, folders["llama"], rank)
    for family in settings["others"]:
        yield family, partial(compare_family, family, folders[family], rank)
    for i, name in enumerate(("fsdp", "fsdp offloaded", "ddp autocast")):
        pushing = partial(train_and_push, name, folders["llama"], rank, address)
        yield f"{name}, pushed", partial(pushing, 10 * i)
        yield f"{name}, adapters pushed", partial(pushing, 10 * i + 5, adapters=True)
    for name, (family, _) in WITH_TOWER.items():
        yield name, partial(compare_tower, name, settings["towers"][family], rank)
    for family in ADAPTED:
        yield f"{family}, adapted", partial(compare_adapted, family, folders[family], rank)
    for name in REFUSED:
        folder = folders["afmoe" if name == "rounded bias" else "llama"]
        yield f"{name}, refused", partial(refusal, name, folder, rank)


def main() -> None:
    rank, port, settings = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    AfmoePreTrainedModel._keep_in_fp32_modules_strict = {"mlp.expert_bias"}
    distributed.init_process_group("gloo")
    gc.freeze()  # garbage collections between cases then skip the objects that the imports made
    found: dict[str, Any] = {}
    for name, case in cases(rank, settings):
        try:
            told = case()
            found[name] = asdict(told) if isinstance(told, Found) else told
        except Exception:
            found[name] = traceback.format_exc()
        gc.collect()
    Path(settings["out"], f"{rank}.json").write_text(json.dumps(found))
    distributed.barrier()
    os._exit(0)  # DTensor's caches keep gloo's threads alive, which can abort a normal exit of the interpreter


if __name__ == "__main__":
    main()
