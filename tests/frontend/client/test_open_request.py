"""OpenRequest: a resubmission contains the delivered tokens, the seeds and the number of prompt logprobs."""

from __future__ import annotations

import msgspec

from tokenloom.frontend.client.open_request import OpenRequest
from tokenloom.ipc.codec import decode_ids, encode_ids
from tokenloom.ipc.messages.client import Accepted, Delta, Logprobs, Medium, Submit
from tokenloom.ipc.params.sampling_params import SamplingParams

PROMPT = encode_ids([7, 8, 9])


def accept(request: OpenRequest, seed: int = 5) -> Submit:
    """Make the next attempt and accept it."""
    submit = request.next_submit()
    assert request.accept(
        Accepted(request_id="a", attempt=submit.attempt, prompt_token_ids=PROMPT, prompt="p", seed=seed)
    )
    return submit


def accepted_request(n: int = 1) -> OpenRequest:
    request = OpenRequest(Submit(request_id="a", prompt="p", params=SamplingParams(n=n)), lambda update: None)
    assert accept(request).prompt == "p"
    return request


def delta(start: int, num_tokens: int, index: int = 0, **more: object) -> Delta:
    token_ids = encode_ids(range(start, start + num_tokens))
    return Delta(request_id="a", index=index, start=start, token_ids=token_ids, **more)  # type: ignore[arg-type]


def test_without_delivered_tokens_a_resubmission_contains_only_the_prompt_tokens() -> None:
    submit = accept(accepted_request())
    assert (submit.attempt, submit.prompt, submit.prompt_token_ids, submit.children) == (1, None, PROMPT, [])
    assert submit.waited_s is not None and 0 <= submit.waited_s < 600


def test_a_resubmission_keeps_the_adapter_that_its_name_stood_for() -> None:
    request = OpenRequest(
        Submit(request_id="a", prompt="p", params=SamplingParams(), adapter="sql", adapter_path="/sql"), lambda _: None
    )
    submit = request.next_submit()
    assert submit.adapter_digest == b""
    accepted = Accepted(request_id="a", attempt=0, prompt_token_ids=PROMPT, prompt="p", seed=5, adapter_digest=b"d")
    assert request.accept(accepted)
    submit = request.next_submit()
    assert (submit.adapter, submit.adapter_path, submit.adapter_digest) == ("sql", "/sql", b"d")
    request.forget_adapter()
    submit = request.next_submit()
    assert (submit.adapter, submit.adapter_path, submit.adapter_digest) == ("sql", "/sql", b"")


def test_a_resubmission_names_the_bytes_that_urls_and_uuids_stood_for() -> None:
    held, url, uuid = Medium(digest=b"h"), Medium(url="http://x/y.png", detail="low"), Medium(uuid="u")
    request = OpenRequest(
        Submit(request_id="a", prompt="p", params=SamplingParams(), media=[held, url, uuid]), lambda _: None
    )
    assert request.next_submit().media == [held, url, uuid]
    accepted = Accepted(request_id="a", attempt=0, prompt_token_ids=PROMPT, prompt="p", seed=5)
    assert request.accept(msgspec.structs.replace(accepted, media_digests=[b"h", b"1", b"2"]))
    media = request.next_submit().media
    assert media == [held, Medium(url="http://x/y.png", detail="low", digest=b"1"), Medium(uuid="u", digest=b"2")]
    assert request.accept(msgspec.structs.replace(accepted, attempt=1)) and request.media == media


def test_each_sequence_keeps_the_seed_of_the_first_acceptance() -> None:
    request = accepted_request(n=3)
    assert request.apply(delta(0, 2)) == request.apply(delta(0, 1, index=2)) == "applied"
    assert request.apply(delta(2, 1, finish_reason="stop")) == "applied"
    for _ in range(2):
        submit = accept(request, seed=6)  # seed of the first unfinished sequence
        assert [(child.index, child.seed) for child in submit.children] == [(1, 6), (2, 7)]
        assert [len(decode_ids(child.output_token_ids)) for child in submit.children] == [0, 1]


def test_delivered_prompt_logprobs_are_not_requested_again() -> None:
    request = accepted_request()
    told = Logprobs(num_top=0, token_ids=encode_ids([8]), logprobs=bytes(4), ranks=encode_ids([1]))
    assert request.apply(delta(0, 0, prompt_logprobs=told, prompt_start=1)) == "applied"
    submit = accept(request)
    assert len(submit.children) == 1 and submit.num_prompt_logprobs == 2


def test_a_delta_is_applied_only_where_the_delivered_tokens_end() -> None:
    request = accepted_request()
    assert [request.apply(each) for each in (delta(0, 3), delta(1, 2), delta(3, 0))] == [
        "applied",
        "duplicate",
        "applied",
    ]
    assert request.apply(delta(0, 1, index=1)) == request.apply(delta(0, 1, index=-1)) == "duplicate"
    for each in (delta(4, 1), delta(2, 2), delta(1, 1, finish_reason="stop")):
        assert request.apply(each) == "gap"
    assert request.num_gaps == 3 and request.apply(delta(3, 1)) == "applied" and request.num_gaps == 0
    assert request.apply(delta(4, 0, finish_reason="stop")) == "applied" and request.apply(delta(4, 1)) == "duplicate"
    assert request.sequences[0].joined() == encode_ids(range(4))
