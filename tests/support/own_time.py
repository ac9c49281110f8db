"""Measurements that other programs do not change: of one process, and of ranks together."""

from __future__ import annotations

import threading
import time

from harness.launch.netns.holder import raise_priority


def go_before_others() -> None:
    """Where the system allows it, this process and what it starts get a core as soon as they need
    one: for ranks that mostly sleep, whose waiting for each other is measured.
    """
    raise_priority()


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
