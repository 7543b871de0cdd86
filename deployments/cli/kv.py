"""`kvferry kv`: look into the registry of a running system, and make its workers forget what they cached."""

from pathlib import Path
from typing import Annotated

import typer

from deployments.cli.console import errors

kv_app = typer.Typer(help="Who holds which KV blocks of a running system.", no_args_is_help=True)

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="Of the system, with registry.urls; without, what `kvferry serve` runs here."),
]
PortOption = Annotated[
    int | None, typer.Option("--http-port", help="Which of several systems that run here, by its HTTP port.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@kv_app.command()
def workers(*, config: ConfigOption = None, http_port: PortOption = None, as_json: JsonOption = False) -> None:
    """List the workers whose lease runs."""
    from deployments.cli import kv_questions, kv_views  # noqa: PLC0415  (imports redis)

    target = kv_questions.find_target(config, http_port)
    kv_views.print_answer(kv_questions.ask(target, kv_questions.list_workers), as_json=as_json)


@kv_app.command()
def stats(
    *,
    config: ConfigOption = None,
    http_port: PortOption = None,
    max_blocks: Annotated[int, typer.Option(min=1, help="Blocks looked at per shard.")] = 1_000_000,
    as_json: JsonOption = False,
) -> None:
    """Count blocks by worker, tier and shard, and the memory of the shards; walks their keys with a cursor."""
    from deployments.cli import kv_questions, kv_views  # noqa: PLC0415  (imports redis)

    target = kv_questions.find_target(config, http_port)
    with errors.status("counting") as status:

        def show(shard: str, num_blocks: int) -> None:
            status.update(f"{shard}: {num_blocks:,} blocks")

        answer = kv_questions.ask(target, lambda registry: kv_questions.count_blocks(registry, max_blocks, show))
    kv_views.print_answer(answer, as_json=as_json)


@kv_app.command()
def prefix(  # noqa: PLR0913 - each is an option of the command line
    text: Annotated[str | None, typer.Argument(help="A prompt, as it is; with --chat the message of a user.")] = None,
    *,
    tokens: Annotated[str | None, typer.Option(help="Token ids instead of a text: 1,2,3.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="The text is the first message of a chat.")] = False,
    tenant: Annotated[str, typer.Option(help="Whose blocks; empty without authentication.")] = "",
    config: ConfigOption = None,
    http_port: PortOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say which workers hold how much of a prompt's beginning."""
    from deployments.cli import kv_questions, kv_views  # noqa: PLC0415  (imports redis)

    if (text is None) == (tokens is None):
        raise typer.BadParameter("give a text or --tokens", param_hint="text")
    if chat and text is None:
        raise typer.BadParameter("token ids are no chat; give a text", param_hint="--chat")
    target = kv_questions.find_target(config, http_port)
    token_ids = kv_questions.encode(target, text, is_chat=chat) if text is not None else _parse_ids(tokens or "")
    answer = kv_questions.ask(target, lambda registry: kv_questions.look_up(registry, token_ids, tenant))
    kv_views.print_answer(answer, as_json=as_json)


@kv_app.command()
def clear(
    *,
    worker: Annotated[str | None, typer.Option(help="Only this worker, by its id.")] = None,
    config: ConfigOption = None,
    http_port: PortOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make every worker forget the cached blocks that no request uses."""
    from deployments.cli import kv_questions, kv_views  # noqa: PLC0415  (imports redis)

    target = kv_questions.find_target(config, http_port)
    cleared = kv_questions.ask(target, lambda registry: kv_questions.clear_caches(registry, worker))
    kv_views.print_answer(kv_views.clear_answer(cleared), as_json=as_json)
    if any(isinstance(count, str) for count in cleared.values()):
        raise typer.Exit(1)


def _parse_ids(text: str) -> list[int]:
    try:
        ids = [int(word) for word in text.split(",")]
    except ValueError:
        raise typer.BadParameter("write token ids as 1,2,3", param_hint="--tokens") from None
    if any(not 0 <= token_id < 2**32 for token_id in ids):
        raise typer.BadParameter("a token id is at least 0 and below 2**32", param_hint="--tokens")
    return ids
