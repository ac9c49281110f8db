"""What ends a run before its time, in the words of the record."""

from __future__ import annotations

import errno
import signal

import torch


class Diverged(RuntimeError):
    """Loss, gradient or weights are no longer finite: a result, and not a good one."""


class Stopped(KeyboardInterrupt):
    """A signal has come, by itself or through whoever runs the machines."""

    def __init__(self, signum: int, why: str | None = None) -> None:
        super().__init__(why or signal.Signals(signum).name)
        self.signum = signum


def outcome_of(error: BaseException) -> tuple[str, str]:
    """(outcome, reason) of what ended a run."""
    text = " ".join(str(error).split())[:300] or type(error).__name__
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return "oom", text
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return "oom", text
    # torch's CPU allocator has no exception of its own.
    if isinstance(error, RuntimeError) and "can't allocate memory" in text.lower():
        return "oom", text
    if isinstance(error, Diverged):
        return "diverged", text
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", text
    return "failed", f"{type(error).__name__}: {text}"
