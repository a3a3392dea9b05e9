"""Draws the demo vision model's pictures: colored shapes, digits and objects, each with its caption and questions.

    picture = draw_picture(Random(7))
    picture.image.save("picture.png"), picture.caption, picture.questions

Every picture follows from the random stream alone: digits come from Pillow's own fonts and from seven segments, not
from the fonts of a machine. Needs Pillow and nothing else; the same Pillow release gives the same pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

SIZE = 192  # pixels on each side
COLORS = {
    "red": (214, 40, 40),
    "green": (38, 160, 60),
    "blue": (36, 84, 220),
    "yellow": (240, 200, 20),
    "purple": (140, 50, 180),
}
NUMBERS = ("one", "two", "three")
SIDES = ("left", "right")
SEGMENTS = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg")  # of a digit
SEGMENT_LINES = {  # of a digit 1 wide and 2 high
    "a": (0, 0, 1, 0),
    "b": (1, 0, 1, 1),
    "c": (1, 1, 1, 2),
    "d": (0, 2, 1, 2),
    "e": (0, 1, 0, 2),
    "f": (0, 0, 0, 1),
    "g": (0, 1, 1, 1),
}
CAPTION_QUESTIONS = ("Describe the image.", "What is in the image?", "What do you see?")

Color = tuple[int, int, int]
Paint = Callable[[ImageDraw.ImageDraw, float, float, float, Color], None]  # center, half of the size


class Picture(NamedTuple):
    """A picture, its caption, and other questions with their answers."""

    image: Image.Image
    caption: str
    questions: list[tuple[str, str]]


def draw_picture(rng: Random) -> Picture:
    """Draw shapes, a digit or an object."""
    kind = rng.choices((_draw_shapes, _draw_digit, _draw_object), (50, 32, 18))[0]
    return kind(rng)


def _canvas(rng: Random) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """Return a background, light or dark and nearly gray, that no color of COLORS resembles."""
    base = rng.choice((rng.randint(0, 50), rng.randint(205, 245)))
    background = tuple(max(0, min(255, base + rng.randint(-10, 10))) for _ in range(3))
    image = Image.new("RGB", (SIZE, SIZE), background)
    return image, ImageDraw.Draw(image)


def _pick_color(rng: Random) -> tuple[str, Color]:
    name = rng.choice(list(COLORS))
    red, green, blue = (max(0, min(255, value + rng.randint(-14, 14))) for value in COLORS[name])
    return name, (red, green, blue)


def _circle(draw: ImageDraw.ImageDraw, x: float, y: float, half: float, color: Color) -> None:
    draw.ellipse((x - half, y - half, x + half, y + half), color)


def _square(draw: ImageDraw.ImageDraw, x: float, y: float, half: float, color: Color) -> None:
    side = 0.9 * half
    draw.rectangle((x - side, y - side, x + side, y + side), color)


def _triangle(draw: ImageDraw.ImageDraw, x: float, y: float, half: float, color: Color) -> None:
    draw.polygon([(x, y - half), (x - half, y + half), (x + half, y + half)], color)


def _house(draw: ImageDraw.ImageDraw, x: float, y: float, half: float, color: Color) -> None:
    draw.polygon([(x, y - half), (x - half, y - 0.1 * half), (x + half, y - 0.1 * half)], (110, 70, 40))
    draw.rectangle((x - 0.8 * half, y - 0.1 * half, x + 0.8 * half, y + half), color)
    draw.rectangle((x - 0.2 * half, y + 0.4 * half, x + 0.2 * half, y + half), (110, 70, 40))


def _tree(draw: ImageDraw.ImageDraw, x: float, y: float, half: float, color: Color) -> None:
    draw.rectangle((x - 0.15 * half, y, x + 0.15 * half, y + half), (110, 70, 40))
    draw.ellipse((x - 0.75 * half, y - half, x + 0.75 * half, y + 0.4 * half), color)


def _boat(draw: ImageDraw.ImageDraw, x: float, y: float, half: float, color: Color) -> None:
    low = y + 0.9 * half
    draw.polygon(
        [(x - half, y + 0.4 * half), (x + half, y + 0.4 * half), (x + 0.6 * half, low), (x - 0.6 * half, low)], color
    )
    draw.line((x, y - half, x, y + 0.4 * half), (110, 70, 40), max(2, round(half / 10)))
    draw.polygon([(x + 3, y - half), (x + 3, y + 0.25 * half), (x + 0.75 * half, y + 0.25 * half)], (128, 128, 128))


SHAPES: dict[str, Paint] = {"circle": _circle, "square": _square, "triangle": _triangle}
OBJECTS: dict[str, Paint] = {"house": _house, "tree": _tree, "boat": _boat}


def _draw_shapes(rng: Random) -> Picture:
    """Draw one to three equal shapes below each other, in one half of the picture."""
    image, draw = _canvas(rng)
    color, paint = _pick_color(rng)
    shape, side, count = rng.choice(list(SHAPES)), rng.choice(SIDES), rng.randint(1, 3)
    rows = sorted(rng.sample(range(3), count))
    half = rng.uniform(23, 29)
    for row in rows:
        x = (SIZE / 4 if side == "left" else 3 * SIZE / 4) + rng.uniform(-7, 7)
        SHAPES[shape](draw, x, SIZE / 6 + row * SIZE / 3 + rng.uniform(-2, 2), half, paint)
    plural = shape if count == 1 else f"{shape}s"
    caption = f"{NUMBERS[count - 1].capitalize()} {color} {plural} on the {side}."
    questions = [
        ("What color is it?" if count == 1 else "What color are they?", f"{color.capitalize()}."),
        ("How many are there?", f"{NUMBERS[count - 1].capitalize()}."),
        ("Which shape is it?", f"A {shape}."),
        ("On which side?", f"On the {side}."),
    ]
    return Picture(image, caption, questions)


def _draw_digit(rng: Random) -> Picture:
    """Draw a large digit in one of three fonts, near the middle."""
    image, draw = _canvas(rng)
    color, paint = _pick_color(rng)
    digit = rng.randint(0, 9)
    height = rng.uniform(122, 138)
    x, y = SIZE / 2 + rng.uniform(-5, 5), SIZE / 2 + rng.uniform(-5, 5)
    font = rng.choice(("outline", "pixels", "segments"))
    if font == "segments":
        _draw_segments(draw, digit, x, y, height, paint)
    elif font == "outline":
        draw.text((x, y), str(digit), paint, ImageFont.load_default(height * 1.25), anchor="mm")
    else:
        small = ImageFont.load_default_imagefont()
        mask = Image.new("L", (6, 11), 0)
        ImageDraw.Draw(mask).text((0, 0), str(digit), 255, small)
        box = mask.getbbox()
        assert box is not None
        tall = round(height * 0.9)
        wide = max(1, round(tall * (box[2] - box[0]) / (box[3] - box[1])))
        mask = mask.crop(box).resize((wide, tall), Image.Resampling.NEAREST)
        image.paste(paint, (round(x - wide / 2), round(y - tall / 2)), mask)
    questions = [
        ("What color is it?", f"{color.capitalize()}."),
        ("Which digit is it?", f"{digit}."),
        ("How many are there?", "One."),
    ]
    return Picture(image, f"The digit {digit} in {color}.", questions)


def _draw_segments(draw: ImageDraw.ImageDraw, digit: int, x: float, y: float, height: float, color: Color) -> None:
    unit, width = 0.45 * height, max(4, math.floor(height / 9))
    for name in SEGMENTS[digit]:
        x0, y0, x1, y1 = SEGMENT_LINES[name]
        corners = (min(x0, x1), min(y0, y1), max(x0, x1), max(y0, y1))
        left, top, right, bottom = (unit * value for value in corners)
        origin_x, origin_y, thick = x - unit / 2, y - unit, width / 2
        box = (origin_x + left - thick, origin_y + top - thick, origin_x + right + thick, origin_y + bottom + thick)
        draw.rectangle(box, color)


def _draw_object(rng: Random) -> Picture:
    """Draw a house, a tree or a boat in one half of the picture."""
    image, draw = _canvas(rng)
    color, paint = _pick_color(rng)
    name, side = rng.choice(list(OBJECTS)), rng.choice(SIDES)
    half = rng.uniform(36, 44)
    x = (SIZE / 4 if side == "left" else 3 * SIZE / 4) + rng.uniform(-4, 4)
    OBJECTS[name](draw, x, SIZE / 2 + rng.uniform(-20, 20), half, paint)
    questions = [
        ("What color is it?", f"{color.capitalize()}."),
        ("What is it?", f"A {name}."),
        ("How many are there?", "One."),
        ("On which side?", f"On the {side}."),
    ]
    return Picture(image, f"A {color} {name} on the {side}.", questions)
