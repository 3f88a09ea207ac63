"""Names of a checkpoint's tensors against those of its model: what wrappers add, and what is no model at all. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""What torch's wrappers put anywhere into a name."""
PREFIXES = ("module.", "model.", "actor.")
"""What whoever held the model put before all names."""
ADAPTERS = (".lora_A.", ".lora_B.", ".base_layer.", "lora_embedding_")


class NamesError(ValueError):
    """The tensors are not those of the model; the message says how."""


def adapter(names: Iterable[str]) -> str | None:
    """A name that tells that this is a model with adapters around its layers; None: it is not."""
    return next((name for name in names if any(mark in f".{name}." for mark in ADAPTERS)), None)


def match(stored: Collection[str], expected: Collection[str], aliases: Mapping[str, str]) -> dict[str, list[str]]:
    """Where each expected tensor is stored: {expected name: stored names}, more than one for a tied tensor.

    Args:
        aliases: other names of tied tensors, {alias: expected name}.

    Raises:
        NamesError: one is missing, one is none of the model's, or two have one name.
    """
    bare = [_unwrapped(name) for name in stored]
    renamings: list[Callable[[str], str]] = [_without(prefix, bare) for prefix in ("", *PREFIXES)]
    renamings.append(lambda name: f"model.{name}")
    known = set(expected) | set(aliases)
    best = max(renamings, key=lambda rename: sum(rename(name) in known for name in bare))
    found: dict[str, list[str]] = {}
    unexpected = []
    for name, plain in zip(stored, bare, strict=True):
        target = aliases.get(best(plain), best(plain))
        if target in expected:
            found.setdefault(target, []).append(name)
        else:
            unexpected.append(name)
    missing = [name for name in expected if name not in found]
    if missing or unexpected:
        raise NamesError(
            f"{len(found)} of {len(expected)} tensors of the model are there; "
            f"missing: {_some(missing)}; not the model's: {_some(unexpected)}"
        )
    for name, places in found.items():
        if len(places) > 1 + list(aliases.values()).count(name):
            raise NamesError(f"{name} stands there {len(places)} times: {_some(places)}")
    return found


def _unwrapped(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _without(prefix: str, names: Collection[str]) -> Callable[[str], str]:
    """Takes a prefix off, if all names have it."""
    common = prefix if all(name.startswith(prefix) for name in names) else ""
    return lambda name: name.removeprefix(common)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return (f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown) or "none"
