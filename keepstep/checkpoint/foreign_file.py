"""One file of a checkpoint without digests, looked at by what its name says it is."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import BinaryIO

from keepstep.checkpoint import strict_json
from keepstep.checkpoint.files import FileError, open_regular, size_of
from keepstep.checkpoint.findings import Findings
from keepstep.checkpoint.hugging_face import index_problems
from keepstep.checkpoint.pickle_scan import ALLOWED_GLOBALS, REFUSED_OPCODES, scan
from keepstep.checkpoint.safetensors_headers import SafetensorsFile
from keepstep.checkpoint.tensor_headers import Archive, HeaderError
from keepstep.checkpoint.torch_zip import ArchiveError, TorchZip

ARCHIVES = (".pt", ".pth", ".bin")
TENSORS = (*ARCHIVES, ".safetensors")


def check_file(
    folder: Path,
    name: str,
    present: set[str],
    quick: bool,
    found: Findings,
    allowed: frozenset[str] = ALLOWED_GLOBALS,
    refused: frozenset[str] = REFUSED_OPCODES,
) -> TorchZip | None:
    """Note what is wrong with one file; anything that is no regular file is wrong.

    Args:
        present: all files of the folder, for an index that names others.
        allowed, refused: globals and opcodes of the pickles, as `pickle_scan.scan`.

    Returns:
        The archive's directory when the file is a sound torch archive; its file is closed.
    """
    path = PurePosixPath(name)
    try:
        with open_regular(folder / name) as file:
            found.num_bytes += size_of(file)
            if path.suffix in TENSORS and size_of(file) == 0:
                found.reject(name, "empty")
            elif path.suffix in ARCHIVES:
                return _check_archive(file, name, quick, found, allowed, refused)
            elif path.suffix == ".safetensors":
                SafetensorsFile(file)
            elif name.endswith(".index.json"):
                beside = {other.removeprefix(f"{path.parent}/") for other in present}
                found.reject(name, *index_problems(folder / name, beside))
            elif path.suffix == ".json":
                strict_json.load(folder / name)
    except (FileError, ArchiveError, HeaderError, strict_json.StrictJsonError) as error:
        found.reject(name, str(error))
    return None


def _check_archive(
    file: BinaryIO, name: str, quick: bool, found: Findings, allowed: frozenset[str], refused: frozenset[str]
) -> TorchZip | None:
    archive = TorchZip(file)
    if reasons := scan(archive, allowed, refused):
        found.reject(name, *reasons)
        return None
    Archive(archive, any_call=True)
    if not quick:
        archive.check_sums()
    return archive
