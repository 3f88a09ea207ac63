"""Finding a reward function by dotted path or in a file, and scoring with it."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keepstep.config.schema import RewardFunctionConfig
from keepstep.errors import ConfigError, RewardError

RewardFunction = Callable[..., float | dict[str, Any]]
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


def score(
    function: RewardFunction, data_source: str, text: str, ground_truth: str, extra_info: dict[str, Any]
) -> float:
    """One response's reward. A dict carries it under `score`, as in verl."""
    try:
        result = function(data_source=data_source, solution_str=text, ground_truth=ground_truth, extra_info=extra_info)
        value = float(result["score"] if isinstance(result, dict) else result)
        if not math.isfinite(value):
            raise ValueError(f"the reward is {value}")
        return value
    except Exception as error:
        where = f"{function.__module__}.{getattr(function, '__qualname__', function)}"
        raise RewardError(
            f"The reward function {where} failed on the response {text[:60]!r} to a row of {data_source!r}: "
            f"{type(error).__name__}: {error}.",
            "Mend the function; a reward is a finite number, or a dict with `score`.",
        ) from error


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
