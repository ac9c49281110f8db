"""Loaded at the start of every Python of the stand-in: torch gets kernels that the CPU computes.

setup.sh copies it beside torch and puts the folder of the libraries in place of LIBRARIES.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LIBRARIES = "@LIB@"


@contextmanager
def quiet() -> Iterator[None]:
    """torch tells of each kernel that is replaced."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def take_over(torch: Any) -> None:
    with quiet():
        torch.ops.load_library(f"{LIBRARIES}/libkern.so")
    torch.backends.cudnn.enabled = False
    for kernel in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(False)


class Finder(importlib.abc.MetaPathFinder):
    """Finds torch as usual, and takes it over once it is loaded, not when it is looked for."""

    searching = False

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "torch" or self.searching:
            return None
        self.searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.searching = False
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def load_and_take_over(module: Any) -> None:
            load(module)
            take_over(module)

        spec.loader.exec_module = load_and_take_over  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())
