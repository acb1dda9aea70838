"""The command line: reads options, calls the module that does the work, turns errors into one line and an exit code.

Heavy modules are imported inside the commands, so that `trueroll --help` answers at once.
"""

from __future__ import annotations

import logging
import sys
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from trueroll.errors import LINES, ConfigError, TruerollError, printable

from ...engine.config import BackendName, Dtype, EngineConfig, defaults_of
from ...engine.request import SamplingParams
from ..config import WorkerConfig
from ..http.config import HttpConfig
from ..logs import log_to_stderr

app = typer.Typer(
    help="Rollout generation for reinforcement learning: the same request gives the same bits.",
    no_args_is_help=True,
    rich_markup_mode=None,  # rich cuts long option names off at 80 columns and swallows square brackets
    add_completion=False,
    pretty_exceptions_enable=False,
)

ENGINE = {name: field.default for name, field in EngineConfig.model_fields.items()}
HTTP = {name: field.default for name, field in HttpConfig.model_fields.items()}
WORKER = {name: field.default for name, field in WorkerConfig.model_fields.items()}
GPU = defaults_of("cuda")
_MOST_GIB = 2**20
SAMPLING = {name: field.default for name, field in SamplingParams.model_fields.items()}


def _check_folder(file: Path | None) -> Path | None:
    if file is not None and not file.absolute().parent.is_dir():
        raise typer.BadParameter(f"expected a file in a folder that exists, found no folder {file.parent}")
    if file is not None and file.is_dir():
        raise typer.BadParameter(f"expected a file, found the folder {file}")
    return file


def _check_gib(size: float) -> float:
    if not 0 < size <= _MOST_GIB:
        raise typer.BadParameter(f"expected more than 0 GiB and at most {_MOST_GIB}, found {size}")
    return size


_MODEL = typer.Argument(metavar="MODEL", help="A model folder, hf://ORG/NAME[@REVISION] of the hub, or smollm2.")
Model = Annotated[str, _MODEL]
OptionalModel = Annotated[str | None, _MODEL]
DtypeOption = Annotated[Dtype, typer.Option(help="Of weights and KV cache; auto: that of config.json.")]
Device = Annotated[str, typer.Option(help="Where torch computes, such as cpu or cuda.")]
Backend = Annotated[
    BackendName,
    typer.Option(
        help="cpu, triton: native kernels for a CPU, a GPU; auto: the one for the device if it serves the model."
    ),
]
Threads = Annotated[int | None, typer.Option(help="CPU threads; results do not depend on it. Default: torch's choice.")]


ServerPublicKey = Annotated[str | None, typer.Option(help="Of a worker with named clients: the key, or its .key file.")]
ClientKeyFile = Annotated[str | None, typer.Option(help="The .key_secret file that such a worker knows you by.")]


class WorkloadName(StrEnum):
    """What `bench` can measure."""

    GROUP = "group"
    SHARED = "shared"
    SINGLE = "single"


@app.command()
def serve(
    model: Model,
    address: Annotated[
        str | None, typer.Option(help="ipc://PATH or tcp://127.0.0.1:PORT. Default: a new private ipc socket.")
    ] = WORKER["address"],
    dtype: DtypeOption = ENGINE["dtype"],
    device: Device = ENGINE["device"],
    backend: Backend = ENGINE["backend"],
    block_size: Annotated[int, typer.Option(help="Tokens in one block of the KV cache; even.")] = ENGINE["block_size"],
    num_blocks: Annotated[
        int | None, typer.Option(help="Blocks of the KV cache. Default: as the available memory allows.")
    ] = ENGINE["num_blocks"],
    kv_memory: Annotated[
        int | None, typer.Option(help="Bytes for the KV cache and states, instead of --num-blocks.")
    ] = ENGINE["kv_memory"],
    kv_memory_fraction: Annotated[
        float | None,
        typer.Option(help="Or its share of the available memory. Default: at most 0.9 on a GPU, 0.25 on a CPU."),
    ] = ENGINE["kv_memory_fraction"],
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest prompt with its new tokens. Default: what the model was trained for.")
    ] = ENGINE["max_model_len"],
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Samples that run at the same time. Default: 256 on a GPU, 64 on a CPU.")
    ] = ENGINE["max_num_seqs"],
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens computed in one step; longer prompts are cut into chunks. Default: 8192 (GPU), 512 (CPU)."
        ),
    ] = ENGINE["max_num_batched_tokens"],
    state_interval: Annotated[
        int | None,
        typer.Option(help="Tokens between checkpoints of recurrent states. Default: as `trueroll plan` shows."),
    ] = ENGINE["state_interval"],
    decode_state_interval: Annotated[
        int, typer.Option(help="The same for tokens that are generated; 0: no checkpoints while decoding.")
    ] = ENGINE["decode_state_interval"],
    state_budget: Annotated[
        int | None, typer.Option(help="Most checkpoints that are held. Default: as many as the blocks have intervals.")
    ] = ENGINE["state_budget"],
    enable_prefix_caching: Annotated[
        bool, typer.Option(help="Reuse the KV of prefixes that were computed before.")
    ] = ENGINE["enable_prefix_caching"],
    cuda_graphs: Annotated[bool, typer.Option(help="Run decode steps on a GPU as CUDA graphs.")] = ENGINE[
        "cuda_graphs"
    ],
    num_threads: Threads = ENGINE["num_threads"],
    curve_secret_key_file: Annotated[
        str | None, typer.Option(help="CURVE keys of the worker, needed for addresses beyond this machine.")
    ] = WORKER["curve_secret_key_file"],
    clients_file: Annotated[
        str | None, typer.Option(help="Who may come in: on each line a role (generate, control), a user, a public key.")
    ] = WORKER["clients_file"],
    max_connections: Annotated[int, typer.Option(help="Most connections at a time.")] = WORKER["max_connections"],
    max_message_bytes: Annotated[int, typer.Option(help="Longest message that is read.")] = WORKER["max_message_bytes"],
    max_n: Annotated[int, typer.Option(help="Most samples in one request.")] = WORKER["max_n"],
    max_queued_requests: Annotated[int, typer.Option(help="Most requests accepted and not finished.")] = WORKER[
        "max_queued_requests"
    ],
    max_queued_samples: Annotated[int, typer.Option(help="Most samples of them that are not finished.")] = WORKER[
        "max_queued_samples"
    ],
    max_queued_bytes: Annotated[int, typer.Option(help="Most bytes of them.")] = WORKER["max_queued_bytes"],
    max_kept_results: Annotated[int, typer.Option(help="Most results kept until a client acknowledges them.")] = WORKER[
        "max_kept_results"
    ],
    max_kept_bytes: Annotated[int, typer.Option(help="Most bytes of results kept.")] = WORKER["max_kept_bytes"],
    max_unread_bytes: Annotated[int, typer.Option(help="Most bytes of replies to clients that do not read.")] = WORKER[
        "max_unread_bytes"
    ],
    drain_seconds: Annotated[
        float, typer.Option(help="How long running requests may go on after SIGTERM or Ctrl-C.")
    ] = WORKER["drain_seconds"],
    while_unavailable: Annotated[
        Literal["queue", "reject"],
        typer.Option(help="Whether new requests wait or are refused while the worker is paused, asleep or updated."),
    ] = WORKER["while_unavailable"],
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve /metrics and /healthz on this port of 127.0.0.1. Default: not at all.")
    ] = WORKER["metrics_port"],
    push_folder: Annotated[
        str | None, typer.Option(help="Take pushes by disk from folders in this one. Default: from this user's own.")
    ] = WORKER["push_folder"],
    push_hosts: Annotated[
        list[str], typer.Option(help="A host or network beyond loopback that collective pushes use; may be repeated.")
    ] = [],  # noqa: B006
) -> None:
    """Run a worker until SIGTERM or Ctrl-C. Prints one line when it is ready; logs go to stderr."""
    settings = dict(locals())
    from ..worker.process import load_engine
    from ..worker.process import serve as serve_requests

    log_to_stderr(logging.INFO)
    worker_config = WorkerConfig(**{name: settings[name] for name in WORKER})
    engine_config = EngineConfig(**{name: settings[name] for name in ENGINE})
    serve_requests(worker_config, lambda: load_engine(engine_config), _announce)


def _announce(address: str, info: dict[str, Any]) -> None:
    pools = zip(info["windows"], (info["num_blocks"], *info["window_blocks"]), strict=True)
    named = [(f" of window {window}" if window else "", count) for window, count in pools]
    blocks = ", ".join(f"blocks={count}x{info['block_size']} tokens{window}" for window, count in named)
    backend = f"backend={info['backend']} ({info['isa']})"
    _say(f"ready address={address} model={info['model']} {backend} dtype={info['dtype']} {blocks}")


def _say(line: str) -> None:
    """A line of stdout, for whoever waits for it; names in it come from outside."""
    print(printable(line), flush=True)


@app.command()
def generate(
    model_or_address: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_ADDRESS", help="A model, served for this call, or ipc://... or tcp://... of a worker."
        ),
    ],
    prompt: Annotated[list[str], typer.Option(help="A text to complete; may be given several times.")],
    n: Annotated[int, typer.Option("-n", "--n", help="Samples of each prompt.")] = SAMPLING["n"],
    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt into the model's chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Most new tokens of a sample.")] = SAMPLING["max_tokens"],
    min_tokens: Annotated[int, typer.Option(help="Tokens before a sample may end.")] = SAMPLING["min_tokens"],
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = SAMPLING["temperature"],
    top_k: Annotated[int, typer.Option(help="Draw from the k most probable tokens; -1: off.")] = SAMPLING["top_k"],
    top_p: Annotated[float, typer.Option(help="Draw from the most probable tokens up to p.")] = SAMPLING["top_p"],
    min_p: Annotated[float, typer.Option(help="Drop tokens less probable than min_p times the best.")] = SAMPLING[
        "min_p"
    ],
    seed: Annotated[int | None, typer.Option(help="Default: a new one, printed with the samples.")] = SAMPLING["seed"],
    stop: Annotated[list[str], typer.Option(help="A text that ends a sample; may be given several times.")] = [],  # noqa: B006
    tokenizer: Annotated[
        str | None,
        typer.Option(help="The model whose tokenizer is used; to be given for tcp://. Default: the one served."),
    ] = None,
    server_public_key: ServerPublicKey = None,
    client_key_file: ClientKeyFile = None,
) -> None:
    """Complete prompts and print the samples."""
    from .text import print_completions

    params = SamplingParams(
        n=n,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        stop=tuple(stop),
    )
    keys = server_public_key, client_key_file
    print_completions(model_or_address, prompt, params, seed, chat, tokenizer, keys)


@app.command()
def http(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="ipc://... or tcp://... of a worker, or the file of a fleet.")
    ],
    host: Annotated[str, typer.Option(help="The IP to listen on; beyond loopback only with an API key.")] = HTTP[
        "host"
    ],
    port: Annotated[int, typer.Option(help="0: any free one.")] = HTTP["port"],
    api_key_file: Annotated[
        str | None, typer.Option(help="A file with the API key. Default: TRUEROLL_HTTP_API_KEY, if that is set.")
    ] = HTTP["api_key_file"],
    clients_file: Annotated[
        str | None,
        typer.Option(help="Instead of one key, a file: on each line a role (generate, control), a user and a key."),
    ] = HTTP["clients_file"],
    tokenizer: Annotated[
        str | None,
        typer.Option(help="The model whose tokenizer is used; to be given for tcp://. Default: the one served."),
    ] = HTTP["tokenizer"],
    model_name: Annotated[
        str | None, typer.Option(help="What clients call the model. Default: what the worker was told to serve.")
    ] = HTTP["model_name"],
    max_body_bytes: Annotated[int, typer.Option(help="Longest request that is read.")] = HTTP["max_body_bytes"],
    max_unfinished_bytes: Annotated[
        int | None, typer.Option(help="Most bytes of all unfinished requests. Default: 8 times --max-body-bytes.")
    ] = HTTP["max_unfinished_bytes"],
    body_seconds: Annotated[float, typer.Option(help="How long a client may take to send a request.")] = HTTP[
        "body_seconds"
    ],
    max_body_chunks: Annotated[int, typer.Option(help="Most chunks of a request.")] = HTTP["max_body_chunks"],
    max_head_bytes: Annotated[int, typer.Option(help="Longest head of a request.")] = HTTP["max_head_bytes"],
    max_head_lines: Annotated[int, typer.Option(help="Most lines of a head.")] = HTTP["max_head_lines"],
    max_connections: Annotated[
        int | None,
        typer.Option(help="Most connections at a time. Default: half of the descriptors, at most 2048."),
    ] = HTTP["max_connections"],
    head_seconds: Annotated[float, typer.Option(help="How long a client may take to send a head.")] = HTTP[
        "head_seconds"
    ],
    keep_alive_seconds: Annotated[float, typer.Option(help="How long a connection is kept without a request.")] = HTTP[
        "keep_alive_seconds"
    ],
    write_seconds: Annotated[float, typer.Option(help="How long a client may read nothing of an answer.")] = HTTP[
        "write_seconds"
    ],
    linger_seconds: Annotated[
        float, typer.Option(help="How long a refused connection drops what its client still sends.")
    ] = HTTP["linger_seconds"],
    max_body_elements: Annotated[int, typer.Option(help="Most elements of a request, weighted.")] = HTTP[
        "max_body_elements"
    ],
    max_text_chars: Annotated[int, typer.Option(help="Most characters of all texts of a request.")] = HTTP[
        "max_text_chars"
    ],
    max_answer_bytes: Annotated[int, typer.Option(help="Longest answer but for streams, as estimated.")] = HTTP[
        "max_answer_bytes"
    ],
    max_open_requests: Annotated[int, typer.Option(help="Most requests at a time.")] = HTTP["max_open_requests"],
    drain_seconds: Annotated[
        int, typer.Option(help="How long open requests may go on after SIGTERM or Ctrl-C.")
    ] = HTTP["drain_seconds"],
    server_public_key: ServerPublicKey = None,
    client_key_file: ClientKeyFile = None,
) -> None:
    """Answer HTTP, as OpenAI's and vLLM's servers do, with what a worker computes. Prints one line when it is ready.

    Needs pip install 'trueroll[http]'.
    """
    settings = dict(locals())
    log_to_stderr(logging.INFO)
    config = HttpConfig(**{name: settings[name] for name in HTTP})
    for package in ("starlette", "h11"):
        if find_spec(package) is None:
            raise ConfigError(f"http: expected the package {package}, found none; pip install 'trueroll[http]'")
    from ..http.server import serve as serve_http
    from ..worker.process import raise_descriptor_limit

    raise_descriptor_limit()
    keys = server_public_key, client_key_file
    serve_http(config, keys, lambda url, model: _say(f"ready url={url} model={model} address={address}"))


@app.command()
def fleet(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A file in TOML: docs/fleet.md has an example.")],
) -> None:
    """Run many workers on a Ray cluster until SIGTERM or Ctrl-C. Prints one line when all serve; logs go to stderr.

    Needs pip install 'trueroll[ray]'.
    """
    from ..fleet.config import read_config
    from ..fleet.serve import serve as serve_fleet

    log_to_stderr(logging.INFO)
    serve_fleet(read_config(config), _say)


@app.command()
def top(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="ipc://... or tcp://... of a worker, or the file of a fleet.")
    ],
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    server_public_key: ServerPublicKey = None,
    client_key_file: ClientKeyFile = None,
) -> None:
    """Watch a worker: requests, tokens per second, cache, memory, pushes. Ends at Ctrl-C.

    Without a terminal, prints one view and ends.
    """
    from rich.console import Console

    from ..client.client import RolloutClient
    from ..client.membership import is_fleet
    from ..fleet.client import FleetClient
    from .top import SILENCE_SECONDS
    from .top import top as watch

    keys = server_public_key, client_key_file
    is_one = not is_fleet(address)
    client = RolloutClient(address, SILENCE_SECONDS, *keys) if is_one else FleetClient(address, SILENCE_SECONDS, *keys)
    with client:
        watch(client, interval, Console())


@app.command()
def audit(
    model: Model,
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="ipc://... or tcp://... of a worker.")],
    server_public_key: ServerPublicKey = None,
    client_key_file: ClientKeyFile = None,
) -> None:
    """Compare a worker's log-probs with those that an aligned trainer of MODEL has on this machine, and say why not.

    Exits with 1 if any bit differs.
    """
    from ..auditing import audit_folder
    from ..client.client import RolloutClient

    with RolloutClient(address, server_public_key=server_public_key, client_key=client_key_file) as client:
        found = audit_folder(model, client)
    typer.echo(printable(str(found), kept=LINES))
    _exit_unless(not found.num_different)


@app.command()
def demo() -> None:
    """Generate groups of samples with SmolLM2-135M, then show that no bit depends on the cache or the company."""
    from rich.console import Console

    from .demo import demo as run_demo

    _exit_unless(run_demo(Console()))


@app.command()
def verify(
    model: Model,
    dtype: DtypeOption = ENGINE["dtype"],
    device: Device = ENGINE["device"],
    backend: Backend = ENGINE["backend"],
    json: Annotated[
        Path | None, typer.Option(help="Write the results of all cells to this file.", callback=_check_folder)
    ] = None,
) -> None:
    """Run the exactness matrix: the same requests under many circumstances, compared bit by bit.

    Exits with 1 if any bit differs, or if a cell cannot show that its circumstances were real.
    """
    from rich.console import Console

    from .verify import verify as run_matrix

    config = EngineConfig(model=model, dtype=dtype, device=device, backend=backend)
    _exit_unless(run_matrix(config, Console(), json))


@app.command()
def bench(
    model: OptionalModel = None,
    dummy_weights: Annotated[
        str | None,
        typer.Option(
            metavar="CONFIG",
            help="Instead of MODEL: random weights for a config.json, a folder that holds one, or one of "
            "qwen2.5-7b, qwen3-0.6b, qwen3-moe-0.3b, qwen3.5-27b, qwen3.5-0.8b, qwen3.5-0.15b.",
        ),
    ] = None,
    workload: Annotated[
        list[WorkloadName],
        typer.Option(
            help="group: 8 prompts of 128 tokens x 8 samples x 128 new, temperature 1. shared: 32 prompts of 1024 "
            "shared and 64 own tokens, 8 and 128 new, greedy. single: one prompt of 128, 128 new. May be repeated."
        ),
    ] = list(WorkloadName),  # noqa: B006
    cache: Annotated[Literal["on", "off", "both"], typer.Option(help="Whether the prefix cache is used.")] = "both",
    compare: Annotated[
        Literal["hf"] | None, typer.Option(help="hf: do the same work with transformers' generate as well.")
    ] = None,
    dtype: DtypeOption = ENGINE["dtype"],
    device: Device = ENGINE["device"],
    backend: Backend = ENGINE["backend"],
    num_threads: Threads = ENGINE["num_threads"],
    json: Annotated[
        Path | None, typer.Option(help="Write the measurements to this file.", callback=_check_folder)
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw the speeds into this PNG (pip install 'trueroll[plot]').", callback=_check_folder),
    ] = None,
) -> None:
    """Measure tokens/s, requests/s, hit rate and time to first token."""
    from rich.console import Console

    from .bench import WORKLOADS, Plan
    from .bench import bench as run_bench

    named = _check_one_model(model, dummy_weights, compare)
    workloads = [each for name in workload for each in WORKLOADS[name.value]]
    caches = {"on": (True,), "off": (False,), "both": (True, False)}[cache]
    config = EngineConfig(model=named, dtype=dtype, device=device, backend=backend, num_threads=num_threads)
    plan = Plan(
        workloads=workloads,
        caches=caches,
        with_hf=compare == "hf",
        json_file=json,
        plot_file=plot,
        dummy_weights=dummy_weights is not None,
    )
    run_bench(config, plan, Console())


@app.command()
def plan(
    model: Annotated[str, typer.Argument(metavar="CONFIG", help="A config.json, a folder that holds one, or a name.")],
    memory: Annotated[
        float, typer.Option(help="GiB of a device, all of which are planned.", callback=_check_gib)
    ] = 80.0,
    max_num_seqs: Annotated[int, typer.Option(help="Samples that run at the same time.")] = GPU.max_num_seqs,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt with its new tokens.")] = None,
    block_size: Annotated[int, typer.Option(help="Tokens in one block of the KV cache.")] = ENGINE["block_size"],
    state_interval: Annotated[int | None, typer.Option(help="Tokens between checkpoints of recurrent states.")] = None,
    kv_bytes: Annotated[
        int | None,
        typer.Option(min=1, max=4, help="Of an element of keys and values, which a worker stores as --dtype says."),
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Devices that share a model; a worker uses one.")] = 1,
    dtype: DtypeOption = ENGINE["dtype"],
) -> None:
    """Show how a worker would share a device's memory, and what other intervals of checkpoints would give."""
    from rich.console import Console

    from .plan import plan as show

    config = EngineConfig(
        model=model,
        dtype=dtype,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=GPU.max_num_batched_tokens,
        state_interval=state_interval,
        kv_memory_fraction=1.0,
    )
    show(config, int(memory * 2**30), kv_bytes, ranks, Console())


def _check_one_model(model: str | None, dummy_weights: str | None, compare: str | None) -> str:
    """The name of the model or of the configuration, whichever is given."""
    if model is not None and dummy_weights is not None:
        raise typer.BadParameter(f"expected MODEL or --dummy-weights, found {model} and {dummy_weights}; leave one out")
    if dummy_weights is not None and compare is not None:
        raise typer.BadParameter(
            "expected --compare hf with a MODEL, found it with --dummy-weights; name a MODEL or leave --compare out"
        )
    if name := model or dummy_weights:
        return name
    raise typer.BadParameter(
        "expected MODEL or --dummy-weights CONFIG, found neither; name a model, or a configuration such as qwen2.5-7b"
    )


def _exit_unless(passed: bool) -> None:
    if not passed:
        raise typer.Exit(1)


def main() -> None:
    """The program `trueroll`. Exit codes: 0 fine, 1 an error or a failed check, 2 wrong usage."""
    try:
        app()
    except TruerollError as error:
        print(f"trueroll: {printable(str(error), kept=LINES)}", file=sys.stderr)
        sys.exit(1)
