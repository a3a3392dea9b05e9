"""Bytes of images come before their request, once, and again only when the engine has lost them."""

from __future__ import annotations

import hashlib

from tokenloom.frontend.client.open_request import OpenRequest, Update
from tokenloom.frontend.forms.prompts import new_submit
from tokenloom.ipc.messages.client import Accepted, Medium, NeedMedia, PutMedium, Submit
from tokenloom.ipc.params.sampling_params import SamplingParams
from tokenloom.tests.frontend.server.requests.rig import Rig

A, B = b"image a", b"image b"


def submit_images(rig: Rig, request_id: str, *images: object) -> list[Update]:
    updates: list[Update] = []
    prompt = {"prompt": "p", "multi_modal_data": {"image": [*images]}}
    rig.protocol.submit(OpenRequest(new_submit(request_id, prompt, SamplingParams()), updates.append))
    return updates


def sent(rig: Rig) -> list[bytes | str]:
    """Return the bytes and request ids that wait to be sent, and remove them."""
    found: list[bytes | str] = []
    for message in rig.to_frontend:
        if isinstance(message, PutMedium):
            assert message.digest == hashlib.sha256(message.data).digest()
            found.append(message.data)
        elif isinstance(message, Submit):
            found.append(message.request_id)
    rig.to_frontend.clear()
    return found


def ready_rig() -> Rig:
    rig = Rig()
    rig.carry()
    rig.to_frontend.clear()
    return rig


def test_bytes_come_before_the_request_and_once() -> None:
    rig = ready_rig()
    submit_images(rig, "one", A, B, A)
    submit_images(rig, "two", B)
    submit_images(rig, "three", Medium(url="http://a"))
    assert sent(rig) == [A, B, "one", "two", "three"]


def test_lost_bytes_are_sent_again_when_asked() -> None:
    rig = ready_rig()
    submit_images(rig, "one", A, B)
    sent(rig)
    digest = hashlib.sha256(B).digest()
    rig.protocol.receive(NeedMedia(request_id="one", attempt=0, digests=[digest]), rig.now)
    rig.protocol.receive(NeedMedia(request_id="other", attempt=0, digests=[digest]), rig.now)
    assert sent(rig) == [B]


def test_a_resubmission_names_digests_and_keeps_the_prompt() -> None:
    rig = ready_rig()
    submit_images(rig, "one", A)
    sent(rig)
    rig.protocol.receive(Accepted(request_id="one", attempt=0, prompt_token_ids=bytes(40), prompt="p", seed=1), rig.now)
    rig.reopen()
    rig.carry()
    (submit,) = rig.sent(Submit)
    assert isinstance(submit, Submit) and submit.attempt == 1
    assert submit.prompt == "p" and submit.prompt_token_ids is None
    assert [medium.digest for medium in submit.media] == [hashlib.sha256(A).digest()]
    assert sent(rig) == ["one"]


def test_bytes_count_in_the_window_of_unanswered_requests() -> None:
    rig = ready_rig()
    big = [bytes([i]) * (6 << 20) for i in range(4)]
    for i, image in enumerate(big):
        submit_images(rig, f"r{i}", image)
    assert sent(rig) == [big[0], "r0", big[1], "r1"]
