"""A clock that other programs cannot slow down, for tests of what is measured in one process."""

from __future__ import annotations

import threading
import time


def keep_own_time() -> None:
    """From here on, time.perf_counter() of this process counts what it computes and how long its
    main thread asked to sleep; while others have the core, it stands still.
    """
    slept_s, sleep = 0.0, time.sleep

    def asleep(seconds: float) -> None:
        nonlocal slept_s
        if threading.current_thread() is threading.main_thread():
            slept_s += seconds
        else:
            sleep(seconds)

    time.sleep = asleep
    time.perf_counter = lambda: time.process_time() + slept_s
