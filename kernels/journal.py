"""The journal of recurrent layers: the inputs of drafted rows, so that a later step can repeat the accepted rows.

A recurrent state cannot forget a row. The state in a slot therefore never includes drafted rows, and a step stores the
inputs of its drafted rows in the journal. The next step of the sequence repeats the accepted rows before it computes
new rows. Only the convolution and the recurrence are repeated, on the same inputs, so the state gets the same bits as
without drafts. Storing a state for each drafted row instead would take many times the memory and memory traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Journal:
    """How the M rows of a step become the rows of the step's `StateBatch`. For each sequence, the batch has the
    repeated rows first, followed by the sequence's rows of the step. `memories`: for each layer, the journal
    [sequences, drafts, width], or None for a layer without recurrence. `own`: int64 [M]; for each row of the step, it
    holds the row's index in the batch. `repeated`: int64 [3, R]; for each repeated row, it holds the row's place in the
    journal (sequence and draft) and the row's index in the batch. `drafted`: int64 [3, D]; for each drafted row, it
    holds the row's place in the journal and the row's index in the step. All tensors are on the device of the journal.
    """

    memories: Sequence[Tensor | None]
    own: Tensor
    repeated: Tensor
    drafted: Tensor

    def splice(self, layer: int, *inputs: Tensor) -> list[Tensor]:
        """Return the inputs of the batch's rows, and store the inputs of drafted rows in the journal.

        `inputs`: the inputs of the step's rows, each [M, columns], in the dtype of the journal. Together, the inputs
        have as many columns as the journal.
        """
        memory = self.memories[layer]
        assert memory is not None, "a recurrent layer has a journal"
        rows = torch.cat(inputs, 1)
        spliced = rows.new_empty(len(self.own) + self.repeated.shape[1], rows.shape[1])
        sequence, draft, place = self.repeated
        spliced[self.own] = rows
        spliced[place] = memory[sequence, draft]
        sequence, draft, row = self.drafted
        memory[sequence, draft] = rows[row]
        return list(spliced.split([part.shape[1] for part in inputs], 1))
