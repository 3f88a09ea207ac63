"""Writing a safetensors file tensor by tensor; `safetensors.torch.save_file` wants all of a file in memory at once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from keepstep.checkpoint.safetensors_headers import DTYPES

_CODES = {getattr(torch, name): code for code, (name, _) in DTYPES.items()}
_SIZES = {code: size for code, (_, size) in DTYPES.items()}
ALIGNMENT = 8
"""Of the tensors' begin; the library fills its headers up to it as well."""


def write(
    path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], read: Callable[[str], torch.Tensor]
) -> None:
    """Create `path` with `tensors` (name to dtype and shape), each asked of `read` in its turn; durable on return.

    Raises:
        ValueError: `read` gave another dtype or shape than was said.
    """
    # The widest first, as the library does it, so that each tensor is aligned to its own size.
    order = sorted(tensors, key=lambda name: -_SIZES[_CODES[tensors[name][0]]])
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        dtype, shape = tensors[name]
        begin, end = end, end + _num_bytes(dtype, shape)
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            tensor = read(name).contiguous()
            if (tensor.dtype, tuple(tensor.shape)) != tensors[name]:
                raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {tensors[name]}")
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _num_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    size = _SIZES[_CODES[dtype]]
    for length in shape:
        size *= length
    return size
