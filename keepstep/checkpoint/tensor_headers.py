"""Names, dtypes and shapes of the tensors in a torch.save archive, read without torch and without unpickling.

The pickle is walked opcode by opcode over a stack of plain values; globals become inert symbols, and only the two
rebuild functions of torch are understood. Anything else is `HeaderError`. To be called after `pickle_scan.scan`, which
bounds sizes and refuses what could run code.
"""

from __future__ import annotations

import math
import pickletools
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STORAGES = {
    "FloatStorage": ("float32", 4), "DoubleStorage": ("float64", 8), "HalfStorage": ("float16", 2),
    "BFloat16Storage": ("bfloat16", 2), "LongStorage": ("int64", 8), "IntStorage": ("int32", 4),
    "ShortStorage": ("int16", 2), "CharStorage": ("int8", 1), "ByteStorage": ("uint8", 1), "BoolStorage": ("bool", 1),
}  # fmt: skip

TensorInfo = list[list[Any]]


class HeaderError(ValueError):
    """The archive is not what torch.save writes for plain tensors; the message says why."""


@dataclass(frozen=True)
class Symbol:
    """A global by name, never resolved."""

    name: str


@dataclass(frozen=True)
class Storage:
    dtype: str
    itemsize: int
    key: str
    numel: int


@dataclass(frozen=True)
class Tensor:
    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Archive:
    """The structure of one file: nested dicts, lists and values, with `Tensor` where tensors stand."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            HeaderError: unknown opcodes or calls, or a tensor that reaches outside its storage's bytes.
        """
        self._path = path
        with zipfile.ZipFile(path) as archive:
            self._sizes = {info.filename.partition("/")[2]: info.file_size for info in archive.infolist()}
            self._prefix = archive.namelist()[0].partition("/")[0]
            self.root = _Walker().walk(archive.read(f"{self._prefix}/data.pkl"))
        for name, tensor in self.tensors().items():
            self._check_extent(name, tensor)

    def tensors(self) -> dict[str, Tensor]:
        """Tensors by dotted name, in the file's order."""
        return dict(_flatten(self.root, ""))

    def describe(self) -> TensorInfo:
        """[[name, dtype, shape], …] in the manifest's form."""
        return [[name, tensor.storage.dtype, list(tensor.shape)] for name, tensor in self.tensors().items()]

    def scalar(self, tensor: Tensor) -> float:
        """Value of a float32 or float64 tensor of one element, from the file's bytes."""
        code = {"float32": "<f", "float64": "<d"}[tensor.storage.dtype]
        with zipfile.ZipFile(self._path) as archive, archive.open(f"{self._prefix}/data/{tensor.storage.key}") as file:
            file.seek(tensor.offset * tensor.storage.itemsize)
            return float(struct.unpack(code, file.read(tensor.storage.itemsize))[0])

    def _check_extent(self, name: str, tensor: Tensor) -> None:
        size = self._sizes.get(f"data/{tensor.storage.key}")
        expected = tensor.storage.numel * tensor.storage.itemsize
        if size != expected:
            raise HeaderError(f"{name}: its storage has {size} bytes, expected {expected}")
        last = tensor.offset + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=True))
        if math.prod(tensor.shape) and not 0 <= last < tensor.storage.numel:
            raise HeaderError(f"{name}: shape {list(tensor.shape)} reaches outside its storage")


_MARK = object()
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_NEW: dict[str, type] = {"EMPTY_DICT": dict, "EMPTY_LIST": list}
_LITERALS = frozenset({"BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"})
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Walker:
    """A pickle machine that builds nothing but plain values."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def walk(self, data: bytes) -> Any:
        try:
            for opcode, argument, _ in pickletools.genops(data):
                self._step(opcode.name, argument)
            (root,) = self._stack
            return root
        except HeaderError:
            raise
        except Exception as error:
            raise HeaderError(f"data.pkl is not what torch.save writes ({type(error).__name__}: {error})") from error

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in ("PROTO", "STOP", "FRAME"):
            return
        if name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _NEW:
            stack.append(_NEW[name]())
        elif name == "MARK":
            stack.append(_MARK)
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name == "GLOBAL":
            stack.append(Symbol(argument.replace(" ", ".", 1)))
        elif name in _TUPLES:
            stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
        elif name == "TUPLE":
            stack.append(tuple(self._pop_mark()))
        else:
            self._combine(name)

    def _combine(self, name: str) -> None:
        stack = self._stack
        if name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            stack[-1][key] = value
        elif name == "SETITEMS":
            items = self._pop_mark()
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif name == "APPEND":
            value = stack.pop()
            stack[-1].append(value)
        elif name == "APPENDS":
            values = self._pop_mark()
            stack[-1].extend(values)
        elif name == "BINPERSID":
            stack.append(_storage(stack.pop()))
        elif name == "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            stack.append(_call(function, arguments))
        else:
            raise HeaderError(f"opcode {name}")

    def _pop_mark(self) -> list[Any]:
        index = len(self._stack) - 1
        while self._stack[index] is not _MARK:
            index -= 1
        values = self._stack[index + 1 :]
        del self._stack[index:]
        return values


def _storage(persistent_id: Any) -> Storage:
    kind, storage, key, _location, numel = persistent_id
    if kind != "storage" or not isinstance(storage, Symbol):
        raise HeaderError(f"persistent id {kind!r}")
    dtype, itemsize = STORAGES[storage.name.rpartition(".")[2]]
    return Storage(dtype, itemsize, str(key), int(numel))


def _call(function: Any, arguments: tuple[Any, ...]) -> Any:
    if not isinstance(function, Symbol):
        raise HeaderError("a call of something that is no global")
    if function.name == "torch._utils._rebuild_tensor_v2":
        storage, offset, shape, stride = arguments[:4]
        return Tensor(storage, int(offset), tuple(map(int, shape)), tuple(map(int, stride)))
    if function.name == "collections.OrderedDict" and not arguments:
        return {}
    raise HeaderError(f"a call of {function.name}")


def _flatten(value: Any, prefix: str) -> list[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        return [(prefix, value)]
    if not isinstance(value, dict):
        return []
    return [entry for key, item in value.items() for entry in _flatten(item, f"{prefix}.{key}" if prefix else str(key))]
