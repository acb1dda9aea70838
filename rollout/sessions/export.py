"""The samples of a session, in the forms that trainers read.

The messages of a session form a forest (see `forest`). A session has one sample for each leaf. The tokens of a sample
are all tokens of the conversation, in order, as the worker received and drew them. If several samples contain the same
drawn token, only the mask of the first of these samples includes the token. Owns the export formats of samples: Python
objects, JSON, safetensors, and the entries that NeMo-Gym stores for each call.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...engine.request import Columns, SampleOutput, columns_of, cut_columns, join_columns
from .forest import Drawn, Forest, Node, drawn_of
from .templates import Opening

NO_VERSION = -1
_ARRAYS = ("token_ids", "mask", "logprobs", "versions", "old_kv")


@dataclass(frozen=True)
class SessionTurn:
    """A drawn message of a sample.

    `node`: id of the message. `start`, `end`: the tokens of the message are the sample's tokens [start, end).
    `is_trained`: whether the sample's mask includes any of these tokens. If an earlier sample has the message without
    the token that ended the message, the mask includes at most this token. Otherwise, if `is_trained` is true, the mask
    includes all tokens of the message. `finish_reason`, `seed`: from the worker's sample. `reward`: the reward that the
    agent attached to the node.
    """

    node: str
    start: int
    end: int
    is_trained: bool
    finish_reason: str
    seed: int
    reward: float | None


@dataclass(frozen=True)
class SessionSample:
    """A conversation of a session, from its first token to the end of a leaf.

    - `node`: id of the leaf. `reward`: the reward of the leaf. `is_abandoned`: whether the agent made the same call
      several times, and continued the conversation with another answer than the leaf.
    - `token_ids`: int32 [num_tokens]
    - `mask`: uint8 [num_tokens], 1 for the tokens to train: all tokens that the model drew, except for tokens in the
      mask of an earlier sample. A drawn token that no sample contains is in no mask.
    - `logprobs`: float32 [num_tokens], 0.0 outside the mask
    - `versions`: int64 [num_tokens], the version of the weights that drew the token; -1 for tokens that no model drew
    - `old_kv`: uint8 [num_tokens], 1 for tokens that were drawn with KV from older weights (`SampleOutput.old_kv`). No
      version of the weights reproduces the log-probs of these tokens.
    - `columns`: other columns that the requests recorded, such as `top_logprobs`, for the tokens in the mask, in order;
      only columns that all trained messages have
    - `routed_experts`: [num_tokens - 1, layers, experts per token]; None if a drawn message has no recorded experts.
      Each row comes from the request that first computed the row's token.
    - `turns`: the drawn messages. `messages`: all messages.
    """

    node: str
    reward: float | None
    is_abandoned: bool
    token_ids: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    old_kv: np.ndarray
    columns: Columns
    routed_experts: np.ndarray | None
    turns: tuple[SessionTurn, ...]
    messages: tuple[dict[str, Any], ...]

    def told(self) -> dict[str, Any]:
        """Return the sample as a JSON value. Columns and routed experts are objects with `data` (base64), `dtype` and
        `shape`.
        """
        told = self._rest()
        told |= {name: getattr(self, name).tolist() for name in _ARRAYS}
        told["columns"] = {name: told_array(values) for name, values in self.columns.items()}
        routes = self.routed_experts
        return told | {"routed_experts": None if routes is None else told_array(routes)}

    def _rest(self) -> dict[str, Any]:
        return dict(
            node=self.node,
            reward=self.reward,
            is_abandoned=self.is_abandoned,
            turns=[vars(turn).copy() for turn in self.turns],
            messages=list(self.messages),
        )


def samples_of(forest: Forest) -> list[SessionSample]:
    """Return one sample for each leaf, in the order in which the leaves were added."""
    trained: dict[str, int] = {}  # by id of the drawn node: how many of its tokens are in the masks so far
    return [_sample(leaf, trained, forest.is_abandoned(leaf)) for leaf in forest.leaves()]


def to_safetensors(samples: Sequence[SessionSample]) -> bytes:
    """Return samples as one safetensors file.

    For sample i, the tensors are `tokens.i` int32, `loss_mask.i` uint8, `rollout_log_probs.i` float32, `versions.i`
    int64, `old_kv.i` uint8, `rollout_routed_experts.i` int32 if recorded, and `columns.NAME.i`. The metadata field
    `samples` has the other fields of all samples as JSON.
    """
    from safetensors.numpy import save

    tensors: dict[str, np.ndarray] = {}
    for i, sample in enumerate(samples):
        tensors |= {f"tokens.{i}": sample.token_ids, f"loss_mask.{i}": sample.mask}
        tensors |= {f"rollout_log_probs.{i}": sample.logprobs, f"versions.{i}": sample.versions}
        tensors[f"old_kv.{i}"] = sample.old_kv
        tensors |= {f"columns.{name}.{i}": np.ascontiguousarray(values) for name, values in sample.columns.items()}
        if sample.routed_experts is not None:
            tensors[f"rollout_routed_experts.{i}"] = sample.routed_experts.astype(np.int32)
    return save(tensors, metadata={"samples": json.dumps([sample._rest() for sample in samples])})


def token_entries(forest: Forest, rollout_id: str) -> list[dict[str, Any]]:
    """Return an entry of NeMo-Gym for each drawn node: `rollout_id`, `model_call_id`, `prompt_token_ids`,
    `generation_token_ids`, `generation_log_probs`.
    """
    entries = []
    for node in forest.drawn_nodes():
        drawn = drawn_of(node)
        entries.append(
            dict(
                rollout_id=rollout_id,
                model_call_id=node.id,
                prompt_token_ids=prompt_of(node),
                generation_token_ids=list(drawn.sample.token_ids),
                generation_log_probs=_logprobs(drawn).tolist(),
            )
        )
    return entries


def tokens_until(nodes: Sequence[Node]) -> list[int]:
    """Return the tokens of a conversation up to the end of its last drawn node. `nodes`: the drawn nodes of the
    conversation, in order.
    """
    token_ids: list[int] = []
    for node in nodes:
        drawn = drawn_of(node)
        add_opening(token_ids, drawn.opening)
        token_ids += drawn.sample.token_ids
    return token_ids


def add_opening(token_ids: list[int], opening: Opening) -> None:
    """Append an `Opening` to `token_ids`, which are empty or end with the tokens of a drawn node. The result is the
    prompt of the next drawn node.
    """
    if opening.dropped:
        token_ids.pop()
    token_ids += opening.token_ids


def prompt_of(node: Node) -> list[int]:
    """Return the prompt of the request that drew a node."""
    token_ids = tokens_until([each for each in node.path[:-1] if each.drawn is not None])
    add_opening(token_ids, drawn_of(node).opening)
    return token_ids


def _sample(leaf: Node, trained: dict[str, int], is_abandoned: bool) -> SessionSample:
    """Return the sample of a leaf, and update the counts in `trained`."""
    nodes = [node for node in leaf.path if node.drawn is not None]
    token_ids = np.array(tokens_until(nodes), np.int32)
    mask, logprobs = np.zeros(len(token_ids), np.uint8), np.zeros(len(token_ids), np.float32)
    versions, old_kv = np.full(len(token_ids), NO_VERSION, np.int64), np.zeros(len(token_ids), np.uint8)
    turns, columns = [], []
    for node, end in zip(nodes, _ends(nodes), strict=True):
        drawn, start = drawn_of(node), drawn_of(node).prompt_len
        first, count = trained.get(node.id, 0), end - start
        for span in drawn.sample.weight_versions:
            versions[start + span.start : start + min(span.end, count)] = span.version
        for span in drawn.sample.old_kv:
            old_kv[start + span.start : start + min(span.end, count)] = 1
        if is_trained := first < count:
            mask[start + first : end] = 1
            logprobs[start + first : end] = _logprobs(drawn)[first:count]
            columns.append(cut_columns(_others(node), first, count))
            trained[node.id] = count
        sample = drawn.sample
        turns.append(SessionTurn(node.id, start, end, is_trained, sample.finish_reason, sample.seed, node.reward))
    return SessionSample(
        node=leaf.id,
        reward=leaf.reward,
        is_abandoned=is_abandoned,
        token_ids=token_ids,
        mask=mask,
        logprobs=logprobs,
        versions=versions,
        old_kv=old_kv,
        columns=_joined_columns(columns),
        routed_experts=_joined_routes(nodes, len(token_ids)),
        turns=tuple(turns),
        messages=tuple(deepcopy(node.message.fields) for node in leaf.path),
    )


def _ends(nodes: list[Node]) -> list[int]:
    """Return, for each drawn node, the position in the conversation's tokens at which the node's tokens end."""
    last = drawn_of(nodes[-1])
    return [*(drawn_of(node).kept_len for node in nodes[1:]), last.prompt_len + len(last.sample.token_ids)]


def _others(node: Node) -> Columns:
    """Return the columns of a drawn node, except log-probs."""
    return {name: values for name, values in columns_of(drawn_of(node).sample).items() if name != "logprobs"}


def _joined_columns(parts: list[Columns]) -> Columns:
    """Join the columns that all parts have with the same number of elements per token."""
    if not parts:
        return {}
    shapes = [{name: values.shape[1:] for name, values in part.items()} for part in parts]
    shared = [name for name, shape in shapes[0].items() if all(each.get(name) == shape for each in shapes)]
    whole = {name: parts[0][name].copy() for name in shared}
    for part in parts[1:]:
        whole = join_columns(whole, part)
    return whole


def _joined_routes(nodes: list[Node], num_tokens: int) -> np.ndarray | None:
    """Join the routed experts of drawn nodes. The rows of a node begin where the rows of the previous node end."""
    parts: list[np.ndarray] = []
    starts = [drawn_of(node).routes_start for node in nodes]
    for node, start, end in zip(nodes, starts, [*starts[1:], num_tokens - 1], strict=True):
        routes = drawn_of(node).sample.routed_experts
        if routes is None or len(routes) < end - start:
            return None
        parts.append(routes[: end - start])
    return np.concatenate(parts)


def as_record(sample: SampleOutput, routes_start: int) -> SampleOutput:
    """Return a copy of a sample to store in a node. The arrays are read-only, and `routed_experts` begins with the row
    of token `routes_start`. The arrays share no memory with the worker's reply, so the reply can be freed.
    """
    arrays = {name: np.array(values) for name, values in columns_of(sample).items()}
    if sample.routed_experts is not None:
        arrays["routed_experts"] = np.array(sample.routed_experts[routes_start:])
    for array in arrays.values():
        array.flags.writeable = False
    return replace(sample, token_ids=list(sample.token_ids), **arrays)


def _logprobs(drawn: Drawn) -> np.ndarray:
    assert drawn.sample.logprobs is not None, "sessions refuse requests without log-probs"
    return drawn.sample.logprobs


def told_array(values: np.ndarray) -> dict[str, Any]:
    """Return an array as a JSON value: its bytes in C order and little-endian, its dtype and its shape."""
    values = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    data = base64.b64encode(values.tobytes()).decode()
    return dict(data=data, dtype=values.dtype.name, shape=list(values.shape))
