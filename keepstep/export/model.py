"""What a Hugging Face folder of a model has to hold, from its config alone: names, shapes and kinds, no values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from keepstep.errors import CheckpointError, first_line

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Expected:
    """The tensors of one model, on the meta device. Transformers holds some of them in another form than files do (the
    experts of a mixture as one tensor); a checkpoint may have either."""

    in_memory: Tensors
    """As the model's parameters and buffers are called; tied ones once."""
    in_files: Tensors
    """As they are called in a Hugging Face folder."""
    aliases: dict[str, str]
    """Other names of tied tensors: {alias: name}."""
    made_of: dict[str, str]
    """{name in files: name in memory}."""
    model: Any

    def converted(self, name: str, tensor: torch.Tensor) -> Tensors:
        """One tensor of `in_memory` as those of `in_files`."""
        return _as_in_files(self.model, {name: tensor})


def expected(folder: Path) -> Expected:
    """What the model of `folder`'s config.json is made of.

    Raises:
        CheckpointError: transformers does not know the model, or holds it in a form that cannot be turned back.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise CheckpointError(
            f"The model of {folder / 'config.json'} is not one that transformers knows: {first_line(error)}",
            "Models that bring their own code are not exported.",
        ) from error
    aliases = _aliases(model)
    own = {name: value for name, value in model.state_dict().items() if name not in aliases}
    made_of: dict[str, str] = {}
    one_by_one: Tensors = {}
    for name, value in own.items():
        parts = _as_in_files(model, {name: value})
        one_by_one |= parts
        made_of |= dict.fromkeys(parts, name)
    whole = _as_in_files(model, own)
    if {name: value.shape for name, value in whole.items()} != {name: v.shape for name, v in one_by_one.items()}:
        raise CheckpointError(f"A {config.model_type} model cannot be turned into files tensor by tensor.")
    return Expected(own, one_by_one, aliases, made_of, model)


def _as_in_files(model: Any, state: Tensors) -> Tensors:
    from transformers.core_model_loading import revert_weight_conversion

    found: Tensors = revert_weight_conversion(model, state)
    return found


def _aliases(model: torch.nn.Module) -> dict[str, str]:
    """Tied tensors are the same object under several names; the first one counts."""
    first: dict[int, str] = {}
    found = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        if id(value) in first:
            found[name] = first[id(value)]
        else:
            first[id(value)] = name
    return found
