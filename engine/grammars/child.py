"""The code of the child processes for grammars, which compile grammars, check tokens, and compute masks.

Each child first loads the text of the model's tokens. The child's greeting reports whether the load succeeded. For a
large vocabulary, llguidance holds Python's lock (the GIL) for seconds during the load, so the worker's own process must
not load the text. A call is encoded as MessagePack. The child for masks compiles grammars in one thread and computes
masks in another; each thread answers the calls of its own pipe. A slow compilation delays no mask, because llguidance
releases Python's lock while it compiles.
"""

from __future__ import annotations

import os
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from socket import socket
from typing import Any, TypeAlias

import msgpack

from trueroll.errors import said

from ..models.child_process import answer_calls, tell
from ..models.trials import Limits, limit_cpu, limit_memory
from .matching import GrammarError, Template, TokenText, Walk, translated
from .source import Grammar

MOST_TEMPLATES = 256
"""The maximum number of compiled grammars. The least recently used grammar is dropped."""
LOAD = Limits()
"""The limits for loading the text of the tokens."""
AGAIN = ""
"""The error that `_Masks.compute` returns for a row if this child does not have the row's compiled grammar
(`Template`) or sample in progress (`Walk`).
"""

LoadText: TypeAlias = Callable[[], TokenText]


def try_grammars(load: LoadText, limits: Limits, pipes: Sequence[socket]) -> None:
    """Answer calls on the first pipe: translate and compile a grammar within the limits, and reply with the
    translation.
    """
    limit_memory(LOAD.more_bytes)
    limit_cpu(LOAD.cpu_seconds)
    text = _loaded(load, pipes)
    limit_memory(limits.more_bytes)
    answer_calls(pipes[0], partial(_answer, partial(_try, text, limits)))


def _try(text: TokenText, limits: Limits, call: tuple[dict[str, Any]]) -> str:
    limit_cpu(limits.cpu_seconds)
    [fields] = call
    lark = translated(Grammar(**fields))
    Template(text, lark)
    return lark


def serve_masks(load: LoadText, more_bytes: int, pipes: Sequence[socket]) -> None:
    """Answer calls: `_Masks.open` on the first pipe, and `_Masks.compute` on the second."""
    limit_memory(more_bytes)
    masks = _Masks(_loaded(load, pipes))
    opening = partial(_answer, lambda call: masks.open(*call))
    threading.Thread(target=answer_calls, args=(pipes[0], opening), daemon=True).start()
    answer_calls(pipes[1], partial(_answer, lambda call: masks.compute(*call)))


def _loaded(load: LoadText, pipes: Sequence[socket]) -> TokenText:
    """Load the text of the tokens, and tell the parent whether the load succeeded. If the load fails, this process
    ends.
    """
    found = list[TokenText]()
    greeting = _reply(lambda: found.append(load()))  # the result is None
    for pipe in pipes:
        tell(pipe, greeting)
    return found[0] if found else os._exit(1)


def _answer(work: Callable[[Any], Any], message: bytes) -> bytes:
    """Return the reply to a call."""
    return _reply(lambda: work(msgpack.unpackb(message)))


def _reply(work: Callable[[], Any]) -> bytes:
    """Return (the result of the work, None), or (None, the text of an error)."""
    try:
        return _packed(work(), None)
    except GrammarError as error:
        return _packed(None, str(error))
    except MemoryError:
        os._exit(1)  # a new child starts with its full memory limit
    except BaseException as error:  # a Rust panic is not an Exception
        return _packed(None, said(f"{type(error).__name__}: {error}"))


def _packed(result: Any, error: str | None) -> bytes:
    reply: bytes = msgpack.Packer(unicode_errors="replace").pack((result, error))
    return reply


class _Masks:
    """The compiled grammars (`Template`) and the samples in progress (`Walk`) of a child process. The parent process
    assigns a number to each grammar and to each sample.

    `open` and `compute` run in two threads, which share only the templates.
    """

    def __init__(self, text: TokenText) -> None:
        self._text = text
        self._lock = threading.Lock()
        self._templates = OrderedDict[int, Template]()
        self._walks = dict[int, Walk]()

    def open(self, number: int, lark: str) -> None:
        """Compile a grammar."""
        self._template(number, lark)

    def _template(self, number: int, lark: str | None) -> Template | None:
        """Return a compiled grammar. If the child does not have the grammar, compile `lark`; if `lark` is None, return
        None.
        """
        with self._lock:
            found = self._templates.get(number)
        if found is None and lark is not None:
            found = Template(self._text, lark)
        if found is None:
            return None
        with self._lock:
            self._templates[number] = found
            self._templates.move_to_end(number)
            if len(self._templates) > MOST_TEMPLATES:
                self._templates.popitem(last=False)
        return found

    def compute(
        self, ended: list[int], rows: list[list[Any]]
    ) -> tuple[list[tuple[list[int], str | None]], list[bytes]]:
        """Return two values: for each row, the indices of the row's masks and an error or None; and the masks. Equal
        masks have the same index: samples of a grammar often have the same mask, and a mask of a large vocabulary has
        many bytes. `ended`: walks to forget. `rows`: the arguments of `_row`.
        """
        for walk in ended:
            self._walks.pop(walk, None)
        masks = dict[bytes, int]()
        return [self._row(masks, *row) for row in rows], [*masks]

    def _row(
        self,
        known: dict[bytes, int],
        walk: int,
        number: int,
        lark: str | None,
        ending: list[int],
        start: int,
        new: bytes,
        following: bytes,
    ) -> tuple[list[int], str | None]:
        """Append the tokens `new` to a walk that has `start` tokens, and compute the masks of the next token and of the
        token after each of the `following` tokens, up to the first token that the grammar excludes. If `start` is 0,
        begin a new walk. Return the indices of the masks in `known`, and an error or None.

        `known`: maps the content of masks to their indices; new masks are added. `number`, `lark`: as in `_template`.
        `ending`: the tokens that end the sample. `new`, `following`: int32 arrays.
        """
        try:
            if start == 0 and (template := self._template(number, lark)) is not None:
                self._walks[walk] = Walk(template, ending)
            current = self._walks.get(walk)
            if current is None or current.num_tokens != start:
                return [], AGAIN
            tokens = array("i", new)
            if (count := current.append(tokens)) < len(tokens):
                raise GrammarError(f"the grammar excludes token {tokens[count]} at index {start + count} of the sample")
            masks = current.masks(array("i", following))
            return [known.setdefault(mask.tobytes(), len(known)) for mask in masks], None
        except GrammarError as error:
            self._walks.pop(walk, None)
            return [], str(error)
