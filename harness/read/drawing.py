"""What the figures share: colours, and axes that are read at a glance."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, StrMethodFormatter

from harness.links import Link

# Told apart by colour-blind people as well (Okabe and Ito), and by their markers.
LINES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#E69F00", "v"),
         ("#56B4E9", "P"))  # fmt: skip
NO_LINK = "no finished run has a link: run the sweep with --launcher netns"


def rate_text(rate_mbit: float | None) -> str:
    text = str(Link(rate_mbit=rate_mbit))
    return text.replace("mbit", " Mbit/s").replace("none", "rate not limited")


def delay_axis(axes: Axes, delays: list[float]) -> None:
    """Logarithmic from 1 ms, and with a place for no delay at all."""
    axes.set_xscale("symlog", linthresh=1, linscale=0.5)
    axes.set_xticks(delays, [f"{delay:g}" for delay in delays])
    axes.set_xlim(-0.4, max(delays) * 1.3)


def log_ticks(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.minorticks_off()


def calm(axes: Axes) -> None:
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
