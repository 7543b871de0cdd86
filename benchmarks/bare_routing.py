"""Routing without its reasons: what choosing a pair of workers and hashing a prompt cost at least."""

import hashlib

import numpy as np
from numpy.typing import NDArray


class BareChoice:
    """Two finished columns of costs, one per kind of worker."""

    def __init__(self, num_workers: int, seed: int = 1) -> None:
        draw = np.random.default_rng(seed)
        self._decode: NDArray[np.float64] = draw.random(num_workers)
        self._prefill: NDArray[np.float64] = draw.random(num_workers)

    def choose(self) -> tuple[int, int]:
        """Take the cheapest of each."""
        return int(self._decode.argmin()), int(self._prefill.argmin())


def hash_whole(data: bytes) -> bytes:
    """One digest of all bytes, where a prefix needs one of every block and all before it."""
    return hashlib.sha256(data).digest()
