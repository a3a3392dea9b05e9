"""The tokenizer of an encoder's GGUF file gives the ids, and the types of pairs, of the one that it was made of."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from tokenloom.frontend.checkpoint.gguf.tokenizer import write_tokenizer
from tokenloom.tests.frontend.checkpoint.gguf.gguf_vocabulary import RECORDED
from tokenloom.tests.support.encoder_conversions import write_pieces

TEXTS = [*RECORDED, "The Café in Oslo closes at 10.", "a[SEP]b [CLS] [unused1]", "", "   "]


def learned_word_pieces(*, is_lower: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # type: ignore[call-arg]
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=is_lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(RECORDED, trainers.WordPieceTrainer(vocab_size=900, special_tokens=special))
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return tokenizer


def learned_unigrams() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    strip = [normalizers.Strip(), normalizers.Replace(gguf_spaces(), " ")]
    tokenizer.normalizer = normalizers.Sequence(strip)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=special, unk_token="<unk>")
    tokenizer.train_from_iterator(RECORDED, trainer)
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return tokenizer


def gguf_spaces() -> object:
    from tokenizers import Regex

    return Regex(" {2,}")


MADE = {
    "bert": lambda: learned_word_pieces(is_lower=True),
    "bert, with capitals": lambda: learned_word_pieces(is_lower=False),
    "t5": learned_unigrams,
}


@pytest.mark.parametrize("kind", MADE)
def test_ids_and_types_are_those_of_the_original(kind: str, tmp_path: Path) -> None:
    original = MADE[kind]()
    original.save(str(tmp_path / "tokenizer.json"))
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "bert")
    write_pieces(writer, tmp_path)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    made = tmp_path / "made"
    made.mkdir()
    write_tokenizer(tmp_path / "model.gguf", made)
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    assert tokenizer.get_vocab() == original.get_vocab()
    for text in TEXTS:
        for second in (None, "Second, text"):
            expected, actual = (each.encode(text, second) for each in (original, tokenizer))
            assert (actual.ids, actual.type_ids) == (expected.ids, expected.type_ids), text
            assert tokenizer.decode(actual.ids) == original.decode(expected.ids)
