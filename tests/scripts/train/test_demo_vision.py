"""The demo vision model describes pictures that it was not trained with: measured by greedy decoding with transformers.

These tests know nothing of the engine.
"""

import itertools
from pathlib import Path
from random import Random

import pytest
from PIL import Image

from tokenloom.scripts.train.demo_pictures import Picture, draw_picture
from tokenloom.tests.support.vision_oracle import VisionOracle

DEMO = Path(__file__).resolve().parents[3] / "demo" / "vision"
NUM_PICTURES = 200
LEAST_SHARE = 0.85


@pytest.fixture(scope="module")
def oracle() -> VisionOracle:
    return VisionOracle(DEMO)


@pytest.fixture(scope="module")
def pictures() -> list[Picture]:
    """Return pictures of another seed than the training's: their places, sizes and shades are new."""
    rng = Random("fresh pictures")
    return [draw_picture(rng) for _ in range(NUM_PICTURES)]


def answer_all(oracle: VisionOracle, questions: list[tuple[Image.Image, str]]) -> list[str]:
    """Return the answers to chats of one question about an image each."""
    prompts = [
        (oracle.chat([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]), [image])
        for image, question in questions
    ]

    def length(index: int) -> int:
        return len(oracle.tokenizer(prompts[index][0])["input_ids"])

    answers = [""] * len(prompts)
    for _, group in itertools.groupby(sorted(range(len(prompts)), key=length), length):
        indices = list(group)
        rows = oracle.generate_batch([prompts[index] for index in indices], 16)
        for index, row in zip(indices, rows, strict=True):
            answers[index] = oracle.tokenizer.decode(row).split("<|end|>")[0]
    return answers


def test_captions_of_fresh_pictures_are_right(oracle: VisionOracle, pictures: list[Picture]) -> None:
    answers = answer_all(oracle, [(each.image, "Describe the image.") for each in pictures])
    wrong = [(each.caption, answer) for each, answer in zip(pictures, answers, strict=True) if answer != each.caption]
    assert len(wrong) <= (1 - LEAST_SHARE) * NUM_PICTURES, (1 - len(wrong) / NUM_PICTURES, wrong)


def test_questions_about_fresh_pictures_are_answered(oracle: VisionOracle, pictures: list[Picture]) -> None:
    rng = Random(1)
    asked = [(each.image, *rng.choice(each.questions)) for each in pictures]
    answers = answer_all(oracle, [(image, question) for image, question, _ in asked])
    wrong = [
        (question, right, found) for (_, question, right), found in zip(asked, answers, strict=True) if right != found
    ]
    assert len(wrong) <= (1 - LEAST_SHARE) * NUM_PICTURES, (1 - len(wrong) / NUM_PICTURES, wrong)
