"""What happens before a run is opened."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

from tests.support.ranks import ranks


def opened(folder: str) -> list[tuple[bool, bool]]:
    """Before and after: whether garbage is collected, and whether that looks at what was loaded."""
    from harness.core.command_line import command_line
    from harness.train.run.start import start

    sys.argv = ["vit.py", "--tiny", "--output_dir", folder]
    loaded, found = [sys.argv], []
    settings = command_line("vit")
    found.append((gc.isenabled(), any(each is loaded for each in gc.get_objects())))
    assert start(settings) is not None
    found.append((gc.isenabled(), any(each is loaded for each in gc.get_objects())))
    return found


@pytest.mark.process
def test_no_garbage_is_collected_while_a_script_is_loaded(tmp_path: Path) -> None:
    ((loading, training),) = ranks(1, opened, str(tmp_path))
    assert loading == (False, True)
    assert training == (True, False)
