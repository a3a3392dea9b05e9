"""Resize and cut images with Pillow, with the pixels of transformers' processors, in bounded memory.

An image of extreme shape is resized as a whole even if only its middle is kept. Pillow decides by the sizes which axis
it resizes first, so that a strip of the image could get other pixels than the whole.
"""

from __future__ import annotations

from PIL import Image

from .....ipc.errors import RequestError
from .....ipc.spec.processors.image_sizes import Size

MAX_RESIZED_PIXELS = 256 << 20  # 1 GiB, half of the media process's memory, and seconds of work


def size_of(image: Image.Image) -> Size:
    return Size(image.height, image.width)


def resize(image: Image.Image, size: Size, resample: int) -> Image.Image:
    """Resize an image; RequestError if a side would be empty or the image too large."""
    _check(image, size)
    return image.resize((size.width, size.height), Image.Resampling(resample))


def resize_and_crop(image: Image.Image, size: Size, resample: int, crop: Size) -> Image.Image:
    """Resize an image to `size` and cut out its middle of size `crop`, with black borders where `crop` is larger than
    the image."""
    columns, left = _middle(size.width, crop.width)
    rows, top = _middle(size.height, crop.height)
    resized = resize(image, size, resample)
    middle = resized.crop((columns.start, rows.start, columns.stop, rows.stop))
    if size_of(middle) == crop:
        return middle
    result = Image.new("RGB", (crop.width, crop.height))
    result.paste(middle, (left, top))
    return result


def make_square(image: Image.Image, color: tuple[int, int, int]) -> Image.Image:
    """Put an image into the middle of a square of `color`."""
    side = max(image.size)
    if image.width == image.height:
        return image
    square = Image.new("RGB", (side, side), color)
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


def _middle(length: int, crop: int) -> tuple[slice, int]:
    """Return the part of an axis that a crop keeps, and its place in the crop."""
    start = max(0, (length - crop) // 2)
    return slice(start, start + min(length, crop)), max(0, (crop - length + 1) // 2)


def _check(image: Image.Image, size: Size) -> None:
    if min(size) < 1:
        raise RequestError(
            f"the image has {size_of(image)} pixels, which the model's processor would resize to {size}: crop or pad it"
        )
    if size.height * size.width > MAX_RESIZED_PIXELS:
        raise RequestError(
            f"the image has {size_of(image)} pixels, which the model's processor would resize to {size}; at most "
            f"{MAX_RESIZED_PIXELS} pixels are served: crop or pad it"
        )
