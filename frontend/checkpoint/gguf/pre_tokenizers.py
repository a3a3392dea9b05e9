"""Pre-tokenizers of byte-level vocabularies, by `tokenizer.ggml.pre`: regular expressions that split a text one after
the other.

The names and their expressions are those of llama.cpp (src/llama-vocab.cpp). For some (gpt-4o, tekken, youtu, tiny_aya,
kimi-k2, superbpe) it quotes the expression of the original tokenizer.json, but uses a simpler one for C++'s std::regex,
which differs for capitals and marks beyond ASCII. This table has the original, with which the model was trained.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT = "default"  # name for files that have none


@dataclass(frozen=True)
class PreTokenizer:
    """The splits of a text before its bytes are merged, and the other settings of a pre-tokenizer's name."""

    splits: tuple[str, ...]
    ignores_merges: bool = False  # a piece that is a token is not merged from its bytes
    adds_bos: bool = False  # a BOS token starts each text, unless the file says otherwise


_CONTRACTION = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"  # with (?i:…), ſ would match s
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_MARKS}|{_SPACES}"
_THREE_DIGITS = "[0-9][0-9][0-9]"
_DIGITS_FROM_THE_RIGHT = r"\d{1,3}(?=(?:\d{3})*\b)"
_HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_HAN_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_SENTENCES = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_DEEPSEEK3_WORD = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_CASED = (  # cased letters, without those that Unicode added later or the original lacks
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8a\u2d00-\u2d2d\ua790-\ua7ff\uab30-\uab6f"
    "\U00010570-\U000105bc\U00010d50-\U00010d85\U00016e40-\U00016eff\U0001d400-\U0001d7cb\U0001df00-\U0001df2a]]"
)


def _by_case(end: str, but: str = "") -> str:
    """Return an expression for words of capitals and then small letters, where one kind may be missing, followed by
    `end`. `but`: letters to exclude."""
    capitals, small = (rf"[{kind}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]" for kind in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
    begin = r"[^\r\n\p{L}\p{N}]?"
    return rf"{begin}{capitals}*{small}+{end}|{begin}{capitals}+{small}*{end}"


_WORDS_BUT_HAN = _by_case(f"{_CONTRACTION}?", r"&&[^\p{Han}]")
_GPT4O = rf"{_by_case(f'{_CONTRACTION}?')}|\p{{N}}{{1,3}}|{_PATHS}|{_SPACES}"
_FORMS = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", _THREE_DIGITS)),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": PreTokenizer(
        (_LLAMA3,), ignores_merges=True, adds_bos=True
    ),
    "dbrx smaug-bpe chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "glm4 glm5": PreTokenizer((_LLAMA3,), ignores_merges=True),
    "minicpm5": PreTokenizer(
        (r"\p{N}{1,3}", rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_MARKS}|{_SPACES}"), ignores_merges=True
    ),
    "jais-2": PreTokenizer(
        (
            rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}|\s*[\r\n]+|"
            + "".join(rf"\s{{{2**power}}}(?!\S)|" for power in range(9, 1, -1))
            + r"\s{1,2}(?!\S)|\s{1}",
        )
    ),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|"
            + _SPACES,
        )
    ),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", _QWEN2)),
    "ufakzeka": PreTokenizer((rf"{_WORD}|\p{{N}}|{_MARKS}|{_SPACES}",)),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer(
        (rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_WORD}|\p{{N}}|{_MARKS}|\s*[\r\n]|\s+(?!\S)|\s+",)
    ),
    "seed-coder": PreTokenizer((rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
    "exaone-moe": PreTokenizer(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|"
            r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en jina-v2-code "
    "roberta-bpe mpt olmo jais trillion granite-docling exaone4": PreTokenizer((_GPT2,)),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": PreTokenizer((r"\p{N}", _GPT2)),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, _THREE_DIGITS)),
    "chameleon": PreTokenizer(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        adds_bos=True,
    ),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenizer((_GPT4O,)),
    "granite-embed-multi-97m": PreTokenizer((_GPT4O,), ignores_merges=True),
    "tiny_aya cohere2moe": PreTokenizer((_DIGITS_FROM_THE_RIGHT, _GPT4O)),
    "tekken": PreTokenizer((rf"{_by_case('')}|\p{{N}}|{_PATHS}|{_SPACES}",), ignores_merges=True, adds_bos=True),
    "youtu": PreTokenizer(
        (
            "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
            "\ufe30-\ufe4f]+|[\u3105-\u312f]+|" + _HAN_AND_KANA,
            rf"{_by_case(f'{_CONTRACTION}?')}|\p{{N}}|{_PATHS}|{_SPACES}",
        ),
        ignores_merges=True,
    ),
    "kimi-k2": PreTokenizer((rf"\p{{Han}}+|{_WORDS_BUT_HAN}|\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}",)),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?{_CASED}+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _HAN_AND_HANGUL,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, r"\p{N}")),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": PreTokenizer(
        (r"\p{N}{1,3}", _HAN_AND_KANA, rf"{_DEEPSEEK3_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}")
    ),
    "spark2_5": PreTokenizer(
        (
            r"\p{N}{1,3}",
            _HAN_AND_KANA,
            rf"{_DEEPSEEK3_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
            r"\p{N}",
        )
    ),
    "poro-chat bloom gpt3-finnish": PreTokenizer((_SENTENCES,)),
    "viking": PreTokenizer((_SENTENCES, r"\p{N}")),
}
LINES = PreTokenizer((r"\n+",), ignores_merges=True, adds_bos=True)  # of tokenizers of the kind gemma4
PRE_TOKENIZERS = {name: form for names, form in _FORMS.items() for name in names.split()}
