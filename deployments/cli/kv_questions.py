"""What `kvferry kv` asks of a running system, and how it finds one."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import typer

from deployments.cli.kv_views import Answer, prefix_answer, stats_answer, workers_answer
from deployments.config import AppConfig, load_config
from deployments.registry_client import make_registry
from deployments.stack_file import find_stack
from deployments.worker.control import clear_cache
from kv_store.block_key import KeyExtras, block_keys, root_key, tenant_salt
from kv_store.registry.census import take_census
from kv_store.registry.redis import RedisRegistry
from messages.errors import InvalidRequest, PeerUnreachable, Unavailable

T = TypeVar("T")


def find_target(config: Path | None, http_port: int | None) -> AppConfig:
    """Find the system that a command is about.

    Args:
        config: Its file; None for what runs on this machine.
        http_port: Of its gateway, where several run on this machine.

    Raises:
        BadParameter: The file says where the registry is, so a port says nothing.
        Unavailable: None runs here.
        ConfigError: The file is wrong, or several systems run here.
    """
    if config is None:
        return find_stack(http_port).config
    settings = load_config(config)
    if settings.registry.urls:
        if http_port is not None:
            raise typer.BadParameter("the config names its registry (registry.urls)", param_hint="--http-port")
        return settings
    # An embedded registry has no fixed address, but the file says which of the systems here is meant.
    return find_stack(http_port or settings.gateway.http_port).config


def ask(target: AppConfig, question: Callable[[RedisRegistry], Awaitable[T]]) -> T:
    """Answer a question with a registry that is open for as long as it takes."""

    async def run() -> T:
        async with make_registry(target.registry) as registry:
            return await question(registry)

    return asyncio.run(run())


async def list_workers(registry: RedisRegistry) -> Answer:
    """The worker table.

    Raises:
        RegistryError: No shard answers.
    """
    return workers_answer(await registry.rows(), time.monotonic())


async def count_blocks(registry: RedisRegistry, max_blocks: int, on_progress: Callable[[str, int], None]) -> Answer:
    """What the shards hold; see `take_census`.

    Raises:
        RegistryError: No shard answers.
    """
    return stats_answer(await take_census(registry, max_blocks=max_blocks, on_progress=on_progress))


async def look_up(registry: RedisRegistry, token_ids: list[int], tenant: str) -> Answer:
    """Who holds how much of a prompt, under every key identity that is in use.

    Raises:
        RegistryError: No shard answers.
        Unavailable: There is no worker.
    """
    records = await registry.workers()
    if not records:
        raise Unavailable("no worker is registered, so nobody holds anything")
    identities = {(record.key_model, record.block_size, record.key_codec): record for record in records}
    lookups = []
    for (model, block_size, codec), record in identities.items():
        extras = KeyExtras(model=model, block_size=block_size, codec=codec, salt=tenant_salt(tenant))
        keys = block_keys(root_key(extras), token_ids, block_size)
        lookups.append((record, len(keys), await registry.lookup(keys)))
    return prefix_answer(len(token_ids), lookups)


async def clear_caches(registry: RedisRegistry, worker_id: str | None) -> dict[str, int | str]:
    """Make one worker or all forget what no request uses.

    Returns:
        By worker id, the blocks that it forgot, or why it did not.

    Raises:
        RegistryError: No shard answers.
        Unavailable: There is no such worker.
    """
    records = [record for record in await registry.workers() if worker_id in (None, record.worker_id)]
    if not records:
        which = "" if worker_id is None else f' with the id "{worker_id}"; see `kvferry kv workers`'
        raise Unavailable(f"there is no worker{which}")
    counts = await asyncio.gather(*(_clear_one(record.address, record.incarnation) for record in records))
    return {record.worker_id: count for record, count in zip(records, counts, strict=True)}


def encode(target: AppConfig, text: str, *, is_chat: bool) -> list[int]:
    """Token ids of a prompt, as the system's own tokenizer gives them.

    Args:
        target: The system.
        text: The prompt, or the only message of a chat.
        is_chat: Which of the two.

    Raises:
        InvalidRequest: It is empty.
        ConfigError: The model is not on this machine and cannot be fetched.
    """
    from deployments.model_source import resolve_model  # noqa: PLC0415  (imports the hub's client)
    from engine.tokenizer import Tokenizer  # noqa: PLC0415  (imports transformers)

    if not text:
        raise InvalidRequest("the prompt is empty", param="text")
    tokenizer = Tokenizer.load(resolve_model(target.model.source))
    return list(tokenizer.render_chat([{"role": "user", "content": text}]) if is_chat else tokenizer.encode(text))


async def _clear_one(address: str, incarnation: str) -> int | str:
    try:
        return await clear_cache(address, incarnation)
    except PeerUnreachable as error:
        return str(error)
