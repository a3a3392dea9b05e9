"""The intake process as one thread of the frontend reaches it: a question goes in, its answer comes out.

The process is started with the first question. It is killed, and the next question starts another one, when a question
takes longer than ANSWER_S, when nobody waits for the answer any more, or when it has grown beyond IDLE_BYTES. What
ends it costs the request that brought it and nothing else: a question that finds it dead is asked once more.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from ...ipc.codec import Decoder, encode
from ...ipc.config.engine_spec import EngineSpec
from ...ipc.errors import InternalError, RequestError, TokenloomError
from ...ipc.messages.intake import IntakeAnswer, IntakeQuestion
from ...ipc.process.log import is_worth_a_line
from .frames import receive_frame, send_frame

logger = logging.getLogger("tokenloom.frontend")

ANSWER_S = 60.0  # for a question, the start of the process included
IDLE_BYTES = 512 << 20  # of memory that it may keep when it has answered


class IntakeHost:
    """Owns the process and the socket to it. `ask` belongs to one thread; `interrupt` may come from any."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._decoder: Decoder[IntakeAnswer] = Decoder(IntakeAnswer)
        self._num_ended = 0
        self._has_answered = False  # this process, anything
        self._is_interrupted = False

    def ask(self, question: IntakeQuestion, body: Sequence[bytes] = ()) -> IntakeAnswer:
        """The answer to `question`, which `body` follows. RequestError when it ends the process or takes too long."""
        frame = encode(question)
        num_bytes = sum(map(len, body)) or len(frame)
        while True:
            try:
                answer = self._exchange(frame, body)
            except TimeoutError:
                self.stop()
                text = f"the request's {num_bytes} bytes could not be read within {ANSWER_S:g} s: send less"
                raise RequestError(text) from None
            except OSError:
                may_be_innocent = self._has_answered and not self._is_interrupted  # somebody killed it before
                loss = self._loss(num_bytes)
                if not may_be_innocent:
                    raise loss from None
                continue
            self._has_answered = True
            if self._resident_bytes() > IDLE_BYTES:
                self.stop()
            return answer

    def _exchange(self, frame: bytes, body: Sequence[bytes]) -> IntakeAnswer:
        deadline = time.monotonic() + ANSWER_S
        channel = self._started()
        send_frame(channel, [frame], deadline)
        send_frame(channel, body, deadline)
        return self._decoder.decode(receive_frame(channel, deadline))

    def interrupt(self) -> None:
        """Nobody waits for the answer to the question that is being asked."""
        self._is_interrupted = True
        process = self._process
        if process is not None:
            process.kill()

    def stop(self) -> None:
        """Kill the process; the next question starts another one."""
        process, channel = self._process, self._socket
        self._process = self._socket = None
        if process is not None and channel is not None:
            channel.close()
            process.kill()
            process.communicate()  # closes the lifeline, and waits

    def _started(self) -> socket.socket:
        if self._is_interrupted or (self._process is not None and self._process.poll() is not None):
            self.stop()  # killed for an earlier question, or by somebody while it was idle
        self._is_interrupted = False
        if self._socket is None:
            self._has_answered = False
            self._socket, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "tokenloom.frontend.intake.process", "--fd", str(theirs.fileno())],
                    stdin=subprocess.PIPE,
                    start_new_session=True,
                    env=self._spec.environment(),
                    pass_fds=[theirs.fileno()],
                )
        return self._socket

    def _loss(self, num_bytes: int) -> TokenloomError:
        """What a question that ended the process is answered."""
        process = self._process
        if process is None:
            return InternalError("the process that reads large requests could not be started")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
        code = process.poll()
        self.stop()
        how = "closed its socket" if code is None else f"exited with code {code}"
        if code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        if not self._is_interrupted:
            self._num_ended += 1
            if is_worth_a_line(self._num_ended):
                logger.warning("the intake process %s over a request of %d bytes", how, num_bytes)
        return RequestError(
            f"the request's {num_bytes} bytes could not be read: the process that reads large requests {how}, which "
            "too little memory can cause: send less"
        )

    def _resident_bytes(self) -> int:
        with contextlib.suppress(OSError, AttributeError), open(f"/proc/{self._process.pid}/statm", "rb") as file:  # type: ignore[union-attr]
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return 0
