"""A client that makes SkyRL's calls to its inference servers, for tests. SkyRL itself needs vLLM, Ray and GPUs.

Each method names the function of SkyRL 0.4.0 that makes the same calls.
"""

from __future__ import annotations

from typing import Any

import httpx2

SAMPLING: dict[str, Any] = {
    "min_tokens": 1,
    "skip_special_tokens": True,
    "include_stop_str_in_output": True,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "logprobs": 1,
    "stop": None,
    "logprobs_mode": "temperature",
}
"""The sampling parameters of SkyRL's rollout without `max_tokens` (`engine_utils.py`, `get_vllm_sampling_params`). The
last one comes from SkyRL's setting `additional_kwargs`.
"""
INIT = {
    "base_model_path": "/models/base",
    "local_checkpoint_dir": "/skyrl_delta_checkpoints/run",
    "cloud_download_workers": 4,
    "checkpoint_load_format": "vllm_multi_thread_safetensors",
    "multi_thread_safetensors_max_workers": 8,
}
"""What `delta/trainer.py`, `DeltaTrainerWeightTransferEngine.trainer_init`, sends to each server."""


class SkyrlClient:
    """SkyRL's calls to one server, which is also its proxy."""

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = url, model
        self._client = httpx2.Client(timeout=120, verify=False, trust_env=False, headers={"Connection": "close"})

    def __enter__(self) -> SkyrlClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def init(self) -> None:
        """`worker.py`, `init_weight_sync_state`, and `control_plane.py`, `init_weight_transfer_engine`."""
        assert self._client.get(f"{self.url}/get_world_size").raise_for_status().json()["world_size"] == 1
        self.ask("/init_weight_transfer_engine", {"init_info": INIT})

    def push(self, version: int, sync_dir: str) -> None:
        """`delta/trainer.py`, `_apply_receiver_update`, with the result of `DeltaCheckpointPublisher.publish`."""
        update = {"target_version": version, "version": version, "sync_dir": sync_dir}
        update["uri"] = f"{sync_dir.rstrip('/')}/delta-{version:08d}"
        self.ask("/fetch_weights", {name: update[name] for name in ("target_version", "sync_dir", "uri")})
        self.ask("/pause?mode=keep&clear_cache=false")
        try:
            self.ask("/reset_prefix_cache", {"reset_running_requests": True})
            self.ask("/start_weight_update")
            self.ask("/update_weights", {"update_info": update})
            self.ask("/finish_weight_update")
        finally:
            self.ask("/resume")

    def generate(self, token_ids: list[int], max_tokens: int, seed: int) -> dict[str, Any]:
        """`remote_inference_client.py`, `RemoteGenerateClient.generate`, and `RemoteInferenceClient`, `detokenize` and
        `finish_session`.
        """
        sampling = SAMPLING | {"max_tokens": max_tokens, "seed": seed}
        body = {"sampling_params": sampling, "model": self.model, "token_ids": token_ids, "cache_salt": "0"}
        headers = {"Content-Type": "application/json", "X-Session-ID": "7"}
        told = self._client.post(f"{self.url}/inference/v1/generate", json=body, headers=headers).raise_for_status()
        choice = told.json()["choices"][0]
        self.ask("/finish_session?session_id=7")
        detokenized = self.ask("/detokenize", {"model": self.model, "tokens": choice["token_ids"]})
        return {
            "response_ids": choice["token_ids"],
            "response_logprobs": [each["logprob"] for each in choice["logprobs"]["content"]],
            "stop_reason": choice["finish_reason"],
            "text": detokenized["prompt"],
            "choice": choice,
        }

    def ask(self, endpoint: str, fields: dict[str, Any] | None = None) -> Any:
        """`control_plane.py`, `SkyrlWeightSyncClient._post`."""
        answer = self._client.post(f"{self.url}{endpoint}", json=fields)
        assert answer.status_code < 400, answer.text
        return answer.json()
