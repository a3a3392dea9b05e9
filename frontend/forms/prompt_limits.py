"""PromptLimits: refuses prompts that are too long to be tokenized or served.

It consists of numbers of the model and needs neither tokenizer nor request, so that the intake process applies the same
limits as the frontend.
"""

from __future__ import annotations

import msgspec

from ...ipc.codec import num_ids
from ...ipc.errors import RequestError
from ...ipc.params.sampling_params import CutSide
from ...ipc.spec.config.engine_spec import EngineSpec

TOO_LONG = "maximum context length is"  # clients of OpenAI and vLLM match these words


class PromptLimits(msgspec.Struct, frozen=True):
    """Limits of one model. Call `check_text` before a text is tokenized, `check_length` after."""

    max_model_len: int
    max_answers: int  # most answers of one request, over all its prompts
    max_tokens: int  # most tokens of one request's prompts, counted for each answer
    max_bytes_per_token: int | None = None  # None: unknown, no text is refused by its bytes

    @classmethod
    def of(cls, spec: EngineSpec, max_bytes_per_token: int | None) -> PromptLimits:
        return cls(spec.max_model_len, spec.config.max_request_answers, spec.max_request_tokens, max_bytes_per_token)

    def check_share(self, num_prompts: int, num_answers: int, num_tokens: int = 0) -> None:
        """Raise RequestError if a request would fill more than its share of the waiting queue. `num_answers`: answers
        to each prompt; `num_tokens`: tokens of all prompts together, 0 if unknown."""
        asked = f"n is {num_answers} and " * (num_answers > 1)
        if num_prompts * num_answers > self.max_answers:
            many = f"n is {num_answers}" if num_prompts == 1 else f"{asked}the prompts are {num_prompts}"
            raise RequestError(
                f"{many}: one request may have at most {self.max_answers} answers, a quarter of "
                "--max-waiting-requests: send several requests"
            )
        if num_tokens * num_answers > self.max_tokens:
            raise RequestError(
                f"{asked}the prompts have {num_tokens} tokens: one request may have at most "
                f"{self.max_tokens}, counted for each answer, a quarter of --max-waiting-tokens: send several requests"
            )

    def check_text(self, text: str) -> None:
        """Raise RequestError if `text` certainly has more than max_model_len tokens."""
        self.check_characters(len(text))
        if len(text) > self.max_model_len and not text.isascii():
            self._check_bytes(len(text.encode(errors="replace")))

    def check_characters(self, num_characters: int) -> None:
        """Raise RequestError if a text with this many characters is too long, whatever it contains."""
        if num_characters > self.max_model_len:
            self._check_bytes(num_characters)

    def _check_bytes(self, num_bytes: int) -> None:
        most = self.max_bytes_per_token
        if most is not None and num_bytes > self.max_model_len * most:
            raise self._too_long(
                f"{num_bytes} bytes of text or more, at least {-(-num_bytes // most)} tokens, since none stands for "
                f"more than {most} bytes"
            )

    def check_part(self, text: str, part: str) -> None:
        """Raise RequestError if `part`, which has more than max_model_len tokens, is not all of `text`."""
        if len(part) < len(text):
            raise self._too_long(f"at least {self.max_model_len + 1} tokens in its first {len(part)} characters")

    def check_length(self, num_tokens: int, *, is_answered: bool = True) -> None:
        """Raise RequestError if a prompt does not fit or, if it `is_answered`, leaves no room for an answer."""
        if num_tokens + is_answered > self.max_model_len:
            raise self._too_long(f"{num_tokens} tokens" + " and the answer needs at least 1" * is_answered)

    def _too_long(self, size: str) -> RequestError:
        return RequestError(
            f"the prompt is too long: this model's {TOO_LONG} {self.max_model_len} tokens, but the prompt has {size}: "
            "shorten the prompt or raise --max-model-len"
        )

    def cut_side(self, truncate_prompt_tokens: int | None, side: CutSide | None) -> CutSide | None:
        """Return the side at which these parameters truncate every prompt to a length that fits; None if they do not
        guarantee that."""
        cuts = truncate_prompt_tokens is not None and truncate_prompt_tokens <= self.max_model_len
        return (side or "left") if cuts else None

    def kept(self, token_ids: bytes, cut_side: CutSide | None) -> bytes:
        """Return the tokens that a truncation at `cut_side` may keep, at most max_model_len; all if `cut_side` is
        None."""
        if cut_side is None or num_ids(token_ids) <= self.max_model_len:
            return token_ids
        return token_ids[: 4 * self.max_model_len] if cut_side == "right" else token_ids[-4 * self.max_model_len :]
