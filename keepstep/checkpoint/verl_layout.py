"""verl's checkpoints, which have no digests: what its FSDP trainers write, and the older form of its guides.

    global_step_N/actor/{model,optim,extra_state}_world_size_W_rank_R.pt   one of each for every rank R < W
                  actor/fsdp_config.json  actor/huggingface/               critic/ has the same form
                  data.pt                                                  the data loader's position
    latest_checkpointed_iteration.txt                                      beside the steps: the newest, a hint

    actor_model/  critic_model/  optimizer/  scheduler/  training_state.json  config.yaml

How many ranks there must be is what the files' names say.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from keepstep.checkpoint import strict_json
from keepstep.checkpoint.files import FileError, read_small
from keepstep.checkpoint.findings import Findings
from keepstep.checkpoint.foreign_file import TENSORS, check_file
from keepstep.checkpoint.pickle_scan import ALLOWED_GLOBALS, REFUSED_OPCODES

TRACKER = "latest_checkpointed_iteration.txt"
DATA = "data.pt"
FSDP_CONFIG = "fsdp_config.json"
KINDS = ("model", "optim", "extra_state")
GUIDE_ACTOR, GUIDE_STATE = "actor_model", "training_state.json"
GUIDE_FOLDERS = ("actor_model", "critic_model", "optimizer", "scheduler")

# What torch and numpy name in sharded state dicts and random states. They are never called here, only told apart from
# everything else; of `getattr` only the one call is let through that `tensor_headers` knows.
GLOBALS = ALLOWED_GLOBALS | {
    "__builtin__ getattr",
    "_codecs encode",
    "collections defaultdict",
    "numpy dtype",
    "numpy ndarray",
    "numpy.core.multiarray _reconstruct",
    "numpy._core.multiarray _reconstruct",
    "numpy.core.multiarray scalar",
    "numpy._core.multiarray scalar",
    "torch Tensor",
    "torch._tensor _rebuild_from_type_v2",
    "torch._utils _rebuild_wrapper_subclass",
    "torch.distributed._mesh_layout _FlatLayout",
    "torch.distributed._mesh_layout _MeshLayout",
    "torch.distributed._shard.metadata ShardMetadata",
    "torch.distributed._shard.sharded_tensor.api ShardedTensor",
    "torch.distributed._shard.sharded_tensor.metadata MEM_FORMAT_ENCODING",
    "torch.distributed._shard.sharded_tensor.metadata ShardedTensorMetadata",
    "torch.distributed._shard.sharded_tensor.metadata TensorProperties",
    "torch.distributed._shard.sharded_tensor.shard Shard",
    "torch.distributed._shard.sharding_spec.api EnumerableShardingSpec",
    "torch.distributed._shard.sharding_spec.chunk_sharding_spec ChunkShardingSpec",
    "torch.distributed.device_mesh DeviceMesh",
    "torch.distributed.remote_device _remote_device",
    *(f"{package} {name}" for package in ("torch.distributed._tensor.api", "torch.distributed.tensor")
      for name in ("DTensor",)),
    *(f"{package} {name}" for package in ("torch.distributed._tensor.placement_types",
                                          "torch.distributed.tensor.placement_types",
                                          "torch.distributed.tensor._dtensor_spec")
      for name in ("DTensorSpec", "Partial", "Replicate", "Shard", "ShardOrderEntry", "TensorMeta", "_StridedShard")),
}  # fmt: skip
REFUSED = REFUSED_OPCODES - {"NEWOBJ"}

_RANK_FILE = re.compile(
    r"(?:(?P<role>[^/]+)/)?(?P<kind>[a-z_]+)_world_size_(?P<world>[1-9]\d{0,6})_rank_(?P<rank>0|[1-9]\d{0,6})\.pt"
)
_STEP = re.compile(r"global_steps?_(0|[1-9]\d*)")
_SFT_DATA = re.compile(r"data_\d+\.pt")


@dataclass
class _Role:
    """Rank files of one folder."""

    folder: str
    world_sizes: set[int] = field(default_factory=set)
    ranks: dict[str, set[int]] = field(default_factory=dict)
    """Ranks by kind."""


def parse_step(name: str) -> int | None:
    """The step of a folder that verl named, else None."""
    match = _STEP.fullmatch(name)
    return int(match.group(1)) if match else None


def is_fsdp(present: set[str]) -> bool:
    return any((match := _RANK_FILE.fullmatch(name)) and match["kind"] in KINDS for name in present)


def is_guide(present: set[str]) -> bool:
    return GUIDE_STATE in present or any(name.startswith(f"{GUIDE_ACTOR}/") for name in present)


def check_fsdp(folder: Path, present: set[str], quick: bool, found: Findings) -> int | None:
    """A step of verl's FSDP trainers; the step that its name says."""
    roles = _roles(present)
    for role in roles.values():
        _check_ranks(folder, role, present, found)
    _check_contents(folder, present, quick, found)
    if DATA not in present and not any(_SFT_DATA.fullmatch(name) for name in present):
        found.missing.append(f"{DATA}: missing: nothing says which row comes next")
    step = parse_step(folder.name)
    if step is None and "" in roles:
        step = parse_step(folder.parent.name)
    _say(folder, roles, step, quick, found)
    return step


def check_guide(folder: Path, present: set[str], quick: bool, found: Findings) -> int | None:
    """The form of verl's guides; the step that its state says."""
    for name in GUIDE_FOLDERS:
        inside = [other for other in present if other.startswith(f"{name}/")]
        if any(PurePosixPath(other).suffix in TENSORS for other in inside):
            continue
        if name == GUIDE_ACTOR:
            found.reject(name, "holds no weights")
        elif inside:
            found.reject(name, "holds no tensors")
        elif name != "critic_model":
            found.missing.append(f"{name}: missing")
    for role in _roles(present).values():
        _check_ranks(folder, role, present, found)
    _check_contents(folder, present, quick, found)
    if GUIDE_STATE not in present:
        found.missing.append(f"{GUIDE_STATE}: missing: nothing says which step this is")
        return None
    found.notes.append(f"the older layout of verl's guides, without digests; {_content(quick)}")
    return None if GUIDE_STATE in found.named else _guide_step(folder, found)


def _roles(present: set[str]) -> dict[str, _Role]:
    roles: dict[str, _Role] = {}
    for match in filter(None, map(_RANK_FILE.fullmatch, present)):
        role = roles.setdefault(match["role"] or "", _Role(match["role"] or ""))
        role.world_sizes.add(int(match["world"]))
        role.ranks.setdefault(match["kind"], set()).add(int(match["rank"]))
    return roles


def _check_ranks(folder: Path, role: _Role, present: set[str], found: Findings) -> None:
    """Every rank of every kind is there, of one world size; a kind that is not there at all was not saved."""
    if len(role.world_sizes) > 1:
        sizes = " and ".join(map(str, sorted(role.world_sizes)))
        found.reject(role.folder or ".", f"holds files of world sizes {sizes}: two saves in one folder")
        return
    (world_size,) = role.world_sizes
    for kind, ranks in sorted(role.ranks.items()):
        absent = world_size - len({rank for rank in ranks if rank < world_size})
        first = itertools.islice((rank for rank in range(world_size) if rank not in ranks), min(absent, 5))
        for rank in first:
            found.reject(_rank_file(role, kind, world_size, rank), f"missing, one of {absent} of {world_size} ranks")
        for rank in sorted(rank for rank in ranks if rank >= world_size):
            found.reject(_rank_file(role, kind, world_size, rank), f"a rank beyond its world size {world_size}")
    if not role.ranks.keys() & set(KINDS):
        return
    for kind in KINDS:
        if kind not in role.ranks:
            name = _rank_file(role, kind, world_size, 0)
            if kind == "model":
                found.reject(name, "missing: there are no weights")
            else:
                found.missing.append(f"{name}: missing: {kind} was not saved")
    _check_fsdp_config(folder, role, world_size, present, found)


def _check_fsdp_config(folder: Path, role: _Role, world_size: int, present: set[str], found: Findings) -> None:
    """It is only an echo: releases without it write whole checkpoints."""
    name = str(PurePosixPath(role.folder) / FSDP_CONFIG)
    if name not in present:
        return
    try:
        value = strict_json.load(folder / name)
    except strict_json.StrictJsonError:
        return  # noted where every file is looked at
    named = value.get("world_size") if isinstance(value, dict) else None
    if named != world_size:
        found.reject(name, f"world_size {str(named)[:40]}, the rank files are of {world_size}")


def _check_contents(folder: Path, present: set[str], quick: bool, found: Findings) -> None:
    for name in sorted(present):
        archive = check_file(folder, name, present, quick, found, GLOBALS, REFUSED)
        # torch.save names an archive after its file, so a file that was renamed shows.
        stem = PurePosixPath(name).stem
        if archive is not None and _RANK_FILE.fullmatch(name) and archive.name not in (stem, "archive"):
            found.reject(name, f"was saved as {archive.name}")


def _rank_file(role: _Role, kind: str, world_size: int, rank: int) -> str:
    return str(PurePosixPath(role.folder) / f"{kind}_world_size_{world_size}_rank_{rank}.pt")


def _say(folder: Path, roles: dict[str, _Role], step: int | None, quick: bool, found: Findings) -> None:
    for role in sorted(roles.values(), key=lambda role: role.folder):
        found.notes.append(
            f"{role.folder or 'folder'}: verl's FSDP layout, {max(role.world_sizes)} ranks of "
            f"{', '.join(sorted(role.ranks))}, without digests; {_content(quick)}"
        )
    try:
        tracked = read_small(folder.parent / TRACKER, 64).decode("ascii", "replace").strip()
    except FileError:
        return
    if step is not None and tracked != str(step):
        found.notes.append(f"{TRACKER} beside it names {tracked!r}")


def _content(quick: bool) -> str:
    if quick:
        return "the content was not read"
    return "the content was held against the archives' own CRC-32, which sees damage and no forgery"


def _guide_step(folder: Path, found: Findings) -> int | None:
    state = strict_json.load(folder / GUIDE_STATE)
    names = ("global_step", "global_steps", "step")
    for step in (state.get(name) for name in names if isinstance(state, dict)):
        if type(step) is int and step >= 0:
            return step
    found.reject(GUIDE_STATE, f"has no step under any of {', '.join(names)}")
    return None
