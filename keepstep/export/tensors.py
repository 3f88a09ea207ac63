"""The tensors of an export under their names in files, each made from the checkpoint's when it is asked for."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from keepstep.errors import CheckpointError
from keepstep.export.model import Expected
from keepstep.export.names import NamesError, adapter, match
from keepstep.export.weights import Weights

Spec = tuple[torch.dtype, tuple[int, ...]]


class FileTensors:
    def __init__(self, weights: Weights, expected: Expected, dtype: torch.dtype, where: str) -> None:
        """
        Args:
            dtype: of what is floating.
            where: the checkpoint, for messages.

        Raises:
            CheckpointError: its tensors are not those of the model, or hold a tied tensor twice and differently.
        """
        self._weights, self._expected, self._dtype = weights, expected, dtype
        shapes = weights.shapes()
        if name := adapter(shapes):
            raise CheckpointError(
                f"{where} holds adapters around the layers of a model ({name}), not a model.",
                "Merge them first (peft's merge_and_unload), or use them as an adapter.",
            )
        self._in_memory, self._stored = _match(shapes, expected, where)
        known = expected.in_memory if self._in_memory else expected.in_files
        differing = [name for name, places in self._stored.items() if shapes[places[0]] != tuple(known[name].shape)]
        if differing:
            first = differing[0]
            raise CheckpointError(
                f"{where}: {len(differing)} tensors have another shape than the model's: {first} is "
                f"{list(shapes[self._stored[first][0]])}, expected {list(known[first].shape)}.",
                "Weights and config.json belong to different models.",
            )
        self.specs: dict[str, Spec] = {
            name: (dtype if value.is_floating_point() else value.dtype, tuple(value.shape))
            for name, value in expected.in_files.items()
        }
        self._last: tuple[str, dict[str, torch.Tensor]] = ("", {})
        self._check_tied(where)

    def read(self, name: str) -> torch.Tensor:
        """One tensor of `specs`. Memory: it, and what it is a part of."""
        if not self._in_memory:
            return self._cast(self._read(name))
        source = self._expected.made_of[name]
        if source == name:
            return self._cast(self._read(name))
        if self._last[0] != source:
            self._last = (source, self._expected.converted(source, self._read(source)))
        return self._cast(self._last[1][name])

    def differing(self, loaded: dict[str, torch.Tensor]) -> list[str]:
        """Names under which a loaded model holds something else; of those that it holds as the checkpoint does."""
        same_form = (name for name in self._stored if name in loaded)
        return [name for name in same_form if not torch.equal(loaded[name], self._cast(self._read(name)))]

    def _read(self, name: str) -> torch.Tensor:
        return self._weights.read(self._stored[name][0])

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def _check_tied(self, where: str) -> None:
        for first, *others in self._stored.values():
            for other in others:
                if not torch.equal(self._weights.read(first), self._weights.read(other)):
                    raise CheckpointError(
                        f"{where}: {first} and {other} are tied by config.json and differ: one of them would be lost.",
                        "Set tie_word_embeddings to false in its config.json, if the model was trained so.",
                    )
        self._stored = {name: places[:1] for name, places in self._stored.items()}


def _match(shapes: Iterable[str], expected: Expected, where: str) -> tuple[bool, dict[str, list[str]]]:
    """(whether the checkpoint has the model's form in memory, where it has each tensor)."""
    stored = list(shapes)
    try:
        return True, match(stored, expected.in_memory, expected.aliases)
    except NamesError as error:
        if expected.in_files.keys() == expected.in_memory.keys():
            raise CheckpointError(f"{where} is not the model of its config.json: {error}.") from None
    try:
        return False, match(stored, expected.in_files, {})
    except NamesError as error:
        raise CheckpointError(f"{where} is not the model of its config.json: {error}.") from None
