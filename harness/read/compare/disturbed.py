"""Which sides of a comparison have no run that others left undisturbed, as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from harness.read.records.groups import Group


def disturbed_sides(sides: Mapping[str, Sequence[Group]]) -> list[str]:
    """A text that names the sides without any quiet run, and in how many cases; else no text."""
    groups = [group for side in sides.values() for group in side]
    if text := all_disturbed(groups):
        return [text]
    texts, causes = [], dict[str, None]()
    for name, side in sides.items():
        if disturbed := [group for group in side if all_disturbed([group])]:
            cases = f" in {len(disturbed)} of {len(side)} cases" if len(side) > 1 else ""
            texts.append(f"all runs of {name}{cases}")
            causes |= dict.fromkeys(_causes(disturbed))
    return [f"{' and '.join(texts)} disturbed ({', '.join(causes)})"] if texts else []


def all_disturbed(groups: Iterable[Group]) -> str:
    """A text with the causes, where no finished run is quiet and in the batch asked for; or ""."""
    finished = [group for group in groups if group.finished]
    if not finished or any(group.disturbed < len(group.finished) for group in finished):
        return ""
    return f"all runs disturbed ({', '.join(_causes(finished))})"


def _causes(groups: Iterable[Group]) -> list[str]:
    runs = [run for group in groups for run in group.finished]
    causes = {
        "other programs": any(run.is_beside_others for run in runs),
        "another batch than asked for": any(run.other_batches for run in runs),
    }
    return [cause for cause, holds in causes.items() if holds]
