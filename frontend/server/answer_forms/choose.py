"""Choose the form of answers: the first candidate that returns all probes, or the operator's.

A named form that the operator gives is taken even if it fails. Where the template shows no calls of earlier answers,
nothing can be proved: a text in the template that stands for a named form decides, as models of that family write it.
Knows no server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, TypeAlias

import msgspec

from ...forms.answer_forms.form import AnswerForm
from ...forms.answer_forms.named import FORMS, HARMONY, THOUGHTS, named_form, with_also_written
from ...forms.parsers.names import find_tool_parser
from .history import LostPrefix, first_difference
from .learn import UnknownForm, learn
from .probe import MINOR, PROBES
from .prove import ProbeResult, prove
from .renderings import HostileTemplate, Render, Renderings
from .spaces import learn_spaces
from .thoughts import Thoughts, learn_thoughts

Origin: TypeAlias = Literal["named", "response_template", "learned", "tried", "sign", "unknown"]
AUTO = "auto"
_CALLS = frozenset(probe.name for probe in PROBES if probe.answer.calls)


class Choice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The form of answers with the results of the probes, and what the next turn's prompt makes of an answer."""

    form: AnswerForm
    origin: Origin  # the operator names it; the checkpoint gives it; learned; the first named one that returns; a sign
    results: list[ProbeResult] = []
    why: str = ""  # the form is unknown, or why it is taken though not all probes return
    lost_prefix: LostPrefix | None = None  # None: the next prompt begins with each answer that the template shows

    @property
    def num_shown(self) -> int:
        """The number of probes that the template shows."""
        return sum(each.outcome != "not shown" for each in self.results)

    @property
    def num_returned(self) -> int:
        return sum(each.outcome == "returned" for each in self.results)

    @property
    def different(self) -> list[ProbeResult]:
        return [each for each in self.results if each.outcome == "different"]


def choose(
    render: Render,
    source: str,
    *,
    tool_parser: str = AUTO,
    reasoning_parser: str = AUTO,
    given: AnswerForm | None = None,
    keeps_text: Callable[[], bool] = lambda: True,
) -> Choice:
    """Return the form of a template's answers. `render`: see Renderings; `source`: the template; `tool_parser`,
    `reasoning_parser`: names, or auto; `given`: the form that comes with the checkpoint; `keeps_text()`: whether the
    template shows text beside calls."""
    try:
        shown = Renderings(render)
        choice = _Chooser(shown, source, tool_parser, reasoning_parser, given).choice()
        form = msgspec.structs.replace(choice.form, spaces=learn_spaces(shown, choice.form.thought))
        return msgspec.structs.replace(
            choice, form=form, lost_prefix=first_difference(shown.whole_text, form, keeps_text)
        )
    except HostileTemplate as error:
        return unknown(str(error), tool_parser, reasoning_parser)


def unknown(why: str, tool_parser: str, reasoning_parser: str) -> Choice:
    """Return the choice for a template that cannot be rendered: the form that the operator names, or none."""
    thoughts = {AUTO: "none"}.get(reasoning_parser, reasoning_parser)
    if tool_parser == AUTO:
        return Choice(form=named_form("none", thoughts), origin="unknown", why=why)
    return Choice(form=named_form(tool_parser, thoughts), origin="named", why=why)


class _Chooser:
    def __init__(
        self, shown: Renderings, source: str, tool_parser: str, reasoning_parser: str, given: AnswerForm | None
    ) -> None:
        self._shown = shown
        self._source = source
        self._tool_parser = tool_parser
        self._reasoning_parser = reasoning_parser
        self._given = given
        self._thoughts = self._find_thoughts()
        if self._thoughts.texts is not None:
            shown.know_thought(*self._thoughts.texts)
        self._why = "the template shows no calls"

    def choice(self) -> Choice:
        if self._tool_parser != AUTO:
            form = self._with_thoughts(named_form(self._tool_parser, "none"))
            results = prove(form, self._shown)
            if not form.calls and form.reader == "machine":  # no calls are read: the probes of calls say nothing
                results = [each for each in results if each.probe not in _CALLS]
            return Choice(form=form, origin="named", results=results)
        nearly: Choice | None = None
        for origin, form in self._candidates():
            choice = Choice(form=form, origin=origin, results=prove(form, self._shown))
            if not _shows_calls(choice.results):
                continue
            if not choice.different:
                return choice
            failed = {each.probe for each in choice.different}
            if nearly is None and failed <= MINOR:
                nearly = choice
            if origin == "learned":
                self._why = f"{choice.different[0].probe}: {choice.different[0].difference}"
        return nearly or self._unproved()

    def _candidates(self) -> Iterator[tuple[Origin, AnswerForm]]:
        """Yield the forms to try, in order. A named form with a reader of its own comes before the learned one if the
        template bears its sign: its models vary the template's form."""
        if self._given is not None:
            yield "response_template", self._given
        sign = self._sign()
        if sign.reader == "harmony":
            yield "tried", sign
        try:
            yield "learned", with_also_written(learn(self._shown, self._thoughts))
        except UnknownForm as error:
            self._why = str(error)
        for form in FORMS.values():
            yield "tried", self._with_thoughts(form)

    def _unproved(self) -> Choice:
        """Return the form of which the template bears a sign, if the template shows no calls; else one without
        calls."""
        none = self._with_thoughts(named_form("none", "none"))
        proved = prove(none, self._shown)
        results = [each for each in proved if each.outcome == "returned"]
        if not _shows_calls(proved):
            return Choice(form=self._sign(), origin="sign", results=results, why=self._why)
        return Choice(form=none, origin="unknown", results=results, why=self._why)

    def _sign(self) -> AnswerForm:
        """Return the named form for which a text in the template stands."""
        return self._with_thoughts(FORMS[find_tool_parser(self._source)])

    def _find_thoughts(self) -> Thoughts:
        if self._reasoning_parser == AUTO:
            pairs = [pair for pair in THOUGHTS.values() if any(each in self._source for each in pair)]
            return learn_thoughts(self._shown, pairs)
        form = named_form("none", self._reasoning_parser)
        return Thoughts(form.thought, begins_inside=form.begins_inside)

    def _with_thoughts(self, form: AnswerForm) -> AnswerForm:
        if form.reader == "harmony" or self._reasoning_parser == HARMONY:
            return named_form("openai", HARMONY)
        return msgspec.structs.replace(
            form,
            thought=self._thoughts.texts,
            begins_inside=self._thoughts.begins_inside,
            content_open=self._thoughts.content_open,
            turn_end=self._shown.turn_end.strip(),
        )


def _shows_calls(results: Iterable[ProbeResult]) -> bool:
    return any(each.probe in _CALLS and each.outcome != "not shown" for each in results)
