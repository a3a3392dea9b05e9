"""Sampling parameters of chats with a person, if neither the model nor the operator sets any.

A request of OpenAI's API or of the client library then has temperature 1 and no filters, as in vLLM. Small models
answer badly with these, so the terminal's chat, the web page and Ollama's API use milder values.
"""

from __future__ import annotations

from collections.abc import Mapping

SAMPLING = ("temperature", "top_p", "top_k", "min_p")  # a model that names none of them has no sampling defaults
FIRST_IMPRESSION: dict[str, float] = {"temperature": 0.7, "top_p": 0.9, "top_k": 40}


def names_sampling(defaults: Mapping[str, float]) -> bool:
    """Return whether the sampling defaults of a model have any of the fields of SAMPLING."""
    return any(name in defaults for name in SAMPLING)


def chat_sampling(defaults: Mapping[str, float]) -> dict[str, float]:
    """Return the parameters of a chat with a person that names none: a model's sampling defaults, with FIRST_IMPRESSION
    if they have none of the fields of SAMPLING."""
    found = dict(defaults)
    if not names_sampling(defaults):
        found |= FIRST_IMPRESSION
    return found
