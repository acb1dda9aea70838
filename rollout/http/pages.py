"""`/ui`: a page that shows the worker's activity and the latest samples.

The files of the page contain no data, so clients can read the files without a key. The page reads data from other
paths, which require a key. Text from a model is sent as JSON and inserted as text, never as markup. The page's
Content-Security-Policy lets browsers run only the page's own scripts.
"""

from __future__ import annotations

import time
from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from trueroll.errors import brief

from .clients import client_of
from .errors import HttpError, given_twice
from .fields import Fields, checked
from .logprobs import numbers
from .model import ServedModel
from .pieces import told_spans
from .samples import KeptGroup, KeptSample, SampleLog
from .watch import Watch
from .wire import answer, read_json, while_present

FOLDER = Path(__file__).parent / "ui"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
FILES = {"/ui": "index.html"} | {
    f"/ui/{name}": name
    for name in ("page.css", "page.js", "base.js", "charts.js", "samples.js", "uPlot.min.css", "uPlot.iife.min.js")
}
"""The files of the page, by their paths on the server."""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
MOST_TOKENS = 2048
"""Maximum number of tokens in a response of `/ui/tokens`."""
MOST_IMAGES = 16
"""Maximum number of images in a response of `/ui/group`."""
SHOWN = ("n", "max_tokens", "temperature")
"""Sampling parameters that are always shown. All other parameters are shown only if they differ from their defaults."""
PREVIEW_TOKENS = 40
PREVIEW_CHARS = 80
CONTEXT_TOKENS = 16
"""Number of tokens that are decoded before the first returned token, because the text of a token may depend on earlier
tokens.
"""


class ScoreFields(Fields):
    """Fields of `/ui/score`. `group`: id of a group. `sample`: index of the sample to score."""

    group: int
    sample: int


class Pages:
    """Handlers for the page and its data.

    A client with the role `generate` sees only the samples of its own user. A client with the role `control` sees all
    samples. Every front end process starts its group ids at 1, so responses contain `run`, an id of the process.
    """

    def __init__(self, served: ServedModel, samples: SampleLog, watch: Watch) -> None:
        self._served, self._samples, self._watch = served, samples, watch
        self._run = served.new_id("ui")
        self._files = {path: (FOLDER / name).read_bytes() for path, name in FILES.items()}

    async def file(self, request: Request) -> Response:
        """Return one of the page's files."""
        path = request.scope["path"]
        return Response(self._files[path], headers=HEADERS, media_type=TYPES[Path(FILES[path]).suffix])

    async def home(self, request: Request) -> Response:
        """Redirect to the page. The redirect has no host name, because the header `Host` may contain any name."""
        return RedirectResponse("/ui", headers=HEADERS)

    async def live(self, request: Request) -> Response:
        """Return the worker's snapshots (`looks`) after time `since`, and the groups with ids above `after`.

        `since` is in seconds since 1970.
        """
        new = self._samples.after(_whole(request, "after"), _viewer(request))
        told = {
            "run": self._run,
            "model": self._served.name,
            "now": time.time(),
            "looks": self._watch.since(_number(request, "since")),
            "first_group": self._samples.first_id,
            "groups": [await self._summary(group) for group in new],
        }
        return _data(told)

    async def group(self, request: Request) -> Response:
        """Return all data of the group `group` except its tokens."""
        group = self._group(request, _whole(request, "group"))
        told = {
            "num_prompt_tokens": len(group.prompt),
            "params": {name: getattr(group.params, name) for name in SHOWN} | _further(group),
            "seed": None if group.seed is None else str(group.seed),
            "samples": [_told(sample, self._served.eos_token_ids) for sample in group.samples],
            "num_images": group.num_images,
            "images": await while_present(request.receive, self._images(group)),
        }
        return _data(await self._summary(group) | told)

    async def _images(self, group: KeptGroup) -> list[dict[str, Any]]:
        """Return the index of each image's first token in the prompt, and a small picture of the image as a `data:`
        URL.
        """
        shown = group.images[:MOST_IMAGES]
        files = await self._served.images.thumbnails(shown)
        urls = ["data:image/png;base64," + b64encode(file).decode() for file in files]
        return [{"start": image.start, "picture": url} for image, url in zip(shown, urls, strict=False)]

    async def tokens(self, request: Request) -> Response:
        """Return the tokens of a sample from position `start` on.

        Without the query parameter `sample`, return the tokens of the group's prompt.
        """
        group, start = self._group(request, _whole(request, "group")), _whole(request, "start")
        sample = None if "sample" not in request.query_params else self._sample(group, _whole(request, "sample"))
        token_ids = (group.prompt if sample is None else sample.token_ids).tolist()
        logprobs = None if sample is None or sample.logprobs is None else sample.logprobs[start : start + MOST_TOKENS]
        first = max(0, start - CONTEXT_TOKENS)
        reading = self._served.texts.by_token(token_ids[first : start + MOST_TOKENS])
        texts = await while_present(request.receive, reading)
        told = {
            "token_ids": token_ids[start : start + MOST_TOKENS],
            "texts": texts[start - first :],
            "logprobs": None if logprobs is None else numbers(logprobs),
        }
        return _data(told)

    async def score(self, request: Request) -> Response:
        """Score a sample, and compare the new log-probs with the log-probs of the sample, bit by bit."""
        fields = checked(ScoreFields, read_json(request))
        group = self._group(request, fields.group)
        sample = self._sample(group, fields.sample)
        if not sample.token_ids.size:
            raise HttpError(400, "sample: the sample has no tokens to score; choose another sample", field="sample")
        if sample.old_kv:
            text = (
                "sample: some of its tokens were drawn over KV of older weights, which a push with in_flight keep had "
                "kept, so no version of the weights recomputes their log-probs; choose another sample"
            )
            raise HttpError(400, text, field="sample")
        if group.num_images != len(group.images):
            text = "group: the images of its prompt are too large to be kept for scoring; choose another group"
            raise HttpError(400, text, field="group")
        return _data(await while_present(request.receive, self._scored(group, sample)))

    async def _scored(self, group: KeptGroup, sample: KeptSample) -> dict[str, Any]:
        sequence = group.prompt.tolist() + sample.token_ids.tolist()
        drawn = group.params.model_copy(update=dict(logprobs="processed")).recorded
        [score] = await self._served.client.score(
            [sequence],
            media=[group.images],
            distribution=drawn,
            cache_salt=group.params.cache_salt,
            start=len(group.prompt),
            adapter=group.adapter,
        )
        told: dict[str, Any] = {"weight_versions": told_spans(score.weight_versions)}
        if sample.logprobs is None:
            return told | {"logprobs": numbers(score.logprobs)}
        return told | compared(sample.logprobs, score.logprobs)

    async def _preview(self, group: KeptGroup) -> str:
        """For a conversation, return the beginning of the last user message. For any other prompt, return the end of
        the prompt's text.
        """
        if group.message is not None:
            text = " ".join(group.message.split())
            return text if len(text) <= PREVIEW_CHARS else f"{text[:PREVIEW_CHARS]}…"
        tail = group.prompt[-PREVIEW_TOKENS:].tolist()
        text = " ".join((await self._served.texts.decode_long(tail, skip_special_tokens=True)).split())
        return text if len(text) <= PREVIEW_CHARS else f"…{text[-PREVIEW_CHARS:]}"

    async def _summary(self, group: KeptGroup) -> dict[str, Any]:
        return {
            "id": group.id,
            "seconds": group.seconds,
            "preview": await self._preview(group),
            "num_asked": group.params.n,
            "num_samples": len(group.samples),
            "num_tokens": sum(len(sample.token_ids) for sample in group.samples),
            "finish_reasons": sorted({sample.finish_reason for sample in group.samples}),
            "versions": sorted({span.version for sample in group.samples for span in sample.weight_versions}),
        }

    def _group(self, request: Request, id: int) -> KeptGroup:
        if (found := self._samples.get(id, _viewer(request))) is None:
            text = (
                f"group: {brief(id)} is not kept, because the server keeps only the latest groups; choose another group"
            )
            raise HttpError(404, text, field="group", value=id)
        return found

    def _sample(self, group: KeptGroup, index: int) -> KeptSample:
        for sample in group.samples:
            if sample.index == index:
                return sample
        text = f"sample: {brief(index)} is not kept for group {group.id}; choose another sample"
        raise HttpError(404, text, field="sample", value=index)


def compared(before: np.ndarray, again: np.ndarray) -> dict[str, Any]:
    """Compare the bits of two float32 arrays [num_tokens].

    The returned `num_equal` is the number of equal elements. `difference` is None if all elements are equal. Otherwise,
    `difference` has the position of the first token that differs, and the two log-probs of this token.
    """
    differing = before.view(np.uint32) != again.view(np.uint32)
    told: dict[str, Any] = {"num_compared": len(differing), "num_equal": int((~differing).sum())}
    if not differing.any():
        return told | {"difference": None}
    at = int(differing.argmax())
    return told | {"difference": [at, *numbers(before[at : at + 1]), *numbers(again[at : at + 1])]}


def _viewer(request: Request) -> str | None:
    """Return the user if the request may see only the groups of this user; None if the request may see all groups."""
    client = client_of(request.scope)
    return None if client.role == "control" else client.user


def _further(group: KeptGroup) -> dict[str, Any]:
    """Return the adapter of a group, and the parameters that differ from their defaults, except for private parameters
    and parameters shown elsewhere. For a parameter that is a list, return only the length of the list.
    """
    hidden = {*SHOWN, "seed", "cache_salt", "stop", "stop_token_ids", "logprobs", "top_logprobs"}
    found = group.params.model_dump(exclude=hidden, exclude_defaults=True)
    told = {name: f"{len(value)} given" if isinstance(value, tuple) else value for name, value in found.items()}
    return told | ({} if group.adapter is None else {"adapter": group.adapter})


def _told(sample: KeptSample, eos_token_ids: frozenset[int]) -> dict[str, Any]:
    """Return all data of a sample except its tokens.

    Seeds are strings, because JavaScript numbers lose bits of 64-bit integers.
    """
    logprobs = sample.logprobs
    return {
        "index": sample.index,
        "num_tokens": len(sample.token_ids),
        "finish_reason": sample.finish_reason,
        "stop_reason": None if sample.stop_reason in eos_token_ids else sample.stop_reason,
        "error": sample.error,
        "seed": str(sample.seed),
        "num_cached_tokens": sample.num_cached_tokens,
        "weight_versions": told_spans(sample.weight_versions),
        "old_kv": told_spans(sample.old_kv),
        "mean_logprob": None if logprobs is None or not logprobs.size else numbers(logprobs.mean(keepdims=True))[0],
    }


def _whole(request: Request, name: str) -> int:
    return int(_number(request, name))


def _number(request: Request, name: str) -> float:
    """Return a query parameter as a number; 0 if it is missing.

    Raise HttpError if the parameter is not a number in [0, 2**53).
    """
    found = request.query_params.getlist(name)
    if len(found) > 1:
        raise given_twice(name)
    text = found[0] if found else "0"
    try:
        number = float(text)
        if not 0 <= number < 2**53:
            raise ValueError
        return number
    except ValueError:
        raise HttpError(
            400, f"{name}: must be a number from 0 to 2**53 (got {brief(text)})", field=name, value=text
        ) from None


def _data(content: Any) -> Response:
    response = answer(content)
    response.headers["Cache-Control"] = "no-store"
    return response
