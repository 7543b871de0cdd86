"""What a file of tensors says of itself, read from its header alone: safetensors and GGUF.

A file is complete when it holds every byte that its header speaks of; a broken download ends earlier.
"""

import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from messages.errors import ConfigError

_GGUF_MAGIC = b"GGUF"
_GGUF_VERSIONS = (2, 3)
_GGUF_ALIGNMENT = 32
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MOST_DIMS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a file."""

    name: str
    num_elements: int
    start: int
    """First byte, counted from the beginning of the file."""
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFile:
    """A complete file of tensors."""

    path: Path
    header: bytes
    """Names, shapes, dtypes and places of the tensors, as they are in the file."""
    tensors: tuple[StoredTensor, ...]
    metadata: dict[str, Any]
    """What else the header says, as far as it is a single value."""


def read_safetensors(file: Path) -> TensorFile:
    """Read the header of a safetensors file.

    Raises:
        ConfigError: The file is missing, damaged or incomplete; the message names it.
    """
    return _read(file, _parse_safetensors, "safetensors")


def read_gguf(file: Path) -> TensorFile:
    """Read the header of a GGUF file.

    Raises:
        ConfigError: The file is missing, damaged, incomplete or of an unknown version; the message names it.
    """
    return _read(file, _parse_gguf, "GGUF")


def _read(file: Path, parse: Callable[[Path, BinaryIO], TensorFile], kind: str) -> TensorFile:
    try:
        with file.open("rb") as source:
            found = parse(file, source)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError, struct.error) as error:
        raise ConfigError(f"{file} is damaged or no {kind} file; fetch it again") from error
    last = max((tensor.end for tensor in found.tensors), default=0)
    if last > file.stat().st_size:
        raise ConfigError(f"{file} is not a complete {kind} file: it ends before its last tensor; fetch it again")
    return found


def _parse_safetensors(file: Path, source: BinaryIO) -> TensorFile:
    size = int.from_bytes(source.read(8), "little")
    if not 0 < size <= file.stat().st_size - 8:
        raise ValueError("the header is longer than the file")
    header = source.read(size)
    tensors = tuple(
        StoredTensor(
            name=name,
            num_elements=math.prod(entry["shape"]),
            start=8 + size + entry["data_offsets"][0],
            end=8 + size + entry["data_offsets"][1],
        )
        for name, entry in json.loads(header).items()
        if name != "__metadata__"
    )
    return TensorFile(path=file, header=header, tensors=tensors, metadata={})


def _parse_gguf(file: Path, source: BinaryIO) -> TensorFile:
    if source.read(4) != _GGUF_MAGIC:
        raise ValueError("not a GGUF file")
    version, num_tensors, num_values = _unpack(source, "<IQQ")
    if version not in _GGUF_VERSIONS:
        raise ConfigError(f"{file} is GGUF version {version}; versions 2 and 3 are supported")
    metadata = dict(_gguf_value(source) for _ in range(num_values))
    entries = [_gguf_tensor(source) for _ in range(num_tensors)]
    header_end = source.tell()
    alignment = int(metadata.get("general.alignment", _GGUF_ALIGNMENT))
    first = -(-header_end // alignment) * alignment
    source.seek(0)
    return TensorFile(
        path=file,
        header=source.read(header_end),
        tensors=tuple(
            StoredTensor(name=name, num_elements=count, start=first + offset, end=first + offset + size)
            for name, count, offset, size in entries
        ),
        metadata={name: value for name, value in metadata.items() if value is not None},
    )


def _gguf_value(source: BinaryIO) -> tuple[str, Any]:
    """Read a name and its value; the value of an array is skipped and None."""
    name = _gguf_string(source)
    (kind,) = _unpack(source, "<I")
    if kind == _ARRAY:
        element, count = _unpack(source, "<IQ")
        if element != _STRING:
            source.seek(struct.calcsize(_SCALARS[element]) * count, 1)
            return name, None
        for _ in range(count):
            (length,) = _unpack(source, "<Q")
            source.seek(length, 1)
        return name, None
    return name, _gguf_string(source) if kind == _STRING else _unpack(source, _SCALARS[kind])[0]


def _gguf_tensor(source: BinaryIO) -> tuple[str, int, int, int]:
    """Read name, elements, offset among the tensors and bytes of a tensor."""
    name = _gguf_string(source)
    (num_dims,) = _unpack(source, "<I")
    if num_dims > _MOST_DIMS:
        raise ValueError("too many dimensions")
    count = math.prod(_unpack(source, f"<{num_dims}Q"))
    kind, offset = _unpack(source, "<IQ")
    block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    return name, count, offset, -(-count // block_elements) * block_bytes


def _gguf_string(source: BinaryIO) -> str:
    (length,) = _unpack(source, "<Q")
    text = source.read(length)
    if len(text) != length:
        raise ValueError("the file ends inside its header")
    return text.decode()


def _unpack(source: BinaryIO, form: str) -> tuple[Any, ...]:
    return struct.unpack(form, source.read(struct.calcsize(form)))
