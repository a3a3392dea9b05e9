"""CallRules: translates a constraint on calls in a model's own form to a grammar of the library.

The joints of the form are written as the chat template renders them. Text before calls and thoughts hold no first
marker of a call, so that a call always begins where a reader finds one.
"""

from __future__ import annotations

from .....ipc.params.calls_constraint import CallsConstraint
from .arguments import any_of
from .form_rules import FormRules
from .lark_rules import Closing, LarkRules, quoted, without
from .own_thought import own_thought, space


class CallRules:
    """Translator of one constraint. `is_exact`: numbers that the library would round become rules; otherwise bounds are
    moved inwards."""

    def __init__(self, constraint: CallsConstraint, rules: LarkRules, *, is_exact: bool = True) -> None:
        self._constraint = constraint
        self._rules = rules
        forms = (constraint.form, *constraint.others)
        self._forms = [
            FormRules(form, constraint, rules, f"c{number}", is_exact=is_exact) for number, form in enumerate(forms)
        ]
        self._markers = [form.marker for form in self._forms if form.marker]

    def text(self) -> str:
        """Return the grammar in Lark. RequestError, with the tool's name, for a schema that cannot be served."""
        if self._constraint.has_text:
            start = self._with_text()
        else:
            start = f"{self._thought()} {self._space()} {self._forms[0].answer()}"
        return self._rules.text(start, [target for form in self._forms for target in form.targets])

    def _thought(self) -> str:
        """Return an expression for a thought that may come first; "" without thoughts."""
        if self._constraint.thought is None:
            return ""
        return f"({own_thought(self._rules, self._constraint.thought, self._markers)})?"

    def _space(self) -> str:
        """Return an expression for the white space that templates write between a thought or text and calls; "" if
        neither can come before them: then they begin as the template shows it."""
        if self._constraint.thought is None and not self._constraint.may_begin_with_space:
            return ""
        return space(self._rules)

    def _with_text(self) -> str:
        """Return an expression for any text, behind which calls may stand."""
        if not self._forms[0].marker:
            return f"({self._forms[0].answer()} | {self._rules.terminal(self._other_text())})"
        text = without(self._markers)
        specials = self._rules.specials_except(self._markers)
        others = f"({self._rules.terminal(text)}? {specials})*" if specials else ""
        begun = any_of(
            f"{self._rules.closed(text, Closing('', form.marker))} {form.behind_marker()}" for form in self._forms
        )
        return f"{others} ({self._rules.terminal(text)}? | {begun})"

    def _other_text(self) -> str:
        """Return a terminal for text that does not begin as a call of a form without a start."""
        begins = " | ".join(map(quoted, self._forms[0].begins()))
        return f"/(?s:.*)/ & ~(/\\s*/ ({begins}) /(?s:.*)/)"
