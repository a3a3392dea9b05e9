"""IntakeHost: an intake process as seen by its thread in the frontend: sends a question, returns the answer.

A question that ends the process fails alone: a question that finds the process dead is sent again to a new one. A
process that does not start is not the question's fault.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ....ipc.codec import encode
from ....ipc.errors import Overloaded, RequestError
from ....ipc.helper_process import HelperLost, HelperUnavailable
from ....ipc.messages.intake import IntakeAnswer, IntakeQuestion
from ....ipc.process.log import is_worth_a_line
from ....ipc.shortages.failure import RETRY_S
from ....ipc.spec.config.engine_spec import EngineSpec
from .helper import Helper, HelperOverdue

logger = logging.getLogger("tokenloom.frontend")

ANSWER_S = 60.0  # for a question, and for the start of a process
IDLE_BYTES = 512 << 20  # limit of its memory between questions
MODULE = "tokenloom.frontend.server.bodies.process"
READER = "the process that reads large requests"


class IntakeHost:
    """Owner of one intake process. One thread calls `ask`; any thread may call `interrupt`."""

    def __init__(self, spec: EngineSpec) -> None:
        self._helper: Helper[IntakeAnswer] = Helper(MODULE, spec, IntakeAnswer, start_s=ANSWER_S, idle_bytes=IDLE_BYTES)
        self.answer_s = ANSWER_S
        self._num_ended = 0

    def ask(self, question: IntakeQuestion, body: Sequence[bytes] = ()) -> IntakeAnswer:
        """Send `question` and `body`, and return the answer. RequestError if the question ends the process, takes too
        long, is interrupted or cannot be sent; Overloaded if the process cannot be started."""
        try:
            frame = encode(question)
        except OverflowError:  # of msgpack
            text = "a chat that is read in another process holds an integer beyond 64 bits: give it as a text"
            raise RequestError(text) from None
        num_bytes = sum(map(len, body)) or len(frame)
        while True:
            try:
                return self._helper.wait_for(self._helper.ask(frame, body, item_s=self.answer_s))
            except HelperUnavailable as error:
                raise Overloaded(f"{READER} {error}", RETRY_S) from None
            except HelperOverdue:
                text = f"the request's {num_bytes} bytes could not be read within {self.answer_s:g} s: send less"
                raise RequestError(text) from None
            except HelperLost as loss:
                may_retry = loss.num_answers > 0 and not self._helper.is_interrupted
                if not may_retry:  # otherwise the process may have died before this question
                    raise self._error_of(str(loss), num_bytes) from None

    def interrupt(self) -> None:
        """Kill the process, so that the current question fails; callable from any thread."""
        self._helper.interrupt()

    def stop(self) -> None:
        """Kill the process; the next question starts another one."""
        self._helper.stop()

    def _error_of(self, how: str, num_bytes: int) -> RequestError:
        """Return the error of a question that ended the process, and write it to the log."""
        if "SIGVTALRM" in how:
            return RequestError("the chat template of the request takes too much CPU time: send a shorter one")
        if not self._helper.is_interrupted:
            self._num_ended += 1
            if is_worth_a_line(self._num_ended):
                logger.warning("the intake process %s over a request of %d bytes", how, num_bytes)
        return RequestError(
            f"the request's {num_bytes} bytes could not be read: {READER} {how}, which too little memory can cause: "
            "send less"
        )
