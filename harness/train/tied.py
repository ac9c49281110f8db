"""Loaded first by the fork server of warm.py: it ends when its launcher ends, and its ranks do."""

from harness.parent import end_with_parent

end_with_parent()
