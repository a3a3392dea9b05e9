"""GrammarProcess: the grammar process, python -m tokenloom.core.features.grammar.process --fd N [--prover]

Compiles grammars and makes masks outside the core's loop. The core starts it with the first grammar, and replaces it
if a grammar crashes it or keeps it busy past a deadline: a stack overflow or an endless search in a library fails
only the request with that grammar. With --prover it only tries whether grammars compile, and keeps none.

Compilations run in threads with large stacks (the compilers recurse; a grammar of MAX_GRAMMAR_CHARACTERS needs up to
60 MB) and release the GIL; masks are made in the loop, between them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import socket
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor

from ....ipc.child import limit_address_space, run_child
from ....ipc.codec import Decoder, encode
from ....ipc.errors import ErrorInfo, InternalError, error_info
from ....ipc.messages.grammar import CloseGrammars, CoreToGrammar, GrammarOpened, GrammarToCore, OpenGrammar
from ....ipc.process.faults import maybe_fail
from ....ipc.process.frames import receive_frame, send_frame
from ....ipc.spec.config.engine_spec import EngineSpec
from .compiler import CACHE_SIZE, Matcher
from .helper import HELPER_IS_UP, NUM_COMPILERS
from .server import GrammarServer

STACK_BYTES = 512 << 20  # address space of a thread's stack; memory is used only as it is needed
ADDRESS_SPACE_BYTES = 8 << 30  # limit of this process's address space, beyond which allocations fail


class GrammarProcess:
    """Owner of the socket to the core and of the compiling threads; `run` serves until the core ends it."""

    supervisor = None

    def __init__(self, spec: EngineSpec, core: socket.socket, *, is_prover: bool) -> None:
        self._server = GrammarServer(spec, cache_size=0 if is_prover else CACHE_SIZE)
        self._is_prover = is_prover
        self._core = core
        self._decoder: Decoder[CoreToGrammar] = Decoder(CoreToGrammar)
        threading.stack_size(STACK_BYTES)
        self._pool = ThreadPoolExecutor(NUM_COMPILERS, thread_name_prefix="compile")
        self._wake_read, self._wake_write = os.pipe()
        self._compiling: dict[int, Future[Matcher | ErrorInfo]] = {}

    def run(self) -> None:
        with contextlib.suppress(ConnectionError):
            core = self._core.fileno()
            send_frame(self._core, [])  # it has started
            self._server.prepare()
            self._send(GrammarOpened(grammar_id=HELPER_IS_UP))
            while True:
                ready, *_ = select.select([core, self._wake_read], [], [])
                if core in ready:
                    self._obey(self._decoder.decode(receive_frame(self._core)))
                if self._wake_read in ready:
                    os.read(self._wake_read, 4096)
                    self._take_compiled()

    def _send(self, message: GrammarToCore) -> None:
        send_frame(self._core, [encode(message)])

    def _obey(self, message: CoreToGrammar) -> None:
        if isinstance(message, OpenGrammar):
            future = self._pool.submit(self._server.prove if self._is_prover else self._server.compile, message)
            self._compiling[message.grammar_id] = future
            future.add_done_callback(lambda _: os.write(self._wake_write, b"."))
        elif isinstance(message, CloseGrammars):
            self._server.close(message.grammar_ids)
        else:
            maybe_fail("grammar.advance")
            self._send(self._server.advance(message))

    def _take_compiled(self) -> None:
        for grammar_id, future in list(self._compiling.items()):
            if future.done():
                del self._compiling[grammar_id]
                result = _result_of(future)
                if self._is_prover and not isinstance(result, ErrorInfo):
                    self._send(GrammarOpened(grammar_id=grammar_id))
                else:
                    self._send(self._server.open(grammar_id, result))

    def close(self) -> None:
        self._core.close()


def _result_of(future: Future[Matcher | ErrorInfo]) -> Matcher | ErrorInfo:
    error = future.exception()
    if error is not None:
        return error_info(InternalError(f"the grammar compiler failed: {type(error).__name__}: {error}"))
    return future.result()


def main() -> int:
    parser = argparse.ArgumentParser(prog="tokenloom grammar", description="Makes token masks; started by the core.")
    parser.add_argument("--fd", type=int, required=True, help="the descriptor of the socket to the core")
    parser.add_argument("--prover", action="store_true", help="try whether grammars compile, and keep none")
    arguments = parser.parse_args()
    core = socket.socket(fileno=arguments.fd)
    limit_address_space(ADDRESS_SPACE_BYTES)
    name = "prover" if arguments.prover else "grammar"
    return run_child(name, lambda spec: GrammarProcess(spec, core, is_prover=arguments.prover))


if __name__ == "__main__":
    sys.exit(main())
