"""What the registry's keys are called, and how a claim on a block reads.

    kvferry/<namespace>/b/<block key>     hash: worker id -> claim         anywhere
    kvferry/<namespace>/w<home>           hash: the worker table           one per shard
    kvferry/<namespace>/m<home>           hash: the shard's memory         one per shard
    kvferry/<namespace>/g<home>           who leads the clean-up           one per shard
    kvferry/<namespace>/l{<pool>}...      a pool's reservations            on one shard, in one slot

`<home>` is empty on plain servers; in a Redis Cluster it is a hash tag of a slot that the shard serves.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self, cast

from messages.errors import ConfigError
from messages.handoff import BlockKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One field of a block's hash, without the worker id."""

    expires_ms: int
    """On the clock of the shard."""
    tier: str
    life: str
    """Who claims: see `life_of`."""

    @classmethod
    def read(cls, value: bytes) -> Self | None:
        """Read a field's value; None when it is nobody's claim."""
        parts = value.decode(errors="replace").split("|", 2)
        if len(parts) != 3 or not parts[0].isdigit():
            return None
        return cls(expires_ms=int(parts[0]), tier=parts[1], life=parts[2])


def life_of(incarnation: str, generation: int) -> str:
    """Name one generation of one life of a worker, as claims and table are compared by it."""
    return f"{generation}|{incarnation}"


def pairs(reply: object) -> Iterator[tuple[bytes, bytes]]:
    """Go through the fields and values of a hash, as HGETALL answers them: in turn, in one list."""
    words = iter(cast("Sequence[bytes]", reply or ()))
    return zip(words, words, strict=True)


class KeyNames:
    """The keys of one namespace."""

    def __init__(self, namespace: str) -> None:
        """Fix the namespace.

        Raises:
            ConfigError: It is empty or has a character that keys use themselves.
        """
        if not namespace or set(namespace) & set("/{}"):
            raise ConfigError(
                "a registry namespace is a non-empty string without '/', '{' and '}'", namespace=namespace
            )
        self._root = f"kvferry/{namespace}/".encode()
        self._block_prefix = self._root + b"b/"

    @property
    def block_pattern(self) -> bytes:
        """For SCAN: every block of the namespace."""
        # A namespace may have characters that mean something in a pattern.
        return re.sub(rb"([*?\[\]\\^])", rb"\\\1", self._block_prefix) + b"*"

    def block(self, key: BlockKey) -> bytes:
        """Holders of a block."""
        return self._block_prefix + key

    def ledger(self, pool: bytes) -> bytes:
        """What the names of all keys of a pool's ledger begin with, its hash tag included."""
        # Whatever the pool's name is, the tag is not empty and the same in all of them.
        return self._root + b"l{p/" + pool + b"}"

    def block_key(self, name: bytes) -> BlockKey:
        """The block that `name` is about."""
        return BlockKey(name.removeprefix(self._block_prefix))

    def table(self, home: bytes) -> bytes:
        """The worker table's copy on the shard with that home."""
        return self._root + b"w" + home

    def memory(self, home: bytes) -> bytes:
        """What the shard with that home remembers of its writers."""
        return self._root + b"m" + home

    def leader(self, home: bytes) -> bytes:
        """Who leads the clean-up of the shard with that home."""
        return self._root + b"g" + home
