"""Records the experts to which steps routed tokens. Sequences that requested routed experts get one row per token. For
each expert, the recorder counts the tokens that were routed to the expert.
"""

from __future__ import annotations

import numpy as np

from .outputs.routes import RouteFormat
from .scheduling.sequence import Chunks


class ExpertRecorder:
    """Records the experts to which each step routed tokens. `format`: None for a model without experts, for which
    nothing is recorded.

    `counts`: see `EngineStats.expert_tokens`.
    """

    def __init__(self, format: RouteFormat | None) -> None:
        self._format = format
        shape = (0, 0) if format is None else (format.layers, format.num_experts)
        self._accepted = np.zeros(shape, np.int64)  # the counts of accepted drafts, which the device does not count
        self.counts = self._accepted.tobytes()

    def record(self, chunks: Chunks, ends: np.ndarray, rows: memoryview | None, counts: bytes) -> None:
        """Record the experts to which a step routed its tokens.

        `ends` (int64 [N]): where the chunks end after rejected drafted tokens are removed. `rows`: the rows of all
        tokens of `chunks`, or None if no sequence records experts and there are no drafts. `counts` (int64 [layers,
        num_experts]): how many tokens were routed to each expert since the first step. Drafted tokens are not counted.
        """
        if rows is not None:
            self._record_rows(chunks, ends, rows)
        self.counts = (np.frombuffer(counts, np.int64).reshape(self._accepted.shape) + self._accepted).tobytes()

    def _record_rows(self, chunks: Chunks, ends: np.ndarray, rows: memoryview) -> None:
        assert self._format is not None
        width = self._format.row_bytes
        sizes, kept = chunks.ends - chunks.starts, ends - chunks.starts
        places = width * (sizes.cumsum() - sizes)
        for i, sequence in enumerate(chunks.sequences):
            if sequence.routes is not None:
                sequence.routes.put(int(chunks.starts[i]), rows[places[i] : places[i] + kept[i] * width])
        sure = sizes - chunks.num_drafted
        for i in np.flatnonzero(kept > sure).tolist():
            accepted = rows[places[i] + sure[i] * width : places[i] + kept[i] * width]
            self._accepted += self._format.count(bytes(accepted))
