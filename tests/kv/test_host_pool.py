"""Host memory as objects: layout, checksums, poison."""

import psutil
import pytest
import torch

from cygnet.base.errors import InvariantError
from cygnet.base.geometry import GroupGeometry, KVGeometry
from cygnet.base.ids import BlockKey
from cygnet.kv.runtime.host_pool import HostPool
from cygnet.kv.store import Group, Namespace, object_key
from cygnet.kv.transfers import OBJECT_ALIGNMENT

GEOMETRY = KVGeometry(GroupGeometry(2, 3, 24, 16, 2), GroupGeometry(3, 5, 8, 16, 2, 7))
KEY, OTHER = (object_key(Namespace(b"n" * 16), Group.SWA, BlockKey(bytes([i]) * 16)) for i in (1, 2))


def pool(num_full: int = 6, num_swa: int = 4, *, poison: bool = False) -> HostPool:
    return HostPool(GEOMETRY, num_full, num_swa, 4, torch.bfloat16, poison=poison)


def test_an_object_is_its_layers_side_by_side() -> None:
    host = pool()
    parts = []
    for index in range(3):
        key, value = host.layer(Group.SWA, index)
        assert (key.shape, value.shape) == ((4, 4, 5, 8), (4, 4, 5, 16))
        key.copy_(torch.randn(key.shape))
        value.copy_(torch.randn(value.shape))
        parts += [key[2], value[2]]
    payload = b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts)
    body = host.object(Group.SWA, 2)
    assert len(body) % OBJECT_ALIGNMENT == 0
    assert bytes(body[: len(payload)]) == payload
    assert len(payload) == GEOMETRY.swa.block_bytes(4)
    assert not any(host.object(Group.FULL, 2)), "the other group is apart"


def test_blocks_are_apart_and_known() -> None:
    host = pool()
    for group, count in ((Group.FULL, 6), (Group.SWA, 4)):
        for block in range(count):
            host.object(group, block)[:] = bytes([block + 1]) * host.object_bytes[group]
        assert [set(host.object(group, block)) for block in range(count)] == [{block + 1} for block in range(count)]
        for block in (-1, count):
            with pytest.raises(InvariantError, match=f"host block {block} of the {group.name} group"):
                host.object(group, block)
            with pytest.raises(InvariantError, match="host block"):
                host.address(group, block)
    assert host.num_bytes == 6 * host.object_bytes[Group.FULL] + 4 * host.object_bytes[Group.SWA]
    with pytest.raises(InvariantError, match="layer 2 of the FULL group"):
        host.layer(Group.FULL, 2)


def test_every_byte_and_the_name_are_sealed() -> None:
    host = pool(poison=True)
    host.layer(Group.SWA, 1)[0][3] = 1.5
    host.seal(KEY, Group.SWA, 3)
    body = host.object(Group.SWA, 3)
    assert host.verify(KEY, Group.SWA, 3)
    assert not host.verify(OTHER, Group.SWA, 3)
    assert not any(body[GEOMETRY.swa.block_bytes(4) : -8]), "nothing of what was there before"
    for at in range(len(body)):
        body[at] ^= 0x10
        assert not host.verify(KEY, Group.SWA, 3), f"byte {at}"
        body[at] ^= 0x10
    assert host.verify(KEY, Group.SWA, 3)


def test_unsealed_memory_is_no_object() -> None:
    for poison in (False, True):
        assert not pool(poison=poison).verify(KEY, Group.SWA, 0)


def test_poison() -> None:
    host = pool(poison=True)
    key, value = host.layer(Group.FULL, 1)
    assert key.isnan().all()
    for group, layers in ((Group.FULL, 2), (Group.SWA, 3)):
        for tensor in (tensor for index in range(layers) for tensor in host.layer(group, index)):
            tensor.zero_()
    host.poison_blocks([3], [0, 2])
    assert value.isnan().flatten(1).any(1).nonzero().flatten().tolist() == [3]
    swa = host.layer(Group.SWA, 2)[0]
    assert swa.isnan().flatten(1).all(1).nonzero().flatten().tolist() == [0, 2]


def test_a_large_pool_takes_no_memory_before_it_is_used() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    host = pool(500_000, 100_000)
    assert host.num_bytes > 1 << 30
    host.object(Group.FULL, 499_999)[0] = 1
    assert process.memory_info().rss - before < 100 << 20


def test_without_swa_layers() -> None:
    geometry = KVGeometry(GEOMETRY.full, GroupGeometry(0, 0, 0, 0, 2))
    host = HostPool(geometry, 3, 5, 4, torch.bfloat16, poison=True)
    assert host.num_blocks == {Group.FULL: 3, Group.SWA: 0}
    with pytest.raises(InvariantError):
        host.object(Group.SWA, 0)


def test_a_dtype_of_another_size_is_refused() -> None:
    with pytest.raises(InvariantError, match="2 bytes per element"):
        HostPool(GEOMETRY, 1, 1, 4, torch.float32)
