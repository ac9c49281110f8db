"""Peers that find each other and average, without a process group: hivemind.

This package prepares the library for all modules of the strategy: the library is silenced, its
version is checked, and it is patched in three places. Its classes are overridden in optimizer.py.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.core import process
from harness.core.provenance import HIVEMIND
from harness.core.settings import UserError
from harness.train.patches import check_patched

# These messages would bury the one line that matters: those of hivemind and of its daemon, which
# reads the same variable, and those of asyncio about connections that a killed peer leaves behind.
os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")
logging.getLogger("asyncio").setLevel(logging.CRITICAL)

try:
    import hivemind

    # Before its modules are imported: another version may not have them.
    check_patched(hivemind, "for --strategy hivemind")
    from hivemind.compression import Uniform8BitQuantization, serialization
    from hivemind.compression.quantization import average_buckets
    from hivemind.p2p import P2P
except ImportError:
    raise UserError(
        f"{HIVEMIND.needed_for} needs hivemind {HIVEMIND.version}, which is not installed: "
        f"{HIVEMIND.install}"
    ) from None


def patch_hivemind() -> None:
    """Patch the library, except for private_sockets(), in this process and those it forks.

    The p2p daemon is started so that it does not outlive a peer that is killed: P2P.create() builds
    the command line itself. Tensors in 8 bits are decoded by Int8: receivers find a decoder in a
    table of the library, whose own decoder does not work with today's numpy.
    """
    P2P._make_process_args = staticmethod(_daemon_command)
    serialization._BASE_COMPRESSION_TYPES["UNIFORM_8BIT"] = Int8()


_make_process_args = P2P._make_process_args
LONGEST_TMPDIR = 60  # characters: a socket's address has 107, of which names below it take 45


def private_sockets() -> tempfile.TemporaryDirectory[str]:
    """A folder that nobody else may enter, for the sockets between the library and its daemon.

    The library itself puts them into /tmp, and leaves those of its forked processes there.
    """
    at = tempfile.gettempdir()
    if len(at) > LONGEST_TMPDIR:
        at = "/tmp"  # noqa: S108 - a new folder in it, of mode 700
    folder = tempfile.TemporaryDirectory(prefix="harness-", dir=at, ignore_cleanup_errors=True)
    P2P._UNIX_SOCKET_PREFIX = f"/unix{folder.name}/"
    return folder


def _daemon_command(*args: Any, **kwargs: Any) -> list[str]:
    """Start the daemon through core/process.py, which ties it to the process that starts it."""
    tied = [sys.executable, str(Path(process.__file__)), str(os.getpid())]
    return [*tied, *_make_process_args(*args, **kwargs)]


CODEBOOK_AT = 8  # bytes: the length of the codebook comes first


class Int8(Uniform8BitQuantization):
    """hivemind's encoding, which fails for tensors of one value, and its decoding."""

    def quantize(
        self, tensor: torch.Tensor, allow_inplace: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        first = tensor.flatten()[:1]
        if bool((tensor == first).all()):
            return np.zeros(tuple(tensor.shape), np.uint8), first.float().numpy()
        values = tensor.float()
        centred = values - values.mean()
        step = self.RANGE_IN_SIGMAS * centred.std() / self.n_bins
        bins = (centred / step).round_().add_(self.n_bins // 2).clamp_(0, self.n_bins - 1)
        codes = bins.to(torch.uint8)
        return codes.numpy(), average_buckets(values, codes, self.n_bins).numpy()

    def extract(self, serialized_tensor: Any) -> torch.Tensor:
        packed = serialized_tensor.buffer
        entries = int.from_bytes(packed[:CODEBOOK_AT], "little")
        codebook = np.frombuffer(packed, np.float32, entries, CODEBOOK_AT)
        codes = np.frombuffer(packed, np.uint8, offset=CODEBOOK_AT + codebook.nbytes)
        values = torch.from_numpy(codebook[codes]).reshape(tuple(serialized_tensor.size))
        values = values.to(getattr(torch, serialized_tensor.dtype))
        return values.requires_grad_(serialized_tensor.requires_grad)


def end_with_peer(parent_pid: int) -> None:
    """Tie a process of hivemind to its peer, so that Ctrl-C does not end it; called first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    process.end_with_parent(parent_pid)


@contextmanager
def forking() -> Iterator[None]:
    """hivemind's processes must be forked, whatever start method this process has.

    Starting them also disables Ctrl-C in this process, which is restored afterwards.
    """
    method = multiprocessing.get_start_method(allow_none=True)
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    multiprocessing.set_start_method("fork", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(method, force=True)
        signal.signal(signal.SIGINT, on_ctrl_c)
