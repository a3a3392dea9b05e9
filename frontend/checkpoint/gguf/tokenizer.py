"""Writes the tokenizer in a GGUF file's metadata as tokenizer.json, tokenizer_config.json and chat_template.jinja.

The result gives the same ids as llama.cpp. Kinds that are supported: `gpt2`, byte-level BPE with merges and a
pre-tokenizer (`pre_tokenizers.py`); `llama`, SentencePiece's BPE, in which scores are converted to merges; `gemma4`,
BPE of characters with merges, in lines; and those of encoders, `bert` and `t5` (`encoders/pieces.py`). Every token of
the file keeps its id: a repeated or an empty one gets a name that does not occur in texts.
"""

from __future__ import annotations

import logging
import os
import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from operator import neg
from pathlib import Path
from typing import Any, Never

import msgspec

from ....ipc.errors import ConfigError
from .encoders.encoder_architectures import ENCODER_ARCHITECTURES
from .encoders.pieces import BERT_IDS, pair_template, unigrams, word_piece, word_pieces
from .end_tokens import end_tokens
from .pre_tokenizers import DEFAULT, LINES, PRE_TOKENIZERS, PreTokenizer
from .reader import read_gguf

PREFIX = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"  # further ones have a dot and a name behind it
TEMPLATES_FOLDER = "additional_chat_templates"
LISTS = ("tokens", "token_type", "scores", "merges", "precompiled_charsmap")
KINDS = ("gpt2", "llama", "gemma4", "bert", "t5")
MAX_TOKEN_CHARACTERS = 4096  # the longest tokens of published vocabularies, runs of spaces, have 1,024
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # types of tokens in GGUF
SPACE = "\u2581"  # stands for a space in SentencePiece's tokens
DEFAULT_IDS = {"llama": {"bos": 1, "eos": 2, "unknown": 0}, "bert": BERT_IDS}  # if the file has no ids
NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")  # in Phi-3 all other special tokens strip the spaces after them
MEND = "give --tokenizer with the folder or hub id of the original model"

BYTES: list[dict[str, Any]] = [{"type": "ByteFallback"}, {"type": "Fuse"}]  # decoders of tokens that stand for bytes

logger = logging.getLogger(__name__)


def write_tokenizer(file: Path, folder: Path) -> None:
    """Write the tokenizer of `file` into `folder`, tokenizer_config.json last; do nothing if the file has none.
    ConfigError if its kind is not supported, or it is damaged."""
    names = frozenset(PREFIX + name for name in LISTS)
    metadata = read_gguf(file, file.name, whole=names).metadata
    if metadata.get(f"{PREFIX}model", "none") in ("none", "no_vocab"):
        return
    vocabulary = _Vocabulary(file, metadata)
    if metadata[f"{PREFIX}model"] == "gpt2" and not metadata.get(f"{PREFIX}pre"):
        logger.warning("%s does not say how its tokenizer splits texts, a default is taken: %s", file, MEND)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    files = {
        "tokenizer.json": msgspec.json.encode(vocabulary.tokenizer()),
        "tokenizer_config.json": msgspec.json.encode(config | vocabulary.named()),
    }
    files = _templates(metadata) | files
    with tempfile.TemporaryDirectory(dir=folder) as made:
        for name, data in files.items():  # the last one proves that all were written
            (folder / name).parent.mkdir(exist_ok=True)
            (Path(made) / "file").write_bytes(data)
            os.replace(Path(made) / "file", folder / name)


def _templates(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the chat templates of a file, by the names of the files in which transformers keeps them."""
    found = {"chat_template.jinja": metadata.get(TEMPLATE)}
    for key, text in metadata.items():
        name = key.removeprefix(f"{TEMPLATE}.")
        if key != name and name.replace("_", "").replace("-", "").isalnum():
            found[f"{TEMPLATES_FOLDER}/{name}.jinja"] = text
    return {name: text.encode() for name, text in found.items() if isinstance(text, str)}


class _Vocabulary:
    """The tokenizer of a file, in the form of tokenizer.json. Invariant: no two ids have the same text."""

    def __init__(self, file: Path, metadata: Mapping[str, Any]) -> None:
        self._file, self._metadata = file, metadata
        self._kind = self._get("model")
        if self._kind not in KINDS:
            self._refuse(f"its tokenizer {self._kind!r:.100} cannot be read")
        self._is_bytes = self._kind == "gpt2"
        texts: list[str] = self._list("tokens", str)
        if not texts:
            self._refuse("it has no tokenizer.ggml.tokens")
        if self._kind == "bert":
            texts = list(map(word_piece, texts))
        self._types: list[int] = self._list("token_type", int) or [1] * len(texts)
        self._scores: list[float] = self._list("scores", float, int) or [0.0] * len(texts)
        if (longest := max(map(len, texts))) > MAX_TOKEN_CHARACTERS:
            place = f"tokenizer.ggml.tokens[{[len(each) for each in texts].index(longest)}]"
            self._refuse(f"{place} has {longest} characters, tokens have at most {MAX_TOKEN_CHARACTERS}")
        if len(self._types) < len(texts) or len(self._scores) < len(texts):
            self._refuse(
                f"it has {len(texts)} tokens, but {len(self._types)} types and {len(self._scores)} scores of tokens"
            )
        self._ids: dict[str, int] = {}
        for i, text in enumerate(texts):
            self._ids[text if text and text not in self._ids else f"[TOKEN_{i}]"] = i
        if len(self._ids) != len(texts):
            self._refuse(f"{len(texts) - len(self._ids)} of its tokens are there twice")
        self._texts = list(self._ids)
        self._ends = {self._id("bos"), self._id("eos")}

    def tokenizer(self) -> dict[str, Any]:
        """Return the content of tokenizer.json."""
        return {
            "version": "1.0",
            "added_tokens": list(self._added_tokens()),
            **self._model(),
            "post_processor": self._post_processor(),
        }

    def named(self) -> dict[str, str]:
        """Return the tokens that tokenizer_config.json names, such as bos_token, by these names."""
        ids = {name: self._id(kind) for kind, name in NAMES.items()}
        return {name: self._texts[i] for name, i in ids.items() if i is not None}

    def _model(self) -> dict[str, Any]:
        if self._is_bytes:
            return self._byte_level()
        if self._kind == "bert":
            is_lower = self._get("normalizer.lowercase")
            unknown = self._id("unknown") or 0
            return word_pieces(self._ids, self._texts[unknown], is_lower if isinstance(is_lower, bool) else None)
        if self._kind == "t5":
            return self._unigrams()
        return self._lines() if self._kind == "gemma4" else self._sentencepiece()

    def _byte_level(self) -> dict[str, Any]:
        form = PRE_TOKENIZERS[self._pre()]
        splits = _splits(form)
        alphabet = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        return {
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, alphabet]},
            "decoder": alphabet,
            "model": {
                "type": "BPE",
                "ignore_merges": form.ignores_merges,
                "vocab": self._ids,
                "merges": list(self._stored_merges()),
            },
        }

    def _unigrams(self) -> dict[str, Any]:
        charsmap = self._list("precompiled_charsmap", int)
        return unigrams(
            [(text, self._scores[i]) for text, i in self._ids.items()],
            self._id("unknown"),
            bytes(each % 256 for each in charsmap),
            removes_spaces=self._flag("remove_extra_whitespaces", False),
            begins_with_space=self._flag("add_space_prefix", True),
        )

    def _lines(self) -> dict[str, Any]:
        unknown = self._id("unknown")
        back = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, *BYTES]
        return {
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": _splits(LINES)},
            "decoder": {"type": "Sequence", "decoders": back},
            "model": {
                "type": "BPE",
                "unk_token": None if unknown is None else self._texts[unknown],
                "byte_fallback": True,
                "ignore_merges": LINES.ignores_merges,
                "vocab": self._ids,
                "merges": list(self._stored_merges()),
            },
        }

    def _sentencepiece(self) -> dict[str, Any]:
        spaced: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
        plain: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
            *BYTES,
        ]
        if self._flag("add_space_prefix", True):
            spaced.insert(0, {"type": "Prepend", "prepend": SPACE})
            plain.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        unknown = self._id("unknown")
        return {
            "normalizer": {"type": "Sequence", "normalizers": spaced},
            "decoder": {"type": "Sequence", "decoders": plain},
            "model": {
                "type": "BPE",
                "unk_token": None if unknown is None else self._texts[unknown],
                "fuse_unk": True,
                "byte_fallback": True,
                "vocab": self._ids,
                "merges": list(self._merges_of_scores()),
            },
        }

    def _added_tokens(self) -> Iterator[dict[str, Any]]:
        """Yield the added tokens, which are matched in a text before all others; special ones among them can be left
        out of decoded text."""
        ends = end_tokens(self._ids)
        strips = not self._is_bytes and any(
            each in str(self._metadata.get("general.name")).lower() for each in ("phi-3", "phi3")
        )
        for text, i in self._ids.items():
            kind = self._types[i]
            is_special = kind in (UNKNOWN, CONTROL) or text in ends or i in self._ends
            if is_special or kind == USER_DEFINED:
                yield {
                    "id": i,
                    "content": text,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": strips and text not in UNSTRIPPED,
                    "normalized": False,
                    "special": is_special,
                }

    def _post_processor(self) -> dict[str, Any] | None:
        if self._metadata.get("general.architecture") in ENCODER_ARCHITECTURES:
            return self._pairs()
        form = PRE_TOKENIZERS[self._pre()] if self._is_bytes else None
        begin = self._id("bos") if self._flag("add_bos_token", form is None or form.adds_bos) else None
        end = self._id("eos") if self._flag("add_eos_token", False) else None
        if begin is None and end is None:
            return None

        def around(sequence: str, type_id: int) -> list[dict[str, Any]]:
            first = [] if begin is None else [{"SpecialToken": {"id": self._texts[begin], "type_id": type_id}}]
            last = [] if end is None else [{"SpecialToken": {"id": self._texts[end], "type_id": type_id}}]
            return [*first, {"Sequence": {"id": sequence, "type_id": type_id}}, *last]

        used = {self._texts[i]: i for i in (begin, end) if i is not None}
        return {
            "type": "TemplateProcessing",
            "single": around("A", 0),
            "pair": [*around("A", 0), *around("B", 1)],
            "special_tokens": {text: {"id": text, "ids": [i], "tokens": [text]} for text, i in used.items()},
        }

    def _pairs(self) -> dict[str, Any] | None:
        """Return the form of texts and pairs of an encoder."""
        begin, end = self._id("bos"), self._id("seperator")
        end = self._id("eos") if end is None else end
        if begin is None or end is None:
            return None
        is_bert = self._kind == "bert"
        return pair_template(self._texts[begin], self._texts[end], self._ids.__getitem__, has_types=is_bert)

    def _stored_merges(self) -> Iterator[tuple[str, str]]:
        """Yield the merges in the file, without repeated ones and those with a part or a result that is not a token."""
        merges: list[str] = self._list("merges", str)
        if not merges:
            self._refuse("it has no tokenizer.ggml.merges")
        ids = self._ids
        for each in dict.fromkeys(merges):
            space = each.find(" ", 1)
            left, right = each[:space], each[space + 1 :]
            if space > 0 and left in ids and right in ids and left + right in ids:
                yield left, right

    def _merges_of_scores(self) -> Iterator[tuple[str, str]]:
        """Yield every way to make a token of two others: highest score first and, of equal scores, longest token first,
        so that runs of spaces are merged as by llama.cpp."""
        ids = self._ids
        lengths = sorted({len(text) for text in ids}, reverse=True)
        for text in sorted(ids, key=lambda each: (-self._scores[ids[each]], -len(each))):
            for cut in lengths[bisect_right(lengths, -len(text), key=neg) :]:  # lengths below the token's
                left, right = text[:cut], text[cut:]
                if left in ids and right in ids:
                    yield left, right

    def _pre(self) -> str:
        name = self._get("pre") or DEFAULT
        if not isinstance(name, str) or name not in PRE_TOKENIZERS:
            self._refuse(f"the splitting {name!r:.100} of its tokenizer (tokenizer.ggml.pre) is not known")
        return name

    def _flag(self, name: str, default: bool) -> bool:
        value = self._get(name)
        return value if isinstance(value, bool) else default

    def _id(self, name: str) -> int | None:
        value = self._get(f"{name}_token_id")
        if not isinstance(value, int) or not 0 <= value < len(self._texts):
            value = DEFAULT_IDS.get(self._kind, {}).get(name)
        return value if value is not None and value < len(self._texts) else None

    def _list(self, name: str, *kinds: type) -> list[Any]:
        values = self._get(name)
        if values is None:
            return []
        if not isinstance(values, list) or not all(isinstance(each, kinds) for each in values):
            self._refuse(f"tokenizer.ggml.{name} must be a list of {kinds[0].__name__}")
        return values

    def _get(self, name: str) -> Any:
        return self._metadata.get(PREFIX + name)

    def _refuse(self, reason: str) -> Never:
        raise ConfigError(f"{self._file}: {reason}: {MEND}")


def _splits(form: PreTokenizer) -> list[dict[str, Any]]:
    return [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False} for each in form.splits
    ]
