"""MediaMarker: the text at the place of a medium in a prompt, before its tokens replace it."""

from __future__ import annotations

from typing import NamedTuple

from ....ipc.messages.media import MediaKind


class MediaMarker(NamedTuple):
    """`text` is the spelling of one token. `framed`, the marker in text that no template writes, has the tokens that
    the family puts around a medium, too."""

    kind: MediaKind
    text: str
    framed: str
