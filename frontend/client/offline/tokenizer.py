"""Loading of the engine's tokenizer in the caller's program. No other module of the client imports transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from ....ipc.errors import RequestError
from ....ipc.messages.client import Info

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TransformersTokenizer: TypeAlias = "PreTrainedTokenizerBase"


def load_tokenizer(info: Info) -> TransformersTokenizer:
    """Load the tokenizer from the engine's folder, with the engine's chat template. Errors of transformers are raised
    unchanged.

    RequestError if the folder does not exist on this machine.
    """
    folder = info.tokenizer_folder
    if not folder or not Path(folder).is_dir():
        raise RequestError(f"the engine's tokenizer ({folder or 'none'}) is not here: use tokenize() and detokenize()")
    from transformers import AutoTokenizer  # takes seconds

    tokenizer: TransformersTokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = info.chat_template or tokenizer.chat_template
    return tokenizer
