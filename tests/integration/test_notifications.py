"""deployments/notifications.yaml on a real Prefect server: what happens there arrives at a webhook as text."""

from __future__ import annotations

import json
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from keepstep.platform import automations, servers
from keepstep.platform.api import PrefectApi
from keepstep.processes import ProcessRef
from tests.integration.driver import REPOSITORY, clean_environment

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PATIENCE_S = 120.0
"""For each wait, on a machine that is busy with other things as well."""
FILE = REPOSITORY / "deployments" / "notifications.yaml"
RESUME = """
import json, sys
from pathlib import Path
from prefect import flow, task
from tasks.fell_back import tell_fallback

@task
def train_grpo():
    tell_fallback(Path("/runs/mine"), json.loads(sys.argv[1])).join()

@flow(name="grpo-train")
def grpo_train():
    train_grpo()

grpo_train()
"""
RESUMED = {
    "event": "resumed", "attempt": 3, "step": 100,
    "plan": {
        "newest": 140, "reason": "multiple of 100",
        "rejections": [{"step": 160, "source": "local", "reason": "actor/optimizer.pt: part 3 of 9 differs"}],
    },
}  # fmt: skip
Record = dict[str, Any]


@pytest.fixture(scope="module")
def api(workspace: Path) -> Iterator[PrefectApi]:
    platform, holder = workspace / "notifications" / ".keepstep", ProcessRef.current("flow")
    server = servers.prefect_server(platform, holder)
    yield PrefectApi(server.env["PREFECT_API_URL"])
    servers.release(platform, holder)


@dataclass
class Webhook:
    """An HTTP server that takes messages."""

    url: str
    received: queue.Queue[Record]

    def next(self, words: str) -> str:
        """The next message, which has these words in it."""
        message: str = self.received.get(timeout=PATIENCE_S)["text"]
        assert words in message
        return message


@pytest.fixture(scope="module")
def webhook() -> Iterator[Webhook]:
    received: queue.Queue[Record] = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield Webhook(f"http://127.0.0.1:{httpd.server_port}/hook", received)
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def python(api: PrefectApi, *arguments: str, **environment: str) -> None:
    """Run Python against the server, as a person's shell with `PREFECT_API_URL` would."""
    given = {**clean_environment(), "PREFECT_API_URL": api.url, "DO_NOT_TRACK": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, *arguments], env=given | environment, cwd=REPOSITORY, capture_output=True, text=True,
        timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(api: PrefectApi, webhook: Webhook) -> None:
    """Blocks are made by the document's own programs; the installation is repeated, which changes nothing."""
    text = (REPOSITORY / "docs" / "unattended.md").read_text()
    slack, custom = re.findall(r"python -c '(\n[^']*)'", text)
    python(api, "-c", slack + custom, WEBHOOK_URL=webhook.url)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PREFECT_API_URL", api.url)
        for _ in range(2):
            assert automations.main([str(FILE), "--block", "custom-webhook/keepstep"]) == 0
    wanted = automations.with_block(automations.load(FILE), automations.block_id(api, "custom-webhook/keepstep"))
    assert {change.action for change in automations.install(api, wanted)} == {"keep"}
    assert automations.block_id(api, "slack-webhook/keepstep") != automations.block_id(api, "custom-webhook/keepstep")


def end(api: PrefectApi, flow: str, name: str, message: str) -> str:
    """A flow run that ends in a Failed state of this name, which its name is returned of."""
    flow_id = api.ask("POST", "flows/", {"name": flow})["id"]
    run = api.ask("POST", "flow_runs/", {"flow_id": flow_id, "state": {"type": "RUNNING"}})
    state = {"type": "FAILED", "name": name, "message": message}
    api.ask("POST", f"flow_runs/{run['id']}/set_state", {"state": state, "force": True})
    return str(run["name"])


def test_people_are_told_of_what_does_not_come_back_by_itself(api: PrefectApi, webhook: Webhook, installed: None):
    """And not of a second start that was refused, which does no harm: its message would come first."""
    end(api, "grpo-train", "NotRetryable", "/runs/mine is held: attempt 4 runs on this host as process 17.")
    end(api, "somebodys-flow", "Failed", "no business of ours")
    name = end(api, "grpo-train", "SameFailure", "RuntimeError: no (the same bug twice after step 7 without progress)")
    message = webhook.next(f"Training stopped: {name} (SameFailure)\n")
    assert "RuntimeError: no (the same bug twice after step 7 without progress)\n" in message
    assert f"{api.url.removesuffix('/api')}/runs/flow-run/" in message

    end(api, "checkpoint-audit", "DamagedCheckpoints", "/runs/mine: step 20 on the disk: actor/optimizer.pt")
    message = webhook.next("Audit of checkpoints: DamagedCheckpoints\n")
    assert "/runs/mine: step 20 on the disk: actor/optimizer.pt\n" in message


def test_people_are_told_of_an_older_checkpoint_and_why(api: PrefectApi, webhook: Webhook, installed: None):
    """By a real task run of the flow, which emits the event."""
    python(api, "-c", RESUME, json.dumps(RESUMED))
    assert webhook.next("60 steps given up: /runs/mine\n").splitlines()[1:-1] == [
        "Attempt 3 goes on from step 100, not from step 160:",
        "step 160 (local) rejected: actor/optimizer.pt: part 3 of 9 differs",
        "step 100 was preferred to step 140: multiple of 100",
    ]


def test_a_block_that_is_not_there_is_named_with_those_that_are(api: PrefectApi, installed: None, capsys, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", api.url)
    assert automations.main([str(FILE), "--block", "custom-webhook/other"]) == 2
    assert "has no block custom-webhook/other (there: custom-webhook/keepstep)" in capsys.readouterr().err
    assert automations.main([str(FILE), "--block", "no-such-type/keepstep"]) == 2
    assert "(there: none of this type)" in capsys.readouterr().err
