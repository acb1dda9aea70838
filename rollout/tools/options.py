"""Command line options for settings: a table of help texts for each settings class, and the headings of the help page.

Types and defaults come from the settings class. To add a setting, add a field to the settings class and a line to the
table.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeAlias, TypeVar, get_type_hints

import typer
from pydantic import BaseModel
from typer.core import TyperCommand

F = TypeVar("F", bound=Callable[..., None])

Table: TypeAlias = dict[str, dict[str, str]]
"""The help texts of settings, by heading and by the name of the setting."""

KERNELS = {
    "dtype": "Dtype of weights, and of the KV cache by default; auto: the dtype in config.json.",
    "quantization": "Format of weights, like fp8, or of activations too: int8_dynamic, fp8_dynamic; auto: as stored.",
    "kv_cache_dtype": "How keys and values are stored: auto (the model's dtype), int8 or fp8.",
    "device": "Torch device, such as cpu or cuda.",
    "backend": "Kernels: cpu, triton (GPU) or reference; auto: the device's native kernels if they support the model.",
    "num_threads": "CPU threads; results do not depend on their number. Default: torch's choice.",
    "cuda_graphs": "Run decode steps on a GPU as CUDA graphs.",
}
"""The settings of an engine that commands other than `serve` also have."""

ENGINE: Table = {
    "Model and kernels": KERNELS,
    "KV cache and recurrent states": {
        "block_size": "Tokens in a block of the KV cache; an even number.",
        "num_blocks": "Blocks of the KV cache. Default: chosen from the available memory.",
        "kv_memory": "Memory of the KV cache and recurrent states, such as 4GiB, instead of --num-blocks.",
        "kv_memory_fraction": "The same as a fraction of available memory. Default: at most 0.9 on a GPU, "
        "0.25 on a CPU.",
        "adapter_bytes": "Bytes of memory for named LoRA adapters and their merged weights, beside the KV cache; 0: "
        "none.",
        "host_cache_bytes": "Maximum bytes of host memory, on each rank, for cached prefixes that lost their memory on "
        "the device; 0: none.",
        "enable_prefix_caching": "Reuse the keys and values of prefixes that were computed before.",
        "state_interval": "Prompt tokens between checkpoints of recurrent states. `trueroll plan` shows the default.",
        "decode_state_interval": "Generated tokens between checkpoints; 0: no checkpoints while decoding.",
        "state_budget": "Maximum number of kept checkpoints. Default: the number of intervals in the blocks.",
    },
    "Size of a step": {
        "max_model_len": "Maximum length of a prompt with its new tokens. Default: the model's training length.",
        "max_num_seqs": "Samples that run at the same time. Default: 256 on a GPU, 64 on a CPU.",
        "max_num_batched_tokens": "Maximum tokens per step; longer prompts are split into chunks. "
        "Default: 8192 (GPU), 512 (CPU).",
    },
    "Several ranks": {
        "tensor_parallel_size": "Number of processes among which each layer is divided. Changes no bit.",
        "pipeline_parallel_size": "Number of stages into which the layers are divided, each with its own processes. "
        "Changes no bit.",
        "devices": "Device of each process, separated by commas, such as cuda:0,cuda:1.",
        "exchange": "How processes exchange tensors: auto, shared (host memory), group (NCCL or gloo), or symmetric "
        "(each GPU reads the others).",
        "pieces": "Number of pieces in which sums are computed: 1, 2, 4 or 8. The trainer needs the same number. "
        "Default: chosen for the model.",
    },
    "Images": {
        "max_images": "Maximum number of images in a prompt; 0: the model's vision tower is not loaded.",
        "max_image_patches": "Maximum size of an image, in patches of the tower.",
        "image_cache_bytes": "Maximum bytes of encoded images.",
    },
    "Records": {
        "max_record_bytes": "Maximum bytes of the records (such as top log-probs) of unfinished requests.",
    },
    "Drafts": {
        "speculative": "Drafted tokens, which change no bit: off, ngram (repeats of a prompt and its samples), mtp "
        "(the model's own module), or auto (the better of both).",
        "num_speculative_tokens": "Maximum number of drafted tokens per sample and step.",
    },
}

WORKER: Table = {
    "Address and clients": {
        "address": "ipc://PATH or tcp://127.0.0.1:PORT. Default: a new private ipc socket.",
        "curve_secret_key_file": "The worker's CURVE key file; required for addresses beyond this machine.",
        "clients_file": "Admitted clients: on each line a role (generate, control), a user and a public key.",
        "max_connections": "Maximum number of connections.",
    },
    "Limits of requests and results": {
        "max_message_bytes": "Maximum bytes of a message.",
        "max_n": "Maximum number of samples per request.",
        "max_queued_requests": "Maximum number of unfinished requests.",
        "max_queued_samples": "Maximum number of unfinished samples.",
        "max_queued_bytes": "Maximum bytes of unfinished requests.",
        "max_kept_results": "Maximum number of results kept until a client acknowledges them.",
        "max_kept_bytes": "Maximum bytes of kept results.",
        "max_unread_bytes": "Maximum bytes of replies to clients that do not read.",
        "max_image_bytes": "Maximum bytes of the pixels of images.",
        "image_seconds": "Seconds for which a client may be silent while it sends an image.",
    },
    "Operation": {
        "while_unavailable": "New requests wait, or are refused, while the worker is paused, asleep or being updated.",
        "drain_seconds": "Seconds for running requests to finish after SIGTERM or Ctrl-C.",
        "metrics_port": "Port of 127.0.0.1 for /metrics and /healthz. Default: no metrics.",
    },
    "Weight pushes": {
        "push_folder": "Accept pushes by disk from inside this folder. Default: only from this user's own folders.",
        "push_hosts": "A host or network beyond loopback for pushes over the network. Can be given several times.",
        "save_folder": "Save the weights of the last push in this folder, and serve them after a restart.",
        "push_urls": "A URL of chains of deltas that may be read, such as s3://bucket/run. Can be given several times.",
    },
}

HTTP: Table = {
    "Address and clients": {
        "host": "IP to listen on; addresses beyond loopback need an API key.",
        "port": "Port to listen on; 0: any free port.",
        "api_key_file": "File with the API key. Default: the variable TRUEROLL_HTTP_API_KEY, if it is set.",
        "clients_file": "Instead of one key, a file with a role (generate, control), a user and a key on each line.",
    },
    "Model": {
        "tokenizer": "Model with the tokenizer to use; required for tcp://. Default: the served model.",
        "model_name": "The model's name for clients. Default: the name of the worker's model.",
    },
    "Paths of other servers": {
        "sglang": "Also serve the paths of SGLang, for slime, miles and AReaL.",
        "vllm": "Also serve the paths of vLLM that update weights, for SkyRL.",
        "tinker": "Also serve the sampling of the Tinker API, for the package tinker.",
    },
    "Traces": {
        "otlp_traces_endpoint": "URL of an OTLP receiver over HTTP for OpenTelemetry spans. Default: no spans.",
    },
    "Limits of a request": {
        "max_head_bytes": "Maximum bytes of a request head.",
        "max_head_lines": "Maximum number of lines in a head.",
        "max_body_bytes": "Maximum bytes of a request body.",
        "max_body_chunks": "Maximum number of chunks in a body.",
        "max_body_elements": "Maximum weighted number of elements in a body.",
        "max_text_chars": "Maximum number of characters in all texts of a request.",
        "max_answer_bytes": "Maximum estimated bytes of an answer that is not streamed.",
        "max_image_pixels": "Maximum number of pixels of an image in a conversation.",
    },
    "Limits of the front end": {
        "max_connections": "Maximum number of connections. Default: half of the descriptors, at most 2048.",
        "max_open_requests": "Maximum number of requests at a time.",
        "max_sessions": "Maximum number of open sessions of agents.",
        "max_session_bytes": "Maximum bytes of all sessions in memory.",
        "max_image_bytes": "Maximum bytes of all images in memory.",
        "max_unfinished_bytes": "Maximum bytes of all unfinished bodies. Default: 8 times --max-body-bytes.",
    },
    "Times": {
        "head_seconds": "Seconds for a client to send a head.",
        "body_seconds": "Seconds for a client to send a body.",
        "write_seconds": "Seconds that a client may spend without reading its answer.",
        "keep_alive_seconds": "Seconds until an idle connection is closed.",
        "linger_seconds": "Seconds for which a refused connection discards incoming data.",
        "session_seconds": "Seconds until a session without requests is deleted.",
        "drain_seconds": "Seconds for open requests to finish after SIGTERM or Ctrl-C.",
    },
}


class GroupedCommand(TyperCommand):
    """A command with a help page that lists options below headings. Typer shows headings only in rich's layout."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the options to the help page. Called by typer."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                heading = getattr(parameter, "rich_help_panel", None)
                usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
                sections.setdefault(heading or usual, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def names_of(table: Table) -> Iterator[str]:
    """Yield the names of the settings in a table."""
    for settings in table.values():
        yield from settings


def with_settings(*groups: tuple[type[BaseModel], Table]) -> Callable[[F], F]:
    """Replace a command's `**settings` with one option per setting that has a help text. `groups`: (class, table)."""

    def decorate(command: F) -> F:
        own = [
            each
            for each in inspect.signature(command, eval_str=True).parameters.values()
            if each.kind is not each.VAR_KEYWORD
        ]
        options = [
            _option(config, name, help, heading)
            for config, table in groups
            for heading, settings in table.items()
            for name, help in settings.items()
        ]
        parameters = sorted([*own, *options], key=lambda each: each.kind)
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def parse_bytes(text: str | int) -> int:
    """Parse a size in bytes. `text` is a plain number, or a number with a unit, such as 4GiB or 512M. Units are powers
    of 1024.

    Raise BadParameter for any other text.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT])?(?:i?B)?", str(text).strip(), re.IGNORECASE)
    if found is None or ("." in found[1] and found[2] is None):
        raise typer.BadParameter(f"{text!r} is not a size; give bytes, or a number with a unit, such as 4GiB or 512MiB")
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper())) if found[2] else int(found[1])


SIZE: dict[str, Any] = dict(parser=parse_bytes, metavar="SIZE")


def _with_unit(size: int | None) -> bool | str:
    """Return a size as text for the help page, in the largest unit that divides the size. Return True for None and 0,
    which the help page shows unchanged.
    """
    units = [(unit, 1024**power) for power, unit in enumerate(("bytes", "KiB", "MiB", "GiB"))]
    return next((f"{size // factor} {unit}" for unit, factor in reversed(units) if size and size % factor == 0), True)


def _option(config: type[BaseModel], name: str, help: str, heading: str) -> inspect.Parameter:
    kind, default = get_type_hints(config)[name], config.model_fields[name].default
    if default is None:
        kind = kind | None
    is_size = name == "kv_memory" or name.endswith("_bytes")
    how: dict[str, Any] = SIZE | dict(show_default=_with_unit(default)) if is_size else {}
    annotation = Annotated[kind, typer.Option(help=help, rich_help_panel=heading, **how)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
