"""The Prefect server and the S3 server freeze in the middle: training does not notice, afterwards all is made good."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from pathlib import Path

import pytest

from keepstep.platform import guard, servers
from keepstep.processes import ProcessRef
from keepstep.run import read_json
from tests.integration.driver import Driver, wait_until_gone

pytestmark = [pytest.mark.integration, pytest.mark.slow]

OVERRIDES = [
    "trainer.save_freq=10", "trainer.test_freq=-1", "checkpoint.keep_last=3", "checkpoint.keep_every=1000",
    "s3.upload_interval=10",
]  # fmt: skip
FASTEST_STEP_S = 0.3


def server(driver: Driver, role: str) -> tuple[ProcessRef, str]:
    record = guard.read_record(guard.record_path(driver.run.platform, role))
    assert record is not None
    return ProcessRef.from_record(record["server"]), record["url"]


def flow_states(url: str) -> list[str]:
    request = urllib.request.Request(
        f"{url}/api/flow_runs/filter", data=b"{}", headers={"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return [run["state_name"] for run in json.load(answer)]


@pytest.mark.parametrize(
    "outage_s",
    [15, pytest.param(90, marks=pytest.mark.long), pytest.param(300, marks=pytest.mark.long),
     pytest.param(3600, marks=pytest.mark.long)],
)  # fmt: skip
def test_servers_that_do_not_answer_hold_nothing_up(workspace: Path, outage_s: int):
    """Both servers are stopped, so that calls to them hang instead of failing; saves go on, uploads wait in order."""
    total_steps = 10 * int(4 + outage_s / FASTEST_STEP_S / 10)
    # A server of its own: frozen, it must not be missed by other tests.
    driver = Driver(
        workspace / f"outage_{outage_s}" / "run", [*OVERRIDES, f"trainer.total_training_steps={total_steps}"]
    )
    driver.output_dir.parent.mkdir()
    driver.start()
    driver.wait_for_verified(10)
    frozen = [server(driver, role)[0] for role in servers.ROLES]
    try:
        for ref in frozen:
            os.kill(ref.pid, signal.SIGSTOP)
        begin, first = time.monotonic(), newest_step(driver)
        saved = verified(driver)
        time.sleep(outage_s)
        trained = newest_step(driver) - first
        assert trained > 0 and driver.process is not None and driver.process.poll() is None, driver.tail()
        # As many steps as at the pace before: nothing waited for a server.
        pace_s = [e["seconds"] for e in driver.events() if e["event"] == "step" and e["step"] <= first]
        assert trained > 0.4 * (time.monotonic() - begin) / (sum(pace_s) / len(pace_s)), (trained, pace_s)
        assert verified(driver) > saved, "checkpoints are saved and verified meanwhile"
    finally:
        for ref in frozen:
            os.kill(ref.pid, signal.SIGCONT)
    assert driver.wait(300 + outage_s) == 0, driver.tail()
    assert read_json(driver.run.result)["uploaded"] == total_steps
    assert len(driver.run.steps()) <= 4 + 1, "what waits for its upload is bounded by the newest and the multiples"
    holder = ProcessRef.current("flow")
    url = servers.prefect_server(driver.run.platform, holder).url
    assert flow_states(url) == ["Completed"]
    servers.release(driver.run.platform, holder)
    assert wait_until_gone(driver.all_processes()) == []


def newest_step(driver: Driver) -> int:
    return max(event["step"] for event in driver.events() if event["event"] == "step")


def verified(driver: Driver) -> int:
    return max(event["step"] for event in driver.events() if event["event"] == "checkpoint_verified")
