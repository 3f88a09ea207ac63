"""Replacing lost engines: the call is made again, with the weights of the running version; the budget."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.config.schema import TimeoutConfig
from keepstep.controller.groups import EngineGroup
from keepstep.controller.recovery import Budget
from keepstep.errors import WorkerDiedError
from keepstep.rollout.types import Request


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
            [request.seed for request in arguments[0]] if kind == "generate" else None
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


def group(*engines: Engine, recovery: FakeRecovery | None = None) -> EngineGroup:
    found = EngineGroup(list(engines), FakeSupervisor(), TimeoutConfig())  # type: ignore[arg-type]
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
