"""The local platform of a folder of runs: Prefect server, work pool with a worker, deployments, automations.

`up` starts what is missing and changes what differs; `down` ends what `up` started. Nobody has to stay: server and
worker have a guard each (`keepstep.platform.guard`), which holds what it looks after until `down` lets go.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from keepstep.config.load import as_overrides, load
from keepstep.errors import ConfigError, KeepstepError, NoProgressError
from keepstep.platform import automations, guard, servers, windows
from keepstep.platform.api import LOCAL_POOL, PrefectApi, Record
from keepstep.processes import ProcessRef, hostname, kill

WORKER = "prefect-worker"
WORKER_START_S = 180.0
WORKER_QUERY_S = 2
DEPLOY_TIMEOUT_S = 300.0
SETTLE_S = 30.0
END_S = 30.0
POLL_S = 0.3

_PACKAGE = Path(__file__).resolve().parent
# A checkout has the files beside the package, a wheel inside it.
_FOLDERS = (_PACKAGE.parents[1] / "deployments", _PACKAGE / "files")


@dataclass(frozen=True)
class Up:
    """A platform that is up."""

    page: str
    api: str
    worker: ProcessRef
    worker_log: Path
    automations: list[automations.Change]
    silence_s: float


@dataclass(frozen=True)
class Down:
    """A platform that is down, except for what runs that were started by themselves keep."""

    interrupted: list[str]
    """Names of the flow runs that go on when the platform is up again."""
    held_by: list[ProcessRef]


def up(platform: Path, database: str | None) -> Up:
    """Bring the platform up, or what of it is missing.

    Args:
        database: connection URL of the Prefect server's database; None: SQLite in the platform folder.

    Raises:
        ConfigError: something is not installed, a server runs here with another database, or a deployment has a setting
            that there is not.
        NoProgressError: server or worker did not come up.
        KeepstepError: the automations or deployments were refused.
    """
    check_settings(deployment_file("prefect.yaml"))
    wanted = automations.load(deployment_file("automations.yaml"), automations.silence_of_environment())
    starter = ProcessRef.current("platform")
    server = servers.prefect_server(platform, starter, database)
    try:
        api = PrefectApi(server.env["PREFECT_API_URL"])
        changes = automations.install(api, wanted)
        environment = client_environment(server.env)
        worker, worker_guard = _worker(platform, api, starter, environment)
        _hold(platform, WORKER, worker_guard)
        _hold(platform, servers.PREFECT_SERVER, server.processes[1])
        deploy(api, deployment_file("prefect.yaml"), environment)
        api.pause(LOCAL_POOL, False)
    finally:
        for role in (WORKER, servers.PREFECT_SERVER):
            guard.holder_path(platform, role, starter).unlink(missing_ok=True)
    log = guard.log_path(platform, WORKER)
    return Up(server.url, api.url, worker, log, changes, automations.silence_s(wanted))


def down(platform: Path) -> Down:
    """End worker, flow runs and server. Flow runs are asked to leave and have `guard.CHILDREN_GRACE_S` to save.

    Raises:
        NoProgressError: something that nobody holds is still there after `END_S`.
    """
    recorded = servers.recorded(platform)
    with _server_kept(platform) as api:
        _take_no_more(api)
        ids = [run["id"] for run in _flow_runs(api, "RUNNING", "PENDING")]
        guard.end_children(platform, WORKER)
        # The worker tells how they ended, so it ends after that.
        interrupted = _settled(api, ids)
        guard.end_recorded(platform, WORKER)
        if servers.PREFECT_SERVER in recorded:
            its_guard = recorded[servers.PREFECT_SERVER][1]
            guard.holder_path(platform, servers.PREFECT_SERVER, its_guard).unlink(missing_ok=True)
    return Down(interrupted, _wait_for_the_end(platform, recorded))


def deployment_file(name: str) -> Path:
    """`deployments/<name>` of the checkout, or the wheel's copy of it."""
    found = next((folder / name for folder in _FOLDERS if (folder / name).is_file()), None)
    if found is None:
        raise ConfigError(f"{_FOLDERS[0] / name}: no such file.", "Run it from a checkout of Keepstep.")
    return found


def check_settings(file: Path) -> None:
    """Whether the configurations of this machine's deployments can be read: a schedule would tell at night.

    Raises:
        ConfigError: one cannot, by its deployment.
    """
    for one in yaml.safe_load(file.read_text(encoding="utf-8"))["deployments"]:
        given = one.get("parameters", {})
        if "config" not in given or one["work_pool"]["name"] != LOCAL_POOL:
            continue
        try:
            load(given["config"], as_overrides(given.get("overrides", {})))
        except ConfigError as error:
            raise ConfigError(f"{file}, deployment {one['name']}: {error.message}", error.remedy) from None


def client_environment(server_env: dict[str, str]) -> dict[str, str]:
    """Of the worker, whose flow runs inherit it. Settings that point a client elsewhere must not leak into it."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    return inherited | server_env | {
        # Filled into prefect.yaml: relative paths of a configuration start here.
        "PWD": os.getcwd(),
        "PREFECT_WORKER_QUERY_SECONDS": str(WORKER_QUERY_S),
        "PREFECT_CLIENT_MAX_RETRIES": str(windows.CLIENT_MAX_RETRIES),
        "DO_NOT_TRACK": "1",
    }  # fmt: skip


def deploy(api: PrefectApi, file: Path, environment: dict[str, str]) -> None:
    """Register all deployments of a file; those that exist are updated, and their schedules stay as switched."""
    declared = yaml.safe_load(file.read_text(encoding="utf-8"))
    names = [one.get("name") for one in declared["deployments"]]
    found = api.ask("POST", "deployments/filter", {"deployments": {"name": {"any_": names}}})
    with tempfile.TemporaryDirectory(prefix="keepstep-") as folder:
        given = Path(folder) / file.name
        given.write_text(yaml.safe_dump(as_switched(declared, found)), encoding="utf-8")
        _register(file, given, environment)


def as_switched(declared: Record, found: list[Record]) -> Record:
    """The declared deployments, where a schedule that exists says nothing of `active`: what is unsaid stays. Pure.

    Args:
        declared: content of a prefect.yaml.
        found: the server's deployments.
    """
    # Without a slug Prefect makes schedules anew, and they are what they are declared.
    there = {(*_identity(one), schedule["slug"]) for one in found for schedule in one["schedules"] if schedule["slug"]}

    def unsaid(deployment: Record, schedule: Record) -> Record:
        known = (*_identity(deployment), schedule.get("slug")) in there
        return {key: value for key, value in schedule.items() if not (known and key == "active")}

    deployments = [
        one | {"schedules": [unsaid(one, schedule) for schedule in one["schedules"]]} if "schedules" in one else one
        for one in declared["deployments"]
    ]
    return declared | {"deployments": deployments}


def _identity(deployment: Record) -> tuple[str | None, str | None]:
    return deployment.get("entrypoint"), deployment.get("name")


def _register(file: Path, given: Path, environment: dict[str, str]) -> None:
    """`prefect deploy` of `given`, which is `file` made ready."""
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--prefect-file", str(given), "--all"]
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEPLOY_TIMEOUT_S
    )
    if done.returncode != 0:
        said = "\n    ".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise KeepstepError(f"{file} was not deployed:\n    {said}", "The lines above are Prefect's.")


def _worker(
    platform: Path, api: PrefectApi, starter: ProcessRef, environment: dict[str, str]
) -> tuple[ProcessRef, ProcessRef]:
    """The worker of the pool, which it makes where there is none, and the guard that starts it again."""
    name = f"keepstep-{hostname()}"

    def command() -> tuple[list[str], str]:
        worker = ["worker", "start", "--pool", LOCAL_POOL, "--type", "process", "--name", name]
        return [sys.executable, "-m", "prefect", *worker], api.url

    def ready(_url: str) -> bool:
        try:
            return name in api.online_workers(LOCAL_POOL)
        except KeepstepError:
            return False

    with guard.start_lock(platform, WORKER, WORKER_START_S) as locked:
        if not locked:
            raise NoProgressError(f"{platform}: another start of the worker has lasted for {WORKER_START_S:.0f} s.")
        _hold(platform, WORKER, starter)
        record = guard.read_record(guard.record_path(platform, WORKER))
        if record is not None:
            worker, its_guard = ProcessRef.from_record(record["server"]), ProcessRef.from_record(record["guard"])
            if its_guard.alive() and record["url"] == api.url:
                return worker, its_guard
            if its_guard.alive():
                guard.end_recorded(platform, WORKER)
            # A worker that has lost its guard is replaced; its flow runs go on, and the next guard knows them. Asked to
            # end it would take them along.
            kill([worker])
        _, processes = servers.start_guarded(platform, WORKER, command, ready, environment, WORKER_START_S)
        return processes[0], processes[1]


def _hold(platform: Path, role: str, holder: ProcessRef) -> None:
    guard.write_record(guard.holder_path(platform, role, holder), holder=holder.to_record())


@contextmanager
def _server_kept(platform: Path) -> Iterator[PrefectApi | None]:
    """The API of the server that runs here, kept while the worker that holds it ends; None when none runs."""
    here = ProcessRef.current("platform")
    running = servers.status(platform).get(servers.PREFECT_SERVER)
    if running is None:
        yield None
        return
    _hold(platform, servers.PREFECT_SERVER, here)
    try:
        yield PrefectApi(f"{running['url']}/api")
    finally:
        guard.holder_path(platform, servers.PREFECT_SERVER, here).unlink(missing_ok=True)


def _take_no_more(api: PrefectApi | None) -> None:
    """Pause the pool: a run that is queued again while the platform ends must wait for the next `up`."""
    try:
        if api is not None:
            api.pause(LOCAL_POOL, True)
    except KeepstepError:
        # A server that does not answer has no runs to give either.
        pass


def _flow_runs(api: PrefectApi | None, *state_types: str, ids: list[str] | None = None) -> list[dict]:
    """Flow runs as the server knows them; none of a server that does not answer, which must hold nobody up."""
    try:
        return api.flow_runs(*state_types, ids=ids) if api is not None else []
    except KeepstepError:
        return []


def _settled(api: PrefectApi | None, ids: list[str]) -> list[str]:
    """Names of those of the flow runs that go on later.

    The automation queues a crashed run again in its own time; a server that ended before would forget to.
    """
    deadline = time.monotonic() + SETTLE_S
    while ids and _flow_runs(api, "RUNNING", "PENDING", "CRASHED", ids=ids) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return (
        [run["name"] for run in _flow_runs(api, "SCHEDULED", "RUNNING", "PENDING", "CRASHED", ids=ids)] if ids else []
    )


def _wait_for_the_end(platform: Path, recorded: dict[str, list[ProcessRef]]) -> list[ProcessRef]:
    """Holders of the servers that stay; every other one of the recorded (server and guard, by role) has ended."""
    deadline = time.monotonic() + END_S
    while True:
        # A server's record goes first, its process after it.
        left = [role for role, processes in recorded.items() if any(ref.alive() for ref in processes)]
        holders = {role: guard.live_holders(platform, role) for role in left}
        for role in left:
            if not holders[role] and not recorded[role][1].alive():
                guard.end_recorded(platform, role)
        if all(holders.values()):
            return list(dict.fromkeys(holder for found in holders.values() for holder in found))
        if time.monotonic() >= deadline:
            raise NoProgressError(
                f"{platform}: {', '.join(left)} did not end within {END_S:.0f} s.", f"See {platform / 'logs'}."
            )
        time.sleep(POLL_S)
