"""The versions of libraries of which private parts are replaced or overridden, all in one place.

Whatever replaces, overrides or sets such a part calls check_patched() before. By library:
torch: rendezvous.py, agent.py, loop/host_overhead.py
transformers: loop/host_overhead.py (for ExactTrainer), run/start.py
accelerate: loop/host_overhead.py, strategy/hivemind/exchange.py
hivemind: strategy/hivemind/__init__.py (for all modules of that strategy)
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from types import ModuleType
from typing import Any, NamedTuple

from harness.core.provenance import HIVEMIND
from harness.core.settings import UserError


class Checked(NamedTuple):
    """A version with which all replaced parts were checked, and which others are accepted."""

    version: str
    same: int  # so many leading numbers must be the same

    def accepts(self, installed: str) -> bool:
        return installed.split(".")[: self.same] == self.version.split(".")[: self.same]


CHECKED = {
    "torch": Checked("2.13", same=1),
    "transformers": Checked("5.23", same=2),
    "accelerate": Checked("1.15", same=2),
    HIVEMIND.name: Checked(HIVEMIND.version, same=3),
}


def check_patched(library: ModuleType, purpose: str, parts: Iterable[tuple[Any, str]] = ()) -> None:
    """Refuse a version of a library with which its replaced parts were not checked.

    purpose: for what, or so that what, they are replaced. parts: (owner, name) of those that are
    looked for, because a later version that is accepted may not have them; an owner is a module, a
    class or an object.
    """
    name, installed = library.__name__, str(library.__version__)
    checked = CHECKED[name]
    any_patch = ".*" if checked.version.count(".") == 1 else ""
    fix = f"pip install {shlex.quote(f'{name}=={checked.version}{any_patch}')}"
    if not checked.accepts(installed):
        raise UserError(
            f"{name} {installed} is installed, but the parts of it that must be replaced {purpose} "
            f"were checked with {checked.version}: {fix}"
        )
    for owner, part in parts:
        if not hasattr(owner, part):
            raise UserError(
                f"{name} {installed}: {_name_of(owner)} has no {part}, which must be replaced "
                f"{purpose}, as checked with {checked.version}: {fix}"
            )


def _name_of(owner: Any) -> str:
    return str(getattr(owner, "__name__", type(owner).__name__))
