"""Fault points around the steps of an engine: delays, failures and deaths in prefill or in decode."""

from collections.abc import Sequence

from engine.batch import Batch, RowResult
from engine.loop import Runner
from kv_store.local_cache import BlockCopy
from messages.faults import Faults


class FaultyRunner:
    """Passes a fault point before each step, then runs it.

    Args:
        inner: Runs the model.
        faults: What is planned.
    """

    def __init__(self, inner: Runner, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    def run(self, batch: Batch) -> Sequence[RowResult]:
        """See `Runner.run`.

        Raises:
            ServingError: As planned.
        """
        is_prefill = any(row.start < len(row.prompt) for row in batch.rows)
        self._faults.at_blocking("engine.prefill_chunk" if is_prefill else "engine.decode_step")
        return self._inner.run(batch)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """See `Runner.copy_blocks`."""
        self._inner.copy_blocks(copies)


def with_faults(runner: Runner, faults: Faults) -> Runner:
    """Put the fault points around a runner; it comes back as it is when none is planned."""
    return FaultyRunner(runner, faults) if faults.has("engine.") else runner
