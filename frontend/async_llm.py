"""AsyncLLM: a private engine and the AsyncClient of it, in one object.

async for output in AsyncLLM(model=…).generate("The capital of France is"): …
"""

from __future__ import annotations

import os

from .async_client import AsyncClient
from .engine_options import config_from_keywords
from .llm import open_in_process, open_private


class AsyncLLM(AsyncClient):
    """Serves `model`, a folder or hub id; without one, the demo model that comes with tokenloom."""

    def __init__(
        self, model: str | os.PathLike[str] | None = None, *, in_process: bool = False, **options: object
    ) -> None:
        """Start an engine and wait until it serves; keywords and errors are those of LLM.

        `in_process` runs all of it in a thread of this process.
        """
        config = config_from_keywords("AsyncLLM", model, options)
        self._attach(*(open_in_process(config, in_background=True) if in_process else open_private(config)))
