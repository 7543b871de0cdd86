"""The `kvferry` command: serve, demo, explain, model, config, kv, faults, version."""

import sys

from rich.markup import escape

from deployments.cli.commands import app
from deployments.cli.console import errors
from kvferry import KVFerryError
from messages.errors import ServingError


def main() -> None:
    """Run the command; a foreseen failure is one line on stderr and exit code 1."""
    try:
        app()
    except (ServingError, KVFerryError) as error:
        errors.print(f"[bold red]error:[/] {escape(' '.join(str(error).split()))}", soft_wrap=True, highlight=False)
        sys.exit(1)
