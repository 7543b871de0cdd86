"""Python client of KVFerry (gRPC): `AsyncClient` for asyncio, `Client` for everything else."""

from kvferry.async_client import AsyncClient, AsyncStream
from kvferry.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    KVFerryError,
    NotAllowed,
    NotFound,
    Overloaded,
    Refused,
    StreamBroken,
    Unavailable,
    Unsupported,
)
from kvferry.explanations import CandidateScore, Explanation, PrefillReason, StageExplanation
from kvferry.requests import Messages, Prompt, Sampling
from kvferry.results import Choice, Chunk, Completion, FinishReason, ModelCard, Provenance, Timings, TokenLogprob, Usage
from kvferry.sync_client import Client, Stream

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Cancelled",
    "CandidateScore",
    "Choice",
    "Chunk",
    "Client",
    "Completion",
    "DeadlineExceeded",
    "Explanation",
    "FinishReason",
    "InternalError",
    "InvalidRequest",
    "KVFerryError",
    "Messages",
    "ModelCard",
    "NotAllowed",
    "NotFound",
    "Overloaded",
    "PrefillReason",
    "Prompt",
    "Provenance",
    "Refused",
    "Sampling",
    "StageExplanation",
    "Stream",
    "StreamBroken",
    "Timings",
    "TokenLogprob",
    "Unavailable",
    "Unsupported",
    "Usage",
]
