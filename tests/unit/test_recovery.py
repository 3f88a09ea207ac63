"""Replacing lost engines: the call is made again, with the weights of the running version; the budget."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.config.schema import TimeoutConfig
from keepstep.controller.groups import EngineGroup
from keepstep.controller.recovery import Budget, Recovery
from keepstep.controller.state import TrainState
from keepstep.errors import WorkerDiedError
from keepstep.rollout.types import Request, Sampled
from keepstep.run import RunDir


def test_budget_is_refilled_by_a_newly_verified_step():
    budget = Budget(most=2)
    assert [budget.take(0), budget.take(0), budget.take(0)] == [True, True, False]
    assert [budget.take(10), budget.take(10), budget.take(10)] == [True, True, False]
    assert budget.take(5) is False, "an older step is no progress"


class Engine:
    """Answers each request with its seed; dies at the calls whose numbers are given."""

    def __init__(self, dies_at: set[tuple[str, int]] = frozenset()) -> None:  # type: ignore[assignment]
        self.calls: list[tuple[str, Any]] = []
        self._dies_at = dies_at
        self.generate = SimpleNamespace(
            remote=lambda requests, version, *_: self._call("generate", (requests, version))
        )
        self.update_weights = SimpleNamespace(remote=lambda weights, version: self._call("update", (weights, version)))
        self.sleep = SimpleNamespace(remote=lambda: self._call("sleep", None))

    def _call(self, kind: str, arguments: Any) -> tuple[Engine, str, Any]:
        number = sum(entry[0] == kind for entry in self.calls)
        self.calls.append((kind, arguments))
        return (None if (kind, number) in self._dies_at else self, kind, arguments)  # type: ignore[return-value]


class FakeSupervisor:
    def gather(self, calls: list[tuple[str, Any]], _timeout_s: float, what: str) -> list[Any]:
        dead = [role for role, (engine, *_) in calls if engine is None]
        if dead:
            raise WorkerDiedError(f"{what}: {', '.join(dead)} died.").of(dead)
        return [
            Sampled([(at, request.seed) for at, request in enumerate(arguments[0])], done=True)
            if kind == "generate"
            else None
            for _, (_, kind, arguments) in calls
        ]


class FakeRecovery:
    def __init__(self, most: int = 3) -> None:
        self.budget = Budget(most)
        self.num_gathered = 0
        self.started: list[Engine] = []

    def replace(self, actors: list[Any], lost: list[int], error: WorkerDiedError) -> None:
        if not self.budget.take(0):
            raise error
        for index in lost:
            actors[index] = Engine()
            self.started.append(actors[index])

    def weights(self) -> str:
        self.num_gathered += 1
        return "weights"


def group(*engines: Engine, recovery: FakeRecovery | None = None, sleep: bool = False) -> EngineGroup:
    found = EngineGroup(list(engines), FakeSupervisor(), TimeoutConfig(), sleep=sleep)  # type: ignore[arg-type]
    found.recovery = recovery
    return found


def generate(engines: EngineGroup, num_requests: int = 6) -> list[Any]:
    requests = [Request([1], seed) for seed in range(num_requests)]
    return engines.generate(requests, version=7, max_tokens=4, temperature=1.0)


def test_a_rollout_is_redone_with_the_weights_of_its_version():
    recovery = FakeRecovery()
    lost, other = Engine({("generate", 0)}), Engine()
    assert generate(group(lost, other, recovery=recovery)) == [0, 1, 2, 3, 4, 5]
    (new,) = recovery.started
    assert [kind for kind, _ in new.calls] == ["update", "generate"]
    assert new.calls[0][1] == ("weights", 7)
    assert recovery.num_gathered == 1
    assert [kind for kind, _ in other.calls] == ["generate", "update", "generate"]


def test_a_weight_sync_brings_its_own_weights():
    recovery = FakeRecovery()
    engines = group(Engine({("update", 0)}), recovery=recovery)
    engines.update_weights("new weights", 8)
    assert recovery.started[0].calls == [("update", ("new weights", 8))]
    assert recovery.num_gathered == 0


def test_engines_sleep_where_they_were_built_to_and_a_new_one_as_well():
    """It needs no weights for that: the next ones wake it up."""
    awake = Engine()
    group(awake).sleep()
    assert awake.calls == []
    recovery = FakeRecovery()
    lost, other = Engine({("sleep", 0)}), Engine()
    group(lost, other, recovery=recovery, sleep=True).sleep()
    assert recovery.started[0].calls == [("sleep", None)]
    assert other.calls == [("sleep", None)] * 2 and recovery.num_gathered == 0


@pytest.mark.parametrize("engines_sleep", [False, True])
def test_an_engine_that_is_lost_while_ranks_train_comes_at_once_unless_its_memory_is_theirs_then(
    tmp_path: Path, engines_sleep: bool
):
    started: list[int] = []
    settings = SimpleNamespace(in_place=True, max_in_a_row=3, warm_spare=False)
    session: Any = SimpleNamespace(
        config=SimpleNamespace(recovery=settings, trainer=SimpleNamespace(debug=False)), run=RunDir.at(tmp_path),
        events=SimpleNamespace(emit=lambda *_, **__: None),
    )  # fmt: skip
    workforce: Any = SimpleNamespace(
        start_engine=started.append, end=lambda role, actor: None, engine=lambda index: "new engine"
    )
    ranks: Any = None
    recovery = Recovery(session, workforce, ranks, lambda: TrainState(), engines_sleep)
    recovery.see({"engine 1"}, "update")
    assert started == ([] if engines_sleep else [1])
    actors = ["engine", "lost"]
    recovery.replace(actors, [1], WorkerDiedError("weight sync: engine 1 died.").of(["engine 1"]))
    assert started == [1] and actors == ["engine", "new engine"]


def test_the_budget_ends_it():
    recovery = FakeRecovery(most=0)
    with pytest.raises(WorkerDiedError, match="engine 0 died"):
        generate(group(Engine({("generate", 0)}), recovery=recovery))


def test_without_recovery_a_death_is_the_callers_matter():
    with pytest.raises(WorkerDiedError):
        generate(group(Engine({("generate", 0)})))


def test_a_lost_rank_is_not_an_engine():
    class RankDied(FakeSupervisor):
        def gather(self, *_: Any) -> list[Any]:
            raise WorkerDiedError("gathering weights: rank 1 died.").of(["rank 1"])

    engines = group(Engine(), recovery=FakeRecovery())
    engines._supervisor = RankDied()  # type: ignore[assignment]
    with pytest.raises(WorkerDiedError) as raised:
        generate(engines)
    assert raised.value.roles == {"rank 1"}


class Slicing(Engine):
    """Answers one request a slice, the last one first; `go_on` is answered once there is nothing left as well."""

    def __init__(self, dies_at: set[tuple[str, int]] = frozenset()) -> None:  # type: ignore[assignment]
        super().__init__(dies_at)
        self.go_on = SimpleNamespace(remote=lambda slice_s: self._call("go_on", slice_s))
        self.left: list[tuple[int, int]] = []

    def answer(self, kind: str, arguments: Any) -> Sampled:
        if kind == "generate":
            self.left = [(at, request.seed) for at, request in enumerate(arguments[0])]
        return Sampled([self.left.pop()] if self.left else [], done=not self.left)


class InOrder(FakeSupervisor):
    """Has each engine work off its calls when it is asked for the answers, as an actor does."""

    def gather(self, calls: list[tuple[str, Any]], _timeout_s: float, what: str) -> list[Any]:
        dead = [role for role, (engine, *_) in calls if engine is None]
        if dead:
            raise WorkerDiedError(f"{what}: {', '.join(dead)} died.").of(dead)
        return [None if kind == "update" else engine.answer(kind, arguments) for _, (engine, kind, arguments) in calls]


def test_who_wants_to_know_is_told_while_others_are_sampled():
    engines = group(Slicing(), Slicing())
    engines._supervisor = InOrder()  # type: ignore[assignment]
    told: list[dict[int, Any]] = []
    requests = [Request([1], seed) for seed in range(10, 15)]
    answers = engines.generate(requests, version=7, max_tokens=4, temperature=1.0, finished=told.append)
    assert answers == [10, 11, 12, 13, 14]
    assert told == [{2: 12}, {4: 14}, {1: 11}, {3: 13}, {0: 10}], "shares of three and two, the last of each first"
    first, second = engines.actors
    # Each is asked to go on before its answer is looked at: once more than it takes.
    assert [kind for kind, _ in first.calls] == ["generate", "go_on", "go_on", "go_on"]
    assert [kind for kind, _ in second.calls] == ["generate", "go_on", "go_on"]


def test_an_engine_that_dies_between_two_slices_is_replaced_and_the_rollout_redone():
    class Recovery(FakeRecovery):
        def replace(self, actors: list[Any], lost: list[int], error: WorkerDiedError) -> None:
            super().replace(actors, lost, error)
            for index in lost:
                actors[index] = Slicing()

    engines = group(Slicing({("go_on", 0)}), Slicing(), recovery=Recovery())
    engines._supervisor = InOrder()  # type: ignore[assignment]
    told: list[int] = []
    requests = [Request([1], seed) for seed in range(6)]
    answers = engines.generate(
        requests, version=7, max_tokens=4, temperature=1.0, finished=lambda new: told.extend(new)
    )
    assert answers == [0, 1, 2, 3, 4, 5]
    assert told[:2] == [2, 5] and sorted(told[2:]) == [0, 1, 2, 3, 4, 5]
