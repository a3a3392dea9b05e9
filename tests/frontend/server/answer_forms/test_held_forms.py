"""A form is learned once for all that await it, again if the process dies, and is read from the cache after that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.engine_specs import new_spec
from tokenloom.frontend.forms.answer_forms.form import AnswerForm
from tokenloom.frontend.server.answer_forms.choose import Choice
from tokenloom.frontend.server.answer_forms.form_cache import FormCache
from tokenloom.frontend.server.answer_forms.held_forms import MAX_HELD, TRIES, HeldForms
from tokenloom.frontend.server.answer_forms.history import LostPrefix
from tokenloom.frontend.server.text.chat_template import ChatTemplate
from tokenloom.ipc.codec import Decoder
from tokenloom.ipc.errors import Overloaded
from tokenloom.ipc.helper_process import HelperLost, HelperUnavailable
from tokenloom.ipc.messages.intake import FormLearned, IntakeQuestion

DEADLINE_S = 20.0
FORM = AnswerForm(name="hermes")


class FakeHelper:
    """Helper that answers as `script` says: an error to raise, or None for a form."""

    is_interrupted = False
    num_lost = 0

    def __init__(self, script: list[Exception | None]) -> None:
        self.script, self.asked = script, list[str]()

    def ask(self, frame: bytes, body: object, item_s: float) -> FormLearned:
        question: Any = Decoder(IntakeQuestion).decode(frame)
        self.asked.append(question.template)
        error = self.script.pop(0) if self.script else None
        if error is not None:
            raise error
        return FormLearned(choice=msgspec.json.encode(Choice(form=FORM, origin="tried")))


class FakePool:
    """Pool that does its work at once, in the caller."""

    def __init__(self, helper: FakeHelper) -> None:
        self.helper = helper

    def run(self, work: Callable[[Any], Any], then: Callable[[Any], None], **_: object) -> None:
        try:
            outcome = work(self.helper)
        except Exception as error:
            outcome = error
        then(outcome)

    def cancel(self, job: object) -> None: ...


class Bench:
    """Held forms with a fake intake process; `taken` are the forms that the model's markers were told of."""

    def __init__(self, *script: Exception | None, template: str | None = "the model's") -> None:
        self.helper = FakeHelper(list(script))
        self.taken = list[AnswerForm]()
        model = None if template is None else ChatTemplate(template, {})
        pool: Any = FakePool(self.helper)
        self.forms = HeldForms(new_spec(), model, pool, on_known=self.taken.append)

    def choices(self, *templates: str | None) -> list[Choice]:
        """Await the choices of several templates at once."""

        async def wait() -> list[Choice]:
            async with asyncio.timeout(DEADLINE_S):
                return await asyncio.gather(*map(self.forms.choice, templates))

        return asyncio.run(wait())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_form_is_learned_once_for_all_that_await_it() -> None:
    bench = Bench()
    assert [each.form for each in bench.choices(None, None, "a request's", "a request's")] == [FORM] * 4
    assert bench.helper.asked == ["the model's", "a request's"]
    assert bench.taken == [FORM], "a request's form is not the model's"
    assert bench.forms.of_model is not None


def test_kept_form_needs_no_process() -> None:
    Bench().choices(None)
    bench = Bench()
    assert bench.choices(None)[0].form == FORM
    assert bench.helper.asked == []
    assert bench.taken == [FORM]


def test_the_start_names_the_answer_that_loses_its_prefix(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    digest = bench.forms._maker.digest("the model's", is_of_model=True)
    lost = LostPrefix(answer="text", before="a", generated="b", next_prompt="c")
    FormCache().keep(digest, Choice(form=FORM, origin="tried", lost_prefix=lost))
    with caplog.at_level("INFO", "tokenloom.frontend"):
        bench.choices(None)
    assert [line.partition(":")[0] for line in caplog.messages] == ["calls", "history"]


def test_dead_process_is_asked_again() -> None:
    bench = Bench(HelperLost("was killed by SIGKILL", 0))
    assert bench.choices(None)[0].form == FORM
    assert len(bench.helper.asked) == 2


def test_template_that_kills_each_process_has_no_form() -> None:
    bench = Bench(*[HelperLost("was killed by SIGKILL", 0)] * TRIES)
    assert bench.choices(None)[0].origin == "unknown"
    assert len(bench.helper.asked) == TRIES


def test_template_without_end_is_tried_once() -> None:
    bench = Bench(HelperLost("was killed by SIGVTALRM", 0))
    (choice,) = bench.choices(None)
    assert choice.origin == "unknown"
    assert "CPU time" in choice.why
    assert len(bench.helper.asked) == 1


def test_process_that_cannot_start_is_started_for_the_next_request() -> None:
    bench = Bench(HelperUnavailable("cannot be started"))
    with pytest.raises(Overloaded):
        bench.choices(None)
    assert bench.choices(None)[0].form == FORM


def test_number_of_held_forms_of_requests_is_bounded() -> None:
    bench = Bench()
    bench.choices(None, *(f"template {number}" for number in range(2 * MAX_HELD)))
    bench.choices("one more")
    assert len(bench.forms._tasks) <= MAX_HELD + 2


def test_model_without_a_template_has_the_form_that_the_operator_names() -> None:
    bench = Bench(template=None)
    assert bench.choices(None)[0].form.calls == ()
    assert bench.helper.asked == []
