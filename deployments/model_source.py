"""From what a user calls a model (demo, a folder, a hub id) to a folder with its checkpoint."""

from collections.abc import Callable
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from deployments.config import DEMO_SOURCE, cache_dir
from engine.checkpoints import GGUF_SUFFIX, gguf_file
from engine.demo_model import fetch_demo_model
from messages.errors import ConfigError

Progress = Callable[[str, float], None]
"""Called with a stage in words and the fraction of that stage, 0 to 1."""

_HUB_FILES = ["*.json", "*.safetensors", "tokenizer*", "*.model", "*.jinja", "*.txt"]


def resolve_model(source: str, progress: Progress | None = None) -> Path:
    """Return the checkpoint folder or GGUF file of `source`; fetch it first if it is not on this machine.

    Raises:
        ConfigError: No such folder or hub model, no network, or no room.
    """
    if source == DEMO_SOURCE:
        return fetch_demo_model(cache_dir() / "models" / "smollm2-135m-instruct", progress)
    place = Path(source).expanduser()
    if place.is_dir() or (place.suffix == GGUF_SUFFIX and place.is_file()):
        return _checked(place.resolve())
    if source.startswith(("/", ".", "~")) or source.count("/") != 1:
        raise ConfigError(
            f'no model at "{source}": give "demo", a folder with a checkpoint, a .gguf file, or a hub id like org/name'
        )
    return _fetch_from_hub(source)


def _checked(place: Path) -> Path:
    if gguf_file(place) is None and not (place / "config.json").is_file():
        raise ConfigError(f"{place} holds no config.json and no .gguf file; give the folder of a checkpoint")
    return place


def _fetch_from_hub(hub_id: str) -> Path:
    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except GatedRepoError:
        raise ConfigError(f"{hub_id} needs permission: accept its terms on the hub, then set HF_TOKEN") from None
    except (HfHubHTTPError, HFValidationError) as error:
        raise ConfigError(f"the hub does not give {hub_id}: {str(error).splitlines()[0]}") from None
    except (LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"cannot fetch {hub_id}: {str(error).splitlines()[0]}; check the network, or give a folder"
        ) from None
