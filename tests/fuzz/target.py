"""The attacked worker process. The worker has its own log, and small limits that the attack reaches."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from engine.checkpoints import read_tensors
from fuzz.campaign import Campaign, Numbers, Plan
from fuzz.front import FrontProcess
from fuzz.images import MAX_IMAGE_BYTES, MAX_IMAGE_PATCHES, MAX_IMAGES, PATCH_SIZE, VIDEO_PLACEHOLDER
from fuzz.mutate import MAX_MESSAGE_BYTES
from fuzz.violation import Violation
from vision_models import MODELS

from tiny import save_tiny_model
from trueroll.engine.config import EngineConfig
from trueroll.errors import TruerollError
from trueroll.rollout import WorkerProcess
from trueroll.rollout.client.local_worker import WORKER_COMMAND
from trueroll.rollout.config import WorkerConfig

Show: TypeAlias = Callable[[Numbers], None]
LIMITS: dict[str, Any] = dict(
    max_queued_requests=10,
    max_queued_samples=40,
    max_kept_results=64,
    max_kept_bytes=2**22,
    max_n=16,
    drain_seconds=5.0,
    max_image_bytes=MAX_IMAGE_BYTES,
    image_seconds=3.0,
)
"""Few requests may wait, so a pause of some milliseconds fills the queue. A good client needs far less than
`image_seconds`.
"""
ENGINE: dict[str, Any] = dict(
    num_blocks=14,
    max_model_len=128,
    max_num_seqs=16,
    max_num_batched_tokens=64,
    num_threads=1,
    max_images=MAX_IMAGES,
    max_image_patches=MAX_IMAGE_PATCHES,
    image_cache_bytes=50_000,
)
"""All requests together need more than 224 tokens of KV memory, so some are preempted. Encoded images have at most 65
tokens, so they are evicted.
"""
LAST_LINES = 12
CHAT_TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.a }}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{% if thinks %}<think>{% endif %}"
)


def ignore(numbers: Numbers) -> None:
    """Show nothing."""


@contextmanager
def tiny_campaign(plan: Plan, show: Show = ignore) -> Iterator[Campaign]:
    """A campaign against a worker that serves a tiny model, which reads images."""
    with tempfile.TemporaryDirectory(prefix="trueroll-fuzz-") as folder:
        model = _make_model(Path(folder) / "model")
        (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        tensors = {name.replace(".language_model.", "."): tensor for name, tensor in read_tensors(model).items()}
        with campaign_against(str(model), tensors, plan, show) as campaign:
            yield campaign


def _make_model(folder: Path) -> Path:
    """Save a tiny Qwen3-VL with large patches and few layers, and return its folder."""
    model = MODELS["qwen3_vl"]()
    config = model.config
    config.video_token_id = VIDEO_PLACEHOLDER
    config.text_config.num_hidden_layers = config.vision_config.depth = 2
    config.vision_config.deepstack_visual_indexes = [0, 1]
    config.vision_config.patch_size = PATCH_SIZE
    return save_tiny_model(type(model)(config), folder)


@contextmanager
def campaign_against(
    model: str,
    tensors: Mapping[str, torch.Tensor],
    plan: Plan,
    show: Show = ignore,
    command: tuple[str, ...] = WORKER_COMMAND,
) -> Iterator[Campaign]:
    """A campaign against the worker that `command` starts for `model`.

    At the end, the worker must exit on request, with no traceback in its log. A Violation includes the last lines of
    the worker's log.
    """
    with tempfile.NamedTemporaryFile(prefix="trueroll-fuzz-", suffix=".log") as log:
        try:
            with (
                _start(model, log.name, command) as worker,
                _front_of(worker, model, plan) as front,
                closing(Campaign(worker, tensors, plan, show, front)) as campaign,
            ):
                try:
                    yield campaign
                except Violation:
                    worker.kill()  # after a violation, a clean exit would prove nothing
                    raise
            if worker.exit_code != 0:
                raise Violation(f"the worker exited with code {worker.exit_code} after it was told to end")
            if "Traceback" in Path(log.name).read_text(errors="replace"):
                raise Violation(f"the worker logged an unexpected exception; {_kept(log.name)} has the log")
        except (Violation, TruerollError) as error:
            lines = Path(log.name).read_text(errors="replace").splitlines()[-LAST_LINES:]
            raise Violation("\n".join([str(error), "last lines of the worker's log:", *lines])) from error


@contextmanager
def _front_of(worker: WorkerProcess, model: str, plan: Plan) -> Iterator[FrontProcess | None]:
    """The front end, if the plan has one. At the end, the front end must exit on request."""
    if not plan.http:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="trueroll-fuzz-") as folder:
        front = FrontProcess(worker.address, model, Path(folder) / "front.log")
        try:
            yield front
            front.end()
        except (Violation, TruerollError) as error:
            front.kill()
            raise Violation("\n".join([str(error), "last lines of its log:", *front.last_words()])) from error
        except BaseException:
            front.kill()
            raise


def _kept(log: str) -> str:
    """Copy the log to a folder that remains after the campaign, and return the path."""
    return shutil.copy(log, f"{log}.kept")


def _start(model: str, log: str, command: tuple[str, ...]) -> WorkerProcess:
    shell = ("/bin/sh", "-c", 'exec "$@" 2>"$0"', log)  # exec: the worker keeps the process id
    config = WorkerConfig(max_message_bytes=MAX_MESSAGE_BYTES, **LIMITS)
    engine = EngineConfig(model=model, **ENGINE)
    return WorkerProcess(config, engine, startup_timeout=120, command=(*shell, *command))
