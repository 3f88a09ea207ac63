"""`keepstep preflight`: each check in its four states, none hiding another, and nothing written into the run."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.attempts import MARK_VARIABLE, leftovers, mark
from keepstep.cli.main import main
from keepstep.config.load import to_dotted
from keepstep.controller import nodes, training
from keepstep.errors import (
    EXIT_CONTRACT,
    EXIT_DATA,
    EXIT_HELD,
    ConfigError,
    ContractError,
    NoProgressError,
    StorageError,
)
from keepstep.preflight import checks, node
from keepstep.preflight.checks import FAIL, OK, SKIPPED, WARN, Check, examine, exit_code, refusal
from keepstep.preflight.foreign_log import settings_in
from keepstep.preflight.start import Step
from keepstep.processes import ProcessRef, boot_id, hostname
from keepstep.run import write_json
from tests.unit import standing_run
from tests.unit.s3_stub import Stub
from tests.unit.standing_run import Standing


@pytest.fixture
def standing(tmp_path: Path) -> Standing:
    return standing_run.make(tmp_path)


def by_id(
    standing: Standing, *more: str, heavy: Sequence[Step] | None = (), log: str | None = None
) -> dict[str, Check]:
    """The last check of each id."""
    found, _ = examine(standing.config(*more), heavy=heavy, log=log)
    return {check.id: check for check in found}


def write_attempt(standing: Standing, number: int, owner: ProcessRef, processes: list[ProcessRef], **more: Any) -> None:
    record = {
        "attempt": number,
        "owner": {"host": owner.host, "pid": owner.pid, "start_time": owner.start_time, "boot_id": boot_id()},
        "heartbeat": time.time(),
        "outcome": None,
        "processes": [ref.to_record() for ref in processes],
    }
    write_json(standing.run.attempt(number), record | more)


def sleeper(**environment: str) -> subprocess.Popen[bytes]:
    """A process that waits for its end, marked as said."""
    command = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | environment, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    return process


# the whole


def test_a_start_that_would_go_through(standing: Standing, capsys: pytest.CaptureFixture[str]):
    before = standing.content()
    assert main(["preflight", *standing.overrides(), "--quick"]) == 0
    printed = capsys.readouterr().out
    assert standing.content() == before
    assert "ok      checkpoint      resumes at step 20 (local, verified, newest)" in printed
    assert printed.splitlines()[-1].endswith(" 0 fail, 4 skipped")


def test_one_failure_hides_no_other(standing: Standing, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A damaged checkpoint, other data and a drift are told at once; the exit code is that of the first."""
    standing_run.make_data(standing.data, num_rows=600)
    optimizer = standing.run.checkpoint(20) / "actor" / "optimizer.pt"
    optimizer.write_bytes(optimizer.read_bytes()[:-1])
    before = standing.content()
    more = ["trainer.seed=7", "custom_reward_function.name=no.such.thing"]
    assert main(["preflight", *standing.overrides(*more), "--quick", "--json"]) == EXIT_DATA
    found = {check["id"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert standing.content() == before
    failed = {name for name, check in found.items() if check["status"] == FAIL}
    assert failed == {"dataset", "reward", "contract", "checkpoint"}
    assert "trainer.seed" in found["contract"]["sentence"] and "optimizer.pt" in found["checkpoint"]["sentence"]
    assert "data.train_batch_size" not in found["contract"]["sentence"]
    assert {found[name]["status"] for name in ("port", "clock", "lease", "model")} == {OK}
    for name in failed:
        assert found[name]["remedy"]


def test_what_waiting_does_not_cure_is_said_before_what_it_may():
    """Else a store that is away would be asked again and again before anybody hears of the contract."""
    away = Check("store", FAIL, "away", error=StorageError("away"))
    drift = Check("contract", FAIL, "other seed", error=ContractError("other seed"))
    assert refusal([away, drift]) is drift.error and refusal([away]) is away.error and refusal([]) is None


def test_a_drift_and_a_damaged_checkpoint_are_both_told(standing: Standing):
    (standing.run.checkpoint(20) / "actor" / "pytorch_model.bin").unlink()
    found = by_id(standing, "trainer.seed=7")
    assert found["contract"].status == FAIL and "trainer.seed" in found["contract"].sentence
    assert found["checkpoint"].status == FAIL and "actor/pytorch_model.bin" in found["checkpoint"].sentence
    assert isinstance(refusal(list(found.values())), ContractError)
    assert exit_code(list(found.values())) == EXIT_CONTRACT


def test_our_own_bug_in_a_check_hides_no_other(standing: Standing, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "leftovers", lambda _: 1 // 0)
    found = by_id(standing)
    assert found["processes"].status == WARN and "ZeroDivisionError" in found["processes"].sentence
    assert found["port"].status == OK


def test_a_cluster_that_cannot_be_asked_is_one_more_check(standing: Standing):
    def silent(_: node.Request) -> list[Check]:
        raise NoProgressError("no answer from node b")

    found, _ = examine(standing.config(), on_nodes=silent, heavy=())
    assert (found[-1].id, found[-1].status, found[-1].sentence) == ("nodes", FAIL, "no answer from node b")
    assert "settings" in {check.id for check in found}


def test_sizes_and_settings_say_whether_they_are_given(standing: Standing):
    found = by_id(standing)
    assert "2 ranks" in found["parallel"].sentence and "trainer.n_gpus_per_node=2" in found["parallel"].sentence
    assert "trainer.nnodes=1 (default)" in found["parallel"].sentence
    assert "actor_rollout_ref.rollout.n=8," in found["grpo"].sentence
    assert "actor_rollout_ref.actor.clip_ratio=0.2 (default)" in found["grpo"].sentence


# who holds the run, and what was left


def test_a_living_attempt_holds_the_run(standing: Standing, capsys: pytest.CaptureFixture[str]):
    owner = ProcessRef.current("controller")
    write_attempt(standing, 3, owner, [owner])
    assert main(["preflight", *standing.overrides(), "--quick"]) == EXIT_HELD
    printed = capsys.readouterr().out
    assert f"attempt 3 runs on this host as process {owner.pid}" in printed
    assert "skipped processes       the run is being trained" in printed
    assert main(["preflight", *standing.overrides(), "--quick", "--clean"]) == EXIT_HELD
    assert "Nothing was ended" in capsys.readouterr().err


def test_leftovers_are_found_by_record_and_by_mark_and_ended(standing: Standing, capsys: pytest.CaptureFixture[str]):
    """C158: the engine is gone, its child is not, and nobody recorded it. What only has a likely name is left alone."""
    recorded = sleeper()
    child = sleeper(**{MARK_VARIABLE: mark(standing.run, 1)})
    other = sleeper(**{MARK_VARIABLE: mark(replace(standing.run, root=standing.run.root.with_name("other")), 1)})
    try:
        engine = ProcessRef.of(recorded.pid, "engine", 0)
        gone = ProcessRef("controller", 2**22 + 5, 1, hostname())
        assert engine is not None
        write_attempt(standing, 1, gone, [gone, engine])
        assert {ref.pid for ref in leftovers(standing.run)} == {recorded.pid, child.pid}
        found = by_id(standing)
        assert found["lease"].status == OK and found["processes"].status == WARN
        assert f"engine {recorded.pid}" in found["processes"].sentence
        assert f"child of attempt 1 {child.pid}" in found["processes"].sentence
        assert "--clean" in found["processes"].remedy
        assert main(["preflight", *standing.overrides(), "--quick", "--clean"]) == 0
        assert f"ended   engine {recorded.pid}" in capsys.readouterr().out
        assert recorded.wait(timeout=10) and child.wait(timeout=10)
        assert other.poll() is None
        assert leftovers(standing.run) == []
    finally:
        for process in (recorded, child, other):
            process.kill()
            process.wait(timeout=10)


def test_a_held_port_does_not_refuse_a_start_that_clears_it(standing: Standing):
    """The engine of a killed attempt holds its port until the next attempt ends it."""
    left = Check("processes", WARN, "engine 1 still runs")
    port = Check("port", FAIL, "port 20014 is in use", exit_code=2)
    assert refusal([left, port]) is None
    assert refusal([replace(left, status=OK), port]) is not None


# node checks


def request(standing: Standing, **changes: Any) -> node.Request:
    return replace(node.request(standing.config(), standing.run), **changes)


def answer(asked: node.Request, name: str) -> dict[str, Any]:
    return next(found for found in node.answers(asked) if found["id"] == name)


def test_a_port_in_use_names_who_holds_it(standing: Standing):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        found = answer(request(standing, first_port=listener.getsockname()[1]), "port")
    assert found["status"] == FAIL and f"is in use by process {os.getpid()}" in found["sentence"]
    assert "actor_rollout_ref.rollout.port" in found["sentence"] and found["remedy"]


def test_every_engine_has_a_range_of_its_own(standing: Standing):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert answer(request(standing, first_port=port - 16, num_engines=1), "port")["status"] == OK
        assert answer(request(standing, first_port=port - 16, num_engines=2), "port")["status"] == FAIL


SMI = """#!/bin/sh
case "$1" in
  --query-gpu*) printf '0, 81559, %s\\n1, 81559, 81000\\n' "$FREE_MIB" ;;
  --query-compute-apps*) printf '%s, 70000\\n' "$HOLDER" ;;
esac
"""


def test_gpu_memory_that_is_held_names_its_holder(standing: Standing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """C98, C158: a left-over engine holds the memory; what nvidia-smi prints is read, here from a script."""
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(SMI)
    smi.chmod(smi.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("HOLDER", str(os.getpid()))
    monkeypatch.setenv("FREE_MIB", "9000")
    asked = request(standing, device="cuda", memory_share=0.5)
    found = answer(asked, "gpu_memory")
    assert found["status"] == FAIL
    assert "GPU 0: 9000 of 81559 MiB free" in found["sentence"] and "GPU 1" not in found["sentence"]
    assert f"process {os.getpid()} (" in found["sentence"]
    # A GPU that CUDA_VISIBLE_DEVICES keeps from us is none of ours.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert answer(asked, "gpu_memory")["status"] == OK
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert answer(asked, "gpu_memory")["status"] == FAIL
    monkeypatch.setenv("FREE_MIB", "[N/A]")
    assert "GPU 0" not in answer(asked, "gpu_memory")["sentence"]
    monkeypatch.setenv("FREE_MIB", "80000")
    assert answer(asked, "gpu_memory")["status"] == OK
    # Not even an idle one has all of its memory free.
    assert answer(replace(asked, memory_share=1.0), "gpu_memory")["status"] == OK
    assert answer(replace(asked, device="cpu"), "gpu_memory")["status"] == SKIPPED


def test_here_the_port_of_every_engine_is_checked_and_on_a_cluster_one(standing: Standing):
    two = standing.config("actor_rollout_ref.rollout.num_engines=2")
    assert node.request(two, standing.run).num_engines == 2
    there = standing.config("actor_rollout_ref.rollout.num_engines=2", "ray.address=http://head:8265")
    assert node.request(there, standing.run).num_engines == 1


def test_a_folder_that_other_nodes_do_not_see(standing: Standing):
    assert answer(request(standing), "shared_folder")["status"] == SKIPPED
    asked = request(standing, token=".token")
    found = answer(asked, "shared_folder")
    assert found["status"] == FAIL and str(standing.run.root) in found["sentence"]
    (standing.run.root / ".token").touch()
    assert answer(asked, "shared_folder")["status"] == OK


def test_a_node_without_a_compiler(standing: Standing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Asked for only where ranks compile; an attempt on a cluster names the node and starts nothing."""
    assert "compiler" not in [found["id"] for found in node.answers(request(standing))]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    found = answer(request(standing, compiles=True), "compiler")
    assert found["status"] == FAIL and "no g++ here" in found["sentence"] and "apt-get install g++" in found["remedy"]
    session: Any = SimpleNamespace(
        config=standing.config(), run=standing.run, events=SimpleNamespace(emit=lambda *_, **__: None)
    )
    monkeypatch.setattr(nodes, "on_each_node", lambda asked: [Check(**(found | {"node": "gpu-3"}))])
    with pytest.raises(ConfigError, match=r"^gpu-3: .* no g\+\+ here"):
        training.check_nodes(session)


@pytest.mark.parametrize(
    ("said_s", "status"), [(1000.0, OK), (1030.0, OK), (1041.0, OK), (1055.0, WARN), (985.0, WARN), (1300.0, FAIL)]
)
def test_clock_skew_between_nodes(said_s: float, status: str):
    """Asked at 1000, answered at 1040: what lies between is the time that the answer took, and no skew."""
    judged = node.answer_of("clock", lambda: node.judge_clock(1000.0, said_s, 1040.0, "the asking node", 45.0))
    assert judged["status"] == status
    assert (judged.get("remedy", "") != "") == (status == FAIL)


def test_clock_of_the_filesystem(standing: Standing, monkeypatch: pytest.MonkeyPatch):
    """A file server with another clock stamps files at another time."""
    assert answer(request(standing), "clock")["status"] == OK
    real = time.time
    monkeypatch.setattr(node.time, "time", lambda: real() + 500)
    found = answer(request(standing), "clock")
    assert found["status"] == FAIL and "the filesystem of" in found["sentence"]
    assert not list(standing.run.root.glob(".clock-*"))


# store


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    with Stub() as found:
        yield found


def with_store(stub: Stub) -> list[str]:
    return ["s3.bucket=bucket", "s3.prefix=run", f"s3.endpoint_url={stub.url}"]


def test_the_store_takes_refuses_and_gives_back(standing: Standing, stub: Stub):
    found = by_id(standing, *with_store(stub))
    assert found["store"].status == OK
    assert found["store_writes"].status == OK and "s3://bucket/run" in found["store_writes"].sentence
    assert stub.objects == {}
    assert stub.count("PUT", "/preflight/") == 2 and stub.count("DELETE", "/preflight/") == 1


def test_a_store_without_conditional_writes(standing: Standing, stub: Stub):
    stub.honours_conditions = False
    found = by_id(standing, *with_store(stub))["store_writes"]
    assert found.status == FAIL and "does not honour conditional writes" in found.sentence
    assert stub.objects == {}


def test_a_store_that_is_not_there(standing: Standing, stub: Stub, monkeypatch: pytest.MonkeyPatch):
    """Local checkpoints are enough to go on: nothing of it refuses a start."""
    from keepstep.errors import StorageError
    from keepstep.storage import remote

    def away(self: Any) -> None:
        raise StorageError("s3://bucket/run: no answer.")

    monkeypatch.setattr(remote.RemoteRun, "fetch_record", away)
    found, _ = examine(standing.config(*with_store(stub)), heavy=())
    told = {(check.id, check.status): check.sentence for check in found}
    assert "local checkpoints alone" in told["store", OK] and "does not answer" in told["store", WARN]
    assert ("store_writes", SKIPPED) in told
    assert refusal(found) is None and exit_code(found) == 0


def test_credentials_in_an_address_are_printed_by_no_check(standing: Standing, capsys: pytest.CaptureFixture[str]):
    address = "s3.endpoint_url=http://user:SECRETPW@127.0.0.1:9"
    assert main(["preflight", *standing.overrides("s3.bucket=b", address), "--quick"]) == 2
    printed = capsys.readouterr()
    assert "SECRETPW" not in printed.out + printed.err
    assert "s3.endpoint_url carries credentials" in printed.out


# reward and export, in processes of their own


def reward(tmp_path: Path, body: str) -> str:
    path = tmp_path / "reward.py"
    path.write_text(
        f"import os, time\ndef compute_score(data_source, solution_str, ground_truth, extra_info):\n{body}\n"
    )
    return f"custom_reward_function.path={path}"


def sample(tmp_path: Path, body: str) -> Check:
    given = reward(tmp_path, body)
    return by_id(standing_run.make(tmp_path, given), given, heavy=(checks.REWARD_SAMPLE,))["reward_sample"]


def test_a_reward_scores_the_first_row(tmp_path: Path):
    found = sample(tmp_path, "    return {'score': float(solution_str == ground_truth)}")
    assert (found.status, found.sentence) == (OK, "scores the first row's own answer 1 and an empty text 0")


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ("    raise ValueError('no such key')", "ValueError: no such key"),
        ("    return None", "TypeError"),
        ("    print('half a word'); os._exit(3)", "ended with 3"),
    ],
)
def test_a_reward_that_fails(tmp_path: Path, body: str, part: str):
    found = sample(tmp_path, body)
    assert found.status == FAIL and part in found.sentence and found.remedy


def test_a_reward_that_fails_where_failures_score_0(tmp_path: Path):
    """A judge that is away keeps no run from coming back; at the first start it is as likely never to score."""
    given = [reward(tmp_path, "    raise OSError('the judge is away')"), "reward_model.on_error=zero"]
    standing = standing_run.make(tmp_path, *given)
    found = by_id(standing, *given, heavy=(checks.REWARD_SAMPLE,))["reward_sample"]
    assert found.status == WARN and "the judge is away" in found.sentence
    standing.run.record.unlink()
    shutil.rmtree(standing.run.checkpoints)
    found = by_id(standing, *given, heavy=(checks.REWARD_SAMPLE,))["reward_sample"]
    assert found.status == FAIL and "the judge is away" in found.sentence


def test_a_reward_that_never_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "SAMPLE_TIMEOUT_S", 5.0)
    found = sample(tmp_path, "    time.sleep(3600)")
    assert found.status == WARN and "did not answer within 5 s" in found.sentence


# what a log tells


def test_a_log_of_ours(standing: Standing, tmp_path: Path):
    log = tmp_path / "train.log"
    # A rate that JSON writes as 5e-07, which YAML takes for a text.
    then = ["trainer.seed=7", "actor_rollout_ref.actor.optim.lr=5.0e-7"]
    lines = [f"2026-01-01 00:00:00,000 INFO {line}" for line in to_dotted(standing.config(*then))]
    assert any(line.endswith("=5e-07") for line in lines)
    log.write_text("\n".join([*lines, "2026-01-01 00:00:01,000 INFO step 1/60 reward=0.5"]))
    found = by_id(standing, then[1], log=str(log))["told"]
    assert found.status == FAIL and "trainer.seed" in found.sentence and " 7 " in found.sentence
    assert "optim.lr" not in found.sentence
    assert by_id(standing, *then, log=str(log))["told"].status == OK


VERL = """\
(TaskRunner pid=4711) {'actor_rollout_ref': {'actor': {'clip_ratio': 0.2,
(TaskRunner pid=4711)                                  'kl_loss_coef': 0.001,
(TaskRunner pid=4711)                                  'optim': {'lr': 1e-06},
(TaskRunner pid=4711)                                  'use_kl_loss': True},
(TaskRunner pid=4711)                        'model': {'path': '/models/Qwen3-8B'},
(TaskRunner pid=4711)                        'rollout': {'n': 5, 'name': 'vllm'}},
(TaskRunner pid=4711)  'algorithm': {'adv_estimator': 'grpo'},
(TaskRunner pid=4711)  'data': {'train_batch_size': 1024}}
(TaskRunner pid=4711) dataset len: 7473
"""


def test_a_log_of_verl(standing: Standing, tmp_path: Path):
    """The model's path and the GRPO settings of a foreign run, from the dictionary that it prints."""
    told = settings_in(VERL)
    assert told["actor_rollout_ref.model.path"] == "/models/Qwen3-8B"
    assert told["actor_rollout_ref.actor.optim.lr"] == 1e-06 and told["data.train_batch_size"] == 1024
    log = tmp_path / "verl.log"
    log.write_text(VERL)
    found = by_id(standing, log=str(log))["told"]
    assert found.status == FAIL
    for part in ("actor_rollout_ref.rollout.n", " 5 ", "data.train_batch_size", "1024"):
        assert part in found.sentence
    assert "algorithm.adv_estimator" not in found.sentence


@pytest.mark.parametrize("text", ["", "nothing here\n{'a': 1}\n", "{'actor_rollout_ref': {'rollout'\n"])
def test_a_log_that_tells_nothing(standing: Standing, tmp_path: Path, text: str):
    log = tmp_path / "empty.log"
    log.write_text(text)
    found = by_id(standing, log=str(log))["told"]
    assert found.status == FAIL and "tells of no setting" in found.sentence
