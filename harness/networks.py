"""A network of nodes that are not all equally far from each other.

    {places: [2, 1], within: rack, between: continent}         two nodes near, one far
    {places: [2, 2, 1], within: rack, between: continent,
     pairs: {a-c: home_dsl, b-b: 5ms}}                         places are a, b, c in their order
    2+1:within=rack:between=continent:a-b=80ms                 the same in one line

The nodes of a set-up are dealt to the places in order. What is not said is as fast as it goes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from string import ascii_lowercase as LETTERS
from typing import Any

from harness.links import Link, plain_link
from harness.settings import UserError

KEYS = ("places", "within", "between", "pairs")
PLACES = re.compile(r"^[0-9]+(\+[0-9]+)*$")
PAIR = re.compile(r"^([a-z])-([a-z])$")
EXPECTED = "expected {places: [2, 1], within: rack, between: continent, pairs: {a-b: 80ms}}"
LONGEST_TAG = 60  # a folder's name has more parts, and its limits


@dataclass(frozen=True)
class Network:
    """Nodes in places, and the link of each pair of places that matters, smaller letter first."""

    places: tuple[int, ...]
    links: tuple[tuple[tuple[int, int], Link], ...]

    def __str__(self) -> str:
        links = dict(self.links)
        parts = ["+".join(map(str, self.places))]
        inside = [link for (one, other), link in self.links if one == other]
        across = [link for (one, other), link in self.links if one != other]
        usual = {True: _most_frequent(inside), False: _most_frequent(across)}
        parts += [f"within={usual[True]}"] if inside else []
        parts += [f"between={usual[False]}"] if across else []
        parts += [
            f"{LETTERS[one]}-{LETTERS[other]}={link}"
            for (one, other), link in links.items()
            if link != usual[one == other]
        ]
        return ":".join(parts)

    @property
    def tag(self) -> str:
        """Third part of a set-up; a long one is cut, and told from others by its digest."""
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
        """What a record says of it: pair by pair."""
        pairs = ((one, other) for one in range(nodes) for other in range(one + 1, nodes))
        return [{"nodes": [i, j], **asdict(self.between(i, j))} for i, j in pairs]

    def check(self, nodes: int) -> None:
        """UserError if it is the network of another number of nodes."""
        if sum(self.places) != nodes:
            raise UserError(
                f"link {self} has {sum(self.places)} nodes in its places, and the set-up {nodes}"
            )


def link_of(value: Any) -> Link | Network:
    """A link or a network from the text or the mapping of a sweep file."""
    if isinstance(value, dict) and set(value) & set(KEYS):
        return _network(value, value)
    if isinstance(value, str) and ":" in value:
        return _network(value, _from_line(value))
    return plain_link(value)


def _from_line(text: str) -> dict[str, Any]:
    places, *parts = text.lower().replace(" ", "").split(":")
    found: dict[str, Any] = {"places": places.split("+"), "pairs": {}}
    for part in parts:
        name, _, link = part.partition("=")
        inner = found if name in KEYS else found["pairs"]
        if name in inner:
            raise UserError(f"link {text}: {name} stands here twice")
        inner[name] = link
    return found


def _network(value: Any, given: dict[str, Any]) -> Link | Network:
    if unknown := [name for name in given if name not in KEYS]:
        raise UserError(f"link {unknown[0]}: {EXPECTED}")
    places = _places(value, given.get("places"))
    named = given.get("pairs") or {}
    if not isinstance(named, dict):
        raise UserError(f"link {value}: {EXPECTED}")
    usual = {True: plain_link(given.get("within", "none")),
             False: plain_link(given.get("between", "none"))}  # fmt: skip
    links = {pair: usual[pair[0] == pair[1]] for pair in _pairs(places)}
    said: set[tuple[int, int]] = set()
    for name, text in named.items():
        pair = _pair(value, str(name), places)
        if pair in said:
            raise UserError(f"link {value}: pair {name} stands here twice")
        said.add(pair)
        links[pair] = plain_link(text)
    # Where all pairs are alike it is a plain link, however it was written: one and the same run.
    if len(set(links.values())) == 1:
        return next(iter(links.values()))
    return Network(places, tuple(sorted(links.items(), key=lambda item: item[0])))


def _places(value: Any, given: Any) -> tuple[int, ...]:
    text = "+".join(map(str, given)) if isinstance(given, list | tuple) else str(given)
    if not PLACES.match(text):
        raise UserError(f"link {value}: {EXPECTED}")
    places = tuple(int(nodes) for nodes in text.split("+"))
    if min(places) < 1 or sum(places) < 2 or len(places) > len(LETTERS):
        raise UserError(
            f"link {value}: a network has 1 to {len(LETTERS)} places of at least one node each, "
            "and two nodes or more"
        )
    return places


def _pairs(places: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Of places whose nodes really have a link: a node alone has none within its place."""
    for one, nodes in enumerate(places):
        for other in range(one, len(places)):
            if one != other or nodes > 1:
                yield one, other


def _pair(value: Any, name: str, places: tuple[int, ...]) -> tuple[int, int]:
    match = PAIR.match(name.strip().lower())
    pair = sorted(LETTERS.index(letter) for letter in match.groups()) if match else []
    if not pair or (pair[0], pair[1]) not in set(_pairs(places)):
        known = ", ".join(f"{LETTERS[one]}-{LETTERS[other]}" for one, other in _pairs(places))
        raise UserError(f"link {value}: no pair of places {name}: there are {known}")
    return pair[0], pair[1]


def _most_frequent(links: list[Link]) -> Link:
    """The first of them, if several are."""
    return max(links, key=links.count) if links else Link()
