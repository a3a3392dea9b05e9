"""Trains small tokenizers of the three kinds in milliseconds."""

from __future__ import annotations

import functools

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from tokenloom.frontend.server.text.tokenizer import Tokenizer

SENTENCES = [
    "The capital of France is Paris, and that of Spain is Madrid.",
    "Don't panic! It's only a test: 12 + 30 = 42.",
    "naïve café, Größe, Ελλάδα, Москва",
    "漢字 and かな and 한국어 mixed with emoji 😀🎉👩‍👩‍👧",
    "def f(x):\n    return x * 2\n\n\tindented  twice",
]
SPECIAL_TOKENS = ["<unk>", "<s>", "</s>", "<|user|>"]
KINDS = ("byte_level", "byte_fallback", "unigram", "word_piece")
SENTENCE_PIECE_KINDS = ("gemma", "llama_metaspace", "metaspace_first", "metaspace_never")  # that differ from the above


@functools.cache
def backend_json(kind: str) -> str:
    """Return the tokenizer.json of a tokenizer of this kind."""
    makers = {"byte_level": _byte_level, "byte_fallback": _byte_fallback, "unigram": _unigram, "gemma": _gemma}
    makers |= {"word_piece": _word_piece, "llama_metaspace": _llama_metaspace}
    makers |= {f"metaspace_{scheme}": functools.partial(_unigram, scheme) for scheme in ("first", "never")}
    return str(makers[kind]().to_str())


def new_tokenizer(kind: str, **config: object) -> Tokenizer:
    config = {"bos_token": "<s>", "eos_token": "</s>", **config}
    return Tokenizer.from_backend(tokenizers.Tokenizer.from_str(backend_json(kind)), config)


def _byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(SENTENCES[:3] * 4, trainer)  # the last sentences become bytes
    backend.add_tokens(["<|tool|>", "two words"])
    return backend


def _byte_fallback() -> tokenizers.Tokenizer:
    """Train a tokenizer like Llama 2's: BPE over ▁-words, unknown characters as <0xNN>."""
    tokens = SPECIAL_TOKENS[:3] + [f"<0x{byte:02X}>" for byte in range(256)] + ["▁"]
    characters = sorted(set("".join(SENTENCES[:2]).replace(" ", "")))
    vocab = {token: i for i, token in enumerate(tokens + characters)}
    merges = []
    for word in ["▁The", "▁capital", "▁of", "▁France", "▁is", "▁Paris", "▁and", "and", "It's", "▁▁"]:
        left = word[0]
        for character in word[1:]:
            merges.append((left, character))
            left += character
            vocab.setdefault(left, len(vocab))
    model = models.BPE(vocab, list(dict.fromkeys(merges)), byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(SPECIAL_TOKENS)
    backend.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    return backend


def _gemma() -> tokenizers.Tokenizer:
    """Like Gemma's: no space is put before a text, and none is taken from it."""
    backend = _byte_fallback()
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _llama_metaspace() -> tokenizers.Tokenizer:
    """Like Llama 2's of newer files, without the legacy treatment of spaces."""
    backend = _byte_fallback()
    backend.normalizer = normalizers.Sequence([])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return backend


def _unigram(scheme: str = "always") -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=160, special_tokens=SPECIAL_TOKENS, unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(SENTENCES * 4, trainer)
    return backend


def _word_piece() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=260, special_tokens=SPECIAL_TOKENS, show_progress=False)
    backend.train_from_iterator(SENTENCES * 4, trainer)
    return backend
