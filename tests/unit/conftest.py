"""Checkpoints that several test modules look at; a test that changes one works on a copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit import sharded_builder


@pytest.fixture(scope="session")
def sharded_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """step_20 of layout `sharded`, by two ranks, which takes seconds to make."""
    folder = tmp_path_factory.mktemp("sharded") / "checkpoints"
    folder.mkdir()
    return sharded_builder.write(folder, 20)
