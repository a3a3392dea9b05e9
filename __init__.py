"""tokenloom: an inference engine for large language models.

These names are the public API. They are imported on first use (PEP 562), so that `import tokenloom` takes milliseconds
and a client program imports neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .frontend.client.async_client import AsyncClient
    from .frontend.client.client import Client
    from .frontend.client.offline.beam_search import BeamSearchOutput, BeamSearchSequence
    from .frontend.client.outputs import (
        CompletionOutput,
        RequestOutput,
        SpokenSegment,
        TranscriptionOutput,
    )
    from .frontend.client.pooling.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        RerankResult,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from .frontend.forms.logprobs import FlatLogprobs
    from .frontend.llm import LLM, AsyncLLM
    from .ipc.errors import (
        ConfigError,
        Draining,
        EngineDead,
        InternalError,
        Overloaded,
        ProtocolError,
        RequestError,
        TokenloomError,
    )
    from .ipc.messages.client import RequestMetrics
    from .ipc.params.beam_search_params import BeamSearchParams
    from .ipc.params.lora_request import LoRARequest
    from .ipc.params.pooling_params import PoolingParams
    from .ipc.params.sampling_params import SamplingParams
    from .ipc.params.structured_outputs import StructuredOutputsParams

_HOME_BY_NAME = {
    "LLM": "frontend.llm",
    "AsyncLLM": "frontend.llm",
    "Client": "frontend.client.client",
    "AsyncClient": "frontend.client.async_client",
    "RequestOutput": "frontend.client.outputs",
    "CompletionOutput": "frontend.client.outputs",
    "FlatLogprobs": "frontend.forms.logprobs",
    "RequestMetrics": "ipc.messages.client",
    "ClassificationOutput": "frontend.client.pooling.outputs",
    "ClassificationRequestOutput": "frontend.client.pooling.outputs",
    "EmbeddingOutput": "frontend.client.pooling.outputs",
    "EmbeddingRequestOutput": "frontend.client.pooling.outputs",
    "PoolingOutput": "frontend.client.pooling.outputs",
    "PoolingRequestOutput": "frontend.client.pooling.outputs",
    "RerankResult": "frontend.client.pooling.outputs",
    "ScoringOutput": "frontend.client.pooling.outputs",
    "ScoringRequestOutput": "frontend.client.pooling.outputs",
    "TranscriptionOutput": "frontend.client.outputs",
    "SpokenSegment": "frontend.client.outputs",
    "BeamSearchParams": "ipc.params.beam_search_params",
    "BeamSearchOutput": "frontend.client.offline.beam_search",
    "BeamSearchSequence": "frontend.client.offline.beam_search",
    "LoRARequest": "ipc.params.lora_request",
    "SamplingParams": "ipc.params.sampling_params",
    "PoolingParams": "ipc.params.pooling_params",
    "StructuredOutputsParams": "ipc.params.structured_outputs",
    "TokenloomError": "ipc.errors",
    "RequestError": "ipc.errors",
    "Overloaded": "ipc.errors",
    "Draining": "ipc.errors",
    "ConfigError": "ipc.errors",
    "ProtocolError": "ipc.errors",
    "EngineDead": "ipc.errors",
    "InternalError": "ipc.errors",
}

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncClient",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "Client",
    "CompletionOutput",
    "ConfigError",
    "Draining",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineDead",
    "FlatLogprobs",
    "InternalError",
    "LoRARequest",
    "Overloaded",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "ProtocolError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "RerankResult",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "SpokenSegment",
    "StructuredOutputsParams",
    "TokenloomError",
    "TranscriptionOutput",
]


def __getattr__(name: str) -> object:
    if name not in _HOME_BY_NAME:
        raise AttributeError(f"module 'tokenloom' has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME_BY_NAME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
