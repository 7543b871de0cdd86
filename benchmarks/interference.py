"""What a long prompt does to everybody else's streams: separate pools beside one unified worker, and vLLM.

    python benchmarks/interference.py [--json] [--quick] [--peer-vllm ENVIRONMENT]

Four clients stream all the time, 200 tokens in and 200 out, each prompt a fresh one. First they are alone, then a
6,000-token prompt arrives every 45 seconds. Arms, on the demo model and the same cores:

disaggregated   decode has a core of its own; prefill workers for short and for long prompts share the rest with the
                gateway, Ray and the clients, the long ones' with a niceness that lets everything else go first
unified         one worker with all cores, chunked prefill, with the step budget (of four) that served the streams best
vllm            `vllm serve` from the environment that is named, with all cores

Runs of the arms alternate, and medians are shown. `p99_ratio` compares the 99th percentile of the gap between two
tokens of a stream, with and without long prompts; `steady_tok_ratio` does it for the streams' tokens per second.
"""

import sys
from pathlib import Path

# As a script: engine.py beside this file must not hide the package `engine`.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
import asyncio
import json
import os
import random
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.baseline import Vllm
from benchmarks.steady_load import LoadShape, Seen, SendPrompt, median_of, run_load, summarize
from deployments.config import DEMO_SOURCE, load_config
from deployments.local_stack import LocalStack
from deployments.model_source import resolve_model
from deployments.preflight import free_ports
from kvferry import AsyncClient

VOCABULARY = range(1000, 40_000)
"""Ordinary tokens of the demo model; prompts are drawn at random, so nothing of them is cached."""
STEP_BUDGETS = (64, 128, 256, 512)
LONG_NICE = 15
DTYPE = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long everything is measured."""

    shape: LoadShape
    runs: int
    budgets: Sequence[int]
    trial: LoadShape
    """What the unified arm's step budgets are compared by."""


FULL = Plan(
    shape=LoadShape(quiet_s=60, busy_s=180), runs=3, budgets=STEP_BUDGETS, trial=LoadShape(quiet_s=5, busy_s=40)
)
QUICK = Plan(shape=LoadShape(quiet_s=12, busy_s=40), runs=1, budgets=(128, 512), trial=LoadShape(quiet_s=3, busy_s=20))

Arm = Callable[[], AbstractContextManager[Callable[[LoadShape, random.Random], Seen]]]
"""Starts a server; inside `with`, what runs one load through it."""


def main() -> int:
    """Measure the arms and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--quick", action="store_true", help="one short run per arm, about 4 minutes")
    parser.add_argument("--peer-vllm", type=Path, help="virtual environment with vLLM")
    options = parser.parse_args()
    console, plan = Console(stderr=True), QUICK if options.quick else FULL
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        parser.error("decode needs a core of its own, and this machine has one core")
    result = measure(plan, cores, options.peer_vllm, console)
    print(json.dumps(result)) if options.json else _show(result)
    return 0


def measure(plan: Plan, cores: Sequence[int], peer_vllm: Path | None, console: Console) -> dict[str, Any]:
    """Find the unified arm's best budget, then run the arms in turn."""
    budget = _best_budget(plan, cores, console)
    arms: dict[str, Arm] = {
        "disaggregated": lambda: _kvferry({"pools": _disaggregated(cores)}, cores[1:], console),
        "unified": lambda: _kvferry(_unified(cores, budget), cores, console),
    }
    if peer_vllm is not None:
        arms["vllm"] = lambda: _vllm(peer_vllm, len(cores))
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for number in range(plan.runs):
        for name, serve in arms.items():
            with serve() as use:
                seen = use(plan.shape, random.Random(1000 + number))  # noqa: S311 - prompts, not secrets
            runs[name].append(summarize(seen, plan.shape))
            console.log(f"run {number} {name}: {runs[name][-1]}")
    return {"arms": {name: median_of(rows) for name, rows in runs.items()}, "unified_step_budget": budget}


def _best_budget(plan: Plan, cores: Sequence[int], console: Console) -> int:
    """The step budget under which long prompts delay the streams' tokens least."""
    delays = {}
    for budget in plan.budgets:
        with _kvferry(_unified(cores, budget), cores, console) as use:
            seen = use(plan.trial, random.Random(budget))  # noqa: S311 - prompts, not secrets
        delays[budget] = summarize(seen, plan.trial)["busy_p99_itl_ms"]
        console.log(f"unified, {budget} tokens per step: busy p99 {delays[budget]:.0f} ms")
    return min(delays, key=lambda budget: delays[budget])


def _disaggregated(cores: Sequence[int]) -> list[dict[str, Any]]:
    shared = {"role": "prefill", "num_threads": 1, "cpu_affinity": list(cores[1:])}
    return [
        {"name": "decode", "role": "decode", "num_threads": 1, "cpu_affinity": [cores[0]]},
        {"name": "prefill-short", "requests": "short", **shared},
        {"name": "prefill-long", "requests": "long", "nice": LONG_NICE, **shared},
    ]


def _unified(cores: Sequence[int], budget: int) -> dict[str, Any]:
    pool = {"name": "unified", "role": "unified", "num_threads": len(cores), "cpu_affinity": list(cores)}
    return {"pools": [pool], "models.0.max_batch_tokens": budget, "models.0.prefill_chunk_tokens": budget}


@contextmanager
def _kvferry(
    overrides: Mapping[str, Any], cores: Sequence[int], console: Console
) -> Iterator[Callable[[LoadShape, random.Random], Seen]]:
    """A whole system whose gateway, Ray and clients stay on `cores`."""
    before = os.sched_getaffinity(0)
    # What is started from here inherits it; a worker goes where its pool says.
    os.sched_setaffinity(0, set(cores))
    grpc_port, http_port = free_ports(2)
    ports = {"gateway.grpc_port": grpc_port, "gateway.http_port": http_port}
    try:
        with LocalStack(load_config(None, {"models.0.dtype": DTYPE, **overrides, **ports}), console.log) as stack:
            yield lambda shape, draw: asyncio.run(_through_sdk(stack.grpc_address, shape, draw))
    finally:
        os.sched_setaffinity(0, before)


async def _through_sdk(address: str, shape: LoadShape, draw: random.Random) -> Seen:
    async with AsyncClient(address, timeout_s=600) as client:

        async def send(prompt: Sequence[int], num_new: int) -> AsyncGenerator[int, None]:
            async with client.stream(list(prompt), max_tokens=num_new, temperature=0.0, ignore_eos=True) as chunks:
                async for chunk in chunks:
                    if chunk.token_ids:
                        yield len(chunk.token_ids)

        return await _warm_then_run(send, shape, draw)


@contextmanager
def _vllm(environment: Path, num_threads: int) -> Iterator[Callable[[LoadShape, random.Random], Seen]]:
    with Vllm.serve(environment, resolve_model(DEMO_SOURCE), DTYPE, num_threads) as server:
        yield lambda shape, draw: asyncio.run(_warm_then_run(server.stream, shape, draw))


async def _warm_then_run(send: SendPrompt, shape: LoadShape, draw: random.Random) -> Seen:
    warm_up = replace(shape, quiet_s=2.0, busy_s=2.0, long_prompt_tokens=512)
    await run_load(send, warm_up, draw, VOCABULARY)
    return await run_load(send, shape, draw, VOCABULARY)


def _show(result: dict[str, Any]) -> None:
    columns = {
        "p99 gap, quiet": "quiet_p99_itl_ms",
        "busy, ms": "busy_p99_itl_ms",
        "ratio": "p99_ratio",
        "streams' tok/s, busy of quiet": "steady_tok_ratio",
        "short TTFT p95, ms": "short_ttft_p95_ms",
        "long TTFT p50, ms": "long_ttft_p50_ms",
        "long waiting, most": "most_long_waiting",
    }
    table = Table(title=f"streams beside long prompts; unified steps of {result['unified_step_budget']} tokens")
    for name in ("arm", *columns):
        table.add_column(name, justify="right")
    for arm, row in result["arms"].items():
        table.add_row(arm, *(f"{row[key]:,.2f}" for key in columns.values()))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
