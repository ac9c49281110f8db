"""What becomes of files: each kind of damage, planted."""

from __future__ import annotations

from pathlib import Path

KINDS = ("truncated", "zeros", "one bit", "missing")


def plant(kind: str, file: Path) -> None:
    """In the second half of the file, behind whatever describes it at its beginning."""
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    if kind == "missing":
        file.unlink()
    elif kind == "truncated":
        file.write_bytes(content[:middle])
    else:
        if kind == "one bit":
            content[middle] ^= 1
        else:
            content[middle:] = bytes(len(content) - middle)
        file.write_bytes(content)
