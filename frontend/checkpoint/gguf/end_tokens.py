"""The tokens that end an answer of any model, whatever a GGUF file's metadata say."""

from __future__ import annotations

from collections.abc import Container

# Tokens that end an answer of every model that has them, whatever the metadata say, unless left out by `end_tokens`.
END_TOKENS = frozenset(
    """<|eot_id|> <|eom_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|>
    <|end_of_text|> </s> <eos> <EOT> _<EOT> [EOT] [EOS] <end_of_utterance> <｜end▁of▁sentence｜>
    <turn|> <|tool_response>""".split()  # noqa: SIM905
)


def end_tokens(vocabulary: Container[str]) -> set[str]:
    """Return the tokens of a vocabulary that end an answer, by llama.cpp's rules (src/llama-vocab.cpp). In gpt-oss,
    which has <|return|> and <|call|>, <|end|> ends only a message. In a vocabulary with <eos>, such as Gemma's, </s> is
    HTML."""
    found = {token for token in END_TOKENS if token in vocabulary}
    if found & {"<|call|>", "<|calls|>"} and found & {"<|return|>", "<|flush|>"}:
        found.discard("<|end|>")
    if "<eos>" in found:
        found.discard("</s>")
    return found
