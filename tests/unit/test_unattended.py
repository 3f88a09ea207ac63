"""The window of silence, the automations and their installation, the pauses of a guard, and the document's commands."""

from __future__ import annotations

import copy
import json
import re
import shlex
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from keepstep import audit, retry
from keepstep.checkpoint.plan import Rejection, ResumePlan
from keepstep.cli.main import build_parser, main
from keepstep.cli.run_command import PREFECT_DEFAULTS
from keepstep.errors import ConfigError, KeepstepError
from keepstep.platform import api, automations, guard, local, windows
from keepstep.run import write_json
from tasks.fell_back import FELL_BACK, fallback

ROOT = Path(__file__).parents[2]
SHIPPED = yaml.safe_load((ROOT / "deployments" / "automations.yaml").read_text())["automations"]
NOTIFICATIONS = yaml.safe_load((ROOT / "deployments" / "notifications.yaml").read_text())["automations"]
DEPLOYMENTS = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text())
POOLS = [deployment["work_pool"] for deployment in DEPLOYMENTS["deployments"]]


def proactive() -> list[dict[str, Any]]:
    """Those that wait for silence."""
    names = ("keepstep-silent-runs-crashed", "keepstep-cancelling-runs-cancelled")
    return [one for one in SHIPPED if one["name"] in names]


def test_window_covers_three_heartbeats_and_the_longest_outage():
    """C133: the client sits out 2 + 4 + … + 2^8 = 510 s, so 3 x 60 + 510 = 690 s."""
    assert windows.longest_outage_s() == 510
    assert windows.silence_window_s() == 690
    assert windows.silence_window_s(heartbeat_s=30, outage_s=20) == 110
    assert windows.HEARTBEAT_S >= 30, "Prefect refuses a shorter one"


def test_every_file_has_the_one_window():
    assert [one["trigger"]["within"] for one in proactive()] == [windows.silence_window_s()] * 2
    for environment in [pool["job_variables"]["env"] for pool in POOLS] + [PREFECT_DEFAULTS]:
        assert environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == str(windows.HEARTBEAT_S)
        assert environment["PREFECT_CLIENT_MAX_RETRIES"] == str(windows.CLIENT_MAX_RETRIES)
    for document in ("unattended.md", "kuberay.md"):
        assert f"{windows.silence_window_s()} s" in (ROOT / "docs" / document).read_text()


def test_a_flow_run_outlives_its_worker_and_waits_for_no_slot():
    """C140, C142: a pipe to the worker would end it with the worker; the folder decides over a second one."""
    assert all(pool["job_variables"]["stream_output"] is False for pool in POOLS)
    assert not any("concurrency_limit" in deployment for deployment in DEPLOYMENTS["deployments"])


def test_automations_act_on_the_training_flow_and_only_a_crash_is_tried_again():
    for one in SHIPPED:
        assert one["trigger"]["match_related"] == {
            "prefect.resource.role": "flow",
            "prefect.resource.name": api.FLOW,
        }
        assert one["trigger"]["for_each"] == ["prefect.resource.id"]
    again = [one for one in SHIPPED if any(action["state"] == "SCHEDULED" for action in one["actions"])]
    assert [one["trigger"]["after"] for one in again] == [["prefect.flow-run.Crashed"]]
    # A worker reports one death twice: the second report must not end what was queued in between.
    assert again[0]["trigger"]["posture"] == "Proactive" and again[0]["trigger"]["within"] >= 10


def test_silence_is_waited_for_from_the_moment_that_a_worker_takes_a_run():
    """C131: a worker may die between taking a run and the flow's first heartbeat."""
    (silent,) = [one for one in proactive() if one["actions"][0]["state"] == "CRASHED"]
    begins = {"prefect.flow-run.Pending", "prefect.flow-run.Running", "prefect.flow-run.heartbeat"}
    assert set(silent["trigger"]["after"]) == begins
    assert begins <= set(silent["trigger"]["expect"]), "each of them begins the window anew"


def test_a_run_that_failed_for_good_is_not_missed():
    """A state's event bears the state's name: under a name that nobody waits for, a failed run would be silent."""
    names = {"Failed", "StartsInVain", retry.NOT_RETRYABLE, retry.SAME_FAILURE, retry.RETRIES_EXHAUSTED}
    assert {action["name"] for one in SHIPPED for action in one["actions"] if action["state"] == "FAILED"} <= names
    for one in proactive():
        assert {f"prefect.flow-run.{name}" for name in names} <= set(one["trigger"]["expect"])


def test_people_are_told_of_every_name_under_which_a_run_stops():
    """Of training and audit, by the names that their code gives; what falls back by the event that the task emits."""
    expected = {one["name"]: set(one["trigger"]["expect"]) for one in NOTIFICATIONS}
    states = [retry.NOT_RETRYABLE, retry.SAME_FAILURE, retry.RETRIES_EXHAUSTED, "StartsInVain", "Failed"]
    bad_audits = [name for name in audit.AUDIT_ENDS if name != audit.GOOD]
    assert expected == {
        "keepstep-tell-stopped": {f"prefect.flow-run.{name}" for name in states},
        "keepstep-tell-fell-back": {FELL_BACK},
        "keepstep-tell-audit": {f"prefect.flow-run.{name}" for name in [*bad_audits, "Failed", "Crashed"]},
    }
    document = (ROOT / "docs" / "unattended.md").read_text()
    assert all(f"| `{name}` |" in document for name in expected) and f"`{FELL_BACK}`" in document


def test_a_second_start_that_is_refused_is_told_nobody():
    """The words of the refusal stand in two places; a schedule would tell them each night."""
    (stopped,) = [one for one in NOTIFICATIONS if one["name"] == "keepstep-tell-stopped"]
    pattern = stopped["trigger"]["match"]["prefect.state-message"]
    assert pattern == "!* is held: *"
    for source in ("keepstep/attempts.py", "keepstep/preflight/checks.py"):
        assert "run.root} is held: " in (ROOT / source).read_text()


def test_a_block_is_given_to_what_notifies_and_to_nothing_else():
    given = automations.with_block([SHIPPED[0], NOTIFICATIONS[0]], "b")
    assert given[0] == SHIPPED[0]
    assert given[1]["actions"] == [NOTIFICATIONS[0]["actions"][0] | {"block_document_id": "b"}]
    assert "block_document_id" not in NOTIFICATIONS[0]["actions"][0]


def test_notifications_without_a_block_are_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    assert automations.main([str(ROOT / "deployments" / "notifications.yaml")]) == 2
    assert "Give --block TYPE/NAME" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        automations.main([str(tmp_path / "none.yaml")])
    assert "none.yaml: no such file" in capsys.readouterr().err


def resumed(step: int, newest: int, reason: str, *rejected: int) -> dict[str, Any]:
    """The trainer's event of an attempt that goes on from `step`."""
    plan = ResumePlan(step=step, source="s3", reason=reason, newest=newest, steps_given_up=newest - step)
    plan.rejections = [Rejection(one, "local", f"bad {one}") for one in rejected]
    return {"event": "resumed", "attempt": 2, "step": step, "plan": plan.to_record()}


def test_what_a_resume_gives_up_is_told_with_its_reasons():
    """Damage and preference both cost steps; what was rejected below the chosen step costs nothing."""
    assert fallback(resumed(120, 120, "newest")) is None
    assert fallback(resumed(120, 120, "newest", 100, 120)) is None, "the store's copy of the same step was taken"
    assert fallback(resumed(100, 140, "asked for", 140)) is None, "somebody wanted it"
    assert fallback(resumed(120, 120, "newest", 130, 140, 100)) == {
        "attempt": 2, "step": 120, "newest": 140, "steps_given_up": 20,
        "reasons": ["step 140 (local) rejected: bad 140", "step 130 (local) rejected: bad 130"],
    }  # fmt: skip
    preferred = fallback(resumed(100, 140, "multiple of 100", 150))
    assert preferred is not None and (preferred["newest"], preferred["steps_given_up"]) == (150, 50)
    assert preferred["reasons"][1:] == ["step 100 was preferred to step 140: multiple of 100"]
    many = fallback(resumed(100, 100, "newest", *range(101, 120)))
    assert many is not None and many["reasons"][-1] == "14 more rejected" and len(many["reasons"]) == 6


def as_found(automation: dict[str, Any], id: str) -> dict[str, Any]:
    """As the server gives it back: with defaults, names of events in another order, the window as a float."""
    found = copy.deepcopy(automation) | {"id": id, "description": "", "tags": []}
    trigger = found["trigger"] | {"id": "t", "within": float(automation["trigger"]["within"])}
    trigger["expect"] = list(reversed(trigger["expect"]))
    found["trigger"] = trigger
    found["actions"] = [action | {"force": False} for action in found["actions"]]
    return found


def actions(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> list[tuple[str, str | None]]:
    return [(change.action, change.id) for change in automations.changes(found, wanted)]


def test_installation_is_once_by_name():
    """A second automation of one name would act a second time; an update forgets which runs it is waiting for."""
    wanted = SHIPPED[:1]
    kept = as_found(SHIPPED[0], "a")
    assert actions([], wanted) == [("create", None)]
    assert actions([kept], wanted) == [("keep", "a")]
    assert actions([as_found(SHIPPED[1], "z"), kept], wanted) == [("keep", "a")]
    other = as_found(SHIPPED[0], "b")
    other["trigger"]["within"] = 90.0
    assert actions([other], wanted) == [("update", "b")]
    assert actions([other, kept], wanted) == [("keep", "a"), ("delete", "b")]
    paused = kept | {"enabled": False}
    assert actions([paused], wanted) == [("update", "a")]
    fewer = copy.deepcopy(kept)
    fewer["trigger"]["expect"].pop()
    assert actions([fewer], wanted) == [("update", "a")]
    assert actions([kept | {"actions": []}], wanted) == [("update", "a")]


def test_a_scaled_window_is_that_of_silence_alone():
    loaded = automations.load(ROOT / "deployments" / "automations.yaml", 75.0)
    assert {one["name"]: one["trigger"]["within"] for one in loaded} == {
        "keepstep-silent-runs-crashed": 75.0,
        "keepstep-crashed-runs-again": 10,
        "keepstep-starts-in-vain-failed": 300,
        "keepstep-cancelling-runs-cancelled": 75.0,
    }
    assert automations.silence_s(loaded) == 75.0


@pytest.mark.parametrize("text", ["soon", "0", "-5", "nan", "inf", ""])
def test_a_window_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str):
    monkeypatch.setenv(automations.SILENCE_VARIABLE, text)
    with pytest.raises(ConfigError, match=automations.SILENCE_VARIABLE):
        automations.silence_of_environment()


def test_pauses_of_a_guard_grow_to_half_a_minute():
    assert [guard.pause_s(number) for number in range(1, 9)] == [0, 1, 2, 4, 8, 16, 30, 30]


@pytest.fixture
def server() -> Iterator[tuple[str, list[tuple[int, str]], list[Any]]]:
    """(url, answers that it gives in order, what it was asked)."""
    answers: list[tuple[int, str]] = []
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked.append((self.path, json.loads(body), self.headers.get("Authorization")))
            status, text = answers.pop(0)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}/api", answers, asked
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def test_a_busy_server_is_asked_again_and_a_refusal_is_told(server, monkeypatch: pytest.MonkeyPatch):
    """SQLite that is locked for a moment must not fail a start."""
    url, answers, asked = server
    monkeypatch.setattr(api, "BUSY_WAITS_S", (0.0, 0.0))
    client = api.PrefectApi(url)
    answers += [(503, "locked"), (503, "locked"), (200, '{"id": 1}'), (422, "no such state"), *[(503, "locked")] * 3]
    assert client.ask("POST", "a/", {"b": 1}) == {"id": 1}
    assert asked == [("/api/a/", {"b": 1}, None)] * 3
    with pytest.raises(KeepstepError, match=r"POST a/ was refused \(422\): no such state"):
        client.ask("POST", "a/", {})
    with pytest.raises(KeepstepError, match="503"):
        client.ask("POST", "a/", {})
    assert answers == []


def test_a_key_of_the_environment_is_sent_and_not_shown(server, monkeypatch: pytest.MonkeyPatch):
    url, answers, asked = server
    monkeypatch.setenv("PREFECT_API_URL", url)
    monkeypatch.setenv("PREFECT_API_KEY", "pnu_secret")
    answers.append((200, "[]"))
    client = api.PrefectApi.of_environment()
    assert client.ask("POST", "a/", {}) == []
    assert asked[0][2] == "Bearer pnu_secret"
    assert "pnu_secret" not in repr(client)


def test_commands_of_the_document_exist():
    """Those of Keepstep parse; those of Prefect are run by tests/integration/test_unattended.py."""
    fences = re.findall(r"^```\n(.*?)^```", (ROOT / "docs" / "unattended.md").read_text(), re.DOTALL | re.MULTILINE)
    # Programs in quotes are run by tests/integration/test_notifications.py.
    shell = [re.sub(r"'\n[^']*'", "PROGRAM", fence) for fence in fences]
    lines = [shlex.split(line, comments=True) for fence in shell for line in fence.splitlines()]
    found = [line[line.index("keepstep") + 1 :] for line in lines if "keepstep" in line]
    assert len(found) == 3
    for arguments in found:
        build_parser().parse_args(arguments)
    modules = [line[line.index("-m") + 1] for line in lines if "-m" in line]
    assert modules == [automations.__spec__.name] * 3
    given = [line[line.index("-m") + 2 :] for line in lines if "-m" in line]
    assert {line[0] for line in given} == {"deployments/automations.yaml", "deployments/notifications.yaml"}
    assert all(("--block" in line) == (line[0] == "deployments/notifications.yaml") for line in given)
    assert [line[:4] for line in lines if line[:1] == ["prefect"]] == [
        ["prefect", "deployment", "run", "grpo-train/quickstart"]
    ]


@pytest.mark.parametrize("command", ["up", "down"])
def test_the_folder_of_a_run_is_not_that_of_a_platform(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
):
    write_json(tmp_path / "mine" / "run.json", {"run_id": "a"})
    assert main([command, str(tmp_path / "mine")]) == 2
    assert f"Give the folder that holds it: {tmp_path}\n" in capsys.readouterr().err
    assert not (tmp_path / ".keepstep").exists() and not (tmp_path / "mine" / ".keepstep").exists()


def test_a_platform_that_nobody_made_is_not_taken_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["down", str(tmp_path / "mistyped")]) == 2
    assert f"{tmp_path / 'mistyped'}: no such folder." in capsys.readouterr().err
    assert main(["down", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: nothing was started here.\n"


def test_a_setting_that_is_wrong_in_a_deployment_is_told_when_it_is_registered(tmp_path: Path):
    file = tmp_path / "prefect.yaml"
    deployment = {"name": "nightly", "work_pool": {"name": "keepstep-local"}}
    elsewhere = {"name": "pod", "work_pool": {"name": "keepstep-k8s"}, "parameters": {"config": "/only/there.yaml"}}

    def check(**overrides: Any) -> None:
        given = deployment | {"parameters": {"config": "quickstart", "overrides": overrides}}
        audit = {"name": "audit", "work_pool": {"name": "keepstep-local"}, "parameters": {"runs": ["runs/*"]}}
        file.write_text(yaml.safe_dump({"deployments": [elsewhere, audit, given]}))
        local.check_settings(file)

    check(**{"trainer.total_training_steps": 40, "resume.allow": ["scheduler"], "trainer.output_dir": "x"})
    with pytest.raises(ConfigError, match=r"(?s)deployment nightly: .*the nearest is trainer\.total_training_steps"):
        check(**{"trainer.total_training_stepz": 40})
    with pytest.raises(ConfigError, match=r"(?s)deployment nightly: .*given beside it"):
        check(**{"trainer.total_training_steps": "forty"})


def test_files_of_a_platform_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(local, "_FOLDERS", (tmp_path,))
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path / 'prefect.yaml'}: no such file")):
        local.deployment_file("prefect.yaml")
