"""What each command does; heavy imports wait until a command needs them, so that --help answers at once."""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from deployments.cli.console import fetch_progress, output, stage_printer
from deployments.cli.explain import explain
from deployments.cli.faults import faults
from deployments.cli.interrupt import INTERRUPTED, StopSignals
from deployments.cli.kv import kv_app
from deployments.config import AppConfig, Dtype, default_model_name, demo_config, load_config
from deployments.devices import count_gpus
from messages.errors import Unavailable

app = typer.Typer(
    help="Serve open-weight models with prefill and decode apart and the KV cache ferried between them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
model_app = typer.Typer(help="Models on this machine.", no_args_is_help=True)
config_app = typer.Typer(help="Look at and check a config file.", no_args_is_help=True)
app.add_typer(model_app, name="model")
app.add_typer(config_app, name="config")
app.add_typer(kv_app, name="kv")
app.command()(explain)
app.command()(faults)

ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", help="YAML file; see `kvferry config show`.", dir_okay=False)
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Any field, e.g. --set models.0.max_running=8.")
]
DtypeOption = Annotated[Dtype | None, typer.Option(help="Of weights and KV.  [default: auto]")]
KvMemoryOption = Annotated[
    str | None, typer.Option("--kv-memory", metavar="SIZE", help="KV memory of a worker, e.g. 2GiB.  [default: 1GiB]")
]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Show the output of Ray and of the workers.")]


@app.command()
def serve(  # noqa: PLR0913  (each is an option of the command line)
    *,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help='"demo", a folder with a checkpoint, or a hub id.')
    ] = None,
    config: ConfigOption = None,
    grpc_port: Annotated[int | None, typer.Option(help="Port of the gRPC API.  [default: 9000]")] = None,
    http_port: Annotated[int | None, typer.Option(help="Port of the HTTP API.  [default: 8000]")] = None,
    dtype: DtypeOption = None,
    kv_memory: KvMemoryOption = None,
    set_: SetOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Serve a model on this machine until Ctrl-C; a second Ctrl-C does not wait for running requests."""
    if model is None and config is None:
        raise typer.BadParameter("give --model, --config, or both", param_hint="--model")
    chosen = {"gateway.grpc_port": grpc_port, "gateway.http_port": http_port, "models.0.dtype": dtype}
    overrides: dict[str, Any] = {field: value for field, value in chosen.items() if value is not None}
    if model is not None:
        overrides |= _model_overrides(model)
    settings = load_config(config, _gpu_overrides(config) | overrides | _kv_overrides(kv_memory) | _assignments(set_))
    _run_until_stopped(settings, is_verbose=verbose)


@app.command()
def demo(*, verbose: VerboseOption = False) -> None:
    """Start a small system, send it a chat and a question about a long document, show what happened, end."""
    from deployments.demo import measurements_table, run_demo  # noqa: PLC0415  (imports grpc)
    from deployments.local_stack import LocalStack  # noqa: PLC0415  (imports ray)
    from deployments.preflight import free_ports  # noqa: PLC0415

    grpc_port, http_port = free_ports(2)
    settings = demo_config(grpc_port=grpc_port, http_port=http_port, num_gpus=_gpus_per_worker(2))
    with fetch_progress() as progress:
        stack = LocalStack(settings, stage_printer(), on_progress=progress, is_verbose=verbose)
        with _exit_when_interrupted(stack.kill), stack:
            measured = asyncio.run(run_demo(stack.grpc_address, output))
            output.print(measurements_table(measured))


@app.command()
def version() -> None:
    """Print the version."""
    output.print(f"kvferry {distribution_version('kvferry')}", highlight=False)


@model_app.command()
def fetch(source: Annotated[str, typer.Argument(help='"demo" or a hub id.')]) -> None:
    """Bring a model onto this machine and print its folder."""
    from deployments.model_source import resolve_model  # noqa: PLC0415  (imports the hub's client)

    with fetch_progress() as progress:
        folder = resolve_model(source, progress)
    output.print(str(folder), highlight=False, soft_wrap=True)


@model_app.command()
def plan(
    source: Annotated[str, typer.Argument(help='"demo", a folder with a checkpoint, a .gguf file, or a hub id.')],
    *,
    config: ConfigOption = None,
    dtype: DtypeOption = None,
    kv_memory: KvMemoryOption = None,
    set_: SetOption = None,
) -> None:
    """Print what memory the workers would use for a model, and how many tokens they would hold; start nothing."""
    from deployments.model_source import resolve_model  # noqa: PLC0415  (imports the hub's client)
    from deployments.preflight import settle_kv_memory  # noqa: PLC0415
    from deployments.worker.memory import plan_worker  # noqa: PLC0415  (imports torch)

    chosen = {} if dtype is None else {"models.0.dtype": dtype}
    overrides = _gpu_overrides(config) | _model_overrides(source) | chosen | _kv_overrides(kv_memory)
    settings = load_config(config, overrides | _assignments(set_))
    with fetch_progress() as progress:
        model = resolve_model(source, progress)
    settings = settle_kv_memory(settings, model)
    for pool in settings.pools:
        table = plan_worker(settings, pool, model).table()
        heading = f"pool {pool.name}, {pool.replicas} worker{'s' if pool.replicas > 1 else ''}"
        output.print(f"{heading}\n{table}\n", markup=False, highlight=False, soft_wrap=True)


@config_app.command()
def show(config: ConfigOption = None, set_: SetOption = None) -> None:
    """Print the whole config with every default filled in; without --config the demo's."""
    settings = load_config(config, _assignments(set_))
    output.print(yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False), markup=False, highlight=False)


@config_app.command()
def validate(config: Annotated[Path, typer.Argument(help="YAML file.", dir_okay=False)]) -> None:
    """Check a config file."""
    settings = load_config(config)
    output.print(f"{config} is valid: {settings.model.name}, pools {', '.join(pool.name for pool in settings.pools)}")


@config_app.command()
def schema() -> None:
    """Print the JSON schema of the config."""
    output.print(json.dumps(AppConfig.model_json_schema(), indent=2), markup=False, highlight=False, soft_wrap=True)


def _run_until_stopped(settings: AppConfig, *, is_verbose: bool) -> None:
    from deployments.local_stack import LocalStack  # noqa: PLC0415  (imports ray)

    is_up = False
    with fetch_progress() as progress:
        stack = LocalStack(settings, stage_printer(), on_progress=progress, is_verbose=is_verbose)
        with StopSignals(stack.kill):
            try:
                with stack:
                    is_up = True
                    _print_addresses(settings, stack.grpc_address, stack.http_url)
                    while stack.is_alive():
                        time.sleep(1.0)
                    raise Unavailable("Ray has ended; start again, with --verbose to see why")
            except KeyboardInterrupt:
                if not is_up:
                    raise typer.Exit(INTERRUPTED) from None


@contextlib.contextmanager
def _exit_when_interrupted(on_force: Callable[[], None]) -> Iterator[None]:
    with StopSignals(on_force):
        try:
            yield
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


def _print_addresses(settings: AppConfig, grpc_address: str, http_url: str) -> None:
    body = json.dumps({"model": settings.model.name, "messages": [{"role": "user", "content": "What is a ferry?"}]})
    curl = f"curl {http_url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
    output.print(f"\n[bold green]{settings.model.name} is ready[/]", highlight=False)
    for text in (f"  gRPC  {grpc_address}", f"  HTTP  {http_url}/v1", f"\n{curl}\n", "Ctrl-C stops it."):
        output.print(text, markup=False, highlight=False, soft_wrap=True)


def _model_overrides(source: str) -> dict[str, Any]:
    return {"models.0.source": source, "models.0.name": default_model_name(source)}


def _kv_overrides(kv_memory: str | None) -> dict[str, Any]:
    """What was asked for on the command line goes before everything that a file says about the size."""
    return {} if kv_memory is None else {"models.0.kv_memory_bytes": kv_memory, "models.0.kv_num_blocks": None}


def _gpu_overrides(config: Path | None) -> dict[str, Any]:
    """GPUs for the workers of the built-in settings; a config file books its own."""
    share = _gpus_per_worker(2)
    return {"pools.0.num_gpus": share, "pools.1.num_gpus": share} if config is None and share else {}


def _gpus_per_worker(num_workers: int) -> float:
    return min(1.0, count_gpus() / num_workers)


def _assignments(texts: list[str] | None) -> dict[str, Any]:
    """Turn FIELD=VALUE into a field and a YAML value."""
    pairs = [text.partition("=") for text in texts or []]
    for field, equals, _ in pairs:
        if not equals or not field:
            raise typer.BadParameter(f'"{field}" is not FIELD=VALUE', param_hint="--set")
    return {field: yaml.safe_load(value) for field, _, value in pairs}
