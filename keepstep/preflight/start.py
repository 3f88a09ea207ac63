"""Everything that is checked before a run is touched. A refused start writes nothing into the run.

`STEPS` are the checks in their order; each leaves in `Start` what the next ones need. `prepare` stops at the first that
fails; `preflight.checks` goes on and tells of all. The lease comes after, in the trainer.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepstep import waivers
from keepstep.checkpoint import layout
from keepstep.checkpoint.history import rows_handed_out, uploaded_steps, verified_steps
from keepstep.checkpoint.manifest import parse
from keepstep.checkpoint.plan import Rejection, ResumePlan, plan
from keepstep.checkpoint.verify import verify
from keepstep.config.load import given_keys, resolve_total_steps, validate
from keepstep.config.schema import RunConfig
from keepstep.data import record as dataset_record
from keepstep.data.count import count_rows
from keepstep.data.loader import REWARD_MODEL
from keepstep.data.spec import resolve_files
from keepstep.errors import (
    CheckpointError,
    ConfigError,
    ContractError,
    DataError,
    NoRoomError,
    StorageError,
    StorageRefusedError,
)
from keepstep.platform import servers
from keepstep.preflight import contract
from keepstep.preflight.device import resolve_device
from keepstep.preflight.model import (
    Files,
    check_model,
    checkpoint_bytes,
    differing_files,
    fingerprint,
    fingerprint_of,
    model_files,
    model_folder,
    refuse_checkpoint,
)
from keepstep.processes import ProcessRef
from keepstep.quickstart.make import PREFIX, make_data, make_model
from keepstep.rewards.load import load_reward
from keepstep.run import RunDir, read_json

Record = dict[str, Any]
MIN_FREE_BYTES = 256 * 1024**2
ROOM_FACTOR = 1.2


@dataclass
class Start:
    """What the checks found, for whoever goes on. A field is as below until its check has been made."""

    config: RunConfig
    run: RunDir
    total_steps: int = 0
    train_files: list[str] = field(default_factory=list)
    val_files: list[str] = field(default_factory=list)
    dataset: Record = field(default_factory=dict)
    model_files: Files = field(default_factory=dict)
    model_fingerprint: str = ""
    init_from: Path | None = None
    """The checkpoint whose weights a new run begins with."""
    terms: dict[str, Any] = field(default_factory=dict)
    existing: Record | None = None
    """run.json of the run that stands here or in the store; None: this is its first start."""
    plan: ResumePlan = field(default_factory=ResumePlan)
    """Where it goes on."""
    remote: Any = None
    """The run's folder in the store (`storage.remote.RemoteRun`); None without a store or when it does not answer."""
    checked: dict[str, str] = field(default_factory=dict)
    """What each check of `prepare` said."""
    waived: list[contract.Drift] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    """For processes that talk to the store."""
    servers: list[ProcessRef] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    """One check: `act` fills in what it found and answers with a sentence, or raises what is wrong."""

    id: str
    act: Callable[[Start], str]
    needs: tuple[str, ...] = ()
    """Checks without whose findings this one says nothing."""


def prepare(config: RunConfig) -> Start:
    """All checks, each error naming the thing and the way out; writes nothing into the run."""
    start = Start(config, RunDir.at(config.trainer.output_dir))
    for step in STEPS:
        start.checked[step.id] = step.act(start)
    return start


def _settings(start: Start) -> str:
    start.warnings += validate(start.config)
    contract.check_allowed(start.config.resume.allow)
    resolve_device(start.config.trainer.device)
    return f"{len(given_keys(start.config))} settings are given and go together"


def _output_dir(start: Start) -> str:
    check_room(start.run)
    check_foreign(start.run)
    return f"{start.run.root} takes files"


def _store(start: Start) -> str:
    start.existing = read_json(start.run.record) if start.run.has_record() else None
    store = open_store(start.config, start.run)
    start.environment = store.env if store else {}
    start.existing, start.remote, notes = find_record(start.config, start.run, store)
    start.servers = servers.running(start.run.platform)
    start.warnings += notes
    if not start.config.s3_enabled:
        return "no store is configured"
    return f"{start.remote.store.where} answers" if start.remote else "does not answer: local checkpoints alone"


def _dataset(start: Start) -> str:
    start.train_files, start.val_files, start.dataset = check_dataset(start.config, start.run, start.existing)
    start.total_steps = resolve_total_steps(start.config, start.dataset["num_rows"])
    if start.existing is not None:
        start.warnings += dataset_record.notes(start.existing["dataset"], start.dataset)
    compared = "as recorded at the first start" if start.existing else "recorded at this first start"
    return f"{start.dataset['num_rows']} rows in {len(start.train_files)} training files, {compared}"


def _model(start: Start) -> str:
    name = start.config.actor_rollout_ref.model.path
    start.model_files = check_run_model(start.config, start.run, start.existing)
    start.model_fingerprint = (
        fingerprint_of(start.model_files)
        if start.model_files or not start.existing
        else start.existing["contract"]["model.fingerprint"]
    )
    return f"{name}, fingerprint {start.model_fingerprint[:12]}…"


def _init_from(start: Start) -> str:
    start.init_from = find_init_from(start.config, start.existing)
    return f"weights of {start.init_from}" if start.init_from else "no warm start"


def _parallel(start: Start) -> str:
    return "; ".join(parallel_sizes(start.config))


def _grpo(start: Start) -> str:
    given, values = given_keys(start.config), dict(grpo_settings(start.config))
    return ", ".join(f"{key}={contract.show(values[key])}" + ("" if key in given else " (default)") for key in values)


def _reward(start: Start) -> str:
    reward = start.config.custom_reward_function
    function = load_reward(reward.name, reward.path)
    return f"{function.__module__}.{getattr(function, '__qualname__', function)} imports"


def _contract(start: Start) -> str:
    then = start.existing["contract"] if start.existing else {}
    start.terms = contract.terms(
        start.config,
        # What could not be looked at is told by its own check; the settings are compared all the same.
        model_fingerprint=start.model_fingerprint or then.get("model.fingerprint", ""),
        total_steps=start.total_steps or then.get("trainer.total_training_steps", 0),
        init_from_fingerprint=init_from_fingerprint(start),
    )
    if start.existing is None:
        return f"{len(start.terms)} terms are recorded at this first start"
    recorded = contract.with_defaults(start.existing["contract"])
    drifts = contract.compare(recorded, start.terms, contract.stated(start.config))
    start.waived = contract.enforce(
        drifts, start.config.resume.allow, f"The run in {start.run.root}", unsaved(start.run), model_details(start)
    )
    start.warnings += [
        f"{drift.field}: {contract.show(drift.then)} at the first start, {contract.show(drift.now)} now; noted."
        for drift in drifts
        if drift.drift_class == contract.NOTE
    ]
    waived = ", ".join(drift.field for drift in start.waived)
    return f"accepted: {waived}" if waived else f"{len(start.terms)} terms hold"


def _checkpoint(start: Start) -> str:
    config = start.config
    start.plan = make_plan(config, start.run, start.remote, start.existing, start.total_steps or None)
    newest = max((candidate.step for candidate in start.plan.candidates), default=0)
    if newest > start.total_steps > 0:
        raise ConfigError(
            f"{start.run.root} has a checkpoint of step {newest}, and a run of {start.total_steps} steps is asked for.",
            "A run is not shortened: give at least as many steps, or take what you need from a checkpoint (keepstep "
            f"export {start.run.checkpoint(min(newest, start.total_steps))} OUT; trainer.init_from for a new run).",
        )
    if start.plan.step is None and start.init_from is not None:
        check_init_from(start.init_from)
    made = config.actor_rollout_ref.model.path.startswith(PREFIX) and start.model_fingerprint
    if start.plan.step is None and made:
        make_again(config, start.run, start.model_fingerprint)
    return start.plan.describe()[-1]


def _room(start: Start) -> str:
    needed = int(ROOM_FACTOR * next_checkpoint_bytes(start))
    parent = existing_parent(start.run.root)
    free = shutil.disk_usage(parent).free
    if free < needed:
        start.warnings.append(
            f"{parent}: {size(free)} free, the next checkpoint asks for about {size(needed)}: "
            "the first save may find no room."
        )
    return f"{size(free)} free, a checkpoint asks for about {size(needed)}"


STEPS: tuple[Step, ...] = (
    Step("settings", _settings),
    Step("output_dir", _output_dir),
    # Behind the settings, which refuse an address with credentials in it.
    Step("store", _store, ("settings", "output_dir")),
    Step("dataset", _dataset),
    Step("model", _model),
    Step("init_from", _init_from),
    Step("parallel", _parallel),
    Step("grpo", _grpo),
    Step("reward", _reward),
    Step("contract", _contract, ("output_dir", "init_from")),
    Step("checkpoint", _checkpoint, ("store",)),
    Step("room", _room, ("output_dir", "model")),
)


def parallel_sizes(config: RunConfig) -> list[str]:
    """The sizes by which the job is cut, each with whether it is given."""
    given = given_keys(config)
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    sizes = {
        "trainer.nnodes": config.trainer.nnodes,
        "trainer.n_gpus_per_node": config.trainer.n_gpus_per_node,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": rollout.tensor_model_parallel_size,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": actor.ppo_micro_batch_size_per_gpu,
    }
    named = [f"{key}={value}" + ("" if key in given else " (default)") for key, value in sizes.items()]
    return [f"{config.world_size} ranks", *named]


def grpo_settings(config: RunConfig) -> list[tuple[str, Any]]:
    """What makes the algorithm GRPO as it is run here."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    return [
        ("algorithm.adv_estimator", config.algorithm.adv_estimator),
        ("actor_rollout_ref.rollout.n", rollout.n),
        ("actor_rollout_ref.actor.use_kl_loss", actor.use_kl_loss),
        ("actor_rollout_ref.actor.kl_loss_coef", actor.kl_loss_coef),
        ("actor_rollout_ref.actor.kl_loss_type", actor.kl_loss_type),
        ("actor_rollout_ref.actor.clip_ratio", actor.clip_ratio),
        ("actor_rollout_ref.actor.loss_agg_mode", actor.loss_agg_mode),
        ("actor_rollout_ref.rollout.temperature", rollout.temperature),
    ]


def find_init_from(config: RunConfig, existing: Record | None) -> Path | None:
    """The checkpoint of a warm start: what is given, else what the run recorded; it is looked at only where it counts.

    Raises:
        CheckpointError: a new run is to begin with it, and its weights are not whole.
    """
    recorded = existing["contract"].get("trainer.init_from") if existing else None
    given = config.trainer.init_from or recorded
    if given is None:
        return None
    folder = Path(os.path.realpath(Path(given).expanduser()))
    if existing is None:
        check_init_from(folder)
    return folder


def check_init_from(folder: Path) -> None:
    """The weights of a warm start are whole: looked at whenever the run is about to begin with them.

    Raises:
        CheckpointError: what is wrong with them.
    """
    found = verify(folder)
    # Whatever else is lost, weights alone are asked for.
    reasons = [reason for reason in found.reasons if layout.is_policy(reason.partition(": ")[0])]
    if found.manifest is None or reasons:
        reason = next(iter(reasons or found.reasons), f"{found.state}, and without a manifest")
        raise CheckpointError(
            f"trainer.init_from: {folder} has no weights to begin with: {reason}.",
            f"See what is wrong: keepstep verify {folder}. It must be a checkpoint of Keepstep.",
        )


def init_from_fingerprint(start: Start) -> str:
    """What identifies the weights of a warm start; the recorded value where the checkpoint is gone by now."""
    recorded = start.existing["contract"].get("init_from.fingerprint", "") if start.existing else ""
    if start.init_from is None or (start.existing is not None and not start.config.trainer.init_from):
        return recorded
    if not (start.init_from / layout.MANIFEST).is_file():
        # Gone by now, or never one: what it was is known as long as nothing else is named.
        same = start.existing and start.existing["contract"].get("trainer.init_from") == start.config.trainer.init_from
        return recorded if same else f"(no manifest in {start.init_from})"
    files = parse((start.init_from / layout.MANIFEST).read_bytes()).files
    weights = [f"{name} {files[name].tree}" for name in sorted(files) if layout.is_policy(name)]
    return hashlib.sha256("\n".join(weights).encode()).hexdigest()


def model_details(start: Start) -> list[str]:
    """Which of the model's files are not what they were, in words."""
    recorded = (start.existing or {}).get("model")
    if not recorded or not start.model_files:
        return []
    lines = differing_files(recorded["files"], start.model_files)
    if not lines:
        return []
    now = start.config.actor_rollout_ref.model.path
    where = "the same path" if recorded["path"] == now else f"then {recorded['path']}"
    return [f"model {now} ({where}): {'; '.join(lines)}"]


def next_checkpoint_bytes(start: Start) -> int:
    """Size of the newest checkpoint here, else what the model lets expect."""
    for step in reversed(start.run.steps()):
        try:
            return sum(path.stat().st_size for path in start.run.checkpoint(step).rglob("*") if path.is_file())
        except FileNotFoundError:
            # Retired while we look, by whoever trains this run.
            continue
    folder = model_folder(start.config.actor_rollout_ref.model.path, start.run)
    return checkpoint_bytes(folder) if (folder / "config.json").is_file() else 0


def size(num_bytes: int) -> str:
    """Bytes as a person reads them."""
    value, units = float(num_bytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if value >= 10 or units[0] == "bytes" else f"{value:.1f} {units[0]}"


def make_plan(
    config: RunConfig,
    run: RunDir,
    remote: Any,
    existing: Record | None,
    total_steps: int | None,
    passed_over: Sequence[Rejection] = (),
) -> ResumePlan:
    """Where the run goes on; every candidate that is passed over is verified or named.

    Raises:
        CheckpointError: steps exist and none is usable, or the one that was asked for is not.
    """
    asked = config.trainer.resume_from_checkpoint
    return plan(
        run,
        policy=config.resume.policy,
        prefer_multiple=config.resume.prefer_multiple,
        max_rewind_steps=config.resume.max_rewind_steps,
        remote=remote,
        expected_run_id=existing["run_id"] if existing else None,
        only_step=asked_step(run, asked) if asked else None,
        final_step=total_steps,
        passed_over=passed_over,
        without_scheduler=waivers.SCHEDULER in config.resume.allow,
    )


def asked_step(run: RunDir, asked: str) -> int:
    """The step that `trainer.resume_from_checkpoint` names: a good checkpoint of this run, nothing else.

    Raises:
        CheckpointError: with what is wrong with it.
    """
    folder = Path(os.path.realpath(asked))
    if folder == Path(os.path.realpath(run.checkpoints)) or folder == Path(os.path.realpath(run.root)):
        raise CheckpointError(
            f"trainer.resume_from_checkpoint: {asked} holds all checkpoints.",
            f"Name one of them: keepstep ls {run.root}",
        )
    found = verify(folder)
    reason = found.reasons[0] if found.reasons else ""
    if not reason and folder.parent != Path(os.path.realpath(run.checkpoints)):
        reason = f"it is not one of {run.checkpoints}"
    if reason or not found.resumable or found.step is None:
        raise CheckpointError(
            f"trainer.resume_from_checkpoint: {asked} cannot be resumed from: {reason or found.state}.",
            f"See what can: keepstep plan {run.root}",
        )
    return found.step


def check_dataset(config: RunConfig, run: RunDir, existing: Record | None) -> tuple[list[str], list[str], Record]:
    """(train files, validation files, data set record), the rows counted and held against the recorded count.

    Raises:
        DataError: a file is missing, empty, damaged, or not what the run recorded; each difference is named.
    """
    patterns = [config.data.train_files, config.data.val_files or []]
    names = [name for pattern in patterns for name in ([pattern] if isinstance(pattern, str) else pattern)]
    if any(name.startswith(PREFIX) for name in names):
        make_data(run)
    train_files = resolve_files(config.data.train_files, run)
    val_files = resolve_files(config.data.val_files, run) if config.data.val_files else []
    columns = [config.data.prompt_key, config.data.reward_fn_key, REWARD_MODEL]
    counted = count_rows([*train_files, *val_files], columns=columns)
    found = dataset_record.build(counted[: len(train_files)], counted[len(train_files) :])
    if existing is not None:
        differences = dataset_record.compare(existing["dataset"], found, consumed=rows_handed_out(run))
        if differences:
            raise DataError(
                f"The data set is not the one that {run.root} was started with:\n  " + "\n  ".join(differences),
                "Bring the recorded files back, or give this start a trainer.output_dir of its own." + unsaved(run),
            )
    return train_files, val_files, found


def unsaved(run: RunDir) -> str:
    """What a refused start may do as well when nothing would be lost."""
    if run.steps() or verified_steps(run) or uploaded_steps(run):
        return ""
    return f" Nothing was saved yet: {run.root} may as well be deleted."


def check_run_model(config: RunConfig, run: RunDir, existing: Record | None) -> Files:
    """The model's files. A made model that is gone comes from the run's own checkpoints and is not made again: none."""
    name = config.actor_rollout_ref.model.path
    folder = model_folder(name, run)
    if name.startswith(PREFIX) and not (folder / "config.json").is_file():
        if existing is not None:
            return {}
        make_model(name, run)
    refuse_checkpoint(folder, run)
    check_model(name, folder, existing["contract"].get("actor_rollout_ref.model.path", "") if existing else "")
    return model_files(folder)


def make_again(config: RunConfig, run: RunDir, expected: str) -> None:
    """A made model that is gone before anything was saved is made once more, and must be the same.

    Raises:
        ContractError: another machine or library makes another model.
    """
    name = config.actor_rollout_ref.model.path
    found = fingerprint(make_model(name, run))
    if found != expected:
        raise ContractError(
            f"{name} made here is not the model that {run.root} began with (fingerprint {found[:12]}…, recorded "
            f"{expected[:12]}…).",
            "Nothing was saved yet: start in a new trainer.output_dir.",
        )


def check_room(run: RunDir) -> None:
    """Some room must be left where the run goes; the needs of a save are checked at the save."""
    parent = existing_parent(run.root)
    try:
        # Asking for permission is not enough: some filesystems permit everything to root and take nothing.
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        raise ConfigError(
            f"trainer.output_dir: {parent} takes no files: {error.strerror}.", "Give another folder."
        ) from None
    free = shutil.disk_usage(parent).free
    if free < MIN_FREE_BYTES:
        raise NoRoomError(
            f"{parent}: {free // 1024**2} MiB free, at least {MIN_FREE_BYTES // 1024**2} MiB are needed.",
            "Free space or move trainer.output_dir.",
        )


def existing_parent(path: Path) -> Path:
    """The path itself or the nearest folder above it that exists."""
    return next(candidate for candidate in (path, *path.parents) if candidate.exists())


def check_foreign(run: RunDir) -> None:
    """A folder that holds something other than a Keepstep run is refused."""
    if run.has_record() or not run.root.exists():
        return
    # What a start leaves that was killed between its lease and its record.
    ours = {run.attempts.name, run.config.name}
    names = {entry.name for entry in run.root.iterdir()} - ours
    probes = (f".{run.record.name}.", f".{run.config.name}.", ".clock-", ".preflight-")
    strangers = sorted(name for name in names if not name.startswith(probes))
    if strangers:
        raise ContractError(
            f"trainer.output_dir: {run.root} holds {', '.join(strangers[:5])} but no run.json: not a Keepstep run.",
            "Give an empty or new folder, or bring run.json back.",
        )


def open_store(config: RunConfig, run: RunDir) -> servers.ServerInfo | None:
    """The embedded object store, started or reused and held by this process; None when another one is configured."""
    if not config.s3.embedded:
        return None
    return servers.object_store(run.platform, ProcessRef.current("controller"))


def find_record(
    config: RunConfig, run: RunDir, store: servers.ServerInfo | None
) -> tuple[Record | None, Any, list[str]]:
    """(run.json here or in the store, the store's side of the run, notes). Local folders win over the store."""
    local = read_json(run.record) if run.has_record() else None
    if not config.s3_enabled:
        return local, None, []
    from keepstep.storage.remote import open_remote

    try:
        remote = open_remote(config.s3, run, store.env if store else {})
        kept = remote.fetch_record()
    except StorageRefusedError:
        raise
    except StorageError as error:
        if local is None or not run.steps():
            # What the store holds of the run cannot be known: never silently step 0.
            raise
        return local, None, [f"The store does not answer ({error.message}): planning from local checkpoints alone."]
    if local is not None and kept is not None and kept["run_id"] != local["run_id"]:
        raise ContractError(
            f"The store's prefix {remote.prefix} holds run {kept['run_id']}, {run.root} is run {local['run_id']}.",
            "Give s3.prefix of its own, or bring the right folder back.",
        )
    return local or kept, remote, []
