"""A fresh process that answers questions: the Hub's libraries read their settings when loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.ranks import ROOT

ANSWER = "answer "
# After code that defines answer(): its arguments come as a line of JSON, and so does its result.
LOOP = f"""
import json, sys
for line in sys.stdin:
    print("{ANSWER}" + json.dumps(answer(*json.loads(line))), flush=True)
"""


class Client:
    """One process for many calls, because loading the libraries takes ten seconds."""

    def __init__(self, code: str, env: dict[str, str], cwd: Path = ROOT) -> None:
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self.process = subprocess.Popen(
            [sys.executable, "-c", code + LOOP],
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: Any) -> None:
        self.process.kill()
        self.process.communicate()
        self.errors.close()

    def __call__(self, *args: Any) -> Any:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(args) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        self.errors.seek(0)
        raise AssertionError(self.errors.read()[-4000:])
