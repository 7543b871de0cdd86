"""What this machine can compute with, found without importing torch."""

from importlib import metadata
from pathlib import Path
from typing import Literal

from deployments.config import Dtype


def count_gpus() -> int:
    """GPUs that the installed torch can use; 0 with a CPU build of it."""
    if metadata.version("torch").endswith("+cpu"):
        return 0
    return sum(1 for device in Path("/dev").glob("nvidia*") if device.name.removeprefix("nvidia").isdigit())


def device_for(num_gpus: float) -> Literal["cuda", "cpu"]:
    """Where a worker that books so many GPUs computes; it sees only its own, as the first."""
    return "cuda" if num_gpus > 0 else "cpu"


def has_bfloat16_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the CPU multiplies bfloat16 in hardware; without that it is slower than float32."""
    try:
        return "avx512_bf16" in cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def resolve_dtype(dtype: Dtype, *, on_gpu: bool) -> Dtype:
    """Turn auto into float32 or bfloat16; leave the others."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if on_gpu or has_bfloat16_instructions() else "float32"
