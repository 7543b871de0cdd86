"""Terminal output: stages with their time, a progress bar, errors on stderr."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

# Bound to the streams of the start, because sys.stdout is redirected while Ray talks.
output = Console(file=sys.stdout)
errors = Console(file=sys.stderr, stderr=True)


def stage_printer() -> Callable[[str], None]:
    """A function that prints a stage with the seconds since this call."""
    started_s = time.monotonic()

    def print_stage(text: str) -> None:
        output.print(f"[dim]{time.monotonic() - started_s:5.1f} s[/]  {text}", highlight=False)

    return print_stage


@contextlib.contextmanager
def fetch_progress() -> Iterator[Callable[[str, float], None]]:
    """A function (stage in words, fraction) behind a progress bar that shows once it is called."""
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), console=output
    )
    tasks: dict[str, int] = {}

    def report(stage: str, fraction: float) -> None:
        if not tasks:
            bar.start()
        if stage not in tasks:
            tasks[stage] = bar.add_task(stage, total=1.0)
        bar.update(bar.task_ids[list(tasks).index(stage)], completed=fraction)

    try:
        yield report
    finally:
        bar.stop()
