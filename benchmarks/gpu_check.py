"""Everything that only a GPU can show, as one script: exactness, the probe, block copies, transfers of device memory.

    python benchmarks/gpu_check.py [--json]

Exit code 0: every check passed; 1: one failed; 3: there is no GPU here.
"""

import sys
from pathlib import Path

# As a script: engine.py beside this file must not hide the package `engine`.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers import AutoModelForCausalLM

from deployments.config import AppConfig, ModelConfig, PoolConfig
from deployments.model_source import resolve_model
from deployments.worker.model_host import load_host
from engine.batch import Batch, Row
from engine.model_runner import ModelRunner
from engine.probe import probe
from engine.weights import kv_layout, load_model
from kv_store.layout import Arena
from kv_store.transfer.nixl import NixlTransport
from kv_store.transfer.protocol import ByteRange
from messages.handoff import BlockId
from messages.requests import RequestId, SamplingParams

BLOCK = 32
LENGTHS = (1, 33, 200, 1000)
NEW_TOKENS = 48
NO_GPU = 3


@contextmanager
def arena_and_runner(folder: Path, dtype: torch.dtype, num_blocks: int) -> Iterator[ModelRunner]:
    """The demo model on the GPU over an arena of its own."""
    loaded = load_model(folder, dtype, "cuda")
    layout = kv_layout(loaded.config, dtype, BLOCK, loaded.digest)
    counts = (num_blocks,) * len(layout.groups)
    yield ModelRunner(loaded, Arena(layout, counts, "cuda"))
    torch.cuda.empty_cache()


def greedy(runner: ModelRunner, prompt: list[int], chunk: int) -> list[int]:
    """Generate with one request, the prompt in chunks."""
    tokens = list(prompt)
    blocks = (tuple(BlockId(i) for i in range(-(-(len(prompt) + NEW_TOKENS) // BLOCK))),)
    computed = 0
    while len(tokens) - len(prompt) < NEW_TOKENS:
        end = min(len(tokens), computed + chunk)
        sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0) if end == len(tokens) else None
        row = Row(
            request_id=RequestId("gpu"),
            token_ids=tuple(tokens[computed:end]),
            start=computed,
            block_ids=blocks,
            sampling=sampling,
        )
        (result,) = runner.run(Batch(rows=(row,)))
        computed = end
        tokens.extend(token_id for sample in result.samples for token_id in sample.token_ids)
    return tokens[len(prompt) :]


def check_greedy_equals_transformers(folder: Path) -> str:
    """float32, prompts whole and in chunks, against generate on the same device."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to("cuda").eval()
    with arena_and_runner(folder, torch.float32, 64) as runner:
        for length in LENGTHS:
            prompt = [(7 * i * i + 13 * i) % 40_000 + 1000 for i in range(length)]
            ids = torch.tensor([prompt], device="cuda")
            out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS)
            expected = out[0, length:].tolist()
            for chunk in (64, 4096):
                got = greedy(runner, prompt, chunk)[: len(expected)]
                if got != expected:
                    raise AssertionError(f"prompt of {length} in chunks of {chunk}: {got} is not {expected}")
    return f"prompts of {LENGTHS} tokens"


def check_probe(folder: Path) -> str:
    """The load probe in every dtype."""
    differences = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        differences[str(dtype)] = round(probe(load_model(folder, dtype, "cuda")).max_difference, 5)
    return f"differences {differences}"


def check_worker_loads(folder: Path) -> str:
    """A worker's engine as it is configured for a GPU."""
    model = ModelConfig(name="demo", source=str(folder), kv_num_blocks=256)
    pool = PoolConfig(name="unified", role="unified", num_gpus=1)
    host = load_host(AppConfig(version=1, models=[model], pools=[pool]), pool, folder)
    if host.arena.buffer.device.type != "cuda":
        raise AssertionError("the arena is not on the GPU")
    return f"{host.loaded.dtype}, {host.num_blocks} blocks"


def check_transfer_of_device_memory(folder: Path) -> str:
    """A one-sided read from device memory into device memory."""
    size = 64 << 20
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
    target = torch.zeros(size, dtype=torch.uint8, device="cuda")
    owner, reader = NixlTransport("owner/1", source), NixlTransport("reader/1", target)

    async def read() -> float:
        await reader.connect(owner.agent_name, owner.metadata())
        started_s = time.perf_counter()
        await reader.read(owner.agent_name, [ByteRange(remote_offset=0, local_offset=0, size=size)], deadline_s=30.0)
        return size / (time.perf_counter() - started_s) / 1e9

    rate = asyncio.run(read())
    if not torch.equal(source, target):
        raise AssertionError("other bytes arrived")
    return f"{rate:.1f} GB/s"


CHECKS: tuple[Callable[[Path], str], ...] = (
    check_probe,
    check_greedy_equals_transformers,
    check_worker_loads,
    check_transfer_of_device_memory,
)


def main() -> int:
    """Run every check; one that fails does not stop the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    as_json = parser.parse_args().json
    if not torch.cuda.is_available():
        print(json.dumps({"device": None, "checks": {}}) if as_json else "no GPU here: nothing was checked")
        return NO_GPU
    folder = resolve_model("demo")
    results = {check.__name__.removeprefix("check_"): _outcome(check, folder) for check in CHECKS}
    device = torch.cuda.get_device_name()
    if as_json:
        print(json.dumps({"device": device, "checks": results}))
    else:
        print(device, *(f"{name}: {outcome}" for name, outcome in results.items()), sep="\n")
    return 1 if any(outcome.startswith("FAILED") for outcome in results.values()) else 0


def _outcome(check: Callable[[Path], str], folder: Path) -> str:
    try:
        return check(folder)
    except Exception as error:  # noqa: BLE001 - a check that fails is a result
        return f"FAILED {error!r}"


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # A process that made a NIXL agent crashes in its exit handlers.
    os._exit(code)
