"""`trueroll top`: show the activity of a worker or a fleet in a terminal, from its health and stats.

Speeds and rates are differences between two snapshots; all other values come from the last snapshot. Guarantees that
text from a worker is never interpreted as markup or terminal codes, and that a missing or mistyped counter raises
ProtocolError.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from rich.console import Console, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trueroll.errors import ProtocolError, printable

from ...engine.request import describe_validation_error
from .. import protocol
from ..client.client import RolloutClient
from ..fleet.client import FleetClient
from ..fleet.totals import FleetHealth, all_stats
from ..monitoring.expert_load import expert_tokens, imbalance

SILENCE_SECONDS = 10.0
"""Time without any reply after which the worker counts as lost."""
BAR_CHARS = 30
STATE_STYLES: dict[protocol.State, str] = {"ready": "green", "dirty": "yellow", "failed": "red"}


class _Shown(BaseModel):
    """Base class for displayed fields of health and stats. The protocol sends the fields of health and stats in
    dictionaries, and does not define each field.
    """

    model_config = ConfigDict(strict=True, frozen=True)


class _Model(_Shown):
    model: str
    backend: str
    live_states: int
    checkpoints: int
    expert_layers: int
    num_experts: int
    tensor_parallel_size: int
    pipeline_parallel_size: int

    @property
    def ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size


class _Service(_Shown):
    finished: int
    failed: int


class _Pool(_Shown):
    window: int | None
    in_use: int
    cached: int
    empty: int


class _Drafts(_Shown):
    drafter: str
    drafts: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]


class _Engine(_Shown):
    computed_tokens: int
    computed_prompt_tokens: int
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    pools: tuple[_Pool, ...]
    drafts: tuple[_Drafts, ...]
    shortened_hits: int
    checkpoints_ready: int
    checkpoints_restored: int
    expert_tokens: bytes
    samples_finished: dict[str, int]
    rank_wait_us: int


S = TypeVar("S", bound=_Shown)
Row: TypeAlias = tuple[str, str | Text]


@dataclass(frozen=True)
class Look:
    """A snapshot of a worker or a fleet.

    - `seconds`: monotonic time of the snapshot
    - `model`, `engine`: None while the model loads
    - `workers`: snapshots of a fleet's workers by name
    """

    seconds: float
    health: protocol.Health
    model: _Model | None
    engine: _Engine | None
    service: _Service
    workers: dict[str, Look] = field(default_factory=dict)


def top(client: RolloutClient, interval: float, console: Console) -> None:
    """Show the client's worker or fleet every `interval` seconds until interrupted.

    If the console is not a terminal, print one view and return. Raise the client's errors, such as WorkerLostError.
    """
    with contextlib.suppress(KeyboardInterrupt):
        views = _views(client, interval)
        if not console.is_terminal:
            console.print(next(views))
            return
        with Live(console=console, auto_refresh=False) as live:
            for view in views:
                live.update(view, refresh=True)


def _views(client: RolloutClient, interval: float) -> Iterator[RenderableType]:
    before = _look(client)
    while True:
        time.sleep(interval)
        now = _look(client)
        yield view(before, now)
        before = now


def _look(client: RolloutClient) -> Look:
    if isinstance(client, FleetClient):
        return _look_at_fleet(client)
    return look_of(time.monotonic(), client.health(), client.stats())


def _look_at_fleet(client: FleetClient) -> Look:
    seconds, healths, stats = time.monotonic(), client.healths(), client.all_stats()
    each = {name: look_of(seconds, healths[name], stats[name]) for name in healths if name in stats}
    return replace(look_of(seconds, client.health(), all_stats([*stats.values()])), workers=each)


def look_of(seconds: float, health: protocol.Health, stats: protocol.Stats) -> Look:
    """Return a snapshot. Raise ProtocolError if a displayed field is missing or mistyped."""
    model = _shown(_Model, health.engine) if health.engine else None
    engine = _shown(_Engine, stats.engine) if stats.engine else None
    return Look(seconds, health, model, engine, _shown(_Service, stats.service))


def _shown(kind: type[S], values: dict[str, Any]) -> S:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        found = describe_validation_error(error)
        raise ProtocolError(f"worker: {found}; use the same release of trueroll on both sides") from None


def view(before: Look, now: Look) -> RenderableType:
    """Return all rows of the view. While the model loads, values that are not known yet are left out."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    for name, value in _rows(before, now):
        grid.add_row(Text(printable(name)), Text(printable(value)) if isinstance(value, str) else value)
    return grid


def _rows(before: Look, now: Look) -> Iterator[Row]:
    health, service = now.health, now.service
    yield "worker", _worker(health)
    if now.model:
        yield "model", f"{now.model.model}, backend {now.model.backend}"
        if now.model.ranks > 1:
            yield "ranks", _ranks(before, now)
    yield "state", _state(health)
    yield "requests", _numbers({**health.requests, "finished": service.finished, "failed": service.failed})
    if now.engine and before.engine and before.health.instance == health.instance:
        rates = _Rates(before.engine, now.engine, now.seconds - before.seconds)
        yield from _engine_rows(now.engine, rates)
        if now.model and now.model.live_states:
            yield "checkpoints", _checkpoints(now.model, now.engine)
        if now.model and now.model.expert_layers:
            yield "experts", _experts(now.model, before.engine, now.engine)
    yield "memory", _memory(health)
    if health.push is not None:
        yield "push", _push(health.push)
    for name, look in now.workers.items():
        yield name, _one_of_many(before.workers.get(name), look)
    if isinstance(health, FleetHealth):
        for trouble in health.troubles:
            yield "trouble", Text(printable(trouble), "red")


def _ranks(before: Look, now: Look) -> str:
    """Return the numbers of ranks and stages, and the share of the time for which rank 0 waited for the other ranks."""
    assert now.model is not None
    stages = now.model.pipeline_parallel_size
    told = f"{now.model.ranks}" + (f" in {stages} stages" if stages > 1 else "")
    if now.engine and before.engine and before.health.instance == now.health.instance:
        waited = (now.engine.rank_wait_us - before.engine.rank_wait_us) / 1e6
        told += f"  rank 0 waits {_percent(waited, now.seconds - before.seconds)} of the time"
    return told


def _one_of_many(before: Look | None, now: Look) -> Text:
    """Return the line about one worker of a fleet."""
    text = Text(now.health.state, STATE_STYLES.get(now.health.state, "cyan"))
    text.append(f"  version {now.health.weight_version}  open {now.health.requests['open']:,}", "default")
    if before and before.engine and now.engine and before.health.instance == now.health.instance:
        rates = _Rates(before.engine, now.engine, now.seconds - before.seconds)
        text.append(f"  {rates.per_second('computed_tokens'):,.0f} tokens/s", "default")
    return text


def _engine_rows(engine: _Engine, rates: _Rates) -> Iterator[Row]:
    prompt = rates.per_second("computed_prompt_tokens")
    yield "tokens/s", f"decode {rates.per_second('computed_tokens') - prompt:,.0f}  prompt {prompt:,.0f}"
    yield "prefix hits", f"now {rates.share('prefix_hits', 'prefix_queries')}  ever {_ever(engine)}"
    yield "samples", _numbers(engine.samples_finished) or "none finished"
    for pool in engine.pools:
        yield f"blocks, window {pool.window:,}" if pool.window else "blocks", _blocks(pool)
    yield "preempted", f"{engine.preemptions:,}"
    for before, now in zip(rates.before.drafts, engine.drafts, strict=False):
        yield f"drafts, {now.drafter}", _drafts(before, now)


@dataclass(frozen=True)
class _Rates:
    """The increases of the engine's lifetime counters between two snapshots. `seconds`: time between the snapshots."""

    before: _Engine
    now: _Engine
    seconds: float

    def growth(self, key: str) -> int:
        return getattr(self.now, key) - getattr(self.before, key)

    def per_second(self, key: str) -> float:
        return self.growth(key) / self.seconds

    def share(self, part: str, whole: str) -> str:
        return _percent(self.growth(part), self.growth(whole))


def _drafts(before: _Drafts, now: _Drafts) -> str:
    """Return the line about a drafter: the shares of drafted tokens that were accepted, overall and by position."""
    recent = sum(now.accepted) - sum(before.accepted), sum(now.drafted) - sum(before.drafted)
    accepted = f"accepted now {_percent(*recent)}  ever {_percent(sum(now.accepted), sum(now.drafted))}"
    length = f"{1 + sum(now.accepted) / now.drafts:.2f}" if now.drafts else "-"
    positions = " ".join(_percent(*pair) for pair in zip(now.accepted, now.drafted, strict=True) if pair[1])
    return f"{accepted}  tokens per draft {length}" + (f"  by position {positions}" if positions else "")


def _checkpoints(model: _Model, engine: _Engine) -> str:
    """Return the line about checkpoints of recurrent states."""
    restored, shortened = f"{engine.checkpoints_restored:,} restored", f"{engine.shortened_hits:,} tokens"
    return f"{engine.checkpoints_ready:,} of {model.checkpoints:,}  {restored}  hits shortened by {shortened}"


def _experts(model: _Model, before: _Engine, now: _Engine) -> str:
    """Return the line that compares the load of a layer's busiest expert with the mean load."""
    earlier, later = (expert_tokens(model.model_dump(), engine.model_dump()) for engine in (before, now))
    return f"busiest to mean, now {_imbalance(later - earlier)}  ever {_imbalance(later)}"


def _imbalance(tokens: np.ndarray) -> str:
    if not tokens.any():
        return "-"
    found = imbalance(tokens)
    return f"{found.mean():.2f}, {found.max():.2f} in layer {found.argmax()}"


def _ever(engine: _Engine) -> str:
    return _percent(engine.prefix_hits, engine.prefix_queries)


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _worker(health: protocol.Health) -> str:
    version = "-" if health.weight_version is None else health.weight_version
    return f"{health.instance}  weight version {version}"


def _state(health: protocol.Health) -> Text:
    text = Text(health.state, STATE_STYLES.get(health.state, "cyan"))
    if health.sleeping:
        text.append(f"  asleep: {', '.join(health.sleeping)}", "default")
    if health.seconds_since_progress is not None:
        text.append(f"  last progress {health.seconds_since_progress:.1f} s ago", "default")
    return text


def _numbers(values: Mapping[str, int]) -> str:
    return "  ".join(f"{name} {value:,}" for name, value in values.items())


def _memory(health: protocol.Health) -> str:
    return "  ".join(f"{tag} {decimal(size)}" for tag, size in health.memory.items())


def _push(push: protocol.PushProgress) -> str:
    way = f"{push.transport}, in place" if push.in_place else push.transport
    done = f"{push.phase}, {decimal(push.bytes_staged)} staged in {push.seconds:.1f} s"
    return f"version {push.weight_version} by {way}: {done}"


def _blocks(pool: _Pool) -> Text:
    in_use, cached, empty = pool.in_use, pool.cached, pool.empty
    total = in_use + cached + empty
    used = _chars(in_use, total)
    reusable = _chars(in_use + cached, total) - used
    bar = Text.assemble(("█" * used, "green"), ("▒" * reusable, "cyan"), ("░" * (BAR_CHARS - used - reusable), "dim"))
    return bar.append(f"  in use {in_use:,}  cached {cached:,}  empty {empty:,}", "default")


def _chars(count: int, total: int) -> int:
    return round(BAR_CHARS * count / total) if total else 0
