"""DiLoCo: what each unit has changed since the last exchange is averaged, and an outer step with
Nesterov momentum is made with it.

--fragments: the weights are exchanged in parts, one after the other, evenly over sync_every
updates. --overlap T: an exchange begins after an update and takes effect T updates later; what a
unit has learned in the meantime is kept. An exchange of which the schedule knows nothing, at the
last update, averages the weights: an outer step there would be momentum without work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from harness.train.strategy.local_sgd import Apart, Sending


@dataclass
class Pending:
    """A piece on its way."""

    piece: int
    update: int  # after which it was sent
    sent: torch.Tensor  # this unit's weights then
    sending: Sending  # what they had changed


class Diloco(Apart):
    """Outer steps on the averaged changes."""

    def attach(self, model: nn.Module, optimizer: Any) -> None:
        settings = self.context.settings
        self.pieces, self.overlap = int(settings.fragments or 1), int(settings.overlap or 0)
        super().attach(model, optimizer)
        self.pending: list[Pending] = []
        # The weights of the last exchange are the outer parameters: they share memory.
        self.outer = [nn.Parameter(self.anchor[piece]) for piece in self.weights.pieces]
        momentum = float(settings.outer_momentum or 0)
        self.optimizer = torch.optim.SGD(
            self.outer, lr=float(settings.outer_lr or 0), momentum=momentum, nesterov=momentum > 0
        )
        self.observed |= {"fragments": self.pieces, "overlap": self.overlap}

    def _due(self) -> int | None:
        """The piece whose turn it is after this update."""
        turn, between = divmod(self.update, self.every // self.pieces)
        return None if between else (turn - 1) % self.pieces

    def _exchange(self, last: bool) -> None:
        while self.pending and (last or self.pending[0].update + self.overlap <= self.update):
            self._apply(self.pending.pop(0))
        due = self._due()
        if due is not None:
            sent = self._leave(due, wait=last or not self.overlap)
            if last or not self.overlap:
                self._apply(sent)
            else:
                self.pending.append(sent)
        if last:
            for number, piece in enumerate(self.weights.pieces):
                if number != due:
                    self._average(piece)

    def _leave(self, number: int, wait: bool) -> Pending:
        piece = self.weights.pieces[number]
        sent = self.weights.row(piece)
        return Pending(number, self.update, sent, self._send(self.anchor[piece] - sent, wait))

    def _apply(self, pending: Pending) -> None:
        """The outer step, and on with its result."""
        piece, outer = self.weights.pieces[pending.piece], self.outer[pending.piece]
        outer.grad = self._arrive(pending.sending)
        self.optimizer.step()
        outer.grad = None
        new = outer.detach()
        if pending.update < self.update:
            # Steps made since then count, once: they are not in what was sent.
            new = self.weights.row(piece) + (new - pending.sent)
        self.weights.put(new, piece)

    def _kept_bytes(self) -> int:
        momentum = self.anchor.nbytes if self.context.settings.outer_momentum else 0
        step = self.every // self.pieces
        on_their_way = -(-self.overlap // step) or 1
        a_piece = 4 * max(piece.stop - piece.start for piece in self.weights.pieces)
        return self.anchor.nbytes + momentum + 2 * on_their_way * a_piece

    def _own_state(self) -> dict[str, Any]:
        pending = []
        for each in self.pending:
            each.sending.arrived()
            rows = {"sent": each.sent.cpu(), "mean": each.sending.row.cpu()}
            pending.append({"piece": each.piece, "update": each.update, **rows})
        return {**super()._own_state(), "outer": self.optimizer.state_dict(), "pending": pending}

    def _restore(self, saved: dict[str, Any]) -> None:
        super()._restore(saved)
        self.optimizer.load_state_dict(saved["outer"])
        device = self.anchor.device
        self.pending = [
            Pending(
                each["piece"], each["update"], each["sent"].to(device),
                Sending(each["mean"].to(device)),
            )
            for each in saved["pending"]
        ]  # fmt: skip
