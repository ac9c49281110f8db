"""The sampler of a node, as the one process of the node that started it sees it."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.versions import ROOT

ANSWER_S = 5.0
GONE = "the process that looks at the machine is gone or does not answer"


class Watch:
    """Starts a sampler; asked at the edges of epochs, never inside a step."""

    def __init__(self, uuids: list[str], every_s: float, interface: str | None = None) -> None:
        asked = {"uuids": uuids, "every_s": every_s, "interface": interface, "parent": os.getpid()}
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.lost: str | None = None  # why there is nothing more to be had
        self.process = subprocess.Popen(
            [sys.executable, "-m", "harness.train.telemetry.sampler", json.dumps(asked)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for those who train: it ends when they do
        )
        self.answers = selectors.DefaultSelector()
        assert self.process.stdout is not None
        self.answers.register(self.process.stdout, selectors.EVENT_READ)

    def keep(self, file: Path) -> None:
        """Every reading, a line each, from the first one on."""
        self._ask(f"keep {file.absolute()}")

    def edge(self) -> dict[str, Any] | None:
        """What has been since this was asked before; None when the sampler is gone."""
        return self._answer("edge")

    def peek(self) -> dict[str, Any] | None:
        """The same, and it goes on counting from where it did."""
        return self._answer("peek")

    def _answer(self, question: str) -> dict[str, Any] | None:
        if not self._ask(question):
            return None
        assert self.process.stdout is not None
        try:
            line = self.process.stdout.readline() if self.answers.select(ANSWER_S) else ""
            found: dict[str, Any] = json.loads(line)
        except (OSError, ValueError):
            self._give_up()
            return None
        return found

    def _ask(self, words: str) -> bool:
        if self.lost is not None:
            return False
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(words + "\n")
            self.process.stdin.flush()
        except OSError:
            self._give_up()
            return False
        return True

    def _give_up(self) -> None:
        self.lost = GONE
        self.close()

    def close(self) -> None:
        """It ends at the end of its input."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        try:
            self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
