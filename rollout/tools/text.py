"""`trueroll generate`: generate completions of text prompts, and print them."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from trueroll.errors import LINES, printable

from ...engine.request import SamplingParams
from ..client.client import Group, RolloutClient
from ..client.local_worker import launch_worker
from ..network.keys import Key
from ..text import TextModel, model_served_here, needs_tokenizer
from .contact import WORKER_SECONDS, contact
from .progress import tell


def print_completions(
    model_or_address: str,
    prompts: Sequence[str],
    params: SamplingParams,
    seed: int | None,
    chat: bool,
    tokenizer: str | None,
    keys: tuple[Key | None, Key | None] = (None, None),
) -> None:
    """Generate completions for prompts, and print all samples. Terminal control characters in the samples are escaped.

    - `model_or_address`: the address of a running worker, or a model for which to start a worker
    - `seed`: seed for all prompts, see `RolloutClient.generate`; None: a random seed
    - `tokenizer`: model with the tokenizer to use; None: the served model, if it is available on this machine
    - `keys`: `server_public_key` and `client_key` of `RolloutClient`

    Raise ConfigError if `tokenizer` is required but missing. A model name that comes from a worker is never downloaded.
    """
    seed = secrets.randbits(63) if seed is None else seed
    address = model_or_address
    if tokenizer is None and address.startswith("tcp://"):
        raise needs_tokenizer(address)
    with ExitStack() as stack:
        if not address.startswith(("ipc://", "tcp://")):
            tokenizer = tokenizer or model_or_address
            tell(f"starting a worker for {model_or_address} ...")
            address = stack.enter_context(launch_worker(model_or_address)).address
        else:
            contact(address, WORKER_SECONDS)
        client = stack.enter_context(RolloutClient(address, WORKER_SECONDS, *keys))
        text = TextModel(tokenizer or model_served_here(client.health()))
        token_ids = [text.encode_chat(prompt) if chat else text.encode(prompt) for prompt in prompts]
        groups = client.generate(token_ids, params, seed=seed, progress=sys.stderr.isatty())
    for prompt, group in zip(prompts, groups, strict=True):
        _print_group(text, f"{prompt} (seed {seed})", group)


def _print_group(text: TextModel, title: str, group: Group) -> None:
    print(f"=== {printable(title, kept=LINES)}")
    for sample in group.samples:
        print(f"--- sample {sample.index}: {len(sample.token_ids)} tokens, finish reason {sample.finish_reason}")
        print(printable(text.decode(sample.token_ids), kept=LINES))
