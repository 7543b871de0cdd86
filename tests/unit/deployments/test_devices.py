"""auto becomes the number format that the device computes fastest."""

from pathlib import Path

import pytest

from deployments import devices


@pytest.mark.parametrize(("flags", "expected"), [("fpu avx512_bf16 sse", True), ("fpu avx2", False)])
def test_bfloat16_is_read_from_the_cpu_flags(tmp_path: Path, flags: str, *, expected: bool) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor: 0\nflags : {flags}\n")

    assert devices.has_bfloat16_instructions(cpuinfo) is expected


def test_a_machine_without_cpuinfo_has_no_bfloat16(tmp_path: Path) -> None:
    assert not devices.has_bfloat16_instructions(tmp_path / "none")


def test_auto_is_bfloat16_on_a_gpu_and_a_named_dtype_stays() -> None:
    assert devices.resolve_dtype("auto", on_gpu=True) == "bfloat16"
    assert devices.resolve_dtype("float16", on_gpu=False) == "float16"


def test_a_worker_that_books_a_part_of_a_gpu_computes_on_it() -> None:
    assert [devices.device_for(num_gpus) for num_gpus in (0.0, 0.5, 2.0)] == ["cpu", "cuda", "cuda"]
