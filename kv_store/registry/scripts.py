"""The registry's atomic steps: Lua that runs inside a shard, each script touching one key.

A full server refuses only to publish: the scripts that keep leases and batch numbers and that clean up run there too
(flag allow-oom, known since Redis 7.0).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

Command = tuple[str | bytes | int, ...]
"""A command's words as they go to a shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A Lua script and the digest by which a shard that has seen it knows it."""

    text: str
    digest: str

    def __call__(self, key: bytes, *args: str | bytes | int) -> Command:
        """Return the command that runs the script on `key`."""
        return ("EVALSHA", self.digest, 1, key, *args)

    def on(self, keys: Sequence[bytes], *args: str | bytes | int) -> Command:
        """Return the command that runs the script on several keys, which must lie in one slot."""
        return ("EVALSHA", self.digest, len(keys), *keys, *args)


def make_script(text: str) -> Script:
    """Name a Lua script as a server does."""
    # The digest is the server's own name for the script, not a protection.
    return Script(text=text, digest=hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def _load(name: str) -> Script:
    return make_script((Path(__file__).parent / "lua" / f"{name}.lua").read_text(encoding="utf-8"))


PUBLISH = _load("publish")
WITHDRAW = _load("withdraw")
REGISTER = _load("register")
UNREGISTER = _load("unregister")
WORKERS = _load("workers")
MARK = _load("mark")
SWEEP = _load("sweep")
LEAD = _load("lead")
ALL = (PUBLISH, WITHDRAW, REGISTER, UNREGISTER, WORKERS, MARK, SWEEP, LEAD)
