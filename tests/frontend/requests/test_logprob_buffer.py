"""LogprobBuffer keeps each token's logprobs once, and none of tokens after the end of the answer."""

from __future__ import annotations

from array import array

import pytest

from tokenloom.frontend.client.logprobs import Logprob, unpack_logprobs
from tokenloom.frontend.requests.logprob_buffer import LogprobBuffer, LogprobRun, runs_of
from tokenloom.frontend.text.detokenizer import DetokenizerFactory
from tokenloom.ipc.codec import decode_ids, encode_ids
from tokenloom.ipc.errors import ProtocolError
from tokenloom.ipc.messages.core import KeyLogprobs
from tokenloom.tests.frontend.text.samples import new_tokenizer


def columns(entries: list[tuple[int, int, list[int]]]) -> KeyLogprobs:
    """Encode (key, position, token ids): logprob −i/4 for the i-th id, rank 2 for the token itself."""
    return KeyLogprobs(
        keys=encode_ids([key for key, _, _ in entries]),
        positions=encode_ids([position for _, position, _ in entries]),
        widths=encode_ids([len(ids) for _, _, ids in entries]),
        ranks=encode_ids([2] * len(entries)),
        token_ids=encode_ids([token_id for _, _, ids in entries for token_id in ids]),
        logprobs=array("f", [-i / 4 for _, _, ids in entries for i in range(len(ids))]).tobytes(),
    )


def run(position: int, num_tokens: int, width: int = 2) -> LogprobRun:
    ids = [[100 * (position + i) + j for j in range(width)] for i in range(num_tokens)]
    return next(runs_of(columns([(7, position + i, each) for i, each in enumerate(ids)])))


def taken_ids(buffer: LogprobBuffer) -> list[int]:
    taken = buffer.take(None)
    return [] if taken is None else decode_ids(taken.token_ids).tolist()[:: taken.num_top + 1]


def test_a_run_joins_consecutive_positions_of_one_key_and_width() -> None:
    entries = [(1, 0, [5, 6]), (1, 1, [7, 8]), (2, 2, [9, 9]), (2, 4, [1, 2]), (2, 5, [3])]
    runs = [(each.key, each.position, each.num_tokens, each.width) for each in runs_of(columns(entries))]
    assert runs == [(1, 0, 2, 2), (2, 2, 1, 2), (2, 4, 1, 2), (2, 5, 1, 1)]
    flat = [token_id for each in runs_of(columns(entries)) for token_id in decode_ids(each.token_ids)]
    assert flat == [5, 6, 7, 8, 9, 9, 1, 2, 3]


def test_repeated_tokens_are_dropped_and_runs_after_a_gap_are_rejected() -> None:
    buffer = LogprobBuffer(3)
    assert not buffer.append(run(5, 2)), "token 3 and 4 are missing"
    assert buffer.append(run(1, 4)), "tokens 3 and 4 are new"
    assert not buffer.append(run(2, 3))
    assert buffer.append(run(5, 1))
    assert taken_ids(buffer) == [300, 400, 500] and buffer.start == buffer.end == 6
    assert buffer.take(None) is None


def test_tokens_after_the_end_of_the_answer_are_trimmed() -> None:
    buffer = LogprobBuffer(0)
    buffer.append(run(0, 4, width=3))
    buffer.trim(6)
    buffer.trim(2)
    assert buffer.end == 2 and taken_ids(buffer) == [0, 100]


@pytest.mark.parametrize("field", ["positions", "widths", "ranks", "token_ids", "logprobs"])
def test_columns_of_unequal_length_are_refused(field: str) -> None:
    good = columns([(1, 0, [5, 6]), (1, 1, [7, 8])])
    fields = {name: getattr(good, name) for name in good.__struct_fields__}
    with pytest.raises(ProtocolError):
        list(runs_of(KeyLogprobs(**fields | {field: fields[field][:-4]})))


def test_unpacked_logprobs_are_one_dict_per_token_with_the_token_first() -> None:
    tokenizer = new_tokenizer("byte_level")
    ids = tokenizer.encode("The capital of France is", add_special_tokens=False)[:3]
    buffer = LogprobBuffer(0)
    for each in runs_of(columns([(1, 0, [ids[1], ids[0], ids[1], ids[2]]), (1, 1, [ids[2], ids[0], ids[1], ids[2]])])):
        buffer.append(each)
    packed = buffer.take(DetokenizerFactory(tokenizer).texts)
    assert packed is not None and packed.num_top == 3 and set(packed.texts) == set(ids)
    first, second = unpack_logprobs(packed)
    text = {token_id: tokenizer.decode([token_id], skip_special_tokens=False) for token_id in ids}
    assert first == {
        ids[1]: Logprob(0.0, 2, text[ids[1]]),
        ids[0]: Logprob(-0.25, 1, text[ids[0]]),
        ids[2]: Logprob(-0.75, 3, text[ids[2]]),
    }
    assert list(first) == [ids[1], ids[0], ids[2]] and list(second) == [ids[2], ids[0], ids[1]]


def test_rank_and_text_of_a_logprob_default_to_none() -> None:
    assert Logprob(-0.1) == Logprob(-0.1, None, None)
