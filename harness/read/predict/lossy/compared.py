"""The links with loss or jitter over which simulated times were compared with measured ones, on two
nodes: of exchanges alone (records/lossy) and of trainings (records/predicted_lossy).
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.core.links import Link
from harness.core.settings import UserError

DELAYS_MS, RATES_MBIT = (2.0, 40.0), (20.0, 200.0)
MOST_JITTER_MS, LOSSES = 10.0, (0.001, 0.01)
NODES = 2
# How many times as long as predicted the steps took, at most, over the three links that lose
# packets: of codes and of replicas that train apart; of all others.
LONGER, LONGER_OTHERS = 1.5, 1.2
RANGE = (
    f"{DELAYS_MS[0]:g} to {DELAYS_MS[1]:g} ms, {RATES_MBIT[0]:g} to {RATES_MBIT[1]:g} Mbit/s, "
    f"jitter up to {MOST_JITTER_MS:g} ms, losses of {100 * LOSSES[0]:g} to {100 * LOSSES[1]:g} %"
)


def check_compared(link: Link, furthest: float) -> None:
    """UserError for a link with more loss or jitter than was compared, or `furthest` times as slow,
    in delay or rate, as the slowest of those.
    """
    if not (link.loss or link.jitter_ms):
        return
    limits = (
        ("loss", "%", 100 * link.loss, 100 * LOSSES[1]),
        ("jitter", "ms", link.jitter_ms, MOST_JITTER_MS),
        ("delay", "ms", link.delay_ms, furthest * DELAYS_MS[1]),
    )
    for name, unit, value, most in limits:
        if value > most:
            raise _refusal(link, f"a {name} of {value:.3g} {unit} is above {most:g} {unit}")
    if link.rate_mbit is not None and link.rate_mbit * furthest < RATES_MBIT[0]:
        least = RATES_MBIT[0] / furthest
        raise _refusal(link, f"a rate of {link.rate_mbit:.3g} Mbit/s is below {least:g} Mbit/s")


def _refusal(link: Link, why: str) -> UserError:
    return UserError(
        f"--link {link}: {why}: simulated loss and jitter were compared with measurements over "
        f"{RANGE}: name a link nearer to these, or use predict"
    )


def limits_of(link: Link, most_nodes: int, codes_or_rare: bool) -> Iterator[str]:
    """A sentence for each way in which a simulated time may be further off than those compared."""
    if most_nodes > NODES:
        yield (
            "trainings over links with loss or jitter were compared on two nodes alone: on more "
            "there is no interval"
        )
    if not _is_inside(link):
        yield f"{link} is outside the links over which simulations were compared ({RANGE})"
    if link.loss and codes_or_rare:
        yield (
            "where packets are lost, codes (int8, int4) and rare exchanges (local_sgd, diloco) are "
            f"predicted too short: over three links their steps took up to {LONGER:g} times as "
            f"long, others up to {LONGER_OTHERS:g} times"
        )


def _is_inside(link: Link) -> bool:
    has_rate = link.rate_mbit is not None and RATES_MBIT[0] <= link.rate_mbit <= RATES_MBIT[1]
    rare = 0 < link.loss < LOSSES[0]
    return has_rate and DELAYS_MS[0] <= link.delay_ms <= DELAYS_MS[1] and not rare
