"""HeldForms: the forms of answers that a frontend uses, of its model's chat template and of templates of requests.

A form is read from the cache of this user, or learned in an intake process, once for all that await it. An intake
process that dies over it is asked again, unless the template takes too much time: then the form is unknown.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import msgspec

from ....ipc.errors import Overloaded, RequestError
from ....ipc.messages.intake import FormLearned, LearnForm, NotRead
from ....ipc.shortages.failure import RETRY_S
from ....ipc.spec.config.engine_spec import EngineSpec
from ...forms.answer_forms.form import AnswerForm
from ...forms.answer_forms.named import named_form
from ..helpers.intake import IntakeHelper, IntakePool, TemplateTooSlow, ask_intake
from ..helpers.pool import WAIT_S
from ..helpers.task import in_event_loop, reply_of
from ..reuse.template_check import unstable_line
from ..text.chat_template import ChatTemplate
from .choose import AUTO, Choice, unknown
from .form_cache import FormCache
from .shown_form import difference_line, form_line, history_line
from .template_choice import TemplateChoice

logger = logging.getLogger("tokenloom.frontend")

MAX_HELD = 16  # forms of requests' templates
TRIES = 3
OVERLOADED = 503  # status of a NotRead: the process is short of something
OWNER = "answer forms"


class HeldForms:
    """Owner of the choices, and of the tasks that wait for them. All methods but `find` run in the event loop."""

    def __init__(
        self,
        spec: EngineSpec,
        template: ChatTemplate | None,
        intake: IntakePool,
        *,
        on_known: Callable[[AnswerForm], None],
    ) -> None:
        """`template`: the model's; None if it has none. `on_known` is called with the model's form."""
        self._config = spec.config
        self._intake = intake
        self._cache = FormCache()
        self._on_known = on_known
        self._template = template
        self._maker = TemplateChoice(template or ChatTemplate("", {}), spec.config, Path(spec.tokenizer_folder))
        self._tasks = OrderedDict[str | None, asyncio.Task[Choice]]()
        self.of_model: Choice | None = None  # the model's choice, once it is known

    async def choice(self, template: str | None = None) -> Choice:
        """Return the choice for a request's template, or for the model's. Overloaded if no process can be started to
        learn it."""
        task = self._tasks.get(template)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.ensure_future(self._find(template))
            self._tasks[template] = task
        self._tasks.move_to_end(template)
        self._drop_oldest()
        return await asyncio.shield(task)

    def _drop_oldest(self) -> None:
        requested = [template for template, task in self._tasks.items() if template is not None and task.done()]
        for template in requested[: max(0, len(requested) - MAX_HELD)]:
            del self._tasks[template]

    async def _find(self, template: str | None) -> Choice:
        return await in_event_loop(self.find(template))

    async def find(self, template: str | None = None) -> Choice:
        """Return the choice for a request's template, or for the model's, to a task of the frontend. Errors: see
        `choice`."""
        if template is None and self.of_model is not None:
            return self.of_model
        if template is None and self._template is None:
            return self._known(Choice(form=self._named(), origin="named"))
        source = self._maker.of_model
        is_of_model = template is None
        if template is not None:
            source = template
        digest = self._maker.digest(source, is_of_model=is_of_model)
        choice = self._cache.read(digest)
        if choice is None:
            choice = await self._learn(LearnForm(template=source, is_of_model=is_of_model))
            self._cache.keep(digest, choice)
        if template is not None:
            return choice
        for line in filter(None, (form_line(choice), history_line(choice))):
            logger.info("%s", line)
        unstable = "" if self._template is None else unstable_line(self._template)
        for warning in filter(None, (difference_line(choice), unstable)):
            logger.warning("%s", warning)
        return self._known(choice)

    def _known(self, choice: Choice) -> Choice:
        self.of_model = choice
        self._on_known(choice.form)
        return choice

    async def _learn(self, order: LearnForm) -> Choice:
        def ask(helper: IntakeHelper) -> Choice:
            for _ in range(TRIES):
                try:
                    answer = ask_intake(helper, order)
                except RequestError as error:
                    why = str(error)
                    if helper.is_interrupted or isinstance(error, TemplateTooSlow):
                        break
                    continue
                if isinstance(answer, NotRead):
                    if answer.status == OVERLOADED:
                        raise Overloaded(answer.message, RETRY_S)
                    why = answer.message
                    break
                assert isinstance(answer, FormLearned), "a LearnForm is answered by FormLearned or NotRead"
                return msgspec.json.decode(answer.choice, type=Choice)
            return unknown(why, self._config.tool_call_parser, self._config.reasoning_parser)

        return await reply_of(
            lambda then: self._intake.run(ask, then, num_bytes=1, owner=OWNER, wait_s=WAIT_S), self._intake.cancel
        )

    def _named(self) -> AnswerForm:
        names = (self._config.tool_call_parser, self._config.reasoning_parser)
        tool_parser, reasoning_parser = ({AUTO: "none"}.get(name, name) for name in names)
        return named_form(tool_parser, reasoning_parser)
