"""Clocks that other programs cannot slow down, for tests of what is measured in one process."""

from __future__ import annotations

import threading
import time


def keep_own_time() -> None:
    """From here on, time.perf_counter() and time.time() of this process go on by what it computes
    and by how long its main thread asks to sleep; while others have the core, they stand still.
    """
    slept_s, sleep, began_s = 0.0, time.sleep, time.time() - time.process_time()

    def asleep(seconds: float) -> None:
        nonlocal slept_s
        if threading.current_thread() is threading.main_thread():
            slept_s += seconds
        else:
            sleep(seconds)

    time.sleep = asleep
    time.perf_counter = lambda: time.process_time() + slept_s
    time.time = lambda: began_s + time.perf_counter()
