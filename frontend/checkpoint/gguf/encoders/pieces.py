"""Tokenizers of encoders in the form of tokenizer.json: `bert`, WordPiece, and `t5`, SentencePiece's unigrams; and the
forms of texts and pairs of encoders, whatever their tokenizer.

In a file, a piece that begins a word has SPACE before it, where WordPiece has ## before all others.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any

SPACE = "\u2581"
CONTINUED = "##"
BERT_IDS = {"bos": 101, "seperator": 102, "unknown": 100, "padding": 0}  # defaults; GGUF's own spelling


def word_piece(text: str) -> str:
    """Return a piece of a file of the kind bert in WordPiece's spelling."""
    if text.startswith("[") and text.endswith("]"):
        return text
    return text.removeprefix(SPACE) if text.startswith(SPACE) else CONTINUED + text


def word_pieces(ids: dict[str, int], unknown: str, is_lower: bool | None) -> dict[str, Any]:
    """Return the parts of a tokenizer of the kind bert. is_lower: whether texts are set in small letters and without
    accents; None: if no piece has a capital."""
    if is_lower is None:
        is_lower = not any(text != text.lower() for text in ids if not text.startswith("["))
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": is_lower,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": CONTINUED, "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": unknown,
            "continuing_subword_prefix": CONTINUED,
            "max_input_chars_per_word": 100,
            "vocab": ids,
        },
    }


def unigrams(
    scores: Sequence[tuple[str, float]],
    unknown_id: int | None,
    charsmap: bytes,
    *,
    removes_spaces: bool,
    begins_with_space: bool,
) -> dict[str, Any]:
    """Return the parts of a tokenizer of the kind t5. scores: of each piece, by id. charsmap: SentencePiece's table of
    characters that texts get in place of their own; empty: there is none."""
    normalizers: list[dict[str, Any]] = []
    if charsmap:
        table = base64.b64encode(charsmap).decode()
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": table})
    if removes_spaces:
        normalizers.append({"type": "Strip", "strip_left": True, "strip_right": True})
        normalizers.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    spaces = {"replacement": SPACE, "prepend_scheme": "always" if begins_with_space else "never", "split": True}
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": {"type": "Metaspace", **spaces},
        "decoder": {"type": "Metaspace", **spaces},
        "model": {"type": "Unigram", "unk_id": unknown_id, "vocab": scores, "byte_fallback": False},
    }


def pair_template(begin: str, end: str, id_of: Callable[[str], int], *, has_types: bool) -> dict[str, Any]:
    """Return the form of texts and pairs. has_types: BERT's, in which the second text has type 1; else RoBERTa's, with
    a further `end` between both."""

    def token(text: str, type_id: int = 0) -> dict[str, Any]:
        return {"SpecialToken": {"id": text, "type_id": type_id}}

    def text(name: str, type_id: int = 0) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": type_id}}

    single = [token(begin), text("A"), token(end)]
    second = [text("B", 1), token(end, 1)] if has_types else [token(end), text("B"), token(end)]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, *second],
        "special_tokens": {each: {"id": each, "ids": [id_of(each)], "tokens": [each]} for each in (begin, end)},
    }
