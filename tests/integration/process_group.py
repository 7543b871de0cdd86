"""Workers in processes of their own, real NIXL, Valkey shards and sockets, and a gateway here: a system to break.

A tiny model with random weights; the gateway's door is real, the client is the SDK. Nothing is torn down nicely: every
process may be killed, stopped, started again and told to inject faults.
"""

import asyncio
import json
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from deployments.config import AppConfig, GatewayConfig, ModelConfig, PoolConfig, RoutingConfig
from deployments.config_kv import HandoffConfig, RegistryConfig
from deployments.gateway.gateway import GatewayRuntime
from deployments.preflight import free_ports
from kv_store.embedded import EmbeddedValkey
from kvferry import AsyncClient
from telemetry.metrics import WorkerSample
from tests.integration.worker_pair import VOCAB, is_free, save_tiny_model

BLOCK = 8
END = "<end>"
WORKER_START_TIMEOUT_S = 120.0
_AT_START = "engine.preempt_once"


def save_model_with_tokenizer(folder: Path) -> Path:
    save_tiny_model(folder)
    words = {f"w{number}": number for number in range(VOCAB) if number != 2} | {END: 2}
    backend = Backend(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
    wrapped.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    wrapped.save_pretrained(folder)
    return folder


def words_of(tokens: list[int]) -> str:
    """The text that these tokens are made from."""
    return " ".join(f"w{token}" for token in tokens)


@dataclass(slots=True)
class WorkerProcess:
    """One life of one worker."""

    worker_id: str
    process: asyncio.subprocess.Process
    faults: str = ""
    log: Path = field(default_factory=Path)
    incarnation: str = ""

    @property
    def is_alive(self) -> bool:
        return self.process.returncode is None

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def kill(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()

    async def set_faults(self, text: str) -> None:
        """Replace what is injected; counting starts anew."""
        if text != self.faults:
            assert await self._tell(f"faults {text}") == "ok"
            self.faults = text

    async def num_peers(self) -> int:
        """Lives of other workers that it knows, or whose memory is mapped, whichever are more."""
        return int(await self._tell("peers"))

    async def _tell(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n".encode())
        await self.process.stdin.drain()
        answer = await asyncio.wait_for(self.process.stdout.readline(), 10)
        assert answer, self.log.read_text()[-2000:]
        return answer.decode().strip()


class ProcessGroup:
    """Async context manager: `shards` Valkey servers, the workers named, one gateway with its gRPC door."""

    def __init__(
        self,
        folder: Path,
        scratch: Path,
        workers: dict[str, str],
        *,
        num_shards: int = 2,
        num_blocks: int = 64,
        lease_s: float = 3.0,
        read_deadline_s: float = 1.5,
        same_host: bool = False,
        keeps_addresses: bool = False,
        **model: Any,
    ) -> None:
        """Prepare.

        Args:
            folder: The model.
            scratch: Folder for configs and logs.
            workers: Role by worker id.
            num_shards: Registry shards.
            num_blocks: KV blocks of each worker.
            lease_s: Of a hand-off.
            read_deadline_s: Of a read of blocks.
            same_host: Whether blocks are copied through shared memory; else through the network library.
            keeps_addresses: Whether every life of a worker listens on the same port.
            **model: Further fields of ModelConfig.
        """
        self._scratch = scratch
        self._roles = workers
        self._ports = dict(zip(workers, _fixed_ports(len(workers)), strict=True)) if keeps_addresses else {}
        self.shards = EmbeddedValkey(num_shards, scratch)
        self.workers: dict[str, WorkerProcess] = {}
        self._exits = AsyncExitStack()
        self._settings: dict[str, Any] = {
            "models": [
                ModelConfig(
                    name="tiny",
                    source=str(folder),
                    dtype="float32",
                    kv_num_blocks=num_blocks,
                    **({"block_size": BLOCK, "prefill_chunk_tokens": 16, "max_batch_tokens": 32} | model),
                )
            ],
            "pools": [
                PoolConfig(name=role, role=role, num_threads=1, host="127.0.0.1")  # type: ignore[arg-type]
                for role in sorted(set(workers.values()))
            ],
            # Tests break what is on its way from one worker to another, and slow workers down whose times are learned.
            "routing": RoutingConfig(policy="cache_aware", prefill_on_decode=False),
            "handoff": HandoffConfig(lease_s=lease_s, read_deadline_s=read_deadline_s, same_host=same_host),
        }

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.shards.start)
        self._exits.push_async_callback(asyncio.to_thread, self.shards.close)
        grpc_port, http_port = free_ports(2)
        self.config = AppConfig(
            version=1,
            registry=RegistryConfig(urls=self.shards.urls, lease_s=1.5),
            gateway=GatewayConfig(grpc_port=grpc_port, http_port=http_port, drain_s=1.0),
            **self._settings,
        )
        self._exits.push_async_callback(self._end_workers)
        await asyncio.gather(*(self.start(worker_id) for worker_id in self._roles))
        self.gateway = await self._exits.enter_async_context(GatewayRuntime(self.config))
        self.client = await self._exits.enter_async_context(AsyncClient(f"127.0.0.1:{grpc_port}", timeout_s=60))
        await self.until_live(*self._roles)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._exits.aclose()

    async def start(self, worker_id: str, faults: str = "") -> WorkerProcess:
        """Start a worker, or another life of one that is dead, and wait until it is ready."""
        config_file = self._scratch / "config.json"
        config_file.write_text(json.dumps(self.config.model_dump(mode="json")))
        log = self._scratch / f"{worker_id}.log"
        arguments = [str(config_file), self._roles[worker_id], worker_id, str(self._ports.get(worker_id, 0))]
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "tests.integration.worker_process", *arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                env={**os.environ, "KVFERRY_FAULTS": faults, "OMP_WAIT_POLICY": "PASSIVE"},
                cwd=Path(__file__).parents[2],
            )
        worker = self.workers[worker_id] = WorkerProcess(worker_id, process, faults, log)
        assert process.stdout is not None
        answer = await asyncio.wait_for(process.stdout.readline(), WORKER_START_TIMEOUT_S)
        word, _, worker.incarnation = answer.decode().strip().partition(" ")
        assert word == "ready", (answer, log.read_text()[-2000:])
        return worker

    async def inject(self, worker_id: str, faults: str) -> None:
        """Replace a worker's faults; preempting is fixed at the start, so that takes another life."""
        worker = self.workers[worker_id]
        if (_AT_START in faults) != (_AT_START in worker.faults):
            await worker.kill()
            await self.start(worker_id, faults)
            await self.until_live(*self._roles)
        else:
            await worker.set_faults(faults)

    async def until_live(self, *worker_ids: str) -> None:
        """Wait until the gateway sends work to exactly the newest lives of these workers."""
        await self.until(lambda: self._live() == {(name, self.workers[name].incarnation) for name in worker_ids}, 20.0)

    def _live(self) -> set[tuple[str, str]]:
        return {(link.record.worker_id, link.record.incarnation) for link in self.gateway.links.live()}

    async def mend(self) -> None:
        """Make the group whole again: every worker alive, going on, without faults, seen by the gateway."""
        for index, pid in enumerate(self.shards.process_ids):
            if not _is_running(pid):
                await asyncio.to_thread(self.shards.restart_shard, index)
        for worker_id, worker in list(self.workers.items()):
            if worker.is_alive:
                worker.send_signal(signal.SIGCONT)
                await self.inject(worker_id, "")
            else:
                await self.start(worker_id)
        await self.until_live(*self._roles)

    def sample(self, worker_id: str) -> WorkerSample:
        """The worker's newest heartbeat."""
        return next(sample for sample in self.gateway.links.samples() if sample.worker_id == worker_id)

    def num_requests(self, code: str) -> float:
        """Requests that have ended so, says the gateway's metric."""
        page, labels = self.gateway.service._metrics.registry, {"model": "tiny", "code": code}
        return page.get_sample_value("kvferry_requests_total", labels) or 0.0

    def is_at_baseline(self) -> bool:
        """Whether the gateway has no request, and no living worker holds anything for anybody."""
        samples = self.gateway.links.samples()
        # Heartbeats are a moment old; the gateway is the last to let a request go.
        return self.gateway.service.num_running == 0 and bool(samples) and all(map(is_free, samples))

    async def until_baseline(self, timeout_s: float = 6.0) -> None:
        await self.until(self.is_at_baseline, timeout_s)

    async def until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, "\n".join(str(sample) for sample in self.gateway.links.samples())
            await asyncio.sleep(0.01)

    async def _end_workers(self) -> None:
        for worker in self.workers.values():
            if worker.is_alive:
                await worker.kill()


class Reference:
    """What transformers generates, remembered."""

    def __init__(self, folder: Path) -> None:
        self._model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        # Random weights end at random places; requests here ignore the end token as well.
        self._model.generation_config.eos_token_id = None
        self._known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def __call__(self, prompt: list[int], max_tokens: int) -> list[int]:
        key = tuple(prompt), max_tokens
        if key not in self._known:
            with torch.inference_mode():
                out = self._model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=max_tokens)
            self._known[key] = out[0, len(prompt) :].tolist()
        return self._known[key]

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """Log probabilities of what may follow each token, (T, V)."""
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([tokens])).logits[0]
        return logits.log_softmax(-1)


def _fixed_ports(count: int) -> list[int]:
    """Free ports that the system gives to no outgoing connection, so that they stay free between two lives."""
    ports: list[int] = []
    for port in random.sample(range(20_000, 30_000), 1000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(port)
        if len(ports) == count:
            break
    return ports


def make_prompt(length: int, seed: int) -> list[int]:
    """Tokens that share no first block with other seeds."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
    return tokens


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
