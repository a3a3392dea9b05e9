"""IntakeHost: an intake process as seen by its thread in the frontend: sends a question, returns the answer.

The first question starts the process. It is killed if a question takes longer than `answer_s` or is interrupted, or if
it has grown beyond IDLE_BYTES; the next question starts another one. A question that ends the process fails alone: a
question that finds the process dead is sent again to a new one. A process that does not start is no question's fault.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import time
from collections.abc import Sequence

from ....ipc.child import describe_end, spawn_failure, spawn_helper
from ....ipc.codec import Decoder, encode
from ....ipc.errors import Overloaded, RequestError, TokenloomError
from ....ipc.messages.intake import IntakeAnswer, IntakeQuestion
from ....ipc.process.frames import receive_frame, send_frame
from ....ipc.process.log import is_worth_a_line
from ....ipc.shortages.failure import RETRY_S
from ....ipc.spec.config.engine_spec import EngineSpec

logger = logging.getLogger("tokenloom.frontend")

ANSWER_S = 60.0  # for a question, the start of the process included
IDLE_BYTES = 512 << 20  # limit of its memory between questions
MODULE = "tokenloom.frontend.server.bodies.process"
READER = "the process that reads large requests"


class IntakeHost:
    """Owner of one intake process and of the socket to it. One thread calls `ask`; any thread may call `interrupt`."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec, self.answer_s = spec, ANSWER_S
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._decoder: Decoder[IntakeAnswer] = Decoder(IntakeAnswer)
        self._num_ended = 0
        self._has_answered = False  # the current process has answered a question
        self._is_interrupted = False

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
                answer = self._exchange(frame, body)
            except TimeoutError:
                self.stop()
                text = f"the request's {num_bytes} bytes could not be read within {self.answer_s:g} s: send less"
                raise RequestError(text) from None
            except OSError:
                may_retry = self._has_answered and not self._is_interrupted  # it may have died before this question
                loss = self._loss(num_bytes)
                if not may_retry:
                    raise loss from None
                continue
            self._has_answered = True
            if self._resident_bytes() > IDLE_BYTES:
                self.stop()
            return answer

    def _exchange(self, frame: bytes, body: Sequence[bytes]) -> IntakeAnswer:
        deadline = time.monotonic() + self.answer_s
        channel = self._started(deadline)
        send_frame(channel, [frame], deadline)
        send_frame(channel, body, deadline)
        return self._decoder.decode(receive_frame(channel, deadline))

    def interrupt(self) -> None:
        """Kill the process, so that the current question fails; callable from any thread."""
        self._is_interrupted = True
        process = self._process
        if process is not None:
            process.kill()

    def stop(self) -> None:
        """Kill the process; the next question starts another one."""
        process, channel = self._process, self._socket
        self._process = self._socket = None
        if channel is not None:
            channel.close()
        if process is not None:
            process.kill()
            process.communicate()  # closes the lifeline, and waits

    def _started(self, deadline: float) -> socket.socket:
        """Return the socket to the process, after its start if there is none."""
        if self._is_interrupted or (self._process is not None and self._process.poll() is not None):
            self.stop()  # it was interrupted, or killed while idle
        self._is_interrupted = False
        if self._socket is None:
            self._has_answered = False
            try:
                self._process, self._socket = spawn_helper(MODULE, self._spec.environment())
            except OSError as error:
                raise Overloaded(f"{READER} could not be started: {spawn_failure(error)}", RETRY_S) from None
            try:
                receive_frame(self._socket, deadline)  # empty: it is ready
            except OSError as error:
                if self._is_interrupted:
                    raise
                is_late = isinstance(error, TimeoutError)
                how = f"did not start within {self.answer_s:g} s" if is_late else describe_end(self._process)
                self.stop()
                raise Overloaded(f"{READER} {how} at its start: see its log", RETRY_S) from None
        return self._socket

    def _loss(self, num_bytes: int) -> TokenloomError:
        """Remove the ended process, and return the error of the question that ended it."""
        assert self._process is not None
        how = describe_end(self._process)
        self.stop()
        if "SIGVTALRM" in how:
            return RequestError("the chat template of the request takes too much CPU time: send a shorter one")
        if not self._is_interrupted:
            self._num_ended += 1
            if is_worth_a_line(self._num_ended):
                logger.warning("the intake process %s over a request of %d bytes", how, num_bytes)
        return RequestError(
            f"the request's {num_bytes} bytes could not be read: {READER} {how}, which too little memory can cause: "
            "send less"
        )

    def _resident_bytes(self) -> int:
        with contextlib.suppress(OSError, AttributeError), open(f"/proc/{self._process.pid}/statm", "rb") as file:  # type: ignore[union-attr]
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return 0
