"""Which shard keeps a block key: rendezvous hashing, so that a lost shard moves only its own keys.

Source: Thaler and Ravishankar 1998, "Using name-based mappings to increase hit rates".
"""

from collections.abc import Sequence

import xxhash

from messages.errors import ConfigError


class RendezvousSharding:
    """A fixed set of shard names; every process that knows the same names agrees on the place of every key."""

    def __init__(self, names: Sequence[str]) -> None:
        if not names:
            raise ConfigError("the registry needs at least one shard")
        if len(set(names)) != len(names):
            raise ConfigError("two shards of the registry have one name", names=tuple(names))
        # Score ties break by name, not by position, so the order of the list does not matter.
        self._seeds = sorted((name, xxhash.xxh64_intdigest(name.encode()), index) for index, name in enumerate(names))

    def shard_of(self, key: bytes) -> int:
        """Return the index, in the list of names given, of the shard that keeps `key`."""
        best_score, best_index = -1, 0
        for _, seed, index in self._seeds:
            score = xxhash.xxh64_intdigest(key, seed)
            if score > best_score:
                best_score, best_index = score, index
        return best_index

    def split(self, keys: Sequence[bytes]) -> dict[int, list[int]]:
        """Return, per shard that keeps any of `keys`, the positions of its keys, ascending."""
        positions: dict[int, list[int]] = {}
        for position, key in enumerate(keys):
            positions.setdefault(self.shard_of(key), []).append(position)
        return positions
