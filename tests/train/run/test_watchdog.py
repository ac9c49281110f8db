"""A run that stalls is found, named and ended."""

from __future__ import annotations

import ctypes
import inspect
import json
import multiprocessing
import os
import re
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from torch.distributed import HashStore
from torch.utils.data import get_worker_info
from transformers import TrainerCallback

from harness.core.settings import UserError
from harness.train.loop.trainer import ExactTrainer
from harness.train.run import lifecycle, watchdog
from harness.train.run.lifecycle import Lifecycle
from harness.train.run.warm import free_port
from harness.train.run.watchdog import Hung, Watchdog, takes_long
from harness.train.session import Session
from harness.train.strategy.hivemind.session import Peers
from tests.support.broken_runs import only_run
from tests.support.ranks import ran
from tests.support.stalled import reason_of
from tests.support.sweeps import wait_for
from tests.support.toys import CPU, Net, Points, ours

WORLD = SimpleNamespace(rank=0, size=1, per_node=1, nodes=1)


class Clock:
    """The watchdog of a process without others, judging by a clock of the test's."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, hang_after_s: float = 4.0, world: Any = WORLD
    ) -> None:
        self.ended: list[Hung] = []
        context: Any = SimpleNamespace(world=world)
        self.dog = Watchdog(context, hang_after_s, self.ended.append)
        self.long = False  # whether the main thread does what takes as long as it takes
        monkeypatch.setattr(watchdog, "takes_long", lambda frame: self.long)

    def resumes(self, seconds: float, long: bool = False) -> bool:
        """Whether nothing was ended within these seconds."""
        self.long = long
        for _ in range(round(seconds / 0.25)):
            if self.dog._look(0.25):
                return False
        self.long = False
        return True

    def step(self) -> None:
        self.dog.on_step_end(None, None, None)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_process_that_stalls_is_found(
    clock: Clock, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert clock.resumes(10)  # nothing was trained yet
    clock = Clock(monkeypatch)
    clock.step()
    assert clock.resumes(4) and not clock.resumes(1)
    (error,) = clock.ended
    assert "no update for 4 s: rank 0 (node 0) in main_frame (watchdog.py:" in str(error)
    assert error.records and error.settle_s == 0
    stacks = capfd.readouterr().err
    assert "stacks of rank 0 (node 0):" in stacks and "in resumes" in stacks


def test_the_watchdog_thread_detects_a_hang() -> None:
    ended: list[Hung] = []
    context: Any = SimpleNamespace(world=WORLD)
    dog = Watchdog(context, 0.2, ended.append)
    dog.start()
    dog.on_step_end(None, None, None)
    assert wait_for(lambda: ended, 20)
    dog.close()
    for thread in dog.threads:
        thread.join()


def test_what_takes_long_is_no_hang(clock: Clock) -> None:
    clock.step()
    assert clock.resumes(12, long=True)
    for _ in range(12):
        clock.dog.on_substep_end(None, None, None)
        assert clock.resumes(1)
    clock.dog.on_train_end(None, None, None)
    assert clock.resumes(20)
    assert clock.dog.slowest_s == 1  # without what took long


def test_a_step_may_take_three_times_the_longest_and_the_first_counts(clock: Clock) -> None:
    assert clock.resumes(30)  # models are loaded and wrapped
    clock.dog.on_epoch_begin(None, None, None)
    for _ in range(3):
        assert clock.resumes(6)
        clock.step()
    assert clock.resumes(18) and not clock.resumes(1)
    assert "no update for 18 s" in str(clock.ended[0])


def test_an_exchange_over_a_slow_link_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as its bytes move, nobody is given up; signs of life alone are no exchange."""
    sent = [0]
    monkeypatch.setattr(watchdog, "traffic", lambda: sent[0])
    two = SimpleNamespace(rank=0, size=2, per_node=1, nodes=2)
    clock = Clock(monkeypatch, world=two)
    clock.dog.known = {1: {"number": 1, "idle_s": 9.0, "in": "f (x.py:1)"}}
    clock.step()
    for _ in range(30):
        sent[0] += 10**6
        assert clock.resumes(1) and clock.dog.declared is None
    for _ in range(3):
        sent[0] += 10**5
        assert clock.resumes(1) and clock.dog.declared is None
    clock.resumes(2)
    assert clock.dog.declared is not None


def test_a_trickle_of_others_is_no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of shared storage: added up, it excused any hang."""
    sent = [0]
    monkeypatch.setattr(watchdog, "traffic", lambda: sent[0])
    clock = Clock(monkeypatch, world=SimpleNamespace(rank=0, size=2, per_node=1, nodes=2))
    clock.dog.known = {1: {"number": 1, "idle_s": 99.0, "in": "f (x.py:1)"}}
    clock.step()
    for _ in range(30):
        sent[0] += 200_000
        clock.resumes(1)
    assert clock.dog.declared is not None


def test_bytes_of_the_loopback_are_no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    count = SimpleNamespace(bytes_sent=3, bytes_recv=4)
    cards = {"lo": count, "eth0": count, "eth1": count}
    monkeypatch.setattr(psutil, "net_io_counters", lambda pernic: cards)
    assert watchdog.traffic() == 14


def test_a_pause_of_the_process_itself_is_no_time_of_the_run(clock: Clock) -> None:
    clock.step()
    assert not clock.dog._look(3600) and clock.resumes(3)


def test_only_the_functions_of_the_trainer_take_long() -> None:
    """A caller's own test() or evaluate() may hang like any other function."""

    def frame(name: str, file: str) -> Any:
        return SimpleNamespace(f_code=SimpleNamespace(co_name=name, co_filename=file), f_back=None)

    trainer = inspect.getsourcefile(ExactTrainer)
    assert trainer is not None
    for name in watchdog.LONG:
        assert vars(ExactTrainer)[name].__code__.co_filename.endswith(watchdog.TRAINER)
        assert takes_long(frame(name, trainer))
        assert not takes_long(frame(name, "/home/me/my_study.py"))
    assert not takes_long(frame("training_step", trainer))


def test_compiling_is_known_by_its_files() -> None:
    frame = SimpleNamespace(
        f_code=SimpleNamespace(co_name="f", co_filename="/torch/_dynamo/convert_frame.py"),
        f_back=None,
    )
    inner = SimpleNamespace(f_code=SimpleNamespace(co_name="g", co_filename="x.py"), f_back=frame)
    assert takes_long(inner)  # type: ignore[arg-type]
    assert not takes_long(None) and watchdog.where(None) == "no function"


def test_the_watchdog_is_off_at_zero_and_for_peers() -> None:
    for hang_after, session, threads in ((0.0, Session, 0), (9.0, Peers, 0), (9.0, Session, 1)):
        settings = SimpleNamespace(hang_after=hang_after)
        context: Any = SimpleNamespace(world=WORLD, settings=settings, session=session)
        assert len(Watchdog.of(context, print).threads) == threads


def test_where_it_is_off_it_does_not_connect_to_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "gather", lambda value: [value])
    monkeypatch.setattr(watchdog.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(watchdog, "_get_default_store", lambda: pytest.fail("connected"))
    settings = SimpleNamespace(hang_after=0.0)
    context: Any = SimpleNamespace(world=WORLD, settings=settings, session=Session)
    assert Watchdog.of(context, print).store is None


def test_rank_0_alone_reads_of_all_ranks_and_judges_that_none_gets_on() -> None:
    """Every rank would otherwise ask the store for every other one."""
    progress = {"number": 1, "idle_s": 9.0, "in": "f (x.py:1)"}
    for rank, reads in ((0, set(range(20))), (5, {(5 + i) % 20 for i in range(1, 9)})):
        world = SimpleNamespace(rank=rank, size=20, per_node=4, nodes=5)
        context: Any = SimpleNamespace(world=world)
        store = HashStore()
        dog = Watchdog(context, 4.0, print, store)
        for other in range(20):
            store.set(dog._key(other), json.dumps(progress))
        dog.training, dog.clock_s, dog.period_s = True, 9.0, 0.01
        threading.Timer(0.3, dog.close).start()
        dog._exchange()
        assert set(dog.known) == reads
        dog.known = dict.fromkeys(range(20), progress)
        assert (dog._stalled() is not None) == (rank == 0)


class Ranks:
    """The watchdogs of some ranks at the defaults, with one store and one clock, each in its own
    rhythm."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, hang_after_s: float) -> None:
        monkeypatch.setattr(watchdog.faulthandler, "dump_traceback", lambda file: None)
        self.ends: dict[int, tuple[float, Hung]] = {}
        self.dogs, self.now_s, store = [], 0.0, HashStore()
        for rank in range(count):
            world = SimpleNamespace(rank=rank, size=count, per_node=1, nodes=1)
            context: Any = SimpleNamespace(world=world)

            def end(error: Hung, rank: int = rank) -> None:
                self.ends[rank] = self.now_s, error

            self.dogs.append(Watchdog(context, hang_after_s, end, store))

    def go_on(self, seconds: float) -> None:
        period_s = self.dogs[0].period_s
        for quarter in range(round(4 * seconds / period_s)):
            self.now_s += period_s / 4
            for rank, dog in enumerate(self.dogs):
                if (quarter + rank) % 4 == 0 and rank not in self.ends and not dog.done:
                    dog._talk(quarter)
                if (quarter + rank) % 2 == 0 and rank not in self.ends and not dog.done:
                    dog._look(period_s / 2)


def test_each_rank_prints_its_stacks_before_the_first_one_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Ranks(monkeypatch, 3, 120.0)
    for dog in ranks.dogs:
        dog.on_step_end(None, None, None)
    ranks.go_on(180)
    assert ranks.ends.keys() == {0, 1, 2}
    leave_s = min(told_s + error.settle_s for told_s, error in ranks.ends.values())
    assert all(told_s <= leave_s for told_s, _ in ranks.ends.values())
    assert max(error.settle_s for _, error in ranks.ends.values()) <= 15


def test_a_rank_that_has_ended_well_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 may still compare a checkpoint with its checksums when the others are done."""
    for done in (True, False):
        ranks = Ranks(monkeypatch, 2, 8.0)
        ranks.go_on(4)
        other = ranks.dogs[1]
        other.close(done)
        other._exchange()  # what its thread does last
        other.done = True
        ranks.go_on(30)
        assert (0 in ranks.ends) == (not done)


def test_a_thread_of_autograd_may_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    code = compile("def work():\n entered.set()\n leave.wait()\n", "/torch/_inductor/compile_fx.py",
                   "exec")  # fmt: skip
    entered, leave = threading.Event(), threading.Event()
    names: dict[str, Any] = {"entered": entered, "leave": leave}
    exec(code, names)
    context: Any = SimpleNamespace(world=WORLD)
    dog = Watchdog(context, 4.0, print)
    dog.on_step_end(None, None, None)
    thread = threading.Thread(target=names["work"])
    thread.start()
    entered.wait()
    for _ in range(40):
        assert not dog._look(0.25)
    leave.set()
    thread.join()
    assert any([dog._look(0.25) for _ in range(40)])


class Asked:
    """A lock that counts who asks for it."""

    def __init__(self) -> None:
        self.lock, self.times = threading.Lock(), 0

    def acquire(self) -> None:
        self.times += 1  # by one thread after the other
        self.lock.acquire()

    def release(self) -> None:
        self.lock.release()


@pytest.mark.parametrize("first", ["watchdog", "main"])
def test_one_thread_records_the_end(monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    """The main thread may fail just when the watchdog ends the run."""
    records: list[str] = []
    exits, gone = threading.Event(), threading.Event()
    asked = Asked()

    def record(context: Any, recorder: Any, error: BaseException) -> None:
        records.append(str(error))
        wait_for(lambda: asked.times == 2)  # the other comes while this one records

    def leave(code: int) -> None:
        exits.set()
        gone.wait()  # the process would be gone

    monkeypatch.setattr(lifecycle, "record_failure", record)
    monkeypatch.setattr(lifecycle.os, "_exit", leave)
    context: Any = SimpleNamespace(
        sampler=None,
        args=SimpleNamespace(torch_compile=False),
        session=SimpleNamespace(fail=lambda *_: None),
        settings=SimpleNamespace(hang_after=0.0, strategy="ddp"),
        world=WORLD,
    )
    life = Lifecycle(context, watchdog=Watchdog(context, 0.0, print))
    life.ending = asked  # type: ignore[assignment]
    error = RuntimeError("main")
    ends = {
        "watchdog": lambda: life._end_hung(Hung("watchdog", records=True, settle_s=0.0)),
        "main": lambda: life.__exit__(RuntimeError, error, None),
    }
    threads = []
    for number, name in enumerate(sorted(ends, key=lambda name: name != first), 1):
        threads.append(threading.Thread(target=ends[name], daemon=True))
        threads[-1].start()
        wait_for(lambda: asked.times == number)  # noqa: B023
    one, other = threads
    if first == "main":
        one.join()
    else:
        assert exits.wait(60)
    other.join(1)  # it has time to record, too
    assert other.is_alive() and records == [first]
    assert exits.is_set() == (first == "watchdog")
    gone.set()


@pytest.mark.parametrize("update", [None, 0])
def test_a_mistake_of_any_rank_is_recorded_once_training_has_begun(
    update: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 alone has an attempt: it must hear of the others' mistakes, too."""
    recorded: list[BaseException] = []
    monkeypatch.setattr(lifecycle, "record_failure", lambda *args: recorded.append(args[2]))
    context: Any = SimpleNamespace(
        sampler=None,
        args=SimpleNamespace(torch_compile=False),
        session=SimpleNamespace(fail=lambda *_: None),
        is_rank0=False,
        settings=SimpleNamespace(script="vit"),
        world=SimpleNamespace(launched=True),
    )
    recorder, error = lifecycle.Recorder(), UserError("a mistake")
    recorder.update = update
    dog: Any = SimpleNamespace(close=lambda done: None)
    with pytest.raises(SystemExit) as ended:
        Lifecycle(context, recorder=recorder, watchdog=dog).__exit__(UserError, error, None)
    assert ended.value.code == 2 and recorded == [error] * (update is not None)


@pytest.mark.process
@pytest.mark.parametrize("number", [0, 1])
def test_a_stopped_rank_is_found_and_named(tmp_path: Path, number: int) -> None:
    reason, printed = reason_of(tmp_path, number, "stopped", "--hang_after", "3")
    named = f"rank {number} (node 0) has not answered for 3 s: its process is stopped"
    assert reason == named
    if number:
        assert f"harness: {named}; stacks of rank 0 (node 0):" in printed
        assert "all_reduce" in printed or "backward" in printed


@pytest.mark.process
def test_a_stopped_rank_that_has_the_store_is_recorded_by_the_next(tmp_path: Path) -> None:
    """Without torchrun rank 0 has it: the others hear nothing of anybody."""
    own = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(free_port())}
    reason, printed = reason_of(tmp_path, 0, "stopped", "--hang_after", "3", env=own)
    named = "rank 0 (node 0) has not answered for 3 s: its process is stopped"
    assert reason == named and f"harness: {named}; stacks of rank 1 (node 0):" in printed


@pytest.mark.process
def test_a_rank_that_waits_for_ever_is_found_with_all_stacks(tmp_path: Path) -> None:
    reason, printed = reason_of(tmp_path, 1, "waiting", "--hang_after", "3")
    assert "no update for 3 s: rank 0 (node 0) in" in reason
    assert "rank 1 (node 0) in sleep_for_ever (stalled.py:" in reason
    for rank in (0, 1):
        assert f"stacks of rank {rank} (node 0):" in printed


class Halted(Points):
    """The first process that loads a sample is stopped."""

    def __getitem__(self, i: int) -> Any:
        if get_worker_info() is not None:  # the trainer looks at a sample itself
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().__getitem__(i)


def loads_nothing(folder: str) -> None:
    flags = ["--num_workers=2", "--hang_after=2", "--telemetry_hz=0"]
    trainer, run = ours(folder, Net(), Halted(64), Points(8), *flags)
    with run:
        run.train(trainer)


@pytest.mark.process
@pytest.mark.parametrize("count", [1, 2])
def test_a_stopped_loader_of_data_is_found_before_the_first_update(
    tmp_path: Path, count: int
) -> None:
    assert ran(count, loads_nothing, str(tmp_path), env=CPU).code == 1
    summary = only_run(tmp_path).read_summary()
    assert summary and summary["outcome"] == "failed"
    named = r"process (\d+), which loads data for rank [01] \(node 0\), has been stopped for 2 s"
    found = re.fullmatch(named, str(summary["reason"]))
    assert found and wait_for(lambda: not psutil.pid_exists(int(found[1])))


@pytest.mark.process
def test_the_timeout_of_collectives_takes_effect_on_gloo(tmp_path: Path) -> None:
    reason, _ = reason_of(tmp_path, 1, "stopped", "--hang_after", "0", "--ddp_timeout", "3")
    assert "3000ms" in reason


def has_workers(folder: str) -> None:
    lifecycle.DEAF_S = 0.2
    trainer, run = ours(folder, Net(), Points(64), Points(8))
    with run:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(abs, [-1, -2]) == [1, 2]
        time.sleep(1)  # leaving the pool has ended its workers by SIGTERM
        run.train(trainer)


@pytest.mark.process
def test_a_signal_to_a_worker_of_the_script_is_none_to_the_run(tmp_path: Path) -> None:
    """A forked process shares the pipe in which signals are told: the run ended as interrupted."""
    done = ran(1, has_workers, str(tmp_path), env=CPU)
    assert (done.code, done.err) == (0, "")
    assert (only_run(tmp_path).read_summary() or {})["outcome"] == "finished"


class Deaf(TrainerCallback):
    """In the third update the main thread waits in native code, and a signal comes."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            lifecycle.DEAF_S = 0.2
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
            mutex = ctypes.create_string_buffer(64)
            for _ in range(2):  # the second waits for ever, and no signal wakes it
                ctypes.CDLL(None).pthread_mutex_lock(mutex)


def waits_in_native_code(folder: str) -> None:
    trainer, run = ours(folder, Net(), Points(64), Points(8), callbacks=[Deaf()])
    with run:
        run.train(trainer)


@pytest.mark.process
def test_a_signal_is_heard_where_the_main_thread_waits_in_native_code(tmp_path: Path) -> None:
    began_s = time.monotonic()
    assert ran(1, waits_in_native_code, str(tmp_path), env=CPU).code == 128 + signal.SIGTERM
    summary = only_run(tmp_path).read_summary()
    assert summary and (summary["outcome"], summary["reason"]) == ("interrupted", "SIGTERM")
    assert time.monotonic() - began_s < 60
