"""What the installed package promises: light imports, type information, a sync twin that is up to date."""

import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import kvferry

REPOSITORY = Path(__file__).resolve().parents[2]


def test_importing_the_client_loads_no_heavy_package() -> None:
    heavy = ["torch", "ray", "numpy", "pydantic", "messages", "deployments"]
    code = f"import sys, kvferry, kvferry.testing; print([m for m in {heavy} if m in sys.modules])"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_the_package_says_that_it_is_typed() -> None:
    assert files("kvferry").joinpath("py.typed").is_file()


def test_every_name_offered_is_there() -> None:
    assert sorted(kvferry.__all__) == [name for name in kvferry.__all__ if hasattr(kvferry, name)]


def test_the_sync_client_is_up_to_date() -> None:
    command = [sys.executable, str(REPOSITORY / "scripts" / "unasync.py"), "--check"]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
