"""What every worker would fetch of a prompt's prefix and what it would compute, all workers at once.

The prices are those of `cluster/reuse.py`, which says it for one worker; a test holds both together.
"""

from dataclasses import dataclass

import numpy as np

from cluster.reuse import ReuseRules
from cluster.snapshot import Floats, Ints, Snapshot


@dataclass(frozen=True, slots=True)
class Coverage:
    """A prompt against what each row holds and could fetch; arrays are (n,)."""

    remaining_tokens: Ints
    """To compute after what is fetched, at least 1: the last prompt token's logits are token 1."""
    work_tokens: Floats
    """To fetch and to compute, in tokens computed in the same time; continuous in what everybody holds."""


def cover(snapshot: Snapshot, prompt_tokens: int, matched_tokens: Ints, rules: ReuseRules | None) -> Coverage:
    """Price one prompt on every row.

    Args:
        snapshot: The workers.
        prompt_tokens: Length of the prompt.
        matched_tokens: Leading prompt tokens that each row holds, (n,).
        rules: When prefixes move between workers; None: never.
    """
    have = matched_tokens.astype(np.float64)
    uncached = np.maximum(prompt_tokens - have, 1.0)
    if rules is None or not matched_tokens.any():
        return Coverage(uncached.astype(np.int64), uncached)
    gained = np.maximum(np.minimum(_most_held(snapshot, have), prompt_tokens - 1.0) - have, 0.0)
    columns = snapshot.columns
    seconds = snapshot.bytes_between(gained) / columns.transfer_bytes_s + rules.overhead_s
    price = np.maximum(seconds * ((1.0 + rules.margin) * columns.prefill_tokens_s), rules.min_tokens)
    saved = np.maximum(gained - price, 0.0)
    return Coverage((uncached - gained * (saved > 0)).astype(np.int64), uncached - saved)


def _most_held(snapshot: Snapshot, have: Floats) -> Floats | float:
    """The most that a row with the same layout holds, (n,) or one for all; who holds it gains nothing by it."""
    if len(snapshot.layouts) == 1:
        return float(have.max())
    most = np.zeros(len(have))
    for index in range(len(snapshot.layouts)):
        rows = snapshot.columns.fingerprint == index
        most[rows] = have[rows].max(initial=0.0)
    return most
