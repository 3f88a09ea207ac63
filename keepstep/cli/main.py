"""The `keepstep` command: what it understands, and how errors leave it. Every heavy import is inside its command."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import keepstep
from keepstep.cli.examples import epilog
from keepstep.errors import EXIT_FAILED, EXIT_PREEMPTED, KeepstepError

Command = Callable[[argparse.Namespace, list[str]], int]

CONFIG_FLAGS = {
    "--seed": ("trainer.seed", "N", "the run's seed"),
    "--s3-bucket": ("s3.bucket", "NAME", "where checkpoints go"),
    "--s3-prefix": ("s3.prefix", "PREFIX", "key prefix of the run"),
    "--s3-upload-interval": ("s3.upload_interval", "STEPS", "steps between uploads"),
    "--resume_from_checkpoint": ("trainer.resume_from_checkpoint", "PATH", "resume from exactly this checkpoint"),
}
"""Flag: (setting, what it takes, help). The flags bear the names that other trainers' guides use."""


def entry() -> NoReturn:
    """The console script."""
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output left early (`| head`); nothing can be told to it any more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = EXIT_FAILED
    except KeyboardInterrupt:
        print("keepstep: asked to leave before anything began.", file=sys.stderr)
        status = EXIT_PREEMPTED
    sys.exit(status)


def main(argv: Sequence[str]) -> int:
    """Run one command and return its exit code; errors of the error tree are printed without a traceback."""
    parser = build_parser()
    own, passed_on = _cut(argv)
    args, rest = parser.parse_known_args(own)
    if rest and not args.takes_overrides:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if passed_on and not args.passes_on:
        parser.error(f"nothing is passed on by this command: -- {' '.join(passed_on)}")
    args.vllm_options = passed_on
    try:
        command: Command = args.command
        return command(args, overrides(args, rest))
    except KeepstepError as error:
        print(f"keepstep: {error}", file=sys.stderr)
        return error.exit_code


def overrides(args: argparse.Namespace, rest: list[str]) -> list[str]:
    """Settings of the command line as `key=value`: the flags first, so that a setting spelled out wins."""
    if not args.takes_overrides:
        return []
    given = [(key, getattr(args, _destination(flag))) for flag, (key, _, _) in CONFIG_FLAGS.items()]
    found = [f"{key}={value}" for key, value in given if value is not None]
    found += (["trainer.debug=true"] if args.debug else []) + rest
    # Added to what a file or a setting allows, not in place of it.
    return found + (["resume.allow+=mismatched_sizes"] if args.ignore_mismatched_sizes else [])


def _cut(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(what is ours, what stands behind `--` and is another program's)."""
    ours = list(argv)
    return (ours[: ours.index("--")], ours[ours.index("--") + 1 :]) if "--" in ours else (ours, [])


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="keepstep",
        description="GRPO training that survives preemption",
        allow_abbrev=False,
        epilog=epilog("keepstep"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"keepstep {keepstep.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_training(commands)
    _add_platform(commands)
    _add_checkpoints(commands)
    _add_conversion(commands)
    _add_retention(commands)
    _add_store(commands)
    _add_export(commands)
    _add_serve(commands)
    _add_dataset(commands)
    _add_doctor(commands)
    _add_report(commands)
    _add_completion(commands)
    return parser


def _add(commands: argparse._SubParsersAction, name: str, address: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.epilog = epilog(parser.prog)
    parser.set_defaults(command=_imported_late(address), takes_overrides=False, passes_on=False)
    return parser


def _add_training(commands: argparse._SubParsersAction) -> None:
    run = _add(commands, "run", "run_command.main", "train a run to its end, or go on with it: the whole Prefect flow")
    train = _add(commands, "train", "train_command.main", "the trainer alone, without Prefect")
    look = _add(
        commands, "preflight", "preflight_command.main", "all that a start would be refused for, and what to do"
    )
    for parser in (run, train, look):
        parser.set_defaults(takes_overrides=True)
        parser.usage = f"{parser.prog} [--config NAME|FILE] [options] [key=value ...]"
        parser.add_argument(
            "--config", metavar="NAME|FILE", help="a YAML file or a packaged name (default: quickstart)"
        )
        if parser is not look:
            parser.add_argument(
                "--dry-run", action="store_true", help="print the resolved configuration, start nothing"
            )
        parser.add_argument("--debug", action="store_true", help="one step from the chosen checkpoint, written nowhere")
        for flag, (key, metavar, text) in CONFIG_FLAGS.items():
            parser.add_argument(flag, metavar=metavar, help=f"{text} ({key})")
        parser.add_argument("--no-rollout-state-restore", action="store_true",
                            help="accepted: the rollout engine's state is never restored")  # fmt: skip
        parser.add_argument(
            "--ignore_mismatched_sizes",
            action="store_true",
            help="trainer.init_from leaves out tensors of other shapes; written down",
        )
    look.add_argument("--clean", action="store_true", help="end what earlier attempts of the run left running")
    look.add_argument(
        "--quick", action="store_true", help="leave out what loads libraries or calls the reward function"
    )
    look.add_argument("--log", metavar="FILE", help="a log of the run, compared where its record is lost or foreign")
    look.add_argument("--json", action="store_true", help="one JSON object")
    # Arguments by which another process starts a trainer; not for people.
    for hidden in ("--from-env", "--events-stdout", "--watch-stdin"):
        train.add_argument(hidden, action="store_true", help=argparse.SUPPRESS)
    page = _add(commands, "ui", "run_command.ui", "keep the Prefect page of a run open")
    page.add_argument(
        "path", nargs="?", default=".", metavar="RUN", help="a run's folder, or the folder that holds runs"
    )


def _add_platform(commands: argparse._SubParsersAction) -> None:
    up = _add(commands, "up", "platform_command.up", "Prefect server, worker, deployments and automations, unattended")
    down = _add(commands, "down", "platform_command.down", "end what `up` started; its flow runs save and go on later")
    for parser in (up, down):
        parser.add_argument(
            "dir", nargs="?", default="runs", metavar="DIR", help="the folder that holds runs (default: runs)"
        )
    up.add_argument(
        "--database",
        metavar="URL",
        help="the Prefect server's database, postgresql+asyncpg://… (default: PREFECT_API_DATABASE_CONNECTION_URL, "
        "which no process list shows, else SQLite)",
    )


def _add_checkpoints(commands: argparse._SubParsersAction) -> None:
    check = _add(commands, "verify", "verify_command.main", "is this checkpoint whole? exit 0 good, 1 bad")
    check.add_argument("paths", nargs="+", metavar="PATH", help="a checkpoint's folder or s3:// address")
    check.add_argument("--quick", action="store_true", help="sizes and headers only, the content is not read")
    check.add_argument("--json", action="store_true", help="one JSON object, a list of them for several paths")
    listing = _add(
        commands, "ls", "inspect_commands.ls_command", "the checkpoints of a run with their state here and in the store"
    )
    workers = _add(
        commands, "ps", "ps_command.main", "who works for a run: processes, since when, with how much memory"
    )
    workers.add_argument("run", metavar="RUN", help="the run's folder")
    workers.add_argument("--json", action="store_true", help="one JSON object")
    tune = _add(commands, "tune", "tune_command.main", "how often to save, from what the run has measured")
    tune.add_argument("run", metavar="RUN", help="the run's folder")
    tune.add_argument(
        "--mtbf-hours", type=float, required=True, metavar="H", help="hours between two kills, on average"
    )
    tune.add_argument("--json", action="store_true", help="one JSON object")
    decision = _add(commands, "plan", "inspect_commands.plan_command", "where the next start goes on, and why")
    for parser in (listing, decision):
        parser.add_argument("run", metavar="RUN", help="the run's folder")
        parser.add_argument(
            "--remote", action="store_true", help="ask the store, instead of what the run recorded of it"
        )
        parser.add_argument("--json", action="store_true", help="one JSON object")


def _add_conversion(commands: argparse._SubParsersAction) -> None:
    convert = _add(commands, "convert", "convert_command.main", "a checkpoint in the other layout, as a new folder")
    convert.add_argument("source", metavar="SOURCE", help="a checkpoint's folder")
    convert.add_argument("target", metavar="TARGET", help="the new folder")
    convert.add_argument("--layout", choices=("full", "sharded"), required=True, help="what TARGET is to have")
    convert.add_argument("--json", action="store_true", help="one JSON object")


def _add_retention(commands: argparse._SubParsersAction) -> None:
    prune = _add(commands, "prune", "retention_commands.prune", "delete the checkpoints on disk that no rule keeps")
    prune.add_argument("run", metavar="RUN", help="the run's folder")
    prune.add_argument("--dry-run", action="store_true", help="say which would go and why, delete nothing")
    prune.add_argument("--json", action="store_true", help="one JSON object")
    pin = _add(commands, "pin", "retention_commands.pin", "keep a step for ever")
    pin.add_argument("run", metavar="RUN", help="the run's folder")
    pin.add_argument("step", type=int, metavar="STEP", help="which one")
    pin.add_argument("--remove", action="store_true", help="let the rules decide over it again")


def _add_store(commands: argparse._SubParsersAction) -> None:
    upload = _add(commands, "upload", "transfer.upload", "bring a checkpoint into the run's store")
    upload.add_argument("run", metavar="RUN", help="the run's folder")
    upload.add_argument("--step", type=int, metavar="N", help="which one (default: the newest)")
    upload.add_argument("--attempt", type=int, help=argparse.SUPPRESS)
    download = _add(commands, "download", "transfer.download", "bring a checkpoint from the run's store, verified")
    download.add_argument("run", metavar="RUN", help="the run's folder")
    download.add_argument("--step", type=int, metavar="N", required=True, help="which one")
    for parser in (upload, download):
        parser.add_argument("--json", action="store_true", help="one JSON object")
        parser.add_argument("--watch-stdin", action="store_true", help=argparse.SUPPRESS)


def _add_export(commands: argparse._SubParsersAction) -> None:
    export = _add(
        commands, "export", "export_command.main", "a checkpoint as a Hugging Face folder, checked by loading it"
    )
    export.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint's folder, or a run's checkpoints/latest")
    export.add_argument("out", nargs="?", metavar="OUT", help="the new folder (default: the run's export/step_<N>)")
    export.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="precision")
    export.add_argument(
        "--format",
        choices=("safetensors", "pytorch"),
        default="safetensors",
        help="pytorch: one pytorch_model.bin, which takes as much memory as the model",
    )
    export.add_argument("--json", action="store_true", help="one JSON object")


def _add_serve(commands: argparse._SubParsersAction) -> None:
    serve = _add(
        commands, "serve", "serve_command.main", "vLLM's OpenAI-compatible server on a checkpoint or an export"
    )
    serve.usage = f"{serve.prog} [options] CHECKPOINT|OUT [-- vLLM's own options]"
    serve.add_argument(
        "path", metavar="CHECKPOINT|OUT", help="a checkpoint, exported first, once; or a Hugging Face folder"
    )
    serve.add_argument("--port", type=int, metavar="N", help="where it listens (default: 8000)")
    serve.add_argument("--tensor-parallel-size", type=int, metavar="N", help="GPUs that share the model (default: 1)")
    serve.add_argument(
        "--gpu-memory-utilization", type=float, metavar="X", help="share of a GPU's memory that it may take"
    )
    serve.set_defaults(passes_on=True)


def _add_dataset(commands: argparse._SubParsersAction) -> None:
    dataset = commands.add_parser(
        "dataset", help="parquet data sets", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    dataset.epilog = epilog(dataset.prog)
    actions = dataset.add_subparsers(metavar="ACTION", required=True)
    check = _add(
        actions, "check", "dataset_command.check", "count the rows of parquet files, held against what is expected"
    )
    check.add_argument("files", nargs="+", metavar="FILES", help="paths, globs or s3:// addresses")
    expected = check.add_mutually_exclusive_group()
    expected.add_argument("--run", metavar="RUN", help="a run's folder: its record of the first start")
    expected.add_argument("--expect-rows", type=int, metavar="N", help="a number")
    expected.add_argument("--log", metavar="FILE", help="a train.log, of Keepstep or verl: its last training rows")
    check.add_argument("--deep", action="store_true", help="read every page, and give the SHA-256 of all rows")
    check.add_argument("--json", action="store_true", help="one JSON object")


def _add_doctor(commands: argparse._SubParsersAction) -> None:
    doctor = _add(commands, "doctor", "doctor_command.main", "what is wrong with a run, why, and what to do")
    doctor.add_argument("run", metavar="RUN", help="the run's folder")
    doctor.add_argument("--json", action="store_true", help="one JSON object")


def _add_report(commands: argparse._SubParsersAction) -> None:
    report = _add(commands, "report", "report_command.main", "one HTML file about a run, also while it runs")
    report.add_argument("run", metavar="RUN", help="the run's folder")
    report.add_argument("--out", metavar="FILE", help="the file (default: report.html in the run's folder)")


def _add_completion(commands: argparse._SubParsersAction) -> None:
    completion = _add(commands, "completion", "completion_command.main", "what a shell completes this command by")
    completion.add_argument(
        "shell",
        choices=["bash", "zsh"],
        metavar="SHELL",
        help="bash or zsh: source it, or put it where the shell looks",
    )


def _destination(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _imported_late(address: str) -> Command:
    """The command `<module>.<function>` of `keepstep.cli`; its module is imported when it runs."""
    module, _, function = address.partition(".")

    def command(args: argparse.Namespace, settings: list[str]) -> int:
        found = getattr(importlib.import_module(f"keepstep.cli.{module}"), function)
        return found(args, settings) if args.takes_overrides else found(args)

    return command


if __name__ == "__main__":
    entry()
