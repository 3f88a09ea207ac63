"""Finding a reward function by dotted path or in a file."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keepstep.config.schema import RewardFunctionConfig
from keepstep.errors import ConfigError

RewardFunction = Callable[..., Any]
"""Returns a number, or a dict with `score`; or is a coroutine function that does."""
DEFAULT_FUNCTION = "compute_score"
DEFAULT_NAME = RewardFunctionConfig().name


def load_reward(name: str, path: str | None = None) -> RewardFunction:
    """`name` in the Python file `path`, or `name` as dotted path to a function or to a module with `compute_score`."""
    found = _from_file(Path(path), name) if path else _from_dotted(name)
    if not callable(found):
        wanted = DEFAULT_FUNCTION if name == DEFAULT_NAME else name
        raise ConfigError(
            f"custom_reward_function: {path or name} has no function {wanted!r}.",
            "Name the function in custom_reward_function.name.",
        )
    return found


def _from_file(path: Path, name: str) -> Any:
    if not path.is_file():
        raise ConfigError(f"custom_reward_function.path: {path} is not a file.", "Give the Python file's path.")
    spec = importlib.util.spec_from_file_location(f"keepstep_reward_{path.stem}", path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"custom_reward_function.path: importing {path} failed: {error!r}.", "Mend the file."
        ) from error
    # A file given without a name means its compute_score; a name that it does not have is an error, not a default.
    return getattr(module, DEFAULT_FUNCTION if name == DEFAULT_NAME else name, None)


def _from_dotted(name: str) -> Any:
    for module_name, attribute in ((name, DEFAULT_FUNCTION), tuple(name.rsplit(".", 1)) if "." in name else (name, "")):
        try:
            return getattr(importlib.import_module(module_name), attribute)
        except (ImportError, AttributeError):
            continue
    raise ConfigError(
        f"custom_reward_function.name: {name!r} is neither a module with `{DEFAULT_FUNCTION}` nor a function.",
        "Give a dotted path that imports, or custom_reward_function.path with the file.",
    )
