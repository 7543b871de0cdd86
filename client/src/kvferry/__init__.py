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
from kvferry.requests import Messages, Prompt, Sampling
from kvferry.results import Chunk, Completion, FinishReason, ModelCard, Provenance, Timings, Usage
from kvferry.sync_client import Client, Stream

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Cancelled",
    "Chunk",
    "Client",
    "Completion",
    "DeadlineExceeded",
    "FinishReason",
    "InternalError",
    "InvalidRequest",
    "KVFerryError",
    "Messages",
    "ModelCard",
    "NotAllowed",
    "NotFound",
    "Overloaded",
    "Prompt",
    "Provenance",
    "Refused",
    "Sampling",
    "Stream",
    "StreamBroken",
    "Timings",
    "Unavailable",
    "Unsupported",
    "Usage",
]
