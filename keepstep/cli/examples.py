"""What `--help` ends with: commands as people give them, by the command that they show."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "keepstep": (
        "keepstep run trainer.output_dir=runs/mine",
        "keepstep ls runs/mine",
        "keepstep report runs/mine",
    ),
    "keepstep run": (
        "keepstep run",
        "keepstep run --config my.yaml trainer.output_dir=runs/mine trainer.total_training_steps=400",
        "keepstep run --dry-run actor_rollout_ref.rollout.n=8",
    ),
    "keepstep train": ("keepstep train --config my.yaml trainer.output_dir=runs/mine",),
    "keepstep preflight": (
        "keepstep preflight --config my.yaml trainer.output_dir=runs/mine",
        "keepstep preflight --config my.yaml --clean",
    ),
    "keepstep completion": ("keepstep completion bash", "keepstep completion zsh"),
    "keepstep ui": ("keepstep ui runs/quickstart",),
    "keepstep up": ("keepstep up", "keepstep up --database postgresql+asyncpg://keepstep@db/prefect /shared/runs"),
    "keepstep down": ("keepstep down",),
    "keepstep verify": (
        "keepstep verify runs/mine/checkpoints/latest",
        "keepstep verify --quick --json runs/mine/checkpoints/step_100 s3://bucket/run/checkpoints/step_100",
    ),
    "keepstep ls": ("keepstep ls runs/mine", "keepstep ls runs/mine --remote --json"),
    "keepstep ps": ("keepstep ps runs/mine", "keepstep ps runs/mine --json"),
    "keepstep tune": ("keepstep tune runs/mine --mtbf-hours 6",),
    "keepstep plan": ("keepstep plan runs/mine --remote",),
    "keepstep convert": ("keepstep convert runs/mine/checkpoints/step_100 step_100_full --layout full",),
    "keepstep prune": ("keepstep prune runs/mine --dry-run",),
    "keepstep pin": ("keepstep pin runs/mine 100", "keepstep pin runs/mine 100 --remove"),
    "keepstep upload": ("keepstep upload runs/mine --step 100",),
    "keepstep download": ("keepstep download runs/mine --step 100",),
    "keepstep export": (
        "keepstep export runs/mine/checkpoints/latest",
        "keepstep export runs/mine/checkpoints/step_100 /models/mine-100 --dtype bfloat16",
    ),
    "keepstep serve": (
        "keepstep serve runs/mine/checkpoints/latest --port 8000",
        "keepstep serve /models/mine-100 --tensor-parallel-size 2 -- --max-model-len 4096",
    ),
    "keepstep dataset": ("keepstep dataset check data/train.parquet --expect-rows 7473",),
    "keepstep dataset check": (
        "keepstep dataset check 'data/*.parquet' --run runs/mine",
        "keepstep dataset check s3://bucket/train.parquet --expect-rows 7473 --deep",
    ),
    "keepstep doctor": ("keepstep doctor runs/mine",),
    "keepstep report": ("keepstep report runs/mine", "keepstep report runs/mine --out mine.html"),
}


def epilog(command: str) -> str | None:
    """The end of a command's help."""
    found = EXAMPLES.get(command)
    return "\n  ".join(["examples:", *found]) if found else None
