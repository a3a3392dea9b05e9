"""n answers and their logprobs between core, frontend and client, also after a resume."""

from __future__ import annotations

from array import array

import pytest

from tokenloom.frontend.client.outputs import OutputBuilder
from tokenloom.frontend.forms.logprobs import Logprob, unpack_logprobs
from tokenloom.frontend.server.requests.logprob_buffer import LogprobBuffer, runs_of
from tokenloom.frontend.server.text.detokenizer import DetokenizerFactory
from tokenloom.ipc.codec import decode_ids, encode_ids
from tokenloom.ipc.errors import ErrorInfo, ProtocolError
from tokenloom.ipc.messages.base import FinishReason
from tokenloom.ipc.messages.client import Abort, Credit, Delta, Deltas, Logprobs
from tokenloom.ipc.messages.core import Finished, KeyLogprobs
from tokenloom.tests.frontend.bench import Bench, ids
from tokenloom.tests.frontend.server.requests.rig import Rig
from tokenloom.tests.frontend.server.text.samples import new_tokenizer


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


def scored(*entries: tuple[int, int, int]) -> KeyLogprobs:
    """Encode (key, position, token); the top token is 1."""
    return columns([(key, position, [token, 1]) for key, position, token in entries])


def own_ids(logprobs: Logprobs | None) -> list[int]:
    return [] if logprobs is None else decode_ids(logprobs.token_ids).tolist()[:: logprobs.num_top + 1]


def test_n_answers_are_one_request_with_consecutive_seeds(bench: Bench) -> None:
    request = bench.core_request(params={"n": 3, "seed": 2**64 - 2})
    assert [child.seed for child in request.children] == [2**64 - 2, 2**64 - 1, 0]
    keys = [child.key for child in request.children]
    bench.core(accepted=keys[:1])
    bench.heard()
    bench.tokens((keys[2], 0, ids("The")), (keys[0], 0, ids("a")))
    assert sorted((delta.index, delta.text) for delta in bench.deltas()) == [(0, "a"), (2, "The")]
    bench.core(finished=[Finished(key=keys[0], reason="length")])
    assert [(delta.index, delta.finish_reason) for delta in bench.deltas()] == [(0, "length")]
    assert bench.frontend.num_open_requests == 1
    bench.to_core.clear()
    ends = [(delta.index, delta.finish_reason) for delta in bench.news(Abort(request_id="r"))]
    assert sorted(bench.aborted()) == keys[1:]
    assert sorted(ends) == [(1, "abort"), (2, "abort")] and bench.frontend.num_open_requests == 0


def test_merged_deltas_have_the_logprobs_of_exactly_their_tokens(bench: Bench) -> None:
    key = bench.submit(params={"logprobs": 1})
    for i in range(200):
        bench.tokens((key, i, [i + 4]), logprobs=scored((key, i, i + 4)))
    deltas = bench.deltas()
    bench.say(Credit(count=len(deltas)))
    bench.tokens((key, 200, [204]), logprobs=scored((key, 200, 204)))
    assert all(own_ids(each.logprobs) == decode_ids(each.token_ids).tolist() for each in deltas + bench.deltas())


def test_tokens_after_a_stop_string_have_no_logprobs(bench: Bench) -> None:
    key = bench.submit(params={"stop": "b", "logprobs": 1})
    tokens = [ids(character)[0] for character in "abcd"]
    entries = [(key, i, token) for i, token in enumerate(tokens)]
    bench.tokens((key, 0, tokens), logprobs=scored(*entries))
    (delta,) = bench.deltas()
    assert delta.stop_reason == "b" and own_ids(delta.logprobs) == decode_ids(delta.token_ids).tolist() == tokens[:2]


def test_a_new_core_gets_known_tokens_and_computes_only_missing_logprobs(bench: Bench) -> None:
    params = {"n": 2, "logprobs": 1, "prompt_logprobs": 1, "seed": 1}
    keys = [child.key for child in bench.core_request(params=params, prompt_token_ids=encode_ids([5] * 9)).children]
    bench.core(accepted=keys[:1])
    bench.heard()
    bench.core(prompt_logprobs=scored(*((keys[0], i, 5) for i in range(1, 6))))
    (first,) = bench.deltas()
    assert first.prompt_start == 1 and own_ids(first.prompt_logprobs) == [5] * 5 and first.metrics is not None
    request = bench.restart_core()
    assert request.num_prompt_logprobs == 6 and [child.key for child in request.children] == keys
    bench.core(prompt_logprobs=scored(*((keys[0], i, 5) for i in range(3, 9))))
    (second,) = bench.deltas()
    assert second.prompt_start == 6 and own_ids(second.prompt_logprobs) == [5] * 3
    bench.tokens((keys[1], 0, [7, 8]), logprobs=scored((keys[1], 0, 7), (keys[1], 1, 8)))
    bench.core(finished=[Finished(key=keys[0], reason="abort")])
    (child,) = bench.restart_core().children
    assert child.key == keys[1] and child.output_token_ids == encode_ids([7, 8]) and child.seed == 2


@pytest.mark.parametrize("end", ["abort", "error"])
def test_an_abort_or_error_ends_all_answers_at_the_client(end: FinishReason) -> None:
    rig = Rig()
    rig.carry()
    submit = rig.submit("a", n=3, seed=1)
    rig.carry()
    rig.hear(Deltas(deltas=[Delta(request_id="a", index=1, token_ids=encode_ids([4]))]))
    if end == "abort":
        rig.protocol.abort("a")
        rig.lose_sessions()
        rig.carry()
    else:
        error = ErrorInfo("internal", "broken")
        rig.hear(Deltas(deltas=[Delta(request_id="a", finish_reason=end, error=error)]))
        assert rig.sent(Abort), "the other answers still run"
    builder = OutputBuilder(submit)
    for update in rig.updates["a"]:
        builder.add(update)
    assert builder.is_finished and not rig.protocol.is_busy
    if end == "abort":
        reasons = [(answer.finish_reason, answer.token_ids) for answer in builder.build().outputs]
        assert reasons == [("abort", []), ("abort", [4]), ("abort", [])]


def test_special_tokens_have_no_spaces_if_spaces_between_special_tokens_is_off() -> None:
    tokenizer = new_tokenizer("word_piece")
    factory = DetokenizerFactory(tokenizer)
    special = sorted(tokenizer.special_ids)[-2:]
    texts = []
    for has_spaces in (True, False):
        detokenizer = factory.new([], False, has_spaces)
        texts.append("".join(map(detokenizer.append, [*special, *special])) + detokenizer.finish())
    assert " " in texts[0] and texts[1].replace(" ", "") == texts[1] == texts[0].replace(" ", "")


# ── columns of logprobs ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_joins_consecutive_positions_of_one_key_and_width() -> None:
    entries = [(1, 0, [5, 6]), (1, 1, [7, 8]), (2, 2, [9, 9]), (2, 4, [1, 2]), (2, 5, [3])]
    runs = [(each.key, each.position, each.num_tokens, each.width) for each in runs_of(columns(entries))]
    assert runs == [(1, 0, 2, 2), (2, 2, 1, 2), (2, 4, 1, 2), (2, 5, 1, 1)]
    flat = [token_id for each in runs_of(columns(entries)) for token_id in decode_ids(each.token_ids)]
    assert flat == [5, 6, 7, 8, 9, 9, 1, 2, 3]


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
    assert Logprob(-0.1) == Logprob(-0.1, None, None)
    assert list(first) == [ids[1], ids[0], ids[2]] and list(second) == [ids[2], ids[0], ids[1]]
