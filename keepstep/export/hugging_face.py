"""A checkpoint as a Hugging Face folder: safetensors, config, tokenizer; checked by loading it. Imports torch."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from keepstep.checkpoint import layout
from keepstep.checkpoint.reader import ACTOR, read_role
from keepstep.checkpoint.verify import verify
from keepstep.errors import CheckpointError, ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export(checkpoint: Path, target: Path, dtype: str = "float32") -> dict[str, Any]:
    """Write `target`, whole or not at all, and load it back.

    Returns:
        {"path", "step", "num_tensors", "num_parameters", "dtype"}.

    Raises:
        CheckpointError: the checkpoint does not verify, or what was written does not load to the same tensors.
        ConfigError: the target exists.
    """
    verdict = verify(checkpoint)
    if not verdict.exportable:
        raise CheckpointError(f"{checkpoint} is not exported: {verdict.reasons[0]}", "Take a checkpoint that verifies.")
    if not (checkpoint / layout.TOKENIZER_DIR / "config.json").is_file():
        raise CheckpointError(
            f"{checkpoint} has no {layout.TOKENIZER_DIR}/config.json, so its model is unknown.",
            f"Put the model's configuration and tokenizer into {checkpoint / layout.TOKENIZER_DIR}.",
        )
    if target.exists():
        raise ConfigError(f"{target} exists.", "Name a folder that does not.")
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        shutil.copytree(checkpoint / layout.TOKENIZER_DIR, temporary)
        state = read_role(checkpoint, ACTOR).tensors()
        _write(temporary, state, DTYPES[dtype])
        os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    num_parameters = check(target, state, DTYPES[dtype])
    return {
        "path": str(target),
        "step": verdict.step,
        "num_tensors": len(state),
        "num_parameters": num_parameters,
        "dtype": dtype,
    }


def check_exportable(checkpoint: Path) -> None:
    """Whether an export of this checkpoint would load: its names and shapes against its own config, without weights.

    Raises:
        CheckpointError: a tensor is missing, unexpected or of another shape.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint / layout.TOKENIZER_DIR))
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found = {name: tuple(tensor.shape) for name, tensor in read_role(checkpoint, ACTOR).tensors().items()}
    differing = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if differing:
        raise CheckpointError(f"{checkpoint} cannot be exported: {', '.join(differing[:5])} do not fit its config.")


def check(folder: Path, state: dict[str, torch.Tensor], dtype: torch.dtype) -> int:
    """Load the folder offline and compare every tensor; returns the number of parameters.

    Raises:
        CheckpointError: a tensor is missing, unexpected or different, or the tokenizer does not load.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    AutoTokenizer.from_pretrained(folder, local_files_only=True)
    loaded = dict(model.named_parameters())
    differing = sorted(loaded.keys() ^ state.keys()) or sorted(
        name for name, value in state.items() if not torch.equal(loaded[name].detach(), value.to(dtype))
    )
    if differing:
        raise CheckpointError(f"{folder} does not load to the same tensors: {', '.join(differing[:5])}.")
    return sum(parameter.numel() for parameter in loaded.values())


def _write(folder: Path, state: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Weights and config in the exported precision. Tied weights stand once, under their own name."""
    from safetensors.torch import save_file
    from transformers import AutoConfig

    save_file(
        {name: value.to(dtype).contiguous() for name, value in state.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = AutoConfig.from_pretrained(folder)
    config.dtype = dtype
    config.save_pretrained(folder)
