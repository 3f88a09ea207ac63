"""Everything that is checked before a run is touched. A refused start writes nothing into the run.

`STEPS` are the checks in their order; each leaves in `Start` what the next ones need. `prepare` stops at the first that
fails; `preflight.checks` goes on and tells of all. The lease comes after, in the trainer.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepstep.checkpoint.history import rows_handed_out, uploaded_steps, verified_steps
from keepstep.checkpoint.plan import ResumePlan
from keepstep.config.load import given_keys, resolve_total_steps, validate
from keepstep.config.schema import RunConfig
from keepstep.data import record as dataset_record
from keepstep.data.count import count_rows
from keepstep.data.loader import REWARD_MODEL
from keepstep.data.spec import resolve_files
from keepstep.errors import (
    ConfigError,
    ContractError,
    DataError,
    StorageError,
    StorageRefusedError,
)
from keepstep.platform import servers
from keepstep.preflight import contract
from keepstep.preflight.device import check_device
from keepstep.preflight.folder import check_foreign, check_room, existing_parent, next_checkpoint_bytes, size
from keepstep.preflight.model import (
    Files,
    check_model,
    check_tensor_parallel,
    differing_files,
    fingerprint,
    fingerprint_of,
    model_files,
    model_folder,
    refuse_checkpoint,
)
from keepstep.preflight.resume import make_plan
from keepstep.preflight.sizes import grpo_settings, parallel_sizes
from keepstep.preflight.warm_start import check_init_from, find_init_from, weights_fingerprint
from keepstep.processes import ProcessRef
from keepstep.quickstart.make import PREFIX, make_data, make_model
from keepstep.rewards.load import load_reward
from keepstep.run import RunDir, read_json
from keepstep.waivers import is_further

Record = dict[str, Any]
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
    check_device(start.config)
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
        init_from_fingerprint=weights_fingerprint(start.config, start.init_from, start.existing),
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
    model = model_folder(start.config.actor_rollout_ref.model.path, start.run)
    needed = int(ROOM_FACTOR * next_checkpoint_bytes(start.run, model))
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
    check_tensor_parallel(config.actor_rollout_ref.rollout.tensor_model_parallel_size, folder)
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


def open_store(config: RunConfig, run: RunDir) -> servers.ServerInfo | None:
    """The embedded object store, started or reused and held by this process; None when another one is configured."""
    if not config.s3.embedded:
        return None
    return servers.object_store(run.platform, ProcessRef.current("controller"))


def find_record(
    config: RunConfig, run: RunDir, store: servers.ServerInfo | None
) -> tuple[Record | None, Any, list[str]]:
    """(run.json, the store's side of the run, notes). A record here wins over the store's, unless that is further."""
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
    if local is not None and kept is not None and is_further(kept, local):
        what = ", ".join(field for waiver in kept["waivers"][len(local["waivers"]) :] for field in waiver["fields"])
        note = f"Another machine has gone on with this run and has changed {what}: its record counts from now on."
        return kept, remote, [note]
    return local or kept, remote, []
