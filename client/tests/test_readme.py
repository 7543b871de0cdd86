"""The examples of README.md run as they stand, against the fake server."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.testing import FakeServer

README = Path(__file__).resolve().parents[1] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_runs(number: int) -> None:
    with FakeServer() as server:
        code = EXAMPLES[number].replace("localhost:9000", server.target)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=30)

    assert done.returncode == 0, done.stderr
