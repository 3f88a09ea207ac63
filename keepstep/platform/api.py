"""The part of Prefect's REST API that the local platform needs, without Prefect: its import takes seconds."""

from __future__ import annotations

import base64
import json
import os
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from keepstep.errors import ConfigError, KeepstepError

TIMEOUT_S = 30.0
BUSY = 503
"""What the server says while its SQLite database is locked."""
BUSY_WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0)
FLOW = "grpo-train"
LOCAL_POOL = "keepstep-local"

Record = dict[str, Any]


@dataclass(frozen=True)
class PrefectApi:
    """A server's API at `url` (…/api). `headers` may hold a key."""

    url: str
    headers: dict[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def of_environment(cls) -> PrefectApi:
        """The API of PREFECT_API_URL, with PREFECT_API_KEY or PREFECT_API_AUTH_STRING where they are set."""
        url = os.environ.get("PREFECT_API_URL")
        if not url:
            raise ConfigError("PREFECT_API_URL is not set.", "Set it to the server's address, http://…:4200/api.")
        headers = {}
        if key := os.environ.get("PREFECT_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        elif user := os.environ.get("PREFECT_API_AUTH_STRING"):
            headers["Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
        return cls(url.rstrip("/"), headers)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON that the API answers, None for an empty answer.

        Raises:
            KeepstepError: no answer within `TIMEOUT_S`, or a refusal, with the server's own words.
        """
        request = urllib.request.Request(
            f"{self.url}/{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **self.headers},
            method=method,
        )
        # A proxy of the environment knows nothing of an address of this machine.
        handlers = [urllib.request.ProxyHandler({})] if "//127.0.0.1:" in self.url else []
        opener = urllib.request.build_opener(*handlers)
        for wait_s in (*BUSY_WAITS_S, None):
            try:
                with opener.open(request, timeout=TIMEOUT_S) as response:
                    text = response.read()
                return json.loads(text) if text else None
            except urllib.error.HTTPError as error:
                if error.code != BUSY or wait_s is None:
                    raise _refused(f"{self.url}: {method} {path}", error) from None
                time.sleep(wait_s)
            except (OSError, ValueError) as error:
                raise KeepstepError(f"{self.url} does not answer: {error}.", "Is the server up?") from None
        raise AssertionError("the last try returns or raises")

    def online_workers(self, pool: str) -> list[str]:
        """Names of the workers that are polling `pool`; none where there is no such pool."""
        pools = self.ask("POST", "work_pools/filter", {"work_pools": {"name": {"any_": [pool]}}})
        workers = self.ask("POST", f"work_pools/{pool}/workers/filter", {}) if pools else []
        return [worker["name"] for worker in workers if worker["status"] == "ONLINE"]

    def pause(self, pool: str, paused: bool) -> None:
        """Have no worker take runs of `pool`, or let them again."""
        self.ask("PATCH", f"work_pools/{pool}", {"is_paused": paused})

    def flow_runs(self, *state_types: str, ids: list[str] | None = None) -> list[Record]:
        """Runs of the training flow that a worker can start again, in one of these states (RUNNING, CRASHED, …)."""
        chosen = {"state": {"type": {"any_": list(state_types)}}, "deployment_id": {"is_null_": False}}
        if ids is not None:
            chosen["id"] = {"any_": ids}
        found: list[Record] = self.ask(
            "POST", "flow_runs/filter", {"flows": {"name": {"any_": [FLOW]}}, "flow_runs": chosen}
        )
        return found


def _refused(what: str, error: urllib.error.HTTPError) -> KeepstepError:
    said = error.read().decode(errors="replace")[:500]
    return KeepstepError(
        f"{what} was refused ({error.code}): {said}", "Is it a Prefect 3.9 server, and is this client allowed in?"
    )
