"""A batch's input file is checked in pieces, and any way to cut it into pieces finds the same lines and faults."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from tokenloom.frontend.server.bodies import batch_file
from tokenloom.frontend.server.bodies.batch_file import check_batch
from tokenloom.ipc.messages.intake import CheckBatch, FoundFault, FoundLine
from tokenloom.tests.support.today import seeds

URL = "/v1/completions"


def check_all(path: Path, max_line_bytes: int = 1 << 20) -> tuple[list[FoundLine], list[FoundFault], int]:
    """Return the lines and faults of all pieces, and the number of pieces."""
    lines, faults, offset, number, num_pieces = list[FoundLine](), list[FoundFault](), 0, 1, 0
    while True:
        num_pieces += 1
        found = check_batch(
            CheckBatch(path=str(path), offset=offset, number=number, endpoint=URL, max_line_bytes=max_line_bytes)
        )
        lines += found.lines
        faults += found.faults
        if found.is_end:
            return lines, faults, num_pieces
        assert found.offset > offset and found.number > number
        offset, number = found.offset, found.number


def line_of(rng: random.Random, number: int) -> bytes:
    body = {"prompt": rng.choice(("x", "ä" * 30, "body", '{"custom_id"'))}
    line = {"custom_id": f"id {number}", "method": "POST", "url": URL, "body": body}
    if rng.random() < 0.2:
        line["comment"] = body
    return json.dumps(line, ensure_ascii=rng.random() < 0.5).encode()


@pytest.mark.parametrize("seed", seeds(10, 100))
def test_bodies_are_found_by_their_places_for_any_size_of_pieces(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    parts: list[bytes] = []
    wanted: list[tuple[int, dict[str, object] | None]] = []
    if rng.random() < 0.5:
        parts.append(b"\xef\xbb\xbf")
    for _ in range(rng.randrange(1, 60)):
        number = 1 + b"".join(parts).count(b"\n")
        kind = rng.random()
        if kind < 0.2:
            parts.append(b"".join(rng.choices((b"\n", b" \t\r\n", b"\x0b \n"), k=rng.randrange(1, 5))))
        elif kind < 0.3:
            parts.append(b"{broken\n")
            wanted.append((number, None))
        else:
            line = line_of(rng, number)
            wanted.append((number, json.loads(line)))
            parts.append(rng.choice((b"", b" ")) + line + rng.choice((b"\n", b"\r\n")))
    data = b"".join(parts)
    data = data[:-1] if rng.random() < 0.5 and data.endswith(b"}\n") else data
    (tmp_path / "in").write_bytes(data)
    whole = check_all(tmp_path / "in")
    assert whole[2] == 1
    monkeypatch.setattr(batch_file, "PIECE_BYTES", rng.randrange(1, 500))
    cut = check_all(tmp_path / "in")
    assert cut[:2] == whole[:2] and (cut[2] > 1 or len(data) < 1000)
    by_number = {each.number: json.loads(data[each.offset : each.offset + each.length]) for each in whole[0]}
    assert by_number == {number: line["body"] for number, line in wanted if line is not None}
    assert [each.custom_id for each in whole[0]] == [line["custom_id"] for _, line in wanted if line is not None]
    assert [each.number for each in whole[1]] == [number for number, line in wanted if line is None]


def test_a_line_that_is_too_long_is_one_fault_and_the_next_ones_are_read(tmp_path: Path) -> None:
    rng = random.Random(1)
    long = json.dumps({"custom_id": "long", "url": URL, "body": {"prompt": "x" * 9000}}).encode()
    (tmp_path / "in").write_bytes(line_of(rng, 1) + b"\n" + long + b"\n" + line_of(rng, 3))
    lines, [fault], _ = check_all(tmp_path / "in", max_line_bytes=1000)
    assert [line.number for line in lines] == [1, 3] and fault.number == 2
    assert f"{len(long) + 1} bytes, at most 1000" in fault.message and "--max-body-bytes" in fault.message


def test_an_answer_is_bounded_in_lines_and_faults(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"{\n" * 1000)
    lines, faults, num_pieces = check_all(tmp_path / "in")
    assert (len(lines), len(faults), num_pieces) == (0, 1000, 1000 // batch_file.MAX_FAULTS + 1)


def test_blank_lines_take_no_turn_each(tmp_path: Path) -> None:
    rng, num_blank = random.Random(1), 5_000_000
    (tmp_path / "in").write_bytes(b"\n" * num_blank + line_of(rng, 1) + b" \n" * num_blank)
    begun_s = time.process_time()
    [line], faults, _ = check_all(tmp_path / "in")
    assert time.process_time() - begun_s < 1, "100 MB/s take 0.15 s"
    assert line.number == num_blank + 1 and not faults
