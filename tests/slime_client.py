"""A client that makes slime's calls to an SGLang server, for tests. PyPI's `slime` is another package, and slime itself
needs SGLang, Ray and Megatron.

Each method names the function of slime that makes the same calls, as of commit 624b824a (August 2026).
"""

from __future__ import annotations

import time
from typing import Any

import httpx2

ROLLOUT: dict[str, Any] = dict(
    temperature=1.0,
    top_p=1.0,
    top_k=-1,
    stop=None,
    stop_token_ids=None,
    skip_special_tokens=False,
    no_stop_trim=True,
    spaces_between_special_tokens=False,
)
"""The sampling parameters of slime's rollout without `max_new_tokens` (`sglang_rollout.py`, `GenerateState`)."""


class SlimeClient:
    """slime's calls to one engine. `url`: the engine. `router`: where `/generate` goes; None means the engine.

    `local`, `source`: slime's `--update-weight-local-checkpoint-dir` and `--update-weight-disk-dir`.
    """

    def __init__(self, url: str, router: str | None = None, *, local: str = "/local", source: str = "/source") -> None:
        self.url, self.router, self.local, self.source = url, router or url, local, source
        self._client = httpx2.Client(timeout=120, verify=False, trust_env=False)

    def __enter__(self) -> SlimeClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def check(self, expected: dict[str, Any]) -> dict[str, Any]:
        """`sglang_engine.py`, `SGLangEngine._init_external`: compare fields of `/server_info`, and return it.
        `external.py`, `discover_external_engines`: read the sizes.
        """
        info = self._client.get(f"{self.url}/server_info").raise_for_status().json()
        assert {name: info[name] for name in expected} == expected
        assert int(info["tp_size"]) * int(info["pp_size"]) == info["num_gpus"]
        assert not info.get("encoder_only") and info.get("disaggregation_mode") not in ("prefill", "decode")
        return info

    def generate(self, input_ids: list[int], sampling: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """`sglang_rollout.py`, `generate`, and `types.py`, `Sample.append_response_tokens`: return the sample that
        slime makes of an answer.
        """
        body = dict(input_ids=input_ids, sampling_params=ROLLOUT | sampling, return_logprob=True) | fields
        told = self._client.post(f"{self.router}/generate", json=body).raise_for_status().json()
        meta = told["meta_info"]
        tokens = [item[1] for item in meta["output_token_logprobs"]]
        statuses = {"length": "truncated", "abort": "aborted", "stop": "completed"}
        return dict(
            tokens=input_ids + tokens,
            response_length=len(tokens),
            log_probs=[item[0] for item in meta["output_token_logprobs"]],
            status=statuses[meta["finish_reason"]["type"]],
            weight_version=meta.get("weight_version"),
            text=told["text"],
            meta=meta,
        )

    def abort_until_idle(self) -> None:
        """`server_control.py`, `abort_server_until_idle`."""
        while True:
            self._client.post(f"{self.url}/abort_request", json={"abort_all": True}).raise_for_status()
            loads = self._client.get(f"{self.url}/v1/loads?include=core").raise_for_status().json()["loads"]
            if sum(load["num_reqs"] for load in loads) <= 0:
                return
            time.sleep(0.01)

    def push(self, version: int) -> None:
        """`update_weight_from_disk_delta.py`, `UpdateWeightFromDiskDelta._reload_engines`, and `actor_group.py`,
        `_reload_rollout_weights_from_disk`.
        """
        self.pull(version)
        self.ask("pause_generation", {})
        self.flush()
        self.update(self.local, version)
        self.ask("continue_generation", {})

    def push_folder(self, folder: str, version: int) -> None:
        """The same without a local checkpoint: the engine loads a checkpoint from the shared folder."""
        self.ask("pause_generation", {})
        self.flush()
        self.update(folder, version)
        self.ask("continue_generation", {})

    def pull(self, version: int) -> Any:
        """`SGLangEngine.pull_weights`."""
        fields = dict(local_checkpoint_dir=self.local, source_dir=self.source, target_version=version)
        return self.ask("pull_weights", fields)

    def update(self, folder: str, version: int) -> Any:
        """`SGLangEngine.update_weights_from_disk`."""
        return self.ask("update_weights_from_disk", dict(model_path=folder, weight_version=str(version)))

    def flush(self) -> None:
        """`SGLangEngine.flush_cache`, which tries 60 times."""
        for _ in range(60):
            if self._client.get(f"{self.url}/flush_cache").status_code == 200:
                return
            time.sleep(0.05)
        raise TimeoutError("the cache was not flushed")

    def version(self) -> str:
        """`SGLangEngine.get_weight_version`."""
        return self._client.get(f"{self.url}/get_weight_version").raise_for_status().json()["weight_version"]

    def ask(self, endpoint: str, fields: dict[str, Any]) -> Any:
        """`SGLangEngine._make_request`."""
        answer = self._client.post(f"{self.url}/{endpoint}", json=fields)
        assert answer.status_code == 200, answer.text
        return answer.json()
