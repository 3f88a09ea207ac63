"""FSDP2 ranks without Ray: sharding, saving, restoring and the learning-rate list, to the byte."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from keepstep.checkpoint.verify import verify

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SCRIPT = """
import gc, hashlib, json, os, shutil, socket, sys
import numpy as np, torch, torch.distributed as dist, torch.multiprocessing as mp
from pathlib import Path
from keepstep.actor.batch import deal, pack
from keepstep.actor.rank import Rank
from keepstep.actor.spec import RankSpec
from keepstep.actor.shards import open_snapshot
from keepstep.checkpoint import writer
from keepstep.checkpoint.sharded import ShardWriter
from keepstep.checkpoint.stage import stage
from keepstep.checkpoint.writer import assemble, assemble_optimizer
from keepstep.checkpoint.written import SaveRequest
from keepstep.config.schema import ActorConfig, ModelConfig, RefConfig, RolloutCorrectionConfig
from keepstep.errors import CheckpointError
from keepstep.quickstart.char_qwen3 import build_model, build_tokenizer

def batch_of(step):
    generator = np.random.default_rng(step)
    prompts = [generator.integers(3, 13, 4).tolist() for _ in range(8) for _ in range(4)]
    responses = [generator.integers(1, 13, int(generator.integers(1, 4))).tolist() for _ in prompts]
    batch = pack(prompts, responses, [[0.0] * len(r) for r in responses], pad_id=0)
    return batch.with_advantages(generator.normal(size=32))

def build(rank, world_size, port, micro, model_dir=None, host=False):
    actor = ActorConfig(ppo_mini_batch_size=4, ppo_micro_batch_size_per_gpu=micro, kl_loss_coef=0.01,
                        fsdp_config=dict(param_offload=host),
                        optim=dict(lr=1e-3, lr_warmup_steps=2, lr_scheduler_type="cosine"))
    found = Rank(RankSpec(rank, world_size, "cpu", model_dir or sys.argv[1], sys.argv[1],
                          ModelConfig(path="-"), actor,
                          RefConfig(log_prob_micro_batch_size_per_gpu=64, fsdp_config=dict(param_offload=host)), 1.0, 6,
                          42, 120.0, RolloutCorrectionConfig(), 4, actor.use_kl_loss, True, False))
    found.connect("127.0.0.1", port)
    return found

def train(rank, steps):
    lrs = []
    for step in steps:
        batch = batch_of(step)
        dealt = deal(8, 4, 4, rank.spec.world_size)[rank.spec.rank]
        shard = batch.rows([row for mini in dealt for row in mini])
        mini_batches, begin = [], 0
        for mini in dealt:
            mini_batches.append(list(range(begin, begin + len(mini))))
            begin += len(mini)
        metrics, _ = rank.update(shard, rank.log_probs(shard), mini_batches)
        lrs.append(metrics["actor/lr"])
    return lrs

def work(index, world_size, ports, micro, out, layout):
    host = "host" in out
    rank = build(index, world_size, ports[0], micro, host=host)
    rank.load_initial(sys.argv[1])
    lrs = train(rank, range(3))
    # Taken in the middle, written at the end: what is trained in between must not show.
    middle, references = gather((rank.snapshot(True), rank.snapshot_reference()))
    lrs += train(rank, range(3, 6))
    folder = save(index, world_size, ports[2], out, layout, middle, references)
    (final,) = gather((rank.snapshot(False),))
    dist.destroy_process_group()
    resumed = build(index, world_size, ports[1], micro, host=host)
    resumed.load_checkpoint(folder)
    resumed_lrs = train(resumed, range(3, 6))
    (again,) = gather((resumed.snapshot(False),))
    dist.destroy_process_group()
    if index == 0:
        json.dump({"final": digest(final), "resumed": digest(again), "lrs": lrs, "resumed_lrs": resumed_lrs,
                   "values": assemble([s.params for s in final])["model.embed_tokens.weight"].flatten().tolist(),
                   "step": float(assemble_optimizer(final)["state"]["model.norm.weight"]["step"]),
                   "ref_is_base": bool(torch.equal(assemble([r.params for r in references])["model.norm.weight"],
                                                   torch.ones(128))),
                   "folder": folder},
                  open(out, "w"))

def gather(values):
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, values)
    return list(map(list, zip(*gathered)))

def request_for(out, layout, world_size):
    return SaveRequest(out + ".run", "run-a", 1, 3, world_size, True, None,
                       {"global_step": 3, "epoch": 1, "num_updates": 6, "num_response_tokens": 96, "metrics": {},
                        "dataloader_state": {"train_dataset_offset": 24, "val_dataset_offset": 0}},
                       "a: 1", sys.argv[1], {}, layout)

def save(index, world_size, port, out, layout, snapshots, references):
    request = request_for(out, layout, world_size)
    if layout == "full":
        if index == 0:
            writer.save(request, snapshots, references)
        dist.barrier()
    else:
        dist.destroy_process_group()
        shard_writer = ShardWriter("127.0.0.1", port, index, world_size, 60.0)
        if index == 0:
            writer.begin_sharded(request, snapshots[0], references)
        dist.barrier()
        folder = writer.temporary_folder(request)
        written = shard_writer.write(folder, open_snapshot(snapshots[index]), references[index])
        (parts,) = gather((written,))
        if index == 0:
            writer.finish_sharded(request, snapshots, parts)
        dist.barrier()
    return request.run_root + "/checkpoints/step_3"

def reshard(index, world_size, ports, folder, out):
    rank = build(index, world_size, ports[0], 16)
    rank.load_checkpoint(folder)
    (found,) = gather((rank.snapshot(False),))
    if index == 0:
        json.dump({"state": digest(found)}, open(out, "w"))
    dist.destroy_process_group()

def load_staged(index, world_size, ports, folder, out):
    # Every rank is a node of its own; once staged, the sharded tensors of the shared folder are wiped.
    rank = build(index, world_size, ports[0], 16)
    shared = Path(out + ".shared") / "step_3"
    if index == 0:
        shutil.copytree(folder, shared)
    dist.barrier()
    copy = stage(shared, f"{out}.node{index}", "run-a", [index], world_size)
    dist.barrier()
    if index == 0:
        for path in shared.rglob("*.safetensors"):
            data = bytearray(path.read_bytes())
            body = 8 + int.from_bytes(data[:8], "little")
            for name, info in json.loads(data[8:body]).items():
                # Counters stand in one rank's shard and are read by all.
                if name != "__metadata__" and info["shape"]:
                    first, last = (body + offset for offset in info["data_offsets"])
                    data[first:last] = bytes(last - first)
            path.write_bytes(data)
    dist.barrier()
    rank.load_checkpoint(str(shared), str(copy))
    (found,) = gather((rank.snapshot(False),))
    if index == 0:
        json.dump({"state": digest(found), "num_files": len(list(copy.rglob("*.safetensors")))}, open(out, "w"))
    dist.destroy_process_group()

def digest(snapshots):
    found = hashlib.sha256()
    state = {"actor": assemble([s.params for s in snapshots]), **assemble_optimizer(snapshots)["state"]}
    for group in sorted(state):
        for name in sorted(state[group]):
            found.update(state[group][name].numpy().tobytes())
    return found.hexdigest()

def plain_step():
    # GRPO's loss and AdamW written out on an unsharded model, one update over the whole batch.
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    batch = batch_of(0)
    tokens, mask = torch.tensor(batch.tokens), torch.tensor(batch.mask)
    advantages = torch.tensor(batch.advantages).unsqueeze(1)
    def log_probs():
        return model(tokens).logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    with torch.no_grad():
        old = log_probs()
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.sin(torch.arange(parameter.numel(), dtype=torch.float32)).view_as(parameter))
    new = log_probs()
    ratio = (new - old).exp()
    policy = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    kl = (old - new).exp() - (old - new) - 1
    ((policy + 0.5 * kl) * mask).sum().div(mask.sum()).backward()
    norm = torch.sqrt(sum((p.grad ** 2).sum() for p in model.parameters()))
    return {name: (p.grad * min(1.0, 1.0 / float(norm))).flatten() for name, p in model.named_parameters()}, float(norm)

def sharded_step(index, world_size, ports, out):
    # The same through a Rank: the old log-probs are the reference's, the policy is moved by the same amount.
    actor = ActorConfig(ppo_mini_batch_size=8, ppo_micro_batch_size_per_gpu=5, kl_loss_coef=0.5)
    rank = Rank(RankSpec(index, world_size, "cpu", sys.argv[1], sys.argv[1], ModelConfig(path="-"), actor,
                          RefConfig(log_prob_micro_batch_size_per_gpu=64), 1.0, 6, 42, 120.0,
                          RolloutCorrectionConfig(), 4, actor.use_kl_loss, True, False))
    rank.connect("127.0.0.1", ports[0])
    state = {name: value for name, value in torch.load(sys.argv[2] + "/base.pt").items()}
    moved = {name: value + 0.01 * torch.sin(torch.arange(value.numel(), dtype=torch.float32)).view_as(value)
             for name, value in state.items()}
    from keepstep.actor import shards
    shards.copy_chunks(dict(rank.model.named_parameters()), moved, index, world_size)
    shards.copy_chunks(dict(rank.reference.named_parameters()), state, index, world_size)
    rank.optimizer.step = lambda: None
    rank.optimizer.zero_grad = lambda: None
    batch = batch_of(0)
    (dealt,) = deal(8, 4, 8, world_size)[index]
    shard = batch.rows(dealt)
    log_probs = rank.log_probs(shard)
    metrics, _ = rank.update(shard, {"old": log_probs["ref"], "ref": log_probs["ref"]}, [list(range(len(dealt)))])
    grads = {name: p.grad.full_tensor().flatten() for name, p in rank.model.named_parameters()}
    dist.destroy_process_group()
    if index == 0:
        torch.save({"grads": grads, "norm": metrics["actor/grad_norm"]}, out)

def live_bytes():
    # Bytes of all tensors that somebody still holds, each storage once.
    gc.collect()
    storages = {}
    for value in gc.get_objects():
        if isinstance(value, torch.Tensor):
            tensor = value.to_local() if hasattr(value, "to_local") else value
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())

def extras(index, world_size, ports, out):
    # What a resume takes up beside the tensors: probe, scheduler, parameters without moments; and a warm start.
    ports, found = list(ports), {}
    frozen = "model.layers.0.input_layernorm.weight"
    prompts = [[3, 4, 5, 6], [7, 8]]
    rank = build(index, world_size, ports.pop(), 16)
    rank.load_initial(sys.argv[1])
    dict(rank.model.named_parameters())[frozen].requires_grad_(False)
    train(rank, range(3))
    found["probe_saved"], found["bytes_running"] = rank.probe(prompts), live_bytes()
    found["scheduler_saved"] = {k: v for k, v in rank.scheduler.state_dict().items() if k != "lr_lambdas"}
    snapshots, references = gather((rank.snapshot(False), rank.snapshot_reference()))
    folder = save(index, world_size, None, out, "full", snapshots, references)
    found["lrs"] = train(rank, range(3, 6))
    (final,) = gather((rank.snapshot(False),))
    del rank, snapshots, references
    dist.destroy_process_group()

    resumed = build(index, world_size, ports.pop(), 16)
    dict(resumed.model.named_parameters())[frozen].requires_grad_(False)
    report = resumed.load_checkpoint(folder)
    found["bytes_resumed"], found["probe_loaded"] = live_bytes(), resumed.probe(prompts)
    found["report"] = [report.optimizer_step, report.num_without_moments, report.num_saved_streams,
                       report.streams_restored]
    train(resumed, range(3, 6))
    (again,) = gather((resumed.snapshot(False),))
    found["final"], found["resumed"] = digest(final), digest(again)
    del resumed
    dist.destroy_process_group()

    rebuilt = build(index, world_size, ports.pop(), 16)
    (Path(folder) / "actor" / "scheduler.pt").unlink(missing_ok=True)
    dist.barrier()
    rebuilt.load_checkpoint(folder, None, 3)
    found["scheduler_rebuilt"] = {k: v for k, v in rebuilt.scheduler.state_dict().items() if k != "lr_lambdas"}
    found["lrs_rebuilt"] = train(rebuilt, range(3, 6))
    dist.destroy_process_group()

    warm = build(index, world_size, ports.pop(), 16)
    warm.load_initial(sys.argv[1])
    found["left"] = warm.load_weights(folder, False)
    found["probe_warm"], found["moments_warm"] = warm.probe(prompts), len(warm.optimizer.state)
    found["reference_is_policy"] = all(
        torch.equal(policy.to_local(), reference.to_local())
        for policy, reference in zip(warm.model.parameters(), warm.reference.parameters(), strict=True))
    found["lr_warm"] = warm.learning_rate()
    dist.destroy_process_group()

    other = build(index, world_size, ports.pop(), 16, sys.argv[2] + "/other-model")
    other.load_initial(sys.argv[2] + "/other-model")
    try:
        other.load_weights(folder, False)
    except CheckpointError as error:
        found["refused"] = error.message
    found["left_other"] = other.load_weights(folder, True)
    dist.destroy_process_group()
    if index == 0:
        json.dump(found, open(out, "w"))

def play(index, scenarios):
    for function, world_size, ports, arguments in scenarios:
        if index < world_size:
            function(index, world_size, ports, *arguments)

PORTS = iter(range(20100 + os.getpid() % 400 * 20, 32000))

def free_port():
    # Not one that the system hands out: until it is used it could be given to any connection.
    for port in PORTS:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port

if __name__ == "__main__":
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    build_model(tokenizer).save_pretrained(sys.argv[1])
    from transformers import AutoModelForCausalLM
    base = dict(AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).named_parameters())
    torch.save({name: value.detach() for name, value in base.items()}, sys.argv[2] + "/base.pt")
    grads, norm = plain_step()
    torch.save({"grads": grads, "norm": norm}, sys.argv[2] + "/plain.pt")
    # Each scenario is (function, world size, ports, arguments); one set of processes plays them all.
    scenarios = [(sharded_step, 2, (free_port(),), (sys.argv[2] + "/ranks.pt",))]
    for name, world_size, micro, layout in (
        ("two", 2, 16, "full"), ("two-micro", 2, 2, "full"), ("one", 1, 32, "full"), ("sharded", 2, 16, "sharded"),
        ("one-sharded", 1, 32, "sharded"), ("two-host", 2, 16, "full"),
    ):
        ports = (free_port(), free_port(), free_port())
        scenarios.append((work, world_size, ports, (micro, f"{sys.argv[2]}/{name}.json", layout)))
    for name in ("two", "sharded"):
        folder = f"{sys.argv[2]}/{name}.json.run/checkpoints/step_3"
        for size in (1, 2, 3):
            scenarios.append((reshard, size, (free_port(),), (folder, f"{sys.argv[2]}/{name}-{size}.json")))
    folder = f"{sys.argv[2]}/sharded.json.run/checkpoints/step_3"
    scenarios.append((load_staged, 2, (free_port(),), (folder, f"{sys.argv[2]}/staged.json")))
    from transformers import AutoConfig
    config = AutoConfig.from_pretrained(sys.argv[1])
    values = config.to_dict() | {"num_hidden_layers": 3, "vocab_size": 72, "layer_types": None}
    AutoModelForCausalLM.from_config(type(config)(**values)).save_pretrained(sys.argv[2] + "/other-model")
    scenarios.append((extras, 2, tuple(free_port() for _ in range(5)), (sys.argv[2] + "/extras.json",)))
    mp.spawn(play, args=(scenarios,), nprocs=3)
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, dict]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    script = folder / "ranks.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(folder / "model"), str(folder)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    return found | {name: torch.load(folder / f"{name}.pt") for name in ("plain", "ranks")}


def test_the_probe_of_the_save_is_that_of_the_load(reports: dict[str, dict]):
    """C32, C95: a loaded policy gives the log-probs that it gave when it was saved, to the bit."""
    found = reports["extras"]
    assert found["probe_loaded"] == found["probe_saved"]
    assert [len(row) for row in found["probe_saved"]] == [3, 1]
    assert all(value < 0 for row in found["probe_saved"] for value in row)


def test_a_lost_scheduler_is_rebuilt_as_it_was(reports: dict[str, dict]):
    """C115: at the checkpoint's global step, in the middle of the cosine; its warm-up does not come again."""
    found = reports["extras"]
    assert found["scheduler_rebuilt"] == found["scheduler_saved"]
    assert found["lrs_rebuilt"] == found["lrs"]


def test_a_parameter_that_never_got_a_gradient(reports: dict[str, dict]):
    """C125: it has no moments in the checkpoint, which is counted and loads; training goes on to the byte."""
    found = reports["extras"]
    assert found["report"] == [6, 1, 2, True]
    assert found["resumed"] == found["final"]


def test_a_load_leaves_no_second_copy(reports: dict[str, dict]):
    """C98: out of memory one step after a resume at settings that had run before."""
    found = reports["extras"]
    assert found["bytes_resumed"] <= found["bytes_running"]


def test_a_warm_start_takes_weights_alone(reports: dict[str, dict]):
    """C124: policy and reference from the checkpoint; optimizer, schedule and counters fresh."""
    found = reports["extras"]
    assert (found["left"], found["moments_warm"], found["reference_is_policy"]) == ([], 0, True)
    assert found["probe_warm"] == found["probe_saved"]
    assert found["lr_warm"] == pytest.approx(1e-3 / 3)


def test_a_warm_start_of_another_model_is_refused_or_named(reports: dict[str, dict]):
    """Another vocabulary and one more layer: refused, or with a waiver left out by name."""
    found = reports["extras"]
    assert "does not fit the model" in found["refused"] and "model.embed_tokens.weight" in found["refused"]
    assert "model.embed_tokens.weight" in found["left_other"]
    assert any(name.startswith("model.layers.2.") for name in found["left_other"])
    assert "model.norm.weight" not in found["left_other"]


@pytest.mark.parametrize("name", ["two", "two-micro", "one", "sharded", "one-sharded", "two-host"])
def test_restored_ranks_go_on_to_the_byte(reports: dict[str, dict], name: str):
    """C32, C101: weights, AdamW's moments and its step counter; three steps of two updates each, twice.

    The snapshot is taken in the middle and written after three more steps: none of those shows in it.
    """
    report = reports[name]
    assert report["final"] == report["resumed"]
    assert report["step"] == 12.0
    assert report["ref_is_base"]


def test_learning_rates_are_those_of_an_uninterrupted_run(reports: dict[str, dict]):
    """C112: two warm-up steps to 1e-3, then half a cosine over the remaining four."""
    expected = [1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3 * 0.8535533905932737, 1e-3 * 0.5, 1e-3 * 0.14644660940672627]
    assert reports["two"]["lrs"] == pytest.approx(expected)
    assert reports["two"]["resumed_lrs"] == reports["two"]["lrs"][3:]


def test_gradient_is_that_of_the_written_out_loss(reports: dict[str, dict]):
    """Clipped surrogate plus 0.5 k3, mean over the mini-batch's tokens, norm clipped to 1: plain autograd against two
    ranks with ragged micro-batches."""
    plain, sharded = reports["plain"], reports["ranks"]
    assert sharded["norm"] == pytest.approx(plain["norm"], rel=1e-4)
    assert plain["norm"] > 1e-3
    for name, expected in plain["grads"].items():
        torch.testing.assert_close(sharded["grads"][name], expected, rtol=1e-3, atol=1e-6)


def test_world_size_and_micro_batches_change_only_roundings(reports: dict[str, dict]):
    """The loss is a mean over the tokens of the whole mini-batch, whoever holds them in how many pieces."""
    for name in ("two-micro", "one"):
        assert reports[name]["values"] == pytest.approx(reports["two"]["values"], abs=2e-5)


def test_host_memory_gives_the_same_bytes(reports: dict[str, dict]):
    """FSDP2's off-loading policy, with collectives on what lies in host memory; gradients are clipped there too."""
    assert reports["two-host"]["final"] == reports["two"]["final"]


def test_layouts_hold_the_same_training(reports: dict[str, dict]):
    assert reports["sharded"]["final"] == reports["two"]["final"]


@pytest.mark.parametrize("layout", ["two", "sharded"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_loads_on_another_world_size(reports: dict[str, dict], layout: str, world_size: int):
    """C14, C119: saved by two ranks, loaded by one, two and three (of which some hold nothing of small tensors)."""
    assert reports[f"{layout}-{world_size}"]["state"] == reports["two-1"]["state"]


@pytest.mark.parametrize("name", ["sharded", "one-sharded"])
def test_sharded_checkpoint_verifies(reports: dict[str, dict], name: str):
    verdict = verify(Path(reports[name]["folder"]), expected_run_id="run-a", expected_step=3)
    assert (verdict.state, verdict.reasons) == ("verified", [])


def test_a_node_stages_only_what_its_ranks_load(reports: dict[str, dict]):
    """Three of six shard files each; the tensors come from them, not from the shared folder."""
    assert reports["staged"] == {"state": reports["two-1"]["state"], "num_files": 3}
