"""Whole GRPO steps against TRL's GRPOTrainer: the same model, prompts, group size, lengths, precision and cores.

    make bench-train [ARGS="--only quickstart"]

TRL runs in its own environment with transformers generation, one process, as many threads as there are cores; Keepstep
with one rank and one engine per core. Both do the same updates (mini-batches, KL to a reference, clip). Steps are those
of Keepstep: one rollout batch with all its updates; the first ones warm up and do not count; medians.
Also the controller's own time per step, with ranks and engines that answer at once.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.controller import controller_times

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "train.json"
TRL_PYTHON = ROOT / "build" / "against-others" / "bin" / "python"
SMOLLM2 = ROOT / "build" / "smollm2" / "model"
PHASES = ("rollout", "reward", "log_probs", "update", "weight_sync", "step")
Row = dict[str, float]


@dataclass(frozen=True)
class Work:
    """What is trained, for both."""

    name: str
    train_batch_size: int
    mini_batch_size: int
    micro_batch_size: int
    group_size: int
    max_prompt_length: int
    max_response_length: int
    lr: float
    kl_coef: float
    reward: str
    num_steps: int
    num_warm_up: int
    options: tuple[str, ...]
    """Keepstep's own, that change no result."""


QUICKSTART = Work(
    "quickstart",
    64,
    32,
    256,
    8,
    16,
    4,
    5e-4,
    0.01,
    "exact_match",
    30,
    5,
    ("actor_rollout_ref.rollout.num_engines=2", "actor_rollout_ref.actor.use_prefix_grouper=true"),
)
SMOLLM2_64 = Work(
    "smollm2", 4, 4, 8, 8, 128, 64, 1e-6, 0.01, "gsm8k", 3, 1,
    ("actor_rollout_ref.rollout.num_engines=2", "actor_rollout_ref.actor.use_dynamic_bsz=true",
     "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1536", "actor_rollout_ref.actor.use_prefix_grouper=true",
     "ray.object_store_bytes=2000000000"),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["quickstart", "smollm2", "controller"], help="one part; the rest stays")
    parser.add_argument("--gsm8k", type=Path, help="GSM8K's train.parquet in verl's columns (for smollm2)")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ks-train-", dir="/tmp"))
    results: dict[str, Any] = json.loads(RESULTS.read_text())["results"] if RESULTS.exists() else {}
    ratios = results.setdefault("vs_trl", {})
    if args.only in (None, "quickstart"):
        model, rows = quickstart(folder)
        results["quickstart"] = found = compare(QUICKSTART, folder / "quickstart", model, rows)
        ratios["quickstart_step"] = found["trl"]["step"] / found["keepstep"]["step"]
    if args.only in (None, "smollm2"):
        model, rows = smollm2(folder, args.gsm8k)
        results["smollm2"] = found = compare(SMOLLM2_64, folder / "smollm2", model, rows)
        ratios["smollm2_step"] = found["trl"]["step"] / found["keepstep"]["step"]
        ratios["smollm2_rollout"] = found["trl"]["rollout"] / found["keepstep"]["rollout"]
    if args.only in (None, "controller"):
        results["controller_s"] = controller_times()
    RESULTS.write_text(json.dumps(header() | {"results": results}, indent=1) + "\n")
    shutil.rmtree(folder)
    print(json.dumps(results, indent=1))
    return 0


def quickstart(folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """The quickstart's own model and questions."""
    from keepstep.quickstart import arithmetic

    subprocess.run([sys.executable, "-m", "keepstep.quickstart.char_qwen3", str(folder / "char")], check=True)
    arithmetic.write(folder / "data")
    rows = rows_of(folder / "data" / "train.parquet")
    for row in rows:
        # The tokenizer has no chat template: the one message is the prompt.
        row["prompt"] = row["prompt"][0]["content"]
    return folder / "char", rows


def smollm2(folder: Path, questions: Path | None) -> tuple[Path, list[dict[str, Any]]]:
    """The 135M model, made to write all its tokens: its end of text is one that it does not use."""
    from transformers import AutoTokenizer

    if not SMOLLM2.is_dir() or questions is None:
        raise SystemExit("smollm2 needs `make smollm2` and --gsm8k GSM8K/train.parquet")
    model = folder / "SmolLM2"
    shutil.copytree(SMOLLM2, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    unused = len(tokenizer) - 1
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(unused)
    tokenizer.save_pretrained(model)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps(settings | {"eos_token_id": unused}))
    rows = rows_of(questions)[:512]
    for row in rows:
        row["prompt"] = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
    limit = SMOLLM2_64.max_prompt_length
    return model, [row for row in rows if len(tokenizer(row["prompt"])["input_ids"]) <= limit][:64]


def rows_of(file: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(file).to_pylist()
    return [{"prompt": row["prompt"], "ground_truth": row["reward_model"]["ground_truth"]} for row in table]


def compare(work: Work, folder: Path, model: Path, rows: list[dict[str, Any]], seed: int = 42) -> dict[str, Any]:
    """Medians of both, with samples and tokens per second."""
    folder.mkdir()
    found = {"keepstep": keepstep(work, folder, model, rows, seed), "trl": trl(work, folder, model, rows, seed)}
    return {who: summary(work, steps) for who, steps in found.items()} | {"work": vars(work)}


def summary(work: Work, steps: list[Row]) -> dict[str, float]:
    counted = steps[work.num_warm_up :]
    medians = {phase: statistics.median(row.get(phase, 0.0) for row in counted) for phase in PHASES}
    num_samples = work.train_batch_size * work.group_size
    length = statistics.fmean(row["num_tokens"] for row in counted)
    per_second = {
        "samples_per_s": num_samples / medians["step"],
        "response_tokens_per_s": num_samples * length / medians["step"],
    }
    return {name: round(value, 4) for name, value in (medians | per_second | {"response_length": length}).items()}


def keepstep(work: Work, folder: Path, model: Path, rows: list[dict[str, Any]], seed: int) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    data = folder / "train.parquet"
    columns = [
        {**row, "data_source": "bench", "reward_model": {"style": "rule", "ground_truth": row.pop("ground_truth")}}
        for row in map(dict, rows)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(columns), data)
    run, actor = folder / f"run{seed}", "actor_rollout_ref.actor"
    overrides = [
        f"trainer.output_dir={run}", f"trainer.seed={seed}", f"actor_rollout_ref.model.path={model}",
        f"data.train_files={data}", "data.val_files=null", "trainer.test_freq=-1", "trainer.save_freq=-1",
        "s3.embedded=false", f"trainer.n_gpus_per_node={os.cpu_count()}",
        f"trainer.total_training_steps={work.num_steps}", f"data.train_batch_size={work.train_batch_size}",
        f"data.max_prompt_length={work.max_prompt_length}", f"data.max_response_length={work.max_response_length}",
        f"{actor}.ppo_mini_batch_size={work.mini_batch_size}",
        f"{actor}.ppo_micro_batch_size_per_gpu={work.micro_batch_size}", f"{actor}.optim.lr={work.lr}",
        f"{actor}.kl_loss_coef={work.kl_coef}", f"actor_rollout_ref.rollout.n={work.group_size}",
        f"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu={work.micro_batch_size}",
        f"custom_reward_function.name=keepstep.rewards.{work.reward}", *work.options,
    ]  # fmt: skip
    command = [sys.executable, "-m", "keepstep.cli.main", "train", "--config", "quickstart", *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=3000)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            **{phase: line.get(f"timing_s/{phase}", 0.0) for phase in PHASES},
            "mean_reward": line["critic/rewards/mean"],
            "num_tokens": line["response_length/mean"],
        }
        for line in lines
    ]


def trl(work: Work, folder: Path, model: Path, rows: list[dict[str, Any]], seed: int) -> list[Row]:
    if not TRL_PYTHON.exists():
        raise SystemExit("TRL's environment is not there: make against-others")
    job = vars(work) | {
        "model": str(model),
        "rows": rows,
        "reward_file": str(ROOT / "keepstep" / "rewards" / f"{work.reward}.py"),
        "num_threads": os.cpu_count(),
        "seed": seed,
        "lr_warmup_steps": 5,
        "weight_decay": 0.01,
    }
    paths = [folder / f"trl{seed}.job", folder / f"trl{seed}.json"]
    paths[0].write_text(json.dumps(job))
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(os.cpu_count()), "PYTHONPATH": str(ROOT)}
    script = [str(TRL_PYTHON), str(ROOT / "benchmarks" / "train_trl.py"), *map(str, paths)]
    subprocess.run(script, check=True, stdout=subprocess.DEVNULL, timeout=3000, env=environment)
    found: list[Row] = json.loads(paths[1].read_text())
    for row in found:
        row["update"] = row["step"] - sum(row.get(phase, 0.0) for phase in ("rollout", "reward", "log_probs"))
    return found


def header() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit.stdout.strip(),
        "machine": {"cores": os.cpu_count(), "load_at_end": os.getloadavg()[0]},
    }


if __name__ == "__main__":
    begin = time.monotonic()
    status = main()
    print(f"{time.monotonic() - begin:.0f} s")
    sys.exit(status)
