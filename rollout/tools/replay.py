"""`trueroll replay`: send the requests of a session's record to a worker or a fleet again, and show which bits differ.

Owns the comparison of recorded samples with new samples. A request is compared only if all its tokens were drawn by the
weights that the worker serves. After the first different token, the replayed answer is another text, so its later
tokens may differ too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trueroll.errors import ConfigError, TruerollError, UnavailableError, WorkerLostError, printable

from ...engine.request import SampleOutput, columns_of
from ..client.client import Group, RolloutClient
from ..protocol import Health
from ..sessions.record import Record, RecordedRequest, read_record
from .progress import tracked

BATCH_REQUESTS = 64
BATCH_TOKENS = 2**20
"""Maximum number of prompt tokens of the requests that are sent together. A longer prompt is sent alone."""
SHOWN_NODES = 8


@dataclass(frozen=True)
class Comparison:
    """The number of differences between a recorded sample and its replay.

    `tokens`, `logprobs`: how many tokens and how many log-probs differ in any bit. `others`: how many rows differ in
    any bit in the other arrays of the sample, such as top log-probs and routed experts. A missing or an additional row
    counts as different. `has_other_end`: whether the finish reason or the stop reason differs.
    `first`: a description of the first difference.
    """

    tokens: int
    logprobs: int
    others: int
    has_other_end: bool
    first: str

    @property
    def is_equal(self) -> bool:
        """Return whether every bit is equal."""
        return not (self.tokens or self.logprobs or self.others or self.has_other_end)


@dataclass(frozen=True)
class Result:
    """The outcome of a request: a comparison, an error, or the reason why the request was not compared."""

    request: RecordedRequest
    found: Comparison | TruerollError | str


def read(file: Path) -> Record:
    """Return the record in a file. Raise InvalidRequestError if the file is not a record, and ConfigError if the file
    cannot be read.
    """
    try:
        with file.open("rb") as opened:
            return read_record(opened)
    except OSError as error:
        raise ConfigError(f"file: cannot read {file} ({error.strerror})", field="file") from None


def replay(record: Record, client: RolloutClient, version: int | None, console: Console) -> bool:
    """Replay a record, and print a table of the differences. Return True if at least one request was compared, all bits
    of the compared requests are equal, and no request failed.

    `version`: the version number under which the record lists the worker's weights; None for the worker's own version
    number. Raise UnavailableError if the worker is still loading its model. Raise WorkerLostError if the worker does
    not answer.
    If the replay ends early, the table has the comparisons made until then.
    """
    health = client.health()
    if health.weight_version is None:
        raise UnavailableError("replay: the worker is still loading its model; try again later")
    wanted = health.weight_version if version is None else version
    skipped = [(request, _reason_to_skip(request, wanted)) for request in record.requests]
    chosen = [request for request, reason in skipped if reason is None]
    others = [Result(request, reason) for request, reason in skipped if reason is not None]
    results: list[Result] = []
    try:
        for result in tracked(_send(chosen, client, health.weight_version), "replaying", len(chosen)):
            results.append(result)
    finally:  # even if the worker is lost, print the differences found so far
        results += [Result(request, "the replay ended early") for request in chosen[len(results) :]] + others
        console.print(_table(results, _title(record, health, wanted)))
        console.print(_summary(results), markup=False, highlight=False)
    compared = [each.found for each in results if isinstance(each.found, Comparison)]
    has_failed = any(isinstance(each.found, TruerollError) for each in results)
    return bool(compared) and all(each.is_equal for each in compared) and not has_failed


def _reason_to_skip(request: RecordedRequest, wanted: int) -> str | None:
    """Return why the base weights of version `wanted` cannot reproduce a sample; None if the weights can reproduce the
    sample.
    """
    if request.adapter is not None:
        return f"the adapter {request.adapter!a:.100} drew them, and adapters are not replayed"
    if not request.sample.is_exact:
        return "some tokens were drawn over KV of older weights, which a push with in_flight keep had kept"
    if {*request.versions} != {wanted}:
        return f"{_told_versions(request.sample)} of the weights drew them, not version {wanted}"
    return None


def compare(request: RecordedRequest, sample: SampleOutput) -> Comparison:
    """Compare a sample with the recorded sample, bit by bit."""
    expected, found = _records(request.sample, 0), _records(sample, request.routes_start)
    missing = np.zeros((0, 1), np.uint8)
    different = {
        name: _different_rows(expected.get(name, missing), found.get(name, missing)) for name in {**expected, **found}
    }
    ends = [(each.finish_reason, each.stop_reason) for each in (request.sample, sample)]
    return Comparison(
        tokens=len(different.pop("tokens")),
        logprobs=len(different.pop("logprobs", ())),
        others=sum(map(len, different.values())),
        has_other_end=ends[0] != ends[1],
        first=_first(request.sample, sample, different),
    )


def _records(sample: SampleOutput, routes_start: int) -> dict[str, np.ndarray]:
    """Return all records of a sample, by name. Routed experts are returned from row `routes_start` on."""
    records = dict(tokens=np.array(sample.token_ids, np.int32)) | columns_of(sample)
    if sample.routed_experts is not None:
        records["routed_experts"] = sample.routed_experts[routes_start:]
    return records


def _different_rows(expected: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Return the indices of the rows that differ in any bit, including the rows that only one array has."""
    both, longest = min(len(expected), len(found)), max(len(expected), len(found))
    if (expected.dtype, expected.shape[1:]) != (found.dtype, found.shape[1:]):
        both = 0
    if both == 0:
        return np.arange(longest)
    bits = [np.ascontiguousarray(each[:both]).view(f"u{each.itemsize}").reshape(both, -1) for each in (expected, found)]
    return np.concatenate((np.flatnonzero((bits[0] != bits[1]).any(1)), np.arange(both, longest)))


def _first(expected: SampleOutput, found: SampleOutput, others: dict[str, np.ndarray]) -> str:
    """Describe the first difference between two samples; empty if they are equal."""
    pairs = [_pairs(each) for each in (expected, found)]
    both = min(map(len, pairs))
    at = next((i for i in range(both) if pairs[0][i] != pairs[1][i]), both)
    if at < max(map(len, pairs)):
        was, now = (_shown(each[at]) if at < len(each) else "no token" for each in pairs)
        return f"token {at}: {was} became {now}"
    for name, rows in others.items():
        if len(rows):
            return f"{name}, row {rows[0]}"
    was, now = (f"{each.finish_reason} {each.stop_reason}" for each in (expected, found))
    return f"end: {was} became {now}" if was != now else ""


def _pairs(sample: SampleOutput) -> list[tuple[int, int | None]]:
    """Return each token with the bits of its log-prob."""
    if sample.logprobs is None:
        return [(token, None) for token in sample.token_ids]
    return list(zip(sample.token_ids, sample.logprobs.view(np.uint32).tolist(), strict=True))


def _shown(pair: tuple[int, int | None]) -> str:
    token, bits = pair
    if bits is None:
        return str(token)
    return f"{token} with log-prob 0x{bits:08x} ({np.uint32(bits).view(np.float32):.8g})"


def _send(requests: Sequence[RecordedRequest], client: RolloutClient, served: int) -> Iterator[Result]:
    for batch in _batches(requests):
        prompts = [request.prompt_token_ids() for request in batch]
        groups = client.generate(prompts, [request.params for request in batch], errors="return")
        for request, group in zip(batch, groups, strict=True):
            yield Result(request, _found(request, group, served))


def _batches(requests: Sequence[RecordedRequest]) -> Iterator[list[RecordedRequest]]:
    batch: list[RecordedRequest] = []
    num_tokens = 0
    for request in requests:
        if batch and (len(batch) == BATCH_REQUESTS or num_tokens + request.prompt_len > BATCH_TOKENS):
            yield batch
            batch, num_tokens = [], 0
        batch.append(request)
        num_tokens += request.prompt_len
    if batch:
        yield batch


def _found(request: RecordedRequest, group: Group | TruerollError, served: int) -> Comparison | TruerollError | str:
    if isinstance(group, WorkerLostError):
        raise group
    if isinstance(group, TruerollError):
        return group
    sample = group.samples[0]
    if sample.finish_reason in ("abort", "error"):
        return TruerollError(f"the sample ended with {sample.finish_reason!r} ({sample.error or 'no further reason'})")
    if not sample.is_exact:
        return f"the replayed sample has tokens over old KV ({_told_versions(sample)})"
    if {span.version for span in sample.weight_versions} != {served}:
        return f"{_told_versions(sample)} of the weights drew the replayed sample, not version {served}"
    return compare(request, sample)


def _told_versions(sample: SampleOutput) -> str:
    return "version " + " and ".join(str(span.version) for span in sample.weight_versions)


def _title(record: Record, health: Health, wanted: int) -> str:
    engine = health.engine or {}
    where = ", ".join(str(engine.get(name)) for name in ("model", "dtype", "device", "backend", "isa"))
    as_version = "" if wanted == health.weight_version else f", compared as version {wanted}"
    served = f"{where}, version {health.weight_version}{as_version}"
    return escape(printable(f"record of {record.model}, replayed on {served}"))


def _table(results: Sequence[Result], title: str) -> Table:
    """Return a table with a row for all equal requests, and a row for each request that differs or failed."""
    table = Table("requests", "tokens", "other tokens", "other log-probs", "other records", "first difference")
    table.title = title
    compared = [(each.request, each.found) for each in results if isinstance(each.found, Comparison)]
    equal = [request for request, found in compared if found.is_equal]
    table.add_row(f"{len(equal)} equal", str(sum(map(_num_tokens, equal))), "0", "0", "0", "")
    for request, found in compared:
        if not found.is_equal:
            counts = _num_tokens(request), found.tokens, found.logprobs, found.others
            table.add_row(escape(printable(request.node)), *map(str, counts), escape(printable(found.first)))
    for each in results:
        if isinstance(each.found, TruerollError):
            text = escape(printable(f"failed: {each.found}"))
            table.add_row(escape(printable(each.request.node)), str(_num_tokens(each.request)), "", "", "", text)
    return table


def _num_tokens(request: RecordedRequest) -> int:
    return len(request.sample.token_ids)


def _summary(results: Sequence[Result]) -> str:
    """Return a text with the verdict and with the requests that were not compared."""
    compared = [each.found for each in results if isinstance(each.found, Comparison)]
    tokens, logprobs, others, ends = (
        sum(getattr(found, name) for found in compared) for name in ("tokens", "logprobs", "others", "has_other_end")
    )
    total = sum(_num_tokens(each.request) for each in results if isinstance(each.found, Comparison))
    num_failed = sum(isinstance(each.found, TruerollError) for each in results)
    lines = [
        f"{len(compared)} requests with {total} tokens compared: {tokens} tokens, {logprobs} log-probs, {others} other "
        f"records and {ends} ends differ; {num_failed} requests failed"
    ]
    nodes: dict[str, list[str]] = {}
    for each in results:
        if isinstance(each.found, str):
            nodes.setdefault(each.found, []).append(printable(each.request.node))
    for reason, named in nodes.items():
        more = f" and {len(named) - SHOWN_NODES} more" if len(named) > SHOWN_NODES else ""
        lines.append(f"{len(named)} requests not compared, because {reason}: {', '.join(named[:SHOWN_NODES])}{more}")
    if not compared:
        lines.append("nothing was compared; replay on a worker with the weights of the record")
    return "\n".join(lines)
