"""A TCP connection over a link with loss and jitter, packet by packet, as Linux sends.

A lost packet is known to be lost once three later ones have arrived, or one of them and a quarter
of a round trip has passed (RACK). If nothing follows it, the sender waits: for a probe after two
round trips if several packets are not acknowledged, else for the retransmission timeout.
Packets are lost independently, also acknowledgements. Jitter is uniform and keeps the order; the
packets that a link is handed at a time, as emulated links are, are late together.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from harness.core.collectives import TCP_SEGMENT, TCP_SHARE, Wire
from harness.core.links import packets_at_once

RENO, CUBIC, BBR = "reno", "cubic", "bbr"
OPEN = 2048  # packets of a window that nothing limits: 3 MB, as Linux allows
DUPLICATES = 3  # later packets that tell of a loss at once
RACK_ROUND_TRIPS = 1.25  # since a packet was sent, before a single later one tells of its loss
LEAST_TIMEOUT_S, MOST_TIMEOUT_S = 0.2, 120.0  # of Linux; the least beside a round trip
QUEUE_ROUND_TRIPS, LEAST_QUEUE_S = 2, 0.1  # how long packets wait for a link with a rate, at most
RENO_LEFT = 0.5  # share of the window after a loss
CUBIC_LEFT, CUBIC_C = 0.7, 0.4  # RFC 9438
BBR_GAIN, BBR_LEAST = 2, 4  # window in packets that the link holds, and in packets


class Window:
    """The congestion window in packets. BBR's does not depend on losses."""

    def __init__(self, control: str, most: float, usual: float) -> None:
        self.control, self.most = control, most
        self.size = min(most, usual)
        self.threshold = self.largest = self.size  # largest: of CUBIC, before the last loss
        self.since_s = 0.0  # the time of the last loss

    def grow(self, acknowledged: int, now_s: float, round_trip_s: float) -> None:
        if self.control == BBR:
            return
        if self.is_opening:
            self.size += acknowledged
        elif self.control == RENO:
            self.size += acknowledged / self.size
        else:
            self.size = max(self.size, self._cubic(acknowledged, now_s, round_trip_s))
        self.size = min(self.size, self.most)

    @property
    def is_opening(self) -> bool:
        """Whether a timeout has closed the window, which then opens also with little to send."""
        return self.size < self.threshold

    def _cubic(self, acknowledged: int, now_s: float, round_trip_s: float) -> float:
        after_s = now_s - self.since_s
        turn_s = math.cbrt(self.largest * (1 - CUBIC_LEFT) / CUBIC_C)
        target = CUBIC_C * (after_s + round_trip_s - turn_s) ** 3 + self.largest
        growing = self.size + acknowledged * max(0.0, target - self.size) / self.size
        as_reno = 3 * (1 - CUBIC_LEFT) / (1 + CUBIC_LEFT) * after_s / max(round_trip_s, 1e-6)
        return max(min(growing, 1.5 * self.size), CUBIC_LEFT * self.largest + as_reno)

    def shrink(self, now_s: float, timed_out: bool = False) -> None:
        if self.control == BBR:
            return
        left = RENO_LEFT if self.control == RENO else CUBIC_LEFT
        again = self.size < self.largest and self.control == CUBIC  # it makes room for others
        self.largest = self.size * (1 + CUBIC_LEFT) / 2 if again else self.size
        self.threshold = max(2.0, left * self.size)
        self.size, self.since_s = 1.0 if timed_out else self.threshold, now_s


class Connection:
    """One direction of a TCP connection that has sent before; send() gives the time of arrival."""

    def __init__(self, wire: Wire, control: str, draw: random.Random) -> None:
        self.wire, self.draw = wire, draw
        self.packet_s = packet_s(wire)
        queue_s = max(LEAST_QUEUE_S, QUEUE_ROUND_TRIPS * wire.round_trip_s)
        self.at_once = 1 if wire.loss else packets_at_once(wire.bytes_per_s / TCP_SHARE)
        self.late_s, self.late_packets = 0.0, 0  # the jitter of a handover, and how many are left
        held = (wire.round_trip_s + queue_s) / self.packet_s if self.packet_s else OPEN
        if control == BBR and self.packet_s:
            held = BBR_GAIN * wire.round_trip_s / self.packet_s + BBR_LEAST
        self.window = Window(control, max(held, BBR_LEAST), usual_window(wire, control))
        self.now_s = self.free_s = self.arrived_s = self.answered_s = self.last_s = 0.0
        self.round_trip_s = wire.round_trip_s  # smoothed, as TCP measures it
        self.order = self.acknowledged = self.repaired_to = 0
        self.flying: deque[tuple[int, float, bool]] = deque()  # order, time, whether lost
        self.answers: deque[tuple[float, int]] = deque()  # when order is acknowledged
        # Order, packets acknowledged before, and when it counts as lost after a single one.
        self.holes: deque[tuple[int, int, float]] = deque()
        self.known_lost = self.timeouts = 0
        self.is_probed = self.is_full = False

    def send(self, begins_s: float, count: int) -> tuple[float, float]:
        """(when the first half, when all packets have arrived) of a message."""
        while self.answers and self.answers[0][0] <= begins_s:
            self._acknowledge()
        self.acknowledged += len(self.flying)  # all has arrived, as the next message shows
        self.flying.clear()
        self.now_s = max(self.now_s, begins_s)
        self.timeouts = self.late_packets = 0
        self.is_full = self.is_probed = False
        fresh = missing = count
        half_s, half = 0.0, count // 2
        while missing:
            while (fresh or self.known_lost) and self._in_flight < max(1, int(self.window.size)):
                again = self.known_lost > 0
                self.known_lost -= again
                fresh -= not again
                missing -= self._transmit()
                half_s = half_s if half_s or missing > half else self.arrived_s
            if missing:
                self.is_full = bool(fresh or self.known_lost)
                missing -= self._wait()
        return half_s or self.arrived_s, self.arrived_s

    @property
    def _in_flight(self) -> int:
        return len(self.flying) + len(self.holes)

    def _transmit(self) -> bool:
        """Send a packet; whether it arrives."""
        self.order += 1
        self.last_s = self.now_s
        lost = self.draw.random() < self.wire.loss
        self.flying.append((self.order, self.now_s, lost))
        if lost:
            return False
        self.free_s = max(self.free_s, self.now_s) + self.packet_s
        if not self.late_packets:
            self.late_s, self.late_packets = self._jitter_s(), self.at_once
        self.late_packets -= 1
        arrives_s = self.free_s + self.wire.delay_s + self.late_s
        self.arrived_s = max(self.arrived_s, arrives_s)
        if self.draw.random() >= self.wire.loss:
            answered_s = self.arrived_s + self.wire.delay_s + self._jitter_s()
            self.answered_s = max(self.answered_s, answered_s)
            self.answers.append((self.answered_s, self.order))
        return True

    def _jitter_s(self) -> float:
        jitter_s = self.wire.jitter_s
        return self.draw.uniform(-jitter_s, jitter_s) if jitter_s else 0.0

    def _wait(self) -> int:
        """Pass to the next event; how many missing packets arrive by a probe (0 or 1)."""
        answer_s = self.answers[0][0] if self.answers else math.inf
        declared_s = self.holes[0][2] if self.holes else math.inf
        if answer_s <= declared_s and self.answers:
            self._acknowledge()
        elif self.holes:
            self.now_s = max(self.now_s, declared_s)
            self._declare(1)
        elif len(self.flying) > 1 and not self.is_probed:
            self.now_s, self.is_probed = self.last_s + 2 * self.round_trip_s, True
            _, _, lost = self.flying.pop()
            arrives = self._transmit()
            if not (arrives or lost):
                self.flying.pop()  # a copy that nobody misses
            return int(arrives and lost)
        else:
            self._time_out()
        return 0

    def _acknowledge(self) -> None:
        at_s, order = self.answers.popleft()
        self.now_s = self.last_s = max(self.now_s, at_s)  # the timeout begins again
        before = self.acknowledged
        while self.flying and self.flying[0][0] <= order:
            number, sent_s, lost = self.flying.popleft()
            if lost:
                declared_s = max(self.now_s, sent_s + RACK_ROUND_TRIPS * self.round_trip_s)
                self.holes.append((number, self.acknowledged, declared_s))
            else:
                self.acknowledged += 1
                self.round_trip_s += (at_s - sent_s - self.round_trip_s) / 8
        late = (self.acknowledged - held >= DUPLICATES for _, held, _ in self.holes)
        self._declare(sum(late))
        self.timeouts, self.is_probed = 0, False
        is_used = self.is_full or self.window.is_opening
        if is_used and order > self.repaired_to:
            self.window.grow(self.acknowledged - before, self.now_s, self.round_trip_s)

    def _declare(self, count: int) -> None:
        """Take the first holes as lost; the window shrinks once a round trip."""
        for _ in range(count):
            number, _, _ = self.holes.popleft()
            self.known_lost += 1
            if number > self.repaired_to:
                self.repaired_to = self.order
                self.window.shrink(self.now_s)

    def _time_out(self) -> None:
        least_s = max(LEAST_TIMEOUT_S, 4 * self.wire.jitter_s * 2 / 3)  # mean deviation of two ways
        timeout_s = min(MOST_TIMEOUT_S, (self.round_trip_s + least_s) * 2 ** min(self.timeouts, 10))
        self.now_s = max(self.now_s, self.last_s + timeout_s)
        self.timeouts += 1
        self.known_lost += sum(lost for _, _, lost in self.flying)
        self.acknowledged += sum(not lost for _, _, lost in self.flying)
        self.flying.clear()
        self.repaired_to, self.is_probed = self.order, False
        self.window.shrink(self.now_s, timed_out=True)


def usual_window(wire: Wire, control: str) -> float:
    """The window in packets that losses leave on average, by the laws of Reno and CUBIC."""
    if not wire.loss or control == BBR:
        return math.inf
    as_reno = 1.22 / math.sqrt(wire.loss)
    as_cubic = 1.054 * (wire.round_trip_s / wire.loss) ** 0.75  # RFC 9438
    return as_reno if control == RENO else max(as_reno, float(as_cubic))


def packet_s(wire: Wire) -> float:
    return TCP_SEGMENT / wire.bytes_per_s


def control_of(recorded: Sequence[Mapping[str, Any]]) -> str:
    """The congestion control of records; CUBIC, the default of Linux, where they do not say."""
    names = [str(tcp["congestion_control"]) for tcp in recorded]
    name = max(names, key=names.count, default=CUBIC)
    return next((known for known in (RENO, BBR) if name.startswith(known)), CUBIC)
