"""What `--help` ends with is understood by the command line itself."""

from __future__ import annotations

import shlex

import pytest

from keepstep.cli.examples import EXAMPLES
from keepstep.cli.main import _cut, build_parser
from tests.architecture.test_cli_surface import SURFACE


def test_every_command_has_examples():
    assert sorted(EXAMPLES) == sorted(SURFACE)


@pytest.mark.parametrize("command", EXAMPLES)
def test_examples_are_understood(command: str, capsys: pytest.CaptureFixture[str]):
    for example in EXAMPLES[command]:
        assert example.startswith(command)
        own, passed_on = _cut(shlex.split(example)[1:])
        args, rest = build_parser().parse_known_args(own)
        assert not rest or (args.takes_overrides and all("=" in override for override in rest))
        assert not passed_on or args.passes_on
    with pytest.raises(SystemExit):
        build_parser().parse_args([*command.split()[1:], "--help"])
    printed = capsys.readouterr().out
    assert all(f"\n  {example}" in printed for example in EXAMPLES[command])
