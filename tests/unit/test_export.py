"""Exports: any layout to a Hugging Face folder that is the policy, in the base model's own form."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from keepstep.checkpoint import layout
from keepstep.checkpoint.safetensors_headers import SafetensorsFile
from keepstep.cli.export_command import default_target, described
from keepstep.errors import CheckpointError, ConfigError, NoRoomError
from keepstep.export import hugging_face, safetensors_stream
from keepstep.export.card import model_card
from keepstep.export.hugging_face import check_exportable, export
from keepstep.export.names import NamesError, adapter, match
from keepstep.export.weights import Held, RoleWeights, _joined
from tests.unit import export_builder as build

VERL = Path(__file__).parents[1] / "data" / "verl"
TOKENS = torch.arange(24).view(2, 12) % 60 + 3


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build.write_base(tmp_path_factory.mktemp("base") / "Tiny-Qwen3", build.tiny_model(seed=1))


@pytest.fixture(scope="module")
def policy() -> Any:
    return build.tiny_model(seed=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, base: Path, policy: Any) -> Path:
    return build.write_checkpoint(tmp_path_factory.mktemp("full"), policy, base)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    target = tmp_path_factory.mktemp("exported") / "step_20"
    export(checkpoint, target)
    return target


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True).eval()


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


# ---- what is exported is the policy ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [layout.FULL, layout.SHARDED])
def test_the_export_of_either_layout_computes_what_the_policy_computes(
    tmp_path: Path, base: Path, policy: Any, kind: str
):
    checkpoint = build.write_checkpoint(tmp_path, policy, base, layout=kind)
    report = export(checkpoint, tmp_path / "out")
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(policy))
    assert (report["step"], report["loaded"], report["dtype"]) == (20, True, "float32")
    assert report["num_parameters"] == sum(parameter.numel() for parameter in policy.parameters())


def test_tied_weights_stand_once_and_stay_tied(exported: Path, policy: Any):
    """C173: a second copy of the head would be saved with values of its own, and the tie dropped."""
    assert policy.config.tie_word_embeddings
    assert "lm_head.weight" not in tensors_in(exported)
    model = loaded(exported)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_an_untied_head_is_exported_with_its_own_values(tmp_path: Path):
    model = build.tiny_model(tied=False)
    checkpoint = build.write_checkpoint(tmp_path, model, build.write_base(tmp_path / "base", model))
    export(checkpoint, tmp_path / "out")
    assert torch.equal(tensors_in(tmp_path / "out")["lm_head.weight"], model.lm_head.weight)


def test_names_shapes_and_bytes_are_those_of_the_base(exported: Path, base: Path, checkpoint: Path):
    """C176, C182: an export that is too small or has other keys raised no error."""
    shapes = {name: (value.dtype, value.shape) for name, value in tensors_in(base).items()}
    assert {name: (value.dtype, value.shape) for name, value in tensors_in(exported).items()} == shapes
    sizes = [sum(v.numel() * v.itemsize for v in tensors_in(folder).values()) for folder in (exported, base)]
    assert sizes[0] == sizes[1]
    record = json.loads((exported / "keepstep_export.json").read_text())
    assert record["checkpoint"] == json.loads((checkpoint / layout.MANIFEST).read_text())["self"]


def test_size_and_precision_of_the_base_are_told(tmp_path: Path, checkpoint: Path, base: Path):
    """C176: half of the base's bytes are an export in half of its precision, or half of a model."""
    report = export(checkpoint, tmp_path / "out", "bfloat16")
    wanted = tensors_in(base)
    assert report["base"] == {
        "num_tensors": len(wanted), "num_bytes": 4 * sum(value.numel() for value in wanted.values()),
        "dtypes": ["float32"], "unused": [],
    }  # fmt: skip
    assert 2 * report["num_bytes"] == report["base"]["num_bytes"]


def test_a_base_that_is_another_model_is_refused_by_the_tensor(tmp_path: Path, policy: Any):
    """C176: the comparison with the base can fail."""
    other = build.write_base(tmp_path / "base", build.tiny_model(seed=1, intermediate_size=32))
    checkpoint = build.write_checkpoint(tmp_path, policy, build.write_base(tmp_path / "right", policy))
    config = (checkpoint / layout.CONFIG).read_text().replace(str(tmp_path / "right"), str(other))
    with pytest.raises(CheckpointError, match=r"6 of 24 tensors .*model\.layers\.0\.mlp\.gate_proj\.weight"):
        compare(checkpoint, config)
    assert not (tmp_path / "out").exists()


def compare(checkpoint: Path, config: str) -> None:
    """Only the comparison: a changed config.yaml makes the checkpoint itself a damaged one."""
    opened = hugging_face.open_policy(checkpoint)
    model = hugging_face.expected(opened.model_files)
    tensors = hugging_face.FileTensors(opened.weights, model, torch.float32, str(checkpoint))
    (checkpoint / layout.CONFIG).write_text(config)
    base = hugging_face.base_folder(checkpoint)
    assert base is not None
    hugging_face.compare_with_base(tensors, model, base)


def test_a_mixture_of_experts_gets_the_names_of_its_base(tmp_path: Path):
    """C176, C182: transformers holds the experts as one tensor, files have one for each."""
    model = build.tiny_mixture()
    base = build.write_base(tmp_path / "base", model)
    export(build.write_checkpoint(tmp_path, model, base), tmp_path / "out")
    found, wanted = tensors_in(tmp_path / "out"), tensors_in(base)
    assert found.keys() == wanted.keys() and len(wanted) == 24
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(model))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_smaller_precision_rounds_every_tensor_once(tmp_path: Path, checkpoint: Path, policy: Any, dtype: str):
    report = export(checkpoint, tmp_path / "out", dtype)
    rounded = {name: value.to(getattr(torch, dtype)) for name, value in policy.named_parameters()}
    found = tensors_in(tmp_path / "out")
    assert found.keys() == rounded.keys()
    assert all(torch.equal(found[name], value) for name, value in rounded.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype
    assert loaded(tmp_path / "out").dtype == getattr(torch, dtype)
    assert report["num_bytes"] == 2 * report["num_parameters"]


def test_a_large_model_stands_in_several_files_with_an_index(tmp_path: Path, checkpoint: Path, policy: Any):
    report = export(checkpoint, tmp_path / "out", max_file_bytes=10_000)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and report["files"] == files
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    inside = {name: path.name for path in (tmp_path / "out").glob("*.safetensors") for name in load_file(path)}
    assert index["weight_map"] == inside
    assert index["metadata"]["total_size"] == report["num_bytes"]
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(policy))


def test_pytorch_model_bin_on_request(tmp_path: Path, checkpoint: Path, policy: Any):
    report = export(checkpoint, tmp_path / "out", file_format="pytorch")
    assert report["files"] == ["pytorch_model.bin"] and not list((tmp_path / "out").glob("*.safetensors"))
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(policy))


# ---- what lies beside the weights --------------------------------------------------------------------------------


def test_the_generation_config_is_the_bases(exported: Path):
    """C179, C187: a default one made evaluations differ."""
    assert (exported / "generation_config.json").read_text() == build.GENERATION


def test_a_generation_config_that_the_checkpoint_lacks_is_taken_from_the_base(tmp_path: Path, policy: Any):
    """C187."""
    base = build.write_base(tmp_path / "base", policy, generation=None)
    checkpoint = build.write_checkpoint(tmp_path, policy, base)
    export(checkpoint, tmp_path / "without")
    assert not (tmp_path / "without" / "generation_config.json").exists()
    (base / "generation_config.json").write_text(build.GENERATION)
    export(checkpoint, tmp_path / "with")
    assert (tmp_path / "with" / "generation_config.json").read_text() == build.GENERATION


def test_tokenizer_and_chat_template_come_along(exported: Path, base: Path):
    from transformers import AutoTokenizer

    tokenizer, original = (AutoTokenizer.from_pretrained(folder, local_files_only=True) for folder in (exported, base))
    assert tokenizer.chat_template == build.CHAT_TEMPLATE
    assert tokenizer("1+2=")["input_ids"] == original("1+2=")["input_ids"]


def test_code_of_others_is_not_asked_for_in_a_clean_environment(tmp_path: Path, policy: Any):
    """C181: a config that names remote code of another class; nothing of it is here, and nothing can be fetched."""
    base = build.write_base(tmp_path / "base", policy)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModelForCausalLM": "modeling_x.Other"}}))
    (base / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    export(build.write_checkpoint(tmp_path, policy, base), tmp_path / "out")
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists(), "it names files that are not here"
    script = (
        "import sys; from transformers import AutoModelForCausalLM as A, AutoTokenizer as T;"
        "print(type(A.from_pretrained(sys.argv[1])).__name__, len(T.from_pretrained(sys.argv[1])))"
    )
    environment = {"HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "out")],
        capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert done.stdout.split()[:1] == ["Qwen3ForCausalLM"], done.stderr[-2000:]


def test_without_a_target_it_lies_in_the_run_or_beside_the_checkpoint():
    assert default_target(Path("/runs/a/checkpoints/step_20")) == Path("/runs/a/export/step_20")
    assert default_target(Path("/verl/global_step_4")) == Path("/verl/export/global_step_4")


def test_the_model_card_names_run_step_and_settings(exported: Path):
    text = (exported / "README.md").read_text()
    assert text.startswith("---\nbase_model: Tiny-Qwen3\nlibrary_name: transformers\n")
    for line in (
        "# mine, step 20",
        "| run_id | run-a |",
        "| actor_rollout_ref.rollout.n | 8 |",
        "| trainer.seed | 42 |",
    ):
        assert line in text.splitlines()


def test_a_card_tells_no_more_than_is_known():
    origin = {"run_id": None, "attempt": None, "step": None, "checkpoint": None, "dtype": "float32"}
    text = model_card(origin, {}, {})
    assert "another trainer" in text and "Trained with GRPO" not in text and "None" not in text


# ---- verl's rank files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("part", [".", "actor"])
def test_verls_shards_are_joined(tmp_path: Path, kind: str, part: str):
    """The whole tensors by another way: the ranks' parts behind each other, along the rows that FSDP cuts."""
    folder = VERL / kind / "global_step_4"
    report = export(folder / part, tmp_path / "out")
    ranks = [
        torch.load(folder / "actor" / f"model_world_size_2_rank_{rank}.pt", weights_only=False, map_location="cpu")
        for rank in range(2)
    ]
    found = tensors_in(tmp_path / "out")
    assert found.keys() == ranks[0].keys() and report["step"] == 4
    for name, value in found.items():
        assert torch.equal(value, torch.cat([rank[name].to_local() for rank in ranks])[: value.shape[0]]), name


def test_an_older_checkpoint_of_verl_needs_no_fsdp_config(tmp_path: Path):
    """C178: how many ranks there are is what the files are called; the model's files lay beside them."""
    actor = tmp_path / "global_step_4" / "actor"
    shutil.copytree(VERL / "fsdp2" / "global_step_4", actor.parent)
    (actor / "fsdp_config.json").unlink()
    (actor / "huggingface" / "config.json").rename(actor / "config.json")
    report = export(actor.parent, tmp_path / "out")
    assert (report["num_tensors"], report["step"]) == (14, 4)
    (actor / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no actor/huggingface/config\.json"):
        export(actor.parent, tmp_path / "again")


class Part:
    """What `_joined` asks of a DTensor."""

    def __init__(self, local: list[float], placements: tuple[Any, ...], mesh: list[Any]) -> None:
        self._local = torch.tensor(local)
        self.placements = placements
        self.device_mesh = type("Mesh", (), {"mesh": torch.tensor(mesh)})()

    def to_local(self) -> torch.Tensor:
        return self._local


def test_replicas_of_a_hybrid_mesh_are_taken_once_and_in_the_meshs_order():
    from torch.distributed.tensor import Partial, Replicate, Shard

    mesh = [[2, 0], [3, 1]]
    placed = (Replicate(), Shard(0))
    parts = [Part([10.0 + rank], placed, mesh) for rank in range(4)]
    assert _joined(parts, "x").tolist() == [12.0, 10.0]
    with pytest.raises(CheckpointError, match=r"x is placed as .* not understood"):
        _joined([Part([0.0], (Partial(),), [0])], "x")
    with pytest.raises(CheckpointError, match="not understood"):
        _joined([Part([0.0], (Shard(0), Shard(1)), mesh)] * 4, "x")


# ---- names ---------------------------------------------------------------------------------------------------------

NAMES = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight")
TIED = {"lm_head.weight": "model.embed_tokens.weight"}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda name: name,
        lambda name: f"model.{name}",
        lambda name: f"module.{name}",
        lambda name: f"_fsdp_wrapped_module.{name}",
        lambda name: name.replace("layers.0.", "layers.0._fsdp_wrapped_module.").replace("mlp.", "mlp._orig_mod."),
        lambda name: name.removeprefix("model."),
    ],
    ids=["plain", "model.", "module.", "fsdp", "inside", "without model."],
)
def test_names_of_wrapped_models_are_normalised(wrap: Callable[[str], str]):
    """C185."""
    stored = [wrap(name) for name in NAMES]
    assert match(stored, NAMES, TIED) == {name: [wrap(name)] for name in NAMES}


def test_a_tied_tensor_may_stand_under_either_name():
    first, *rest = NAMES
    assert match(["lm_head.weight", *rest], NAMES, TIED)[first] == ["lm_head.weight"]
    assert match(["lm_head.weight", *NAMES], NAMES, TIED)[first] == ["lm_head.weight", first]


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (NAMES[:2], "2 of 3 .* missing: model.norm.weight; not the model's: none"),
        ((*NAMES, "critic.weight"), "not the model's: critic.weight"),
        ((*NAMES, "_orig_mod.model.norm.weight"), "model.norm.weight stands there 2 times"),
    ],
)
def test_names_that_are_not_the_models_are_told(stored: tuple[str, ...], message: str):
    """C176."""
    with pytest.raises(NamesError, match=message):
        match(stored, NAMES, TIED)


def test_an_adapter_is_called_one():
    """C175: adapter-wrapped names in a folder that calls itself a model."""
    wrapped = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert adapter([*NAMES, wrapped]) == wrapped
    assert adapter([*NAMES, "model.layers.0.self_attn.q_proj.base_layer.weight"]) is not None
    assert adapter(NAMES) is None


# ---- refusals ------------------------------------------------------------------------------------------------------


def refused(base: Path, tensors: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        hugging_face.FileTensors(Held(tensors), hugging_face.expected(base), torch.float32, "step_20")


def test_what_is_not_the_model_of_its_config_is_refused(base: Path, policy: Any):
    """C173, C175, C176."""
    own = dict(policy.named_parameters())
    hugging_face.FileTensors(Held(own), hugging_face.expected(base), torch.float32, "step_20")
    twice = own | {"lm_head.weight": own["model.embed_tokens.weight"].clone()}
    tensors = hugging_face.FileTensors(Held(twice), hugging_face.expected(base), torch.float32, "step_20")
    assert "lm_head.weight" not in tensors.specs
    refused(base, twice | {"lm_head.weight": own["model.embed_tokens.weight"] + 1}, "tied by config.json and differ")
    refused(base, own | {"model.norm.weight": torch.zeros(17)}, r"model\.norm\.weight is \[17\], expected \[16\]")
    refused(base, {n: v for n, v in own.items() if n != "model.norm.weight"}, "missing: model.norm.weight")
    refused(base, own | {"model.layers.0.mlp.up_proj.lora_A.weight": torch.zeros(1)}, "holds adapters")


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path, policy: Any, base: Path):
    checkpoint = build.write_checkpoint(tmp_path, policy, base)
    path = checkpoint / layout.ACTOR
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match="is not exported"):
        export(checkpoint, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_nothing_is_left_of_an_export_that_fails(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    real = safetensors_stream.write

    def torn(path: Path, *arguments: Any) -> None:
        real(path, *arguments)
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    monkeypatch.setattr(safetensors_stream, "write", torn)
    with pytest.raises(CheckpointError, match="does not hold what was written"):
        export(checkpoint, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_standing_folder_and_a_full_disk_are_refused(tmp_path: Path, checkpoint: Path, monkeypatch):
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="out exists"):
        export(checkpoint, tmp_path / "out")
    monkeypatch.setattr(hugging_face.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10})())
    with pytest.raises(NoRoomError, match="10 are free"):
        export(checkpoint, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_model_that_the_memory_cannot_hold_is_read_back_and_not_loaded(tmp_path: Path, checkpoint: Path, monkeypatch):
    monkeypatch.setattr(hugging_face, "_free_memory", lambda: 1000)
    report = export(checkpoint, tmp_path / "out")
    assert report["loaded"] is False
    assert "not loaded by transformers" in described(report)


def test_the_end_of_a_run_sees_whether_its_checkpoint_could_be_exported(checkpoint: Path, monkeypatch):
    check_exportable(checkpoint)
    monkeypatch.setattr(RoleWeights, "shapes", lambda self: {"model.norm.weight": (16,)})
    with pytest.raises(CheckpointError, match="1 of 24 tensors of the model are there"):
        check_exportable(checkpoint)


# ---- one tensor at a time ------------------------------------------------------------------------------------------


def test_a_streamed_file_is_what_the_library_reads(tmp_path: Path):
    """Mixed widths, an empty tensor and a scalar; the strict reader of headers takes it as well."""
    tensors = {
        "a": torch.arange(3, dtype=torch.int8), "b": torch.randn(2, 3), "c": torch.randn(5).to(torch.bfloat16),
        "d": torch.tensor(7, dtype=torch.int64), "e": torch.empty(0, 4),
    }  # fmt: skip
    specs = {name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()}
    safetensors_stream.write(tmp_path / "x.safetensors", specs, tensors.__getitem__)
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in tensors.items())
    save_file(tensors, tmp_path / "library.safetensors")
    assert (tmp_path / "x.safetensors").stat().st_size <= (tmp_path / "library.safetensors").stat().st_size + 64
    with (tmp_path / "x.safetensors").open("rb") as file:
        assert {name: shard.dtype for name, shard in SafetensorsFile(file).shards.items()}["c"] == "bfloat16"
    with pytest.raises(ValueError, match="expected"):
        safetensors_stream.write(tmp_path / "y.safetensors", specs, lambda name: tensors["a"])


# A process of its own: what the tests before have left free or held would be counted as well.
MEMORY = """
import json, sys
from pathlib import Path
import torch
from keepstep.checkpoint import reader, shard_folder
from keepstep.checkpoint.sharded import write_whole
from keepstep.export import safetensors_stream
from keepstep.export.weights import RoleWeights

folder = Path(sys.argv[1])
state = {f"t{number}": torch.full((2 * 1024**2,), float(number)) for number in range(24)}
torch.save(state, folder / "model.bin")
write_whole(folder, "actor/model", state)
del state

def anonymous_kib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))

def growth(source, out):
    weights = RoleWeights(source)
    weights.read("t0")
    before, seen = anonymous_kib(), []
    def read(name):
        found = weights.read(name)
        seen.append(anonymous_kib() - before)
        return found
    specs = {name: (torch.float32, shape) for name, shape in sorted(weights.shapes().items())}
    safetensors_stream.write(out, specs, read)
    return len(seen), max(seen) / 1024

full = growth(reader.FullFile(reader.read_file(folder / "model.bin")), folder / "a.safetensors")
sharded = growth(shard_folder.ShardFolder(folder / "actor" / "model"), folder / "b.safetensors")
print(json.dumps([full, sharded]))
"""


def test_memory_is_that_of_the_largest_tensor(tmp_path: Path):
    """24 tensors of 8 MiB each: the one that is written and the next one; pages of files are not counted."""
    # The C library keeps some of what was freed, unless it is told to give large pieces back at once.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1024**2)}
    command = [sys.executable, "-c", MEMORY, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    for count, mib in json.loads(done.stdout):
        assert count == 24
        assert mib < 3 * 8, f"{mib:.0f} MiB of {24 * 8}"
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
