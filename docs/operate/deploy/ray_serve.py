"""A deployment of Ray Serve around `AsyncLLM`: the answer to a prompt over HTTP, and a stream of it from Python.

    pip install 'tokenloom[ray]' 'ray[serve]'
    serve run ray_serve:new_app                        # the small demo model, one rank
    curl -G localhost:8000 --data-urlencode 'prompt=The capital of France is'

Another model, with tensor parallelism over two nodes of the cluster:

    serve run ray_serve:new_app model=Qwen/Qwen3-8B tensor_parallel_size=4 hosts=2

The replica takes no resource of Ray itself: its engine reserves those of the ranks. More replicas are more engines. For
OpenAI's API, http=8001 has each engine serve it.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import ray
from ray import serve

from tokenloom import AsyncLLM, SamplingParams


@serve.deployment(max_ongoing_requests=256, ray_actor_options={"num_cpus": 0})
class TextModel:
    """One engine, whose processes end with the replica."""

    def __init__(self, **options: Any) -> None:
        os.environ.setdefault("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
        self._llm = AsyncLLM(**options)

    async def __call__(self, request: Any) -> str:
        """Answer GET /?prompt=…&max_tokens=…"""
        fields = request.query_params
        pieces = self.stream(fields["prompt"], int(fields.get("max_tokens", "16")))
        return "".join([piece async for piece in pieces])

    async def stream(self, prompt: str, max_tokens: int = 16) -> AsyncIterator[str]:
        """Yield the answer piece by piece, for handle.options(stream=True).stream.remote(prompt)."""
        params = SamplingParams(temperature=0, max_tokens=max_tokens, output_kind="delta")
        async for output in self._llm.generate(prompt, params):
            yield output.outputs[0].text

    async def check_health(self) -> None:
        """Raise if the engine has ended: Serve replaces the replica."""
        await self._llm.health()


def new_app(options: dict[str, str]) -> serve.Application:
    """Make the application from the words after its name: each is an option of `AsyncLLM`."""
    numbers = {name: int(value) for name, value in options.items() if value.isdecimal()}
    return TextModel.bind(**{"model": "demo", "distributed_executor_backend": "ray", **options, **numbers})
