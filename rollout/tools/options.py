"""Options of the command line that are settings: one table of help texts for each kind of settings.

Types and defaults are those of the settings, so that a new setting is one field and one line here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, TypeVar, get_type_hints

import typer
from pydantic import BaseModel

F = TypeVar("F", bound=Callable[..., None])

ENGINE = {
    "dtype": "Of weights and KV cache; auto: that of config.json.",
    "device": "Where torch computes, such as cpu or cuda.",
    "backend": "cpu, triton: native kernels for a CPU, a GPU; auto: the one for the device if it serves the model.",
    "block_size": "Tokens in one block of the KV cache; even.",
    "num_blocks": "Blocks of the KV cache. Default: as the available memory allows.",
    "kv_memory": "Bytes for the KV cache and states, instead of --num-blocks.",
    "kv_memory_fraction": "Or its share of the available memory. Default: at most 0.9 on a GPU, 0.25 on a CPU.",
    "max_model_len": "Longest prompt with its new tokens. Default: what the model was trained for.",
    "max_num_seqs": "Samples that run at the same time. Default: 256 on a GPU, 64 on a CPU.",
    "max_num_batched_tokens": "Tokens computed in one step; longer prompts are cut into chunks. "
    "Default: 8192 (GPU), 512 (CPU).",
    "state_interval": "Tokens between checkpoints of recurrent states. Default: as `trueroll plan` shows.",
    "decode_state_interval": "The same for tokens that are generated; 0: no checkpoints while decoding.",
    "state_budget": "Most checkpoints that are held. Default: as many as the blocks have intervals.",
    "enable_prefix_caching": "Reuse the KV of prefixes that were computed before.",
    "cuda_graphs": "Run decode steps on a GPU as CUDA graphs.",
    "num_threads": "CPU threads; results do not depend on it. Default: torch's choice.",
}

WORKER = {
    "address": "ipc://PATH or tcp://127.0.0.1:PORT. Default: a new private ipc socket.",
    "curve_secret_key_file": "CURVE keys of the worker, needed for addresses beyond this machine.",
    "clients_file": "Who may come in: on each line a role (generate, control), a user, a public key.",
    "max_connections": "Most connections at a time.",
    "max_message_bytes": "Longest message that is read.",
    "max_n": "Most samples in one request.",
    "max_queued_requests": "Most requests accepted and not finished.",
    "max_queued_samples": "Most samples of them that are not finished.",
    "max_queued_bytes": "Most bytes of them.",
    "max_kept_results": "Most results kept until a client acknowledges them.",
    "max_kept_bytes": "Most bytes of results kept.",
    "max_unread_bytes": "Most bytes of replies to clients that do not read.",
    "drain_seconds": "How long running requests may go on after SIGTERM or Ctrl-C.",
    "while_unavailable": "Whether new requests wait or are refused while the worker is paused, asleep or updated.",
    "metrics_port": "Serve /metrics and /healthz on this port of 127.0.0.1. Default: not at all.",
    "push_folder": "Take pushes by disk from folders in this one. Default: from this user's own.",
    "push_hosts": "A host or network beyond loopback that collective pushes use; may be repeated.",
}

HTTP = {
    "host": "The IP to listen on; beyond loopback only with an API key.",
    "port": "0: any free one.",
    "api_key_file": "A file with the API key. Default: TRUEROLL_HTTP_API_KEY, if that is set.",
    "clients_file": "Instead of one key, a file: on each line a role (generate, control), a user and a key.",
    "tokenizer": "The model whose tokenizer is used; to be given for tcp://. Default: the one served.",
    "model_name": "What clients call the model. Default: what the worker was told to serve.",
    "max_body_bytes": "Longest request that is read.",
    "max_unfinished_bytes": "Most bytes of all unfinished requests. Default: 8 times --max-body-bytes.",
    "body_seconds": "How long a client may take to send a request.",
    "max_body_chunks": "Most chunks of a request.",
    "max_head_bytes": "Longest head of a request.",
    "max_head_lines": "Most lines of a head.",
    "max_connections": "Most connections at a time. Default: half of the descriptors, at most 2048.",
    "head_seconds": "How long a client may take to send a head.",
    "keep_alive_seconds": "How long a connection is kept without a request.",
    "write_seconds": "How long a client may read nothing of an answer.",
    "linger_seconds": "How long a refused connection drops what its client still sends.",
    "max_body_elements": "Most elements of a request, weighted.",
    "max_text_chars": "Most characters of all texts of a request.",
    "max_answer_bytes": "Longest answer but for streams, as estimated.",
    "max_open_requests": "Most requests at a time.",
    "drain_seconds": "How long open requests may go on after SIGTERM or Ctrl-C.",
}


def with_settings(*groups: tuple[type[BaseModel], Mapping[str, str]]) -> Callable[[F], F]:
    """Give a command an option for each setting that a group has a help text for, in the place of its `**settings`."""

    def decorate(command: F) -> F:
        own = [
            each
            for each in inspect.signature(command, eval_str=True).parameters.values()
            if each.kind is not each.VAR_KEYWORD
        ]
        options = [_option(config, name, help) for config, helps in groups for name, help in helps.items()]
        parameters = sorted([*own, *options], key=lambda each: each.kind)
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def _option(config: type[BaseModel], name: str, help: str) -> inspect.Parameter:
    kind, default = get_type_hints(config)[name], config.model_fields[name].default
    if default is None:
        kind = kind | None
    annotation = Annotated[kind, typer.Option(help=help)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
