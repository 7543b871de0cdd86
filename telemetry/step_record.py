"""What one engine step did and how long it took; the latency predictor and the simulator feed on it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One forward pass."""

    at_s: float
    """Monotonic clock of the worker at the step's end."""
    prefill_tokens: int
    decode_tokens: int
    context_tokens: int
    """Sum over rows of the tokens attended to."""
    num_rows: int
    duration_ms: float


class StepLog:
    """Appends StepRecords to a JSONL file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def append(self, record: StepRecord) -> None:
        """Write one line."""
        self._file.write(json.dumps(asdict(record)) + "\n")

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()
