"""Clips of speech, in tests: JSON with the text of each piece and its begin and end in seconds."""

from __future__ import annotations

import asyncio
import json

from tokenloom.frontend.server.requests.media.media_input import ReadPiece
from tokenloom.ipc.errors import RequestError
from tokenloom.tests.frontend.server.requests.fake_media import FakePiece, FakeReader

BAD = b"no JSON"
PIECE_TOKENS = 3  # that stand for a piece


class FakePieceReader(FakeReader):
    """`piece_s`: the longest piece that was asked for. A reading waits while `is_held`."""

    piece_s = 0.0
    is_held = False

    async def read_pieces(self, source: bytes, piece_s: float, owner: str) -> list[ReadPiece]:
        content = self.store.open(source)
        assert content is not None, "a source that is read is pinned"
        if content[:1] != b"[":
            raise RequestError("the bytes are no audio of a known format")
        self.reads[bytes(content)] += 1
        self.piece_s = piece_s
        while self.is_held:
            await asyncio.sleep(0.01)
        pieces = list[ReadPiece]()
        for text, start_s, end_s in json.loads(bytes(content)):
            digest = await asyncio.to_thread(self.store.put, text.encode())
            pieces.append(FakePiece(digest, (1, 1, PIECE_TOKENS), start_s, end_s))
        return pieces


def clip(*texts: str, seconds: float = 10.0) -> bytes:
    """Return a clip with pieces of these texts and of `seconds` each."""
    return json.dumps([[text, place * seconds, (place + 1) * seconds] for place, text in enumerate(texts)]).encode()
