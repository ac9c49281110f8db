"""Which rules of exchanging keep the quality of DDP: all replicas of a run in one process.

    python -m benchmarks.sync_rules --out FILE --seeds 2,4,11 vit --tiny --epochs 8
    python -m benchmarks.sync_rules --out FILE --rules ddp,h10 bert --model FOLDER
    python -m benchmarks.sync_rules --out FILE --table

After the script stand its flags. Replicas have what those of real runs have: weights, the samples
of each update, AdamW, a rate that falls to zero, clipping. Nothing is sent: this tells what a rule
costs in quality and how often it exchanges, and nothing about time. FILE gets a line of JSON for
each run; what it has is not computed again.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks.prepared import load
from benchmarks.results import markdown, parser_of
from harness.core.command_line import parse
from harness.core.settings import Settings, UserError
from harness.read import statistics
from harness.train.data import models
from harness.train.data.samples import Data, EpochOrder
from harness.train.strategy.muon import inner_matrices

EVAL_BATCH = 120
# Settings that say what is trained on what; all others are those of the rules.
OF_A_RULE = {
    "model", "from_scratch", "dropout", "max_length", "image_size", "dataset", "train_size",
    "test_size", "data_seed", "per_gpu_batch", "epochs", "lr", "seed", "text_column",
    "label_column", "image_column", "dataset_config", "test_split", "validation_split",
}  # fmt: skip
HEADINGS = ("rule", "exchanges", "accuracy", "of DDP", "accuracy, points to DDP (95 %)",
            "loss, to DDP (95 %)", "seeds")  # fmt: skip
CLIPPED = 1.0


@dataclass(frozen=True)
class Rule:
    says: str
    every: int | None = None  # updates between exchanges; None: gradients at each, as ddp
    together: float = 0  # share of the updates made together before
    growth: float | None = None  # QSR: the period is at least (growth x first rate / rate) squared
    outer: tuple[float, float] | None = (1.0, 0.5)  # learning rate and momentum; None: averaging
    moments: bool = False  # average AdamW's moments, too, at each exchange
    muon: float | None = None  # Muon for inner matrices, at this multiple of the learning rate


RULES = {
    "ddp": Rule("DDP"),
    "avg10": Rule("local SGD every 10", 10, outer=None),
    "avg20": Rule("local SGD every 20", 20, outer=None),
    "h10": Rule("DiLoCo every 10", 10),
    "h10-first": Rule("DiLoCo every 10 after an eighth together", 10, together=1 / 8),
    "h10-quarter": Rule("DiLoCo every 10 after a quarter together", 10, together=1 / 4),
    "h10-moments": Rule("DiLoCo every 10, moments averaged", 10, moments=True),
    "h50": Rule("DiLoCo every 50", 50),
    "h50-first": Rule("DiLoCo every 50 after an eighth together", 50, together=1 / 8),
    "h50-moments": Rule("DiLoCo every 50, moments averaged", 50, moments=True),
    "qsr": Rule("QSR: averaging every 3 and more, by the rate", 3, growth=1.8, outer=None),
    "qsr-outer": Rule("the same periods with DiLoCo's outer step", 3, growth=1.8),
    "qsr-rare": Rule("QSR: averaging every 6 and more, by the rate", 6, growth=2.5, outer=None),
    "ddp-muon": Rule("DDP, Muon inside", muon=1.0),
    "avg10-muon": Rule("local SGD every 10, Muon inside", 10, outer=None, muon=1.0),
    "h10-muon": Rule("DiLoCo every 10, Muon inside", 10, muon=1.0),
    "h50-muon": Rule("DiLoCo every 50, Muon inside", 50, muon=1.0),
}


class Replica:
    """One replica: a model with its optimizers."""

    def __init__(self, model: nn.Module, lr: float, muon: float | None) -> None:
        self.model, self.rates = model, [lr]
        self.parameters = list(model.parameters())
        inner = inner_matrices(model) if muon else []
        others = [p for p in self.parameters if not any(p is one for one in inner)]
        self.optimizers: list[Any] = [torch.optim.AdamW(others, lr, weight_decay=0.0)]
        if muon:
            self.rates.append(lr * muon)
            self.optimizers.append(torch.optim.Muon(
                inner, lr * muon, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
            ))  # fmt: skip

    def update(self, batch: dict[str, Any], left: float) -> None:
        """Make one update; `left` is the share of the learning rate that is used."""
        self.model.train()
        self.model(**batch).loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, CLIPPED)
        for optimizer, rate in zip(self.optimizers, self.rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * left
            optimizer.step()
            optimizer.zero_grad()

    @property
    def weights(self) -> torch.Tensor:
        return parameters_to_vector(self.parameters).detach()

    def put(self, weights: torch.Tensor) -> None:
        with torch.no_grad():
            vector_to_parameters(weights.clone(), self.parameters)  # parameters become views of it

    def twin(self) -> Replica:
        """A copy of the replica, with the same weights and moments."""
        return copy.deepcopy(self)


class Outer:
    """The anchor, the weights that all replicas share, and how exchanges change it."""

    def __init__(self, rule: Rule, weights: torch.Tensor) -> None:
        self.rule, self.anchor = rule, nn.Parameter(weights.clone())
        rate, momentum = rule.outer or (1.0, 0.0)
        self.optimizer = torch.optim.SGD(
            [self.anchor], lr=rate, momentum=momentum, nesterov=momentum > 0
        )
        self.exchanges = 0

    def exchange(self, replicas: list[Replica], plain: bool) -> None:
        """plain: average the weights, as after the last update, where momentum has no effect."""
        mean = torch.stack([replica.weights for replica in replicas]).mean(0)
        if plain or self.rule.outer is None:
            self.anchor.data.copy_(mean)
        else:
            self.anchor.grad = self.anchor.data - mean
            self.optimizer.step()
        for replica in replicas:
            replica.put(self.anchor.data)
        if self.rule.moments:
            average_moments([replica.optimizers[0] for replica in replicas])
        self.exchanges += 1


def average_moments(optimizers: list[Any]) -> None:
    of_all = [list(optimizer.state.values()) for optimizer in optimizers]
    for states in zip(*of_all, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            mean = torch.stack([state[name] for state in states]).mean(0)
            for state in states:
                state[name].copy_(mean)


def train(
    rule: Rule, data: Data, model: nn.Module, settings: Settings, nodes: int
) -> tuple[nn.Module, int, int]:
    """Train; return the final model, the number of updates and the number of exchanges."""
    batches = list(parts(data, settings, nodes))
    updates, lr = len(batches), float(settings.lr or 0)
    first = updates if rule.every is None else int(rule.together * updates)
    replica = Replica(model, lr, rule.muon)
    for number, numbers in enumerate(batches[:first]):
        replica.update(ready(data, [n for part in numbers for n in part]), 1 - number / updates)
    if rule.every is None:
        return model, updates, updates
    outer = Outer(rule, replica.weights)
    replicas = [replica, *(replica.twin() for _ in range(nodes - 1))]
    due = first + period(rule, first, updates)
    for number, numbers in enumerate(batches[first:], first):
        for own, part in zip(replicas, numbers, strict=True):
            own.update(ready(data, part), 1 - number / updates)
        made = number + 1
        if made in (due, updates):
            outer.exchange(replicas, plain=made != due)
            due = made + period(rule, made, updates) if made < updates else 0
    return model, updates, first + outer.exchanges


def period(rule: Rule, made: int, updates: int) -> int:
    """Updates until the next exchange, once `made` updates are done."""
    assert rule.every is not None
    if rule.growth is None:
        return rule.every
    left = 1 - made / updates
    return max(rule.every, int((rule.growth / left) ** 2))


def parts(data: Data, settings: Settings, nodes: int) -> Iterator[list[list[int]]]:
    """For each update, the sample numbers of each node."""
    train: Any = data.train
    order, batch = EpochOrder(len(train), settings.seed), int(settings.per_gpu_batch or 0)
    for epoch in range(int(settings.epochs or 0)):
        order.set_epoch(epoch)
        numbers = list(order)
        for start in range(0, len(numbers), nodes * batch):
            of_update = numbers[start : start + nodes * batch]
            yield [of_update[n : n + batch] for n in range(0, len(of_update), batch)]


def ready(data: Data, numbers: Iterable[int]) -> dict[str, Any]:
    inputs = data.to_device(dict(data.collate(list(numbers))))
    return {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}


@torch.no_grad()
def quality(model: nn.Module, data: Data) -> dict[str, float]:
    """Accuracy and loss on the whole test set."""
    model.eval()
    test: Any = data.test
    numbers = [test[n] for n in range(len(test))]
    right, loss = 0, 0.0
    for start in range(0, len(numbers), EVAL_BATCH):
        inputs = ready(data, numbers[start : start + EVAL_BATCH])
        output = model(**inputs)
        right += int((output.logits.argmax(-1) == inputs["labels"]).sum())
        loss += float(output.loss) * len(inputs["labels"])
    return {"accuracy": right / len(numbers), "loss": loss / len(numbers)}


def run(name: str, script: str, flags: list[str], seed: int, nodes: int) -> dict[str, Any]:
    settings = parse(script, [*flags, "--seed", str(seed)])
    plain = parse(script, ["--tiny"] if settings.tiny else [])
    ours = {name for name, value in vars(settings).items() if value != getattr(plain, name)}
    if without := sorted({*ours - OF_A_RULE - {"trainer"}, *dict(settings.trainer)}):
        raise UserError(f"--{without[0]} has no effect here: {', '.join(sorted(OF_A_RULE))} have")
    data = load(settings, nodes)
    torch.manual_seed(seed)
    model = models.build(settings, data.labels)
    model, updates, exchanges = train(RULES[name], data, model, settings, nodes)
    facts = {"rule": name, "nodes": nodes, "command": [script, *flags], "seed": seed}
    return {**facts, "updates": updates, "exchanges": exchanges, **quality(model, data)}


def table(rows: list[dict[str, Any]]) -> str:
    """A table of the rules, each compared with DDP on the same seeds."""
    cells = []
    for name, rule in RULES.items():
        own, ddp = (of_seeds(rows, each, "accuracy") for each in (name, "ddp"))
        if not own:
            continue
        exchanges = next(row["exchanges"] for row in rows if row["rule"] == name)
        accuracy = statistics.spread(list(own.values())).mean
        if name == "ddp":
            beside = ("", "", "")
        else:
            losses = (of_seeds(rows, each, "loss") for each in (name, "ddp"))
            same = statistics.spread([value for seed, value in ddp.items() if seed in own]).mean
            beside = (
                "" if same is None else f"{same:.4f}",
                in_words(statistics.difference(own, ddp).scaled(100), "+.2f"),
                in_words(statistics.difference(*losses), "+.3f"),
            )
        cells.append((rule.says, str(exchanges), f"{accuracy:.4f}", *beside, str(len(own))))
    return markdown("lrrrrrr", HEADINGS, cells)


def in_words(found: statistics.Estimate, form: str) -> str:
    if found.value is None:
        return ""
    known = found.low is not None and found.high is not None
    return f"{found.value:{form}}" + (
        f" ({found.low:{form}} to {found.high:{form}})" if known else ""
    )


def of_seeds(rows: list[dict[str, Any]], name: str, measure: str) -> statistics.Repeats:
    return {row["seed"]: row[measure] for row in rows if row["rule"] == name}


def main(argv: list[str]) -> int:
    parser = parser_of("sync_rules", __doc__, out=False)
    parser.add_argument("--out", type=Path, required=True, help="file of results, a line each")
    parser.add_argument("--rules", default=",".join(RULES), help=f"of {', '.join(RULES)} (all)")
    parser.add_argument("--seeds", default="2,4,42", help="with commas (2,4,42)")
    parser.add_argument("--nodes", type=int, default=4, help="replicas (4)")
    parser.add_argument("--table", action="store_true", help="of the results in the file")
    parser.add_argument("script", nargs="?", choices=("bert", "vit"))
    options, flags = parser.parse_known_args(argv)
    names, seeds = options.rules.split(","), options.seeds.split(",")
    if unknown := [name for name in names if name not in RULES]:
        parser.error(f"--rules {unknown[0]}: expected some of {', '.join(RULES)}")
    if wrong := [seed for seed in seeds if not seed.isdecimal()]:
        parser.error(f"--seeds {wrong[0]}: expected whole numbers with commas")
    if options.table:
        print("\n".join(tables(read(options.out))))
        return 0
    if not options.script:
        parser.error("bert or vit is missing, with its flags")
    try:
        run_all(options, flags, names, [int(seed) for seed in seeds])
    except UserError as error:
        parser.error(str(error))
    return 0


def run_all(
    options: argparse.Namespace, flags: list[str], names: list[str], seeds: list[int]
) -> None:
    """Run the rules and seeds that are not in the file yet."""
    command = [options.script, *flags]
    of_this = [
        row for row in read(options.out)
        if (row["command"], row["nodes"]) == (command, options.nodes)
    ]  # fmt: skip
    done = {(row["rule"], row["seed"]) for row in of_this}
    for seed, name in ((seed, name) for seed in seeds for name in names):
        if (name, seed) not in done:
            row = run(name, options.script, flags, seed, options.nodes)
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)


def tables(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A table for each command and number of replicas."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        kind = f"{row['nodes']} replicas of {' '.join(row['command'])}"
        kinds.setdefault(kind, []).append(row)
    for kind, of_kind in kinds.items():
        yield f"{kind}:\n\n{table(of_kind)}\n"


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
