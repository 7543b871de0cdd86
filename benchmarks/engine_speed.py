"""How fast one engine computes, beside transformers and the machine's limits, all in one run.

    python benchmarks/engine.py [--json] [--quick] [--dtype bfloat16] [--threads 2]
                                [--peer-vllm ENVIRONMENT] [--plot FILE.png]

Every measurement alternates between ours and transformers, so that a machine that slows down slows both; medians are
shown. `limit_fraction` is the floor (products at the measured rate, or weights and KV at the measured bandwidth) over
our time: 1 is the machine's limit. A ratio above 1 means that we are faster. Prompts are fresh in every repetition.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.baseline import Transformers, Vllm
from benchmarks.local_engine import LocalDecode, LocalEngine, random_prompt
from benchmarks.machine import Machine, ModelSize
from engine.demo_model import fetch_demo_model
from engine.fused_layers import fuse_layers
from engine.model_runner import configure_threads
from engine.weights import dtype_name, dtype_named, load_model

PREFILLS = (128, 512, 2048, 6000)
BATCHES = (1, 8, 16, 32)
CONTEXT = 500
CONCURRENT, CONCURRENT_IN, CONCURRENT_OUT = 16, 200, 64
REPEATED_PROMPT = 4000
PLOT_CONTEXTS = (0, 256, 512, 1024, 2048, 3072, 4096, 5120, 6144, 7168, 8000)
Result = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """Everything that is measured against everything else."""

    engine: LocalEngine
    peer: Transformers
    vllm: Vllm | None
    dtype: torch.dtype
    size: ModelSize
    generator: torch.Generator
    is_quick: bool

    def prompt(self, length: int) -> list[int]:
        """A fresh prompt."""
        return random_prompt(self.generator, length)

    def repeats(self, full: int) -> int:
        """How often to repeat what is repeated `full` times otherwise."""
        return max(2, full // 3) if self.is_quick else full


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and KV")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--chunk-tokens", type=int, default=512, help="most prompt tokens in a step, of 512")
    parser.add_argument("--peer-vllm", type=Path, help="environment that has vllm; see docs/performance.md")
    parser.add_argument("--plot", type=Path, help="draw ms per token against context into this PNG")
    options = parser.parse_args()
    console = Console(stderr=True)
    configure_threads(options.threads)
    folder, dtype = fetch_demo_model(), dtype_named(options.dtype)
    loaded = load_model(folder, dtype, "cpu")
    fused = fuse_layers(loaded)
    console.log(f"{fused.fused_layers} layers fused, {fused.packed_linears} other products packed")
    peer = Transformers(folder, dtype)
    with (
        LocalEngine(loaded, BATCHES[-1] * (CONTEXT + 140), options.chunk_tokens) as engine,
        _vllm(options, folder, dtype) as vllm,
    ):
        bench = Bench(
            engine=engine,
            peer=peer,
            vllm=vllm,
            dtype=dtype,
            size=ModelSize.of(loaded.model, dtype),
            generator=torch.Generator().manual_seed(time.time_ns() % 2**31),
            is_quick=options.quick,
        )
        result = measure(bench, console)
        if options.plot:
            draw(decode_by_context(bench), options.plot, f"{options.dtype}, {options.threads} threads")
    print(json.dumps(result)) if options.json else _show(result)
    return 0


def measure(bench: Bench, console: Console) -> Result:
    """Everything but the plot, under the keys that `--json` prints."""
    machine = Machine.measure(bench.dtype)
    prefills, decodes = {}, {}
    for length in PREFILLS:
        prefills[str(length)] = prefill(bench, length)
        console.log(f"prefill {length}: {prefills[str(length)]}")
        machine = machine.or_better(Machine.measure(bench.dtype))
    together = concurrent(bench)
    console.log(f"concurrent: {together}")
    prefix_ratio = prefix_ttft_ratio(bench)
    console.log(f"prefix_ttft_ratio: {prefix_ratio:.4f}")
    # Last: these steps write over the engine's cached blocks.
    for batch in BATCHES:
        decodes[str(batch)] = decode(bench, batch)
        console.log(f"decode {batch}: {decodes[str(batch)]}")
        machine = machine.or_better(Machine.measure(bench.dtype))
    for key, row in prefills.items():
        row["limit_fraction"] = bench.size.prefill_floor_s(int(key), machine) * row["tok_s"] / int(key)
    for key, row in decodes.items():
        row["limit_fraction"] = bench.size.decode_floor_s(int(key), CONTEXT, machine) * 1e3 / row["ms_step"]
    return {
        "limits": {"read_gb_s": machine.read_gb_s, "gemm_gflop_s": machine.gemm_gflop_s},
        "prefill": prefills,
        "decode": decodes,
        "concurrent_16": together,
        "prefix_ttft_ratio": prefix_ratio,
    }


def prefill(bench: Bench, length: int) -> Result:
    """From the submission of one prompt to its first token."""
    repeats = bench.repeats(9 if length <= 512 else 3)
    ours, theirs = _alternate(
        lambda: bench.engine.generate([bench.prompt(length)], 1)[1],
        lambda: bench.peer.prefill_s(bench.prompt(length)),
        repeats,
    )
    vllm_s = _vllm_median(bench, lambda vllm: vllm.prefill_s(bench.prompt(length)), repeats)
    return {
        "tok_s": length / ours,
        "transformers_ratio": theirs / ours,
        "vllm_ratio": None if vllm_s is None else vllm_s / ours,
    }


def decode(bench: Bench, batch: int) -> Result:
    """One step of a batch, scheduler aside; steps of the two systems alternate."""
    steps = bench.repeats(30)
    prompt = bench.prompt(CONTEXT)
    ours = LocalDecode(bench.engine.runner, prompt, batch, steps + 2)
    theirs = bench.peer.start_decode(prompt, batch)
    tokens = bench.prompt(batch)
    ours_s, theirs_s = _alternate(_timed(lambda: ours.step(tokens)), _timed(lambda: theirs.step(tokens)), steps)
    prompts = [bench.prompt(CONTEXT) for _ in range(batch)]
    vllm_ms = _vllm_median(bench, lambda vllm: vllm.decode_ms(prompts, steps + 2), 1)
    return {
        "ms_step": ours_s * 1e3,
        "transformers_ratio": theirs_s / ours_s,
        "vllm_ratio": None if vllm_ms is None else vllm_ms / ours_s / 1e3,
    }


def concurrent(bench: Bench) -> Result:
    """Requests that arrive together, through the engine's scheduler; transformers runs them as one static batch."""

    def prompts() -> list[list[int]]:
        return [bench.prompt(CONCURRENT_IN) for _ in range(CONCURRENT)]

    ours, theirs = _alternate(
        lambda: bench.engine.generate(prompts(), CONCURRENT_OUT)[1],
        lambda: bench.peer.static_batch_s(prompts(), CONCURRENT_OUT),
        bench.repeats(3),
        is_warm=True,
    )
    vllm_s = _vllm_median(bench, lambda vllm: vllm.total_s(prompts(), CONCURRENT_OUT), 2)
    return {
        "tok_s": CONCURRENT * CONCURRENT_OUT / ours,
        "transformers_ratio": theirs / ours,
        "vllm_ratio": None if vllm_s is None else vllm_s / ours,
    }


def prefix_ttft_ratio(bench: Bench) -> float:
    """Time to the first token of a prompt that was just computed, over that of the first time."""
    ratios = []
    for _ in range(bench.repeats(3)):
        prompt = bench.prompt(REPEATED_PROMPT)
        first, second = (bench.engine.generate([prompt], 1)[0] for _ in range(2))
        ratios.append(second / first)
    return statistics.median(ratios)


def decode_by_context(bench: Bench) -> list[tuple[int, float]]:
    """(context, ms of a decode step of one sequence), median, the contexts taken in turns."""
    prompt = bench.prompt(PLOT_CONTEXTS[-1])
    times: dict[int, list[float]] = {context: [] for context in PLOT_CONTEXTS}
    for context in PLOT_CONTEXTS:
        sequence = LocalDecode(bench.engine.runner, prompt[:context], 1, 100)
        step = _timed(lambda sequence=sequence: sequence.step([1000]))  # type: ignore[misc] # bound at once
        step()
        times[context] = [step() for _ in range(bench.repeats(30))]
    return [(context, statistics.median(found) * 1e3) for context, found in times.items()]


def draw(points: list[tuple[int, float]], file: Path, label: str) -> None:
    """Write the PNG, with the straight line through the points."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - a development tool, wanted by this option alone

    contexts, times = zip(*points, strict=True)
    slope, offset = statistics.linear_regression(contexts, times)
    axes = (figure := Figure(figsize=(7, 4), dpi=120)).subplots()
    axes.plot(contexts, times, "o", label="decode step, batch 1, median")
    axes.plot(contexts, [offset + slope * c for c in contexts], label=f"{offset:.1f} ms + {slope * 1e3:.2f} ms / 1k")
    axes.set(xlabel="context, tokens", ylabel="ms per token", title=f"SmolLM2-135M, {label}", ylim=(0, None))
    axes.legend()
    figure.tight_layout()
    figure.savefig(file)


def _timed(work: Callable[[], object]) -> Callable[[], float]:
    def timed() -> float:
        started_s = time.perf_counter()
        work()
        return time.perf_counter() - started_s

    return timed


def _alternate(
    ours: Callable[[], float], theirs: Callable[[], float], repeats: int, *, is_warm: bool = False
) -> tuple[float, float]:
    """Medians of the seconds that both return, measured in turns after one unmeasured turn."""
    if not is_warm:
        ours(), theirs()
    pairs = [(ours(), theirs()) for _ in range(repeats)]
    first, second = zip(*pairs, strict=True)
    return statistics.median(first), statistics.median(second)


def _vllm(options: argparse.Namespace, folder: Path, dtype: torch.dtype) -> AbstractContextManager[Vllm | None]:
    if options.peer_vllm is None:
        return nullcontext()
    return Vllm.serve(options.peer_vllm, folder, dtype_name(dtype), options.threads)


def _vllm_median(bench: Bench, work: Callable[[Vllm], float], repeats: int) -> float | None:
    if bench.vllm is None:
        return None
    return statistics.median(work(bench.vllm) for _ in range(repeats))


def _show(result: Result) -> None:
    console = Console()
    limits = result["limits"]
    table = Table(
        title=f"engine; limits here: read {limits['read_gb_s']:.1f} GB/s, products {limits['gemm_gflop_s']:.0f} GFLOP/s"
    )
    for name in ("", "ours", "of the limit", "x transformers", "x vLLM"):
        table.add_column(name, justify="right" if name else "left")
    for length, row in result["prefill"].items():
        table.add_row(f"prefill {length}", f"{row['tok_s']:.0f} tok/s", *_columns(row))
    for batch, row in result["decode"].items():
        table.add_row(f"decode, batch {batch}", f"{row['ms_step']:.1f} ms/step", *_columns(row))
    row = result["concurrent_16"]
    table.add_row(f"{CONCURRENT} x {CONCURRENT_IN}/{CONCURRENT_OUT}", f"{row['tok_s']:.0f} tok/s", *_columns(row))
    table.add_row(f"TTFT of {REPEATED_PROMPT} tokens, repeated", f"{result['prefix_ttft_ratio']:.2%} of the first")
    console.print(table)


def _columns(row: Result) -> list[str]:
    values = (row.get("limit_fraction"), row["transformers_ratio"], row["vllm_ratio"])
    return ["" if value is None else f"{value:.2f}" for value in values]


if __name__ == "__main__":
    sys.exit(main())
