"""Are trainer_state.json and param_groups.json complete, and do their counters agree with each other? Pure."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from keepstep.checkpoint import strict_json

TORCH_STATE_BYTES = 5056
"""torch's Mersenne Twister on the CPU."""
CUDA_STATE_BYTES = 16
_WORDS = 624


def state_problems(state: Any) -> list[str]:
    """What is wrong with the content of a trainer_state.json."""
    if not isinstance(state, dict):
        return ["not an object"]
    loader = state.get("dataloader_state")
    if not isinstance(loader, dict):
        return ["dataloader_state is missing: nothing says which row comes next"]
    needed = {
        "global_step": state.get("global_step"),
        "epoch": state.get("epoch"),
        "dataloader_state.train_dataset_offset": loader.get("train_dataset_offset"),
        "dataloader_state.val_dataset_offset": loader.get("val_dataset_offset"),
        "num_updates": state.get("num_updates"),
        "num_response_tokens": state.get("num_response_tokens"),
    }
    # Older checkpoints do not have them.
    counts = needed | {name: state[name] for name in ("num_train_rows", "num_gen_batches") if name in state}
    problems = [
        f"{name} is {_short(value)}, expected a count" for name, value in counts.items() if not _is_count(value)
    ]
    if not isinstance(state.get("metrics"), dict):
        problems.append("metrics is not an object")
    if not problems:
        problems += counter_problems(state)
    return problems + rng_problems(state.get("rng_states"))


def param_group_problems(groups: Any) -> list[str]:
    """What is wrong with the optimizer's hyper-parameters: groups with a learning rate over named parameters."""
    if not isinstance(groups, list) or not groups:
        return ["not a list of parameter groups"]
    names: list[Any] = []
    for group in groups:
        if not isinstance(group, dict) or not _is_number(group.get("lr")) or not isinstance(group.get("params"), list):
            return ["a parameter group without lr or params"]
        names += group["params"]
    if not names or not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
        return ["params are not names, each of them once"]
    return []


def counter_problems(state: dict[str, Any]) -> list[str]:
    """Whether the position in the data is one that so many batches lead to; every batch has one size."""
    step, offset = state["global_step"], state["dataloader_state"]["train_dataset_offset"]
    num_batches = state.get("num_gen_batches", step)
    problems = []
    if offset if num_batches == 0 else offset == 0 or offset % num_batches:
        problems.append(f"train_dataset_offset {offset} is not {num_batches} batches of one size")
    if num_batches < step:
        problems.append(f"num_gen_batches is {num_batches}, and {step} steps take one each at least")
    num_rows = state.get("num_train_rows")
    if num_rows == 0:
        problems.append("num_train_rows is 0")
    elif num_rows is not None and state["epoch"] != offset // num_rows + 1:
        problems.append(f"epoch {state['epoch']}, expected {offset // num_rows + 1} at row {offset} of {num_rows}")
    elif state["epoch"] == 0:
        problems.append("epoch 0, expected 1 or more")
    return problems


def rng_problems(rng: Any) -> list[str]:
    """Whether every random stream of every rank could be set again."""
    if not isinstance(rng, dict):
        return ["rng_states is missing"]
    per_rank = rng.get("per_rank", [])
    if not isinstance(per_rank, list):
        return ["rng_states.per_rank is not a list"]
    places = [("rng_states", rng), *((f"rng_states.per_rank[{rank}]", found) for rank, found in enumerate(per_rank))]
    return [problem for where, streams in places for problem in _stream_problems(where, streams)]


def _stream_problems(where: str, streams: Any) -> list[str]:
    if not isinstance(streams, dict):
        return [f"{where} is not an object"]
    cuda = streams.get("cuda")
    if not isinstance(cuda, list):
        return [f"{where}.cuda is not a list"]
    checks = [
        ("python", _is_python_state(_decode_json(streams.get("python")))),
        ("numpy", _is_numpy_state(_decode_json(streams.get("numpy")))),
        ("torch", _num_bytes(streams.get("torch")) == TORCH_STATE_BYTES),
        *((f"cuda[{device}]", _num_bytes(entry) == CUDA_STATE_BYTES) for device, entry in enumerate(cuda)),
    ]
    return [f"{where}.{name} is not the base64 of such a generator" for name, sound in checks if not sound]


def _is_python_state(value: Any) -> bool:
    """[3, [624 words and the position], null or a number]."""
    if not isinstance(value, list) or len(value) != 3 or value[0] != 3 or not isinstance(value[1], list):
        return False
    words, gauss = value[1], value[2]
    return (
        len(words) == _WORDS + 1 and _are_words(words) and words[-1] <= _WORDS and (gauss is None or _is_number(gauss))
    )


def _is_numpy_state(value: Any) -> bool:
    """["MT19937", [624 words], position, has_gauss, cached]."""
    if not isinstance(value, list) or len(value) != 5 or value[0] != "MT19937" or not isinstance(value[1], list):
        return False
    _, words, position, has_gauss, cached = value
    sound = len(words) == _WORDS and _are_words([*words, position]) and position <= _WORDS
    return sound and has_gauss in (0, 1) and _is_number(cached)


def _are_words(values: list[Any]) -> bool:
    return all(type(value) is int and 0 <= value < 2**32 for value in values)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _decode(text: Any) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True) if isinstance(text, str) else None
    except (ValueError, binascii.Error):
        return None


def _decode_json(text: Any) -> Any:
    data = _decode(text)
    try:
        return strict_json.loads(data) if data else None
    except strict_json.StrictJsonError:
        return None


def _num_bytes(text: Any) -> int | None:
    data = _decode(text)
    return None if data is None else len(data)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _short(value: Any) -> str:
    return repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
