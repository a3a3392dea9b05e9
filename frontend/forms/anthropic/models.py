"""Write descriptions of models («cards») in Anthropic's form."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from ....ipc.codec import JsonObject


def model_info(card: JsonObject) -> JsonObject:
    """Return the card of a model in Anthropic's form. `card`: the model in OpenAI's form, with vLLM's max_model_len."""
    created, max_model_len = card["created"], card["max_model_len"]
    assert isinstance(created, int) and isinstance(max_model_len, int), "as our cards have them"
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": datetime.datetime.fromtimestamp(created, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": max_model_len,
        "max_tokens": max_model_len,
    }


def model_page(cards: Sequence[JsonObject]) -> JsonObject:
    """Return all cards, given in OpenAI's form, as the only page of Anthropic's list."""
    data = [model_info(card) for card in cards]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"data": data, "has_more": False, "first_id": first, "last_id": last}
