"""DiLoCo: the changes of all replicas since the last exchange are averaged, and an outer optimizer
with Nesterov momentum makes a step with the mean.

--fragments: the weights are exchanged in parts, one after the other, evenly over sync_every
updates. --overlap T: an exchange begins after an update and takes effect T updates later; what a
replica has learned in between is kept. After the last update, the weights of all fragments that the
schedule does not exchange there are averaged: an outer step would be momentum without work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from harness.train.strategy.local_sgd import PendingMean, ReplicaExchange


@dataclass
class FragmentInFlight:
    fragment: int
    update: int  # after which the change was sent
    sent_weights: torch.Tensor  # this replica's weights then
    change: PendingMean


class Diloco(ReplicaExchange):
    """Outer steps on the averaged changes."""

    def attach(self, model: nn.Module, optimizer: Any) -> None:
        settings = self.context.settings
        self.fragments, self.overlap = int(settings.fragments or 1), int(settings.overlap or 0)
        super().attach(model, optimizer)
        self.in_flight: list[FragmentInFlight] = []
        # The anchor is the outer optimizer's weights: they share memory.
        self.outer = [nn.Parameter(self.anchor[f]) for f in self.weights.fragments]
        momentum = float(settings.outer_momentum or 0)
        self.outer_optimizer = torch.optim.SGD(
            self.outer, lr=float(settings.outer_lr or 0), momentum=momentum, nesterov=momentum > 0
        )
        self.observed |= {"fragments": self.fragments, "overlap": self.overlap}

    def _exchange(self, last: bool) -> None:
        while self.in_flight and (last or self.in_flight[0].update + self.overlap <= self.update):
            self._outer_step(self.in_flight.pop(0))
        due = self._due_fragment()
        if due is not None:
            at_once = last or not self.overlap
            sent = self._send_change(due, wait=at_once)
            if at_once:
                self._outer_step(sent)
            else:
                self.in_flight.append(sent)
        if last:
            for number in range(self.fragments):
                if number != due:
                    self._average_weights(number)

    def _due_fragment(self) -> int | None:
        """The number of the fragment that is exchanged after this update."""
        turn, rest = divmod(self.apart_updates, self.every // self.fragments)
        return None if rest else (turn - 1) % self.fragments

    def _send_change(self, number: int, wait: bool) -> FragmentInFlight:
        fragment = self.weights.fragments[number]
        own = self.weights.row(fragment)
        change = self._begin_mean(self.anchor[fragment] - own, number, wait)
        return FragmentInFlight(number, self.update, own, change)

    def _outer_step(self, sent: FragmentInFlight) -> None:
        """Make an outer step with the mean change, and continue training from its result."""
        fragment, outer = self.weights.fragments[sent.fragment], self.outer[sent.fragment]
        outer.grad = self._finish_mean(sent.change)
        self.outer_optimizer.step()
        outer.grad = None
        new = outer.detach()
        if sent.update < self.update:
            # The updates since then are not part of the change that was sent: they are added once.
            new = self.weights.row(fragment) + (new - sent.sent_weights)
        self.weights.put(new, fragment)

    def _kept_bytes(self) -> int:
        momentum = int(self.anchor.nbytes) if self.context.settings.outer_momentum else 0
        step = self.every // self.fragments
        in_flight = -(-self.overlap // step) or 1
        largest = 4 * max(self._row_sizes())
        rows = 2 * in_flight * largest
        apart_bytes = int(self.anchor.nbytes) + momentum + rows
        # While replicas train together: the anchor, and the row of all gradients.
        in_sync_bytes = 2 * int(self.anchor.nbytes) if self.first else 0
        return max(apart_bytes, in_sync_bytes) + self._owed_bytes()

    def _own_state(self) -> dict[str, Any]:
        pending = []
        for sent in self.in_flight:
            sent.change.wait()
            rows = {"sent": sent.sent_weights.cpu(), "mean": sent.change.row.cpu()}
            pending.append({"piece": sent.fragment, "update": sent.update, **rows})
        outer = self.outer_optimizer.state_dict()
        return {**super()._own_state(), "outer": outer, "pending": pending}

    def _restore(self, saved: dict[str, Any]) -> None:
        super()._restore(saved)
        self.outer_optimizer.load_state_dict(saved["outer"])
        device = self.anchor.device
        self.in_flight = [
            FragmentInFlight(
                row["piece"], row["update"], row["sent"].to(device),
                PendingMean(row["mean"].to(device)),
            )
            for row in saved["pending"]
        ]  # fmt: skip
