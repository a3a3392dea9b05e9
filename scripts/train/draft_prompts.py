"""Prompts for the training of a draft head, without a download: chat, code and prose.

    for prompt in draw_prompts(Random(0)): …

Questions are drawn from the tables below. Pieces of code are functions of Python's standard library as it lies on this
machine; pieces of prose are its docstrings and this repository's documents. A piece is to be continued as plain text,
or is in a question about it. A prompt is text, or a chat of one message.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import TypeAlias

Prompt: TypeAlias = str | list[dict[str, str]]

ROOT = Path(__file__).resolve().parents[2]
LIBRARY_FILES = 60
PIECE_CHARACTERS = (120, 700)
PLAIN_SHARE = 0.25  # of prompts of code and prose: to be continued as plain text


def _entries(table: str) -> list[str]:
    return table.strip().replace("\n", "|").split("|")


SUBJECTS = _entries("""
photosynthesis|the water cycle|volcanoes|black holes|the human heart|vaccines|gravity|electric cars|solar panels|bees
the Roman Empire|the French Revolution|the Silk Road|the printing press|the moon landing|the Great Wall of China|jazz
chess|football|marathon running|yoga|meditation|healthy breakfasts|sourdough bread|green tea|coffee|vegetarian cooking
saving money|compound interest|inflation|a job interview|time management|remote work|public speaking|learning a language
Paris|Japan|Brazil|the Sahara|the Amazon rainforest|the Alps|New York|India|the ocean|Antarctica|recycling
machine learning|neural networks|the internet|databases|operating systems|encryption|open source software|robots|drones
Shakespeare|poetry|science fiction|fairy tales|painting|photography|the piano|opera|museums|architecture|gardening|dogs
cats|whales|dinosaurs|birds|trees|the immune system|sleep|stress|allergies|the brain|memory|dreams|friendship|leadership
democracy|human rights|supply and demand|the stock market|small businesses|marketing|teaching children|homework|exams
probability|prime numbers|geometry|fractions|statistics|the speed of light|atoms|chemical reactions|magnets|telescopes
""")
QUESTIONS = _entries("""
What is important to know about {}?|Explain {} to a child.|Give me five facts about {}.|Write a short essay about {}.
Write a poem about {}.|Why does {} matter?|Tell me a short story about {}.|What are the good and bad sides of {}?
Write an email to a friend about {}.|How do I learn more about {}?|List ten words that have to do with {}.
What are common mistakes with {}?|Summarize the history of {} in one paragraph.|Write a dialogue about {}.|What is {}?
Give me three tips about {}.|How does {} work?|Write a blog post about {}.|Compare {} with {other}.
Make a quiz about {}.|Describe {} in two sentences.|Write a speech about {}.|Who should care about {} and why?
What will {} be like in 50 years?
Plan a lesson about {} with a table of its parts.|Explain step by step how to get started with {}.
""")
TASKS = _entries("""
reverses a string|finds the largest number of a list|checks if a word is a palindrome|computes the factorial of a number
returns the first n Fibonacci numbers|sorts a list with bubble sort|searches a sorted list with binary search
counts the words of a text|removes duplicates from a list|merges two sorted lists|checks if a number is prime
reads a CSV file and sums a column|converts Celsius to Fahrenheit|finds the greatest common divisor of two numbers
flattens a nested list|counts the vowels of a string|validates an email address|computes the mean and median
parses a date|transposes a matrix|implements a stack|implements a queue|inserts into a binary tree
draws a triangle of stars
finds the most frequent word of a file|computes a power without the operator|rolls two dice|converts a number to binary
groups words by their first letter|checks if brackets are balanced|downloads a page and prints its title|rotates a list
sorts people by their age|computes the distance of two points|caches its results|writes a log line with the time
""")
LANGUAGES = ("Python", "Python", "Python", "JavaScript", "Java", "C", "C++", "Go", "SQL", "Bash")
CODE_QUESTIONS = (
    "Write a {language} function that {task}.",
    "How do I write {language} code that {task}?",
    "Write a {language} program that {task}, and explain it.",
    "Show me a class in {language} that {task}, with comments.",
    "Write a test in {language} for a function that {task}.",
)
ABOUT_CODE = (
    "Explain what this function does:\n\n{}",
    "Write a docstring for this function:\n\n{}",
    "Rewrite this function so that it is easier to read:\n\n{}",
    "Find faults in this code:\n\n{}",
    "Add type hints to this code:\n\n{}",
)
ABOUT_PROSE = (
    "Summarize this text:\n\n{}",
    "Rewrite this text in simple words:\n\n{}",
    "Which questions does this text answer?\n\n{}",
    "Write the next paragraph:\n\n{}",
    "List the main points of this text:\n\n{}",
    "Correct the grammar of this text:\n\n{}",
)


def draw_prompts(rng: Random) -> Iterator[Prompt]:
    """Yield prompts without an end: as many of chat as of code and of prose."""
    kinds = (_chat, _code, _prose)
    while True:
        for kind in kinds:
            yield kind(rng)


def _asked(question: str) -> Prompt:
    return [{"role": "user", "content": question}]


def _chat(rng: Random) -> Prompt:
    subject, other = rng.sample(SUBJECTS, 2)
    return _asked(rng.choice(QUESTIONS).format(subject, other=other))


def _code(rng: Random) -> Prompt:
    if rng.random() < PLAIN_SHARE:
        return _beginning(rng, rng.choice(code_pieces()))
    if rng.random() < 0.5:
        return _asked(rng.choice(ABOUT_CODE).format(rng.choice(code_pieces())))
    language, task = rng.choice(LANGUAGES), rng.choice(TASKS)
    return _asked(rng.choice(CODE_QUESTIONS).format(language=language, task=task))


def _prose(rng: Random) -> Prompt:
    piece = rng.choice(prose_pieces())
    if rng.random() < PLAIN_SHARE:
        return _beginning(rng, piece)
    return _asked(rng.choice(ABOUT_PROSE).format(piece))


def _beginning(rng: Random, piece: str) -> str:
    return piece[: rng.randint(len(piece) // 3, len(piece))].rstrip()


@functools.cache
def _library() -> list[tuple[str, ast.Module]]:
    """Return sources of Python's standard library and their trees, always the same of one version."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    sources = [path.read_text(encoding="utf-8") for path in paths[:: len(paths) // LIBRARY_FILES]]
    return [(source, ast.parse(source)) for source in sources]


@functools.cache
def code_pieces() -> list[str]:
    """Return the shorter functions of the standard library."""
    found = [
        textwrap.dedent("\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno]))
        for source, tree in _library()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    ]
    return _of_length(found)


@functools.cache
def prose_pieces() -> list[str]:
    """Return paragraphs of the standard library's docstrings and of this repository's documents."""
    texts = [
        inspect.cleandoc(text)
        for _, tree in _library()
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node))
    ]
    texts += [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").rglob("*.md"))]
    paragraphs = [textwrap.dedent(each).strip() for text in texts for each in text.split("\n\n")]
    return _of_length([each for each in paragraphs if each[:1].isalpha() and "|" not in each])


def _of_length(pieces: list[str]) -> list[str]:
    least, most = PIECE_CHARACTERS
    return sorted({each for each in pieces if least <= len(each) <= most})
