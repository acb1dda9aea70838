"""Images on several ranks: each rank has the whole tower, and encodes every image itself.

The leader sends each image to the followers once, as `levels` and `table` of `ImageInput`. The leader also sends every
call of its own encoder to the followers, which repeat the calls in the order of the steps. All ranks therefore hold the
same rows when they compute a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..running.encoder import Encoder, ImageEncoder
from ..scheduling.encodings import EncodeTask


class RankedEncoder:
    """The encoder of the leader. `tell(name, content)`: sends a command to the followers. `catch_up()`: computes this
    rank's part of all steps in flight. `has_stages`: whether there are several stages; this rank may then compute its
    part of a step later than other ranks.
    """

    def __init__(
        self, own: Encoder, tell: Callable[[str, object], None], catch_up: Callable[[], None], has_stages: bool
    ) -> None:
        self._own, self._tell, self._catch_up, self._has_stages = own, tell, catch_up, has_stages

    def begin(self, task: EncodeTask) -> None:
        """See `Encoder.begin`."""
        if task.evicted and self._has_stages:
            self._catch_up()  # this rank may still need the evicted rows
        self._tell("encoder.begin", task)
        self._own.begin(task)

    def advance(self, most_layers: int | None) -> bool:
        """See `Encoder.advance`."""
        self._tell("encoder.advance", most_layers)
        return self._own.advance(most_layers)

    def clear(self) -> None:
        """See `Encoder.clear`."""
        self._catch_up()
        self._tell("encoder.clear", None)
        self._own.clear()


def obey(encoder: ImageEncoder | None, name: str, content: Any) -> bool:
    """Make the encoder of a follower obey a command. Return False if the command is not for the encoder."""
    if encoder is None:
        return False
    match name:
        case "encoder.begin":
            encoder.begin(content)
        case "encoder.advance":
            encoder.advance(content)
        case "encoder.clear":
            encoder.clear()
        case _:
            return False
    return True
