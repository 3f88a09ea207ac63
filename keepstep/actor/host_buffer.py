"""Host memory that a rank copies its state into, allocated once and used by every snapshot.

The memory is an anonymous file (memfd) without a name: a process of the same user on this host maps it through
/proc/<pid>/fd/<fd>, so that nothing is sent or copied between the rank and the writer, and it vanishes with the last
process that holds it, however that one ended. A file in /dev/shm would outlive a rank that is killed.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Slot:
    """Where one array lies in the memory."""

    offset: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class SharedMemory:
    """Address of a rank's host memory for processes on the same host."""

    pid: int
    fd: int
    num_bytes: int

    def open(self) -> np.ndarray:
        """The whole memory as bytes; writing to them changes nothing for others.

        Raises:
            FileNotFoundError: the rank is gone.
        """
        fd = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDONLY)
        try:
            # Private and writable: torch takes no read-only arrays without a warning.
            mapped = mmap.mmap(fd, self.num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            return np.frombuffer(mapped, dtype=np.uint8)
        finally:
            os.close(fd)


def view(memory: np.ndarray, slot: Slot) -> np.ndarray:
    """The array in `slot`, not copied."""
    count = int(np.prod(slot.shape, dtype=np.int64))
    return np.frombuffer(memory, dtype=slot.dtype, count=count, offset=slot.offset).reshape(slot.shape)


class HostBuffer:
    """One rank's memory for snapshots.

    Args:
        pinned: register it with CUDA, so that the copies from the device run side by side at full speed.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._fd = os.memfd_create("keepstep-snapshot")
        self._num_bytes = 0
        self._memory: torch.Tensor | None = None

    def fill(self, tensors: dict[str, torch.Tensor]) -> dict[str, Slot]:
        """Copy tensors into the memory; on return no later change of theirs shows in it."""
        slots: dict[str, Slot] = {}
        end = 0
        for name, tensor in tensors.items():
            slots[name] = Slot(end, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        memory = self._grown_to(max(end, 1))
        for name, tensor in tensors.items():
            first, num_bytes = slots[name].offset, tensor.numel() * tensor.element_size()
            target = memory[first : first + num_bytes].view(tensor.dtype).view(tensor.shape)
            target.copy_(tensor, non_blocking=self._pinned)
        if self._pinned:
            torch.cuda.synchronize()
        return slots

    def shared(self) -> SharedMemory:
        return SharedMemory(os.getpid(), self._fd, self._num_bytes)

    def _grown_to(self, num_bytes: int) -> torch.Tensor:
        if self._memory is None or num_bytes > self._num_bytes:
            self._register(False)
            os.ftruncate(self._fd, num_bytes)
            self._memory = torch.frombuffer(mmap.mmap(self._fd, num_bytes), dtype=torch.uint8)
            self._num_bytes = num_bytes
            self._register(True)
        return self._memory

    def _register(self, on: bool) -> None:
        if not self._pinned or self._memory is None:
            return
        cudart: Any = torch.cuda.cudart()
        pointer = self._memory.data_ptr()
        status = cudart.cudaHostRegister(pointer, self._num_bytes, 0) if on else cudart.cudaHostUnregister(pointer)
        if int(status):
            raise RuntimeError(f"host memory for snapshots cannot be pinned: CUDA error {int(status)}")
