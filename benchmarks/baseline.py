"""What every measured number is compared with."""

import asyncio
import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from benchmarks.bare_registry import BareCommands, BareRegistry
from benchmarks.bare_routing import BareChoice, hash_whole
from kv_store.huge_pages import advise_huge_pages

__all__ = [
    "BareChoice",
    "BareCommands",
    "BareRegistry",
    "Transformers",
    "TransformersDecode",
    "Vllm",
    "copy_ranges",
    "hash_whole",
    "memcpy_blocks",
    "scattered_pairs",
    "touched_arena",
]

VLLM_START_S = 300.0
_VLLM_PORT = 18_431
Bytes = NDArray[np.uint8]
"""One dimension."""


def scattered_pairs(num_blocks: int, arena_blocks: int, seed: int = 1) -> list[tuple[int, int]]:
    """(source block, destination block), both without repetition and in no order."""
    rng = random.Random(seed)  # noqa: S311  # a shuffle, not a secret
    sources, destinations = (rng.sample(range(arena_blocks), num_blocks) for _ in range(2))
    return list(zip(sources, destinations, strict=True))


def touched_arena(size_bytes: int, value: int) -> torch.Tensor:
    """A host buffer whose pages exist, huge where the kernel allows it; 1-D uint8."""
    arena = torch.empty(size_bytes, dtype=torch.uint8)
    advise_huge_pages(arena.data_ptr(), arena.numel())
    return arena.fill_(value)


def copy_ranges(source: Bytes, destination: Bytes, places: Iterable[tuple[int, int, int]]) -> None:
    """Copy each (source offset, destination offset, size) with the calling thread."""
    for src, dst, size in places:
        destination[dst : dst + size] = source[src : src + size]


def memcpy_blocks(block_bytes: int, num_blocks: int, arena_blocks: int = 256, repeats: int = 5) -> float:
    """Copy scattered blocks between two touched arenas of one process with one thread.

    The upper bound of a transfer between processes of one machine. Each repeat copies other blocks, so that few small
    ones are not measured out of the processor's cache.

    Args:
        block_bytes: Size of a block.
        num_blocks: Blocks per copy.
        arena_blocks: Blocks that each arena has room for; raised to `num_blocks`.
        repeats: Copies to take the median of.

    Returns:
        Median over `repeats`, GB/s (10^9 bytes copied per second).
    """
    arena_blocks = max(arena_blocks, num_blocks)
    source, destination = (touched_arena(block_bytes * arena_blocks, value) for value in (1, 2))
    # numpy copies in the caller's thread, whatever torch's thread count is.
    from_bytes, to_bytes = source.numpy(), destination.numpy()
    durations_s = []
    for repeat in range(repeats):
        pairs = scattered_pairs(num_blocks, arena_blocks, seed=repeat)
        places = [(src * block_bytes, dst * block_bytes, block_bytes) for src, dst in pairs]
        started_s = time.perf_counter()
        copy_ranges(from_bytes, to_bytes, places)
        durations_s.append(time.perf_counter() - started_s)
    return num_blocks * block_bytes / statistics.median(durations_s) / 1e9


class Transformers:
    """The same checkpoint through transformers' own code: sdpa attention, forward calls, its dynamic cache."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True
        ).eval()

    @torch.inference_mode()
    def prefill_s(self, prompt: Sequence[int]) -> float:
        """Seconds from a prompt to its next token."""
        started_s = time.perf_counter()
        logits = self.model(input_ids=torch.tensor([list(prompt)]), use_cache=True, logits_to_keep=1).logits
        logits.argmax(-1).tolist()
        return time.perf_counter() - started_s

    @torch.inference_mode()
    def start_decode(self, prompt: Sequence[int], batch: int) -> "TransformersDecode":
        """Give `batch` sequences with the same prompt, ready for steps."""
        cache = self.model(input_ids=torch.tensor([list(prompt)]), use_cache=True, logits_to_keep=1).past_key_values
        cache.batch_repeat_interleave(batch)
        return TransformersDecode(self.model, cache)

    @torch.inference_mode()
    def static_batch_s(self, prompts: Sequence[Sequence[int]], num_new: int) -> float:
        """Seconds for equally long prompts, all at once, `num_new` tokens each."""
        started_s = time.perf_counter()
        out = self.model(input_ids=torch.tensor([list(prompt) for prompt in prompts]), use_cache=True, logits_to_keep=1)
        decode = TransformersDecode(self.model, out.past_key_values)
        tokens = out.logits[:, -1].argmax(-1).tolist()
        for _ in range(num_new - 1):
            tokens = decode.step(tokens)
        return time.perf_counter() - started_s


class TransformersDecode:
    """A batch in transformers' cache; each step lengthens it by one token."""

    def __init__(self, model: Any, cache: Any) -> None:
        self._model = model
        self._cache = cache

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> list[int]:
        """Give each sequence a token and return the greedy next ones."""
        ids = torch.tensor(list(tokens))[:, None]
        logits = self._model(input_ids=ids, use_cache=True, **{_cache_argument(self._model): self._cache}).logits
        chosen: list[int] = logits[:, -1].argmax(-1).tolist()
        return chosen


def _cache_argument(model: Any) -> str:
    """Newer versions call the cache `cache`, older ones `past_key_values`."""
    return "cache" if "cache" in type(model).forward.__code__.co_varnames else "past_key_values"


class Vllm:
    """A running vLLM server, measured through its OpenAI-compatible API."""

    def __init__(self, url: str, model: str) -> None:
        self._url = url
        self._model = model

    @classmethod
    @contextmanager
    def serve(cls, environment: Path, folder: Path, dtype: str, num_threads: int) -> Iterator["Vllm"]:
        """Start `vllm serve` from a virtual environment of its own, stop it at the end.

        Raises:
            RuntimeError: It ended, or was not ready in time.
        """
        command = [str(environment / "bin" / "vllm"), "serve", str(folder), "--dtype", dtype]
        command += ["--max-model-len", "8192", "--port", str(_VLLM_PORT)]
        cores = f"0-{num_threads - 1}"
        # What is good for our workers is not imposed on a peer.
        ours = {"OMP_WAIT_POLICY"}
        variables = {name: value for name, value in os.environ.items() if name not in ours}
        variables |= {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": cores}
        process = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603 - the caller names the environment
        try:
            url = f"http://127.0.0.1:{_VLLM_PORT}"
            _wait_for(process, url)
            yield cls(url, str(folder))
        finally:
            process.terminate()
            process.wait(timeout=30)

    def prefill_s(self, prompt: Sequence[int]) -> float:
        """Seconds to the first token of a fresh prompt."""
        return asyncio.run(self._arrivals([prompt], 1))[0][0]

    def decode_ms(self, prompts: Sequence[Sequence[int]], num_new: int) -> float:
        """Median gap between two tokens of a stream while all streams run, ms."""
        streams = asyncio.run(self._arrivals(prompts, num_new))
        begun_s = max(arrivals[0] for arrivals in streams)
        gaps = [later - earlier for arrivals in streams for earlier, later in pairwise(arrivals) if earlier >= begun_s]
        return statistics.median(gaps) * 1e3

    def total_s(self, prompts: Sequence[Sequence[int]], num_new: int) -> float:
        """Seconds until all prompts, sent at once, have `num_new` tokens each."""
        return max(arrivals[-1] for arrivals in asyncio.run(self._arrivals(prompts, num_new)))

    async def _arrivals(self, prompts: Sequence[Sequence[int]], num_new: int) -> list[list[float]]:
        """When each stream's chunks came, seconds after all were sent."""
        async with httpx.AsyncClient(base_url=self._url, timeout=600) as client:
            started_s = time.perf_counter()
            return await asyncio.gather(*(self._times(client, prompt, num_new, started_s) for prompt in prompts))

    async def _times(
        self, client: httpx.AsyncClient, prompt: Sequence[int], num_new: int, started_s: float
    ) -> list[float]:
        return [time.perf_counter() - started_s async for _ in self._stream(client, prompt, num_new)]

    async def stream(self, prompt: Sequence[int], num_new: int) -> AsyncGenerator[int, None]:
        """One greedy completion: the number of tokens of each chunk, as it comes."""
        async with httpx.AsyncClient(base_url=self._url, timeout=600) as client:
            async for count in self._stream(client, prompt, num_new):
                yield count

    async def _stream(
        self, client: httpx.AsyncClient, prompt: Sequence[int], num_new: int
    ) -> AsyncGenerator[int, None]:
        body = {"model": self._model, "prompt": list(prompt), "max_tokens": num_new, "temperature": 0.0}
        async with client.stream("POST", "/v1/completions", json={**body, "ignore_eos": True, "stream": True}) as reply:
            reply.raise_for_status()
            async for line in reply.aiter_lines():
                data = line.removeprefix("data: ")
                if line != data and data != "[DONE]" and json.loads(data)["choices"]:
                    yield 1


def _wait_for(process: "subprocess.Popen[bytes]", url: str) -> None:
    deadline_s = time.monotonic() + VLLM_START_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise RuntimeError(f"vllm serve ended with status {process.returncode}")
        try:
            if httpx.get(f"{url}/health", timeout=2).is_success:
                return
        except httpx.TransportError:
            time.sleep(1.0)
    raise RuntimeError(f"vllm serve was not ready after {VLLM_START_S:.0f} s")
