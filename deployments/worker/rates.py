"""What a worker has measured of itself: prompt tokens computed and bytes read per second, newest weighing most."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kv_store.layout import BlockLayout
from messages.v1 import worker_pb2 as pb
from telemetry.step_record import StepRecord

MIN_PREFILL_TOKENS = 16
"""A step with fewer prompt tokens says how fast decodes are."""
MIN_TRANSFER_BYTES = 64 * 1024
"""A smaller read says how long a call takes."""
TRANSFER_MEMORY_S = 60.0
"""One slow read must not end all reads, which alone could show that it was an exception."""


@dataclass(slots=True)
class RunningRate:
    """Amount per second over the last seconds or so; sums that fade, so that a short sample weighs little."""

    memory_s: float
    """Measured time after which a sample's weight has fallen to a third."""
    _amount: float = field(default=0.0, init=False)
    _seconds: float = field(default=0.0, init=False)

    def add(self, amount: float, seconds: float) -> None:
        """Take in one sample."""
        kept = max(0.0, 1.0 - seconds / self.memory_s)
        self._amount = self._amount * kept + amount
        self._seconds = self._seconds * kept + seconds

    @property
    def per_second(self) -> float | None:
        """The rate; None before the first sample."""
        return self._amount / self._seconds if self._seconds > 0 else None


class RateMeter:
    """Fed by the step thread and the event loop, read by heartbeats."""

    def __init__(self, layout: BlockLayout, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._prefill = RunningRate(memory_s=2.0)
        self._transfer = RunningRate(memory_s=0.5)
        self._transferred_s = -math.inf
        self._groups = [
            pb.GroupBytes(token_bytes=layout.block_bytes(number) // layout.block_size, window=group.window)
            for number, group in enumerate(layout.groups)
        ]

    def note_step(self, record: StepRecord) -> None:
        """Take in a step; decodes in it are counted as what they take of it."""
        if record.prefill_tokens >= MIN_PREFILL_TOKENS:
            self._prefill.add(record.prefill_tokens + record.decode_tokens, record.duration_ms / 1e3)

    def note_transfer(self, size_bytes: int, seconds: float) -> None:
        """Take in a read of blocks."""
        if size_bytes >= MIN_TRANSFER_BYTES:
            self._transfer.add(size_bytes, seconds)
            self._transferred_s = self._clock()

    def message(self) -> pb.Rates:
        """As the gateways hear it; without a transfer for long, nothing is known of the next one."""
        is_fresh = self._clock() - self._transferred_s < TRANSFER_MEMORY_S
        return pb.Rates(
            prefill_tokens_s=self._prefill.per_second,
            transfer_bytes_s=self._transfer.per_second if is_fresh else None,
            groups=self._groups,
        )
