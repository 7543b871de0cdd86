"""The content hash of a full block and of all that precedes it, equal in every process and on every machine.

    root    = sha256(seed, model, block size, codec, adapter, salt)      typed and length-prefixed
    key[i]  = sha256(key[i - 1], tokens of block i as little-endian u32)  with key[-1] = root

Whatever changes the KV of a token is in the root or in the tokens, so equal keys mean interchangeable blocks.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from messages.handoff import BlockKey
from messages.requests import Adapter

_SEED = b"kvferry-block-v1"
_SALT_SEED = b"kvferry-salt-v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyExtras:
    """What sets the KV of equal tokens apart."""

    model: str
    """Digest of the weights and of what else the model's KV depends on."""
    block_size: int
    codec: str
    adapter: Adapter | None = None
    salt: bytes = b""
    """From `tenant_salt`; requests with other salts never share a block."""


def root_key(extras: KeyExtras) -> BlockKey:
    """Hash the extras into the key that precedes a prompt's first block."""
    adapter = extras.adapter
    adapter_parts = () if adapter is None else (adapter.name.encode(), adapter.digest.encode())
    fields = (
        _field(b"model", extras.model.encode()),
        _field(b"block_size", str(extras.block_size).encode()),
        _field(b"codec", extras.codec.encode()),
        _field(b"adapter", *adapter_parts),
        _field(b"salt", extras.salt),
    )
    return BlockKey(hashlib.sha256(_SEED + b"".join(fields)).digest())


def tenant_salt(tenant: str, client_salt: str = "") -> bytes:
    """Derive the salt that sets a tenant's blocks apart, on the server.

    What a client asks for only divides its tenant's blocks further; it never reaches another tenant's.

    Args:
        tenant: Authenticated; empty where everybody is one tenant.
        client_salt: From the request; empty for none.

    Returns:
        Empty when both are empty, else 32 bytes that differ for every two different pairs.
    """
    if not tenant and not client_salt:
        return b""
    fields = _field(b"tenant", tenant.encode()) + _field(b"client_salt", client_salt.encode())
    return hashlib.sha256(_SALT_SEED + fields).digest()


def block_keys(root: BlockKey, token_ids: Sequence[int], block_size: int) -> list[BlockKey]:
    """Hash every full block of `token_ids`; a tail shorter than a block has no key.

    Args:
        root: The key before the first block: `root_key(...)`, or the last key so far to go on from there.
        token_ids: Ids in [0, 2**32), the first at a block's start.
        block_size: Tokens per block.

    Raises:
        OverflowError: An id does not fit.
    """
    data = np.asarray(token_ids, dtype="<u4").tobytes()
    step = 4 * block_size
    keys = []
    parent: bytes = root
    for start in range(0, len(data) - step + 1, step):
        parent = hashlib.sha256(parent + data[start : start + step]).digest()
        keys.append(BlockKey(parent))
    return keys


def _field(tag: bytes, *parts: bytes) -> bytes:
    # The tag types the field, the count tells "absent" from "empty", the lengths keep neighbours apart.
    chunks = [_sized(tag), len(parts).to_bytes(4, "little")]
    chunks.extend(_sized(part) for part in parts)
    return b"".join(chunks)


def _sized(part: bytes) -> bytes:
    return len(part).to_bytes(8, "little") + part
