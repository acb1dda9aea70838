"""Admission: checks each request, opens its samples, and finds or creates the sequence that computes its prompt.

Owns the order in which requests arrive, and the checks that decide whether a request can be served. A rejected request
changes nothing. An accepted request is in the ledger and in the scheduler when `add` returns.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np

from trueroll.errors import InvalidRequestError

from ..kernels.edits import Editor, Rules
from ..kernels.specs import DecoderSpec
from .cache.prefix_cache import Chain
from .commits import Adapter
from .grammars.masks import Grammars, Place
from .media import ImageInput, ImageLimits, check_pixels
from .outputs.open_requests import DrawRecord, OpenSample, OpenScore
from .outputs.routes import Routes
from .outputs.stop_strings import StopStrings, TokenizerError, Vocabulary, load_vocabulary
from .pipeline import Ledger
from .request import (
    KEPT,
    MAX_TARGETS,
    NO_TARGET,
    TARGETS,
    TOPS,
    ContentSpan,
    Distribution,
    GenerateRequest,
    GrowingColumns,
    Request,
    ScoreRequest,
    Widths,
    check_length,
    check_spans,
    derive_seed,
)
from .running.adapters import AdapterStore
from .running.loading import EngineInfo
from .scheduling.media import SequenceMedia, spans_of
from .scheduling.scheduler import Scheduler, SharedPrompts
from .scheduling.sequence import Generation, Sequence


class Admission:
    """Checks each request and adds it to `ledger` and `scheduler`.

    `model`: the model's folder, with the tokenizer that is used to find stop strings. `adapters`: the loaded adapters;
    None if the engine serves none. `num_added`: the number of requests added so far. `joined_tokens`: the number of
    prompt tokens that were not computed again, because their request joined another request's computation of the same
    prompt.
    """

    def __init__(
        self,
        info: EngineInfo,
        model: Path,
        scheduler: Scheduler,
        prompts: SharedPrompts,
        ledger: Ledger,
        spec: DecoderSpec,
        images: ImageLimits,
        grammars: Grammars,
        adapters: AdapterStore | None,
    ) -> None:
        self.num_added = 0
        self.joined_tokens = 0
        self._info = info
        self._vocabulary = _load_vocabulary(model)
        self._scheduler, self._prompts, self._ledger, self._grammars = scheduler, prompts, ledger, grammars
        self.images, self._tower, self._adapters = images, spec.served_tower, adapters
        self._has_axes = any(rotation.axes for rotation in spec.rotations)

    def add(self, request: Request) -> None:
        """Accept a request. Raise InvalidRequestError, with nothing changed, if the request can never be served."""
        if request.id in self._ledger.open:
            text = f"an unfinished request already has the id {request.id!r}; use another id"
            raise InvalidRequestError(text, field="id", value=request.id)
        if isinstance(request, ScoreRequest):
            self._add_score(request)
        else:
            self._add_group(request)
        self.num_added += 1

    def _add_group(self, request: GenerateRequest) -> None:
        request = self._checked(request)
        prompt, rules = request.prompt_token_ids, self._rules(request.params)
        prior = prompt[len(prompt) - request.num_prior_tokens :]
        places = [self._place(request.params, prior) for _ in range(request.params.n)]
        samples = [self._sample(request, i, rules, place) for i, place in enumerate(places)]
        self._ledger.open_samples(samples, self._prompt_sequence(request, samples))

    def _checked(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request with `max_tokens` filled in. Raise InvalidRequestError if the request cannot be served."""
        info, num_prompt_tokens = self._info, len(request.prompt_token_ids)
        params = request.params.with_max_tokens(num_prompt_tokens, info.max_model_len)
        if params.seed is None:
            text = "seed is None; give a number, such as `seed_of(id, prompt)`"
            raise InvalidRequestError(text, field="seed")
        assert params.max_tokens is not None
        num_tokens = num_prompt_tokens + params.max_tokens
        self._check_content("prompt_token_ids", request.prompt_token_ids, request.spans, 1, num_tokens)
        self._check_images(request.images, request.prompt_token_ids, request.spans)
        _check_prior(request)
        _check_top_logprobs(params.top_logprobs, info)
        _check_experts(params.return_routed_experts, info)
        _check_named_tokens(params, info)
        _check_vocabulary("target_token_ids", "target_token_ids", np.asarray(params.target_token_ids, np.int64), info)
        return replace(request, params=params)

    def _rules(self, distribution: Distribution) -> Rules | None:
        return Rules.of(distribution, sorted(_ending_tokens(distribution, self._info)), self._info.vocab_size)

    def _place(self, distribution: Distribution, token_ids: np.ndarray, is_given: bool = False) -> Place | None:
        """Return the `Place` of a sample that begins with `token_ids`, in a text that the distribution's grammar
        restricts. Return None if the distribution has no grammar. `is_given`: as in `Grammars.open`. Raise the same
        errors as `Grammars.open`.
        """
        if (grammar := distribution.structured_outputs) is None:
            return None
        ending = sorted(_ending_tokens(distribution, self._info))
        return self._grammars.open(grammar, ending, token_ids.tolist(), is_given)

    def _sample(self, request: GenerateRequest, index: int, rules: Rules | None, place: Place | None) -> OpenSample:
        params, prompt = request.params, request.prompt_token_ids
        assert params.seed is not None
        start, num_targets = len(prompt) - request.num_prior_tokens, len(params.target_token_ids)
        seed = derive_seed(params.seed, index)
        return OpenSample(
            request,
            index,
            (self.num_added, index),
            seed,
            DrawRecord.of(params, seed, len(prompt), rules),
            _ending_tokens(params, self._info),
            None if rules is None else Editor(rules, prompt[:start], prompt[start:]),
            self._watch(request),
            logprobs=None if params.logprobs is None else array("f"),
            records=None if params.top_logprobs is None else GrowingColumns(TOPS, Widths(params.top_logprobs)),
            targets=GrowingColumns((TARGETS,), Widths(targets=num_targets)) if num_targets else None,
            target_ids=np.array(params.target_token_ids, np.int64) if num_targets else None,
            kept=GrowingColumns(KEPT, Widths()) if params.return_sampling_mask else None,
            place=place,
        )

    def _watch(self, request: GenerateRequest) -> StopStrings | None:
        if not request.params.stop:
            return None
        if isinstance(self._vocabulary, str):
            raise InvalidRequestError(self._vocabulary, field="stop")
        watch = StopStrings(self._vocabulary, request.params.stop)
        if num_prior := request.num_prior_tokens:
            try:
                watch.feed_prior(request.prompt_token_ids[-num_prior:].tolist())
            except TokenizerError as error:
                text = f"stop: cannot decode the prior tokens: {error}"
                raise InvalidRequestError(text, field="stop") from None
        return watch

    def _prompt_sequence(self, request: GenerateRequest, samples: list[OpenSample]) -> Sequence:
        """Return the sequence that computes the prompt.

        If a sequence of another request already computes the same prompt, add the samples to that sequence. If no
        sequence computes the prompt, make a new sequence.
        """
        prompt, params = array("i", request.prompt_token_ids.tolist()), request.params
        chain = self._new_chain(params.cache_salt, request, params.return_routed_experts)
        running = self._prompts.find(prompt, chain)
        if running is not None:
            self._join(running, samples)
            return running
        sequence = self._new_sequence(prompt, Generation(samples), chain, request.images)
        if self._scheduler.cache.enabled:
            self._prompts.add(sequence)
        return sequence

    def _new_chain(self, cache_salt: str | None, request: Request, has_records: bool) -> Chain:
        spans = request.spans
        if self._tower is not None and request.images:
            placed = zip(request.images, spans_of(request.images, self._tower), strict=True)
            spans = tuple(ContentSpan(span.start, span.end, image.content_hash) for image, span in placed)
        adapter = None if request.adapter is None else self._find_adapter(request.adapter)
        return self._scheduler.cache.identity.new_chain(cache_salt, spans, has_records, adapter)

    def _find_adapter(self, name: str) -> Adapter:
        found = None if self._adapters is None else self._adapters.find(name)
        if found is None:
            raise InvalidRequestError(f"adapter {name!r} is not loaded; load it first", field="adapter", value=name)
        return found

    def _new_sequence(
        self, tokens: array[int], purpose: Generation | OpenScore, chain: Chain, images: tuple[ImageInput, ...]
    ) -> Sequence:
        sequence = Sequence((self.num_added, 0), tokens, len(tokens), chain, purpose)
        if images and self._tower is not None:
            sequence.media = SequenceMedia(images, self._tower, self._has_axes)
        if chain.has_records:
            sequence.routes = Routes(self._ledger.open_routes, self._info.route_bytes)
        self._scheduler.waiting.add(sequence)
        return sequence

    def _join(self, running: Sequence, samples: list[OpenSample]) -> None:
        assert isinstance(running.purpose, Generation)
        running.purpose.samples += samples
        for sample in samples:
            sample.joined = True
        self.joined_tokens += running.num_prompt_tokens

    def _add_score(self, request: ScoreRequest) -> None:
        self._check_content("token_ids", request.token_ids, request.spans, 2, len(request.token_ids))
        self._check_images(request.images, request.token_ids[:-1], request.spans)
        _check_start(request)
        _check_targets(request, self._info)
        _check_top_logprobs(request.top_logprobs, self._info)
        _check_experts(request.return_routed_experts, self._info)
        _check_named_tokens(request.distribution, self._info)
        # The last token is scored but never fed to the model.
        place = self._place(request.distribution, request.token_ids[request.start :], is_given=True)
        score = OpenScore(request, (self.num_added, 0), self._rules(request.distribution), place)
        _check_score_bytes(score, self._ledger.records.limit)
        tokens = array("i", request.token_ids[:-1].tolist())
        chain = self._new_chain(request.cache_salt, request, request.return_routed_experts)
        self._ledger.open_score(score, self._new_sequence(tokens, score, chain, request.images))

    def _check_images(
        self, images: tuple[ImageInput, ...], token_ids: np.ndarray, spans: tuple[ContentSpan, ...]
    ) -> None:
        """Raise InvalidRequestError unless all images of a prompt can be served."""
        if not images:
            return
        tower = self.images.check(images, token_ids)
        if spans:
            raise InvalidRequestError("spans must be empty in a request with images; leave spans out", field="spans")
        check_pixels(images, tower)
        encodings, info = self._scheduler.running.encodings, self._info
        assert encodings is not None
        # Each of the other running sequences may take one token of a step. An image can use the remaining tokens.
        most = info.max_num_batched_tokens - info.max_num_seqs + 1
        for i, image in enumerate(images):
            size, tokens = encodings.size_of(image), tower.num_tokens(image.rows, image.columns)
            if size > encodings.budget:
                raise InvalidRequestError(
                    f"images[{i}]: the encoded image has {size} bytes (limit {encodings.budget}); give a smaller "
                    "image, or raise image_cache_bytes",
                    field=f"images[{i}]",
                    value=size,
                    limit=encodings.budget,
                )
            if tower.sees_span and tokens > most:
                raise InvalidRequestError(
                    f"images[{i}]: all {tokens} tokens of the image must be computed in one step (limit {most} = "
                    "max_num_batched_tokens - max_num_seqs + 1); raise max_num_batched_tokens, or lower max_num_seqs",
                    field=f"images[{i}]",
                    value=tokens,
                    limit=most,
                )
            if tower.sees_span:
                self._scheduler.cache.tables.check_fits(len(token_ids), tokens)

    def _check_content(
        self, field: str, token_ids: np.ndarray, spans: tuple[ContentSpan, ...], minimum: int, num_tokens: int
    ) -> None:
        if (found := len(token_ids)) < minimum:
            text = f"token ids: at least {minimum} required (got {found})"
            raise InvalidRequestError(text, field=field, value=found, limit=minimum)
        _check_vocabulary(field, "token ids", token_ids, self._info)
        check_length(field, found, num_tokens - found, self._info.max_model_len)
        check_spans(spans, found)
        self._scheduler.cache.tables.check_fits(num_tokens)


def _load_vocabulary(folder: Path) -> Vocabulary | str:
    """Return the vocabulary of a model folder.

    If the vocabulary cannot be loaded, return the error text for requests that use stop strings.
    """
    try:
        return load_vocabulary(folder)
    except InvalidRequestError as error:
        return str(error)


def _ending_tokens(params: Distribution, info: EngineInfo) -> frozenset[int]:
    return frozenset(params.stop_token_ids).union(() if params.ignore_eos else info.eos_token_ids)


def _check_named_tokens(params: Distribution, info: EngineInfo) -> None:
    """Raise InvalidRequestError unless all token ids in `params` are in the vocabulary and at least one token may be
    drawn.
    """
    named = dict(
        stop_token_ids=params.stop_token_ids,
        logit_bias=[token for token, _ in params.logit_bias],
        allowed_token_ids=params.allowed_token_ids or (),
        bad_words_token_ids=[token for word in params.bad_words_token_ids for token in word],
    )
    for name, token_ids in named.items():
        _check_vocabulary(name, name, np.asarray(token_ids, np.int64), info)
    banned = {word[0] for word in params.bad_words_token_ids if len(word) == 1}
    if params.min_tokens > 0:
        banned |= _ending_tokens(params, info)
    allowed = range(info.vocab_size) if params.allowed_token_ids is None else frozenset(params.allowed_token_ids)
    if len(banned) >= len(allowed) and banned.issuperset(allowed):
        raise InvalidRequestError(
            f"no token can be sampled, because {_named(params)} exclude all {info.vocab_size} token ids; allow at "
            "least one token",
            field="min_tokens" if params.min_tokens else "bad_words_token_ids",
        )


def _named(params: Distribution) -> str:
    """Return the names of the parameters that exclude tokens, joined by `and`."""
    given = dict(allowed_token_ids=params.allowed_token_ids, bad_words_token_ids=params.bad_words_token_ids)
    return " and ".join([*(name for name, value in given.items() if value), *["min_tokens"] * (params.min_tokens > 0)])


def _check_start(request: ScoreRequest) -> None:
    length = len(request.token_ids)
    if not 1 <= request.start < length:
        raise InvalidRequestError(
            f"start must be from 1 to {length - 1}, since the first token has no log-prob (got {request.start})",
            field="start",
            value=request.start,
            limit=length - 1,
        )


def _check_prior(request: GenerateRequest) -> None:
    if request.num_prior_tokens > (most := len(request.prompt_token_ids)):
        raise InvalidRequestError(
            f"num_prior_tokens must not exceed the prompt's {most} tokens (got {request.num_prior_tokens})",
            field="num_prior_tokens",
            value=request.num_prior_tokens,
            limit=most,
        )
    if request.num_prior_tokens and request.params.n > 1:
        raise InvalidRequestError(
            f"num_prior_tokens requires n = 1, because only one sample can be continued (got n = {request.params.n})",
            field="n",
            value=request.params.n,
            limit=1,
        )


def _check_targets(request: ScoreRequest, info: EngineInfo) -> None:
    targets = request.target_token_ids
    if targets is None:
        return
    rows = len(request.token_ids) - request.start
    if targets.ndim != 2 or len(targets) != rows or not 1 <= targets.shape[1] <= MAX_TARGETS:
        raise InvalidRequestError(
            f"target_token_ids must have shape [{rows}, K]: one row for each token of token_ids[start:], and K from 1 "
            f"to {MAX_TARGETS} (got {list(targets.shape)})",
            field="target_token_ids",
        )
    _check_vocabulary("target_token_ids", "target_token_ids", targets[targets != NO_TARGET], info)


def _check_score_bytes(score: OpenScore, limit: int) -> None:
    if (found := score.record_bytes) > limit:
        raise InvalidRequestError(
            f"records: the score of {score.num_rows} tokens needs {found} bytes (limit {limit}, max_record_bytes); "
            "record less, score fewer tokens in one request, or raise the limit",
            field="token_ids",
            value=found,
            limit=limit,
        )


def _check_vocabulary(field: str, what: str, token_ids: np.ndarray, info: EngineInfo) -> None:
    outside = token_ids[(token_ids < 0) | (token_ids >= info.vocab_size)]
    if len(outside):
        raise InvalidRequestError(
            f"{what} must be in [0, {info.vocab_size}) (got {outside[0]}); use the model's own tokenizer",
            field=field,
            value=int(outside[0]),
            limit=info.vocab_size - 1,
        )


def _check_top_logprobs(k: int | None, info: EngineInfo) -> None:
    if k is not None and k > info.vocab_size:
        raise InvalidRequestError(
            f"top_logprobs must not exceed the vocabulary's {info.vocab_size} tokens (got {k})",
            field="top_logprobs",
            value=k,
            limit=info.vocab_size,
        )


def _check_experts(records: bool, info: EngineInfo) -> None:
    if records and not info.num_experts:
        raise InvalidRequestError(
            f"return_routed_experts is not supported, because {info.model} has no layer with experts; leave it out",
            field="return_routed_experts",
            value=True,
        )
