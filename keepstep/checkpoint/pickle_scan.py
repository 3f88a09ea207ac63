"""Looking into torch.save archives without unpickling: which globals would a load ask for?

torch.save writes a zip archive, uncompressed, with `<name>/data.pkl` and one record per storage. `weights_only=True`
loads only the globals below; anything else wants to run code.
"""

from __future__ import annotations

import pickletools
import zipfile
from pathlib import Path

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
MAX_PICKLE_BYTES = 256 * 1024**2


def scan(path: Path) -> list[str]:
    """Reasons why the archive must not be loaded; none when it is sound. Nothing in it is executed."""
    try:
        with zipfile.ZipFile(path) as archive:
            return _scan_archive(archive, path.stat().st_size)
    except (
        zipfile.BadZipFile,
        OSError,
        ValueError,
        NotImplementedError,
        EOFError,
        OverflowError,
        RuntimeError,
    ) as error:
        return [f"not a whole torch archive ({error})"]


def _scan_archive(archive: zipfile.ZipFile, file_bytes: int) -> list[str]:
    infos = archive.infolist()
    if any(info.compress_type != zipfile.ZIP_STORED for info in infos):
        return ["the archive is compressed, which torch.save never does"]
    if sum(info.file_size for info in infos) > file_bytes:
        return ["the archive declares more bytes than the file has"]
    if any(info.file_size == 0 and "/data/" in info.filename for info in infos):
        empty = next(info.filename for info in infos if info.file_size == 0 and "/data/" in info.filename)
        return [f"storage {empty} has no bytes"]
    pickles = [info for info in infos if info.filename.endswith("/data.pkl")]
    if len(pickles) != 1:
        return [f"{len(pickles)} records data.pkl, expected one"]
    if pickles[0].file_size > MAX_PICKLE_BYTES:
        return [f"data.pkl has {pickles[0].file_size} bytes, at most {MAX_PICKLE_BYTES} are read"]
    return _scan_pickle(archive.read(pickles[0]))


def _scan_pickle(data: bytes) -> list[str]:
    reasons = []
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name in REFUSED_OPCODES:
                reasons.append(f"the pickle uses {opcode.name}, which weights_only loading refuses")
            if opcode.name == "GLOBAL" and argument not in ALLOWED_GLOBALS:
                reasons.append(f"the pickle asks for {str(argument).replace(' ', '.', 1)}, which would run code")
    except Exception as error:  # pickletools raises several kinds on torn input
        reasons.append(f"data.pkl is torn ({error})")
    return reasons[:5]
