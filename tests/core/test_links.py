"""Links and networks: every way to write them, one way to name them, and every mistake."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from harness.core.links import (
    LONGEST_TAG,
    PRESETS,
    Link,
    Network,
    least_rate_of,
    link_of,
    slowest_rate,
    tells_rate,
)
from harness.core.settings import UserError, parse_setup
from harness.launch.plan import plan
from harness.launch.sweepfile import load
from tests.support.sweeps import sweep_file

RACK, FAR = PRESETS["rack"], PRESETS["continent"]

LINKS = [
    ("20ms/200mbit/jitter2ms/loss1%", Link(20, 200, 2, 0.01), "20ms/200mbit/jitter2ms/loss0.01"),
    ("200mbit, 20ms", Link(20, 200), "20ms/200mbit"),
    ("loss0.7% / 1 gbit", Link(0, 1000, 0, 0.007), "1000mbit/loss0.007"),
    ("5ms/loss1e-05", Link(5, None, 0, 1e-5), "5ms/loss1e-05"),
    ({"delay_ms": "20", "jitter_ms": 2, "loss": "0.01"}, Link(20, None, 2, 0.01),
     "20ms/jitter2ms/loss0.01"),
    ("Continent", Link(20, 1000), "20ms/1000mbit"),
    ("2000gbit", Link(0, 2e6), "2000000mbit"),
    ("0ms", Link(), "none"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "link", "text"), LINKS)
def test_a_link_has_one_text(value: Any, link: Link, text: str) -> None:
    assert link_of(value) == link == link_of(text)
    assert str(link) == text


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_numbers(name: str) -> None:
    link = link_of(name)
    assert link == PRESETS[name] == link_of(str(link))
    assert parse_setup(f"2_1_{link.tag}") == (2, 1, link.tag)


def test_presets_differ() -> None:
    assert len(set(PRESETS.values())) == len(PRESETS)


WRONG = {
    "jitter5ms": "a jitter is 0 or more and not above the delay",
    "1ms/jitter2ms": "a jitter is 0 or more and not above the delay",
    "loss1": "a loss is a share, at least 0 and below 1",
    "loss100%": "a loss is a share, at least 0 and below 1",
    "0mbit": "a delay is 0 or more, a rate above 0",
    "1ms/2ms": "delay_ms is given twice",
    "1mbit/1gbit": "rate_mbit is given twice",
    "contnent": "did you mean continent?",
    "fast": "expected none, 20ms",
    "20ms/200mbt": "200mbt is no part of one; expected none",
    "20ms/": "nothing is no part of one; expected none",
    "1e999ms": "expected none, 20ms",
    "20": "expected none, 20ms",
}


@pytest.mark.parametrize(("text", "message"), WRONG.items())
def test_a_wrong_link_is_one_line(text: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"^link {re.escape(text)}: .*{re.escape(message)}") as got:
        link_of(text)
    assert "\n" not in str(got.value)


@pytest.mark.parametrize("value", [{}, {"rate_mbit": []}, {"loss": None}, {"delay_ms": "nan"}])
def test_a_wrong_mapping_is_one_line(value: Any) -> None:
    with pytest.raises(UserError, match="expected none, 20ms"):
        link_of(value)


NEAR_AND_FAR = {"places": ["2", "1"], "within": "rack", "between": "continent"}
NETWORKS = [
    (NEAR_AND_FAR, "2+1:within=0.05ms/10000mbit:between=20ms/1000mbit"),
    ("2+1 : within=rack : between=continent", "2+1:within=0.05ms/10000mbit:between=20ms/1000mbit"),
    ("2+1:between=1ms", "2+1:within=none:between=1ms"),
    ({"places": [1, 1, 1], "between": "5ms", "pairs": {"c-a": "80ms"}},
     "1+1+1:between=5ms:a-c=80ms"),
    ("2+2:a-a=1ms:b-b=2ms:a-b=3ms", "2+2:within=1ms:between=3ms:b-b=2ms"),
    # What most pairs have is what is usual, whatever was written.
    ("1+1+1:between=1ms:a-b=5ms:a-c=5ms", "1+1+1:between=5ms:b-c=1ms"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "text"), NETWORKS)
def test_a_network_has_one_text(value: Any, text: str) -> None:
    network = link_of(value)
    assert isinstance(network, Network) and str(network) == text
    assert link_of(text) == network != Link()
    assert parse_setup(f"2_1_{network.tag}") == (2, 1, network.tag)


def test_the_link_between_each_pair_of_nodes() -> None:
    network = link_of(NEAR_AND_FAR)
    links = [[network.between(i, j) for j in range(3)] for i in range(3)]
    assert links == [[Link(), RACK, FAR], [RACK, Link(), FAR], [FAR, FAR, Link()]]
    three = link_of("1+2+1:within=1ms:between=2ms:c-a=3ms")
    assert three.between(3, 0) == three.between(0, 3) == Link(3)
    assert three.between(1, 2) == Link(1) and three.between(2, 3) == Link(2)


def test_a_link_is_the_network_whose_pairs_are_all_alike() -> None:
    link = link_of("5ms")
    assert link.between(0, 7) == link and link.between(3, 3) == Link()
    assert link_of("1+1:between=5ms") == link_of("1+1:a-b=5ms:within=80ms") == link
    assert link_of({"places": [2, 2], "within": "5ms", "between": "5ms"}) == link
    assert link_of("{places: [2, 2], within: 5ms, between: 5ms}") == link
    link.check(2)
    link.check(64)


def test_a_network_is_for_so_many_nodes(tmp_path: Path) -> None:
    link_of(NEAR_AND_FAR).check(3)
    text = "script: vit\ngrid: {setup: [2_1], link: [{places: [2, 1], between: 20ms}]}"
    message = "link 2\\+1:within=none:between=20ms has 3 nodes in its places, and the set-up 2"
    with pytest.raises(UserError, match=message):
        plan(load(sweep_file(tmp_path, text)))


def test_a_sweep_takes_a_network(tmp_path: Path) -> None:
    text = (
        "script: vit\ngrid:\n  setup: [3_1]\n  link:\n    - none\n"
        "    - {places: [2, 1], within: rack, between: 80ms}\n"
    )
    plain, far = plan(load(sweep_file(tmp_path, text)))
    assert plain.settings.setup == "3_1"
    assert far.settings.setup == "3_1_2-1-within-0.05ms-10000mbit-between-80ms"
    assert far.link == link_of("2+1:within=rack:between=80ms")


def test_a_long_tag_is_cut_and_still_one_of_its_own() -> None:
    one = link_of("2+2+2:within=rack:between=continent:a-c=home_dsl")
    other = link_of("2+2+2:within=rack:between=continent:b-c=home_dsl")
    assert one.tag.startswith("2-2-2-") and len(one.tag) <= LONGEST_TAG
    assert one.tag != other.tag


WRONG_NETWORKS: list[tuple[Any, str]] = [
    ({"places": "x"}, "expected {places:"),
    ("{places: [2, 1]", "link {places: [2, 1]: expected {places:"),
    ("{2, 1", "expected {places:"),
    ({"within": "1ms"}, "expected {places:"),
    ({"places": [2, 1], "withn": "1ms"}, "link withn: expected {places:"),
    ({"places": [2, 1], "pairs": "a-b"}, "expected {places:"),
    ({"places": [2, 1], "between": "quick"}, "link quick: expected none"),
    ({"places": [1]}, "and two nodes or more"),
    ({"places": [2, 0]}, "at least one node each"),
    ("2+1:between=1ms:between=2ms", "between is given twice"),
    ("2+1:a-b=1ms:b-a=2ms", "pair b-a is given twice"),
    ("2+1:b-b=1ms", "no pair of places b-b: there are a-a, a-b"),
    ("2+1:a-d=1ms", "no pair of places a-d: there are a-a, a-b"),
    ("2+1:quick", "no pair of places quick"),
    (":within=1ms", "expected {places:"),
]


@pytest.mark.parametrize(("value", "message"), WRONG_NETWORKS)
def test_a_wrong_network_is_one_line(value: Any, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as got:
        link_of(value)
    assert "\n" not in str(got.value)


@pytest.mark.parametrize(("size", "round_trips", "tells"), [
    (2**16, 1.5, False), (2**16, 4.0, False), (2**18, 5.9, False), (2**16, 6.1, True),
    (2**20, 0.7, False), (2**20, 1.1, True), (2**26, 1.2, True),
])  # fmt: skip
def test_which_transfers_tell_a_rate(size: int, round_trips: float, tells: bool) -> None:
    for round_trip_s in (0.0001, 0.16):
        assert tells_rate(size, round_trips * round_trip_s, round_trip_s) == tells
    assert not tells_rate(size, 0.0, 0.0)


def test_the_rate_of_a_recorded_link() -> None:
    """Bytes, rate and round trip as records of links of 50 Mbit/s and 1 Gbit/s hold them."""

    def recorded(*pairs: tuple[int | None, float | None]) -> dict[str, Any]:
        names = ("transfer_bytes", "bandwidth_mbit", "rtt_min_ms")
        return {"pairs": [dict(zip(names, (*each, 160.4), strict=True)) for each in pairs]}

    whole, cut_off, short = (2**20, 48.3), (2**16, None), (2**20, None)
    assert slowest_rate(recorded(whole, (2**22, 47.9), cut_off, (None, None))["pairs"]) == 47.9
    assert slowest_rate(recorded(cut_off, short)["pairs"]) is None
    assert slowest_rate([]) is None
    # Of unlike links the slowest is not that of the near pairs whose transfers were long enough.
    near = {"transfer_bytes": 2**25, "bandwidth_mbit": 9400.0, "rtt_min_ms": 0.12}
    for far, told in ((whole, 48.3), (short, None)):
        mixed = recorded(far)
        mixed["pairs"].insert(0, near)
        assert slowest_rate(mixed["pairs"]) == told
    # On one machine round trips differ as much by chance.
    assert slowest_rate([near, {**near, "bandwidth_mbit": None, "rtt_min_ms": 0.4}]) == 9400
    untold = recorded((2**16, None), (2**20, None), (2**22, None), (None, None), whole)
    assert least_rate_of(untold) == pytest.approx(2**20 * 8e-6 / 0.1604)
    assert least_rate_of(recorded(whole)) is least_rate_of({}) is None
