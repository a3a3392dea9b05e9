"""detect_language: the language of a clip of speech, which the model names by one token."""

from __future__ import annotations

from .....ipc.codec import decode_ids
from .....ipc.errors import RequestError
from .....ipc.messages.client import Medium, Submit
from .....ipc.messages.intake import BodyInput
from .....ipc.params.sampling_params import SamplingParams
from ....forms.speech.languages import Language
from ....forms.speech.prompts import LanguageQuestion
from ..openai.local_engine import LocalEngine


async def detect_language(
    engine: LocalEngine, question: LanguageQuestion, request_id: str, clip: bytes, params: SamplingParams
) -> Language:
    """Ask about a clip, by the digest of its media file. params: of the requests about it."""
    submit = Submit(
        request_id=request_id,
        params=params.replace(
            temperature=0.0, max_tokens=1, logprobs=None, allowed_token_ids=sorted(question.languages)
        ),
        prompt_token_ids=await engine.text_tokens(BodyInput(text=question.text), False),
        media=[Medium(kind="audio", digest=clip)],
    )
    token_ids, reason = list[int](), None
    with engine.run([submit]) as run:
        async for deltas in run.deltas():
            for _, delta in deltas:
                token_ids += decode_ids(delta.token_ids).tolist()
                reason = delta.finish_reason
    if not token_ids:
        raise RequestError(f"file: the detection of its language ended with {reason}: send it again, or give language")
    return question.languages[token_ids[0]]
