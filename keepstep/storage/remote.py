"""A run's folder in the object store.

    <prefix>/run.json  <prefix>/config.yaml  <prefix>/attempts/<n>.json
    <prefix>/checkpoints/step_<N>/<file>     manifest.json last, by a conditional write
    <prefix>/shared/<digest>                 the files of ref/, once per content

A step without its manifest is not there. `object_key` says where a step's file lies.

A download goes into `checkpoints/.download-step_<N>/`, always the same for a step: what a killed one left there is
hashed part by part and what is good is kept. The whole is verified before it is published. The folders of other steps
are leftovers; the next download deletes them.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.checkpoint import layout
from keepstep.checkpoint.digest import FileDigest
from keepstep.checkpoint.manifest import Manifest, ManifestError, parse
from keepstep.checkpoint.publish import publish
from keepstep.checkpoint.verify import REJECTED, VERIFIED, Verdict, verify
from keepstep.config.schema import S3Config
from keepstep.errors import (
    CheckpointError,
    ConfigError,
    ContractError,
    KeepstepError,
    NoRoomError,
    StorageError,
    StorageRefusedError,
)
from keepstep.platform import servers
from keepstep.run import RunDir, fsync_tree, write_atomic
from keepstep.storage import lease
from keepstep.storage.protocol import ObjectStore, OnBytes, ignore_bytes
from keepstep.storage.s3 import S3Store
from keepstep.waivers import is_further

RECORD = "run.json"
CONFIG = "config.yaml"
SHARED = "shared/"
DOWNLOAD_PREFIX = ".download-"
ENDPOINT_VARIABLE = "KEEPSTEP_S3_ENDPOINT"

_MANIFEST_KEY = re.compile(r"checkpoints/step_(0|[1-9][0-9]*)/" + re.escape(layout.MANIFEST))


def open_remote(config: S3Config, run: RunDir, environment: dict[str, str] | None = None) -> RemoteRun:
    """Connect to the run's prefix. Asks the store nothing yet.

    Args:
        environment: of the embedded store (`ServerInfo.env`); empty: this process's own.

    Raises:
        ConfigError: no bucket is configured, or the embedded store does not run and is not named by the environment.
    """
    prefix = config.prefix or run.default_s3_prefix
    if config.embedded:
        env = _embedded_environment(run, environment or {})
        store = S3Store(
            config.bucket or servers.BUCKET,
            prefix,
            endpoint_url=env[ENDPOINT_VARIABLE],
            region=servers.REGION,
            key=env["AWS_ACCESS_KEY_ID"],
            secret=env["AWS_SECRET_ACCESS_KEY"],
            put_options=put_options(config),
            max_bandwidth=config.max_bandwidth,
        )
    elif config.bucket:
        store = S3Store(
            config.bucket,
            prefix,
            endpoint_url=config.endpoint_url,
            region=config.region,
            put_options=put_options(config),
            max_bandwidth=config.max_bandwidth,
        )
    else:
        raise ConfigError("No object store is configured for this run.", "Set s3.bucket, or s3.embedded=true.")
    return RemoteRun(store, config.bucket or servers.BUCKET, prefix)


def put_options(config: S3Config) -> dict[str, str]:
    """S3's parameters for everything that is stored."""
    options = {
        "StorageClass": config.storage_class,
        "ServerSideEncryption": config.sse,
        "SSEKMSKeyId": config.sse_kms_key_id,
    }
    return {name: value for name, value in options.items() if value is not None}


def _embedded_environment(run: RunDir, environment: dict[str, str]) -> dict[str, str]:
    for candidate in (environment, dict(os.environ)):
        if ENDPOINT_VARIABLE in candidate and "AWS_SECRET_ACCESS_KEY" in candidate:
            return candidate
    running = servers.running_object_store(run.platform)
    if running is None:
        raise ConfigError(
            f"The embedded object store of {run.platform} does not run.",
            "It runs while a run or `keepstep ui` uses it.",
        )
    return running.env


@dataclass
class RemoteRun:
    """What the store holds of one run."""

    store: ObjectStore
    bucket: str
    prefix: str

    def close(self) -> None:
        self.store.close()

    def steps(self) -> list[int]:
        """Steps with a manifest, ascending; one listing, whatever their number."""
        found = (_MANIFEST_KEY.fullmatch(key) for key, _ in self.store.list_objects("checkpoints/"))
        return sorted(int(match.group(1)) for match in found if match)

    def manifest_bytes(self, step: int) -> bytes | None:
        return self.store.get_bytes(step_key(step, layout.MANIFEST))

    def manifest(self, step: int) -> Manifest:
        """
        Raises:
            CheckpointError: there is none, or it is not a manifest of this step.
        """
        data = self.manifest_bytes(step)
        where = f"{self.store.where}/{step_key(step, layout.MANIFEST)}"
        if data is None:
            raise CheckpointError(f"{where} is not there.", "See what is: keepstep ls RUN --remote")
        try:
            found = parse(data)
        except ManifestError as error:
            raise CheckpointError(f"{where}: {error}", "Take another step of the run.") from error
        if found.step != step:
            raise CheckpointError(f"{where} is the manifest of step {found.step}.", "Take another step of the run.")
        return found

    def verify(self, step: int) -> Verdict:
        """Manifest parsed, every object there with its size and digest. The content is hashed at the download.

        Raises:
            StorageError: the store did not answer; a checkpoint is never rejected for that.
        """
        begin = time.monotonic()
        path = Path(f"{self.store.where}/checkpoints/step_{step}".replace("s3://", "s3:/"))
        reasons: list[str] = []
        found: Manifest | None = None
        try:
            found = self.manifest(step)
            reasons = self._differing(step, found)
        except CheckpointError as error:
            reasons = [error.message]
        return Verdict(
            path=path,
            state=REJECTED if reasons else VERIFIED,
            reasons=reasons,
            step=step,
            epoch=None,
            manifest=found,
            num_bytes=sum(digest.size for digest in found.files.values()) if found else 0,
            seconds=time.monotonic() - begin,
        )

    def _differing(self, step: int, found: Manifest) -> list[str]:
        listed = self.sizes(step, found)
        reasons: list[str] = []
        for name, digest in found.files.items():
            key = object_key(step, name, digest)
            if key not in listed:
                if not layout.is_optional(name):
                    reasons.append(f"{name}: not in the store")
            elif listed[key] != digest.size:
                reasons.append(f"{name}: {listed[key]} bytes in the store, expected {digest.size}")
            elif not self.store.confirms(key, digest):
                reasons.append(
                    f"{name}: the store's content is not the manifest's (expected SHA-256 tree {digest.tree})"
                )
        return reasons

    def sizes(self, step: int, found: Manifest) -> dict[str, int]:
        """Bytes of what the store has under a step's own keys and the shared ones that it names."""
        own = f"checkpoints/step_{step}/"
        shared = [
            key for name, digest in found.files.items() if not (key := object_key(step, name, digest)).startswith(own)
        ]
        infos = {key: self.store.head(key) for key in shared}
        return dict(self.store.list_objects(own)) | {key: info.size for key, info in infos.items() if info is not None}

    def fetch_record(self) -> dict[str, Any] | None:
        """run.json of the run that owns this prefix, None when nobody does."""
        data = self.store.get_bytes(RECORD)
        if data is None:
            return None
        try:
            record: dict[str, Any] = json.loads(data)
            record["run_id"]
        except (ValueError, KeyError, TypeError) as error:
            raise ContractError(
                f"{self.store.where}/{RECORD} is not the record of a run.", "Give this run an s3.prefix of its own."
            ) from error
        return record

    def highest_attempt(self) -> int:
        """Highest attempt number that ever began here; 0 when none did."""
        return lease.highest(self.store)

    def claim_attempt(self, run: RunDir, number: int) -> bool:
        """`lease.claim`: take an attempt's number here as well; False: another machine has it."""
        return lease.claim(self.store, run, number)

    def download(
        self,
        step: int,
        run: RunDir,
        check_fence: Callable[[], None] = lambda: None,
        on_bytes: OnBytes = ignore_bytes,
    ) -> Path:
        """Bring a step into `run`, hashed while written, verified as a whole on disk, then published.

        A download that ended early is gone on with; what cannot become this step is deleted.

        Raises:
            CheckpointError: what arrived does not verify.
            NoRoomError: the filesystem has no room for it.
            StorageError: an object is missing or damaged, or the store did not answer.
        """
        found = self.manifest(step)
        aside = run.checkpoints / f"{DOWNLOAD_PREFIX}step_{step}"
        sweep_downloads(run, keep=aside)
        # Inside it under its own name, which verification compares with the manifest's step.
        folder = aside / f"step_{step}"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            _keep_only(folder, set(found.files))
            _check_room(folder, sum(digest.size for digest in found.files.values()))
            self._fetch(step, found, folder, on_bytes)
            verdict = verify(folder, expected_step=step, expected_run_id=found.run_id)
            if not verdict.resumable:
                raise CheckpointError(
                    f"Step {step} from {self.store.where} does not verify: {verdict.reasons[0]}",
                    "Take another step of the run.",
                )
            publish(folder, run, step, check_fence)
        except KeepstepError as error:
            if not (isinstance(error, StorageError) and error.retry):
                shutil.rmtree(aside, ignore_errors=True)
            raise
        shutil.rmtree(aside, ignore_errors=True)
        return run.checkpoint(step)

    def _fetch(self, step: int, found: Manifest, folder: Path, on_bytes: OnBytes) -> None:
        # Small files first: what is wrong shows early.
        for name, digest in sorted(found.files.items(), key=lambda entry: entry[1].size):
            key = object_key(step, name, digest)
            if layout.is_optional(name) and self.store.head(key) is None:
                continue
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            self.store.get_file(key, folder / name, digest, on_bytes)
        write_atomic(folder / layout.MANIFEST, self.manifest_bytes(step) or b"")
        fsync_tree(folder)


@dataclass(frozen=True)
class UploadReport:
    """What one upload did."""

    step: int
    num_bytes: int
    num_uploaded: int
    num_present: int


def upload_checkpoint(
    remote: RemoteRun,
    run: RunDir,
    step: int,
    attempt: int | None,
    check_fence: Callable[[], None] = lambda: None,
    on_bytes: OnBytes = ignore_bytes,
) -> UploadReport:
    """Bring a published step into the store; on return every object of it is confirmed. Repeating it is harmless.

    Raises:
        CheckpointError: the step is not on disk or has no valid manifest.
        ContractError: the prefix belongs to another run, or holds other tensors for this step.
        FencedError: a newer attempt owns the run, here or in the store.
        LocalFileError: a local file is not what the manifest says.
        StorageError, StorageRefusedError: the store.
    """
    store = remote.store
    data, local = _local_manifest(run, step)
    _claim_prefix(remote, run, local)
    if attempt is not None:
        # The store may not have answered when the attempt began.
        lease.claim(store, run, attempt)

    def fence() -> None:
        check_fence()
        if attempt is not None:
            lease.check(store, run, attempt)

    if attempt is not None:
        _keep_up_to_date(remote, run, fence)

    num_bytes = sum(digest.size for digest in local.files.values())
    standing = remote.manifest_bytes(step)
    if standing is not None and standing != data:
        if _stands_equal(remote, step, standing, local):
            return UploadReport(step, num_bytes, 0, len(local.files))
        # Without its manifest the damaged step is gone for readers before its objects are replaced.
        fence()
        store.delete(step_key(step, layout.MANIFEST))
        standing = None
    listed = remote.sizes(step, local)
    num_uploaded = 0
    for name, digest in sorted(local.files.items(), key=lambda entry: entry[1].size):
        if layout.is_optional(name) and not (run.checkpoint(step) / name).exists():
            continue
        key = object_key(step, name, digest)
        if listed.get(key) == digest.size and store.confirms(key, digest):
            on_bytes(digest.size)
            continue
        fence()
        if key in listed:
            # It is damaged, and no upload replaces what stands.
            store.delete(key)
        store.put_file(run.checkpoint(step) / name, key, digest, on_bytes)
        num_uploaded += 1
    fence()
    if standing is None and not store.put_bytes(step_key(step, layout.MANIFEST), data, if_absent=True):
        standing = remote.manifest_bytes(step)
        if standing is None:
            # The store was at two writes of it at once, and may have dropped both.
            raise StorageError(f"{store.where} took no manifest of step {step} and has none.", "Upload it again.")
    if standing is not None and standing != data:
        raise ContractError(
            f"{store.where}: another process stored step {step} at the same time, with another manifest.",
            "Two runs write to one prefix: give each an s3.prefix of its own.",
        )
    return UploadReport(step, num_bytes, num_uploaded, len(local.files) - num_uploaded)


def step_key(step: int, name: str) -> str:
    return f"checkpoints/step_{step}/{name}"


def object_key(step: int, name: str, digest: FileDigest) -> str:
    """Where a step's file lies: under the step, or for the frozen reference, which all steps share, by its content."""
    if not name.startswith(f"{layout.REF_DIR}/"):
        return step_key(step, name)
    raw, _, count = digest.tree.partition("-")
    return SHARED + base64.b64decode(raw).hex() + (f"-{count}" if count else "")


def sweep_downloads(run: RunDir, keep: Path | None = None) -> None:
    """Delete what downloads left that nobody goes on with."""
    for path in run.checkpoints.glob(f"{DOWNLOAD_PREFIX}*"):
        if path != keep:
            shutil.rmtree(path, ignore_errors=True)


def _keep_only(folder: Path, names: set[str]) -> None:
    """Delete files and links that are not among `names`."""
    for path in list(folder.rglob("*")):
        if path.is_symlink() or (path.is_file() and str(path.relative_to(folder)) not in names):
            path.unlink()


def same_tensors(first: Manifest, second: Manifest) -> bool:
    """Whether two checkpoints hold the same tensor files; counters of time and attempt may differ."""
    trees = [
        {name: digest.tree for name, digest in m.files.items() if layout.holds_tensors(name)} for m in (first, second)
    ]
    return trees[0] == trees[1]


def _local_manifest(run: RunDir, step: int) -> tuple[bytes, Manifest]:
    path = run.checkpoint(step) / layout.MANIFEST
    remedy = f"See which steps are whole: keepstep ls {run.root}"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"Step {step} cannot be uploaded: {path}: {error.strerror}.", remedy) from error
    try:
        found = parse(data)
    except ManifestError as error:
        raise CheckpointError(f"Step {step} cannot be uploaded: {path}: {error}", remedy) from error
    if found.step != step:
        raise CheckpointError(f"{path} is the manifest of step {found.step}, expected {step}.", remedy)
    return data, found


def _claim_prefix(remote: RemoteRun, run: RunDir, local: Manifest) -> None:
    """Make the prefix this run's own at the first upload, or refuse."""
    store = remote.store
    if not store.put_bytes(RECORD, run.record.read_bytes(), if_absent=True):
        kept = remote.fetch_record()
        if kept is None:
            raise StorageError(f"{store.where} took no {RECORD} and has none.", "Upload again.")
        if kept["run_id"] != local.run_id:
            raise ContractError(
                f"{store.where} belongs to run {kept['run_id']}; {run.root} is run {local.run_id}.",
                "Give this run an s3.prefix of its own.",
            )
    store.put_bytes(CONFIG, run.config.read_bytes(), if_absent=True)


def _keep_up_to_date(remote: RemoteRun, run: RunDir, fence: Callable[[], None]) -> None:
    """The store's copies of what a start may change: a machine that has lost the folder goes by them.

    A store that takes nothing in the place of what stands there keeps those of the first start; a record that another
    machine has brought further stays.
    """
    for key, path in ((RECORD, run.record), (CONFIG, run.config)):
        data, kept = path.read_bytes(), remote.store.get_bytes(key)
        if kept == data or (key == RECORD and kept and is_further(json.loads(kept), json.loads(data))):
            continue
        fence()
        with contextlib.suppress(StorageRefusedError):
            remote.store.put_bytes(key, data)


def _stands_equal(remote: RemoteRun, step: int, standing: bytes, local: Manifest) -> bool:
    """Whether the store's own copy of this step is whole and has the same tensors; False: it is damaged.

    Raises:
        ContractError: it is whole and has other tensors.
    """
    if not remote.verify(step).ok:
        return False
    if same_tensors(parse(standing), local):
        return True
    raise ContractError(
        f"{remote.store.where}: step {step} stands there with other tensors than here.",
        "Trained again, it gave another result. Give the run an s3.prefix of its own, or delete the step in the store.",
    )


def _check_room(folder: Path, num_bytes: int) -> None:
    there = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
    free, needed = shutil.disk_usage(folder).free, num_bytes - there
    if free < needed * 1.05:
        raise NoRoomError(
            f"{folder.parent.parent}: {free} bytes free, the download needs {needed}.", "Free space or move the run."
        )
