"""Names, dtypes and shapes of the tensors in a torch.save archive, read without torch and without unpickling.

The pickle is walked opcode by opcode over a stack of plain values; globals become inert symbols, and only the two
rebuild functions of torch are understood. Any other call is `HeaderError`, or with `any_call` an inert result. To be
called after `pickle_scan.scan`, which bounds sizes and refuses what could run code.

A pickle can build a value that is small in memory and without end to whoever walks, prints or hashes it. So keys are
plain, nothing is printed that is not, and tensors are looked for in a bounded number of places.
"""

from __future__ import annotations

import math
import pickletools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from keepstep.checkpoint.pickle_scan import read_pickle
from keepstep.checkpoint.torch_zip import ArchiveError, TorchZip

STORAGES = {
    "FloatStorage": ("float32", 4), "DoubleStorage": ("float64", 8), "HalfStorage": ("float16", 2),
    "BFloat16Storage": ("bfloat16", 2), "LongStorage": ("int64", 8), "IntStorage": ("int32", 4),
    "ShortStorage": ("int16", 2), "CharStorage": ("int8", 1), "ByteStorage": ("uint8", 1), "BoolStorage": ("bool", 1),
}  # fmt: skip

TensorInfo = list[list[Any]]
GETATTR = "__builtin__.getattr"
NESTED_CLASS = ("torch.distributed._shard.sharded_tensor.api.ShardedTensor", "ProcessGroupState")
"""A pickled class inside a class is a call of getattr, and that reaches anything: it may be of this one alone."""
MAX_DEPTH = 32
MAX_VALUES = 4_000_000
MAX_DIMENSIONS = 32
MAX_COUNT = 2**60


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

    def __init__(self, archive: TorchZip, any_call: bool = False) -> None:
        """
        Raises:
            HeaderError: unknown opcodes or calls, a storage whose record is missing, of another size or asked for by
                nobody, a tensor that reaches outside its storage's bytes, a record that is torn.
        """
        self._archive = archive
        walker = _Walker(any_call)
        try:
            self.root = walker.walk(read_pickle(archive))
        except ArchiveError as error:
            raise HeaderError(str(error)) from error
        for storage in walker.storages:
            self._check_storage(storage)
        for key in sorted(archive.storages() - {storage.key for storage in walker.storages}):
            raise HeaderError(f"storage data/{key} belongs to no tensor")
        self._tensors = dict(_flatten(self.root))
        for name, tensor in self._tensors.items():
            _check_extent(name, tensor)

    def tensors(self) -> dict[str, Tensor]:
        """Tensors by dotted name, in the file's order."""
        return self._tensors

    def describe(self) -> TensorInfo:
        """[[name, dtype, shape], …] in the manifest's form."""
        return [[name, tensor.storage.dtype, list(tensor.shape)] for name, tensor in self._tensors.items()]

    def scalar(self, tensor: Tensor) -> float:
        """Value of a float32 or float64 tensor of one element, from the file's bytes.

        Raises:
            HeaderError: it is no such tensor, or its record is torn.
        """
        code = {"float32": "<f", "float64": "<d"}.get(tensor.storage.dtype)
        if code is None or math.prod(tensor.shape) != 1:
            raise HeaderError(f"a counter of {tensor.storage.dtype} {list(tensor.shape)}, expected one number")
        itemsize = tensor.storage.itemsize
        try:
            data = self._archive.read(f"data/{tensor.storage.key}", tensor.offset * itemsize, itemsize)
            return float(struct.unpack(code, data)[0])
        except (ArchiveError, struct.error) as error:
            raise HeaderError(f"storage data/{tensor.storage.key}: {error}") from error

    def _check_storage(self, storage: Storage) -> None:
        size = self._archive.size(f"data/{storage.key}")
        expected = storage.numel * storage.itemsize
        if size != expected:
            raise HeaderError(f"storage data/{storage.key} has {size} bytes, expected {expected}")


def _check_extent(name: str, tensor: Tensor) -> None:
    last = tensor.offset + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=True))
    if math.prod(tensor.shape) and not 0 <= last < tensor.storage.numel:
        raise HeaderError(f"{name}: shape {list(tensor.shape)} reaches outside its storage")


_MARK = object()
_INERT = object()
"""Result of a call that is neither understood nor needed."""
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_NEW: dict[str, type] = {"EMPTY_DICT": dict, "EMPTY_LIST": list}
_LITERALS = frozenset({"BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"})
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Walker:
    """A pickle machine that builds nothing but plain values."""

    def __init__(self, any_call: bool) -> None:
        self.storages: list[Storage] = []
        self._any_call = any_call
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
            self._set_items([key, value])
        elif name == "SETITEMS":
            self._set_items(self._pop_mark())
        elif name == "APPEND":
            value = stack.pop()
            stack[-1].append(value)
        elif name == "APPENDS":
            values = self._pop_mark()
            stack[-1].extend(values)
        elif name == "BINPERSID":
            storage = _storage(stack.pop())
            self.storages.append(storage)
            stack.append(storage)
        elif name == "REDUCE" or (name == "NEWOBJ" and self._any_call):
            arguments, function = stack.pop(), stack.pop()
            stack.append(_call(function, arguments, self._any_call))
        elif name == "BUILD" and self._any_call:
            stack.pop()
        else:
            raise HeaderError(f"opcode {name}")

    def _set_items(self, items: list[Any]) -> None:
        # An object with items of its own (an OrderedDict's subclass) was a call, and is inert here.
        if self._stack[-1] is _INERT:
            return
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | int | float | None):
                raise HeaderError(f"a key that is {type(key).__name__}, expected text or a number")
            self._stack[-1][key] = value

    def _pop_mark(self) -> list[Any]:
        index = len(self._stack) - 1
        while self._stack[index] is not _MARK:
            index -= 1
        values = self._stack[index + 1 :]
        del self._stack[index:]
        return values


def _storage(persistent_id: Any) -> Storage:
    kind, storage, key, _location, numel = persistent_id
    sound = kind is not _INERT and isinstance(kind, str) and kind == "storage" and isinstance(storage, Symbol)
    if not sound or not isinstance(key, str) or not _is_count(numel):
        raise HeaderError("a persistent id that is no storage")
    dtype, itemsize = STORAGES[storage.name.rpartition(".")[2]]
    return Storage(dtype, itemsize, key, numel)


def _call(function: Any, arguments: tuple[Any, ...], any_call: bool) -> Any:
    if not isinstance(function, Symbol):
        raise HeaderError("a call of something that is no global")
    if function.name == "torch._utils._rebuild_tensor_v2":
        storage, offset, shape, stride = arguments[:4]
        if any_call and storage is _INERT:
            return _INERT
        return _tensor(storage, offset, shape, stride)
    if function.name == "collections.OrderedDict" and not arguments:
        return {}
    if function.name == GETATTR:
        if not _is_nested_class(*arguments):
            raise HeaderError("a call of getattr, which would run code")
        return Symbol(".".join(NESTED_CLASS))
    if any_call:
        return _INERT
    raise HeaderError(f"a call of {function.name}")


def _is_nested_class(owner: Any, attribute: Any, *rest: Any) -> bool:
    names = isinstance(owner, Symbol) and isinstance(attribute, str)
    return names and not rest and (owner.name, attribute) == NESTED_CLASS


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any) -> Tensor:
    counts = [offset, *shape, *stride]
    if not isinstance(storage, Storage) or len(shape) > MAX_DIMENSIONS or not all(map(_is_count, counts)):
        raise HeaderError("a tensor of no storage, or whose shape is not counts")
    return Tensor(storage, offset, tuple(shape), tuple(stride))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_COUNT


def _flatten(root: Any) -> Iterator[tuple[str, Tensor]]:
    """Tensors in nested dicts, by dotted name."""
    num_values = 0
    pending: list[tuple[str, int, Any]] = [("", 0, root)]
    while pending:
        name, depth, value = pending.pop()
        num_values += 1
        if depth > MAX_DEPTH or num_values > MAX_VALUES:
            raise HeaderError("nested without end")
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, dict):
            children = ((f"{name}.{key}" if name else str(key), depth + 1, item) for key, item in value.items())
            pending += reversed(list(children))
