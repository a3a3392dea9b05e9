"""Tokenizer: text ⇄ token ids of one checkpoint.

Reads `tokenizer.json` with the `tokenizers` library in 30 ms; transformers' AutoTokenizer, which takes seconds, is for
checkpoints without that file. The post-processor in the file adds BOS and the like; `add_bos_token` in
tokenizer_config.json is ignored, as in transformers 5. Unknown ids decode to "". Knows nothing of requests, streams
(`detokenizer.py`) and chats (`chat_template.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from ....ipc.codec import JsonObject, encode_ids
from ....ipc.errors import ConfigError, RequestError
from ....ipc.params.sampling_params import CutSide
from ....ipc.spec.models.config_file import read_json
from .text_cut import SEARCHED_CHARACTERS, TextCut
from .token_bytes import max_bytes_per_token

LONG_CHARACTERS = LONG_TOKENS = 4096  # above, use the calls that release Python's GIL, which are slower for short texts
PANIC = "PanicException"  # a BaseException of Rust's libraries, for example if a regular expression gives up on a text
NUM_TIMESTAMPS = 1501  # Whisper's: one for each 20 ms of half a minute
TRANSFORMERS_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "tokenizer_config.json")
# Regular expressions by which published tokenizers split a text in quadratic time, each with a linear one that makes
# the same splits. The quadratic ones scan from every place to the end of a run: 4,096 digits or blanks took 0.1 to
# 0.2 s of the event loop that sends all clients' tokens, 256 Ki an hour of a thread. The linear ones scan a run once,
# from its start: a look-behind excludes later places. In Oniguruma's syntax `\G` is the end of the previous match,
# and `$` the end of a line.
LINEAR = {
    # Cohere: groups of three digits from the right
    r"\d{1,3}(?=(?:\d{3})*\b)": r"(?<!\d)\d{1,3}(?=(?:\d{3})*+\b)|\G(?<=\d)\d{3}",
    # SuperBPE: the places before such groups, only in the last 255 digits of a run
    r"(?=(\d{3})+(?!\d))": r"(?=(?>(?:\d{3}){1,85})(?!\d))",
    # DeepSeek LLM: blanks at the end of a line
    r"\s+$": r"(?<!\s)\s+$",
}


@dataclass(eq=False)
class Tokenizer:
    """One checkpoint's tokenizer. `backend` is None if the tokenizer is Python code of transformers or of the
    checkpoint.

    `size`: the highest id + 1, including added tokens; the model's vocab_size may be smaller or larger."""

    _encode: Callable[[str, bool], list[int]]  # (text, add_special_tokens); thread-safe, like _decode
    _decode: Callable[[Sequence[int], bool], str]  # (token ids, skip_special_tokens)
    size: int
    special_ids: frozenset[int]
    config: JsonObject
    backend: tokenizers.Tokenizer | None

    @classmethod
    def load(cls, folder: Path, trust_remote_code: bool = False) -> Tokenizer | None:
        """Load the tokenizer in `folder`; None if it has no tokenizer file. ConfigError if a file cannot be read."""
        config = read_tokenizer_config(folder)
        if (folder / "tokenizer.json").is_file():
            return cls.from_backend(_read_backend(folder / "tokenizer.json"), config)
        if any((folder / name).is_file() for name in TRANSFORMERS_FILES):
            return _load_with_transformers(folder, config, trust_remote_code)
        return None

    @classmethod
    def from_backend(cls, backend: tokenizers.Tokenizer, config: JsonObject) -> Tokenizer:
        """Return a tokenizer around `backend`, after switching truncation and padding off and adding the tokens of
        `config`."""
        backend.no_truncation()
        backend.no_padding()
        make_splits_linear(backend)
        _add_tokens(backend, config)
        added = backend.get_added_tokens_decoder()

        def encode(text: str, add_special_tokens: bool) -> list[int]:
            if len(text) <= LONG_CHARACTERS:
                return backend.encode(text, add_special_tokens=add_special_tokens).ids
            return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

        def decode(token_ids: Sequence[int], skip_special_tokens: bool) -> str:
            if len(token_ids) <= LONG_TOKENS:
                return backend.decode(token_ids, skip_special_tokens)
            return backend.decode_batch([token_ids], skip_special_tokens)[0]

        return cls(
            encode,
            decode,
            size=max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1),
            special_ids=frozenset(token_id for token_id, token in added.items() if token.special),
            config=config,
            backend=backend,
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`. `add_special_tokens` adds the special tokens that the checkpoint puts around
        a prompt. RequestError if the library fails."""
        try:
            return self._encode(text, add_special_tokens)
        except BaseException as error:  # the libraries raise bare Exception, and a remote tokenizer anything
            if not isinstance(error, Exception) and type(error).__name__ != PANIC:
                raise
            raise RequestError(f"a text of {len(text)} characters cannot be tokenized: {error}") from None

    def encode_pair(
        self, first: str, second: str, num_kept: int | None, cut_side: CutSide
    ) -> tuple[list[int], list[int]]:
        """Return the token ids and token types of a pair of texts in the form of the checkpoint, cut to `num_kept`
        tokens: the longer text first, and then both. RequestError if there is no such form, or nothing would be
        left of a text."""
        if self.backend is None:
            raise RequestError("this model's tokenizer has no form of pairs: send one text, or tokens")
        one, two = (self.backend.encode(text, add_special_tokens=False) for text in (first, second))
        if num_kept is not None:
            room = num_kept - self.backend.num_special_tokens_to_add(is_pair=True)
            if room < 2:
                raise RequestError(f"a pair is cut to {num_kept} tokens: raise truncate_prompt_tokens")
            num_one, num_two = longest_cut_first(len(one.ids), len(two.ids), room)
            one.truncate(num_one, direction=cut_side)
            two.truncate(num_two, direction=cut_side)
        whole = self.backend.post_process(one, two, add_special_tokens=True)
        return whole.ids, whole.type_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`, decoded as a whole; invalid UTF-8 becomes U+FFFD."""
        return self._decode(token_ids, skip_special_tokens)

    def token_string(self, token_id: int) -> str:
        """Return a token's spelling in the vocabulary, or its text if there is no backend or the id is unknown."""
        known = None if self.backend is None else self.backend.id_to_token(token_id)
        return self.decode([token_id], skip_special_tokens=False) if known is None else str(known)

    @cached_property
    def added_ids(self) -> dict[str, int]:
        """The ids of the added tokens by their texts. Wherever such a text stands, it becomes this token, while other
        texts may be split anywhere. Without a backend these are the special tokens."""
        if self.backend is None:
            return {self.token_string(token_id): token_id for token_id in self.special_ids}
        return {token.content: token_id for token_id, token in self.backend.get_added_tokens_decoder().items()}

    def has_token(self, token_id: int) -> bool:
        """Return whether an id belongs to a token: the vocabulary may have gaps."""
        if self.backend is None:
            return 0 <= token_id < self.size
        return token_id >= 0 and self.backend.id_to_token(token_id) is not None

    @cached_property
    def max_bytes_per_token(self) -> int | None:
        """An upper bound of the UTF-8 bytes of text that one token can represent; None if none is certain."""
        return None if self.backend is None else max_bytes_per_token(self.backend)

    def kept(self, text: str, num_tokens: int, cut_side: CutSide) -> str:
        """Return `text`, shortened at `cut_side` where that is safe: the last ("left") or first ("right") `num_tokens`
        tokens stay the same. Return all of `text` if no cut is safe."""
        if len(text) < SEARCHED_CHARACTERS or self._cut is None:
            return text
        return self._cut.kept(text, num_tokens, cut_side)

    @cached_property
    def _cut(self) -> TextCut | None:
        return None if self.backend is None else TextCut(self.backend, self.max_bytes_per_token)

    @cached_property
    def text_end(self) -> bytes:
        """The encoded ids that the checkpoint appends to a text, such as an embedding model's last token."""
        return self._around[1]

    @cached_property
    def text_begin(self) -> bytes:
        """The encoded ids that the checkpoint puts before a text, such as an encoder's [CLS]."""
        return self._around[0]

    @cached_property
    def _around(self) -> tuple[bytes, bytes]:
        bare, whole = (self.encode("a", add_special_tokens=each) for each in (False, True))
        begins = (begin for begin in range(len(whole)) if whole[begin : begin + len(bare)] == bare)
        begin = next(begins, None)
        if begin is None:
            return b"", b""
        return encode_ids(whole[:begin]), encode_ids(whole[begin + len(bare) :])

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """The special tokens of tokenizer_config.json by name (bos_token, eos_token, …), for chat templates."""
        named = {name: special_token(self.config, name) for name in self.config if name.endswith("_token")}
        return {name: token for name, token in named.items() if token is not None}

    @cached_property
    def eos_token_id(self) -> int | None:
        token = self.special_tokens.get("eos_token")
        return None if token is None or self.backend is None else self.backend.token_to_id(token)


def longest_cut_first(num_one: int, num_two: int, room: int) -> tuple[int, int]:
    """Return the tokens that are kept of two texts with `room` for both: the longer is cut to the length of the other
    before both are cut, as transformers' `longest_first` does."""
    excess = max(num_one + num_two - room, 0)
    difference = abs(num_one - num_two)
    first_cut = min(excess, difference)
    if num_one > num_two:
        num_one -= first_cut
    else:
        num_two -= first_cut
    excess -= first_cut
    return num_one - excess // 2, num_two - (excess - excess // 2)


def read_tokenizer_config(folder: Path) -> JsonObject:
    """Return the content of tokenizer_config.json, or {} if there is no such file."""
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}


def head_of(tokenizer: Tokenizer | None, token_ids: bytes, num_kept: int) -> bytes:
    """Return the first `num_kept` of encoded ids. If the prompt ends with the tokens that the checkpoint appends to a
    text, these stay at the end of the result and count in `num_kept`."""
    end = b"" if tokenizer is None else tokenizer.text_end[-4 * num_kept :]
    if len(token_ids) <= 4 * num_kept or not token_ids.endswith(end):
        return token_ids[: 4 * num_kept]
    return token_ids[: 4 * num_kept - len(end)] + end


def tail_of(tokenizer: Tokenizer | None, token_ids: bytes, num_kept: int) -> bytes:
    """Return the last `num_kept` of encoded ids. If the prompt begins with the tokens that the checkpoint puts before a
    text, these stay at the beginning of the result and count in `num_kept`."""
    begin = b"" if tokenizer is None else tokenizer.text_begin[: 4 * num_kept]
    if len(token_ids) <= 4 * num_kept or not token_ids.startswith(begin) or len(begin) == 4 * num_kept:
        return token_ids[-4 * num_kept :]
    return begin + token_ids[len(token_ids) - 4 * num_kept + len(begin) :]


def special_token(config: JsonObject, name: str) -> str | None:
    """Return the text of a named special token, given as a string or as an object with `content`; None if it is
    missing."""
    value = config.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} ({path.stat().st_size} bytes) cannot be read: {reason}") from None


def _add_tokens(backend: tokenizers.Tokenizer, config: JsonObject) -> None:
    """Add the tokens in `added_tokens_decoder` of tokenizer_config.json that tokenizer.json lacks, and Whisper's
    timestamps, which older tokenizer.json files lack. ConfigError if an entry is not a token."""
    listed = config.get("added_tokens_decoder")
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    try:
        for _, entry in sorted(listed.items() if isinstance(listed, dict) else (), key=lambda item: int(item[0])):
            if backend.token_to_id(entry["content"]) is None:
                options = {flag: bool(entry[flag]) for flag in flags if flag in entry}
                backend.add_tokens([tokenizers.AddedToken(entry["content"], **options)])
    except (TypeError, ValueError, LookupError) as error:
        raise ConfigError(
            f"added_tokens_decoder of tokenizer_config.json must hold tokens with a content by their ids ({error!r}): "
            "fetch the file again"
        ) from None
    if backend.token_to_id("<|notimestamps|>") == backend.get_vocab_size() - 1:
        backend.add_tokens([f"<|{number * 0.02:.2f}|>" for number in range(NUM_TIMESTAMPS)])


def _load_with_transformers(folder: Path, config: JsonObject, trust_remote_code: bool) -> Tokenizer:
    """Return the tokenizer as AutoTokenizer loads it, which is imported only here. Most have a `tokenizers` backend.
    ConfigError if it cannot be loaded."""
    try:
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except Exception as error:  # the checkpoint's code may raise anything
        reason = " ".join(str(error).split())
        if "trust_remote_code" in reason:
            reason = "it brings Python code of its own: read it, then allow it with --trust-remote-code"
        raise ConfigError(
            f"{folder} has no tokenizer.json and transformers cannot load its tokenizer: {reason[:300]}"
        ) from None
    backend = getattr(loaded, "backend_tokenizer", None)
    if isinstance(backend, tokenizers.Tokenizer):
        return Tokenizer.from_backend(backend, config)
    size: int = len(loaded)

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        return list(loaded.encode(text, add_special_tokens=add_special_tokens))

    def decode(token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        known = [token_id for token_id in token_ids if token_id < size]
        text = loaded.decode(known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        return "".join(text)  # some give a list of texts

    special_ids = frozenset(int(token_id) for token_id in loaded.all_special_ids)
    return Tokenizer(encode, decode, size=size, special_ids=special_ids, config=config, backend=None)


def make_splits_linear(backend: tokenizers.Tokenizer) -> None:
    """Replace the regular expressions of a tokenizer's pre-tokenizer that are in LINEAR."""
    found: Any = backend.pre_tokenizer
    if found is None:
        return
    given = state = found.__getstate__().decode()
    for slow, linear in LINEAR.items():
        state = state.replace(json.dumps(slow, ensure_ascii=False), json.dumps(linear, ensure_ascii=False))
    if state != given:
        found.__setstate__(state.encode())
        backend.pre_tokenizer = found
