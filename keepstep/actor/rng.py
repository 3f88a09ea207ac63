"""Random streams of one process as plain base64, never as pickles.

Order and sampling are counter-based and need none of these; they cover what remains (dropout, libraries).
"""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_states() -> dict[str, Any]:
    """{python, numpy, torch, cuda: [one per device]}, each base64: JSON for the first two, raw bytes for torch's."""
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": _encode_json(random.getstate()),
        "numpy": _encode_json([name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)]),
        "torch": _encode(torch.get_rng_state().numpy().tobytes()),
        "cuda": [_encode(state.cpu().numpy().tobytes()) for state in torch.cuda.get_rng_state_all()]
        if torch.cuda.is_available()
        else [],
    }


def restore_rng_states(states: dict[str, Any]) -> None:
    """Inverse of `rng_states`."""
    version, internal, gauss = _decode_json(states["python"])
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = _decode_json(states["numpy"])
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_tensor(states["torch"]))
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_tensor(state) for state in states["cuda"]])


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _encode_json(value: Any) -> str:
    return _encode(json.dumps(value).encode())


def _decode_json(text: str) -> Any:
    return json.loads(base64.b64decode(text))


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
