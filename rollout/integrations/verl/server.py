"""verl's server: a Ray actor that forwards verl's requests to its own worker process or fleet.

Owns: the worker or the fleet, the client of the worker or the fleet, and a gate that can hold back requests. No request
starts while the gate is closed. The gate is closed between `abort_all_requests` and `resume_generation`. Does not own:
the weights, which the adapter in the trainer's process pushes directly to the worker. After a push, the adapter
notifies this actor.

Guarantees: a request that begins after the end of a push gets no tokens from older weights. Aborted requests return the
tokens that were generated so far.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from verl.utils import hf_processor, normalize_token_ids
from verl.utils.fs import copy_to_local
from verl.workers.rollout.replica import TokenOutput

from trueroll.errors import InvalidRequestError, TruerollError

from ....engine.media import ImageInput
from ....engine.models.loader import read_config
from ....engine.request import Tag, derive_seed, seed_of
from ....kernels.families import describe
from ...client.client import AsyncRolloutClient
from ...client.local_worker import launch_worker
from ...fleet.client import AsyncFleetClient
from ...fleet.fleet import Fleet
from ..images import TrainerImages
from .settings import sampling_params, worker_settings


class TruerollServer:
    """The class of the Ray actor.

    - `config`: verl's RolloutConfig
    - `model_config`: verl's model config; its `path` is the checkpoint that the worker loads when it starts
    - `device`: see `EngineConfig`
    - `can_sleep`: whether `sleep` releases memory; if False, `sleep` and `wake_up` do nothing
    """

    def __init__(self, config: Any, model_config: Any, device: str, can_sleep: bool) -> None:
        self._config, self._can_sleep = config, can_sleep
        folder = copy_to_local(model_config.path, use_shm=model_config.get("use_shm", False))
        self._images: TrainerImages | None = None
        self._placeholders: list[int] = []
        if (tower := describe(read_config(Path(folder))).tower) is not None:
            processor = _processor_of(model_config)
            self._images = None if processor is None else TrainerImages(processor, tower)
            placeholders = tower.placeholder, getattr(processor, "video_token_id", None)
            self._placeholders = [each for each in placeholders if each is not None]
        settings = worker_settings(config, device)
        num_workers = settings.pop("num_workers")
        if num_workers == 1:
            self._worker = launch_worker(folder, **settings)
            self._address, self._client = self._worker.address, AsyncRolloutClient(self._worker.address)
        else:
            self._file = tempfile.TemporaryDirectory(prefix="trueroll-verl-")
            self._address = f"{self._file.name}/fleet.json"
            self._worker = Fleet(folder, num_workers, cpus=0.0, file=self._address, **settings)
            self._client = AsyncFleetClient(self._worker)
        self._version = 0
        self._asked: Counter[tuple[str, bytes]] = Counter()
        self._gate = asyncio.Event()
        self._gate.set()
        self._rejects = False

    def address(self) -> str:
        """Return the worker's address, or the path of the fleet's file. Clients use trueroll's protocol, not HTTP."""
        return self._address

    def version(self) -> int:
        """Return the version of the last pushed weights; 0 is the checkpoint."""
        return self._version

    def set_version(self, version: int) -> None:
        """Record that the worker serves `version`. New requests require weights of at least version `version`."""
        self._version = version
        self._asked.clear()

    async def generate(
        self,
        request_id: str,
        prompt_ids: Any,
        sampling_params: dict[str, Any],
        image_data: list[Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        **others: Any,
    ) -> TokenOutput:
        """Generate one sample for the prompt `prompt_ids`. While the gate is closed, wait or return an empty sample.

        `image_data`: the PIL images of the prompt. verl has already expanded their placeholders in `prompt_ids`. verl's
        processor preprocesses the images with `mm_processor_kwargs`. If the model samples a placeholder token for
        images or videos, the sample ends before this token, because verl's trainer would treat the token as an image.

        Raise InvalidRequestError for media other than images, for images that do not match the prompt or the model, and
        for parameters that a worker does not support. Raise StaleWeightsError if the worker was restarted.
        """
        if given := [name for name, value in others.items() if value]:
            text = f"{', '.join(given)}: not supported, because a worker takes texts and images only; remove it"
            raise InvalidRequestError(text, field=given[0])
        prompt = normalize_token_ids(prompt_ids)
        images = await self._processed(prompt, image_data, mm_processor_kwargs or {}) if image_data else []
        while not self._gate.is_set():
            if self._rejects:
                return TokenOutput(token_ids=[], log_probs=[], stop_reason="aborted", extra_fields=self._steps([]))
            await self._gate.wait()
        # Nothing else runs on the loop until the client has sent the request, so an abort includes the request.
        if sampling_params.get("prompt_logprobs") is not None:
            return await self._score(prompt, images, sampling_params)
        return await self._sample(request_id, prompt, images, sampling_params)

    async def _score(self, prompt: list[int], images: list[ImageInput], given: dict[str, Any]) -> TokenOutput:
        """Return the log-probs of a prompt and generate no tokens. verl requests log-probs of prompts from teachers.

        `prompt_ids` and `prompt_logprobs` have one row for each token of the prompt. With k =
        `given["prompt_logprobs"]`, a row of `prompt_ids` has the ids of the k most probable tokens at the next
        position, and a row of `prompt_logprobs` has the log-probs of these tokens. If k is 0, the rows have only the id
        and the log-prob of the actual next token of the prompt. The rows of the last token are filled with zeros.
        """
        k = given["prompt_logprobs"]
        [score] = await self._client.score(
            [prompt],
            given.get("temperature", 1.0),
            media=[images] if images else None,
            top_logprobs=k,
            min_weight_version=self._version,
        )
        if score.finish_reason == "abort":
            return TokenOutput(token_ids=[], log_probs=[], stop_reason="aborted", extra_fields=self._steps([]))
        ids, logprobs = np.array(prompt[1:])[:, None], score.logprobs[:, None]
        if k:
            assert score.top_token_ids is not None and score.top_logprobs is not None
            ids, logprobs = score.top_token_ids, score.top_logprobs
        last = [0] * max(k, 1)
        fields = {"prompt_ids": [*ids.tolist(), last], "prompt_logprobs": [*logprobs.tolist(), [*map(float, last)]]}
        steps = self._steps([span.version for span in score.weight_versions])
        return TokenOutput(token_ids=[], log_probs=[], stop_reason="completed", extra_fields=steps | fields)

    async def _processed(self, prompt: list[int], images: list[Any], options: dict[str, Any]) -> list[ImageInput]:
        """Preprocess the images of a prompt. Return the images with their starts, and with hashes that were computed on
        another thread.
        """
        if self._images is None:
            raise InvalidRequestError(
                "image_data: the model has no vision tower, or verl has no processor for it; remove image_data",
                field="image_data",
            )
        placed = (await asyncio.to_thread(self._images.place, [prompt], [images], options))[0]
        await asyncio.to_thread(lambda: [image.content_hash for image in placed])
        return placed

    async def _sample(
        self, request_id: str, prompt: list[int], images: list[ImageInput], given: dict[str, Any]
    ) -> TokenOutput:
        given = given | {"stop_token_ids": [*(given.get("stop_token_ids") or ()), *self._placeholders]}
        params = sampling_params(given, self._config, len(prompt), self._seed(request_id, prompt, images))
        [group] = await self._client.generate(
            [prompt], params, media=[images] if images else None, min_weight_version=self._version
        )
        [sample] = group.samples
        if sample.finish_reason == "error":
            raise TruerollError(f"sample: generation failed: {sample.error}; see the worker's log")
        sample.check_exact()
        count = len(sample.token_ids)
        if count and sample.token_ids[-1] in self._placeholders:
            count -= 1
        return TokenOutput(
            token_ids=sample.token_ids[:count],
            log_probs=None if sample.logprobs is None else sample.logprobs[:count].tolist(),
            routed_experts=_routes(sample.routed_experts, len(prompt) + count - 1),
            stop_reason="aborted" if sample.finish_reason == "abort" else "completed",
            extra_fields=self._steps([span.version for span in sample.weight_versions if span.start < count])
            | {"num_cached_tokens": sample.num_cached_tokens},
        )

    def _seed(self, request_id: str, prompt: list[int], images: list[ImageInput]) -> int | None:
        """Return the seed of a request; None without `full_determinism`.

        With `full_determinism`, verl may use the same id for several requests, and requests may arrive in any order.
        The k-th request with the same weights, id, prompt and images always gets the same seed.
        """
        if not self._config.full_determinism:
            return None
        content = np.array(prompt, np.int32).tobytes() + b"".join(image.content_hash for image in images)
        self._asked[request_id, content] += 1
        name = f"{self._config.seed}/{self._version}/{request_id}"
        return derive_seed(seed_of(name, content), self._asked[request_id, content])

    def _steps(self, versions: Sequence[int]) -> dict[str, int]:
        """Return the global steps at which the weights of a sample were pushed: the step for the last token, the
        smallest step and the largest step.

        Return an empty map for a sample without tokens, because verl treats the first step that it gets as the start of
        the sample.
        """
        steps = [version - 1 for version in versions]
        if not steps:
            return {}
        return {"global_steps": steps[-1], "min_global_steps": min(steps), "max_global_steps": max(steps)}

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """End all requests. Each aborted request returns the tokens that it has so far. No request starts until
        `resume_generation` is called.

        New requests wait for `resume_generation`. With `reject_request`, new requests return empty samples instead of
        waiting.
        """
        self._gate.clear()
        self._rejects = reject_request
        await self._client.abort_all()

    async def resume_generation(self) -> None:
        """Let requests start again."""
        self._gate.set()

    async def sleep(self) -> None:
        """Release the memory of weights and KV cache. After a sleep, a push must follow. Running requests continue
        after the push that follows `sleep`.
        """
        if self._can_sleep:
            await self._client.sleep(level=2)

    async def wake_up(self, tags: Sequence[Tag] = ("weights", "kv_cache")) -> None:
        """Reallocate each kind of memory that `tags` lists. No-op if the memory was not released."""
        if self._can_sleep:
            await self._client.wake_up(tags=tags)

    async def release_kv_cache(self) -> None:
        """Release only the memory of the KV cache."""
        if self._config.free_cache_engine:
            await self._client.sleep(level=1, tags=["kv_cache"])

    async def resume_kv_cache(self) -> None:
        """Allocate the memory of the KV cache again."""
        if self._config.free_cache_engine:
            await self._client.wake_up(tags=["kv_cache"])

    async def clear_kv_cache(self) -> None:
        """Drop all cached prefixes."""
        await self._client.invalidate_prefix_cache()


def _routes(routed: np.ndarray | None, num_fed: int) -> np.ndarray | None:
    """Return the routed experts of the first `num_fed` tokens: as uint8, or as int16 (verl's dtype for larger ids) if
    uint8 is too small.
    """
    if routed is None:
        return None
    return routed[:num_fed] if routed.dtype == np.uint8 else routed[:num_fed].astype(np.int16)


def _processor_of(model_config: Any) -> Any:
    """Return the processor with which verl converts texts and images to prompts; None if the model has no processor."""
    path = model_config.get("tokenizer_path", None) or model_config.path
    folder = copy_to_local(path, use_shm=model_config.get("use_shm", False))
    return hf_processor(folder, trust_remote_code=model_config.get("trust_remote_code", False))
