"""A run's folder in a real S3 server that refuses wrong checksums."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep import audit
from keepstep.actor.rng import rng_states
from keepstep.attempts import Attempt
from keepstep.checkpoint import layout, manifest
from keepstep.checkpoint.digest import digest_file
from keepstep.checkpoint.history import uploaded_steps
from keepstep.checkpoint.tensor_headers import Archive
from keepstep.checkpoint.torch_zip import TorchZip
from keepstep.checkpoint.verify import verify
from keepstep.cli.main import main
from keepstep.config.load import load
from keepstep.config.schema import CheckpointConfig, RetryConfig, S3Config
from keepstep.controller.attempt import acquire
from keepstep.errors import (
    EXIT_FAILED,
    EXIT_USAGE,
    CheckpointError,
    ContractError,
    FencedError,
    StorageError,
    StorageRefusedError,
)
from keepstep.platform import servers
from keepstep.processes import ProcessRef
from keepstep.run import RunDir, read_json, write_json
from keepstep.storage import lease
from keepstep.storage.parts import PartSink
from keepstep.storage.plain_http import PlainHttp
from keepstep.storage.protocol import LocalFileError
from keepstep.storage.remote import RemoteRun, object_key, open_remote, step_key, upload_checkpoint
from keepstep.storage.retire import retire, sweep_uploads
from keepstep.storage.s3 import S3Store

pytestmark = pytest.mark.integration

BIG_BYTES = 40 * 1024**2
"""Three parts of 16 MiB."""

CONFIG_YAML = """
algorithm: {adv_estimator: grpo}
data: {train_files: none.parquet}
actor_rollout_ref: {model: {path: none}}
trainer: {output_dir: .}
s3: {embedded: true}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> servers.ServerInfo:
    platform = tmp_path_factory.mktemp("store") / ".keepstep"
    return servers.object_store(platform, ProcessRef.current("flow"))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.at(tmp_path / "run")
    run.root.mkdir()
    write_json(run.record, {"run_id": "run-a"})
    run.config.write_text(CONFIG_YAML)
    return run


@pytest.fixture
def remote(run: RunDir, server: servers.ServerInfo) -> Iterator[RemoteRun]:
    remote = open_remote(S3Config(embedded=True), run, server.env)
    yield remote
    remote.close()


def write_step(
    run: RunDir, step: int, *, num_bytes: int = 1024, seed: int = 0, run_id: str = "run-a", attempt: int = 1
) -> Path:
    """A checkpoint that verifies; its actor has about `num_bytes` bytes."""
    import torch

    folder = run.checkpoint(step)
    generator = torch.Generator().manual_seed(seed)
    for name in layout.TENSOR_FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        weight = torch.rand(num_bytes // 4 if name == layout.ACTOR else 16, generator=generator)
        content: dict[str, Any] = {"weight": weight}
        if name == layout.REF:
            # The policy's shape; in bytes, so that the actor stays the largest file, which goes last.
            content = {"weight": torch.randint(256, (num_bytes // 4,), dtype=torch.uint8, generator=generator)}
        elif name == layout.OPTIMIZER:
            content = {"state": {"weight": {"step": torch.tensor(1.0)}}, "param_groups": []}
        torch.save(content, folder / name)
    streams = rng_states()
    state = {
        "global_step": step,
        "epoch": 1,
        "num_updates": 1,
        "num_response_tokens": 0,
        "dataloader_state": {"train_dataset_offset": 4 * step, "val_dataset_offset": 0},
        "rng_states": {**streams, "per_rank": [streams]},
        "metrics": {},
    }
    (folder / layout.TRAINER_STATE).write_text(json.dumps(state))
    (folder / layout.CONFIG).write_text(CONFIG_YAML)
    write_manifest(folder, step, run_id=run_id, attempt=attempt)
    return folder


def write_manifest(folder: Path, step: int, *, run_id: str = "run-a", attempt: int = 1) -> None:
    files = {name: digest_file(folder / name) for name in (*layout.TENSOR_FILES, layout.TRAINER_STATE, layout.CONFIG)}
    tensors = {name: described(folder / name) for name in layout.TENSOR_FILES}
    (folder / layout.MANIFEST).write_bytes(
        manifest.build(
            run_id=run_id, attempt=attempt, step=step, world_size=1, required=list(layout.required_files()),
            files=files, tensors=tensors, metrics={}, nonfinite={},
        )
    )  # fmt: skip
    found = verify(folder)
    assert found.resumable, found.reasons


def described(path: Path) -> list[list[Any]]:
    with path.open("rb") as file:
        return Archive(TorchZip(file)).describe()


def key_of(remote: RemoteRun, step: int, name: str) -> str:
    """Where a file of a stored step lies."""
    return object_key(step, name, remote.manifest(step).files[name])


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def flip_byte(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_round_trip_into_an_empty_folder(run: RunDir, remote: RemoteRun, tmp_path: Path) -> None:
    """C161, C167: what comes back has the same bytes, several parts included."""
    folder = write_step(run, 100, num_bytes=BIG_BYTES)
    before = content(folder)
    report = upload_checkpoint(remote, run, 100, attempt=1)
    assert (report.num_uploaded, report.num_present) == (6, 0)
    assert remote.steps() == [100]
    assert remote.verify(100).resumable
    assert remote.fetch_record() == {"run_id": "run-a"}
    assert remote.highest_attempt() == 1

    other = RunDir.at(tmp_path / "elsewhere")
    remote.download(100, other)
    assert content(other.checkpoint(100)) == before
    assert [entry.name for entry in other.checkpoints.iterdir()] == ["step_100"]


def test_second_upload_sends_nothing(run: RunDir, remote: RemoteRun) -> None:
    write_step(run, 100)
    upload_checkpoint(remote, run, 100, attempt=1)
    report = upload_checkpoint(remote, run, 100, attempt=2)
    assert (report.num_uploaded, report.num_present) == (0, 6)
    assert remote.highest_attempt() == 2


def test_step_saved_again_with_equal_tensors_counts_as_uploaded(run: RunDir, remote: RemoteRun) -> None:
    folder = write_step(run, 100)
    upload_checkpoint(remote, run, 100, attempt=1)
    shutil.rmtree(folder)
    write_step(run, 100, attempt=2)
    assert upload_checkpoint(remote, run, 100, attempt=2).num_uploaded == 0
    assert remote.manifest(100).attempt == 1
    assert remote.verify(100).resumable


def test_step_saved_again_with_other_tensors_is_a_conflict(run: RunDir, remote: RemoteRun) -> None:
    folder = write_step(run, 100)
    upload_checkpoint(remote, run, 100, attempt=1)
    shutil.rmtree(folder)
    write_step(run, 100, seed=1, attempt=2)
    with pytest.raises(ContractError, match="other tensors"):
        upload_checkpoint(remote, run, 100, attempt=2)
    assert remote.verify(100).resumable


@pytest.mark.parametrize("position", [0, 17 * 1024**2])
def test_damaged_local_file_never_becomes_visible(run: RunDir, remote: RemoteRun, position: int) -> None:
    """C172: the bytes that are sent are hashed, in any part, and compared before anything is published."""
    folder = write_step(run, 100, num_bytes=BIG_BYTES)
    flip_byte(folder / layout.ACTOR, position)
    with pytest.raises(LocalFileError, match=f"part {position // (16 * 1024**2)}"):
        upload_checkpoint(remote, run, 100, attempt=1)
    assert remote.steps() == []
    assert remote.store.head(step_key(100, layout.ACTOR)) is None
    assert remote.store.abort_unfinished("") == 0, "C163: an unfinished upload was left behind"


def test_wrong_remote_object_is_rejected_by_name_and_repaired(run: RunDir, remote: RemoteRun) -> None:
    folder = write_step(run, 100)
    upload_checkpoint(remote, run, 100, attempt=1)
    key = step_key(100, layout.OPTIMIZER)
    data = bytearray((folder / layout.OPTIMIZER).read_bytes())
    data[-1] ^= 1
    remote.store.put_bytes(key, bytes(data))
    verdict = remote.verify(100)
    assert not verdict.ok
    assert [reason.split(":")[0] for reason in verdict.reasons] == [layout.OPTIMIZER]
    assert upload_checkpoint(remote, run, 100, attempt=1).num_uploaded == 1
    assert remote.verify(100).resumable


def test_missing_and_truncated_objects_are_rejected(run: RunDir, remote: RemoteRun) -> None:
    """C169, C161."""
    write_step(run, 100)
    upload_checkpoint(remote, run, 100, attempt=1)
    remote.store.delete(step_key(100, layout.SCHEDULER))
    remote.store.put_bytes(key_of(remote, 100, layout.REF), b"short")
    names = {reason.split(":")[0] for reason in remote.verify(100).reasons}
    assert names == {layout.SCHEDULER, layout.REF}


def test_manifest_of_another_step_is_rejected(run: RunDir, remote: RemoteRun) -> None:
    write_step(run, 100)
    folder = write_step(run, 120)
    upload_checkpoint(remote, run, 100, attempt=1)
    remote.store.put_bytes(step_key(100, layout.MANIFEST), (folder / layout.MANIFEST).read_bytes())
    assert "manifest of step 120" in remote.verify(100).reasons[0]


def test_damage_that_the_store_hides_is_found_by_the_download(
    run: RunDir, remote: RemoteRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_step(run, 100)
    upload_checkpoint(remote, run, 100, attempt=1)
    honest = PartSink.take

    def lying(self: PartSink, block: bytes) -> None:
        honest(self, bytes([block[0] ^ 1]) + block[1:])

    monkeypatch.setattr(PartSink, "take", lying)
    other = RunDir.at(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="part 0 has SHA-256"):
        remote.download(100, other)
    assert list(other.checkpoints.iterdir()) == []


def test_prefix_of_another_run_is_refused(run: RunDir, remote: RemoteRun) -> None:
    write_step(run, 100)
    remote.store.put_bytes("run.json", json.dumps({"run_id": "run-b"}).encode())
    with pytest.raises(ContractError, match="run-b"):
        upload_checkpoint(remote, run, 100, attempt=1)
    assert remote.steps() == []


def test_the_stores_record_follows_the_runs(run: RunDir, remote: RemoteRun) -> None:
    """A run that was made longer is longer for the machine, too, that has lost its folder."""
    write_step(run, 100)
    upload_checkpoint(remote, run, 100, attempt=1)
    write_json(run.record, {"run_id": "run-a", "contract": {"trainer.total_training_steps": 800}})
    run.config.write_text(CONFIG_YAML + "\n")
    write_step(run, 120)
    upload_checkpoint(remote, run, 120, attempt=None)
    assert remote.fetch_record() == {"run_id": "run-a"}, "by hand, nobody speaks for the run"
    upload_checkpoint(remote, run, 120, attempt=1)
    assert remote.fetch_record() == read_json(run.record)
    assert remote.store.get_bytes("config.yaml") == run.config.read_bytes()


def test_a_manifest_that_was_not_taken_is_no_upload(
    run: RunDir, remote: RemoteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 answers two conditional writes at once with a conflict: then perhaps neither is there."""
    write_step(run, 100)
    put = type(remote.store).put_bytes

    def conflict(self: Any, key: str, data: bytes, if_absent: bool = False) -> bool:
        return False if key.endswith(layout.MANIFEST) else put(self, key, data, if_absent)

    monkeypatch.setattr(type(remote.store), "put_bytes", conflict)
    with pytest.raises(StorageError, match="took no manifest of step 100") as caught:
        upload_checkpoint(remote, run, 100, attempt=1)
    assert caught.value.retry


def test_what_may_be_deleted_may_be_missing(run: RunDir, remote: RemoteRun) -> None:
    """rollout/ is informative: without it a step goes up, and comes back."""
    folder = write_step(run, 100)
    name = f"{layout.ROLLOUT_DIR}/engine_state.json"
    (folder / layout.ROLLOUT_DIR).mkdir()
    (folder / name).write_text("{}")
    files = {**manifest.parse((folder / layout.MANIFEST).read_bytes()).files, name: digest_file(folder / name)}
    tensors = {one: described(folder / one) for one in layout.TENSOR_FILES}
    (folder / layout.MANIFEST).write_bytes(
        manifest.build(
            run_id="run-a", attempt=1, step=100, world_size=1, required=list(layout.required_files()),
            files=files, tensors=tensors, metrics={}, nonfinite={},
        )
    )  # fmt: skip
    shutil.rmtree(folder / layout.ROLLOUT_DIR)
    assert verify(folder).resumable
    upload_checkpoint(remote, run, 100, attempt=1)
    shutil.rmtree(folder)
    assert verify(remote.download(100, run)).resumable


def test_stale_attempt_publishes_nothing(run: RunDir, remote: RemoteRun) -> None:
    write_step(run, 100)

    def fence() -> None:
        raise FencedError("stale")

    with pytest.raises(FencedError):
        upload_checkpoint(remote, run, 100, 1, fence)
    assert remote.steps() == []


def test_step_that_is_not_on_disk_is_named(run: RunDir, remote: RemoteRun) -> None:
    with pytest.raises(CheckpointError, match="Step 7 "):
        upload_checkpoint(remote, run, 7, attempt=1)


def test_store_that_is_down_is_a_storage_error_in_bounded_time() -> None:
    begin = time.monotonic()
    with (
        S3Store("keepstep", "p", endpoint_url="http://127.0.0.1:9", key="k", secret="s" * 9) as store,
        pytest.raises(StorageError) as caught,
    ):
        store.get_bytes("run.json")
    assert caught.value.retry
    assert not isinstance(caught.value, StorageRefusedError)
    assert time.monotonic() - begin < 20


def test_refusals_name_the_way_out_and_no_secret(server: servers.ServerInfo) -> None:
    key, secret = server.env["AWS_ACCESS_KEY_ID"], server.env["AWS_SECRET_ACCESS_KEY"]
    missing = refusal("not-there", endpoint_url=server.url, key=key, secret=secret)
    assert "NoSuchBucket" in missing.message
    assert "'not-there'" in missing.remedy
    wrong = refusal("keepstep", endpoint_url=server.url, key=key, secret="wrong" + secret)
    assert secret not in str(wrong)
    assert "credentials" in wrong.remedy


def refusal(bucket: str, **options: str) -> StorageRefusedError:
    with S3Store(bucket, "p", **options) as store, pytest.raises(StorageRefusedError) as caught:
        store.list_objects("")
    return caught.value


def test_endpoint_that_accepts_wrong_checksums_is_read_back(
    run: RunDir, remote: RemoteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checksum in a HEAD proves nothing where the server stores what it is told."""
    folder = write_step(run, 100)
    upload_checkpoint(remote, run, 100, attempt=1)
    key, digest = step_key(100, layout.ACTOR), digest_file(folder / layout.ACTOR)
    monkeypatch.setattr(remote.store, "_checked", False)
    assert remote.store.confirms(key, digest)
    data = bytearray((folder / layout.ACTOR).read_bytes())
    data[5] ^= 1
    remote.store.put_bytes(key, bytes(data))
    assert not remote.store.confirms(key, digest)


@pytest.fixture
def start_upload(run: RunDir, server: servers.ServerInfo) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """`keepstep upload` as the trainer starts it; its standard input stays open."""
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-m",
            "keepstep.cli.main",
            "upload",
            str(run.root),
            "--step",
            "100",
            "--attempt",
            "1",
        ]
        process = subprocess.Popen(
            [*command, "--json", "--watch-stdin"],
            env=os.environ | server.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Wait with the child's standard input open, which `communicate` would close."""
    watched, process.stdin = process.stdin, None
    assert watched is not None
    with watched:
        return process.communicate(timeout=120)


def num_parts_there(remote: RemoteRun, key: str) -> int:
    """Parts of the unfinished uploads of a key."""
    store = remote.store
    assert isinstance(store, S3Store)

    async def count() -> int:
        found = 0
        for _, upload in await store._unfinished(key):
            found += len((await store._call("list_parts", key, **upload)).get("Parts", []))
        return found

    return store._run(count())


def wait_for_parts(remote: RemoteRun, process: subprocess.Popen[str], count: int) -> None:
    """Until `count` parts of the big file are on the server."""
    deadline = time.monotonic() + 60
    while num_parts_there(remote, step_key(100, layout.ACTOR)) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def calls(remote: RemoteRun, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Every request that `remote` sends from now on."""
    sent: list[tuple[str, dict[str, Any]]] = []
    fs = remote.store._fs  # type: ignore[attr-defined]
    request = fs._call_s3

    async def recording(method: str, **arguments: Any) -> Any:
        sent.append((method, arguments))
        return await request(method, **arguments)

    monkeypatch.setattr(fs, "_call_s3", recording)
    return sent


@pytest.mark.parametrize("how", ["SIGKILL", "parent gone"])
def test_killed_upload_leaves_nothing_visible_and_goes_on_by_part(
    run: RunDir,
    remote: RemoteRun,
    start_upload: Callable[[], subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    """C169, C170: of eleven parts, those that were on the server at the kill are not sent again."""
    run.config.write_text(CONFIG_YAML.replace("true}", f"true, max_bandwidth: {30 * 1024**2}}}"))
    write_step(run, 100, num_bytes=4 * BIG_BYTES)
    process = start_upload()
    wait_for_parts(remote, process, 3)
    if how == "SIGKILL":
        process.send_signal(signal.SIGKILL)
    else:
        assert process.stdin is not None
        process.stdin.close()
    assert process.wait(timeout=30) != 0
    assert remote.steps() == []
    num_there = num_parts_there(remote, step_key(100, layout.ACTOR))
    assert 3 <= num_there < 11
    sent = calls(remote, monkeypatch)
    report = upload_checkpoint(remote, run, 100, attempt=1)
    assert (report.num_present, report.num_uploaded) == (5, 1)
    # Fewer, where the server had received more of them than it had told of.
    assert 0 < sum(method == "upload_part" for method, _ in sent) <= 11 - num_there
    assert remote.verify(100).resumable
    assert remote.store.abort_unfinished("") == 0


def test_parts_of_other_content_are_not_taken_over(
    run: RunDir, remote: RemoteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C152: an unfinished upload of the same step from before has one good part, one wrong and one short one."""
    folder = write_step(run, 100, num_bytes=BIG_BYTES)
    key, data = step_key(100, layout.ACTOR), (folder / layout.ACTOR).read_bytes()
    part = 16 * 1024**2
    store = remote.store
    assert isinstance(store, S3Store)

    async def leave() -> None:
        upload = await store._call("create_multipart_upload", key, ChecksumAlgorithm="SHA256")
        bodies = [data[:part], bytes(part), data[2 * part : -1]]
        for number, body in enumerate(bodies):
            sha256 = base64.b64encode(hashlib.sha256(body).digest()).decode()
            await store._call(
                "upload_part", key, UploadId=upload["UploadId"], PartNumber=number + 1, Body=body, ChecksumSHA256=sha256
            )

    store._run(leave())
    sent = calls(remote, monkeypatch)
    upload_checkpoint(remote, run, 100, attempt=1)
    assert sorted(arguments["PartNumber"] for method, arguments in sent if method == "upload_part") == [2, 3]
    assert remote.verify(100).resumable


def test_reference_goes_up_once_and_is_repaired(
    run: RunDir, remote: RemoteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DESIGN section 2: `ref/` by content. A damaged one is found by the verification of every step that needs it."""
    first, second = write_step(run, 100), write_step(run, 200, seed=1)
    shutil.copy(first / layout.REF, second / layout.REF)
    write_manifest(second, 200)
    upload_checkpoint(remote, run, 100, attempt=1)
    sent = calls(remote, monkeypatch)
    assert upload_checkpoint(remote, run, 200, attempt=1).num_present == 1
    assert not [arguments for method, arguments in sent if method == "put_object" and "shared/" in arguments["Key"]]
    (shared,) = remote.store.list_objects("shared/")
    assert shared[0] == key_of(remote, 100, layout.REF) == key_of(remote, 200, layout.REF)

    data = bytearray((first / layout.REF).read_bytes())
    data[-1] ^= 1
    remote.store.put_bytes(shared[0], bytes(data))
    for step in (100, 200):
        (reason,) = remote.verify(step).reasons
        assert reason.startswith(f"{layout.REF}: ")
    assert upload_checkpoint(remote, run, 200, attempt=1).num_uploaded == 1
    assert remote.verify(100).resumable
    assert remote.verify(200).resumable


def test_killed_download_goes_on_by_part(
    run: RunDir, remote: RemoteRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there and good is not fetched again; a damaged part, a link and a stranger's file are replaced."""
    folder = write_step(run, 100, num_bytes=BIG_BYTES)
    before = content(folder)
    upload_checkpoint(remote, run, 100, attempt=1)
    other = RunDir.at(tmp_path / "elsewhere")
    aside = other.checkpoints / ".download-step_100" / "step_100"
    (aside / "actor").mkdir(parents=True)
    (other.checkpoints / ".download-step_80").mkdir()
    data = bytearray(before[layout.ACTOR])
    data[17 * 1024**2] ^= 1
    (aside / layout.ACTOR).write_bytes(bytes(data))
    (aside / layout.OPTIMIZER).symlink_to(tmp_path / "victim")
    (aside / "stranger").write_text("x")
    (aside / layout.MANIFEST).write_text("{}")
    spans: list[tuple[int, int]] = []
    read = PlainHttp.read

    async def recording(self: PlainHttp, url: str, start: int, length: int, sink: PartSink) -> None:
        spans.append((start, length))
        await read(self, url, start, length, sink)

    monkeypatch.setattr(PlainHttp, "read", recording)
    remote.download(100, other)
    assert [span for span in spans if span[1] == 16 * 1024**2] == [(16 * 1024**2, 16 * 1024**2)]
    assert content(other.checkpoint(100)) == before
    assert not (tmp_path / "victim").exists()
    assert [entry.name for entry in other.checkpoints.iterdir()] == ["step_100"]


def start_attempt(root: Path, remote: RemoteRun, run_id: str = "run-a") -> tuple[RunDir, Attempt]:
    """A start on a machine of its own: `acquire` as `run_attempt` calls it, with what it needs of a `Start`."""
    run = RunDir.at(root)
    run.root.mkdir(exist_ok=True)
    write_json(run.record, {"run_id": run_id})
    run.config.write_text(CONFIG_YAML)
    start: Any = SimpleNamespace(
        config=SimpleNamespace(retry=RetryConfig()), run=run, remote=remote, servers=[], warnings=[]
    )
    return run, acquire(start, None)


@pytest.fixture
def machines(
    remote: RemoteRun, run: RunDir, server: servers.ServerInfo, tmp_path: Path
) -> Iterator[tuple[RunDir, Attempt, RemoteRun, RunDir, Attempt, RemoteRun]]:
    """Two machines with disks of their own and one prefix; the second has taken over from the first."""
    config = S3Config(embedded=True, prefix=remote.prefix)
    with closing(open_remote(config, run, server.env)) as other:
        first_run, first = start_attempt(tmp_path / "run", remote)
        second_run, second = start_attempt(tmp_path / "elsewhere", other)
        yield first_run, first, remote, second_run, second, other
        for attempt in (first, second):
            attempt.close({"status": "finished"})


def test_second_machine_takes_the_next_number_and_fences_the_first(machines: Any) -> None:
    """The stale attempt publishes nothing, deletes nothing and sweeps nothing; the other one goes on."""
    first_run, first, remote, second_run, second, other = machines
    assert (first.number, second.number) == (1, 2)
    write_step(first_run, 100)
    write_step(second_run, 100)
    with pytest.raises(FencedError, match="attempt 2 in s3://"):
        upload_checkpoint(remote, first_run, 100, first.number)
    assert remote.steps() == []
    write_step(second_run, 80)
    for step in (80, 100):
        upload_checkpoint(other, second_run, step, second.number)
    with pytest.raises(FencedError):
        sweep_uploads(remote, first_run, lambda: lease.check(remote.store, first_run, first.number))
    with pytest.raises(FencedError):
        retire(
            remote, first_run, "run-a", CheckpointConfig(keep_last=1, keep_best=0),
            lambda: lease.check(remote.store, first_run, first.number), lambda step, reason: None,
        )  # fmt: skip
    assert remote.verify(80).resumable
    assert remote.verify(100).resumable


def test_a_folder_that_was_left_behind_deletes_nothing_of_the_run_that_went_on(machines: Any) -> None:
    """The daily audit still visits it, with retention in the store: another machine has taken the run over since."""
    first_run, first, remote, second_run, second, other = machines
    write_step(second_run, 80)
    upload_checkpoint(other, second_run, 80, second.number)
    # Of an upload that is on its way: no manifest yet.
    other.store.put_bytes(step_key(100, layout.ACTOR), b"on its way")
    first.close({"status": "preempted"})
    write_json(first_run.record, {"run_id": "run-a", "contract": {"trainer.total_training_steps": 100}})
    config = load("quickstart", [f"trainer.output_dir={first_run.root}", "s3.keep_remote=retention"])
    retired, notes = audit._retire(first_run, config, [], remote)
    assert retired == [] and "nothing more was deleted from the store" in notes[0] and "attempt 2" in notes[0]
    assert other.store.get_bytes(step_key(100, layout.ACTOR)) == b"on its way"


def test_number_that_another_machine_took_meanwhile_is_given_back(
    remote: RemoteRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other machine's claim lands between this one's look and its own claim."""
    claim = RemoteRun.claim_attempt

    def slower(self: RemoteRun, run: RunDir, number: int) -> bool:
        if number == 1:
            self.store.put_bytes("attempts/1.json", b'{"attempt": 1, "owner": {"host": "other"}}')
        return claim(self, run, number)

    monkeypatch.setattr(RemoteRun, "claim_attempt", slower)
    run, attempt = start_attempt(tmp_path / "run", remote)
    assert attempt.number == 2
    assert read_json(run.attempt(1))["outcome"]["class"] == "held"
    attempt.close({"status": "finished"})


def test_number_is_claimed_late_when_the_store_was_down_at_the_start(
    remote: RemoteRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines trained as attempt 1 while the store was away: the first upload decides."""

    def down(*_: Any) -> bool:
        raise StorageError("down")

    with monkeypatch.context() as patch:
        patch.setattr(RemoteRun, "claim_attempt", down)
        (one, first), (two, second) = (start_attempt(tmp_path / name, remote) for name in ("one", "two"))
    assert (first.number, second.number) == (1, 1)
    for run in (one, two):
        write_step(run, 100)
    upload_checkpoint(remote, one, 100, 1)
    # Same host and process here: told apart by what the second wrote of itself.
    write_json(two.attempt(1), read_json(two.attempt(1)) | {"owner": {"host": "two"}})
    with pytest.raises(FencedError, match="another machine"):
        upload_checkpoint(remote, two, 100, 1)
    for attempt in (first, second):
        attempt.close({"status": "finished"})


def test_remote_retention_keeps_what_a_rule_or_the_disk_keeps(run: RunDir, remote: RemoteRun) -> None:
    """Steps 100, 120 … 200: kept are the multiple of 100, the newest two, and one that is still on the disk."""
    for step in (100, 120, 140, 160, 180, 200):
        folder = write_step(run, step, seed=step)
        shared = layout.REF if step in (120, 140) else None
        if shared and step == 140:
            shutil.copy(run.checkpoint(120) / shared, folder / shared)
            write_manifest(folder, step)
        upload_checkpoint(remote, run, step, attempt=1)
        write_json(run.upload(step), {"step": step})
    write_step(run, 130, run_id="run-b")
    foreign = (run.checkpoint(130) / layout.MANIFEST).read_bytes()
    remote.store.put_bytes(step_key(130, layout.MANIFEST), foreign)
    remote.store.put_bytes(step_key(110, layout.ACTOR), b"of a deletion that was killed")
    shared_before = [key for key, _ in remote.store.list_objects("shared/")]
    gone = {key_of(remote, 120, layout.REF), key_of(remote, 160, layout.REF)}
    for step in (100, 120, 130, 160, 180, 200):
        shutil.rmtree(run.checkpoint(step))
    told: list[int] = []
    checkpoint = CheckpointConfig(keep_last=2, keep_every=100, keep_best=0)
    retire(remote, run, "run-a", checkpoint, lambda: None, lambda step, reason: told.append(step))
    assert told == [120, 160]
    assert remote.steps() == [100, 130, 140, 180, 200]
    assert [step for step in (100, 140, 180, 200) if not remote.verify(step).resumable] == []
    left = {key.split("/")[1] for key, _ in remote.store.list_objects("checkpoints/")}
    assert left == {f"step_{step}" for step in remote.steps()}
    # 140, which stays, shares the reference of 120.
    still = {key for key, _ in remote.store.list_objects("shared/")}
    assert still == set(shared_before) - (gone - {key_of(remote, 140, layout.REF)})
    assert uploaded_steps(run) == [100, 140, 180, 200]


def test_a_pin_holds_in_the_store_also_for_a_folder_that_was_lost(run: RunDir, remote: RemoteRun) -> None:
    rules = CheckpointConfig(keep_last=1, keep_best=0)

    def clear() -> None:
        shutil.rmtree(run.checkpoints)
        run.checkpoints.mkdir()
        retire(remote, run, "run-a", rules, lambda: None, lambda step, reason: None)

    for step in (20, 40, 60):
        write_step(run, step, seed=step)
        upload_checkpoint(remote, run, step, attempt=1)
    assert main(["pin", str(run.root), "20"]) == 0
    clear()
    assert remote.steps() == [20, 60]
    # Another machine, or the same one with a new disk.
    shutil.rmtree(run.pins)
    clear()
    assert remote.steps() == [20, 60]
    assert main(["pin", str(run.root), "20", "--remove"]) == 0
    clear()
    assert remote.steps() == [60] and not run.unpin(20).exists()


def test_who_may_only_read_can_verify(
    run: RunDir, remote: RemoteRun, server: servers.ServerInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the store checks what it is sent cannot be asked without sending something: it is read then."""
    write_step(run, 100)
    upload_checkpoint(remote, run, 100, attempt=1)
    with closing(open_remote(S3Config(embedded=True), run, server.env)) as reader:
        call = reader.store._call  # type: ignore[attr-defined]

        async def refusing(method: str, key: str | None, *args: Any, **given: Any) -> Any:
            if method == "put_object":
                raise StorageRefusedError("AccessDenied")
            return await call(method, key, *args, **given)

        monkeypatch.setattr(reader.store, "_call", refusing)
        assert reader.verify(100).resumable
        remote.store.delete(step_key(100, layout.OPTIMIZER))
        assert not reader.verify(100).resumable


def test_upload_sweeps_orphans_of_our_prefix_only(
    run: RunDir, remote: RemoteRun, server: servers.ServerInfo, start_upload: Callable[[], subprocess.Popen[str]]
) -> None:
    """C163: those of steps that still wait for their upload stay, to be gone on with."""
    write_step(run, 100)
    write_step(run, 120)
    store = remote.store
    assert isinstance(store, S3Store)

    async def leave(key: str) -> None:
        await store._call("create_multipart_upload", key, ChecksumAlgorithm="SHA256")

    with closing(open_remote(S3Config(embedded=True, prefix=f"{remote.prefix}2"), run, server.env)) as neighbour:
        for key in (step_key(80, layout.ACTOR), step_key(120, layout.ACTOR), "shared/00"):
            store._run(leave(key))
        neighbour.store._run(neighbour.store._call("create_multipart_upload", step_key(80, layout.ACTOR)))  # type: ignore[attr-defined]
        process = start_upload()
        stdout, stderr = finish(process)
        assert process.returncode == 0, stderr
        assert json.loads(stdout)["num_swept"] == 2
        assert [key for key, _ in store._run(store._unfinished(""))] == [step_key(120, layout.ACTOR)]
        assert neighbour.store.abort_unfinished("") == 1


def test_settings_go_with_everything_that_is_stored(
    run: RunDir, server: servers.ServerInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = S3Config(embedded=True, storage_class="STANDARD_IA", sse="aws:kms", sse_kms_key_id="key-1")
    expected = {"StorageClass": "STANDARD_IA", "ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "key-1"}
    with closing(open_remote(config, run, server.env)) as remote:
        sent: list[tuple[str, dict[str, Any]]] = []
        request = remote.store._fs._call_s3  # type: ignore[attr-defined]

        async def recording(method: str, **arguments: Any) -> Any:
            sent.append((method, dict(arguments)))
            # The test's server keeps no keys: it gets the requests without them.
            return await request(method, **{name: arguments[name] for name in arguments if name not in expected})

        monkeypatch.setattr(remote.store._fs, "_call_s3", recording)  # type: ignore[attr-defined]
        write_step(run, 100, num_bytes=BIG_BYTES)
        upload_checkpoint(remote, run, 100, attempt=1)
    stored = [arguments for method, arguments in sent if method in ("put_object", "create_multipart_upload")]
    assert len(stored) >= 10
    assert all(arguments.items() >= expected.items() for arguments in stored)


def test_bandwidth_limit_holds_both_ways(run: RunDir, server: servers.ServerInfo, tmp_path: Path) -> None:
    """40 MiB in three parts at 40 MiB/s: the last one may begin after 0.8 s."""
    with closing(open_remote(S3Config(embedded=True, max_bandwidth=BIG_BYTES), run, server.env)) as remote:
        write_step(run, 100, num_bytes=BIG_BYTES)
        for act in (
            lambda: upload_checkpoint(remote, run, 100, attempt=1),
            lambda: remote.download(100, RunDir.at(tmp_path / "elsewhere")),
        ):
            begin = time.monotonic()
            act()
            assert time.monotonic() - begin > 0.8


def test_by_hand_nothing_is_cleared_and_a_held_run_is_left_alone(
    run: RunDir, remote: RemoteRun, server: servers.ServerInfo, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """`keepstep upload` does not own the run there; `keepstep download` would have its folder swept from under it."""
    for key, value in server.env.items():
        monkeypatch.setenv(key, value)
    write_step(run, 100)
    remote.store._run(  # type: ignore[attr-defined]
        remote.store._call("create_multipart_upload", step_key(80, layout.ACTOR))  # type: ignore[attr-defined]
    )
    assert main(["upload", str(run.root), "--step", "100", "--json"]) == 0
    assert "num_swept" not in json.loads(capsys.readouterr().out)
    assert remote.store.abort_unfinished("") == 1
    shutil.rmtree(run.checkpoint(100))
    attempt = Attempt.acquire(run, others=[], lease_timeout_s=60.0, heartbeat_s=60.0)
    try:
        assert main(["download", str(run.root), "--step", "100", "--json"]) == 5
    finally:
        attempt.close({"status": "finished"})
    assert json.loads(capsys.readouterr().out)["class"] == "held"
    assert main(["download", str(run.root), "--step", "100", "--json"]) == 0


def test_fenced_uploader_exits_5(
    run: RunDir, remote: RemoteRun, start_upload: Callable[[], subprocess.Popen[str]]
) -> None:
    write_step(run, 100)
    write_json(run.attempt(1), {"attempt": 1})
    write_json(run.attempt(2), {"attempt": 2})
    process = start_upload()
    stdout, stderr = finish(process)
    assert process.returncode == 5, stderr
    assert json.loads(stdout)["class"] == "fenced"
    assert remote.steps() == []


def test_commands_ask_the_store(
    run: RunDir, remote: RemoteRun, server: servers.ServerInfo, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """`verify s3://…` and `plan --remote`: what the store holds, whatever the run's folder has lost."""
    for step in (20, 100):
        write_step(run, step, seed=step)
        upload_checkpoint(remote, run, step, attempt=1)
    shutil.rmtree(run.checkpoints)
    for key, value in server.env.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.env["KEEPSTEP_S3_ENDPOINT"])
    assert main(["plan", str(run.root), "--remote", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert (planned["step"], planned["source"]) == (100, "s3")
    addresses = [f"{remote.store.where}/checkpoints/step_{step}" for step in (20, 100, 60)]
    assert main(["verify", *addresses[:2]]) == 0
    assert main(["verify", addresses[2]]) == EXIT_USAGE
    remote.store.put_bytes(step_key(20, layout.OPTIMIZER), b"other")
    capsys.readouterr()
    assert main(["verify", addresses[0], "--json"]) == EXIT_FAILED
    (reason,) = json.loads(capsys.readouterr().out)["reasons"]
    assert reason.startswith(f"{layout.OPTIMIZER}: 5 bytes in the store, expected ")
