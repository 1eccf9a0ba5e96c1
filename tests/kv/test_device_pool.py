"""KV storage on a CPU: zeros that take no memory before they are used."""

import psutil
import pytest
import torch

from cygnet.base.geometry import GroupGeometry, KVGeometry
from cygnet.kv.runtime.device_pool import DevicePool
from cygnet.kv.sizing import PoolSizes

GEOMETRY = KVGeometry(GroupGeometry(2, 3, 24, 16, 2), GroupGeometry(1, 5, 24, 16, 2, 7))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_storage(dtype: torch.dtype) -> None:
    pool = DevicePool(GEOMETRY, PoolSizes(4, 10, 6, 64), dtype=dtype, device="cpu")
    assert [len(pool.full), len(pool.swa)] == [2, 1]
    assert pool.full[0].key.shape == (10, 4, 3, 24)
    assert pool.swa[0].value.shape == (6, 4, 5, 16)
    tensors = [tensor for layer in pool.full + pool.swa for tensor in (layer.key, layer.value)]
    assert pool.num_bytes == sum(tensor.nbytes for tensor in tensors)
    for tensor in tensors:
        assert (tensor.dtype, tensor.is_contiguous(), tensor.data_ptr() % 64) == (dtype, True, 0)
        assert not tensor.any()
        tensor.fill_(1)


def test_a_large_pool_takes_no_memory_before_it_is_used() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    pool = DevicePool(GEOMETRY, PoolSizes(16, 100_000, 1000, 64), dtype=torch.bfloat16, device="cpu")
    assert pool.num_bytes > 700 << 20
    assert process.memory_info().rss - before < 100 << 20


def test_poison() -> None:
    pool = DevicePool(GEOMETRY, PoolSizes(4, 10, 6, 64), dtype=torch.float32, device="cpu", poison=True)
    assert pool.full[1].value.isnan().all()
    for layer in pool.full + pool.swa:
        layer.key.zero_()
    pool.poison_blocks([3], [0, 5])
    assert pool.full[0].key.isnan().flatten(1).any(1).nonzero().flatten().tolist() == [3]
    assert pool.swa[0].key.isnan().flatten(1).all(1).nonzero().flatten().tolist() == [0, 5]
