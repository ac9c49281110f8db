"""vit.py as torchrun starts it, with faults planted: files UPDATE.NODE.WHAT in a folder say which.

WHAT: rank, its process is killed; agent, the torchrun that started it; pause, it goes on when there
is a file `go`; wait, it does nothing any more. NODE is the variable NODE.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.core.command_line import command_line

SETTINGS = command_line("vit", sys.argv[1:])  # with words of its own, the script is vit

import vit
from harness.train.run.start import leave

FOLDER = Path(os.environ["PLANTED"])


class Planted(vit.Console):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_step_end(args, state, control, **kwargs)
        for file in FOLDER.glob(f"{state.global_step}.{os.environ['NODE']}.*"):
            file.unlink()
            (FOLDER / "reached").write_text(file.name)
            what = file.suffix.removeprefix(".")
            if what in ("rank", "agent"):
                os.kill(os.getpid() if what == "rank" else os.getppid(), signal.SIGKILL)
            until = FOLDER / ("go" if what == "pause" else "never")
            while not until.exists():
                time.sleep(0.02)


vit.Console = Planted  # type: ignore[misc]
leave(vit.main(SETTINGS))
