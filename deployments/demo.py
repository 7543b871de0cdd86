"""Real requests through the SDK against a running stack, and a table of what each one cost."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deployments.demo_document import document
from kvferry import AsyncClient, Completion

_LOG_ENTRIES = 38
"""Makes the document about 2,000 tokens long for the demo's model."""
_MAX_TOKENS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPrompt:
    """One request of the demo."""

    title: str
    shown: str
    """What the terminal shows of the prompt."""
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A finished request with the times that the client saw."""

    title: str
    completion: Completion
    first_text_s: float
    total_s: float

    @property
    def tokens_per_s(self) -> float:
        """Speed after the first token; 0 when there is only one."""
        rest_s = self.total_s - self.first_text_s
        return (self.completion.usage.completion_tokens - 1) / rest_s if rest_s > 0 else 0.0

    @property
    def transfer_gb_s(self) -> float:
        """Bytes moved by time spent moving; 0 when nothing moved."""
        moved = self.completion.provenance
        return moved.bytes_moved / moved.transfer_s / 1e9 if moved.transfer_s > 0 else 0.0


def demo_prompts() -> tuple[DemoPrompt, ...]:
    """A chat, a question about a long document, and another question about the same document."""
    text = document(_LOG_ENTRIES)
    chat = "Explain in two sentences what a ferry is."
    first = "What did steam change for ferries? Answer in one sentence."
    second = "Why is the wide car deck of a ferry dangerous? Answer in one sentence."
    return (
        DemoPrompt(title="chat", shown=chat, content=chat),
        DemoPrompt(title="document", shown=f"[a document of {len(text):,} characters] {first}", content=text + first),
        DemoPrompt(title="same document", shown=f"[the same document] {second}", content=text + second),
    )


async def run_demo(address: str, console: Console) -> list[Measured]:
    """Send the prompts one after another and stream the answers to `console`.

    Raises:
        kvferry.KVFerryError: A request failed.
    """
    async with AsyncClient(address) as client:
        return [await _ask(client, prompt, console) for prompt in demo_prompts()]


async def _ask(client: AsyncClient, prompt: DemoPrompt, console: Console) -> Measured:
    console.print(f"\n[bold cyan]{prompt.title}[/] > {escape(prompt.shown)}", highlight=False, soft_wrap=True)
    started_s = time.perf_counter()
    first_text_s: float | None = None
    messages = [{"role": "user", "content": prompt.content}]
    async with client.stream_chat(messages, max_tokens=_MAX_TOKENS, temperature=0.0) as chunks:
        async for chunk in chunks:
            if first_text_s is None:
                first_text_s = time.perf_counter() - started_s
            console.print(chunk.text, end="", markup=False, highlight=False, soft_wrap=True)
    total_s = time.perf_counter() - started_s
    console.print()
    return Measured(
        title=prompt.title,
        completion=chunks.result,
        first_text_s=total_s if first_text_s is None else first_text_s,
        total_s=total_s,
    )


_ROWS: tuple[tuple[str, Callable[[Measured], str]], ...] = (
    ("prompt tokens", lambda m: f"{m.completion.usage.prompt_tokens:,}"),
    ("  computed by prefill", lambda m: f"{m.completion.provenance.prefill_computed_tokens:,}"),
    ("  computed by decode", lambda m: f"{m.completion.provenance.decode_computed_tokens:,}"),
    ("  cached", lambda m: f"{m.completion.usage.cached_tokens:,}"),
    ("generated tokens", lambda m: f"{m.completion.usage.completion_tokens:,}"),
    ("time to first token", lambda m: f"{m.first_text_s * 1e3:,.0f} ms"),
    ("tokens/s", lambda m: f"{m.tokens_per_s:,.1f}"),
    ("KV blocks moved", lambda m: f"{m.completion.provenance.blocks_moved:,}"),
    ("KV bytes moved", lambda m: f"{m.completion.provenance.bytes_moved / 1e6:,.1f} MB"),
    ("transfer time", lambda m: f"{m.completion.provenance.transfer_s * 1e3:,.1f} ms"),
    ("transfer speed", lambda m: f"{m.transfer_gb_s:,.2f} GB/s"),
    ("exposed transfer", lambda m: f"{m.completion.provenance.exposed_s * 1e3:,.1f} ms"),
)


def measurements_table(measured: list[Measured]) -> Table:
    """One column per request, one row per quantity."""
    table = Table(title="What each request cost", title_justify="left")
    table.add_column("")
    for each in measured:
        table.add_column(each.title, justify="right")
    for label, cell in _ROWS:
        table.add_row(label, *(cell(each) for each in measured))
    return table
