"""The command line: reads options, calls the module that does the work, and reports an error in one line with exit
code 1.

Heavy modules are imported inside the commands, so that `trueroll --help` is fast.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
from enum import StrEnum
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from trueroll.errors import LINES, ConfigError, TruerollError, printable

from ...engine.config import BackendName, Dtype, EngineConfig, KvCacheDtype, Quantization, defaults_of
from ...engine.models.names import HUB, check_model, find_config
from ...engine.request import SamplingParams
from ..config import WorkerConfig, address_hint, check_saving
from ..http.config import HttpConfig
from ..logs import log_to_stderr
from . import options
from .contact import WORKER_SECONDS, check_worker, contact, patience
from .options import GroupedCommand, names_of, with_settings
from .progress import tell

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,  # rich truncates long option names at 80 columns and drops square brackets
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"trueroll {version('trueroll')}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Rollout generation for reinforcement learning: the same request gives the same bits."""


ENGINE = {name: field.default for name, field in EngineConfig.model_fields.items()}
GPU = defaults_of("cuda")
_MOST_GIB = 2**20
SERVE_EXAMPLES = """\b
Examples:
  trueroll serve smollm2
  trueroll serve hf://Qwen/Qwen3-0.6B --device cuda --max-model-len 8192
  trueroll serve MODEL --address tcp://127.0.0.1:5555 --kv-memory 4GiB
"""
HTTP_EXAMPLES = """\b
Examples:
  trueroll http ipc:///tmp/trueroll-x/worker.sock --port 8000
  trueroll http tcp://127.0.0.1:5555 --tokenizer MODEL --api-key-file KEY
"""
SAMPLING = {name: field.default for name, field in SamplingParams.model_fields.items()}


def _check_folder(file: Path | None) -> Path | None:
    if file is not None and not file.absolute().parent.is_dir():
        raise typer.BadParameter(f"the folder {file.parent} does not exist; create it, or give another file")
    if file is not None and file.is_dir():
        raise typer.BadParameter(f"{file} is a folder; give a file")
    if file is not None and not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise typer.BadParameter(f"{file} cannot be written; give a file that you may write")
    return file


def _check_gib(size: float) -> float:
    if not 0 < size <= _MOST_GIB:
        raise typer.BadParameter(f"{size} GiB is out of range; give more than 0 and at most {_MOST_GIB} GiB")
    return size


def _check_model(name: str | None) -> str | None:
    if name is not None:
        check_model(name)
    return name


def _check_target(target: str) -> str:
    """Return `target`. Raise ModelError or ConfigError if `target` is neither a model nor the address of a worker."""
    if "://" in target and not target.startswith(HUB) or address_hint(target):
        return check_worker(target)
    check_model(target)
    return target


_MODEL = typer.Argument(
    metavar="MODEL",
    help="A model folder, hf://ORG/NAME[@REVISION] from the hub, or smollm2.",
    callback=_check_model,
)
Model = Annotated[str, _MODEL]
OptionalModel = Annotated[str | None, _MODEL]
Address = Annotated[
    str,
    typer.Argument(
        metavar="ADDRESS", help="A worker's ipc://... or tcp://..., or a fleet's file.", callback=check_worker
    ),
]
DtypeOption = Annotated[Dtype, typer.Option(help=options.KERNELS["dtype"])]
KvCacheOption = Annotated[KvCacheDtype, typer.Option(help=options.KERNELS["kv_cache_dtype"])]
QuantizationOption = Annotated[Quantization, typer.Option(help=options.KERNELS["quantization"])]
Device = Annotated[str, typer.Option(help=options.KERNELS["device"])]
Backend = Annotated[BackendName, typer.Option(help=options.KERNELS["backend"])]
Threads = Annotated[int | None, typer.Option(help=options.KERNELS["num_threads"])]


ServerPublicKey = Annotated[
    str | None, typer.Option(help="Public key of a worker with named clients, or its .key file.")
]
ClientKeyFile = Annotated[str | None, typer.Option(help="Your .key_secret file for a worker with named clients.")]


Ranks = Annotated[
    int, typer.Option(min=1, max=8, help="Ranks (processes) among which each layer is divided; a power of two.")
]
Stages = Annotated[
    int,
    typer.Option(
        min=1, max=8, help="Stages into which the layers are divided, each with --tensor-parallel-size ranks."
    ),
]


class WorkloadName(StrEnum):
    """The workloads of `bench`."""

    GROUP = "group"
    SHARED = "shared"
    SINGLE = "single"


@app.command(cls=GroupedCommand, epilog=SERVE_EXAMPLES)
@with_settings((EngineConfig, options.ENGINE), (WorkerConfig, options.WORKER))
def serve(model: Model, **settings: Any) -> None:
    """Run a worker until SIGTERM or Ctrl-C. Prints one line when the worker is ready; logs go to stderr."""
    worker_config = WorkerConfig(**{name: settings[name] for name in names_of(options.WORKER)})
    engine_config = EngineConfig(model=model, **{name: settings[name] for name in names_of(options.ENGINE)})
    check_saving(worker_config, engine_config)
    tell(f"starting a worker for {model} ...")
    from ..worker.process import load_engine
    from ..worker.process import serve as serve_requests

    log_to_stderr(logging.INFO)
    serve_requests(worker_config, lambda: load_engine(engine_config), _announce)


def _announce(address: str, info: dict[str, Any]) -> None:
    pools = zip(info["windows"], (info["num_blocks"], *info["window_blocks"]), strict=True)
    named = [(f" of window {window}" if window else "", count) for window, count in pools]
    blocks = ", ".join(f"blocks={count}x{info['block_size']} tokens{window}" for window, count in named)
    backend = f"backend={info['backend']} ({info['isa']})"
    _say(f"ready address={address} model={info['model']} {backend} dtype={info['dtype']} {blocks}")
    print(_summary(address, info), file=sys.stderr, flush=True)


def _summary(address: str, info: dict[str, Any]) -> str:
    """Return the text to print about a new worker: address, model, memory, capacity, and the next command to try."""
    sizes = {"weights": info["weight_bytes"], "KV cache": info["kv_bytes"], "recurrent states": info["state_bytes"]}
    ranks = info.get("tensor_parallel_size", 1) * info.get("pipeline_parallel_size", 1)
    of_each = f", on each of {ranks} ranks" if ranks > 1 else ""
    tokenizer = ["--tokenizer", str(info["model"])] if address.startswith("tcp://") else []
    command = shlex.join(["trueroll", "generate", address, *tokenizer, "--prompt", "Once upon a time"])
    lines = (
        f"address:   {address}",
        f"model:     {info['model']} ({info['architecture']}), {info['dtype']} on {info['device']}",
        "memory:    " + ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in sizes.items() if size) + of_each,
        f"capacity:  {info['num_blocks'] * info['block_size']:,} cached tokens, {info['max_num_seqs']:,} samples at a "
        f"time, contexts of up to {info['max_model_len']:,} tokens",
        f"next:      {command}",
    )
    return "\n".join(map(printable, lines))


def _say(line: str) -> None:
    """Print a line to stdout and flush stdout, because programs may wait for the line. Unprintable characters are
    escaped, because names in the line are untrusted.
    """
    print(printable(line), flush=True)


@app.command()
def generate(
    model_or_address: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_ADDRESS",
            help="A model to start a worker for, or a worker's ipc://... or tcp://...",
            callback=_check_target,
        ),
    ],
    prompt: Annotated[list[str], typer.Option(help="Text to complete. Can be given several times.")],
    n: Annotated[int, typer.Option("-n", "--n", help="Samples per prompt.")] = SAMPLING["n"],
    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt into the model's chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of new tokens per sample.")] = SAMPLING["max_tokens"],
    min_tokens: Annotated[int, typer.Option(help="Minimum number of new tokens per sample.")] = SAMPLING["min_tokens"],
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0: greedy.")] = SAMPLING["temperature"],
    top_k: Annotated[int, typer.Option(help="Sample from the k most probable tokens; -1: off.")] = SAMPLING["top_k"],
    top_p: Annotated[
        float, typer.Option(help="Sample from the most probable tokens with a total probability of p.")
    ] = SAMPLING["top_p"],
    min_p: Annotated[
        float, typer.Option(help="Exclude tokens less probable than min_p times the most probable token.")
    ] = SAMPLING["min_p"],
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: tokens of prompt and sample become less likely.")
    ] = SAMPLING["repetition_penalty"],
    frequency_penalty: Annotated[
        float, typer.Option(help="Subtracted from a logit for each time that the sample has the token.")
    ] = SAMPLING["frequency_penalty"],
    presence_penalty: Annotated[
        float, typer.Option(help="Subtracted from the logits of tokens that the sample has.")
    ] = SAMPLING["presence_penalty"],
    seed: Annotated[
        int | None, typer.Option(help="Seed of the samples. Default: a random seed, which is printed.")
    ] = SAMPLING["seed"],
    stop: Annotated[list[str], typer.Option(help="Text that ends a sample. Can be given several times.")] = [],  # noqa: B006
    structured_outputs: Annotated[
        str, typer.Option(help="Grammar of the samples, as a JSON object with json, regex, choice or grammar.")
    ] = "",
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Model with the tokenizer to use; required for tcp://. Default: the served model."),
    ] = None,
    server_public_key: ServerPublicKey = None,
    client_key_file: ClientKeyFile = None,
) -> None:
    """Generate completions for prompts, and print all samples."""
    from .text import print_completions

    params = SamplingParams(
        n=n,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        stop=tuple(stop),
        structured_outputs=_read_grammar(structured_outputs),
    )
    keys = server_public_key, client_key_file
    print_completions(model_or_address, prompt, params, seed, chat, tokenizer, keys)


def _read_grammar(text: str) -> Any:
    """Return the JSON value in a text; None for no text."""
    try:
        return json.loads(text) if text else None
    except ValueError as error:
        raise ConfigError(f"--structured-outputs: is not valid JSON: {error}", field="structured_outputs") from None


@app.command(cls=GroupedCommand, epilog=HTTP_EXAMPLES)
@with_settings((HttpConfig, options.HTTP))
def http(
    address: Address,
    server_public_key: ServerPublicKey = None,
    client_key_file: ClientKeyFile = None,
    **settings: Any,
) -> None:
    """Serve a worker over HTTP with the endpoints of OpenAI and vLLM servers. Prints one line when the server is ready.

    Requires pip install 'trueroll[http]'.
    """
    log_to_stderr(logging.INFO)
    config = HttpConfig(address=address, **settings)
    for package in ("starlette", "h11"):
        if find_spec(package) is None:
            raise ConfigError(f"http: the package {package} is not installed; run pip install 'trueroll[http]'")
    tell(f"waiting for {address}: if no worker answers within {patience(WORKER_SECONDS):.0f} s, this command ends ...")
    from ..http.server import serve as serve_http
    from ..worker.process import raise_descriptor_limit

    raise_descriptor_limit()
    keys = server_public_key, client_key_file
    line = "ready url={url} page={url}/ui model={model} address={address}"
    serve_http(config, keys, lambda url, model: _say(line.format(url=url, model=model, address=address)))


@app.command()
def fleet(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file; docs/fleet.md has an example.")],
) -> None:
    """Run many workers on a Ray cluster until SIGTERM or Ctrl-C. Prints one line when the workers are ready; logs go to
    stderr.

    Requires pip install 'trueroll[ray]'.
    """
    from ..fleet.config import read_config

    settings = read_config(config)
    tell(f"starting {settings['num_workers']} workers for {settings['model']} ...")
    from ..fleet.serve import serve as serve_fleet

    log_to_stderr(logging.INFO)
    serve_fleet(settings, _say)


@app.command()
def top(
    address: Address,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two updates.")] = 1.0,
    server_public_key: ServerPublicKey = None,
    client_key_file: ClientKeyFile = None,
) -> None:
    """Watch a worker until Ctrl-C: requests, tokens per second, cache, memory, pushes.

    Without a terminal, prints one view and exits.
    """
    from rich.console import Console

    from ..client.client import RolloutClient
    from ..client.membership import is_fleet
    from ..fleet.client import FleetClient
    from .top import SILENCE_SECONDS
    from .top import top as watch

    keys = server_public_key, client_key_file
    contact(address, SILENCE_SECONDS)
    is_one = not is_fleet(address)
    client = RolloutClient(address, SILENCE_SECONDS, *keys) if is_one else FleetClient(address, SILENCE_SECONDS, *keys)
    with client:
        watch(client, interval, Console())


def _is_http(address: str) -> bool:
    return address.startswith(("http://", "https://"))


def _check_audited(address: str) -> str:
    return address if _is_http(address) else check_worker(address)


def _audit_engine(model: str, url: str, plot: Path | None, api_key_file: str | None) -> None:
    from ..foreign.audit import audit_engine
    from ..http.clients import read_api_key
    from .pictures import plot_conditions

    log_to_stderr(logging.INFO)
    found = audit_engine(model, url, api_key=api_key_file and read_api_key(api_key_file).decode())
    typer.echo(printable(str(found), kept=LINES))
    if plot is not None:
        plot_conditions(found, f"{found.server}, trainer in {found.dtype}", plot)
    _exit_unless(not found.causes)


@app.command()
def audit(
    model: Model,
    address: Annotated[
        str,
        typer.Argument(
            metavar="ADDRESS",
            help="A worker's ipc://... or tcp://..., or the http://HOST:PORT of vLLM, SGLang or `trueroll http`.",
            callback=_check_audited,
        ),
    ],
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw the difference of each token in this PNG, beside those of the model without alignment "
            "(pip install 'trueroll[plot]').",
            callback=_check_folder,
        ),
    ] = None,
    api_key_file: Annotated[
        str | None,
        typer.Option(help="File with the API key of an HTTP server. Other users must not be able to read the file."),
    ] = None,
    server_public_key: ServerPublicKey = None,
    client_key_file: ClientKeyFile = None,
) -> None:
    """Load MODEL on this machine as an aligned trainer, compare the trainer's log-probs with a worker's log-probs, and
    explain differences.

    For a worker, exits with 1 if any bit differs. The engine of an HTTP server is audited on cache misses and hits,
    alone and in company of other requests, and the command exits with 1 if it finds a cause of differences.
    """
    from ..client.client import RolloutClient
    from .pictures import check_can_plot, describe_worker, plot_differences

    if plot is not None:
        check_can_plot()
    if _is_http(address):
        _audit_engine(model, address, plot, api_key_file)
        return
    if api_key_file is not None:
        raise typer.BadParameter("--api-key-file needs the URL of an HTTP server; use --client-key-file for a worker")
    contact(address, WORKER_SECONDS)
    from ..auditing import audit_folder

    with RolloutClient(address, WORKER_SECONDS, server_public_key, client_key_file) as client:
        audits = audit_folder(model, client, with_plain=plot is not None)
        if plot is not None:
            plot_differences(audits, describe_worker(client), plot)
    typer.echo(printable(str(audits[0]), kept=LINES))
    if plot is not None:
        typer.echo(f"Without alignment: {printable(str(audits[1]), kept=LINES)}")
    _exit_unless(not audits[0].num_different)


@app.command()
def replay(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A record that session.record() returned.", exists=True, dir_okay=False, readable=True
        ),
    ],
    address: Address,
    weight_version: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Replay the requests that this version of the weights drew, on a worker that serves the same weights "
            "under any number. Default: the version that the worker serves.",
        ),
    ] = None,
    server_public_key: ServerPublicKey = None,
    client_key_file: ClientKeyFile = None,
) -> None:
    """Send each request of a session's record to a worker or a fleet again, and show which bits differ.

    Exits with 1 if any bit differs, if a request fails, or if nothing was compared.
    """
    from rich.console import Console

    from ..client.client import RolloutClient
    from ..client.membership import is_fleet
    from ..fleet.client import FleetClient
    from .replay import read
    from .replay import replay as run_replay

    record = read(file)
    keys = server_public_key, client_key_file
    contact(address, WORKER_SECONDS)
    kind = FleetClient if is_fleet(address) else RolloutClient
    with kind(address, WORKER_SECONDS, *keys) as client:
        _exit_unless(run_replay(record, client, weight_version, Console()))


@app.command()
def demo() -> None:
    """Generate groups of samples with SmolLM2-135M, then show that no bit depends on the cache or on other requests."""
    tell("starting the demo ...")
    from rich.console import Console

    from .demo import demo as run_demo

    _exit_unless(run_demo(Console()))


@app.command()
def verify(
    model: Model,
    dtype: DtypeOption = ENGINE["dtype"],
    quantization: QuantizationOption = ENGINE["quantization"],
    kv_cache_dtype: KvCacheOption = ENGINE["kv_cache_dtype"],
    device: Device = ENGINE["device"],
    backend: Backend = ENGINE["backend"],
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Run fewer cells with shorter prompts; the output says what is left out."),
    ] = False,
    devices: Annotated[int, typer.Option(min=1, max=64, help="Compare this many ranks (processes) with one rank.")] = 1,
    stages: Annotated[
        int, typer.Option(min=1, max=8, help="Stages of neighbouring layers among which the ranks are divided.")
    ] = 1,
    json: Annotated[
        Path | None, typer.Option(help="Write the results of all cells to this file as JSON.", callback=_check_folder)
    ] = None,
) -> None:
    """Run the exactness matrix: the same requests under many circumstances, compared bit by bit.

    Exits with 1 if any bit differs, or if intended circumstances, such as a preemption, did not occur.
    """
    if devices % stages:
        raise typer.BadParameter(f"--devices must be a multiple of --stages = {stages} (got {devices})")
    ranks = dict(tensor_parallel_size=devices // stages, pipeline_parallel_size=stages)
    kernels: dict[str, Any] = dict(dtype=dtype, quantization=quantization, kv_cache_dtype=kv_cache_dtype)
    kernels |= dict(device=device, backend=backend)
    config = EngineConfig(model=model, **kernels, **ranks)
    tell(f"loading {model} ...")
    from rich.console import Console

    from .verify import verify as run_matrix

    _exit_unless(run_matrix(config, Console(), json, quick=quick))


@app.command()
def bench(
    model: OptionalModel = None,
    dummy_weights: Annotated[
        str | None,
        typer.Option(
            metavar="CONFIG",
            help="Instead of MODEL: random weights for a config.json, a folder with a config.json, or one of "
            "qwen2.5-7b, qwen3-0.6b, qwen3-moe-0.3b, qwen3.5-27b, qwen3.5-0.8b, qwen3.5-0.15b, bamba-0.13b, "
            "deepseek-v3-0.15b.",
        ),
    ] = None,
    workload: Annotated[
        list[WorkloadName],
        typer.Option(
            help="group: 8 prompts of 128 tokens x 8 samples x 128 new tokens, temperature 1. shared: 32 prompts of "
            "1024 shared and 64 own tokens, 8 and 128 new tokens, greedy. single: one prompt of 128 tokens, 128 new "
            "tokens. Can be given several times."
        ),
    ] = list(WorkloadName),  # noqa: B006
    cache: Annotated[
        Literal["on", "off", "both"], typer.Option(help="Measure with the prefix cache on, off or both.")
    ] = "both",
    compare: Annotated[
        Literal["hf"] | None, typer.Option(help="hf: also measure transformers' generate on the same work.")
    ] = None,
    speculative: Annotated[
        Literal["off", "auto", "ngram", "mtp"],
        typer.Option(help="Also measure an engine with these drafts, unless off."),
    ] = ENGINE["speculative"],
    dtype: DtypeOption = ENGINE["dtype"],
    quantization: QuantizationOption = ENGINE["quantization"],
    kv_cache_dtype: KvCacheOption = ENGINE["kv_cache_dtype"],
    device: Device = ENGINE["device"],
    backend: Backend = ENGINE["backend"],
    num_threads: Threads = ENGINE["num_threads"],
    tensor_parallel_size: Ranks = 1,
    pipeline_parallel_size: Stages = 1,
    json: Annotated[
        Path | None, typer.Option(help="Write the measurements to this file as JSON.", callback=_check_folder)
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Plot the speeds to this PNG (pip install 'trueroll[plot]').", callback=_check_folder),
    ] = None,
) -> None:
    """Measure tokens/s, requests/s, hit rate and time to first token."""
    named = _check_one_model(model, dummy_weights, compare)
    ranks = dict(tensor_parallel_size=tensor_parallel_size, pipeline_parallel_size=pipeline_parallel_size)
    kernels: dict[str, Any] = dict(dtype=dtype, quantization=quantization, kv_cache_dtype=kv_cache_dtype)
    kernels |= dict(device=device, backend=backend)
    config = EngineConfig(model=named, **kernels, speculative=speculative, **ranks)
    config = config.model_copy(update=dict(num_threads=num_threads))
    if config.num_ranks > 1 and (dummy_weights is not None or compare is not None):
        raise typer.BadParameter("--dummy-weights and --compare support only one rank")
    tell(f"loading {named} ...")
    from rich.console import Console

    from .bench import WORKLOADS, Plan
    from .bench import bench as run_bench

    workloads = [each for name in workload for each in WORKLOADS[name.value]]
    caches = {"on": (True,), "off": (False,), "both": (True, False)}[cache]
    plan = Plan(workloads, caches, compare == "hf", json, plot, dummy_weights is not None)
    run_bench(config, plan, Console())


@app.command()
def plan(
    model: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A config.json, a folder with a config.json, or a name.")
    ],
    memory: Annotated[
        float, typer.Option(help="Memory of a device in GiB; the plan uses all of it.", callback=_check_gib)
    ] = 80.0,
    max_num_seqs: Annotated[int, typer.Option(help="Samples that run at the same time.")] = GPU.max_num_seqs,
    max_model_len: Annotated[int | None, typer.Option(help="Maximum length of a prompt with its new tokens.")] = None,
    block_size: Annotated[int, typer.Option(help="Tokens in a block of the KV cache.")] = ENGINE["block_size"],
    state_interval: Annotated[int | None, typer.Option(help="Tokens between checkpoints of recurrent states.")] = None,
    kv_bytes: Annotated[
        int | None,
        typer.Option(min=1, max=4, help="Bytes per element of keys and values. Default: the size of --dtype."),
    ] = None,
    max_images: Annotated[
        int, typer.Option(help="Maximum number of images in a prompt; 0: without the model's vision tower.")
    ] = ENGINE["max_images"],
    image_cache_bytes: Annotated[int, typer.Option(help="Maximum bytes of encoded images.")] = ENGINE[
        "image_cache_bytes"
    ],
    tensor_parallel_size: Ranks = 1,
    pipeline_parallel_size: Stages = 1,
    dtype: DtypeOption = ENGINE["dtype"],
    quantization: QuantizationOption = ENGINE["quantization"],
    kv_cache_dtype: KvCacheOption = ENGINE["kv_cache_dtype"],
) -> None:
    """Show how a worker would divide a device's memory, and the effect of other checkpoint intervals."""
    config = EngineConfig(
        model=model,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=GPU.max_num_batched_tokens,
        state_interval=state_interval,
        kv_memory_fraction=1.0,
        max_images=max_images,
        image_cache_bytes=image_cache_bytes,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
    )
    find_config(model)
    tell(f"planning for {model} ...")
    from rich.console import Console

    from .plan import plan as show

    show(config, int(memory * 2**30), kv_bytes, Console())


def _check_one_model(model: str | None, dummy_weights: str | None, compare: str | None) -> str:
    """Return the name of the model or the configuration. Raise BadParameter unless exactly one of `model` and
    `dummy_weights` is given.
    """
    if model is not None and dummy_weights is not None:
        raise typer.BadParameter(f"MODEL {model} and --dummy-weights {dummy_weights} exclude each other; give only one")
    if dummy_weights is not None and compare is not None:
        raise typer.BadParameter("--compare hf needs a MODEL; give MODEL instead of --dummy-weights, or omit --compare")
    if dummy_weights is not None:
        find_config(dummy_weights)
    if name := model or dummy_weights:
        return name
    raise typer.BadParameter(
        "MODEL or --dummy-weights CONFIG is missing; give a model, or a configuration such as qwen2.5-7b"
    )


def _exit_unless(passed: bool) -> None:
    if not passed:
        raise typer.Exit(1)


def main() -> None:
    """Run the command that the arguments name. Exit with 1 after an error, which is printed in one line."""
    try:
        app()
    except TruerollError as error:
        print(f"trueroll: {printable(str(error), kept=LINES)}", file=sys.stderr)
        sys.exit(1)
