"""A hand-off owner in the reader's own process: the table and a transport, without a network between."""

import logging
import uuid
from collections.abc import Callable

from kv_store.handoff import BlockGroups, HandoffTable
from kv_store.handoff_close import DigestBlock, close_with_digests
from kv_store.transfer.protocol import BlockTransport
from messages.handoff import CloseReply, Handoff, OpenReply

log = logging.getLogger(__name__)


class LocalHandoffOwner:
    """Answers a reader straight from the table."""

    def __init__(
        self,
        table: HandoffTable,
        transport: BlockTransport,
        group_offsets: tuple[int, ...],
        clock: Callable[[], float],
        digest: DigestBlock | None = None,
    ) -> None:
        self._table = table
        self._transport = transport
        self._group_offsets = group_offsets
        self._clock = clock
        self._digest = digest

    async def open(self, handoff: Handoff, groups: BlockGroups) -> OpenReply:
        """See `HandoffOwner.open`."""
        generation = self._table.open(
            handoff.handoff_id,
            attempt_id=uuid.uuid4().hex,
            incarnation=handoff.incarnation,
            fingerprint=handoff.fingerprint,
            groups=groups,
            now_s=self._clock(),
        )
        return OpenReply(
            generation=generation,
            agent_name=self._transport.agent_name,
            agent_metadata=self._transport.metadata(),
            group_offsets=self._group_offsets,
            lease_s=self._table.lease_s,
        )

    async def heartbeat(self, handoff: Handoff, generation: int) -> bool:
        """See `HandoffOwner.heartbeat`."""
        return self._table.heartbeat(handoff.handoff_id, handoff.incarnation, generation, self._clock())

    async def close(self, handoff: Handoff, generation: int) -> CloseReply:
        """See `HandoffOwner.close`."""
        return await close_with_digests(
            self._table, handoff.handoff_id, handoff.incarnation, generation, clock=self._clock, digest=self._digest
        )

    async def release(self, handoff: Handoff, reason: str) -> None:
        """See `HandoffOwner.release`."""
        was_held = self._table.release(handoff.handoff_id, handoff.incarnation, self._clock())
        log.info("handoff.released handoff_id=%s reason=%s was_held=%s", handoff.handoff_id, reason, was_held)
