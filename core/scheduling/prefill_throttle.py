"""PrefillThrottle: limits the prompt tokens in a step that also has decoding rows.

Prompts may add PAUSE_S to a step, which nobody who reads along will notice. Where steps are long, one prompt among many
decoding rows may add half a step's time, and each further prompt as much again; more would stall the streams. A burst
of prompts gets the whole budget, and so do its last prompts, for as many steps as the burst had before: if they were
held back, they would decode alone after all others. The cost of prompt tokens is learned from finished steps.

Why a time, too: a limit by the step's time alone held a prompt of 2,000 tokens back for 20 seconds beside 16 rows with
steps of 40 ms. Under load it made first tokens wait up to twice as long, and the mean time between tokens no shorter:
tokens of prompts that are held back are computed later, in smaller and less efficient chunks.
"""

from __future__ import annotations

PAUSE_S = 0.1  # that prompts may add to any step: ten tokens a second are read as fast as they come
SHARE = 0.5  # of a decode step's time that one prompt may add to it, if that is longer
CROWD = 4  # decoding rows per prompt; with fewer it is a burst of requests, and prompts take the whole budget
MIN_TOKENS = 6  # every prompt makes progress; with AVX2, 8 tokens beside 16 rows and 2k keys nearly double the step
MIN_SAMPLE = 128  # fewest prompt tokens to learn their cost from: a mixed step's own cost outweighs that of fewer
_WEIGHT = 0.3  # of the newest step in the averages
_MOST_SLOWER = 1.25  # a slower step counts as at most this many times the average
_SLOWER_WEIGHT = 0.1  # of a decode step above the average, so that the average stays near an undisturbed step


class PrefillThrottle:
    """Owner of moving averages: seconds of a decode step by its size (a power of two of rows), seconds per prompt
    token, and the factor by which a token takes longer in a small chunk: a mixed step has a cost of its own, and small
    matmuls are less efficient."""

    def __init__(self) -> None:
        self._decode_step_s: dict[int, float] = {}  # by bits of the number of rows
        self._prompt_token_s: float | None = None
        self._times_as_long = 1.0
        self._burst_steps = 0  # steps in which the last prompts of a burst may still have the whole budget

    def on_step(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        """Update the averages with the tokens and the seconds of a finished step."""
        if seconds <= 0:
            return
        size = num_decodes.bit_length()
        if not num_prompt_tokens:
            known = self._decode_step_s.get(size)
            weight = _WEIGHT
            if known is not None and seconds > known:  # perhaps because of other work on the machine
                weight, most = _SLOWER_WEIGHT, _MOST_SLOWER * known
                seconds = seconds if seconds < most else most
            self._decode_step_s[size] = blend(known, seconds, weight)
            return
        if num_decodes and size not in self._decode_step_s:  # prompts may join every step of this size
            if self._prompt_token_s is not None:
                of_prompts = num_prompt_tokens * self._prompt_token_s
                self._decode_step_s[size] = max(seconds - of_prompts, 0.05 * seconds)
            return
        of_decodes = self._decode_step_s[size] if num_decodes else 0.0
        token_s = max(seconds - of_decodes, 0.05 * seconds) / num_prompt_tokens
        if num_prompt_tokens >= MIN_SAMPLE:
            self._prompt_token_s = blend(self._prompt_token_s, token_s)
        elif num_decodes and self._prompt_token_s is not None:
            self._times_as_long = blend(self._times_as_long, token_s / self._prompt_token_s)

    def seconds(self, num_decodes: int, num_prompt_tokens: int) -> float | None:
        """Estimate the seconds of a step; None if the costs are unknown."""
        known = [size for size in self._decode_step_s if size <= num_decodes.bit_length()]
        if (num_decodes and not known) or (num_prompt_tokens and self._prompt_token_s is None):
            return None
        decodes_s = self._decode_step_s[max(known)] if num_decodes else 0.0
        return decodes_s + num_prompt_tokens * (self._prompt_token_s or 0.0)

    def tokens_within(self, seconds: float) -> int | None:
        """Estimate how many prompt tokens a step without decoding rows computes in `seconds`; None if the cost is
        unknown."""
        return None if self._prompt_token_s is None else int(seconds / self._prompt_token_s)

    def tokens_of_step(self, seconds: float, times: float) -> int | None:
        """Estimate how many tokens, of decoding rows or prompts, a step computes in `seconds`, or in `times` a step of
        the fewest rows if that is longer; None if any number does, or the costs are unknown. For a size of batch that
        takes longer, time is taken to grow with its rows."""
        bounds: list[int] = []
        if self._decode_step_s:
            shortest_s = self._decode_step_s[min(self._decode_step_s)]
            seconds = max(seconds, times * shortest_s)
            slower = min((size for size, step_s in self._decode_step_s.items() if step_s > seconds), default=None)
            if slower is not None:
                fits = max((size for size in self._decode_step_s if size < slower), default=0)
                by_time = int((1 << slower - 1) * seconds / self._decode_step_s[slower])
                bounds.append(max((1 << fits) - 1, by_time))
        if self._prompt_token_s is not None:
            bounds.append(int(seconds / self._prompt_token_s))
        return min(bounds, default=None)

    @property
    def token_beside_s(self) -> float | None:
        """Estimate the seconds that a prompt token adds to a step of decoding rows; None if the cost is unknown."""
        return None if self._prompt_token_s is None else self._prompt_token_s * self._times_as_long

    def limit(self, num_decodes: int, num_prompts: int, budget: int) -> int:
        """Return how many of the `budget` tokens that `num_decodes` decoding rows leave may go to `num_prompts` prompts
        in the next step: all in a burst, for its last prompts, or while the costs are unknown; else at least
        MIN_TOKENS, as far as the budget has them. If no step has had this size of batch, the costs of the next smaller
        one apply. Call it once for each step whose rows may change."""
        if num_decodes <= CROWD * num_prompts:
            self._burst_steps += num_prompts > 0
            return budget
        is_tail = num_prompts > 0 and self._burst_steps > 0
        self._burst_steps = self._burst_steps - 1 if is_tail else 0
        decode_s, token_s = self.seconds(num_decodes, 0), self.token_beside_s
        if is_tail or decode_s is None or token_s is None:
            return budget
        return min(budget, max(int(pause_s(decode_s, num_prompts) / token_s), MIN_TOKENS))


def pause_s(decode_step_s: float, num_prompts: int) -> float:
    """Return the seconds that prompts, or media, may add to a decode step."""
    return max(SHARE * decode_step_s * num_prompts, PAUSE_S)


def blend(old: float | None, new: float, weight: float = _WEIGHT) -> float:
    """Return the moving average `old` with one more value, `new`. `old` is None before the first value."""
    return new if old is None else (1 - weight) * old + weight * new
