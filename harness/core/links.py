"""A link between nodes: one-way delay of a packet, rate, jitter and loss.

    none  20ms  200mbit  20ms/200mbit/jitter2ms/loss1%      parts in any order
    {delay_ms: 20, rate_mbit: 200, jitter_ms: 2, loss: 0.01}
    rack  continent  home_dsl ...                           see PRESETS

Every number holds for one direction, and both directions are alike. A Network has pairs of nodes
that are not all alike.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from string import ascii_lowercase as LETTERS
from typing import Any

from harness.core.identity import number
from harness.core.settings import UserError, nearest

NUMBER = r"([0-9.]+(?:e-?[0-9]+)?)"
# How each field is written -> (field, factor from the written unit to the field's unit).
PARTS = (
    (re.compile(f"^{NUMBER}ms$"), "delay_ms", 1.0),
    (re.compile(f"^{NUMBER}mbit$"), "rate_mbit", 1.0),
    (re.compile(f"^{NUMBER}gbit$"), "rate_mbit", 1000.0),
    (re.compile(f"^jitter{NUMBER}ms$"), "jitter_ms", 1.0),
    (re.compile(f"^loss{NUMBER}$"), "loss", 1.0),
    (re.compile(f"^loss{NUMBER}%$"), "loss", 0.01),
)
FIELDS = ("delay_ms", "rate_mbit", "jitter_ms", "loss")
EXPECTED = (
    "expected none, 20ms, 200mbit, 20ms/200mbit/jitter2ms/loss1%, "
    "{delay_ms: 20, rate_mbit: 200, jitter_ms: 2, loss: 0.01} or a name such as rack"
)

# TCP opens its window during a transfer, which costs up to two more round trips than the single
# one that is subtracted from its time; so the rest must take CLOSED_TRIPS round trips. Before a
# probe counts OPENED_BYTES, another transfer has opened the window: OPENED_TRIPS suffice. Where the
# first transfer of that size was counted as well, rates were within 5 % in 609 of the 640
# published transfers over links of limited rate, and within a factor of 3 in all; those of shorter
# transfers were wrong by a factor of 10 to 1000.
OPENED_BYTES, OPENED_TRIPS, CLOSED_TRIPS = 2**20, 1, 6
# An emulated link is handed as many whole packets at a time as pass within MOMENT_S, at most
# HANDOVER_BYTES bytes, and single packets if it is slow.
PACKET = 1500  # bytes on an Ethernet, IP and TCP headers included
MOMENT_S, HANDOVER_BYTES = 0.0005, 65536

# A pair with a round trip FURTHER times as long as another's, plus a millisecond, has another
# kind of link; smaller differences occur by chance.
FURTHER, NEAR_S = 2, 0.001


@dataclass(frozen=True)
class Link:
    """The link between any two nodes, where all pairs are alike."""

    delay_ms: float = 0.0  # one way
    rate_mbit: float | None = None  # None: unlimited
    jitter_ms: float = 0.0  # delays are uniform in delay - jitter to delay + jitter
    loss: float = 0.0  # share of the packets

    def __str__(self) -> str:
        parts = [f"{number(self.delay_ms)}ms"] if self.delay_ms else []
        if self.rate_mbit is not None:
            # Without an exponent, which a set-up could not hold.
            whole = float(self.rate_mbit).is_integer()
            rate = f"{self.rate_mbit:.0f}" if whole else number(self.rate_mbit)
            parts.append(f"{rate}mbit")
        if self.jitter_ms:
            parts.append(f"jitter{number(self.jitter_ms)}ms")
        if self.loss:
            parts.append(f"loss{number(self.loss)}")
        return "/".join(parts) or "none"

    @property
    def tag(self) -> str:
        """Third part of a set-up, so that runs over different links are different runs."""
        return str(self).replace("/", "-")

    def between(self, one: int, other: int) -> Link:
        """The link that packets from one node to another take."""
        return self if one != other else Link()

    def facts(self, nodes: int) -> dict[str, Any] | list[dict[str, Any]]:
        """The link as records describe it."""
        return asdict(self)

    def check(self, nodes: int) -> None:
        """Accept any number of nodes."""


def tells_rate(size: float, seconds: float, round_trip_s: float) -> bool:
    """Whether a transfer of so many bytes was long enough to tell a rate. seconds: its time beyond
    the round trip.
    """
    trips = OPENED_TRIPS if size >= OPENED_BYTES else CLOSED_TRIPS
    return seconds > 0 and seconds >= trips * round_trip_s


def handover_bytes(bytes_per_s: float) -> int:
    """How many bytes, headers included, an emulated link of this rate is handed at a time."""
    return int(min(bytes_per_s * MOMENT_S, HANDOVER_BYTES))


def packets_at_once(bytes_per_s: float) -> int:
    """How many packets an emulated link of this rate is handed at a time."""
    return max(1, handover_bytes(bytes_per_s) // PACKET)


def slowest_rate(pairs: Iterable[Mapping[str, Any]]) -> float | None:
    """Mbit/s of the slowest pair of nodes; None if a pair of unknown rate is much more distant."""
    known, trips_s, others_s = [], [0.0], [0.0]
    for pair in pairs:
        mbit, round_trip_s = pair.get("bandwidth_mbit"), (pair.get("rtt_min_ms") or 0.0) / 1e3
        if mbit:
            known.append(float(mbit))
            trips_s.append(round_trip_s)
        else:
            others_s.append(round_trip_s)
    is_further = max(others_s) > FURTHER * max(trips_s) + NEAR_S
    return None if is_further else min(known, default=None)


def least_rate_of(link: Mapping[str, Any]) -> float | None:
    """A lower bound in Mbit/s of a link whose transfers were too short to tell a rate: all of their
    bytes passed within a round trip.
    """
    least = [
        pair["transfer_bytes"] * 8e-3 / pair["rtt_min_ms"]
        for pair in link.get("pairs") or ()
        if pair["bandwidth_mbit"] is None and (pair["transfer_bytes"] or 0) >= OPENED_BYTES
    ]
    return min(least, default=None)


# Typical round numbers, not measurements; every run measures and records its actual link. Each
# is the path between two machines of that kind, in both directions.
PRESETS = {
    # Gigabit Ethernet through one switch, as under a desk.
    "lan": Link(0.1, 1000),
    # Two machines of one rack, 10 Gbit Ethernet.
    "rack": Link(0.05, 10_000),
    # Two racks of one data centre, at the share of a mid-sized virtual machine.
    "datacenter": Link(0.25, 5000),
    # Two data centres of one cloud region.
    "region": Link(1, 2000),
    # Two regions of one continent: Frankfurt-Madrid and Virginia-Oregon take 15 to 35 ms.
    "continent": Link(20, 1000),
    # Europe and the east coast of North America.
    "transatlantic": Link(40, 500),
    # Half around the world: Europe and Australia.
    "worldwide": Link(140, 200),
    # Two homes on glass fibre.
    "home_fibre": Link(8, 200, 0.5),
    # Two homes on VDSL; the uplink of the sender limits either direction.
    "home_dsl": Link(20, 40, 3),
    # Two laptops on one wireless access point, after its own retransmissions.
    "wifi": Link(2, 200, 1.5, 0.001),
    # Two machines behind mobile phones, LTE uplink.
    "mobile": Link(30, 20, 10, 0.005),
}


def plain_link(value: Any) -> Link:
    """A link from its text, its name or its mapping; UserError if wrong."""
    if isinstance(value, dict):
        if unknown := [name for name in value if name not in FIELDS]:
            raise UserError(f"link {unknown[0]}: {EXPECTED}")
        numbers = {name: (text, 1.0) for name, text in value.items()}
    else:
        text = str(value).strip().lower().replace(" ", "")
        if text in PRESETS or text == "none":
            return PRESETS.get(text, Link())
        numbers = _numbers(value, text)
    try:
        link = Link(**{name: _exact(text, worth) for name, (text, worth) in numbers.items()})
    except (TypeError, ValueError):
        raise UserError(f"link {value}: {EXPECTED}") from None
    if not numbers or not all(math.isfinite(getattr(link, name) or 0) for name in FIELDS):
        raise UserError(f"link {value}: {EXPECTED}")
    if link.delay_ms < 0 or (link.rate_mbit is not None and link.rate_mbit <= 0):
        raise UserError(f"link {value}: a delay is 0 or more, a rate above 0")
    if not 0 <= link.jitter_ms <= link.delay_ms:
        raise UserError(f"link {value}: a jitter is 0 or more and not above the delay")
    if not 0 <= link.loss < 1:
        raise UserError(f"link {value}: a loss is a share, at least 0 and below 1")
    return link


def _exact(text: Any, worth: float) -> float:
    """A product without floating-point error: 0.7 % is 0.007."""
    return float(f"{float(text) * worth:.12g}")


def _numbers(value: Any, text: str) -> dict[str, tuple[str, float]]:
    """Field -> (number, factor of its unit) of a text such as 20ms/200mbit."""
    numbers: dict[str, tuple[str, float]] = {}
    for part in re.split("[/,]", text):
        matches = ((name, regex.match(part), worth) for regex, name, worth in PARTS)
        name, match, worth = next((m for m in matches if m[1]), ("", None, 0.0))
        if match is None:
            wrong = "" if part == text else f"{part or 'nothing'} is no part of one; "
            raise UserError(f"link {value}: {wrong}{nearest(text, PRESETS, EXPECTED)}")
        if name in numbers:
            raise UserError(f"link {value}: {name} is given twice")
        numbers[name] = (match[1], worth)
    return numbers


KEYS = ("places", "within", "between", "pairs")
PLACES = re.compile(r"^[0-9]+(\+[0-9]+)*$")
PAIR = re.compile(r"^([a-z])-([a-z])$")
EXPECTED_NETWORK = "expected {places: [2, 1], within: rack, between: continent, pairs: {a-b: 80ms}}"
LONGEST_TAG = 60  # a folder name has further parts and a limited length


@dataclass(frozen=True)
class Network:
    """Nodes of which some pairs have other links than others.

    {places: [2, 1], within: rack, between: continent}         two nodes near, one far
    {places: [2, 2, 1], within: rack, between: continent,
    pairs: {a-c: home_dsl, b-b: 5ms}}                          places are a, b, c in their order
    2+1:within=rack:between=continent:a-b=80ms                 the same in one line

    The nodes of a set-up are dealt to the places in order. A link that is left out is unlimited.
    """

    places: tuple[int, ...]  # the number of nodes in each
    links: tuple[tuple[tuple[int, int], Link], ...]  # for each pair of places that matters

    def __str__(self) -> str:
        parts = ["+".join(map(str, self.places))]
        usual: dict[bool, Link] = {}
        for inside, name in ((True, "within"), (False, "between")):
            if links := [link for (one, other), link in self.links if (one == other) == inside]:
                usual[inside] = max(links, key=links.count)  # the first of the most frequent
                parts.append(f"{name}={usual[inside]}")
        parts += [
            f"{LETTERS[one]}-{LETTERS[other]}={link}"
            for (one, other), link in self.links
            if link != usual[one == other]
        ]
        return ":".join(parts)

    @property
    def tag(self) -> str:
        """Third part of a set-up; a long one is shortened and ends with a digest."""
        tag = re.sub(r"[^a-z0-9.]+", "-", str(self))
        if len(tag) <= LONGEST_TAG:
            return tag
        digest = hashlib.sha256(str(self).encode()).hexdigest()[:8]
        return f"{'-'.join(map(str, self.places))[:LONGEST_TAG]}-{digest}"

    def between(self, one: int, other: int) -> Link:
        """The link that packets from one node to another take."""
        if one == other:
            return Link()
        place = [place for place, nodes in enumerate(self.places) for _ in range(nodes)]
        pair = sorted((place[one], place[other]))
        return dict(self.links)[pair[0], pair[1]]

    def facts(self, nodes: int) -> dict[str, Any] | list[dict[str, Any]]:
        """The link as records describe it: pair by pair."""
        pairs = ((one, other) for one in range(nodes) for other in range(one + 1, nodes))
        return [{"nodes": [i, j], **asdict(self.between(i, j))} for i, j in pairs]

    def check(self, nodes: int) -> None:
        """UserError if the network does not have this number of nodes."""
        if sum(self.places) != nodes:
            raise UserError(
                f"link {self} has {sum(self.places)} nodes in its places, and the set-up {nodes}"
            )


def link_of(value: Any) -> Link | Network:
    """A link or a network from the text or the mapping of a sweep file."""
    if isinstance(value, dict) and set(value) & set(KEYS):
        return _network(value, value)
    if isinstance(value, str) and value.lstrip().startswith("{"):
        return _network(value, _from_flow(value))
    if isinstance(value, str) and ":" in value:
        return _network(value, _from_line(value))
    return plain_link(value)


def _from_flow(text: str) -> dict[str, Any]:
    """A mapping in the syntax of a sweep file, given on a command line without quotes."""
    try:
        mapping = json.loads(re.sub(r"[^\s{}\[\],:]+", r'"\g<0>"', text))
    except ValueError:
        raise UserError(f"link {text}: {EXPECTED_NETWORK}") from None
    assert isinstance(mapping, dict)  # it begins with a brace
    return mapping


def _from_line(text: str) -> dict[str, Any]:
    places, *parts = text.lower().replace(" ", "").split(":")
    mapping: dict[str, Any] = {"places": places.split("+"), "pairs": {}}
    for part in parts:
        name, _, link = part.partition("=")
        inner = mapping if name in KEYS else mapping["pairs"]
        if name in inner:
            raise UserError(f"link {text}: {name} is given twice")
        inner[name] = link
    return mapping


def _network(value: Any, mapping: dict[str, Any]) -> Link | Network:
    if unknown := [name for name in mapping if name not in KEYS]:
        raise UserError(f"link {unknown[0]}: {EXPECTED_NETWORK}")
    places = _places(value, mapping.get("places"))
    named = mapping.get("pairs") or {}
    if not isinstance(named, dict):
        raise UserError(f"link {value}: {EXPECTED_NETWORK}")
    within, between = (plain_link(mapping.get(name, "none")) for name in ("within", "between"))
    # Only pairs of places with a link: a single node has no link within its place.
    links = {
        (one, other): within if one == other else between
        for one, nodes in enumerate(places)
        for other in range(one, len(places))
        if one != other or nodes > 1
    }
    seen: set[tuple[int, int]] = set()
    for name, text in named.items():
        pair = _pair(value, str(name), links)
        if pair in seen:
            raise UserError(f"link {value}: pair {name} is given twice")
        seen.add(pair)
        links[pair] = plain_link(text)
    # If all pairs are alike, this is a plain link, so that each spelling gives the same run.
    if len(set(links.values())) == 1:
        return next(iter(links.values()))
    return Network(places, tuple(links.items()))


def _places(value: Any, numbers: Any) -> tuple[int, ...]:
    text = "+".join(map(str, numbers)) if isinstance(numbers, list | tuple) else str(numbers)
    if not PLACES.match(text):
        raise UserError(f"link {value}: {EXPECTED_NETWORK}")
    places = tuple(int(nodes) for nodes in text.split("+"))
    if min(places) < 1 or sum(places) < 2 or len(places) > len(LETTERS):
        raise UserError(
            f"link {value}: a network has 1 to {len(LETTERS)} places of at least one node each, "
            "and two nodes or more"
        )
    return places


def _pair(value: Any, name: str, pairs: Collection[tuple[int, int]]) -> tuple[int, int]:
    match = PAIR.match(name.strip().lower())
    one, other = sorted(map(LETTERS.index, match.groups())) if match else (-1, -1)
    if (one, other) not in pairs:
        known = ", ".join(f"{LETTERS[i]}-{LETTERS[j]}" for i, j in pairs)
        raise UserError(f"link {value}: no pair of places {name}: there are {known}")
    return one, other
