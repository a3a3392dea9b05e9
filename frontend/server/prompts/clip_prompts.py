"""Check of prompts for a model with cross attention: each starts with an audio clip and may only ask for tokens."""

from __future__ import annotations

from ....ipc.codec import num_ids
from ....ipc.errors import RequestError
from ....ipc.messages.client import Submit
from .prompt import Prompt


def check_clip(submit: Submit, prompt: Prompt, num_clip_tokens: int) -> None:
    """Raise RequestError if the prompt has no clip, or no tokens after the `num_clip_tokens` tokens of its clip, or if
    the request asks for embeddings or prompt logprobs."""
    if not prompt.spans:
        raise RequestError("this model answers to audio: give a clip with each prompt, as multi_modal_data has it")
    if num_ids(prompt.token_ids) <= num_clip_tokens:
        raise RequestError("the prompt has no tokens behind its clip: give at least <|startoftranscript|>")
    if submit.pooling is not None:
        raise RequestError("this model answers to audio and gives no embeddings of prompts: ask for text")
    if submit.params.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs are not there for a prompt with a clip at its head: leave it out")
