"""A link between nodes: how long a packet takes one way, and how much passes in a second."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from harness.identity import number
from harness.settings import UserError

PARTS = re.compile(r"^(?:(?P<delay>[0-9.]+)ms)?/?(?:(?P<rate>[0-9.]+)(?P<unit>mbit|gbit))?$")
EXPECTED = "expected none, 20ms, 200mbit, 20ms/200mbit or {delay_ms: 20, rate_mbit: 200}"


@dataclass(frozen=True)
class Link:
    delay_ms: float = 0.0  # one way
    rate_mbit: float | None = None  # None: as fast as it goes

    def __str__(self) -> str:
        parts = [f"{number(self.delay_ms)}ms"] if self.delay_ms else []
        if self.rate_mbit is not None:
            parts.append(f"{number(self.rate_mbit)}mbit")
        return "/".join(parts) or "none"

    @property
    def tag(self) -> str:
        """Third part of a set-up: runs over unlike links are unlike runs."""
        return str(self).replace("/", "-")


def link_of(value: Any) -> Link:
    """A link from the text or the mapping of a sweep file."""
    if isinstance(value, dict):
        if unknown := sorted(set(value) - {"delay_ms", "rate_mbit"}):
            raise UserError(f"link {unknown[0]}: {EXPECTED}")
        delay, rate, unit = value.get("delay_ms", "0"), value.get("rate_mbit"), "mbit"
    else:
        text = str(value).strip().lower().replace(" ", "")
        if text == "none":
            return Link()
        match = PARTS.match(text)
        if not match or not text or text == "/":
            raise UserError(f"link {value}: {EXPECTED}")
        delay, rate, unit = match["delay"] or "0", match["rate"], match["unit"]
    try:
        rate_mbit = None if rate is None else float(rate) * (1000 if unit == "gbit" else 1)
        link = Link(float(delay), rate_mbit)
    except ValueError:
        raise UserError(f"link {value}: {EXPECTED}") from None
    if link.delay_ms < 0 or (link.rate_mbit is not None and link.rate_mbit <= 0):
        raise UserError(f"link {value}: a delay is 0 or more, a rate above 0")
    return link
