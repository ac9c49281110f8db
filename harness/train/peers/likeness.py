"""Whether a peer that joins is about to do what the run does; if not, in what it differs."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from harness.identity import identity, number
from harness.settings import Settings, UserError

# Those in which one peer's gradient could mean something else than another's.
LIBRARIES = ("torch", "transformers", "hivemind")


def of(settings: Settings) -> dict[str, str]:
    """Everything that all peers must have in common, as words."""
    libraries = {name: metadata.version(name).split("+")[0] for name in LIBRARIES}
    said = identity(settings)
    passed = {f"--{name}": value for name, value in said.pop("trainer").items()}
    named = {name if name == "script" else f"--{name}": value for name, value in said.items()}
    return {name: number(value) for name, value in {**named, **passed, **libraries}.items()}


def compare(settings: Settings, run: dict[str, str] | None) -> None:
    if run is None:
        return  # nobody has said anything yet
    here = of(settings)
    differing = [
        f"{name} is {here.get(name, 'not given')} here, {run.get(name, 'not given')} in the run"
        for name in sorted({*here, *run})
        if here.get(name) != run.get(name)
    ]
    if differing:
        raise UserError(f"this peer does not fit the run that it joins: {'; '.join(differing)}")


def compare_data(here: Any, run: Any) -> None:
    if here != run:
        raise UserError(
            f"this peer's samples are not those of the run that it joins (checksum {here} here, "
            f"{run} in the run): --dataset and what it names must be the same everywhere"
        )
