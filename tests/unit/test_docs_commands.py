"""Every command of README, CONTRIBUTING, docs/ and the heads of configurations: run, or understood by what it names.

What is cheap is run here, on a run of its own. What is not (a training, a server, a cluster) goes through the real
parser to its end, and `ELSEWHERE` names the test that runs it for real. A command of no class fails.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import itertools
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from keepstep.cli.main import _cut, build_parser, main
from keepstep.config.load import load, to_yaml
from keepstep.data import record
from keepstep.data.count import count_rows
from keepstep.events.log import EventLog
from keepstep.preflight import contract
from keepstep.run import RunDir, write_json
from tests.architecture.test_cli_surface import SURFACE
from tests.unit import documents, export_builder, standing_run
from tests.unit.documents import CONFIGS, ROOT, Command

STEPS = (300, 400)
SCHEDULE = "00000000-0000-0000-0000-000000000000"

FILLED_IN = {
    "RUN": "runs/mine", "FILES": "gsm8k/train.parquet", "PATH": "runs/mine/checkpoints/latest", "STEP": "400",
    "CHECKPOINT": "runs/mine/checkpoints/latest", "OUT": "out/new", "FILE": "out.html", "A": "sharded/step_20",
    "B": "joined/step_20", "/verl/global_step_400": "verl/global_step_4", "key=value": "trainer.seed=1", "ID": SCHEDULE,
}  # fmt: skip
"""What stands in documents for something of the reader's, and what there is of it here."""

RUN_HERE = {
    "run": ["--dry-run"], "train": ["--dry-run"], "convert": [], "dataset check": [], "doctor": [], "export": [],
    "ls": [], "pin": [], "plan": [], "prune": [], "ps": [], "report": [], "tune": [], "verify": [],
}  # fmt: skip
"""Commands that are run on the run of `lab`, and what is added to them."""

INTEGRATION = "tests/integration"
ELSEWHERE = {
    "keepstep run": ("tests/conftest.py", "reference", '"make run"'),
    "keepstep train": (f"{INTEGRATION}/test_saves.py", "test_suspended_attempt_wakes_up_fenced", '"train"'),
    "keepstep preflight": ("tests/unit/test_preflight.py", "test_a_start_that_would_go_through", '["preflight"'),
    "keepstep completion": ("tests/unit/test_completion.py", "script", '"completion"'),
    "keepstep ui": ("tests/browser/test_prefect_page.py", "test_the_flow_run_with_its_tasks", '"ui"'),
    "keepstep up": (f"{INTEGRATION}/test_unattended.py", "test_up_again_changes_nothing", 'keepstep("up")'),
    "keepstep down": (f"{INTEGRATION}/test_unattended.py", "test_up_again_changes_nothing", 'keepstep("down")'),
    "keepstep serve": (f"{INTEGRATION}/test_serve.py", "test_log_probs_of_the_server_are_the_policys", '"serve"'),
    "keepstep upload": (
        f"{INTEGRATION}/test_storage.py", "test_killed_upload_leaves_nothing_visible_and_goes_on_by_part",
        '"upload"'),
    "keepstep download": (
        f"{INTEGRATION}/test_storage.py", "test_by_hand_nothing_is_cleared_and_a_held_run_is_left_alone", '"download"'),
    "make run": ("tests/conftest.py", "reference", '"make run"'),
    "python -m keepstep.platform.automations": (
        f"{INTEGRATION}/test_docs_prefect.py", "test_what_another_server_is_given", '"keepstep.platform.automations"'),
    "curl": (f"{INTEGRATION}/test_serve.py", "test_the_server_answers_under_the_runs_name_from_an_export_of_its_own",
             "/v1/chat/completions"),
    "export": (f"{INTEGRATION}/test_unattended.py", "test_deployment_runs_by_the_command_that_up_prints",
               '"PREFECT_API_URL"'),
    "prefect deployment run": (
        f"{INTEGRATION}/test_unattended.py", "test_deployment_runs_by_the_command_that_up_prints",
        '"deployment", "run"'),
    "prefect deploy": (
        f"{INTEGRATION}/test_docs_prefect.py", "test_what_another_server_is_given", '"--prefect-file"'),
    "prefect work-pool create": (
        f"{INTEGRATION}/test_docs_prefect.py", "test_what_another_server_is_given", '"work-pool"'),
    "prefect worker start": (f"{INTEGRATION}/test_docs_prefect.py", "test_a_worker_polls", '"worker"'),
    "prefect deployment schedule create": (
        f"{INTEGRATION}/test_docs_prefect.py", "test_a_schedule_of_ones_own_outlives_the_next_registration",
        '"create"'),
    "prefect deployment schedule ls": (
        f"{INTEGRATION}/test_docs_prefect.py", "test_a_schedule_is_switched_on", '"ls"'),
    "prefect deployment schedule resume": (
        f"{INTEGRATION}/test_docs_prefect.py", "test_a_schedule_is_switched_on", '"resume"'),
    "prefect flow-run retry": (
        f"{INTEGRATION}/test_docs_prefect.py", "test_a_failed_flow_run_says_why_and_is_queued_again", '"retry"'),
    "prefect flow-run ls": (
        f"{INTEGRATION}/test_docs_prefect.py", "test_a_failed_flow_run_says_why_and_is_queued_again",
        '"flow-run", "ls"'),
    "prefect flow-run logs": (
        f"{INTEGRATION}/test_docs_prefect.py", "test_a_failed_flow_run_says_why_and_is_queued_again", '"logs"'),
    "prefect block ls": (f"{INTEGRATION}/test_docs_prefect.py", "test_blocks_are_listed", '"block"'),
}  # fmt: skip
"""Command: (file, test or fixture, what its source must contain) where it is run for real."""

FOREIGN = ("verl.trainer.main_ppo", "verl.model_merger")
"""Modules that a table names only to say what replaces them."""


def by_words() -> list[list[Command]]:
    """The same command at several places is one test."""
    key: Callable[[Command], tuple] = lambda command: (command.words, command.inline)  # noqa: E731
    return [list(group) for _, group in itertools.groupby(sorted(documents.commands(), key=key), key)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, sharded_checkpoint: Path) -> Path:
    """What the documents' commands are given: a run with two checkpoints, data, verl's and a sharded checkpoint."""
    folder = tmp_path_factory.mktemp("lab")
    (folder / "gsm8k").mkdir()
    data = [standing_run.make_data(folder / "gsm8k" / f"{name}.parquet", 32) for name in ("train", "test")]
    base = export_builder.write_base(folder / "models" / "base", export_builder.tiny_model())
    for step in STEPS:
        export_builder.write_checkpoint(folder, export_builder.tiny_model(seed=step), base, step)
    run = RunDir.at(folder / "runs" / "mine")
    run.root.parent.mkdir()
    (folder / "run").rename(run.root)
    config = load(None, ["trainer.output_dir=runs/mine", "s3.embedded=false"])
    terms = contract.terms(config, model_fingerprint="x", total_steps=STEPS[-1])
    dataset = record.build(count_rows([str(data[0])]), [])
    write_json(run.record, {"run_id": "run-a", "contract": terms, "dataset": dataset})
    run.config.write_text(to_yaml(config))
    run.latest_link.symlink_to(f"step_{STEPS[-1]}")
    tell(run)
    for name in ("smollm2-135m-gsm8k-cpu", "backwards"):
        (folder / "runs" / name).symlink_to("mine")
    documents.files_of_the_example(folder)
    (folder / "data").mkdir()
    standing_run.make_data(folder / "data" / "train.parquet", 640)
    shutil.copytree(ROOT / "tests" / "data" / "verl" / "fsdp2", folder / "verl")
    shutil.copytree(sharded_checkpoint, folder / "sharded" / sharded_checkpoint.name)
    return folder


def tell(run: RunDir) -> None:
    """Events of a run whose last step was saved and verified, as far as commands look at them."""
    with closing(EventLog(run.events, 1)) as events:
        events.emit("attempt_started", total_steps=STEPS[-1])
        for step in STEPS:
            events.emit("step", step=step, total=STEPS[-1], reward=0.5, seconds=1.0)
            events.emit("checkpoint_saved", step=step)
            events.emit("checkpoint_verified", step=step)
        events.emit("finished", step=STEPS[-1])


@pytest.fixture
def lab(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it as the working directory."""
    shutil.copytree(made, tmp_path / "lab", symlinks=True)
    monkeypatch.chdir(tmp_path / "lab")
    return tmp_path / "lab"


@pytest.mark.parametrize("places", by_words(), ids=lambda places: str(places[0])[:80])
def test_command(places: list[Command], lab: Path):
    program = places[0].words[0]
    assert program in CHECKS, f"{places[0]}: nothing here runs or understands it; output in a fence is labelled `text`"
    CHECKS[program](places[0])


def test_every_configuration_has_its_command_and_resolves(capsys: pytest.CaptureFixture[str]):
    for path in CONFIGS:
        found = [command.words for command in documents.in_comments(path)]
        assert any(words[:4] == ("keepstep", "run", "--config", path.stem) for words in found) or any(
            words[:4] == ("prefect", "deployment", "run", f"grpo-train/{path.stem}") for words in found
        ), f"{path.name}: its head names no command that starts it"
        assert main(["run", "--config", path.stem, "--dry-run"]) == 0
        assert yaml.safe_load(capsys.readouterr().out)["trainer"]["output_dir"]


# ---- what each program's commands are held against ------------------------------------------------------------------


def filled_in(words: tuple[str, ...]) -> list[str]:
    """Arguments of a usage line or an example as somebody would give them: options in brackets are all given."""
    bare = (re.sub(r"^\[(.*?)\]?$", r"\1", word) if "=[" not in word else word for word in words)
    whole = (word.removesuffix("]") if "[" not in word else word for word in bare)
    return [FILLED_IN.get(word, word) for word in whole if word != "…"]


def of_keepstep(command: Command) -> None:
    arguments = filled_in(command.words[1:])
    if command.inline and " ".join(command.words) in SURFACE:
        return  # The command's name in a sentence.
    own, passed_on = _cut(arguments)
    if "--help" in own:
        with pytest.raises(SystemExit, match=r"^0$"):
            main(own)
        return
    args, rest = understood(command, own)
    assert not rest or (args.takes_overrides and all("=" in setting for setting in rest)), f"{command}: {rest}"
    assert not passed_on or args.passes_on, command
    name = " ".join(itertools.takewhile(lambda word: word in ("dataset", "check") or word == arguments[0], arguments))
    if name in RUN_HERE:
        extra = [flag for flag in RUN_HERE[name] if flag not in arguments]
        assert main([*arguments, *extra]) == 0, f"{command} failed"
    if name not in RUN_HERE or RUN_HERE[name]:
        run_elsewhere(f"keepstep {name}", command)


def understood(command: Command, arguments: list[str]):
    """What the command's own parser makes of it."""
    try:
        return build_parser().parse_known_args(arguments)
    except SystemExit:
        pytest.fail(f"{command}: the command line does not understand it")


def of_make(command: Command) -> None:
    """The targets are there, and what their recipes call is there."""
    makefile = (ROOT / "Makefile").read_text()
    targets = [word for word in command.words[1:] if "=" not in word]
    if targets[0].endswith("…"):
        targets = re.findall(rf"^({re.escape(targets[0][:-1])}[\w-]+):", makefile, re.MULTILINE)
    variables = [word for word in command.words[1:] if "=" in word]
    for name in (variable.partition("=")[0] for variable in variables):
        assert f"$({name})" in makefile, f"{command}: the Makefile has no {name}"
    done = subprocess.run(
        ["make", "-n", *targets, *variables], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert targets and done.returncode == 0, f"{command}: {done.stderr}"
    for path in re.findall(r"\btests/[\w./]+", done.stdout):
        assert (ROOT / path).exists(), f"{command}: {path}"
    for module in re.findall(r"python -m ([\w.]+)", done.stdout):
        assert importlib.util.find_spec(module), f"{command}: {module}"
    if targets == ["run"]:
        assert "/keepstep run --config quickstart" in done.stdout
        run_elsewhere("make run", command)
    if targets[0] in ("lint", "test"):
        assert f"make {targets[0]}\n" in (ROOT / ".ci" / "run").read_text()


def of_prefect(command: Command) -> None:
    """Prefect's own parser takes it to the end; what it names is there, and its settings load."""
    from prefect.cli._app import _app

    arguments = filled_in(command.words[1:])
    arguments = [word for word in arguments if word != "--no-prompt"]  # Taken off by `prefect` before it parses.
    try:
        _, bound, _ = _app.parse_args(arguments, exit_on_error=False, print_error=False)
    except Exception as error:
        pytest.fail(f"{command}: {error}")
    given = bound.arguments
    words = " ".join(_app.parse_commands(arguments)[0])
    deployments = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text())["deployments"]
    for name in (given.get("names") or []) + ([given["name"].split("/")[1]] if words == "deployment run" else []):
        assert name in [one["name"] for one in deployments], f"{command}: no deployment {name}"
    if file := given.get("prefect_file"):
        assert at_home(str(file)).is_file(), f"{command}: {file}"
    for parameter in given.get("multiparams") or given.get("params") or []:
        name, _, value = parameter.partition("=")
        if name == "overrides":
            load(given["name"].split("/")[1], [f"{key}={json.dumps(one)}" for key, one in json.loads(value).items()])
    if words != "automation create":  # Named as what not to do.
        run_elsewhere(f"prefect {words}", command)


def of_python(command: Command) -> None:
    program, *arguments = command.words[1:]
    if program == "-c":
        compile(arguments[0], str(command), "exec")
    elif program != "-m":
        script = Path(program) if Path(program).is_file() else ROOT / program
        done = subprocess.run(
            [sys.executable, script, *arguments], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
    elif arguments[0] not in FOREIGN:
        assert importlib.util.find_spec(arguments[0]), command
        assert at_home(arguments[1]).is_file(), command
        run_elsewhere(f"python -m {arguments[0]}", command)


def of_pip(command: Command) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert command.words[1] == "install"
    for extra in re.findall(r"keepstep\[(\w+)\]", " ".join(command.words)):
        assert extra in extras, f"{command}: pyproject.toml has no extra {extra}"


def of_kubectl(command: Command) -> None:
    """What it is applied to is what is rendered."""
    if command.words[1:2] == ("apply",):
        assert command.words[1:] == ("apply", "-f", "build/manifests")
        return
    (name,) = [word.removeprefix("deploy/") for word in command.words if word.startswith("deploy/")]
    templates = "".join(path.read_text() for path in (ROOT / "deployments").rglob("*.y*ml*"))
    values = yaml.safe_load((ROOT / "deployments" / "values.yaml").read_text())
    assert f"{values['name']}-" in name and name.removeprefix(values["name"]) in templates, command


def of_docker(command: Command) -> None:
    words = command.words
    file, target = words[words.index("-f") + 1], words[words.index("--target") + 1]
    assert re.search(rf"^FROM .* AS {target}$", (ROOT / file).read_text(), re.MULTILINE), command


def of_curl(command: Command) -> None:
    json.loads(command.words[command.words.index("-d") + 1])
    run_elsewhere("curl", command)
    assert ELSEWHERE["curl"][2] in command.words[1]


def of_export(command: Command) -> None:
    name = command.words[1].partition("=")[0]
    assert re.fullmatch(r"[A-Z_]+", name), command
    if name == "PREFECT_API_URL":
        run_elsewhere("export", command)


def of_shell(command: Command) -> None:
    assert len(command.words) > 1, command


CHECKS: dict[str, Callable[[Command], None]] = {
    "keepstep": of_keepstep, "make": of_make, "prefect": of_prefect, "python": of_python, "pip": of_pip,
    "kubectl": of_kubectl, "docker": of_docker, "curl": of_curl, "export": of_export, "cd": of_shell,
    "read": of_shell,
}  # fmt: skip


def at_home(path: str) -> Path:
    """A file of the image, or one by its path below the repository, where it stands here."""
    return ROOT / path.removeprefix("/opt/keepstep/")


# ---- what is run elsewhere ------------------------------------------------------------------------------------------


def run_elsewhere(name: str, where: Command | str = "") -> None:
    assert name in ELSEWHERE, f"{where}: no test runs `{name}`"
    path, function, text = ELSEWHERE[name]
    assert text in source_with_helpers(ROOT / path, function), f"{path}::{function} does not run `{name}`: no {text}"


@functools.cache
def source_with_helpers(path: Path, function: str) -> str:
    """Source of a test with all that it uses of its own module, fixtures and constants included."""
    text = path.read_text()
    nodes = {name: node for node in ast.parse(text).body for name in names_of(node)}
    assert function in nodes, f"{path} has no {function}"
    wanted, used = [function], dict[str, str]()
    while wanted:
        name = wanted.pop()
        if name in nodes and name not in used:
            used[name] = ast.get_source_segment(text, nodes[name]) or ""
            walked = list(ast.walk(nodes[name]))
            wanted += [node.id for node in walked if isinstance(node, ast.Name)]
            wanted += [node.arg for node in walked if isinstance(node, ast.arg)]
    return "\n".join(used.values())


def names_of(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    if isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def test_all_that_is_run_elsewhere_is_there():
    for name in ELSEWHERE:
        run_elsewhere(name)
