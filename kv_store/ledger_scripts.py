"""The ledger's atomic steps: Lua that runs inside a shard over the keys of one pool, which lie in one slot."""

from pathlib import Path

from kv_store.registry.scripts import Script, make_script


def _load(name: str) -> Script:
    folder = Path(__file__).parent / "lua"
    book, step = [(folder / f"ledger_{part}.lua").read_text(encoding="utf-8") for part in ("book", name)]
    return make_script(book + step)


RESERVE = _load("reserve")
RELEASE = _load("release")
FORGET = _load("forget")
PENDING = _load("pending")
ALL = (RESERVE, RELEASE, FORGET, PENDING)
