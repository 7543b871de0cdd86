"""Write the sync client from the asyncio one; with --check only say whether it is up to date.

Source: the idea of httpcore's unasync.py, a list of word-for-word replacements instead of a syntax tree.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "client" / "src" / "kvferry"
SOURCE = PACKAGE / "async_client.py"
TARGET = PACKAGE / "sync_client.py"
DOCSTRING = '''"""The sync client: `AsyncClient` without the waiting.

Generated from async_client.py by scripts/unasync.py; edit that file.
"""'''

REPLACEMENTS = (
    (r"\bimport (asyncio|grpc\.aio)\n", ""),
    (r" +#[^\n]*\n +asyncio\.get_running_loop\(\)\n", ""),
    (r"\bgrpc\.aio\.", "grpc."),
    (r"\basync (with|for|def)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\bAsync(Client|Stream|Iterator)\b", r"\1"),
    (r"\bStopAsyncIteration\b", "StopIteration"),
    (r"\b__a(enter|exit|iter|next)__\b", r"__\1__"),
    (r"\ba(iter|next)\(", r"\1("),
    (r"made inside the running event loop and safe to share between its tasks", "safe to share between threads"),
)


def unasync(source: str) -> str:
    """Return the sync twin of an asyncio module."""
    docstring_end = source.index('"""', 3) + 3
    body = source[docstring_end:]
    for pattern, replacement in REPLACEMENTS:
        body = re.sub(pattern, replacement, body)
    return ruff(ruff(DOCSTRING + body, "check", "--fix-only"), "format")


def ruff(text: str, *command: str) -> str:
    """Run one ruff command on text as if it were the target file."""
    line = [sys.executable, "-m", "ruff", *command, "--quiet", "--stdin-filename", str(TARGET), "-"]
    return subprocess.run(line, input=text, capture_output=True, text=True, check=True).stdout


def main() -> int:
    """Write or compare; exit code 1 says that the file is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 when the file is out of date")
    check = parser.parse_args().check
    new = unasync(SOURCE.read_text(encoding="utf-8"))
    if TARGET.exists() and TARGET.read_text(encoding="utf-8") == new:
        return 0
    if not check:
        TARGET.write_text(new, encoding="utf-8")
    print(f"{'out of date:' if check else 'wrote'} {TARGET.name}")
    return int(check)


if __name__ == "__main__":
    sys.exit(main())
