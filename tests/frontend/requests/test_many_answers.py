"""n answers and their logprobs between core, frontend and client, also after a resume."""

from __future__ import annotations

from array import array

from tokenloom.frontend.client.outputs import OutputBuilder
from tokenloom.frontend.text.detokenizer import DetokenizerFactory
from tokenloom.ipc.codec import decode_ids, encode_ids
from tokenloom.ipc.errors import ErrorInfo
from tokenloom.ipc.messages.base import Unknown, Welcome
from tokenloom.ipc.messages.client import Abort, Accepted, Credit, Delta, Logprobs, Submit
from tokenloom.ipc.messages.core import EngineCoreRequest, Finished, KeyLogprobs
from tokenloom.ipc.sampling_params import SamplingParams
from tokenloom.tests.frontend.bench import Bench, ids
from tokenloom.tests.frontend.requests.rig import Rig
from tokenloom.tests.frontend.text.samples import new_tokenizer


def scored(*entries: tuple[int, int, int]) -> KeyLogprobs:
    """Encode (key, position, token): the token's logprob is −token/8, the top token is 1."""
    return KeyLogprobs(
        keys=encode_ids([key for key, _, _ in entries]),
        positions=encode_ids([position for _, position, _ in entries]),
        widths=encode_ids([2] * len(entries)),
        ranks=encode_ids([3] * len(entries)),
        token_ids=encode_ids([each for _, _, token in entries for each in (token, 1)]),
        logprobs=array("f", [each for _, _, token in entries for each in (-token / 8, -0.125)]).tobytes(),
    )


def own_ids(logprobs: Logprobs | None) -> list[int]:
    return [] if logprobs is None else decode_ids(logprobs.token_ids).tolist()[:: logprobs.num_top + 1]


def test_n_answers_are_one_request_with_consecutive_seeds(bench: Bench) -> None:
    bench.submit(params={"n": 3, "seed": 2**64 - 2}, accept=False)
    (request,) = bench.to_core
    assert isinstance(request, EngineCoreRequest)
    assert [child.seed for child in request.children] == [2**64 - 2, 2**64 - 1, 0]
    keys = [child.key for child in request.children]
    bench.core(accepted=keys[:1])
    bench.heard()
    bench.tokens((keys[2], 0, ids("The")), (keys[0], 0, ids("a")))
    assert sorted((delta.index, delta.text) for delta in bench.deltas()) == [(0, "a"), (2, "The")]
    bench.core(finished=[Finished(key=keys[0], reason="length")])
    assert [(delta.index, delta.finish_reason) for delta in bench.deltas()] == [(0, "length")]
    bench.to_core.clear()
    messages = bench.say(Abort(request_id="r"))
    assert sorted(bench.aborted()) == keys[1:]
    ends = [(delta.index, delta.finish_reason) for message in messages for delta in getattr(message, "deltas", [])]
    assert sorted(ends) == [(1, "abort"), (2, "abort")] and bench.frontend.num_open_requests == 0


def test_merged_deltas_have_the_logprobs_of_exactly_their_tokens(bench: Bench) -> None:
    key = bench.submit(params={"logprobs": 1})
    for i in range(200):
        bench.tokens((key, i, [i + 4]), logprobs=scored((key, i, i + 4)))
    deltas = bench.deltas()
    bench.say(Credit(count=len(deltas)))
    bench.tokens((key, 200, [204]), logprobs=scored((key, 200, 204)))
    deltas += bench.deltas()
    assert all(own_ids(delta.logprobs) == decode_ids(delta.token_ids).tolist() for delta in deltas)


def test_tokens_after_a_stop_string_have_no_logprobs(bench: Bench) -> None:
    key = bench.submit(params={"stop": "b", "logprobs": 1})
    tokens = [ids(character)[0] for character in "abcd"]
    entries = [(key, i, token) for i, token in enumerate(tokens)]
    bench.tokens((key, 0, tokens), logprobs=scored(*entries))
    (delta,) = bench.deltas()
    assert delta.stop_reason == "b" and own_ids(delta.logprobs) == decode_ids(delta.token_ids).tolist() == tokens[:2]


def test_a_new_core_gets_known_tokens_and_computes_only_missing_logprobs(bench: Bench) -> None:
    bench.submit(params={"n": 2, "logprobs": 1, "prompt_logprobs": 1, "seed": 1}, prompt_token_ids=encode_ids([5] * 9))
    keys = [child.key for child in bench.to_core[-1].children]
    bench.core(prompt_logprobs=scored(*((keys[0], i, 5) for i in range(1, 6))))
    (first,) = bench.deltas()
    assert first.prompt_start == 1 and own_ids(first.prompt_logprobs) == [5] * 5 and first.metrics is not None
    bench.to_core.clear()
    bench.frontend.on_core_message(Unknown())
    bench.frontend.on_core_message(Welcome(protocol_version=1, run_id="r"))
    bench.turn()
    request = bench.to_core[-1]
    assert request.num_prompt_logprobs == 6 and [child.key for child in request.children] == keys
    bench.core(prompt_logprobs=scored(*((keys[0], i, 5) for i in range(3, 9))))
    (second,) = bench.deltas()
    assert second.prompt_start == 6 and own_ids(second.prompt_logprobs) == [5] * 3
    bench.tokens((keys[1], 0, [7, 8]), logprobs=scored((keys[1], 0, 7), (keys[1], 1, 8)))
    bench.core(finished=[Finished(key=keys[0], reason="abort")])
    bench.to_core.clear()
    bench.frontend.on_core_message(Unknown())
    bench.frontend.on_core_message(Welcome(protocol_version=1, run_id="r"))
    bench.turn()
    (child,) = bench.to_core[-1].children
    assert child.key == keys[1] and child.output_token_ids == encode_ids([7, 8]) and child.seed == 2


def test_an_abort_or_error_ends_all_answers_at_the_client() -> None:
    for has_error in (False, True):
        rig = Rig()
        rig.carry()
        submit = rig.submit("a", n=3, seed=1, max_tokens=100)
        rig.carry()
        protocol = rig.protocol
        protocol.receive(
            Accepted(request_id="a", attempt=0, prompt_token_ids=encode_ids([1]), prompt=None, seed=1), 0.0
        )
        assert rig.protocol.is_busy
        protocol._apply(protocol._requests["a"], Delta(request_id="a", index=1, token_ids=encode_ids([4])))
        if has_error:
            error = Delta(request_id="a", finish_reason="error", error=ErrorInfo("internal", "broken"))
            protocol._apply(protocol._requests["a"], error)
            assert rig.sent(Abort), "the other answers still run"
        else:
            protocol._requests["a"].is_aborted = True
            protocol._finish_aborted(protocol._requests["a"])
        builder = OutputBuilder(submit)
        for update in rig.updates["a"]:
            builder.add(update)
        assert builder.is_finished and not protocol.is_busy
        if not has_error:
            reasons = [(answer.finish_reason, answer.token_ids) for answer in builder.build().outputs]
            assert reasons == [("abort", []), ("abort", [4]), ("abort", [])]


def test_delta_outputs_have_each_token_and_each_end_once() -> None:
    builder = OutputBuilder(Submit(request_id="r", params=SamplingParams(n=2, output_kind="delta")))
    builder.add(Delta(request_id="r", token_ids=encode_ids([1, 2]), text="ab"))
    assert [(part.index, part.token_ids, part.text) for part in builder.build_delta().outputs] == [(0, [1, 2], "ab")]
    assert not builder.has_delta
    builder.add(Delta(request_id="r", start=2, token_ids=encode_ids([3]), text="c", finish_reason="stop"))
    builder.add(Delta(request_id="r", index=1, finish_reason="length"))
    new = builder.build_delta()
    assert [(part.token_ids, part.finish_reason) for part in new.outputs] == [([3], "stop"), ([], "length")]
    assert new.finished and not builder.has_delta


def test_special_tokens_have_no_spaces_if_spaces_between_special_tokens_is_off() -> None:
    tokenizer = new_tokenizer("word_piece")
    factory = DetokenizerFactory(tokenizer)
    special = sorted(tokenizer.special_ids)[-2:]
    texts = []
    for has_spaces in (True, False):
        detokenizer = factory.new([], False, has_spaces)
        texts.append("".join(map(detokenizer.append, [*special, *special])) + detokenizer.finish())
    assert " " in texts[0] and texts[1].replace(" ", "") == texts[1] == texts[0].replace(" ", "")
