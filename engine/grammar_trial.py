"""A grammar is compiled in a process of its own first, because a compiler fed by strangers may loop or crash.

The library's limits do not cover all it does: some schemas keep it busy for minutes and some overflow its stack, and
neither a thread nor a crash can be called back. The process kills itself after its time (of the processor, so that a
busy machine refuses nothing) and cannot take much memory. What it has compiled is safe to compile in the engine, where
the stack is larger and the work the same.
"""

import asyncio
import json
import os
import resource
import signal
import sys
import threading
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence

from engine.grammar_library import make_tokenizer, start
from messages.errors import Overloaded, ServingError

_LAUNCHER = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from engine.grammar_trial import serve
serve(float(sys.argv[2]))
"""
_STACK_BYTES = 1 << 20
_MEMORY_BYTES = 256 << 20
_START_TIMEOUT_S = 60.0
_WALL_FACTOR = 6.0


class TrialProcess:
    """The process, started when first needed and again after every death; one grammar at a time."""

    def __init__(self, tokens: Sequence[bytes], *, timeout_s: float) -> None:
        self._tokens = tokens
        self._timeout_s = timeout_s
        self._process: Process | None = None

    async def refusal_of(self, source: str) -> str | None:
        """Try a grammar.

        Returns:
            Why it cannot be used, as a phrase that follows its name; None when it can.

        Raises:
            Overloaded: The machine is too busy to tell.
            ServingError: The process does not start.
        """
        process = self._process or await self._start()
        self._process = None
        try:
            reply = await _ask(process, source, self._timeout_s * _WALL_FACTOR)
        except TimeoutError as error:
            raise Overloaded("no time to compile the grammar; try again later") from error
        if reply is None:
            return self._cause_of_death(await process.wait())
        self._process = process
        return None if reply == "" else f"cannot be enforced: {reply}"

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            await _kill(process)

    def _cause_of_death(self, return_code: int) -> str:
        if return_code == -signal.SIGPROF:
            return f"takes more than {self._timeout_s:g} s to compile"
        return "is too complex to compile"

    async def _start(self) -> Process:
        command = (sys.executable, "-P", "-c", _LAUNCHER, json.dumps(sys.path), str(self._timeout_s))
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
        # JSON has no bytes; Latin-1 gives each its own character.
        table = [token.decode("latin-1") for token in self._tokens]
        try:
            reply = await _ask(process, table, _START_TIMEOUT_S)
        except TimeoutError as error:
            raise Overloaded("no time to start the grammar compiler; try again later") from error
        if reply is None:
            raise ServingError("the grammar compiler does not start", return_code=await process.wait())
        return process


async def _ask(process: Process, message: object, timeout_s: float) -> str | None:
    """Send one line and wait for one; None when the process has died. A process that did not answer is killed."""
    assert process.stdin is not None, "made with a pipe"
    assert process.stdout is not None, "made with a pipe"
    has_answered = False
    try:
        async with asyncio.timeout(timeout_s):
            process.stdin.write(json.dumps(message).encode() + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
        has_answered = True
    except ConnectionError:
        return None
    finally:
        # Nobody knows what it would answer next.
        if not has_answered:
            await _kill(process)
    return str(json.loads(line)) if line else None


async def _kill(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


def serve(timeout_s: float) -> None:
    """Be the process: read the vocabulary, then grammars, until the other side is gone."""
    os.nice(5)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    table: list[str] = json.loads(sys.stdin.buffer.readline())
    tokenizer = make_tokenizer([token.encode("latin-1") for token in table])
    _limit_memory()
    # Smaller than any stack of the engine, so that nothing overflows there that has passed here.
    threading.stack_size(_STACK_BYTES)
    _answer("")
    for line in sys.stdin.buffer:
        source: str = json.loads(line)
        reasons: list[str] = []

        def compile_it(source: str = source, reasons: list[str] = reasons) -> None:
            try:
                start(tokenizer, source)
            except ValueError as error:
                reasons.append(str(error) or "the library does not say why")

        signal.setitimer(signal.ITIMER_PROF, timeout_s)
        worker = threading.Thread(target=compile_it)
        worker.start()
        worker.join()
        signal.setitimer(signal.ITIMER_PROF, 0)
        _answer("".join(reasons))


def _limit_memory() -> None:
    if sys.platform != "linux":
        return
    with open("/proc/self/statm", encoding="ascii") as file:
        used_bytes = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + _MEMORY_BYTES,) * 2)


def _answer(text: str) -> None:
    sys.stdout.buffer.write(json.dumps(text).encode() + b"\n")
    sys.stdout.buffer.flush()
