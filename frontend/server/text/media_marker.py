"""MediaMarker: the text that stands for a medium in a prompt, until the medium's tokens replace it."""

from __future__ import annotations

from typing import NamedTuple

from ....ipc.messages.media import MediaKind


class MediaMarker(NamedTuple):
    """Marker of media of one kind. `text` spells one token. `framed` is the marker with the tokens that the model
    family puts around a medium, for text that no template writes."""

    kind: MediaKind
    text: str
    framed: str
