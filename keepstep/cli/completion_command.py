"""`keepstep completion SHELL`: what a shell needs to complete commands, options, files and settings. Light.

The script is shtab's, from the command's own parser; settings are added for the commands that take them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from keepstep.errors import EXIT_DONE

FOLDERS = {"RUN", "DIR", "CHECKPOINT", "CHECKPOINT|OUT", "OUT", "PATH", "SOURCE", "TARGET"}
FILES = {"FILE", "FILES", "NAME|FILE"}
SETTINGS = "_keepstep_settings"
PREAMBLE = {
    "bash": """{name}() {{ compgen -W "{keys}" -- "$1"; }}""",
    "zsh": """{name}() {{ compadd -S= -- {keys}; }}""",
}


def main(args: argparse.Namespace) -> int:
    import shtab

    from keepstep.cli.main import build_parser
    from keepstep.config.load import settings

    parser = build_parser()
    for command in (parser, *commands(parser)):
        for action in command._actions:
            if action.metavar in FOLDERS:
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
            elif action.metavar in FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        if command.get_default("takes_overrides"):
            given = command.add_argument("settings", nargs="*")
            given.complete = dict.fromkeys(PREAMBLE, SETTINGS)  # type: ignore[attr-defined]
    keys = " ".join(sorted(settings()))
    preamble: Any = {args.shell: PREAMBLE[args.shell].format(name=SETTINGS, keys=keys)}
    print(shtab.complete(parser, args.shell, preamble=preamble))
    return EXIT_DONE


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """All commands below this one."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield command
                yield from commands(command)
