"""The saved weights of a worker: decides when the served weights are saved, and loads the saved weights after a
restart.

Owns the folder and the thread that saves (`weight_sync.worker.saver`), and the decision when to save weights. The
served weights are saved whenever they come from a push, are complete, are not asleep, and are not saved yet. Does not
own the served weights (`pushes`) or the worker's state (`lifecycle`). Without a folder, every method is a no-op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ...weight_sync.worker.saved_folder import SavedFolder
from .. import protocol
from .engine_thread import ServedEngine
from .lifecycle import Standing

if TYPE_CHECKING:
    from ...weight_sync.worker.saver import Saver


class Saving:
    """Saves weights in the folder `path`; None: no weights are saved. `changed`: called on any thread after a write.
    Raise ConfigError if the folder cannot be used.
    """

    def __init__(self, path: str | None, changed: Callable[[], None]) -> None:
        self._folder = None if path is None else SavedFolder(path)
        self._changed = changed
        self._saver: Saver | None = None
        self._ordered: tuple[str, int] | None = None
        """The push id and the version of the weights that the saver has saved, is saving or will save."""

    def load(self, engine: ServedEngine) -> ServedEngine:
        """Make a new engine serve the saved weights, and return the engine. Called on the engine's thread. Raise
        ConfigError if the saved weights cannot be served.
        """
        if self._folder is not None:
            from ...weight_sync.worker.saver import Saver

            saver = Saver(self._folder, engine.weights, engine.info.model, engine.info.device, self._changed)
            saver.restore(engine)
            saver.start()
            self._saver = saver
        return engine

    @property
    def restored(self) -> str | None:
        """Id of the push with the weights that `load` has restored; None if the engine serves the weights of the
        checkpoint.
        """
        push = None if self._saver is None else self._saver.state.push
        return None if push is None else push.push_id

    def follow(self, served: str | None, version: int, standing: Standing) -> None:
        """Begin to save the served weights, if they are not saved yet and can be read. Call `follow` after each
        operation.
        """
        can_be_read = not standing.is_dirty and "weights" not in standing.sleeping
        if self._saver is None or served is None or not can_be_read or self._ordered == (served, version):
            return
        self._ordered = served, version
        push = self._saver.state.push
        if push is None or (push.push_id, push.weight_version) != self._ordered:
            self._saver.save(served, version)

    def interrupt(self) -> None:
        """Stop reading the live weights. Must be called before the weights change or are released. May be called from
        any thread.
        """
        if self._saver is not None:
            self._saver.interrupt()
            self._ordered = None

    @property
    def is_writing(self) -> bool:
        """Return whether weights are being written, or are about to be."""
        return self._saver is not None and self._saver.state.is_writing

    def describe(self) -> protocol.SavedWeights | None:
        """Return the state for `health`; None without a folder, and while the model loads. May be called from any
        thread.
        """
        if self._saver is None:
            return None
        state = self._saver.state
        return protocol.SavedWeights(
            weight_version=None if state.push is None else state.push.weight_version,
            push_id=None if state.push is None else state.push.push_id,
            is_writing=state.is_writing,
            num_saved=state.num_saved,
            num_interrupted=state.num_interrupted,
            num_failed=state.num_failed,
            error=state.error,
        )

    def close(self) -> None:
        """Stop saving, and release the folder."""
        if self._saver is not None:
            self._saver.close()
            self._saver.join(timeout=1.0)
        if self._folder is not None:
            self._folder.close()
