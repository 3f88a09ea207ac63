"""Full tensors from what the ranks send."""

from __future__ import annotations

import pytest
import torch

from keepstep.actor.gathering import apart, as_array, as_tensor, buckets, num_elements

SHAPES = [(1,), (2, 3), (5,), (7, 2, 2), (4, 1), (3, 5)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 9])
def test_full_tensors_come_back_from_chunks_of_uneven_length(world_size: int) -> None:
    full = [torch.randn(shape) for shape in SHAPES]
    sent = []
    for rank in range(world_size):
        # torch.chunk gives fewer chunks than asked for where rows run out: the ranks behind hold nothing.
        chunks = [tensor.chunk(world_size) for tensor in full]
        own = [chunk[rank].flatten() for chunk in chunks if rank < len(chunk)]
        assert sum(map(len, own)) == sum(num_elements(tensor.shape, rank, world_size) for tensor in full)
        sent.append(torch.cat([*own, torch.zeros(0)]))
    longest = len(sent[0])
    assert longest == max(map(len, sent))
    padded = [torch.nn.functional.pad(part, (0, longest - len(part)), value=9.0) for part in sent]
    found = list(apart(padded, [tensor.shape for tensor in full]))
    assert all(torch.equal(one, other) for one, other in zip(found, full, strict=True))


def test_buckets_hold_every_tensor_once_and_no_more_than_they_may() -> None:
    tensors = {f"t{size}": torch.zeros(size) for size in (3, 4, 2, 9, 1, 1)} | {"last": torch.zeros(8, 2)}
    found = list(buckets({name: tensor.numel() for name, tensor in tensors.items()}, 7))
    assert found == [["t3", "t4"], ["t2"], ["t9"], ["t1"], ["last"]]
    assert list(buckets({}, 7)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_array_holds_a_tensor_to_the_bit(dtype: torch.dtype) -> None:
    """Also what numpy has no name for; the tensor that comes back is a copy."""
    tensor = torch.randn(7, 3).to(dtype)
    array = as_array(tensor)
    assert array.nbytes == tensor.nbytes and array.shape == tensor.shape
    found = as_tensor(array)
    assert found.dtype == dtype and torch.equal(found, tensor)
    array[:] = 0
    assert torch.equal(found, as_tensor(as_array(found))) and bool(found.any())
