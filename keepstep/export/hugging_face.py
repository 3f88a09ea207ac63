"""A checkpoint as a Hugging Face folder: weights, config, tokenizer, model card; checked by loading it. Imports torch.

Memory: the largest tensor, whatever the model's size; only the last check, that transformers loads it, takes as much as
the model, and is left out where there is no room for that.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml

from keepstep.checkpoint import layout
from keepstep.checkpoint.safetensors_headers import SafetensorsFile
from keepstep.checkpoint.verify import Verdict, verify
from keepstep.errors import CheckpointError, ConfigError, NoRoomError
from keepstep.export import safetensors_stream
from keepstep.export.adapters import merged
from keepstep.export.card import model_card
from keepstep.export.model import Expected, expected
from keepstep.export.origin import RECORD, identity
from keepstep.export.tensors import FileTensors
from keepstep.export.weights import Policy, Weights, open_policy
from keepstep.quickstart.make import made_path
from keepstep.run import RunDir, fsync_dir, fsync_tree, read_json, write_json

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SAFETENSORS, PYTORCH = "safetensors", "pytorch"
PYTORCH_FILE = "pytorch_model.bin"
INDEX = "model.safetensors.index.json"
GENERATION_CONFIG = "generation_config.json"
MAX_FILE_BYTES = 5_000_000_000
"""A larger model stands in several files with an index, as on the Hugging Face hub."""
LOAD_ROOM = 1.5
"""Free memory that loading asks for, against the size of the weights."""


def export(
    checkpoint: Path,
    target: Path,
    dtype: str = "float32",
    file_format: str = SAFETENSORS,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> dict[str, Any]:
    """Write `target`, whole or not at all, and load it back.

    Args:
        checkpoint: of layout `full` or `sharded`, or verl's `global_step_N` of its FSDP trainers.
        file_format: `safetensors`, or `pytorch` for one pytorch_model.bin, which takes as much memory as the model.

    Returns:
        {"path", "step", "num_tensors", "num_parameters", "num_bytes", "dtype", "files", "loaded", "base"}.

    Raises:
        CheckpointError: the checkpoint does not verify or is not its config's model, or what was written does not load.
        ConfigError: the target exists.
        NoRoomError: the filesystem has no room for it.
    """
    verdict = verify(checkpoint)
    if not verdict.exportable:
        raise CheckpointError(f"{checkpoint} is not exported: {verdict.reasons[0]}", "Take a checkpoint that verifies.")
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists.", "Name a folder that does not.")
    base = base_folder(checkpoint)
    policy = whole_policy(checkpoint)
    model = expected(policy.model_files)
    tensors = FileTensors(policy.weights, model, DTYPES[dtype], str(checkpoint))
    compared = compare_with_base(tensors, model, base) if base else None
    _check_room(target.parent, num_bytes(tensors))
    with _whole_or_not(target) as temporary:
        _write_model_files(temporary, policy.model_files, base, dtype)
        _write_origin(temporary, checkpoint, verdict, dtype)
        files = _write_weights(temporary, tensors, file_format, max_file_bytes)
        fsync_tree(temporary)
        loaded = check(temporary, tensors, files)
    return {
        "path": str(target),
        "step": verdict.step,
        "num_tensors": len(tensors.specs),
        "num_parameters": sum(torch.Size(shape).numel() for _, shape in tensors.specs.values()),
        "num_bytes": num_bytes(tensors),
        "dtype": dtype,
        "files": sorted(files),
        "loaded": loaded,
        "base": compared,
    }


def export_weights(weights: Weights, model_files: Path, target: Path, dtype: str = "float32") -> None:
    """A policy that is in no checkpoint, whole or not at all, and loaded back.

    Args:
        model_files: folder of its config and tokenizer.

    Raises:
        CheckpointError: it is not the config's model, or what was written does not load.
        ConfigError: the target exists.
    """
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists.", "Name a folder that does not.")
    tensors = FileTensors(weights, expected(model_files), DTYPES[dtype], "the policy")
    with _whole_or_not(target) as temporary:
        _write_model_files(temporary, model_files, None, dtype)
        check(temporary, tensors, _write_weights(temporary, tensors, SAFETENSORS, MAX_FILE_BYTES))


def check_exportable(checkpoint: Path) -> None:
    """Whether an export of this checkpoint would load: its names and shapes against its own config, without weights.

    Raises:
        CheckpointError: a tensor is missing, unexpected or of another shape.
    """
    policy = whole_policy(checkpoint)
    FileTensors(policy.weights, expected(policy.model_files), torch.float32, str(checkpoint))


def check(folder: Path, tensors: FileTensors, files: Mapping[str, list[str]]) -> bool:
    """Read every tensor back, then have transformers load the folder, offline.

    Returns:
        Whether it was loaded; not where the memory is too small for the model.

    Raises:
        CheckpointError: a tensor is missing, unexpected or different, or the tokenizer does not load.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    _check_content(folder, tensors, files)
    logging.disable_progress_bar()
    fits = LOAD_ROOM * num_bytes(tensors) < _free_memory()
    loaded: Any = (None, {})
    try:
        if fits:
            loaded = AutoModelForCausalLM.from_pretrained(
                folder, dtype="auto", local_files_only=True, trust_remote_code=False, output_loading_info=True
            )
        if _has_tokenizer(folder):
            AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise CheckpointError(f"{folder} does not load: {type(error).__name__}: {error}") from error
    model, info = loaded
    wrong = [f"{kind}: {', '.join(map(str, list(found)[:5]))}" for kind, found in info.items() if found]
    if fits:
        wrong += [f"different: {name}" for name in tensors.differing(dict(model.named_parameters()))[:5]]
    if wrong:
        raise CheckpointError(f"{folder} does not load to the same tensors: {'; '.join(wrong)}.")
    return fits


def num_bytes(tensors: FileTensors) -> int:
    return sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in tensors.specs.values())


def base_folder(checkpoint: Path) -> Path | None:
    """The model that the run began with, where it still is; None: it is not, or is not known."""
    config = _config(checkpoint)
    try:
        path = made_path(config["actor_rollout_ref"]["model"]["path"], RunDir.at(config["trainer"]["output_dir"]))
    except (KeyError, TypeError):
        return None
    return path if any(path.glob("*.safetensors")) else None


def compare_with_base(tensors: FileTensors, model: Expected, base: Path) -> dict[str, Any]:
    """Names and shapes against the files of the base model.

    Returns:
        {"num_tensors", "num_bytes", "dtypes", "unused"}: of the base; `unused` are those that its model class ignores.

    Raises:
        CheckpointError: the base lacks one, or has it in another shape.
    """
    stored: dict[str, Any] = {}
    for path in sorted(base.glob("*.safetensors")):
        with path.open("rb") as file:
            stored |= SafetensorsFile(file).shards
    own = {model.aliases.get(name, name): shard for name, shard in stored.items()}
    shapes = {name: shape for name, (_, shape) in tensors.specs.items()}
    wrong = [name for name, shape in shapes.items() if name not in own or own[name].shape != shape]
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} of {len(shapes)} tensors are not those of the base model {base}: {', '.join(wrong[:5])}.",
            "Is it the model that this run began with?",
        )
    return {
        "num_tensors": len(own),
        "num_bytes": sum(torch.Size(one.shape).numel() * getattr(torch, one.dtype).itemsize for one in own.values()),
        "dtypes": sorted({shard.dtype for shard in own.values()}),
        "unused": sorted(own.keys() - shapes.keys()),
    }


def whole_policy(checkpoint: Path) -> Policy:
    """The policy of a verified checkpoint; adapters with their base.

    Raises:
        CheckpointError: it has no weights that can be read, or no config, or its adapters have lost their base.
    """
    model = _config(checkpoint).get("actor_rollout_ref", {}).get("model", {})
    return merged(open_policy(checkpoint), base_folder(checkpoint), model, checkpoint)


@contextmanager
def _whole_or_not(target: Path) -> Iterator[Path]:
    """A hidden folder that becomes `target` when the block succeeds, and vanishes when it does not."""
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        yield temporary
        os.rename(temporary, target)
        fsync_dir(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_model_files(folder: Path, model_files: Path, base: Path | None, dtype: str) -> None:
    """Config, tokenizer, generation config."""
    for path in sorted(model_files.iterdir()):
        # An index of the base's files would name files that are not here.
        if path.suffix in (".json", ".jinja", ".txt", ".model") and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)
    if base and not (folder / GENERATION_CONFIG).exists() and (base / GENERATION_CONFIG).is_file():
        shutil.copyfile(base / GENERATION_CONFIG, folder / GENERATION_CONFIG)
    config = read_json(folder / "config.json")
    # Code that is not here must not be asked for, and transformers knows the model without it.
    for key in ("torch_dtype", "auto_map"):
        config.pop(key, None)
    write_json(folder / "config.json", config | {"dtype": dtype})


def _write_origin(folder: Path, checkpoint: Path, verdict: Verdict, dtype: str) -> None:
    """Where it comes from, for programs and as a model card."""
    manifest = verdict.manifest
    origin = {
        "run_id": manifest.run_id if manifest else None,
        "attempt": manifest.attempt if manifest else None,
        "step": verdict.step,
        "checkpoint": identity(checkpoint),
        "dtype": dtype,
    }
    write_json(folder / RECORD, origin)
    metrics = manifest.metrics if manifest else {}
    (folder / "README.md").write_text(model_card(origin, _config(checkpoint), metrics), encoding="utf-8")


def _write_weights(folder: Path, tensors: FileTensors, file_format: str, max_file_bytes: int) -> dict[str, list[str]]:
    """The names in each file that was written."""
    if file_format == PYTORCH:
        torch.save({name: tensors.read(name).clone() for name in tensors.specs}, folder / PYTORCH_FILE)
        return {PYTORCH_FILE: list(tensors.specs)}
    from huggingface_hub import split_torch_state_dict_into_shards

    empty = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in tensors.specs.items()}
    split = split_torch_state_dict_into_shards(empty, max_shard_size=max_file_bytes)
    for name, names in split.filename_to_tensors.items():
        safetensors_stream.write(folder / name, {tensor: tensors.specs[tensor] for tensor in names}, tensors.read)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return split.filename_to_tensors


def _check_content(folder: Path, tensors: FileTensors, files: Mapping[str, list[str]]) -> None:
    from safetensors import safe_open

    for file_name, names in files.items():
        if file_name == PYTORCH_FILE:
            found = torch.load(folder / file_name, weights_only=True, mmap=True)
            wrong = [name for name in names if not torch.equal(found[name], tensors.read(name))]
        else:
            with safe_open(folder / file_name, framework="pt") as file:
                wrong = [name for name in names if not torch.equal(file.get_tensor(name), tensors.read(name))]
        if wrong:
            raise CheckpointError(f"{folder / file_name} does not hold what was written: {', '.join(wrong[:5])}.")


def _check_room(folder: Path, wanted: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < wanted:
        raise NoRoomError(f"{folder}: the export needs {wanted:,} bytes, {free:,} are free.", "Name another folder.")


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def _config(checkpoint: Path) -> dict[str, Any]:
    """The run's configuration as the checkpoint has it; empty: it has none."""
    try:
        found = yaml.safe_load((checkpoint / layout.CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _free_memory() -> int:
    """Bytes of memory that can be had without swapping."""
    text = Path("/proc/meminfo").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("MemAvailable:")) * 1024
