"""Placeholders: puts the tokens of each medium into a prompt, equal to transformers' processors.

A prompt has one marker for each medium, where the chat template or the caller put it: the placeholder itself, or for
Gemma 3 the token before it. Expansion happens in token ids, after tokenization. Gemma 3's images have line breaks
around them, which its tokenizer may join with the text's; `before_tokenization` puts them into the text. A clip of
Voxtral follows a token of its own, which is added unless the prompt has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ....ipc.errors import ConfigError, RequestError
from ....ipc.messages.media import MEDIUM, MediaSpan
from ....ipc.spec.models.model_config import Encoder
from ....ipc.spec.models.vision_config import Grid
from ....ipc.spec.processors.image_processor_config import ImageProcessorConfig
from ....ipc.spec.processors.processor import Processor
from ..text.media_marker import MediaMarker
from ..text.tokenizer import Tokenizer, special_token

FAKE = "<fake_token_around_image>"  # of Idefics3
WHOLE = "<global-img>"
QWEN_FRAME = (("vision_bos_token", "<|vision_start|>"), ("vision_eos_token", "<|vision_end|>"))
FRAMES = {  # tokens before and after a medium in a chat, where the template shows none
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), QWEN_FRAME),
    "qwen2_audio": (("audio_bos_token", "<|audio_bos|>"), ("audio_eos_token", "<|audio_eos|>")),
    "qwen3_asr": (("audio_bos_token", "<|audio_start|>"), ("audio_eos_token", "<|audio_end|>")),
}
NO_FRAME = (("", ""), ("", ""))


class Item(Protocol):
    """A medium that has been decoded."""

    @property
    def digest(self) -> bytes: ...

    @property
    def grid(self) -> Grid: ...


@dataclass(frozen=True)
class Placeholders:
    """Tokens of a family's media. `marker` has the text of `marker_id`."""

    marker: MediaMarker
    marker_id: int
    placeholder_id: int
    config: Processor
    tokenizer: Tokenizer
    _pieces: dict[str, list[int]] = field(default_factory=dict)  # token ids of texts between two special tokens

    @classmethod
    def load(cls, config: Processor, encoder: Encoder, tokenizer: Tokenizer) -> Placeholders:
        """Find the tokens of a model's media; ConfigError if its tokenizer lacks one."""
        marker_id = placeholder_id = encoder.placeholder_id
        text = tokenizer.token_string(placeholder_id)
        if encoder.family == "gemma3":
            text = _named(tokenizer, "boi_token", "<start_of_image>")
            marker_id = next(iter(tokenizer.encode(text, add_special_tokens=False)), -1)
        if tokenizer.encode(text, add_special_tokens=False) != [marker_id]:
            raise _missing(text, config)
        before, after = (_named(tokenizer, *each) for each in FRAMES.get(encoder.family, NO_FRAME))
        marker = MediaMarker(encoder.kind, text, f"{before}{text}{after}")
        found = cls(marker, marker_id, placeholder_id, config, tokenizer)
        found.tokens_of((1, 0, 0) if encoder.family == "idefics3" else (1, 2, 2))  # finds missing tokens at the start
        return found

    def before_tokenization(self, text: str) -> str:
        """Return a rendered prompt as it is to be tokenized."""
        if self.config.family != "gemma3":
            return text
        end = _named(self.tokenizer, "eoi_token", "<end_of_image>")
        placeholder = self.tokenizer.token_string(self.placeholder_id)
        return text.replace(self.marker.text, f"\n\n{self.marker.text}{placeholder}{end}\n\n")

    def expand(self, token_ids: Sequence[int], items: Sequence[Item]) -> tuple[list[int], list[MediaSpan]]:
        """Return a prompt with the tokens of each medium in place of its marker, and their spans. RequestError unless
        it has as many markers as there are media."""
        token_ids = list(token_ids)
        places = list(_places(token_ids, self.marker_id))
        self._check(token_ids, places, len(items))
        expanded: list[int] = []
        spans: list[MediaSpan] = []
        end = 0
        for place, item in zip(places, items, strict=True):
            expanded += token_ids[end:place]
            num_replaced, tokens = self._replacement(token_ids, place, item.grid)
            first = tokens.index(self.placeholder_id)
            last = len(tokens) - 1 - tokens[::-1].index(self.placeholder_id)
            spans.append(
                MediaSpan(
                    kind=self.config.kind,
                    digest=item.digest,
                    start=len(expanded) + first,
                    length=last - first + 1,
                    num_embeds=self.config.num_embeds(item.grid),
                    grid=item.grid,
                )
            )
            expanded += tokens
            end = place + num_replaced
        return expanded + token_ids[end:], spans

    def tokens_of(self, grid: Grid) -> list[int]:
        """Return the tokens that stand for a medium with this grid."""
        config, image, num_embeds = self.config, self.placeholder_id, self.config.num_embeds(grid)
        if not isinstance(config, ImageProcessorConfig):
            begin = [self._special("begin_audio_token", "[BEGIN_AUDIO]")] if config.family == "voxtral" else []
            return [*begin, *[image] * num_embeds]
        match config.family:
            case "pixtral":
                rows, columns = (each // config.merge_size for each in grid[1:])
                row = [*[image] * columns, self._special("image_break_token", "[IMG_BREAK]")]
                return [*(row * rows)[:-1], self._special("image_end_token", "[IMG_END]")]
            case "internvl":
                first, last = self._special("start_image_token", "<img>"), self._special("end_image_token", "</img>")
                return [first, *[image] * num_embeds, last]
            case "idefics3":
                return self._tiles(grid, [image] * (num_embeds // grid[0]))
            case "gemma3":
                return [self.marker_id, *[image] * num_embeds, self._special("eoi_token", "<end_of_image>")]
            case _:
                return [image] * num_embeds

    def _tiles(self, grid: Grid, tile: list[int]) -> list[int]:
        """Return Idefics3's tokens for an image: those of each tile, with its row and column, one text line per row of
        tiles, then those of the whole image."""
        fake = self._special("fake_image_token", FAKE)
        whole = [fake, *self._piece(_named(self.tokenizer, "global_image_token", WHOLE)), *tile, fake]
        _, rows, columns = grid
        if not rows:
            return whole
        tokens: list[int] = []
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                tokens += [fake, *self._piece(f"<row_{row}_col_{column}>"), *tile]
            tokens += self._piece("\n" if row < rows else "\n\n")
        return tokens + whole

    def _replacement(self, token_ids: list[int], place: int, grid: Grid) -> tuple[int, list[int]]:
        """Return how many tokens a medium replaces, and those in their place."""
        tokens = self.tokens_of(grid)
        if self.config.family == "voxtral" and token_ids[max(place - 1, 0)] == tokens[0]:
            return 1, tokens[1:]
        if self.config.family != "gemma3":
            return 1, tokens
        if token_ids[place + 1 : place + 3] == [self.placeholder_id, tokens[-1]]:  # by `before_tokenization`
            return 3, tokens
        lines = self._piece("\n\n")
        return 1, [*lines, *tokens, *lines]

    def _check(self, token_ids: list[int], places: list[int], num_items: int) -> None:
        num_markers = len(places)
        if self.marker_id != self.placeholder_id:  # a placeholder that follows no marker was typed
            num_known = sum(token_ids[place + 1 : place + 2] == [self.placeholder_id] for place in places)
            num_markers += token_ids.count(self.placeholder_id) - num_known
        if num_markers != num_items:
            name = MEDIUM[self.config.kind]
            raise RequestError(
                f"the prompt has {num_markers} placeholder{'s' * (num_markers != 1)} of {name}s ({self.marker.text}) "
                f"for {num_items} {name}{'s' * (num_items != 1)}: write one for each {name}, and none in other text"
            )

    def _special(self, name: str, default: str) -> int:
        """Return the id of the token that the tokenizer's config calls `name`, or of `default` if it names none."""
        return self._piece(_named(self.tokenizer, name, default), is_one=True)[0]

    def _piece(self, text: str, is_one: bool = False) -> list[int]:
        """Return the token ids of a text between two special tokens. ConfigError if `is_one` and the text is not
        exactly one token."""
        if text not in self._pieces:
            self._pieces[text] = _between(self.tokenizer, self.marker.text, text)
        if is_one and len(self._pieces[text]) != 1:
            raise _missing(text, self.config)
        return self._pieces[text]


def _missing(text: str, config: Processor) -> ConfigError:
    name = MEDIUM[config.kind]
    return ConfigError(f"the tokenizer has no token {text} for {name}s: use the model's own tokenizer")


def _between(tokenizer: Tokenizer, marker: str, text: str) -> list[int]:
    return tokenizer.encode(f"{marker}{text}{marker}", add_special_tokens=False)[1:-1]


def _places(token_ids: list[int], token_id: int) -> Iterator[int]:
    place = -1
    for _ in range(token_ids.count(token_id)):
        place = token_ids.index(token_id, place + 1)
        yield place


def _named(tokenizer: Tokenizer, name: str, default: str) -> str:
    """Return the token that the tokenizer's config calls `name`, or `default` if it names none."""
    more = tokenizer.config.get("extra_special_tokens")
    own = special_token(tokenizer.config, name)
    return own or (special_token(more, name) if isinstance(more, dict) else None) or default
