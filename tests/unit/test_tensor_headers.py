"""Tensor headers read without torch, held against what torch itself wrote."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from keepstep.checkpoint import layout
from keepstep.checkpoint.digest import digest_file
from keepstep.checkpoint.manifest import seal
from keepstep.checkpoint.tensor_headers import Archive, HeaderError
from keepstep.checkpoint.torch_zip import TorchZip
from keepstep.checkpoint.verify import verify
from keepstep.run import RunDir, read_json
from tests.unit import builder
from tests.unit.forging import reseal, unsealed


def saved(path: Path, value: object) -> Archive:
    torch.save(value, path)
    return Archive(TorchZip(path.open("rb")))


def test_every_dtype_and_form_that_torch_writes(tmp_path: Path):
    dtypes = ["float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
    value = OrderedDict((name, torch.zeros(2, 3, dtype=getattr(torch, name))) for name in dtypes)
    value["transposed"] = torch.arange(6.0).view(2, 3).t()
    value["view"] = torch.arange(100.0)[10:20:2]
    value["scalar"] = torch.tensor(7.5)
    value["nested"] = {"list": [1, 2.5, "text", None, True, (1, 2)], "inner": torch.ones(4)}
    archive = saved(tmp_path / "x.pt", value)
    expected = [[name, name, [2, 3]] for name in dtypes]
    expected += [["transposed", "float32", [3, 2]], ["view", "float32", [5]], ["scalar", "float32", []]]
    assert archive.describe() == [*expected, ["nested.inner", "float32", [4]]]
    assert archive.scalar(archive.tensors()["scalar"]) == 7.5
    assert archive.root["nested"]["list"] == [1, 2.5, "text", None, True, (1, 2)]


def test_foreign_calls_are_not_understood(tmp_path: Path):
    torch.save({"a": torch.nn.Parameter(torch.ones(2))}, tmp_path / "x.pt")
    with pytest.raises(HeaderError, match=r"a call of torch\._utils\._rebuild_parameter"):
        Archive(TorchZip((tmp_path / "x.pt").open("rb")))


def replace_optimizer(run: RunDir, change) -> None:
    """Write another optimizer file with a manifest whose digest fits it, as a careful forger would."""
    folder = run.checkpoint(20)
    state = torch.load(folder / layout.OPTIMIZER, weights_only=True)
    change(state)
    torch.save(state, folder / layout.OPTIMIZER)
    value = json.loads((folder / layout.MANIFEST).read_bytes())
    del value["self"]
    value["files"][layout.OPTIMIZER] |= digest_file(folder / layout.OPTIMIZER).to_record()
    (folder / layout.MANIFEST).write_bytes(seal(value))


def test_tensor_of_another_shape_is_named_though_every_digest_fits(tmp_path: Path):
    run = builder.run_in(tmp_path)
    builder.write(run, 20)
    replace_optimizer(run, lambda state: state["state"]["norm.weight"].update(exp_avg=torch.zeros(4)))
    assert verify(run.checkpoint(20), quick=True).reasons == [
        "actor/optimizer.pt: tensor state.norm.weight.exp_avg is ['float32', [4]], the manifest lists ['float32', [3]]"
    ]


def test_missing_tensor_is_named(tmp_path: Path):
    run = builder.run_in(tmp_path)
    builder.write(run, 20)
    replace_optimizer(run, lambda state: state["state"].pop("norm.weight"))
    (reason,) = verify(run.checkpoint(20)).reasons
    assert reason.startswith("actor/optimizer.pt: tensor state.norm.weight.exp_avg is None, the manifest lists")


def test_optimizer_of_another_step_is_named(tmp_path: Path):
    """C101: AdamW's own counters must be the trainer's."""
    run = builder.run_in(tmp_path)
    state = builder.request(run, 20).trainer_state | {"num_updates": 3}
    builder.write(run, 20, trainer_state=state)
    assert verify(run.checkpoint(20)).resumable
    assert read_json(run.checkpoint(20) / layout.TRAINER_STATE)["num_updates"] == 3
    replace_optimizer(run, lambda saved: saved["state"]["norm.weight"].update(step=torch.tensor(2.0)))
    assert verify(run.checkpoint(20)).reasons == ["actor/optimizer.pt: has counted 2, 3 updates, the trainer's state 3"]


def test_optimizer_without_counters_is_named(tmp_path: Path):
    """C101: an optimizer that was emptied, under a manifest that lists no tensor of it."""
    run = builder.run_in(tmp_path)
    builder.write(run, 20)
    folder = run.checkpoint(20)
    torch.save({"state": {}, "param_groups": []}, folder / layout.OPTIMIZER)
    manifest = unsealed(folder)
    manifest["files"][layout.OPTIMIZER]["tensors"] = []
    reseal(folder, **manifest)
    assert verify(folder).reasons == ["actor/optimizer.pt: has counted no updates, the trainer's state 3"]


@pytest.mark.parametrize(
    ("name", "key", "part"),
    [
        (layout.OPTIMIZER, "exp_avg", "tensor state.norm.weight.exp_avg has the shape [4], its parameter [3]"),
        (layout.REF, "", "tensor norm.weight is (4,), the policy's (3,)"),
    ],
)
def test_roles_of_different_models_are_named(tmp_path: Path, name: str, key: str, part: str):
    """C101: every digest fits and every tensor is listed; the optimizer or the reference is of another model."""
    run = builder.run_in(tmp_path)
    builder.write(run, 20)
    folder = run.checkpoint(20)
    value = torch.load(folder / name, weights_only=True)
    if key:
        value["state"]["norm.weight"][key] = torch.zeros(4)
    else:
        value["norm.weight"] = torch.zeros(4)
    (folder / name).unlink()
    torch.save(value, folder / name)
    manifest = unsealed(folder)
    for entry in manifest["files"][name]["tensors"]:
        if entry[0] == (f"state.norm.weight.{key}" if key else "norm.weight"):
            entry[2] = [4]
    reseal(folder, **manifest)
    assert verify(folder).reasons == [f"{name}: {part}"]
