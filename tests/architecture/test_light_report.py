"""What looks at a run for people is light as well; what it needs beyond the standard library is a template engine."""

from __future__ import annotations

import pytest

from keepstep.run import RunDir
from tests.architecture.test_light_commands import HEAVY, report
from tests.unit import report_runs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run = report_runs.preempted_often(tmp_path_factory.mktemp("light") / "run")
    report_runs.rollouts(run, [1, 200])
    return run


@pytest.mark.parametrize("command", ["report", "ps"])
def test_looking_is_light(run: RunDir, command: str):
    found = report(command, str(run.root))
    assert found["status"] == 0
    assert not (HEAVY | {"pyarrow"}) & set(found["modules"])
