"""An event loop on a thread of its own, for code that has none.

Promises: what `submit` takes runs, until `end`. Both may be called on the loop's own thread, where the garbage
collector may run: there `end` does not wait. In a process that was forked from the one with the thread, both say so at
once.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from trueroll.errors import TruerollError

T = TypeVar("T")


class LoopThread:
    """Runs coroutines from now until `end`. Its thread, of that `name`, keeps no process alive."""

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._may_submit = threading.RLock()  # the garbage collector may submit while its thread does
        self._has_ended = False
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """Whether the thread is one of this process, which was not forked since."""
        return wrong_process(self._pid) is None

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine. After `end`, and in a forked process, the future raises TruerollError."""
        if error := wrong_process(self._pid):  # another thread may have held the lock when this process was forked
            return _failed(coroutine, error)
        with self._may_submit:
            if not self._has_ended:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return _failed(coroutine, TruerollError("closed; make a new one"))

    def end(self, last: Callable[[], Coroutine[Any, Any, None]], cancel: bool = False) -> None:
        """Run `last`, wait for all that runs, and end the thread; once. `cancel`: cancel what runs first, and close all
        asynchronous generators that were left unfinished. Raise TruerollError in a forked process.
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


def wrong_process(pid: int) -> TruerollError | None:
    """The error that this is another process than the one that something works in; None if it is not."""
    if os.getpid() == pid:
        return None
    return TruerollError(
        f"client: expected a call from process {pid}, which made it, found one from process {os.getpid()}, which was "
        "forked from that; make a new one here"
    )


def _failed(coroutine: Coroutine[Any, Any, T], error: TruerollError) -> Future[T]:
    coroutine.close()
    failed: Future[T] = Future()
    failed.set_exception(error)
    return failed
