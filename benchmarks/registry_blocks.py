"""Very many published blocks of many workers, and prompts that find them: equal in every process, kept nowhere.

A worker serves some of the documents. Each of its conversations starts with the blocks of one document, which several
workers hold, and goes on with blocks that nobody else has.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

from messages.handoff import BlockKey

UNSEEN_SHARE, DOCUMENT_SHARE = 0.1, 0.3
"""Of the prompts: what starts with nothing known, and what continues a document in a new way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """Who holds what; the defaults are a million blocks, of which 942,656 are distinct."""

    num_workers: int = 64
    blocks_per_worker: int = 15_625
    num_documents: int = 256
    documents_per_worker: int = 32
    document_blocks: int = 32
    conversation_blocks: int = 125
    """Of a conversation, its document included: 4,000 tokens in blocks of 32."""
    min_prompt_blocks: int = 16
    max_prompt_blocks: int = 250

    @property
    def num_blocks(self) -> int:
        """Blocks in all workers; one that several hold counts several times."""
        return self.num_workers * self.blocks_per_worker

    @property
    def num_conversations(self) -> int:
        """Complete ones per worker."""
        own_blocks = self.blocks_per_worker - self.documents_per_worker * self.document_blocks
        return own_blocks // (self.conversation_blocks - self.document_blocks)

    @property
    def num_distinct_blocks(self) -> int:
        """Keys of the registry when all is published."""
        documents = {self._document(worker, nth) for worker in range(self.num_workers) for nth in self._nths()}
        own_blocks = self.blocks_per_worker - self.documents_per_worker * self.document_blocks
        return len(documents) * self.document_blocks + self.num_workers * own_blocks

    def held_by(self, worker: int) -> Iterator[BlockKey]:
        """Yield the `blocks_per_worker` keys of one worker, parents before their children."""
        for nth in self._nths():
            yield from self._document_keys(self._document(worker, nth), self.document_blocks)
        left = self.blocks_per_worker - self.documents_per_worker * self.document_blocks
        tail_blocks = self.conversation_blocks - self.document_blocks
        for start in range(0, left, tail_blocks):
            yield from self._tail_keys(worker, start // tail_blocks, min(tail_blocks, left - start))

    def prompt(self, draw: random.Random) -> tuple[list[BlockKey], int]:
        """Make a prompt of mixed length and of mixed luck.

        Returns:
            Its keys, and how many leading ones some worker holds.
        """
        length = draw.randint(self.min_prompt_blocks, self.max_prompt_blocks)
        worker, conversation = draw.randrange(self.num_workers), draw.randrange(self.num_conversations)
        luck = draw.random()
        if luck < UNSEEN_SHARE:
            depth = 0
        elif luck < UNSEEN_SHARE + DOCUMENT_SHARE:
            depth = self.document_blocks
        else:
            depth = draw.randint(self.document_blocks, self.conversation_blocks)
        known = self._conversation_keys(worker, conversation)[: min(depth, length)]
        unknown = draw.getrandbits(64)
        return known + [_key("unseen", unknown, i) for i in range(length - len(known))], len(known)

    def _conversation_keys(self, worker: int, conversation: int) -> list[BlockKey]:
        document = self._document(worker, conversation % self.documents_per_worker)
        tail_blocks = self.conversation_blocks - self.document_blocks
        return [
            *self._document_keys(document, self.document_blocks),
            *self._tail_keys(worker, conversation, tail_blocks),
        ]

    def _document(self, worker: int, nth: int) -> int:
        # Steps of an odd number visit all documents, so neighbours share some and no worker has one twice.
        return (worker * 37 + nth * 5) % self.num_documents

    def _nths(self) -> range:
        return range(self.documents_per_worker)

    @staticmethod
    def _document_keys(document: int, num_blocks: int) -> Iterator[BlockKey]:
        return (_key("document", document, i) for i in range(num_blocks))

    @staticmethod
    def _tail_keys(worker: int, conversation: int, num_blocks: int) -> Iterator[BlockKey]:
        return (_key("tail", worker, conversation, i) for i in range(num_blocks))


def fresh_keys(draw: random.Random, num_keys: int) -> list[BlockKey]:
    """Keys that nobody has published."""
    chain = draw.getrandbits(64)
    return [_key("fresh", chain, i) for i in range(num_keys)]


def _key(*path: str | int) -> BlockKey:
    return BlockKey(blake2b(repr(path).encode(), digest_size=32).digest())
