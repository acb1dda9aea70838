"""A version that workers have staged from a chain of deltas, until it is committed or aborted.

Owns the open transaction with the workers. Does not own the workers' clients, or the chain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from trueroll.errors import ConfigError

from ...weight_sync.trainer.sender import result_of
from ...weight_sync.trainer.trainer_tensors import PushResult
from ...weight_sync.trainer.transaction import Transaction


class Staged:
    """Version `version`, which every worker of a publisher has read and verified, but does not serve yet.

    Until the commit, the workers generate with their old weights. Call `commit` or `abort` within the publisher's
    `timeout`, and before any other call to the publisher. If neither method is called in time, or another call comes
    first, the workers drop the staged weights. As a context manager, `Staged` aborts at the end of the context unless
    it was committed. `left_out`: addresses of lost workers.
    """

    def __init__(
        self, transaction: Transaction, left_out: list[str], committed: Callable[[PushResult], PushResult]
    ) -> None:
        self.version, self.push_id, self.left_out = transaction.version, transaction.push_id, left_out
        self._transaction: Transaction | None = transaction
        self._committed = committed

    def commit(self) -> PushResult:
        """Make every worker serve the version. Return the result of the push. The result does not count the transferred
        bytes.

        Raise PushError if a worker has not committed the version, and ConfigError after an earlier call of `commit` or
        `abort`.
        """
        if (transaction := self._take()) is None:
            raise ConfigError(f"staged: version {self.version} was already committed or aborted; call pull again")
        pause = transaction.commit()
        return self._committed(result_of(transaction, 0, pause, is_sparse=False))

    def abort(self) -> None:
        """Make every worker drop the version. The workers keep their old weights. No-op after `commit`."""
        if (transaction := self._take()) is not None:
            transaction.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def _take(self) -> Transaction | None:
        transaction, self._transaction = self._transaction, None
        return transaction
