"""Names inside a checkpoint folder.

`full`: one file per role. `sharded`: per role a folder with one safetensors file per rank, named as
torch.distributed.checkpoint's `HuggingFaceStorageWriter` names them; loads on any number of ranks. All else is equal.
"""

from __future__ import annotations

import re

FULL, SHARDED = "full", "sharded"
LAYOUT_VERSION = 1

ACTOR = "actor/pytorch_model.bin"
OPTIMIZER = "actor/optimizer.pt"
SCHEDULER = "actor/scheduler.pt"
REF = "ref/pytorch_model.bin"

ACTOR_SHARDS = "actor/model"
OPTIMIZER_SHARDS = "actor/optimizer"
REF_SHARDS = "ref/model"
PARAM_GROUPS = "actor/param_groups.json"
"""Sharded only: the optimizer's hyper-parameters, which `full` keeps in OPTIMIZER."""

TRAINER_STATE = "trainer_state.json"
MANIFEST = "manifest.json"
CONFIG = "config.yaml"
TOKENIZER_DIR = "tokenizer"
ENGINE_STATE = "rollout/engine_state.json"
ROLLOUT_DIR = "rollout"
REF_DIR = "ref"

TENSOR_FILES = (ACTOR, OPTIMIZER, SCHEDULER, REF)
SHARD_DIRS = (ACTOR_SHARDS, OPTIMIZER_SHARDS, REF_SHARDS)

_SHARD = re.compile(r"shard-\d{5,}-model-00001-of-00001\.safetensors")


def required_files(has_reference: bool = True) -> tuple[str, ...]:
    """Files of layout `full` without which a checkpoint cannot be resumed from."""
    return (ACTOR, OPTIMIZER, SCHEDULER, *((REF,) if has_reference else ()), TRAINER_STATE)


def shard_dirs(has_reference: bool = True) -> tuple[str, ...]:
    """Folders of layout `sharded` that hold one file per rank."""
    return SHARD_DIRS if has_reference else SHARD_DIRS[:2]


def shard_dir(name: str) -> str | None:
    """The shard folder that a file belongs to, None for any other file."""
    folder, _, file = name.rpartition("/")
    return folder if folder in SHARD_DIRS and _SHARD.fullmatch(file) else None


def is_optional(name: str) -> bool:
    """Whether a file of a checkpoint is informative: it may be deleted, and the checkpoint is as good without it."""
    return name.startswith(f"{ROLLOUT_DIR}/")


def is_policy(name: str) -> bool:
    """Whether this file holds weights of the policy, in either layout."""
    return name == ACTOR or shard_dir(name) == ACTOR_SHARDS


def holds_tensors(name: str) -> bool:
    """Whether the manifest lists this file's tensors."""
    return name in TENSOR_FILES or shard_dir(name) is not None
