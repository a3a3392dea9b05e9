"""MediaSender: sends the bytes of media before the messages that name them, and again if the engine asks for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable

from ....ipc.messages.client import Medium, PutMedium
from .held_medium import HeldMedium

MAX_DIGESTS = 4096  # media remembered as sent: they are sent again only if the engine asks


class MediaSender:
    """Sender of media, which remembers the digests of the last MAX_DIGESTS."""

    def __init__(self, send: Callable[[PutMedium], None]) -> None:
        self._send = send
        self._sent: OrderedDict[bytes, None] = OrderedDict()  # digests, the newest last

    def send(self, media: Iterable[Medium]) -> None:
        """Send the bytes of the media that this process holds and that are not remembered as sent."""
        for medium in held_media(media):
            if medium.digest not in self._sent:
                self._send(PutMedium(digest=medium.digest, data=memoryview(medium.data)))
            self._sent[medium.digest] = None
            self._sent.move_to_end(medium.digest)
            if len(self._sent) > MAX_DIGESTS:
                self._sent.popitem(last=False)

    def send_again(self, media: Iterable[Medium], digests: Container[bytes]) -> None:
        """Send again the bytes of the media with these digests, which the engine lacks."""
        for digest, data in {each.digest: each.data for each in held_media(media)}.items():
            if digest in digests:
                self._send(PutMedium(digest=digest, data=memoryview(data)))


def held_media(media: Iterable[Medium]) -> list[HeldMedium]:
    """Return the media that have their bytes in this process."""
    return [medium for medium in media if isinstance(medium, HeldMedium)]
