"""Prompts of chat, code and prose that a model answers by itself, in its own chat template.

`scripts/train_draft` knows none of them.
"""

from __future__ import annotations

PROMPTS = (
    "What are the main differences between a city and a village?",
    "I have a cold. What can I do to feel better?",
    "Give me ideas for a birthday party for a ten-year-old who likes space.",
    "How do airplanes stay in the air?",
    "My neighbour plays loud music at night. Write a polite note to him.",
    "What should I pack for a week of hiking in autumn?",
    "Recommend a way to learn the names of many new colleagues.",
    "Write a Python function that returns all pairs of numbers in a list whose sum is a given value.",
    "Write a Python class for a bank account with deposit, withdraw and a list of past changes.",
    "How do I read a JSON file in Python and print one of its fields?",
    "Write a JavaScript function that debounces another function.",
    "Write an SQL query that lists the ten customers with the highest total of orders.",
    "What does this code do?\n\nfor i in range(1, 101):\n    print('Fizz' * (i % 3 == 0) + 'Buzz' * (i % 5 == 0) or i)",
    "Write a Bash script that renames all .txt files in a folder to .md.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Describe a market in the early morning, in one long paragraph.",
    "Write the opening of a mystery novel that plays in a small library.",
    "Summarize this text in two sentences: The old mill stood by the river for three hundred years. Farmers brought "
    "their grain there each autumn, and the miller's family lived from a tenth of the flour. When the railway came, "
    "the farmers sold their grain to the city, and the wheel stopped. Today the mill is a museum, and school classes "
    "grind flour by hand.",
    "Write a letter from a grandmother to her grandchild about her first day at work.",
    "Explain in a few paragraphs why people tell each other stories.",
)
