"""A real lack of memory: the kernel kills what takes more than its group may have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Of version 1 where it is mounted, else of version 2.
MEMORY = Path("/sys/fs/cgroup/memory")
CGROUP = (MEMORY if MEMORY.is_dir() else MEMORY.parent) / f"harness-test-{os.getpid()}"


@contextmanager
def limited_group() -> Iterator[bool]:
    """A group of processes in which the kernel kills what takes memory; False where none can be."""
    limits = ("memory.limit_in_bytes", "memory.max")  # of version 1, and of version 2
    try:
        CGROUP.mkdir()
    except OSError:
        yield False
        return
    try:
        found = [CGROUP / name for name in limits if (CGROUP / name).exists()]
        for limit in found:
            limit.write_text(str(2**26))
        yield bool(found)
    finally:
        CGROUP.rmdir()
