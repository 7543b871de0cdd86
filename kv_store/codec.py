"""A codec owns the bytes of a block: how wide a token's row is and what dtype the views have.

Only raw codecs exist; one that quantises keeps its scales inside the row, so that a block stays one range of bytes.
The codec's name is part of the layout fingerprint and of every block key.
"""

from typing import Protocol

import torch

from messages.errors import ConfigError

_RAW_DTYPES = {
    "raw-float32": torch.float32,
    "raw-bfloat16": torch.bfloat16,
    "raw-float16": torch.float16,
}


class Codec(Protocol):
    """What a layout asks of the encoding of one K or V row."""

    @property
    def name(self) -> str:
        """Stable id, part of fingerprints and keys."""

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the views over the arena."""

    def row_bytes(self, dim: int) -> int:
        """Bytes of one token's row of `dim` elements in one head, a multiple of the dtype's size."""


class RawCodec:
    """The elements themselves, nothing else.

    Raises:
        ConfigError: No raw codec has this dtype.
    """

    __slots__ = ("dtype", "name")

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.name = raw_codec_name(dtype)

    def row_bytes(self, dim: int) -> int:
        """Bytes of `dim` elements."""
        return dim * self.dtype.itemsize


def raw_codec_name(dtype: torch.dtype) -> str:
    """Name the raw codec of a dtype.

    Raises:
        ConfigError: No raw codec has this dtype.
    """
    for name, known in _RAW_DTYPES.items():
        if known == dtype:
            return name
    raise ConfigError("no KV codec stores this dtype", dtype=dtype, known=", ".join(_RAW_DTYPES))


def codec_named(name: str) -> Codec:
    """Look a codec up by its name.

    Raises:
        ConfigError: There is no codec of this name.
    """
    if name not in _RAW_DTYPES:
        raise ConfigError("unknown KV codec", codec=name, known=", ".join(_RAW_DTYPES))
    return RawCodec(_RAW_DTYPES[name])
