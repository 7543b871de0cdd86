"""Which files a checkpoint consists of, what identifies it and how large it is, without reading the weights.

folder with model.safetensors                 one file
folder with model.safetensors.index.json      shards
folder with one .gguf, or the .gguf itself    GGUF, dequantized while it is loaded
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from engine.tensor_files import TensorFile, read_gguf, read_safetensors
from messages.errors import ConfigError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
GGUF_SUFFIX = ".gguf"
_SAMPLE_BYTES = 4096
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose files are all there and complete."""

    folder: Path
    files: tuple[TensorFile, ...]
    gguf_name: str | None = None
    """Name of the file in `folder` when it is GGUF."""

    @property
    def num_parameters(self) -> int:
        """Weights in all files; a tied weight counts once."""
        return sum(tensor.num_elements for file in self.files for tensor in file.tensors)

    @property
    def digest(self) -> str:
        """64 hex digits that identify the content, found in well under a second whatever the size.

        Covers `config.json`, and of every file of weights its name, size, header (names, shapes, dtypes, places) and
        4 KiB from the middle of every tensor. Two trainings of one architecture differ in all of these samples; a
        hand-made change of a few bytes outside them would go unseen.

        Raises:
            ConfigError: A file cannot be read.
        """
        digest = hashlib.sha256(b"kvferry-checkpoint-v1")
        if self.gguf_name is None:
            _add(digest, [_read(self.folder / "config.json")])
        for file in self.files:
            _add(digest, [file.path.name.encode(), str(file.path.stat().st_size).encode(), file.header])
            with file.path.open("rb") as source:
                for start, end in sorted((tensor.start, tensor.end) for tensor in file.tensors):
                    source.seek(max(start, (start + end - _SAMPLE_BYTES) // 2))
                    _add(digest, [source.read(min(_SAMPLE_BYTES, end - start))])
        return digest.hexdigest()


def open_checkpoint(path: Path) -> Checkpoint:
    """Find the files of the checkpoint at `path`, a folder or a GGUF file, and check that they are complete.

    Raises:
        ConfigError: A file is missing, damaged or of a format that is not loaded; the message names it.
    """
    path = Path(path)
    gguf = gguf_file(path)
    if gguf is not None:
        return _open_gguf(gguf)
    index = path / INDEX_NAME
    if index.is_file():
        return Checkpoint(folder=path, files=_open_shards(index))
    single = path / SINGLE_NAME
    if single.is_file():
        return Checkpoint(folder=path, files=(read_safetensors(single),))
    raise ConfigError(_why_nothing(path))


def gguf_file(path: Path) -> Path | None:
    """Return the GGUF file that `path` means: itself, or the only one of a folder without safetensors.

    Raises:
        ConfigError: The folder holds several.
    """
    path = Path(path)
    if path.suffix == GGUF_SUFFIX and not path.is_dir():
        return path
    if not path.is_dir() or (path / INDEX_NAME).is_file() or (path / SINGLE_NAME).is_file():
        return None
    found = sorted(path.glob(f"*{GGUF_SUFFIX}"))
    if len(found) > 1:
        raise ConfigError(f"{path} holds {len(found)} .gguf files; give the path of one, such as {found[0]}")
    return found[0] if found else None


def _open_gguf(file: Path) -> Checkpoint:
    found = read_gguf(file)
    if int(found.metadata.get("split.count", 1)) > 1:
        raise ConfigError(f"{file} is one part of a split GGUF; merge the parts into one file first")
    return Checkpoint(folder=file.parent, files=(found,), gguf_name=file.name)


def _open_shards(index: Path) -> tuple[TensorFile, ...]:
    try:
        places = dict(json.loads(_read(index))["weight_map"])
        names = sorted(set(places.values()))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{index} is damaged; fetch it again") from error
    for name in names:
        if not (index.parent / name).is_file():
            raise ConfigError(f"{index.parent / name} does not exist, but {index.name} names it; fetch it")
    files = tuple(read_safetensors(index.parent / name) for name in names)
    for file in files:
        held = {tensor.name for tensor in file.tensors}
        lost = [tensor for tensor, name in places.items() if name == file.path.name and tensor not in held]
        if lost:
            raise ConfigError(f"{file.path} lacks {lost[0]}, which {index.name} says it has; fetch it again")
    return files


def _why_nothing(path: Path) -> str:
    if not path.is_dir():
        return f"{path} does not exist; give a folder that holds a model checkpoint, or a .gguf file"
    pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
    if pickles:
        return (
            f"{path / pickles[0]} is a pickle, which can run code when it is read; "
            "convert the checkpoint to safetensors (save_pretrained of transformers does)"
        )
    other = sorted(file.name for file in path.glob("*.safetensors"))
    if other:
        return f"{path} holds {other[0]}, but neither {SINGLE_NAME} nor {INDEX_NAME}"
    return f"{path} holds no *.safetensors or .gguf file; it is not a checkpoint, or its download broke off"


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error


def _add(digest: "hashlib._Hash", parts: Iterable[bytes]) -> None:
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
