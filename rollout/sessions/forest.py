"""The record of a session: a forest of messages, in which each path from a root is a conversation.

Owns: the nodes, the choice of the conversation that a request continues, the seeds of drawn nodes, and the bounds of a
session. A node is one message, given by the agent or drawn by the model. Conversations with different template
arguments, such as different tools, have different roots. A drawn node stores its sample and its opening: the text and
the tokens from the previous drawn message, or from the start of the conversation, to this message.

Promises:

- A request continues the deepest node for which the messages on the node's path are a prefix of the request's messages.
  If several nodes match, for example because the model drew the same text twice, the request continues the node that
  the field `session_node` of the request's message names. If the message names none of the matching nodes, the request
  continues the drawn node that was added last.
- A drawn node is added together with the given messages before it.
- Every leaf is a drawn node.
- If the calls of a session are repeated with the same session seed, the calls get the same seeds. A place is the end of
  a conversation, where an answer is drawn. The ordinal of a drawn node is its number among the nodes that are drawn at
  the same place. The seed of a drawn node depends only on the session's seed, the given messages on the node's path,
  and the ordinals of the drawn nodes on this path. If a call fails, its ordinal becomes free for a later call.

Does not own: rendering (`templates`) and the calls to the worker (`session`). Thread-safe.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from trueroll.errors import IllegalStateError, InvalidRequestError, brief

from ...engine.request import SampleOutput, SamplingParams, columns_of
from .messages import Message
from .templates import Opening, Turn

_TOKEN_BYTES = 48
"""Approximate memory of a token id in a list, with the list's own entry."""
_SAMPLE_TOKEN_BYTES = 17
"""Memory of a token in a sample: its id, its mask, its log-prob and its version."""
_PARAMS_BYTES = 2048
"""Approximate memory of sampling parameters without the elements of their lists."""
_NODE_BYTES = 2048
"""Approximate memory of a node without its content."""


@dataclass(frozen=True)
class Drawn:
    """The data of a drawn node in addition to its message.

    `prompt_len`: number of tokens of the request's prompt. `sample`: the sample. The sample's `routed_experts` begin
    with the row of token `routes_start`, because the previous drawn node has the earlier rows. `call_digest`: the
    digest of the call, which identifies retries of this call. `ordinal`: the position among the nodes drawn at the same
    place. `params`: the sampling parameters of the request, without the seed. Nodes with equal parameters share one
    object. `adapter`: the named adapter that drew the sample; None for the base weights.
    """

    opening: Opening
    prompt_len: int
    sample: SampleOutput
    call_digest: bytes
    ordinal: int
    params: SamplingParams
    adapter: str | None = None

    @property
    def kept_len(self) -> int:
        """The number of prompt tokens before the opening."""
        return self.prompt_len - len(self.opening.token_ids)

    @property
    def routes_start(self) -> int:
        """The index of the first token with a row of routed experts. This token is the last token of the previous drawn
        node, because the sample of that node has no row for its last token.
        """
        return max(0, self.kept_len - 1)

    @property
    def stop_token_id(self) -> int | None:
        """The token that ended the sample; None if a string or a limit ended it."""
        return self.sample.stop_reason if isinstance(self.sample.stop_reason, int) else None


@dataclass(eq=False)
class Node:
    """A message of a session, or the root of conversations (without a parent).

    `id`: unique in the session. `drawn`: the data of a message that the model drew; None for a message that the agent
    gave. `number`: the position in the order in which nodes were added. `reward`: the reward that the agent attached.
    `sample_bytes`: approximate memory of the sample of the conversation that ends with this node.
    """

    id: str
    number: int
    parent: Node | None
    message: Message
    digest: bytes
    drawn: Drawn | None = None
    reward: float | None = None
    sample_bytes: int = 0
    children: dict[str, list[Node]] = field(default_factory=dict)

    @property
    def path(self) -> list[Node]:
        """The nodes from the root's child to this node."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def turn(self) -> Turn:
        """Convert the node to a `Turn`, for the module `templates`."""
        drawn = self.drawn
        if drawn is None:
            return Turn(self.message)
        return Turn(self.message, drawn.opening, drawn.sample.token_ids, drawn.stop_token_id)


class Forest:
    """The nodes of one session. A call first reserves an ordinal at its place, and then either adds its node or
    releases the ordinal.

    `seed`: seed of the session. `max_nodes`, `max_bytes`: bounds. `max_bytes` bounds the memory of the nodes, and also
    the memory of the samples of all leaves. A session that has reached a bound draws no more messages. The memory can
    exceed `max_bytes` only by the messages that were being drawn when the bound was reached.
    """

    def __init__(self, seed: int, max_nodes: int, max_bytes: int) -> None:
        self._seed, self._max_nodes, self._max_bytes = seed, max_nodes, max_bytes
        self._lock = threading.RLock()
        self._roots: dict[bytes, Node] = {}
        self._nodes: dict[str, Node] = {}
        self._ordinals: dict[bytes, set[int]] = {}
        self._pending: dict[tuple[bytes, int], int] = {}  # number of nodes that each running call may add
        self._by_call: dict[bytes, Node] = {}
        self._params: dict[SamplingParams, SamplingParams] = {}
        self.num_bytes = self.num_sample_bytes = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def node(self, id: str) -> Node:
        """Return a node. Raise InvalidRequestError if there is no node with this id."""
        if not isinstance(id, str) or id not in self._nodes:
            text = f"node: {brief(id)} is not a node of this session; give the id of a node"
            raise InvalidRequestError(text, field="node", value=id)
        return self._nodes[id]

    def find(self, root: str, messages: Sequence[Message]) -> tuple[Node, int]:
        """Return the node that a conversation continues, and the number of the conversation's messages that the session
        already has.

        `root`: the arguments of the template as a JSON text.
        """
        with self._lock:
            digest = _digest(self._seed.to_bytes(8, "little"), b"root", root.encode())
            found = [self._roots.get(digest) or Node(digest.hex(), -1, None, Message({}), digest)]
            depth = 0
            for message in messages:
                candidates = (child for node in found for child in node.children.get(message.key, ()))
                matching = [child for child in candidates if message.is_(child.message)]
                if not matching:
                    break
                found, depth = [child for child in matching if child.id == message.node] or matching, depth + 1
            return max(found, key=lambda node: (node.drawn is not None, node.number)), depth

    def recorded(self, call_digest: bytes) -> Node | None:
        """Return the newest node that a call with this digest has drawn; None if there is no such node."""
        return self._by_call.get(call_digest)

    def reserve(self, place: bytes, num_new: int) -> int:
        """Reserve the smallest free ordinal at a place, and room for `num_new` given messages and the answer. Return
        the ordinal. Raise IllegalStateError if the session is full.
        """
        with self._lock:
            self._check_room(num_new + 1)
            taken = self._ordinals.setdefault(place, set())
            ordinal = next(i for i in range(len(taken) + 1) if i not in taken)
            taken.add(ordinal)
            self._pending[place, ordinal] = num_new + 1
            return ordinal

    def release(self, place: bytes, ordinal: int) -> None:
        """Free a reserved ordinal, unless a node was added with this ordinal."""
        with self._lock:
            if self._pending.pop((place, ordinal), None) is None:
                return
            self._ordinals[place].discard(ordinal)
            if not self._ordinals[place]:
                del self._ordinals[place]

    def seed_of(self, node: Node) -> int:
        """Return the seed of the request that drew a node."""
        assert node.parent is not None and node.drawn is not None
        return seed_at(node.parent.digest, node.drawn.ordinal)

    def add(self, base: Node, messages: Sequence[Message], answer: Message, drawn: Drawn) -> Node:
        """Add a drawn node after given messages, and return the drawn node. Nodes of given messages that already exist
        are reused.
        """
        with self._lock:
            if base.parent is None and base.digest not in self._roots:
                self._roots[base.digest] = base
                self.num_bytes += _NODE_BYTES
            base = self._roots.get(base.digest, base)
            for message in messages:
                base = self._given(base, message)
            self._pending.pop((base.digest, drawn.ordinal))
            drawn = replace(drawn, params=self._shared(drawn.params))
            node = self._add(base, answer, _drawn_at(base.digest, drawn.ordinal), drawn)
            self._by_call[drawn.call_digest] = node
            return node

    def leaves(self) -> list[Node]:
        """Return all nodes without children, in the order in which they were added."""
        with self._lock:
            return [node for node in self._nodes.values() if not node.children]

    def drawn_nodes(self) -> list[Node]:
        """Return all drawn nodes, in the order in which they were added."""
        with self._lock:
            return [node for node in self._nodes.values() if node.drawn is not None]

    def is_abandoned(self, leaf: Node) -> bool:
        """Return whether the agent continued the conversation with another answer to the same request."""
        with self._lock:
            return any(twin.children for twin in self._twins(leaf))

    def _twins(self, node: Node) -> Iterator[Node]:
        assert node.parent is not None and node.drawn is not None
        for siblings in node.parent.children.values():
            for other in siblings:
                if other is not node and other.drawn is not None and other.drawn.call_digest == node.drawn.call_digest:
                    yield other

    def _given(self, parent: Node, message: Message) -> Node:
        for child in parent.children.get(message.key, ()):
            if child.drawn is None and child.message.spelling == message.spelling:
                return child
        return self._add(parent, message, _after(parent.digest, message), None)

    def _shared(self, params: SamplingParams) -> SamplingParams:
        """If an earlier node has equal parameters, return the earlier object, so that nodes share it. If no earlier
        node has equal parameters, remember and return `params`.
        """
        if params not in self._params:
            self._params[params] = params
            self.num_bytes += _num_params_bytes(params)
        return self._params[params]

    def _add(self, parent: Node, message: Message, digest: bytes, drawn: Drawn | None) -> Node:
        node = Node(digest.hex(), len(self._nodes), parent, message, digest, drawn)
        node.sample_bytes = parent.sample_bytes + _num_sample_bytes(node)
        if drawn is not None:
            self.num_sample_bytes += node.sample_bytes
        if parent.drawn is not None and not parent.children:  # the parent is no longer a leaf
            self.num_sample_bytes -= parent.sample_bytes
        parent.children.setdefault(message.key, []).append(node)
        self._nodes[node.id] = node
        self.num_bytes += _num_bytes(node)
        return node

    def _check_room(self, num_new: int) -> None:
        num_nodes = len(self._nodes) + sum(self._pending.values()) + num_new
        self._check("max_nodes", num_nodes, self._max_nodes, "messages")
        self._check("max_bytes", self.num_bytes, self._max_bytes, "bytes")
        self._check("max_bytes", self.num_sample_bytes, self._max_bytes, "bytes of samples")

    def _check(self, bound: str, found: int, limit: int, what: str) -> None:
        if found > limit:
            text = f"session: {found} {what} are too many (limit {limit}); begin a new session, or raise {bound}"
            raise IllegalStateError(text, field=bound, value=found, limit=limit)


def drawn_of(node: Node) -> Drawn:
    """Return the field `drawn` of a node that the model drew."""
    assert node.drawn is not None
    return node.drawn


def place_of(base: Node, messages: Sequence[Message]) -> bytes:
    """Return the digest of the place at which an answer is drawn: the end of new messages after the node `base`."""
    digest = base.digest
    for message in messages:
        digest = _after(digest, message)
    return digest


def seed_at(place: bytes, ordinal: int) -> int:
    """Return the seed of the request that draws the node with this place and ordinal."""
    return int.from_bytes(_digest(place, b"seed", b"%d" % ordinal)[:8], "little")


def id_at(place: bytes, ordinal: int) -> str:
    """Return the id of the node that is drawn with this place and ordinal."""
    return _drawn_at(place, ordinal).hex()


def _digest(before: bytes, kind: bytes, content: bytes) -> bytes:
    """Return a 16-byte digest of a node's path. `kind` and `content` describe the last step of the path."""
    return hashlib.blake2b(before + len(kind).to_bytes(1, "little") + kind + content, digest_size=16).digest()


def _drawn_at(place: bytes, ordinal: int) -> bytes:
    """Return the digest of a path that is extended by a drawn message. `place`: the digest of the path before the
    message.
    """
    return _digest(place, b"drawn", b"%d" % ordinal)


def _after(digest: bytes, message: Message) -> bytes:
    """Return the digest of a path that is extended by a given message. `digest`: the digest of the path before the
    message.
    """
    return _digest(digest, b"given", message.spelling.encode())


def _num_bytes(node: Node) -> int:
    """Return the approximate memory of a node."""
    size = _NODE_BYTES + 8 * node.message.num_chars
    if (drawn := node.drawn) is None:
        return size
    size += 4 * (len(drawn.opening.text) + len(drawn.opening.span)) + _num_array_bytes(drawn)
    return size + _TOKEN_BYTES * (len(drawn.opening.token_ids) + len(drawn.sample.token_ids))


def _num_params_bytes(params: SamplingParams) -> int:
    """Return the approximate memory of sampling parameters."""
    numbers = params.num_numbers + len(params.target_token_ids)
    return _PARAMS_BYTES + _TOKEN_BYTES * numbers + 4 * sum(map(len, params.stop))


def _num_sample_bytes(node: Node) -> int:
    """Return the approximate memory that a node adds to the sample of its conversation."""
    size = 8 * node.message.num_chars
    if (drawn := node.drawn) is None:
        return size
    tokens = len(drawn.opening.token_ids) + len(drawn.sample.token_ids)
    return size + _SAMPLE_TOKEN_BYTES * tokens + _num_array_bytes(drawn)


def _num_array_bytes(drawn: Drawn) -> int:
    arrays = [*columns_of(drawn.sample).values(), drawn.sample.routed_experts]
    return sum(array.nbytes for array in arrays if array is not None)
