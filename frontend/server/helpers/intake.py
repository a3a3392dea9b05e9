"""Questions to intake processes (bodies/process.py), and the errors that their callers get.

A question that ends the process fails alone: a question that finds the process dead is sent again to a new one. A
process that does not start is not the question's fault.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypeAlias

from ....ipc.codec import encode
from ....ipc.errors import Overloaded, RequestError
from ....ipc.helper_process import HelperLost, HelperUnavailable
from ....ipc.messages.intake import IntakeAnswer, IntakeQuestion
from ....ipc.process.log import is_worth_a_line
from ....ipc.shortages.failure import RETRY_S
from ....ipc.spec.config.engine_spec import EngineSpec
from .helper import Helper, HelperOverdue
from .pool import HelperPool

logger = logging.getLogger("tokenloom.frontend")

IntakeHelper: TypeAlias = Helper[IntakeAnswer]
IntakePool: TypeAlias = HelperPool[IntakeHelper]

ANSWER_S = 60.0  # for a question, and for the start of a process
IDLE_BYTES = 512 << 20  # limit of its memory between questions
MODULE = "tokenloom.frontend.server.bodies.process"
READER = "the process that reads large requests"


class TemplateTooSlow(RequestError):
    """A chat template took more CPU time than a question may: to ask again is no use."""


def new_intake_helper(spec: EngineSpec) -> IntakeHelper:
    return Helper(MODULE, spec, IntakeAnswer, start_s=ANSWER_S, idle_bytes=IDLE_BYTES)


def ask_intake(
    helper: IntakeHelper, question: IntakeQuestion, body: Sequence[bytes] = (), answer_s: float = ANSWER_S
) -> IntakeAnswer:
    """Send `question` and `body`, and return the answer. RequestError if the question ends the process, takes longer
    than `answer_s`, is interrupted or cannot be sent; Overloaded if the process cannot be started."""
    try:
        frame = encode(question)
    except OverflowError:  # of msgpack
        text = "a chat that is read in another process holds an integer beyond 64 bits: give it as a text"
        raise RequestError(text) from None
    num_bytes = sum(map(len, body)) or len(frame)
    while True:
        try:
            return helper.ask(frame, body, item_s=answer_s)
        except HelperUnavailable as error:
            raise Overloaded(f"{READER} {error}", RETRY_S) from None
        except HelperOverdue:
            text = f"the request's {num_bytes} bytes could not be read within {answer_s:g} s: send less"
            raise RequestError(text) from None
        except HelperLost as loss:
            may_retry = loss.num_answers > 0 and not helper.is_interrupted
            if not may_retry:  # otherwise the process may have died before this question
                raise _error_of(str(loss), helper, num_bytes) from None


def _error_of(how: str, helper: IntakeHelper, num_bytes: int) -> RequestError:
    """Return the error of a question that ended the process, and write it to the log."""
    if "SIGVTALRM" in how:
        return TemplateTooSlow("the chat template of the request takes too much CPU time: send a shorter one")
    if not helper.is_interrupted:
        helper.num_lost += 1
        if is_worth_a_line(helper.num_lost):
            logger.warning("the intake process %s over a request of %d bytes", how, num_bytes)
    return RequestError(
        f"the request's {num_bytes} bytes could not be read: {READER} {how}, which too little memory can cause: "
        "send less"
    )
