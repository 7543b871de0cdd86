"""`kvferry explain`: ask a running gateway where a prompt would run now, and show every worker that it compared."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from deployments.cli.console import output
from kvferry import Client, Explanation, KVFerryError, PrefillReason, StageExplanation

_TIMEOUT_S = 30.0
_WIDE = 120
"""Columns of a terminal from which on the parts of a cost are in one line."""

_WHY: dict[PrefillReason, str] = {
    "few_tokens": "few of its tokens are uncached there",
    "sooner_here": "the predicted times speak for the decode worker",
    "no_prefill_worker": "no prefill worker may compute it now",
    "sooner_there": "the predicted times speak for a prefill worker",
    "refused_here": "the decode worker has refused to compute it",
    "unknown": "for a reason that this version does not know",
}


def explain(
    text: Annotated[str, typer.Argument(help="A prompt, as it is; with --chat the message of a user.")],
    *,
    chat: Annotated[bool, typer.Option("--chat", help="The text is the first message of a chat.")] = False,
    target: Annotated[str, typer.Option(metavar="HOST:PORT", help="Of the gateway's gRPC API.")] = "localhost:9000",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say which workers a prompt would go to now, what each would cost, and why; nothing runs."""
    found = _ask(target, text, is_chat=chat)
    if as_json:
        output.print(json.dumps(asdict(found), indent=2), markup=False, highlight=False, soft_wrap=True)
        return
    for table in _tables(found):
        output.print(table)
        output.print()
    output.print(_verdict(found), markup=False, highlight=False, soft_wrap=True)


def _ask(target: str, text: str, *, is_chat: bool) -> Explanation:
    """Ask the gateway.

    Raises:
        KVFerryError: It does not answer or refuses; the message names it.
    """
    try:
        with Client(target, timeout_s=_TIMEOUT_S) as client:
            return client.explain_chat([{"role": "user", "content": text}]) if is_chat else client.explain(text)
    except KVFerryError as error:
        raise type(error)(f"the gateway at {target}: {error.message}") from error


def _tables(found: Explanation) -> Iterator[Table]:
    yield _table("decode", found.decode, found.decode_worker)
    if found.prefill is not None:
        yield _table("prefill", found.prefill, found.prefill_worker)


def _table(title: str, stage: StageExplanation, chosen: str | None) -> Table:
    table = Table(
        title=f"{title}, by {escape(stage.policy)}",
        title_justify="left",
        title_style="bold cyan",
        box=None,
        header_style="bold",
        pad_edge=False,
    )
    for column in ("worker", "pool", "place"):
        table.add_column(column, overflow="fold")
    for column in ("cost", "matched", "remaining"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("parts of the cost")
    for each in stage.candidates:
        place = "" if each.rank is None else str(each.rank + 1)
        parts = [f"{name} {value:,.2f}" for name, value in each.parts.items()]
        table.add_row(
            escape(each.worker),
            escape(each.pool),
            "chosen" if each.worker == chosen else place if each.is_allowed else "not allowed",
            f"{each.cost:,.2f}",
            f"{each.matched_tokens:,}",
            f"{each.remaining_tokens:,}",
            escape((", " if output.width >= _WIDE else "\n").join(parts)),
        )
    return table


def _verdict(found: Explanation) -> str:
    """Who does what, and why, in words."""
    times = {"the decode worker": found.local_ms, "the best prefill worker": found.remote_ms}
    predicted = [f"{value_ms:,.1f} ms on {place}" for place, value_ms in times.items() if value_ms is not None]
    usual = "; the usual place is kept unless another one is clearly sooner"
    lines = [
        f"the prompt has {found.prompt_tokens:,} tokens",
        f"{found.decode_worker} would decode",
        f"{found.prefill_worker or found.decode_worker} would compute the prompt: {_WHY[found.reason]}",
        *([f"first token predicted in {', '.join(predicted)}{usual}"] if predicted else []),
    ]
    return "\n".join(lines)
