"""Small trainings that a signal meets before a chosen write, or a moment after it: on this machine,
on emulated nodes, and peers.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from harness.core.process import install_quit_handlers
from harness.train.data.cache import cached
from tests.support.disks import Writes
from tests.support.ranks import ROOT, run_script
from tests.support.toys import Net, Points, ours

FLAGS = ["--save=last", "--save_steps=3", "--hang_after=0", "--telemetry_hz=0", "--epochs=2"]
NEVER = -1


def strike(how: str, after_s: float) -> None:
    """By Python, or by the kernel's clock, which also comes while native code writes."""
    if after_s:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it ends a process as SIGKILL does
        signal.setitimer(signal.ITIMER_REAL, after_s)
    else:
        os.kill(os.getpid(), getattr(signal, how))


def build(draft: Path) -> None:
    for name in ("a", "b"):
        np.save(draft / name, np.arange(1000))


def train(folder: str, rank: int, at: int, how: str, after_s: float) -> None:
    """Data from a cache, a run with checkpoints; one that ends well tells how often it wrote."""
    install_quit_handlers()
    root, own = Path(folder), os.environ.get("RANK", "0")
    writes = Writes(root)
    writes.arm(at if own == str(rank) else NEVER, partial(strike, how, after_s))
    entry = cached({"data": 1}, build)
    assert all((np.load(entry / f"{name}.npy") == np.arange(1000)).all() for name in "ab")
    trainer, run = ours(root / "out", Net(dropout=0.2), Points(24), Points(8), *FLAGS)
    with run:
        run.train(trainer)
    # A rank that is killed while it waits for torch's launcher to read its result blocks that one.
    signal.setitimer(signal.ITIMER_REAL, 0)
    root.with_name(f"{root.name}.{own}").write_text(str(writes.count))


ENTER_NETWORK = 0x40000000  # CLONE_NEWNET of linux/sched.h


def train_on_node(namespace: str, *of_training: Any) -> None:
    """The same inside an emulated node, entered by a process that has loaded everything already."""
    with open(namespace) as network:
        assert ctypes.CDLL(None, use_errno=True).setns(network.fileno(), ENTER_NETWORK) == 0
    train(*of_training)


def train_as_peer(folder: str, at: int, how: str, after_s: float, argv: list[str]) -> int:
    """vit.py as one of two peers; its writes count from when both train."""
    import vit
    from harness.train.strategy.hivemind import session

    install_quit_handlers()
    session.GONE_S = 150.0  # on a busy machine it takes longer until the other is started again
    writes = Writes(Path(folder))

    class Meeting(vit.Console):
        met = False

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            super().on_step_end(args, state, control, **kwargs)
            if self.met or state.global_step < 2:
                return
            self.met = self.context.session.count() >= 2
            if self.met:
                writes.arm(at, partial(strike, how, after_s))
            else:
                time.sleep(0.5)

    vit.Console = Meeting  # type: ignore[misc]
    code = run_script("vit", argv, str(ROOT))
    signal.setitimer(signal.ITIMER_REAL, 0)
    return code
