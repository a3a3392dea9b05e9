"""Decode an image file to RGB: headers are checked first, then Pillow decodes the first frame.

Colors become RGB as transformers' image processors convert them: transparency over white, 16-bit greys clipped at 255,
CMYK without color profiles. The rotation that EXIF asks for is applied, as transformers does for files and URLs.
Damaged pixels are an error; damaged metadata is ignored.
"""

from __future__ import annotations

import io
import struct
import warnings
import zlib

from PIL import Image

from .....ipc.errors import RequestError
from .image_header import read_header

Image.MAX_IMAGE_PIXELS = None  # the header is checked against our own limit

ORIENTATION = 0x0112  # EXIF
TRANSPOSES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
BROKEN = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, AttributeError)
MAX_REASON = 80  # characters of Pillow's message in ours


def decode_image(data: bytes | memoryview, max_pixels: int) -> Image.Image:
    """Decode an image file to RGB, upright; RequestError if it is damaged, too large or of another format."""
    header = read_header(data, max_pixels)
    name = f"the {header.format} image of {len(data)} bytes, {header.width} × {header.height} pixels,"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are about metadata
        try:
            with Image.open(io.BytesIO(data), formats=[header.format]) as image:
                if image.size != (header.width, header.height):
                    raise RequestError(f"{name} has {image.width} × {image.height} within: save it again")
                image.load()
                return _to_rgb(_upright(image))
        except RequestError:
            raise
        except (*BROKEN, struct.error, zlib.error, Image.DecompressionBombError) as error:
            raise RequestError(f"{name} is damaged or cut off{_reason(error)}: send all of it") from None


def _upright(image: Image.Image) -> Image.Image:
    try:
        orientation = image.getexif().get(ORIENTATION)
    except (*BROKEN, struct.error):
        return image
    transpose = TRANSPOSES.get(orientation) if isinstance(orientation, int) else None
    return image if transpose is None else image.transpose(transpose)


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert to RGB as transformers does."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image).convert("RGB")


def _reason(error: BaseException) -> str:
    """Return Pillow's message in brackets; "" if it is empty, long, not plain ASCII, or shows a Python object."""
    text = str(error)
    is_plain = text.isascii() and text.isprintable() and "<" not in text and len(text) <= MAX_REASON
    return f" ({text})" if text and is_plain else ""
