"""The C library keeps what torch frees, instead of handing it back to the kernel at every tensor.

By default glibc maps each large tensor anew and the kernel fills it with zeros page by page: a norm over 512 tokens
then takes 1.3 ms where 0.2 ms is its computation (docs/performance.md). The price: the process keeps its peak of
memory.
"""

import ctypes

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_SETTINGS = (
    # The largest that glibc accepts; larger tensors are few.
    (_M_MMAP_THRESHOLD, 32 << 20),
    (_M_TRIM_THRESHOLD, (1 << 31) - 1),
    (_M_TOP_PAD, 64 << 20),
    # Otherwise every thread has a pool of its own, and each keeps its own peak.
    (_M_ARENA_MAX, 2),
)


def keep_freed_memory() -> bool:
    """Change the allocator of this process; for its owner alone to call.

    Returns:
        Whether the C library knows all the settings; where it does not (musl, macOS), nothing is lost but speed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(name, value) == 1 for name, value in _SETTINGS)
