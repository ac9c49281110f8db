"""What happens before a run is opened."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

from tests.support.ranks import ranks


def opened(folder: str) -> list[tuple[bool, int]]:
    from harness.core.command_line import command_line
    from harness.train.run.start import start

    sys.argv = ["vit.py", "--tiny", "--output_dir", folder]
    frozen = gc.get_freeze_count()
    found = []
    settings = command_line("vit")
    found.append((gc.isenabled(), gc.get_freeze_count() - frozen))
    assert start(settings) is not None
    found.append((gc.isenabled(), gc.get_freeze_count() - frozen))
    return found


@pytest.mark.process
def test_no_garbage_is_collected_while_a_script_is_loaded(tmp_path: Path) -> None:
    ((loading, training),) = ranks(1, opened, str(tmp_path))
    assert not loading[0]
    assert training[0] and training[1] > loading[1]
