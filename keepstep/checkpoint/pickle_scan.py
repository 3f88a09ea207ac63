"""Looking into the pickle of a torch archive without unpickling: which globals would a load ask for?

`weights_only=True` loads only the globals below; anything else wants to run code.
"""

from __future__ import annotations

import pickletools

from keepstep.checkpoint.torch_zip import PICKLE, ArchiveError, TorchZip

ALLOWED_GLOBALS = frozenset(
    {
        "collections OrderedDict",
        "torch._utils _rebuild_tensor_v2",
        "torch._utils _rebuild_parameter",
        "torch Size",
        "torch device",
        "torch.serialization _get_layout",
        *(f"torch {name}Storage" for name in
          ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")),
        *(f"torch {name}" for name in
          ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")),
    }
)  # fmt: skip
# Opcodes that reach code by other ways than a named global; torch.save's protocol 2 writes none of them.
REFUSED_OPCODES = frozenset({"INST", "OBJ", "EXT1", "EXT2", "EXT4", "STACK_GLOBAL", "NEWOBJ", "NEWOBJ_EX"})
MAX_PICKLE_BYTES = 64 * 1024**2
MAX_OPCODES = 8_000_000


def scan(
    archive: TorchZip,
    allowed: frozenset[str] = ALLOWED_GLOBALS,
    refused: frozenset[str] = REFUSED_OPCODES,
) -> list[str]:
    """Reasons why the archive must not be loaded; none when it is sound. Nothing in it is executed."""
    try:
        return _scan_pickle(read_pickle(archive), allowed, refused)
    except ArchiveError as error:
        return [str(error)]


def read_pickle(archive: TorchZip) -> bytes:
    """
    Raises:
        ArchiveError: too large, or torn.
    """
    size = archive.size(PICKLE) or 0
    if size > MAX_PICKLE_BYTES:
        raise ArchiveError(f"{PICKLE} has {size} bytes, at most {MAX_PICKLE_BYTES} are read")
    return archive.read(PICKLE, 0, size + 1)


def _scan_pickle(data: bytes, allowed: frozenset[str], refused: frozenset[str]) -> list[str]:
    reasons: list[str] = []
    end = 0
    try:
        for number, (opcode, argument, position) in enumerate(pickletools.genops(data)):
            if number > MAX_OPCODES:
                return [f"the pickle has more than {MAX_OPCODES} opcodes"]
            if opcode.name in refused:
                reasons.append(f"the pickle uses {opcode.name}, which weights_only loading refuses")
            if opcode.name == "GLOBAL" and argument not in allowed:
                reasons.append(f"the pickle asks for {str(argument).replace(' ', '.', 1)}, which would run code")
            if len(reasons) == 5:
                return reasons
            end = position + 1 if position is not None else 0
    except Exception as error:  # pickletools raises several kinds on torn input
        reasons.append(f"{PICKLE} is torn ({error})")
    else:
        if end != len(data):
            reasons.append(f"{PICKLE} goes on after its end")
    return reasons
