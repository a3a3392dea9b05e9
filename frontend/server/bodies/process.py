"""The intake process: python -m tokenloom.frontend.server.bodies.process --fd N

Decodes and checks HTTP bodies, and tokenizes texts, that are too large for the frontend's loop. Learns the form of
answers from chat templates. A thread of the frontend (`helpers/intake.py`) starts the process and asks one question at
a time. A body costs the GIL, memory and time of this process alone, which may be killed at any moment. The first text
loads tokenizer and chat template, so that bodies without text do not wait for them.
"""

from __future__ import annotations

import signal
import sys
import time
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ....ipc.blobs.store import BlobStore
from ....ipc.errors import Overloaded, RequestError
from ....ipc.helper_work import run_helper
from ....ipc.messages.intake import (
    CheckBatch,
    FormLearned,
    IntakeAnswer,
    IntakeQuestion,
    LearnForm,
    NotRead,
    PromptRead,
    ReadBody,
    ReadPrompt,
)
from ....ipc.process.faults import maybe_fail
from ....ipc.shortages.failure import shortage_of
from ....ipc.spec.config.engine_spec import EngineSpec
from ...forms.media.held_medium import HeldMedium
from ...forms.media_limits import MediaLimits
from ...forms.prompt_limits import PromptLimits
from .batch_file import check_batch
from .body_error import BodyError
from .body_packer import LARGE_TYPES, BodyPacker
from .body_parser import parse_body
from .form_parser import parse_form

if TYPE_CHECKING:
    from ..prompts.input_processor import InputProcessor

ADDRESS_SPACE_BYTES = 8 << 30  # tokenizing a text of 32 MB takes up to 6 GB
MAX_TEXT_CHARACTERS = 256 << 10  # of a rendered chat in the answer; longer ones are left out
KEEPER = "body"  # user of pins
KEEP_S = 30.0  # longest wait for room in the blob store
RETRY_S = 0.2
TEMPLATE_CPU_S = 2.0  # for a chat with a template of the request; beyond it SIGVTALRM ends the process
TEXT_CHARACTERS_PER_S = 100_000  # that are tokenized at least; they have time of their own


class IntakeProcess:
    """Process that answers the frontend's questions, one at a time, until the socket closes."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._store = BlobStore(Path(spec.run_directory, "media"), spec.config.media_store_bytes)
        self._kept: list[bytes] = []  # digests of the last body's media

    def answer(self, question: IntakeQuestion, body: bytearray) -> IntakeAnswer:
        maybe_fail("intake.read")
        if isinstance(question, CheckBatch):
            return self._check_batch(question)
        limits = PromptLimits.of(self._spec, question.max_bytes_per_token)
        for digest in self._kept:
            self._store.unpin(digest, KEEPER)
        self._kept.clear()
        try:
            if isinstance(question, ReadBody):
                body_type, is_strict = LARGE_TYPES[question.body_type], self._spec.config.strict_fields
                if question.boundary:
                    parsed = parse_form(body, question.boundary, body_type, is_strict=is_strict)
                else:
                    parsed = parse_body(body, body_type, limits, is_strict=is_strict)
                media_limits = MediaLimits.of(self._spec)
                return BodyPacker(limits, media_limits, lambda: self._inputs, self._keep, question.now).pack(parsed)
            if isinstance(question, LearnForm):
                return self._learn_form(question)
            return self._read_prompt(question, limits)
        except BodyError as error:
            return NotRead(message=str(error), status=error.status, param=error.param, code=error.code)
        except RequestError as error:
            return NotRead(message=str(error))
        except Overloaded as error:
            return NotRead(message=str(error), status=503, code="overloaded")
        except OSError as error:
            if (shortage := shortage_of(error, "the request's media cannot be kept")) is None:
                raise
            return NotRead(message=str(shortage), status=503, code="overloaded")
        except MemoryError:
            limit = ADDRESS_SPACE_BYTES >> 30
            return NotRead(message=f"the request's {len(body)} bytes need more than {limit} GiB to be read: send less")

    def _keep(self, medium: HeldMedium) -> None:
        """Put a medium of the body into the blob store, and pin it until the next question: the frontend has pinned it
        by then. While the store is full, wait up to KEEP_S; then raise Overloaded."""
        end = time.monotonic() + KEEP_S
        while True:
            try:
                self._kept.append(self._store.put(medium.data, KEEPER))
                return
            except Overloaded:
                if time.monotonic() >= end:
                    raise
            time.sleep(RETRY_S)

    def _read_prompt(self, question: ReadPrompt, limits: PromptLimits) -> PromptRead:
        if question.prompt is not None and question.cut_side is None:
            limits.check_text(question.prompt)  # before the tokenizer is loaded
        inputs, form = self._inputs, question.chat_form
        if form is not None and form.template is not None:  # it may never end
            from ..prompts.prompt_reader import characters_of  # imports what `_inputs` does

            limit_s = TEMPLATE_CPU_S + characters_of(question) / TEXT_CHARACTERS_PER_S
            signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)
        prompt = inputs.tokenize(question)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        token_ids = limits.kept(prompt.token_ids, question.cut_side)
        has_text = question.chat is not None and len(prompt.text or "") <= MAX_TEXT_CHARACTERS
        text = prompt.text if has_text else None
        return PromptRead(token_ids=token_ids, text=text, first_type_tokens=prompt.first_type_tokens)

    def _check_batch(self, question: CheckBatch) -> IntakeAnswer:
        try:
            return check_batch(question)
        except OSError as error:
            return NotRead(message=f"the input file cannot be read: {error.strerror}")

    def _learn_form(self, question: LearnForm) -> FormLearned:
        from ..answer_forms.template_choice import TemplateChoice  # these import jinja2
        from ..text.chat_template import ChatTemplate

        try:
            template = self._inputs.template_for(question.template)
        except RequestError:  # the model has neither a template nor a tokenizer
            template = ChatTemplate("", {})
        maker = TemplateChoice(template, self._spec.config, Path(self._spec.tokenizer_folder))
        choice = maker.choose(question.template, is_of_model=question.is_of_model, has_timer=True)
        return FormLearned(choice=msgspec.json.encode(choice))

    @cached_property
    def _inputs(self) -> InputProcessor:
        from ..media.model_media import ModelMedia  # these import tokenizers and jinja2
        from ..prompts.input_processor import InputProcessor
        from ..text.chat_template import ChatTemplate
        from ..text.tokenizer import Tokenizer

        spec = self._spec
        tokenizer = Tokenizer.load(Path(spec.tokenizer_folder), spec.config.trust_remote_code)
        media = ModelMedia.load(spec, tokenizer)
        if media is None:
            return InputProcessor(spec, tokenizer, ChatTemplate.of(spec, tokenizer))
        template = ChatTemplate.of(spec, tokenizer, media.placeholders.marker)
        return InputProcessor(spec, tokenizer, template, media.prepare)


def main() -> int:
    return run_helper(
        "intake",
        "Reads large requests.",
        IntakeQuestion,
        lambda spec: IntakeProcess(spec).answer,
        ADDRESS_SPACE_BYTES,
    )


if __name__ == "__main__":
    sys.exit(main())
