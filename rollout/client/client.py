"""The clients of one worker: prompts in, groups of samples out.

Owns: what each call does. Does not own: sending, reconnecting and the handling of lost workers (`Connection`), or the
format of messages (`protocol`). Imports neither torch nor transformers.

Guarantees:

- A call returns when all its requests have ended. By default, the call raises the first error; the error text names the
  failed prompt. With `errors="return"`, the call returns errors instead of raising them.
- If a call raises an error, is cancelled or is interrupted, or if a stream is closed early, the client abandons the
  unfinished requests. The worker then aborts every abandoned request that no other client waits for.
- If the worker or its replies are lost, the client does not abort the affected requests. The caller can submit the
  affected requests again.
- The client acknowledges results, so that the worker can drop the acknowledged results.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Self, TypeAlias, TypeVar, overload

import numpy as np

from trueroll.errors import (
    IdConflictError,
    InvalidRequestError,
    MessageTooLargeError,
    ProtocolError,
    RequestAbortedError,
    TruerollError,
    UnknownRequestError,
    UnreadError,
    WorkerLostError,
)

from ...engine.media import ImageInput
from ...engine.request import (
    Distribution,
    SampleDelta,
    SampleOutput,
    SamplingParams,
    ScoreOutput,
    SleepInFlight,
    Tag,
)
from .. import protocol
from ..network.keys import Key
from ..tracing import traced_replies
from .adapters import load_adapter
from .connection import NO_IMAGES, Connection, Inbox, Received, wrong_process
from .continuation import check_one_version, joined
from .media import Media, Prompt, PromptMaker, Prompts, contents
from .requests import (
    ParamsArg,
    Request,
    continue_requests,
    generate_requests,
    message_of,
    score_requests,
    scored_distribution,
)

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from ..images import ImageProcessor

T = TypeVar("T")
P = ParamSpec("P")
Position: TypeAlias = int
Replies: TypeAlias = AsyncGenerator[tuple[int, protocol.FromWorker | SampleDelta | TruerollError], None]

_OF_ONE_REQUEST = (InvalidRequestError, IdConflictError, MessageTooLargeError)
"""Errors about a single request of a call. The client adds the position of the request in the call to the error text.
"""
_PROMPT_FIELDS = ("prompt_token_ids", "token_ids")


@dataclass(frozen=True)
class Group:
    """All samples of one prompt, ordered by index.

    `params`: the sampling parameters that the worker used, including the seed. `prompt_token_ids`: int32
    [num_prompt_tokens], the prompt tokens that the worker used, with a placeholder for each token of an image.
    `images`: the images that the worker used. To get log-probs with the same bits as the worker's log-probs, a trainer
    must use these tokens and images.
    """

    id: str
    samples: tuple[SampleOutput, ...]
    params: SamplingParams
    num_prompt_tokens: int
    prompt_token_ids: np.ndarray
    images: tuple[ImageInput, ...]


class AsyncRolloutClient:
    """A client of the worker at `address`. The client connects at the first call. Calls may run concurrently.

    Make all calls in the same process and event loop as the first call.

    - `timeout`: if the worker sends nothing for this many seconds, pending calls raise WorkerLostError. A worker
      answers health checks even while it computes or loads its model.
    - `server_public_key`, `client_key`: for a worker with named clients, the worker's public key and this client's
      secret key. Give both keys or neither. A key is a Z85 string, or the path of a key file made by
      `zmq.auth.create_certificates` (`.key`, `.key_secret`).
    - `while_connected`: when the connection or this process ends, the worker aborts this client's requests for samples.
      Set `while_connected` if the client does not submit lost requests again.
    - `read_only`: the arrays of results are read-only and share the memory of the worker's replies. With `read_only`, a
      long reply takes only half of the memory that it takes without `read_only`.
    - `image_processor`: the processor for images that are not preprocessed yet. By default, the client uses the
      processor in the folder of the worker's model; this folder must be on this machine.
    - `tracer`: an OpenTelemetry tracer. With a tracer, the client makes a span for each request for samples.
    """

    _model_name: str | None = None

    def __init__(
        self,
        address: str,
        timeout: float = 30.0,
        server_public_key: Key | None = None,
        client_key: Key | None = None,
        *,
        while_connected: bool = False,
        read_only: bool = False,
        image_processor: ImageProcessor | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.address, self.tracer = address, tracer
        self._connection = Connection(address, timeout, server_public_key, client_key)
        self._while_connected, self._read_only = while_connected, read_only
        self._prompts = PromptMaker(image_processor, self.health)
        self._open: dict[str, None] = {}  # ids of open requests, in the order in which they were sent

    @overload
    async def generate(
        self,
        prompts: Prompts,
        params: ParamsArg = None,
        *,
        media: Media = None,
        seed: int | None = None,
        request_ids: Sequence[str] | None = None,
        errors: Literal["raise"] = "raise",
        progress: bool = False,
        min_weight_version: int | None = None,
        wait_for_weights: bool = False,
        adapter: str | None = None,
    ) -> list[Group]: ...

    @overload
    async def generate(
        self,
        prompts: Prompts,
        params: ParamsArg = None,
        *,
        media: Media = None,
        seed: int | None = None,
        request_ids: Sequence[str] | None = None,
        errors: Literal["return"],
        progress: bool = False,
        min_weight_version: int | None = None,
        wait_for_weights: bool = False,
        adapter: str | None = None,
    ) -> list[Group | TruerollError]: ...

    async def generate(
        self,
        prompts: Prompts,
        params: ParamsArg = None,
        *,
        media: Media = None,
        seed: int | None = None,
        request_ids: Sequence[str] | None = None,
        errors: Literal["raise", "return"] = "raise",
        progress: bool = False,
        min_weight_version: int | None = None,
        wait_for_weights: bool = False,
        adapter: str | None = None,
    ) -> list[Group] | list[Group | TruerollError]:
        """Generate samples for every prompt. Return one Group for each prompt, in the order of the prompts.

        - `params`: parameters for all prompts, or a list with one entry per prompt. None: the default parameters. If
          there are several prompts, a single `params` must not have a seed, because all prompts would be sampled with
          the same random numbers.
        - `media`: for each prompt, a list of its images, which may be empty. None: no prompt has images. Images may be
          PIL images, or arrays, uint8 [rows, columns, 3]. The client preprocesses each image once, as the model's own
          image processor does. The prompt has one placeholder for each image, and the client expands each placeholder
          to the tokens of its image. Images may also be preprocessed `ImageInput` objects, such as those in
          `Group.images`; the prompt must then be expanded already, like `Group.prompt_token_ids`. Either all images of
          a prompt are preprocessed, or none of them. The client sends the pixels of an image only if the worker does
          not have these pixels yet.
        - `seed`: seed of the whole call. Prompt i gets `derive_seed(seed, i)`, so that each prompt gets its own random
          numbers. For new random numbers in every training step, pass `derive_seed(seed_of_the_run, step)`.
        - `request_ids`: one id for each prompt; None generates new ids. If a request has no seed, the worker derives a
          seed from the request's id and prompt. Requests with equal ids and contents give the same samples from any
          worker with the same weights, even after a crash of client or worker. If a request is submitted again, either
          while it is in flight or because its results were lost, the worker does not compute the request again.
        - `errors`: with `return`, the result for a failed prompt is an error instead of a Group, and the other prompts
          finish.
        - `progress`: show a progress bar on a terminal.
        - `min_weight_version`: minimum weight version at which a request may begin. If the worker's weights are older
          than this version, for example after a restart, the call raises StaleWeightsError. After a request has begun,
          a push with `allow_older` may still replace the weights with older weights. The version spans of a sample show
          which weights generated which tokens.
        - `wait_for_weights`: instead of raising StaleWeightsError, wait until a push brings the version
          `min_weight_version` or a later version.
        - `adapter`: the name of a loaded adapter (`load_adapter`, or a push with `adapter`), with which all samples are
          generated; None: the base weights. With `adapter`, `min_weight_version` is a version of the adapter, not of
          the base weights.
        """
        demand: dict[str, Any] = dict(min_weight_version=min_weight_version, wait_for_weights=wait_for_weights)
        demand["adapter"] = adapter
        demand["while_connected"] = self._while_connected
        given = await self._prompts.make(prompts, media, "prompts", errors)
        made = generate_requests(given, params, seed, request_ids, demand, errors)
        total = sum(each.params.n for each in made if isinstance(each, protocol.Generate))
        with _progress_bar(progress, total) as advance:
            return await self._groups(given, made, errors, advance)

    async def _groups(
        self,
        prompts: list[Prompt | InvalidRequestError],
        made: list[protocol.Generate | TruerollError],
        errors: str,
        advance: Any,
    ) -> list[Any]:
        groups: list[Any] = list(made)
        requests = {i: each for i, each in enumerate(made) if isinstance(each, protocol.Generate)}
        samples: dict[int, dict[int, SampleOutput]] = {position: {} for position in requests}
        sent = self.exchange(requests, "prompts", errors, in_groups=True, images=contents(prompts))
        async with aclosing(await self._traced(requests, sent)) as replies:
            async for position, reply in replies:
                if isinstance(reply, protocol.FinishedSample):
                    samples[position][reply.index] = protocol.sample_output(reply, self._read_only)
                    advance()
                elif isinstance(reply, protocol.Done):
                    groups[position] = _group(reply, samples[position], prompts[position])
                else:
                    groups[position] = reply
        return groups

    async def _traced(self, requests: Mapping[int, Request], replies: Replies) -> Replies:
        """Return the replies to requests for samples. With a tracer, each request gets a span while the replies are
        read.
        """
        if self.tracer is None:
            return replies
        if self._model_name is None and (engine := (await self.health()).engine) is not None:
            self._model_name = str(engine["model"])
        return traced_replies(self.tracer, self._model_name or "unknown", requests, replies)

    @overload
    def stream(
        self,
        prompts: Prompts,
        params: ParamsArg = None,
        *,
        media: Media = None,
        deltas: Literal[False] = False,
        seed: int | None = None,
        request_ids: Sequence[str] | None = None,
        min_weight_version: int | None = None,
        wait_for_weights: bool = False,
        adapter: str | None = None,
    ) -> AsyncGenerator[tuple[int, SampleOutput], None]: ...

    @overload
    def stream(
        self,
        prompts: Prompts,
        params: ParamsArg = None,
        *,
        media: Media = None,
        deltas: bool,
        delta_seconds: float = 0.0,
        seed: int | None = None,
        request_ids: Sequence[str] | None = None,
        min_weight_version: int | None = None,
        wait_for_weights: bool = False,
        adapter: str | None = None,
    ) -> AsyncGenerator[tuple[int, SampleDelta | SampleOutput], None]: ...

    async def stream(
        self,
        prompts: Prompts,
        params: ParamsArg = None,
        *,
        media: Media = None,
        deltas: bool = False,
        delta_seconds: float = 0.0,
        seed: int | None = None,
        request_ids: Sequence[str] | None = None,
        min_weight_version: int | None = None,
        wait_for_weights: bool = False,
        adapter: str | None = None,
    ) -> AsyncGenerator[tuple[int, Any], None]:
        """Generate samples. When a sample finishes, yield the tuple (position of the sample's prompt, sample).
        Arguments: see `generate`.

        `deltas`: before the finished sample, also yield (position, SampleDelta) for new tokens as they arrive. The
        concatenated deltas of a sample equal the sample bit for bit. Each delta begins where the previous delta ended,
        or at token 0. If a later delta begins at token 0, the sample was restarted, for example after a lost
        connection. If a sample is restarted, discard its earlier deltas. If the caller reads slowly, unread deltas of a
        sample are merged into one delta. If another client already runs the same request, the first delta has all
        tokens generated so far.

        `delta_seconds`: minimum time between two messages with deltas for this call, in seconds, from 0 to 60. One
        message may contain deltas of all samples of the call. The worker applies `delta_seconds` only while it streams
        to more than 8 callers. Finished samples are never delayed.
        """
        demand: dict[str, Any] = dict(min_weight_version=min_weight_version, wait_for_weights=wait_for_weights)
        demand["adapter"] = adapter
        demand |= dict(while_connected=self._while_connected, deltas=deltas, delta_seconds=delta_seconds)
        given = await self._prompts.make(prompts, media, "prompts")
        made = dict(enumerate(generate_requests(given, params, seed, request_ids, demand)))
        sent = self.exchange(made, "prompts", images=contents(given))
        async with aclosing(await self._traced(made, sent)) as replies:
            async for position, reply in replies:
                if isinstance(reply, protocol.FinishedSample):
                    yield position, protocol.sample_output(reply, self._read_only)
                elif isinstance(reply, SampleDelta):
                    yield position, reply

    async def continue_samples(
        self,
        prompts: Prompts,
        samples: Sequence[SampleOutput],
        params: ParamsArg = None,
        *,
        media: Media = None,
        request_ids: Sequence[str] | None = None,
        min_weight_version: int | None = None,
        wait_for_weights: bool = False,
        adapter: str | None = None,
    ) -> list[SampleOutput]:
        """Continue unfinished samples. Return one whole sample for each prompt, in the order of the prompts.

        - `samples`: one sample for each prompt, from `generate`. A sample is continued if its finish reason is `abort`,
          or if its finish reason is `length` and it has fewer than `max_tokens` tokens. Samples that are not continued
          are returned unchanged. If `max_tokens` is None, samples with finish reason `length` are continued until the
          model's context is full.
        - `params`: the parameters of the original call, or `Group.params`. `n` and `seed` in `params` are ignored,
          because each sample continues with its own random numbers. `max_tokens` and `min_tokens` include the existing
          tokens of a sample. A stop string may begin in the existing tokens.
        - `media`: the images of the prompts, as in the original call; or the preprocessed images in `Group.images`,
          together with `Group.prompt_token_ids` as prompts.
        - `request_ids`: one id for each sample, including the samples that are returned unchanged. `generate` describes
          request ids.
        - `min_weight_version`, `wait_for_weights`, `adapter`: see `generate`.

        If the weights have not changed, the joined sample equals an uninterrupted sample bit for bit. If the weights
        have changed, the version spans of the joined sample say which weights generated which tokens. Raise
        StaleWeightsError if `params` sets `one_version` and the weights have changed.
        """
        demand: dict[str, Any] = dict(min_weight_version=min_weight_version, wait_for_weights=wait_for_weights)
        demand["adapter"] = adapter
        given = await self._prompts.make(prompts, media, "prompts")
        requests = continue_requests(given, samples, params, request_ids, demand)
        whole = list(samples)
        sent = self.exchange(requests, "samples", "return", images=contents(given))
        async with aclosing(await self._traced(requests, sent)) as replies:
            async for position, reply in replies:
                if isinstance(reply, protocol.FinishedSample):
                    whole[position] = joined(whole[position], protocol.sample_output(reply))
                    check_one_version(requests[position].params, whole[position])
                elif isinstance(reply, TruerollError):
                    await self._check_fills_context(requests[position], samples[position], reply)
        return whole

    async def _check_fills_context(
        self, request: protocol.Generate, sample: SampleOutput, error: TruerollError
    ) -> None:
        """Do nothing if the worker refused to continue the sample because the sample already fills the context. In all
        other cases, raise the worker's `error`.
        """
        if sample.finish_reason != "length" or not isinstance(error, InvalidRequestError):
            raise error
        engine = (await self.health()).engine
        if engine is None or len(request.prompt_token_ids) // 4 != engine["max_model_len"]:
            raise error

    async def score(
        self,
        sequences: Prompts,
        temperature: float = 1.0,
        top_k: int = -1,
        top_p: float = 1.0,
        min_p: float = 0.0,
        cache_salt: str | None = None,
        top_logprobs: int | None = None,
        *,
        distribution: Distribution | None = None,
        start: int | Sequence[int] = 1,
        target_token_ids: Sequence[Any] | None = None,
        media: Media = None,
        return_routed_experts: bool = False,
        return_sampling_mask: bool = False,
        min_weight_version: int | None = None,
        wait_for_weights: bool = False,
        adapter: str | None = None,
    ) -> list[ScoreOutput]:
        """Compute the log-probs of given tokens under a distribution. Return one ScoreOutput for each sequence, in the
        order of the sequences.

        `distribution`: sampling parameters that specify the distribution; give either `distribution`, or `temperature`,
        `top_k`, `top_p` and `min_p`. If `distribution` is the `SamplingParams` of a sample and `start` is the length of
        the sample's prompt, the scores have the same bits as the sample's log-probs. `start`: the index of the first
        token with a log-prob; either one index for all sequences, or one index for each sequence. The tokens before
        `start` count as the prompt. `target_token_ids`: for each sequence, integers [num_tokens - start, K]: the ids of
        K alternative tokens at each position. The log-probs of the alternative tokens are returned as
        `target_logprobs`. Fill up short rows with the id -1; the log-prob of the id -1 is 0. `ScoreOutput.logprobs` is
        float32 [num_tokens - start], and `target_logprobs` is float32 [num_tokens - start, K]. `top_logprobs`,
        `return_routed_experts`: as in `SamplingParams`. `return_sampling_mask`: also return which tokens the
        distribution keeps at each position. If a sample has `processed` log-probs, the returned sampling mask has the
        same bits as the sample's own sampling mask. `media`, `min_weight_version`, `wait_for_weights`, `adapter`: see
        `generate`. Raise RequestAbortedError if a scoring request was aborted. Raise ConfigError if `distribution` is a
        `SamplingParams` with `logprobs=None`.
        """
        values: dict[str, Any] = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        fields = dict(distribution=scored_distribution(distribution, values), cache_salt=cache_salt)
        fields |= dict(top_logprobs=top_logprobs, return_routed_experts=return_routed_experts)
        fields |= dict(return_sampling_mask=return_sampling_mask)
        fields |= dict(min_weight_version=min_weight_version, wait_for_weights=wait_for_weights, adapter=adapter)
        given = await self._prompts.make(sequences, media, "sequences")
        requests = score_requests(given, start, target_token_ids, fields)
        scores: dict[int, Any] = {}
        async with aclosing(self.exchange(requests, "sequences", images=contents(given))) as replies:
            async for position, reply in replies:
                if isinstance(reply, protocol.Scores):
                    scores[position] = _scored(reply, self._read_only)
        return [scores[position] for position in range(len(requests))]

    async def abort(
        self, request_ids: str | Iterable[str], index: int | None = None, *, missing_ok: bool = False
    ) -> int:
        """Abort requests, or only sample `index` of each request. Return the number of aborted samples.

        For an aborted sample, the call that requested the sample returns the tokens so far, with the finish reason
        `abort`. Without `missing_ok`, raise UnknownRequestError if a request or sample is not running. Even if
        UnknownRequestError is raised, all other given requests are aborted.
        """
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        calls = [message_of(protocol.Abort, id=protocol.new_id(), request_id=id, index=index) for id in ids]
        return sum(await asyncio.gather(*(self._abort(call, missing_ok) for call in calls)))

    async def _abort(self, call: protocol.Abort, missing_ok: bool) -> int:
        try:
            reply = await self.ask(call)
        except UnknownRequestError:
            if not missing_ok:
                raise
            return 0
        assert isinstance(reply, protocol.Aborted)
        return reply.num_samples

    async def abort_all(self) -> int:
        """Abort all requests of this client, the oldest first. Return the number of aborted samples."""
        return await self.abort(list(self._open), missing_ok=True)

    async def health(self) -> protocol.Health:
        """Return the worker's health. The worker replies at once, even while it computes or loads its model."""
        reply = await self.ask(protocol.GetHealth(id=protocol.new_id()))
        assert isinstance(reply, protocol.Health)
        return reply

    async def stats(self) -> protocol.Stats:
        """Return the lifetime counters of the worker's engine and service."""
        reply = await self.ask(protocol.GetStats(id=protocol.new_id()))
        assert isinstance(reply, protocol.Stats)
        return reply

    async def pause(self) -> protocol.Status:
        """Pause generation until `resume`.

        While generation is paused, running requests keep their tokens. New requests wait or are refused, depending on
        the worker's setting `while_unavailable`.
        """
        return await self._ask_status(protocol.Pause(id=protocol.new_id()))

    async def resume(self) -> protocol.Status:
        """End a pause."""
        return await self._ask_status(protocol.Resume(id=protocol.new_id()))

    async def drain(self, timeout: float = 600.0) -> protocol.Status:
        """Finish all requests that the worker has accepted so far, then pause generation.

        Raise DeadlineError if the requests do not finish within `timeout` seconds. After DeadlineError, the worker
        continues to generate.
        """
        return await self._ask_status(message_of(protocol.Drain, id=protocol.new_id(), timeout=timeout))

    async def sleep(
        self,
        level: Literal[1, 2] = 1,
        tags: Sequence[Tag] = protocol.ALL_TAGS,
        *,
        in_flight: SleepInFlight = "recompute",
        timeout: float = 600.0,
    ) -> protocol.Status:
        """Release the kinds of memory in `tags` until `wake_up` is called.

        - `level`: 1 keeps the weights in host memory; 2 drops the weights, so a push must bring new weights.
        - `in_flight`: what the worker does with running requests. `drain` first finishes the running requests, for at
          most `timeout` seconds. `recompute` keeps the tokens so far, and continues the running requests after
          `wake_up`. `abort` ends the running requests at once; the results of these requests have the tokens so far.
        """
        fields = dict(level=level, tags=tuple(tags), in_flight=in_flight, timeout=timeout)
        return await self._ask_status(message_of(protocol.Sleep, id=protocol.new_id(), **fields))

    async def wake_up(self, tags: Sequence[Tag] = protocol.ALL_TAGS) -> protocol.Status:
        """Allocate the kinds of memory in `tags` again. The worker is ready when all kinds of memory are allocated and
        the weights are complete.
        """
        return await self._ask_status(message_of(protocol.WakeUp, id=protocol.new_id(), tags=tuple(tags)))

    async def invalidate_prefix_cache(self) -> protocol.Status:
        """Drop all cached prefixes. Running requests keep their KV blocks."""
        return await self._ask_status(protocol.Invalidate(id=protocol.new_id()))

    async def load_adapter(
        self,
        name: str,
        folder: str | Path,
        version: int | None = None,
        *,
        in_flight: SleepInFlight = "recompute",
        timeout: float = 600.0,
    ) -> protocol.Status:
        """Load a LoRA adapter, and serve it under `name`. The worker reads the adapter from a folder in PEFT's format.

        The worker keeps generating during the call. An adapter that is already loaded under this name is replaced.
        Raise PushError if the new adapter cannot be served. A call that raises PushError changes nothing.

        - `version`: version of the adapter; None: the version of the loaded adapter plus 1, or 1 if no adapter with
          this name is loaded.
        - `in_flight`: what the worker does with running requests of the adapter that is replaced. `recompute` continues
          these requests with the new adapter; `abort` ends these requests; `drain` first finishes all requests of the
          worker.
        - `timeout`: maximum number of seconds for each step of the call.
        """
        return await load_adapter(self.ask, name, folder, version, in_flight, timeout)

    async def unload_adapter(self, name: str) -> protocol.Status:
        """Unload an adapter. The adapter's unfinished requests are aborted. Raise InvalidRequestError if no adapter
        with this name is loaded.
        """
        return await self._ask_status(message_of(protocol.UnloadAdapter, id=protocol.new_id(), name=name))

    async def weight_checksums(self) -> protocol.Checksums:
        """Return one XXH3 hash for each served parameter, computed from the parameter's bytes.

        The worker computes the hashes between two engine steps, so the next step waits for the hashes.
        """
        reply = await self.ask(protocol.GetChecksums(id=protocol.new_id()))
        assert isinstance(reply, protocol.Checksums)
        return reply

    async def _ask_status(self, message: protocol.LifecycleCall) -> protocol.Status:
        reply = await self.ask(message)
        assert isinstance(reply, protocol.Status)
        return reply

    async def close(self) -> None:
        """Disconnect. Pending calls raise TruerollError, but their requests keep running on the worker."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def ask(self, message: protocol.Call) -> protocol.FromWorker:
        """Send a call that has a single reply. Return the reply; if the reply is an error, raise the error."""
        inbox = Inbox()
        self._connection.call(message, inbox)
        try:
            _, reply = await inbox.get()
        finally:
            self._connection.calls.give_up([message.id])
        assert not isinstance(reply, Received), "no call with a single reply has deltas"
        if isinstance(reply, TruerollError):
            raise reply
        return reply

    async def exchange(
        self,
        requests: Mapping[Position, Request],
        what: str | None,
        errors: str = "raise",
        *,
        in_groups: bool = False,
        images: Mapping[bytes, ImageInput] = NO_IMAGES,
    ) -> Replies:
        """Submit requests, and yield (position, reply) as replies arrive until all requests have ended.

        Each sample is yielded once. If deltas were requested, they are yielded before their sample. `what`: name of the
        caller's argument, for error texts. If the name is `prompts`, an error text begins, for example, with
        `prompts[3]`. `errors`: with `return`, errors are yielded instead of raised. `in_groups`: the caller uses
        samples only after their group has ended. With `in_groups`, a client of several workers may restart a group and
        yield the group's samples again. `images`: the images of all requests, by content hash.
        """
        _check_ids(self._connection, [request.id for request in requests.values()])
        inbox = Inbox()
        positions = {request.id: position for position, request in requests.items()}
        unfinished, finished = set(positions), set()
        streamed = {each.id for each in requests.values() if isinstance(each, protocol.Generate) and each.deltas}
        seen: set[tuple[str, int]] = set()
        is_lost = False
        self._open |= dict.fromkeys(positions)
        try:
            for request in requests.values():
                self._connection.call(request, inbox, images)
            while unfinished:
                id, reply = await inbox.get()
                if isinstance(reply, Received):
                    if (piece := reply.take()) and (id, piece.index) not in seen:
                        yield positions[id], piece
                    continue
                if isinstance(reply, TruerollError):
                    unfinished.discard(id)
                    is_lost = isinstance(reply, WorkerLostError | UnreadError)
                    reply = reply if what is None else placed(reply, f"{what}[{positions[id]}]")
                    if errors == "raise":
                        raise reply
                elif not isinstance(reply, protocol.FinishedSample):
                    unfinished.discard(id)
                    finished.add(id)
                elif (id, reply.index) in seen:
                    continue  # the worker repeats samples when a request is sent again after a reconnect
                else:
                    seen.add((id, reply.index))
                    if id in streamed and (piece := inbox.finish(reply)):
                        yield positions[id], piece
                yield positions[id], reply
        finally:
            for id in positions:
                self._open.pop(id, None)
            known = self._connection.calls.give_up(unfinished)
            known |= {
                id
                for id, reply in inbox.rest()
                if id in unfinished and isinstance(reply, protocol.Done | protocol.Scores)
            }
            if not is_lost:
                _settle(self._connection, requests.values(), known, finished)


def _settle(
    connection: Connection, requests: Iterable[Request], given_up: Collection[str], finished: Collection[str]
) -> None:
    """Tell the worker which requests the caller has abandoned, and which results have arrived."""
    for request in requests:
        if request.id in given_up:
            connection.notify(protocol.Abort(id=protocol.new_id(), request_id=request.id, caller=request.caller))
    ids = list(finished)
    for start in range(0, len(ids), protocol.MAX_ACK_IDS):
        connection.notify(protocol.Ack(ids=tuple(ids[start : start + protocol.MAX_ACK_IDS])))


def _check_ids(connection: Connection, ids: list[str]) -> None:
    """Raise InvalidRequestError for an id that is given twice or already in use."""
    for id, count in Counter(ids).items():
        if count > 1 or id in connection.calls:
            text = f"request_ids: {id!r} is given twice or already in use; use an id for one request at a time"
            raise InvalidRequestError(text, field="request_ids", value=id)


def _blocking(
    call: Callable[Concatenate[AsyncRolloutClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[RolloutClient, P], T]:
    """Return a blocking version of an asynchronous client's method, with the same signature and docstring."""

    @wraps(call)
    def wait(self: RolloutClient, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.wait(getattr(self._client, call.__name__)(*args, **kwargs))

    return wait


class LoopThread:
    """An event loop on a daemon thread named `name`, for synchronous code.

    Guarantees: if a coroutine is submitted before `end` is called, the coroutine runs. `submit` and `end` may be called
    on the loop's own thread, because garbage collection may run on this thread and close clients and streams. On the
    loop's own thread, `end` returns without waiting. In a forked process, `submit` returns a failed future without
    waiting, and `end` raises TruerollError.
    """

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._may_submit = threading.RLock()  # the garbage collector may submit while this thread submits
        self._has_ended = False
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """Return whether the current process started the thread; False in a forked process."""
        return wrong_process(self._pid) is None

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine and return its future. After `end` or a fork, the future raises TruerollError."""
        if error := wrong_process(self._pid):  # check before locking: at a fork, another thread may hold the lock
            return _failed(coroutine, error)
        with self._may_submit:
            if not self._has_ended:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return _failed(coroutine, TruerollError("client or fleet: closed; make a new one"))

    def end(self, last: Callable[[], Coroutine[Any, Any, None]], cancel: bool = False) -> None:
        """Run the coroutine function `last`, wait for all running coroutines, and end the thread. Idempotent.

        `cancel`: first cancel the running coroutines, and close unfinished asynchronous generators. Raise TruerollError
        in a forked process.
        """
        if error := wrong_process(self._pid):
            raise error
        with self._may_submit:
            if self._has_ended:
                return
            self.submit(self._finish(last, cancel))
            self._has_ended = True
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _finish(self, last: Callable[[], Coroutine[Any, Any, None]], cancel: bool) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if cancel:
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await self._loop.shutdown_asyncgens()
        try:
            await last()
            await asyncio.gather(*others, return_exceptions=True)
        finally:
            self._loop.stop()


def _failed(coroutine: Coroutine[Any, Any, T], error: TruerollError) -> Future[T]:
    coroutine.close()
    failed: Future[T] = Future()
    failed.set_exception(error)
    return failed


class RolloutClient:
    """The methods of `AsyncRolloutClient`, for code without an event loop. May be used from several threads.

    The asynchronous client runs on a separate thread. Create the client in the process that uses it. In a process that
    is forked later, calls to the client raise TruerollError. An interrupt (Ctrl-C) during a call abandons the requests
    of the call. An open client is closed when it is garbage-collected, or when the interpreter exits. The automatic
    close of an open client also abandons the unfinished requests of its streams.
    """

    def __init__(
        self,
        address: str,
        timeout: float = 30.0,
        server_public_key: Key | None = None,
        client_key: Key | None = None,
        *,
        image_processor: ImageProcessor | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        keys = server_public_key, client_key
        self._begin(AsyncRolloutClient(address, timeout, *keys, image_processor=image_processor, tracer=tracer))

    def _begin(self, client: AsyncRolloutClient) -> None:
        self._client = client
        self._thread = LoopThread("rollout-client")
        self._abandon = weakref.finalize(self, _abandon, self._thread, client)

    @property
    def asynchronous(self) -> AsyncRolloutClient:
        """The asynchronous client that this client runs on its thread. Use the asynchronous client only in coroutines
        passed to `wait`.
        """
        return self._client

    generate = _blocking(AsyncRolloutClient.generate)
    score = _blocking(AsyncRolloutClient.score)
    continue_samples = _blocking(AsyncRolloutClient.continue_samples)
    abort = _blocking(AsyncRolloutClient.abort)
    abort_all = _blocking(AsyncRolloutClient.abort_all)
    health = _blocking(AsyncRolloutClient.health)
    stats = _blocking(AsyncRolloutClient.stats)
    pause = _blocking(AsyncRolloutClient.pause)
    resume = _blocking(AsyncRolloutClient.resume)
    drain = _blocking(AsyncRolloutClient.drain)
    sleep = _blocking(AsyncRolloutClient.sleep)
    wake_up = _blocking(AsyncRolloutClient.wake_up)
    invalidate_prefix_cache = _blocking(AsyncRolloutClient.invalidate_prefix_cache)
    load_adapter = _blocking(AsyncRolloutClient.load_adapter)
    unload_adapter = _blocking(AsyncRolloutClient.unload_adapter)
    weight_checksums = _blocking(AsyncRolloutClient.weight_checksums)

    @overload
    def stream(
        self,
        prompts: Prompts,
        params: ParamsArg = None,
        *,
        media: Media = None,
        deltas: Literal[False] = False,
        seed: int | None = None,
        request_ids: Sequence[str] | None = None,
        min_weight_version: int | None = None,
        wait_for_weights: bool = False,
        adapter: str | None = None,
    ) -> Iterator[tuple[int, SampleOutput]]: ...

    @overload
    def stream(
        self,
        prompts: Prompts,
        params: ParamsArg = None,
        *,
        media: Media = None,
        deltas: bool,
        delta_seconds: float = 0.0,
        seed: int | None = None,
        request_ids: Sequence[str] | None = None,
        min_weight_version: int | None = None,
        wait_for_weights: bool = False,
        adapter: str | None = None,
    ) -> Iterator[tuple[int, SampleDelta | SampleOutput]]: ...

    def stream(
        self,
        prompts: Prompts,
        params: ParamsArg = None,
        *,
        media: Media = None,
        deltas: bool = False,
        delta_seconds: float = 0.0,
        seed: int | None = None,
        request_ids: Sequence[str] | None = None,
        min_weight_version: int | None = None,
        wait_for_weights: bool = False,
        adapter: str | None = None,
    ) -> Iterator[tuple[int, Any]]:
        """See `AsyncRolloutClient.stream`."""
        demand: dict[str, Any] = dict(min_weight_version=min_weight_version, wait_for_weights=wait_for_weights)
        demand |= dict(media=media, deltas=deltas, delta_seconds=delta_seconds)
        samples = self._client.stream(prompts, params, seed=seed, request_ids=request_ids, **demand)
        try:
            while (item := self.wait(_next(samples))) is not None:
                yield item
        finally:
            # Do not wait, because this code also runs at interpreter exit, and on any thread where garbage is
            # collected.
            self._thread.submit(samples.aclose())

    def close(self) -> None:
        """Disconnect and end the thread. Pending calls in other threads raise TruerollError."""
        self._thread.end(self._client.close)
        self._abandon.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """On this client's thread, run a coroutine that uses `asynchronous`. Return the coroutine's result."""
        future = self._thread.submit(coroutine)
        try:
            return future.result()
        except CancelledError:
            raise TruerollError("client: the client is closed; make a new one") from None
        except BaseException:
            future.cancel()
            raise


def _abandon(thread: LoopThread, client: AsyncRolloutClient) -> None:
    if thread.is_here:
        thread.end(client.close, cancel=True)


def placed(error: TruerollError, where: str) -> TruerollError:
    """Return a copy of an error, with `where` inserted before the error text. An error that is not about a single
    request is returned unchanged.

    If the error is about the prompt, `where` also replaces the error's `field`.
    """
    if not isinstance(error, _OF_ONE_REQUEST):
        return error
    return error.retold(f"{where}: {error}", where if error.field in _PROMPT_FIELDS else None)


async def _next(samples: AsyncGenerator[tuple[int, Any], None]) -> tuple[int, Any] | None:
    return await anext(samples, None)


def _group(done: protocol.Done, samples: dict[int, SampleOutput], prompt: Prompt | InvalidRequestError) -> Group:
    assert isinstance(prompt, Prompt)
    count = done.params.n
    if len(samples) != count or max(samples) >= count:
        raise ProtocolError(
            f"request {done.id!r}: the worker sent {len(samples)} samples with indices up to "
            f"{max(samples, default=None)}, instead of samples 0 to {count - 1}; use the same release of trueroll on "
            "both sides"
        )
    ordered = tuple(samples[index] for index in range(count))
    token_ids = protocol.bytes_to_tokens(prompt.token_ids)
    return Group(done.id, ordered, done.params, done.num_prompt_tokens, token_ids, prompt.images)


def _scored(reply: protocol.Scores, read_only: bool) -> ScoreOutput:
    if reply.finish_reason == "abort":
        raise RequestAbortedError("score: the request was aborted before its result was computed; send another request")
    return protocol.score_output(reply, read_only)


@contextmanager
def _progress_bar(is_wanted: bool, total: int) -> Iterator[Any]:
    """Show a progress bar if `is_wanted`. Yield a function that advances the bar. The caller must call the function
    once for each finished sample.
    """
    if not is_wanted:
        yield lambda: None
        return
    from rich.progress import Progress

    with Progress(transient=True) as bar:
        task = bar.add_task("generating", total=total)
        yield lambda: bar.advance(task)
