"""A checkpoint folder becomes a model that calls our attention, with the KV layout and identity that it implies."""

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.attention.function import ATTENTION_NAME
from kv_store.layout import BlockLayout, KvGroup
from messages.errors import ConfigError, ModelRefused

_SAMPLE_BYTES = 4096
_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_KINDS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in memory and what the rest of the engine must know of it."""

    model: Any
    """A transformers causal language model in eval mode, without gradients, with our attention."""
    config: Any
    """Its text configuration."""
    dtype: torch.dtype
    device: torch.device
    digest: str
    """Names the content of the checkpoint; see `checkpoint_digest`."""
    context_length: int
    """Most tokens of prompt and output together."""
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _TensorFile:
    path: Path
    header: bytes
    tensors: dict[str, Any]

    @property
    def data_start(self) -> int:
        return 8 + len(self.header)


def load_model(path: Path, dtype: torch.dtype, device: torch.device | str) -> LoadedModel:
    """Load a folder with `config.json` and safetensors files.

    Raises:
        ConfigError: A file is missing or broken; the message names it.
        ModelRefused: The model needs something that this engine would silently get wrong.
    """
    path, device = Path(path), torch.device(device)
    dtype_name(dtype)
    config = read_config(path)
    refuse_unsupported(config)
    digest = checkpoint_digest(path)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, attn_implementation=ATTENTION_NAME, local_files_only=True
        )
    except (ValueError, KeyError, RuntimeError, OSError) as error:
        raise ModelRefused(f"transformers cannot load {path}: {_first_line(error)}") from error
    model = model.to(device).eval().requires_grad_(requires_grad=False)
    text_config = model.config.get_text_config()
    return LoadedModel(
        model=model,
        config=text_config,
        dtype=dtype,
        device=device,
        digest=digest,
        context_length=int(text_config.max_position_embeddings),
        eos_token_ids=_eos_token_ids(model),
    )


def read_config(path: Path) -> Any:
    """Read `config.json` as transformers sees it.

    Raises:
        ConfigError: There is none, or it is not readable.
        ModelRefused: transformers does not know the architecture.
    """
    path = Path(path)
    file = path / "config.json"
    if not file.is_file():
        raise ConfigError(f"{file} does not exist; give a folder that holds a model checkpoint")
    try:
        return transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {_first_line(error)}") from error
    except (ValueError, KeyError) as error:
        raise ModelRefused(f"transformers does not know the model in {file}: {_first_line(error)}") from error


def refuse_unsupported(config: Any) -> None:
    """Refuse what is known not to work before any weight is read; the load probe finds the rest.

    Raises:
        ModelRefused: With the reason.
    """
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise ModelRefused("encoder-decoder models are not supported")
    if getattr(text, "kv_lora_rank", None):
        raise ModelRefused("multi-head latent attention (kv_lora_rank) is not supported")
    if getattr(config, "quantization_config", None):
        raise ModelRefused("quantized checkpoints are not supported; give float weights")
    for rope_type in _rope_types(getattr(text, "rope_parameters", None)):
        if rope_type in ("dynamic", "longrope"):
            raise ModelRefused(f"{rope_type} rope is not supported: its frequencies depend on the other requests")
    if unknown := set(getattr(text, "layer_types", None) or ()) - _KINDS:
        raise ModelRefused(f"layers of kind {', '.join(sorted(unknown))} are not supported")


def kv_layout(config: Any, dtype: torch.dtype, block_size: int, digest: str) -> BlockLayout:
    """Lay the model's KV out: one group per attention kind, in the order of their first layers.

    Args:
        config: Text configuration of the model.
        dtype: What KV is stored as.
        block_size: Tokens of a block.
        digest: Identity of the weights.
    """
    windows = layer_windows(config)
    num_heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    groups = tuple(
        KvGroup(
            name="full" if window is None else "sliding",
            layers=tuple(layer for layer, other in enumerate(windows) if other == window),
            num_kv_heads=num_heads,
            k_dim=head_dim,
            v_dim=int(getattr(config, "v_head_dim", None) or head_dim),
            window=window,
            codec=f"raw-{dtype_name(dtype)}",
        )
        for window in dict.fromkeys(windows)
    )
    return BlockLayout(groups=groups, block_size=block_size, model_digest=digest, rope_digest=_rope_digest(config))


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """Return each layer's sliding window in tokens, its own position included; None attends to everything."""
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return (window,) * int(config.num_hidden_layers)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def checkpoint_digest(path: Path) -> str:
    """Hash what identifies a checkpoint, in well under a second whatever its size.

    Covers `config.json`, and of every safetensors file its name, size, header (names, shapes, dtypes, places) and 4 KiB
    from the middle of every tensor. Two trainings of one architecture differ in all of these samples; a hand-made
    change of a few bytes outside them would go unseen.

    Returns:
        64 hex digits.

    Raises:
        ConfigError: A file is missing or broken.
    """
    digest = hashlib.sha256(b"kvferry-checkpoint-v1")
    _add(digest, _read(Path(path) / "config.json"))
    for file in _tensor_files(path):
        _add(digest, file.path.name.encode(), str(file.path.stat().st_size).encode(), file.header)
        with file.path.open("rb") as source:
            for start, end in sorted(entry["data_offsets"] for entry in file.tensors.values()):
                source.seek(file.data_start + max(start, (start + end - _SAMPLE_BYTES) // 2))
                _add(digest, source.read(min(_SAMPLE_BYTES, end - start)))
    return digest.hexdigest()


def memory_needed_bytes(path: Path, dtype: torch.dtype) -> int:
    """Return the bytes that the weights take once loaded as `dtype`; reads headers only.

    Raises:
        ConfigError: A file is missing or broken.
    """
    total = 0
    for file in _tensor_files(path):
        for entry in file.tensors.values():
            count = 1
            for size in entry["shape"]:
                count *= size
            total += count * dtype.itemsize
    return total


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype that weights and KV may have.

    Raises:
        ConfigError: It is none of float32, bfloat16, float16.
    """
    if dtype not in _DTYPE_NAMES:
        raise ConfigError(f"dtype {dtype} is not one of {', '.join(_DTYPE_NAMES.values())}")
    return _DTYPE_NAMES[dtype]


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype of that name.

    Raises:
        ConfigError: It is none of float32, bfloat16, float16.
    """
    for dtype, known in _DTYPE_NAMES.items():
        if known == name:
            return dtype
    raise ConfigError(f"dtype {name!r} is not one of {', '.join(_DTYPE_NAMES.values())}")


def _tensor_files(path: Path) -> list[_TensorFile]:
    path = Path(path)
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(_read(index))["weight_map"].values()))
        return [_tensor_file(path / name) for name in names]
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise ConfigError(f"{path} holds no .safetensors file; weights of other formats must be converted first")
    return [_tensor_file(file) for file in found]


def _tensor_file(file: Path) -> _TensorFile:
    if not file.is_file():
        raise ConfigError(f"{file} does not exist, but the checkpoint's index names it")
    with file.open("rb") as source:
        prefix = source.read(8)
        size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 0 < size <= file.stat().st_size - 8:
            raise ConfigError(f"{file} is not a complete safetensors file")
        header = source.read(size)
    tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
    last = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    if 8 + size + last != file.stat().st_size:
        raise ConfigError(f"{file} is not a complete safetensors file; fetch it again")
    return _TensorFile(path=file, header=header, tensors=tensors)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error


def _add(digest: Any, *parts: bytes) -> None:
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)


def _rope_types(rope: Any) -> list[str]:
    """Find the rope types in one set of parameters or in one set per layer kind."""
    if not isinstance(rope, dict):
        return []
    if "rope_type" in rope:
        return [str(rope["rope_type"])]
    return [kind for nested in rope.values() for kind in _rope_types(nested)]


def _rope_digest(config: Any) -> str:
    rope = getattr(config, "rope_parameters", None)
    text = json.dumps(rope, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    eos = model.generation_config.eos_token_id
    if eos is None:
        eos = model.config.get_text_config().eos_token_id
    if eos is None:
        return ()
    return tuple(int(token) for token in (eos if isinstance(eos, list | tuple) else [eos]))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
