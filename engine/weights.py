"""A checkpoint folder becomes a model that calls our attention, with the KV layout and identity that it implies."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.attention.function import ATTENTION_NAME
from engine.checkpoints import Checkpoint, gguf_file, open_checkpoint
from engine.library_output import Progress, quiet_library, reported_loading
from engine.longrope import settle_longrope
from engine.model_support import refuse_unsupported
from engine.tensor_files import read_gguf
from kv_store.layout import BlockLayout, KvGroup
from messages.errors import ConfigError, ModelRefused

_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


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
    """Names the content of the checkpoint; see `Checkpoint.digest`."""
    context_length: int
    """Most tokens of prompt and output together."""
    eos_token_ids: tuple[int, ...]


def load_model(
    path: Path,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    context_length: int | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a checkpoint: a folder with `config.json` and safetensors files, or GGUF, which becomes plain floats.

    Args:
        path: The folder or the GGUF file.
        dtype: What the weights become, whatever they are stored as.
        device: Where they go.
        context_length: Most tokens that will be served; None for all that the model was made for.
        progress: Told about the stages.

    Raises:
        ConfigError: A file is missing or broken; the message names it.
        ModelRefused: The model needs something that this engine would silently get wrong.
    """
    report = progress or (lambda stage, fraction: None)
    device = torch.device(device)
    dtype_name(dtype)
    report("checking the checkpoint", 0.0)
    config = read_config(path)
    refuse_unsupported(config)
    checkpoint = open_checkpoint(path)
    digest = checkpoint.digest
    with reported_loading("loading weights", report):
        model = _read_model(checkpoint, config, dtype, device)
    text_config = model.config.get_text_config()
    longest = int(text_config.max_position_embeddings)
    context_length = longest if context_length is None else min(context_length, longest)
    settle_longrope(model, context_length)
    return LoadedModel(
        model=model.eval().requires_grad_(requires_grad=False),
        config=text_config,
        dtype=dtype,
        device=device,
        digest=digest,
        context_length=context_length,
        eos_token_ids=_eos_token_ids(model),
    )


def read_config(path: Path) -> Any:
    """Read the configuration, `config.json` or the head of a GGUF file, as transformers sees it.

    Raises:
        ConfigError: There is none, or it is not readable.
        ModelRefused: transformers does not know the architecture.
    """
    path = Path(path)
    gguf = gguf_file(path)
    file = gguf or path / "config.json"
    if not file.is_file():
        raise ConfigError(f"{file} does not exist; give a folder that holds a model checkpoint, or a .gguf file")
    if gguf is not None:
        # Damage is told from an unknown architecture only before the library reads the file.
        read_gguf(gguf)
    options = {} if gguf is None else {"gguf_file": gguf.name}
    try:
        with quiet_library():
            return transformers.AutoConfig.from_pretrained(file.parent, local_files_only=True, **options)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {_first_line(error)}") from error
    except (ValueError, KeyError, NotImplementedError) as error:
        raise ModelRefused(f"transformers does not know the model in {file}: {_first_line(error)}") from error


def _read_model(checkpoint: Checkpoint, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    options: dict[str, Any] = {} if checkpoint.gguf_name is None else {"gguf_file": checkpoint.gguf_name}
    if device.type != "cpu":
        # Each weight goes to the device as it is read; main memory never holds the model.
        options["device_map"] = {"": str(device)}
    try:
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint.folder,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            output_loading_info=True,
            # They are refused below, by name.
            ignore_mismatched_sizes=True,
            **options,
        )
    except (ValueError, KeyError, RuntimeError, OSError, NotImplementedError) as error:
        raise ModelRefused(f"transformers cannot load {checkpoint.folder}: {_first_line(error)}") from error
    # The library would fill these with random numbers.
    lost = sorted(map(str, found["missing_keys"])) or sorted(str(key) for key, *_ in found["mismatched_keys"])
    if lost:
        raise ConfigError(
            f"the checkpoint in {checkpoint.folder} does not hold {lost[0]} as the model needs it"
            + (f", nor {len(lost) - 1} more" if len(lost) > 1 else "")
        )
    return model


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


def memory_needed_bytes(path: Path, dtype: torch.dtype) -> int:
    """Return the bytes that the weights take once loaded as `dtype`; reads headers only.

    Raises:
        ConfigError: A file is missing or broken.
    """
    return open_checkpoint(path).num_parameters * dtype.itemsize


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
