"""Check a batch's input file, some lines at a time.

Runs in the intake process. One call reads at most PIECE_BYTES, or one line that is longer, so that neither its time nor
its answer grows with the file. Whether two lines have the same custom_id is not known here.
"""

from __future__ import annotations

import re
from io import BufferedReader, FileIO
from typing import BinaryIO

from ....ipc.messages.intake import BatchChecked, CheckBatch, FoundFault, FoundLine
from ...forms.openai.batches.line import LineFault, read_line, url_fault

PIECE_BYTES = 4 << 20
MAX_LINES = 2000  # of one answer
MAX_FAULTS = 100  # of one answer
BUFFER_BYTES = 64 << 10  # of the file; between two blank lines at most so many are looked at again
BOM = b"\xef\xbb\xbf"
_INK = re.compile(rb"\S")


def check_batch(question: CheckBatch) -> BatchChecked:
    """Check the lines from the question's offset on. OSError if the file cannot be read."""
    lines: list[FoundLine] = []
    faults: list[FoundFault] = []
    offset, number = question.offset, question.number
    with BufferedReader(FileIO(question.path), BUFFER_BYTES) as file:
        file.seek(offset)
        while offset - question.offset < PIECE_BYTES and len(lines) < MAX_LINES and len(faults) < MAX_FAULTS:
            raw = file.readline(question.max_line_bytes + 1)
            if not raw:
                return BatchChecked(lines=lines, faults=faults, offset=offset, number=number, is_end=True)
            num_bytes = len(raw)
            if num_bytes > question.max_line_bytes:
                num_bytes += _skip_line(file)
                message = (
                    f"the line has {num_bytes} bytes, at most {question.max_line_bytes} are read: shorten it or raise "
                    "--max-body-bytes"
                )
                faults.append(FoundFault(number, "invalid_request", message))
            elif _INK.search(raw.removeprefix(BOM) if offset == 0 else raw) is not None:
                found = _checked(raw, offset, number, question.endpoint)
                if isinstance(found, FoundLine):
                    lines.append(found)
                else:
                    faults.append(found)
            else:
                blank = _take_blank_lines(file)
                num_bytes += len(blank)
                number += blank.count(b"\n")
            offset += num_bytes
            number += 1
    return BatchChecked(lines=lines, faults=faults, offset=offset, number=number, is_end=False)


def _checked(raw: bytes, offset: int, number: int, endpoint: str) -> FoundLine | FoundFault:
    text = raw.removeprefix(BOM) if offset == 0 else raw
    line = read_line(text)
    fault = line if isinstance(line, LineFault) else url_fault(line, endpoint)
    if fault is not None:
        return FoundFault(number, *fault)
    assert not isinstance(line, LineFault)
    body = bytes(line.body)
    place = raw.index(body)  # if another field holds the same bytes, they will do as well
    return FoundLine(number, offset + place, len(body), line.custom_id)


def _take_blank_lines(file: BufferedReader[FileIO]) -> bytes:
    """Read the blank lines that the file's buffer holds from here on: so a file of them takes no turn for each."""
    ahead = file.peek()
    num_blank = len(ahead) - len(ahead.lstrip())
    return file.read(ahead.rfind(b"\n", 0, num_blank) + 1)


def _skip_line(file: BinaryIO) -> int:
    """Read up to the end of a line, in pieces; return the number of bytes."""
    num_bytes = 0
    while True:
        piece = file.readline(PIECE_BYTES)
        num_bytes += len(piece)
        if not piece or piece.endswith(b"\n"):
            return num_bytes
