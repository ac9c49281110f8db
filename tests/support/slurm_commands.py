"""The commands of a cluster, which a test plays."""

from __future__ import annotations

import stat
from pathlib import Path


class StandIn:
    """sbatch and the others as scripts that write down what they are asked and print a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name in ("sbatch", "squeue", "sacct", "scancel"):
            self.does(name, f"cat {folder}/{name}.says 2>/dev/null || true")

    def does(self, name: str, commands: str) -> None:
        path = self.folder / name
        path.write_text(f'#!/bin/sh\necho {name} "$@" >> {self.folder}/asked\n{commands}\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def says(self, name: str, text: str) -> None:
        (self.folder / f"{name}.says").write_text(text)

    def asked(self, name: str) -> int:
        path = self.folder / "asked"
        return path.read_text().count(f"{name} ") if path.exists() else 0
