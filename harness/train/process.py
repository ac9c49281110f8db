"""How a training process speaks and how it ends."""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from typing import NoReturn

import datasets
import huggingface_hub
from transformers import logging as transformers_logging


def quiet(bars: bool) -> None:
    """The libraries' own messages would bury the one line that matters."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if not bars:
        datasets.disable_progress_bars()
        huggingface_hub.utils.disable_progress_bars()
    # The Trainer passes it on by its older name; it means what it did.
    warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)


def leave(code: int) -> NoReturn:
    """End a script. Not by returning: now and then a thread of gloo that is still there makes a
    process abort while it is taken apart, and a finished run would end with an error.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
