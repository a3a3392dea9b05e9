"""InputProcessor: converts a client's Submit to a validated request for the core.

Checks everything that needs the model (vocabulary, length, end tokens); decoding has already checked the ranges of the
parameters. Every refusal is a RequestError with the numbers and the remedy. Keeps no state of requests. `tokenize` and
`detokenize` may run in any thread, all other methods only in the frontend's loop.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import cached_property

import msgspec

from ....ipc.codec import decode_ids, encode_ids, num_ids
from ....ipc.errors import ProtocolError, RequestError
from ....ipc.messages.client import ChatForm, Child, Submit
from ....ipc.messages.core import EngineCoreRequest
from ....ipc.messages.intake import ReadPrompt
from ....ipc.params.sampling_params import MAX_CHILDREN, CutSide, SamplingParams, child_seed
from ....ipc.spec.config.comma_list import comma_list
from ....ipc.spec.config.engine_spec import EngineSpec
from ...forms.answer_forms.form import AnswerForm
from ...forms.media_limits import MediaLimits
from ...forms.parsers.names import find_form
from ...forms.prompt_limits import PromptLimits
from ...forms.prompts import check_text
from ..text.chat_template import MODEL_FORM, ChatTemplate
from ..text.detokenizer import DetokenizerFactory
from ..text.tokenizer import Tokenizer, head_of, tail_of
from .clip_prompts import check_clip
from .needed_text import needed_text
from .pair_prompts import PairPrompts
from .pooling_rules import PoolingRules
from .prompt import ProcessedRequest, Prompt
from .prompt_question import question_of
from .thought_markers import ThoughtMarkers

MAX_DETOKENIZED = 1 << 20  # most tokens in one call
MAX_NAMED_IDS = 32  # bad token ids listed in one error
MAX_STRING_CHARACTERS = 4096  # of a request's stop strings together, and of its bad words together
MAX_SHOWN = 64  # most special tokens to show where the others are skipped
MAX_STEP_LOGPROBS = 6 << 20  # of prompt tokens in one step: at 8 bytes each they fit into a message of 64 MiB
MAX_LOGPROBS = 32 << 20  # of an answer, or of a prompt: for a slow reader we keep all of them


class InputProcessor:
    """Validator and tokenizer of requests for one model. Owns the generator of seeds for requests that give none."""

    def __init__(
        self,
        spec: EngineSpec,
        tokenizer: Tokenizer | None,
        chat_template: ChatTemplate | None,
        prepare: Callable[[str], str] = str,
    ) -> None:
        """`prepare` converts a prompt to the text that is tokenized."""
        self._prepare = prepare
        self._vocab_size = spec.model.vocab_size
        self._default_timeout_s, self._max_timeout_s = spec.config.default_timeout_s, spec.config.max_timeout_s
        self._pooling, self._num_clip_tokens = PoolingRules(spec.model), spec.model.num_clip_tokens
        self._tokenizer = tokenizer
        self.limits = PromptLimits.of(spec, None if tokenizer is None else tokenizer.max_bytes_per_token)
        self.media_limits = MediaLimits.of(spec)
        self.chat_template = chat_template
        template = "" if chat_template is None else chat_template.tool_source
        self.take_form(find_form(template, spec.config.tool_call_parser, spec.config.reasoning_parser))
        self.eos_token_id = None if tokenizer is None else tokenizer.eos_token_id
        fallback = () if self.eos_token_id is None else (self.eos_token_id,)
        self.eos_token_ids = frozenset(spec.model.eos_token_ids or fallback)
        self._max_logprobs, self._max_step_tokens = spec.max_logprobs, spec.max_num_batched_tokens
        self._processor_paths = comma_list(spec.config.allowed_logits_processors)
        self._trusts_templates = spec.config.trust_request_chat_template
        self._seeds = random.Random(spec.config.seed)
        self._special_ids_by_markers: dict[tuple[str, ...], bytes] = {}

    def take_form(self, form: AnswerForm) -> None:
        """Take the form of the model's answers, once it is learned; until then it is guessed from the template."""
        self.answer_form = form
        self.thoughts = ThoughtMarkers(form, self._tokenizer, self._check_ids)

    @property
    def max_model_len(self) -> int:
        """The largest length of a request, prompt and answer together, that model and KV pool allow."""
        return self.limits.max_model_len

    def shorten(self, max_model_len: int) -> None:
        """Lower max_model_len to the capacity of the KV pool; called once its size is known."""
        self.limits = msgspec.structs.replace(self.limits, max_model_len=max_model_len)

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    # ── prompts ──────────────────────────────────────────────────────────────────────────────────────────────────

    def question_of(self, submit: Submit) -> ReadPrompt:
        """Return the order to tokenize a request's prompt. RequestError if its fields do not fit together."""
        return question_of(submit, self.limits, self._pooling.config)

    def encode(self, text: str, add_special_tokens: bool, *, cut_side: CutSide | None = None) -> Prompt:
        """Tokenize a text. `add_special_tokens` adds the special tokens that the checkpoint puts around a prompt; not
        for a text after a clip, which is the start of the answer.

        `cut_side`: the side of a later truncation; tokens that it drops may be missing. If it is None, RequestError for
        a text that is certain not to fit."""
        tokenizer = self._text_tokenizer()
        add_special_tokens = add_special_tokens and not self._num_clip_tokens
        needed = self._prepare(needed_text(text, tokenizer, self.limits, cut_side))
        token_ids = encode_ids(tokenizer.encode(needed, add_special_tokens=add_special_tokens))
        return Prompt(head_of(tokenizer, token_ids, self.max_model_len) if cut_side == "right" else token_ids, text)

    def tokenize(self, question: ReadPrompt) -> Prompt:
        """Tokenize a text, or a chat after rendering it; return token ids as they are. RequestError unless exactly one
        of prompt, token_ids and chat is given."""
        num_given = sum(each is not None for each in (question.prompt, question.token_ids, question.chat))
        if num_given != 1:
            raise RequestError(f"{num_given} of prompt, prompt_token_ids and chat are given: give exactly one")
        if question.token_ids is not None:
            return Prompt(question.token_ids, None)
        if question.chat is not None:
            form = question.chat_form or MODEL_FORM
            text = self.template_for(form.template).render(question.chat, form, question.now)
            return self.encode(text, form.add_special_tokens, cut_side=question.cut_side)
        if question.text_pair is not None:
            pairs = PairPrompts(self._text_tokenizer(), self._pooling.config.pair_template)
            first, second = check_text(question.prompt or ""), check_text(question.text_pair)
            return pairs.prompt(first, second, question.num_kept, question.cut_side)
        return self.encode(check_text(question.prompt or ""), question.add_special_tokens, cut_side=question.cut_side)

    def check_template(self, form: ChatForm) -> None:
        """Raise RequestError if an HTTP request has a chat template, unless --trust-request-chat-template is set."""
        if form.template is not None and not self._trusts_templates:
            raise RequestError(
                "chat_template is not taken from requests: leave it out, or start with --trust-request-chat-template"
            )

    @cached_property
    def detokenizers(self) -> DetokenizerFactory | None:
        """The factory of detokenizers; None if there is no tokenizer."""
        return None if self._tokenizer is None else DetokenizerFactory(self._tokenizer)

    def is_added_token(self, text: str) -> bool:
        """Return whether a text is one token that the tokenizer finds wherever the text stands."""
        return self._tokenizer is not None and text in self._tokenizer.added_ids

    def special_ids_of(self, markers: tuple[str, ...]) -> bytes:
        """Return the encoded ids of the special tokens among the tokens of `markers`. The result for each tuple is
        cached."""
        tokenizer = self._tokenizer
        if markers not in self._special_ids_by_markers and tokenizer is not None:
            found = {
                token_id
                for marker in markers
                for token_id in tokenizer.encode(marker, add_special_tokens=False)
                if token_id in tokenizer.special_ids and tokenizer.token_string(token_id) in marker  # not <unk>
            }
            self._special_ids_by_markers[markers] = encode_ids(sorted(found))
        return self._special_ids_by_markers.get(markers, b"")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of text for which a token stands; they may be a part of a character."""
        assert self.detokenizers is not None, "without a tokenizer no token has a text"
        return self.detokenizers.texts.bytes_of(token_id)

    def token_string(self, token_id: int) -> str:
        """Return a token's spelling in the vocabulary."""
        return self._text_tokenizer().token_string(token_id)

    def detokenize(self, token_ids: bytes) -> str:
        """Return the text of `token_ids` (encoded int32), including special tokens. Ids above the vocabulary are not
        refused. RequestError for more than MAX_DETOKENIZED ids, for a negative id, or if the model has no tokenizer."""
        if num_ids(token_ids) > MAX_DETOKENIZED:
            raise RequestError(f"{num_ids(token_ids)} tokens are to become text, at most {MAX_DETOKENIZED}: send fewer")
        ids = _decode_ids(token_ids, "token_ids")
        if ids and min(ids) < 0:
            raise RequestError(f"token_ids holds {min(ids)}: ids begin at 0")
        return self._text_tokenizer().decode(ids, skip_special_tokens=False)

    def template_for(self, source: str | None) -> ChatTemplate:
        """Return the template that renders a request's template, or the model's chats if `source` is None. RequestError
        if there is none."""
        if self.chat_template is None and source is not None and self._tokenizer is not None:
            return ChatTemplate("", self._tokenizer.special_tokens)
        if self.chat_template is None:
            self._pooling.check_chats()
            raise RequestError("this model has no chat template: send a prompt, or start with --chat-template FILE")
        return self.chat_template

    def _text_tokenizer(self, mend: str = ": send prompt_token_ids, or start with --tokenizer") -> Tokenizer:
        """Return the tokenizer. If the model has none, raise RequestError, with `mend` at the end of its message."""
        if self._tokenizer is None:
            raise RequestError(f"this model has no tokenizer{mend}")
        return self._tokenizer

    def _check_ids(self, frame: bytes, name: str) -> None:
        """Raise RequestError if an id in `frame` is not in the model's vocabulary (the tokenizer's may be larger)."""
        token_ids = _decode_ids(frame, name)
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self._vocab_size):
            position, bad = next(
                (i, token_id) for i, token_id in enumerate(token_ids) if not 0 <= token_id < self._vocab_size
            )
            raise RequestError(
                f"{name}[{position}] is {bad}, which is out of vocabulary: the model's ids are 0 to "
                f"{self._vocab_size - 1}"
            )

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def process(self, submit: Submit, prompt: Prompt, now: float) -> ProcessedRequest:
        """Check `submit`, and return it with the defaults, seeds and tokens that the core needs. `prompt`: its
        tokenized prompt; `now`: unix seconds. RequestError for invalid parameters or a prompt that does not fit."""
        params, pooling = submit.params, submit.pooling
        if pooling is None:
            self._pooling.check_generates()
        else:
            params, pooling = self._pooling.sampling_params(params, pooling), self._pooling.resolve(pooling, prompt)
        prompt = self._truncated(prompt, params, num_reserved=0 if pooling else max(params.max_tokens or 0, 1))
        num_prompt_tokens = num_ids(prompt.token_ids)
        if not prompt.token_ids:
            why = "" if prompt.text is None else ", since it is empty and the tokenizer adds none"
            raise RequestError(f"the prompt has no tokens{why}: give at least one")
        if self._num_clip_tokens:
            check_clip(submit, prompt, self._num_clip_tokens)
        self.limits.check_length(num_prompt_tokens, is_answered=pooling is None)  # before the ids are decoded
        if pooling is not None:
            self._pooling.check_result(pooling, num_prompt_tokens)
        if not submit.children:
            self.limits.check_share(1, params.n, num_prompt_tokens)
        self._check_ids(prompt.token_ids, "prompt_token_ids")
        room = self.max_model_len - num_prompt_tokens
        if params.min_tokens > room:
            raise RequestError(
                f"min_tokens is {params.min_tokens}, but after a prompt of {num_prompt_tokens} tokens max_model_len "
                f"{self.max_model_len} leaves room for {room}: lower it or shorten the prompt"
            )
        params = self._with_timeout(params)
        self._check_strings(params)
        self._check_tokens(params)
        self._check_shown(submit.shown_token_ids)
        params = params.traced(room)
        if not math.isfinite(submit.arrival_time) or submit.arrival_time < 0:
            raise RequestError(f"arrival_time must be unix seconds or 0, got {submit.arrival_time}")
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        params = self._with_logprobs(params, num_prompt_tokens, max_tokens)
        eos_token_ids = frozenset() if params.ignore_eos else self.eos_token_ids
        thoughts = self.thoughts.of_request(submit)
        constraint = thoughts.place_of(params, prompt.token_ids)
        core = EngineCoreRequest(
            children=[],
            prompt_token_ids=prompt.token_ids,
            params=params,
            max_tokens=max(max_tokens, 1),
            stop_token_ids=sorted(eos_token_ids.union(params.stop_token_ids or ())) if max_tokens else [],
            arrival_time=submit.arrival_time or now,
            pooling=pooling,
            attempt=submit.attempt,
            bad_words=self._bad_words(params),
            logits_processors=[self._processor_place(path) for path in params.logits_processors or ()],
            thought_markers=thoughts.of_budget(params, constraint),
            constraint_begins=constraint.begins,
            constraint_triggers=constraint.triggers,
            constraint_repeats=constraint.repeats,
            media=prompt.spans,
        )
        return ProcessedRequest(prompt=prompt, children=self._children(submit, max_tokens), core=core)

    def _truncated(self, prompt: Prompt, params: SamplingParams, num_reserved: int) -> Prompt:
        """Return the prompt after applying truncate_prompt_tokens; -1 leaves room for `num_reserved` tokens."""
        if params.truncate_prompt_tokens is None:
            return prompt
        num_kept = params.truncate_prompt_tokens
        if num_kept == -1:
            num_kept = max(self.max_model_len - num_reserved, 1)
        token_ids = prompt.token_ids
        if params.truncation_side == "right":
            kept = head_of(self._tokenizer, token_ids, num_kept)
        else:
            kept = tail_of(self._tokenizer if self._pooling.keeps_begin else None, token_ids, num_kept)
        return msgspec.structs.replace(prompt, token_ids=kept)

    def _check_tokens(self, params: SamplingParams) -> None:
        """Raise RequestError for ids outside the vocabulary, or if min_tokens is set but only end tokens are
        allowed."""
        named = (
            ("logit_bias has {},", params.logit_bias),
            ("allowed_token_ids has {},", params.allowed_token_ids),
            ("stop_token_ids has {}, which never comes:", params.stop_token_ids),
            ("logprob_token_ids has {},", params.logprob_token_ids),
            ("trace_decode_token_ids has {}, which are out-of-vocab:", params.trace_decode_token_ids),
        )
        for message, token_ids in named:
            bad = [str(token_id) for token_id in token_ids or () if token_id >= self._vocab_size]
            if bad:
                named_ids = ", ".join(bad[:MAX_NAMED_IDS]) + " …" * (len(bad) > MAX_NAMED_IDS)
                raise RequestError(
                    f"{message.format(named_ids)} the model's ids are 0 to {self._vocab_size - 1}, its vocabulary size "
                    f"is {self._vocab_size}"
                )
        allowed = frozenset(params.allowed_token_ids or ())
        if allowed and params.min_tokens and allowed <= self.eos_token_ids.union(params.stop_token_ids or ()):
            raise RequestError(
                f"allowed_token_ids has only tokens that end the answer and min_tokens is {params.min_tokens}: "
                "allow others too, or lower min_tokens to 0"
            )

    def _check_shown(self, token_ids: bytes) -> None:
        """Raise RequestError for more than MAX_SHOWN ids of special tokens to show, or for bytes that are not ids."""
        num_shown = len(_decode_ids(token_ids, "shown_token_ids"))
        if num_shown > MAX_SHOWN:
            raise RequestError(f"shown_token_ids has {num_shown} ids, at most {MAX_SHOWN} are taken: send fewer")

    def _with_logprobs(self, params: SamplingParams, num_prompt_tokens: int, max_tokens: int) -> SamplingParams:
        """Return the parameters with -1 in logprobs and prompt_logprobs replaced by the vocabulary's size. RequestError
        above --max-logprobs or the size limits of messages."""
        step_tokens = min(num_prompt_tokens, self._max_step_tokens)
        for name, num_tokens, num_at_once, mend in (
            ("logprobs", max_tokens, 1, "lower max_tokens"),
            ("prompt_logprobs", num_prompt_tokens, step_tokens, "shorten the prompt"),
        ):
            asked = getattr(params, name)
            if asked is None:
                continue
            count = self._vocab_size if asked == -1 else asked
            if count > self._max_logprobs:
                every = f", which is all {count} tokens" * (asked == -1)
                raise RequestError(
                    f"{name} is {asked}{every}, this engine gives [0, {self._max_logprobs}]: lower it or raise "
                    "--max-logprobs (-1 allows all)"
                )
            if (count + 1) * num_tokens > MAX_LOGPROBS or (count + 1) * num_at_once > MAX_STEP_LOGPROBS:
                raise RequestError(
                    f"{name} is {asked}, which makes {(count + 1) * num_tokens} numbers for {num_tokens} tokens; at "
                    f"most {MAX_LOGPROBS} fit, {MAX_STEP_LOGPROBS} of them in one step: lower it or {mend}"
                )
            if asked == -1:
                params = params.replace(**{name: count})
        return params

    def _bad_words(self, params: SamplingParams) -> list[bytes]:
        """Return the tokens of each bad word in two forms: at the start of a text, and after a space."""
        if not params.bad_words:
            return []
        tokenizer, words = self._text_tokenizer(), list[bytes]()
        for word in params.bad_words:
            for text in (word.lstrip(), " " + word.lstrip()):
                token_ids = encode_ids(tokenizer.encode(text, add_special_tokens=False))
                self._check_ids(token_ids, "bad_words")
                if token_ids and token_ids not in words:
                    words.append(token_ids)
        return words

    def _processor_place(self, path: str) -> int:
        if path not in self._processor_paths:
            raise RequestError(
                f"logits_processors has {path!r:.200}, which this engine does not run: the operator may allow it with "
                "--allowed-logits-processors"
            )
        return self._processor_paths.index(path)

    def wait_s(self, params: SamplingParams) -> float:
        """Return for how many seconds, by its timeouts, a request may wait for tokenization; inf if there are none."""
        default_s = self._max_timeout_s if self._default_timeout_s is None else self._default_timeout_s
        timeout_s = default_s if params.timeout_s is None else params.timeout_s
        return min((each for each in (timeout_s, params.queue_timeout_s) if each is not None), default=math.inf)

    def _with_timeout(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with timeout_s, if absent, set to the engine's default or else its maximum.
        RequestError if it is above the maximum."""
        default_s, max_s = self._default_timeout_s, self._max_timeout_s
        if params.timeout_s is not None:
            if max_s is not None and params.timeout_s > max_s:
                raise RequestError(f"timeout_s is {params.timeout_s:g}, this engine allows at most {max_s:g}: lower it")
            return params
        timeout_s = max_s if default_s is None else default_s
        return params if timeout_s is None else params.replace(timeout_s=timeout_s)

    def _check_strings(self, params: SamplingParams) -> None:
        """Raise RequestError if stop strings or bad words are too long, or if there is no tokenizer to find them
        with."""
        for name, strings, mend in (
            ("stop", params.stop_strings, ", so that stop strings cannot be found: use stop_token_ids"),
            ("bad_words", params.bad_words or (), ", so that bad_words have no tokens: use logit_bias"),
        ):
            if strings:
                self._text_tokenizer(mend)
            num_characters = sum(map(len, strings))
            if num_characters > MAX_STRING_CHARACTERS:
                raise RequestError(
                    f"{name} has {num_characters} characters in all, at most {MAX_STRING_CHARACTERS} are allowed: "
                    "shorten them or send fewer"
                )

    def new_seed(self) -> int:
        """Return a seed for a request without one."""
        return self._seeds.getrandbits(63)

    def _children(self, submit: Submit, max_tokens: int) -> list[Child]:
        """Return the answers of a resumed request, or the n answers of a new request with their seeds. RequestError if
        an answer of a resumed request is invalid."""
        if not submit.children:
            seed = self.new_seed() if submit.params.seed is None else submit.params.seed
            return [Child(index=i, seed=child_seed(seed, i)) for i in range(submit.params.n)]
        indices = [child.index for child in submit.children]
        if len(indices) > MAX_CHILDREN or len(set(indices)) < len(indices) or min(indices) < 0:
            raise RequestError(f"children have the indices {indices[:8]}…: give each of at most {MAX_CHILDREN} once")
        for child in submit.children:
            num_tokens = num_ids(child.output_token_ids)
            if num_tokens > max_tokens:
                raise RequestError(f"children[{child.index}] has {num_tokens} tokens, max_tokens is {max_tokens}")
            self._check_ids(child.output_token_ids, f"children[{child.index}].output_token_ids")
            if not -(2**63) <= child.seed < 2**64:
                raise RequestError(f"children[{child.index}].seed is {child.seed}: it must fit in 64 bits")
        return submit.children


def _decode_ids(frame: bytes, name: str) -> Sequence[int]:
    try:
        return decode_ids(frame)
    except ProtocolError as error:
        raise RequestError(f"{name}: {error}") from None
