"""Memory for pools and transfers."""

import numpy as np
import pytest

from cygnet.kv.runtime.memory import HUGE_PAGE, pool_memory


@pytest.mark.parametrize("num_bytes", [1, 4096, 5000, HUGE_PAGE - 1, HUGE_PAGE, 3 * HUGE_PAGE + 5])
def test_pool_memory(num_bytes: int) -> None:
    memory = pool_memory(num_bytes)
    array = np.frombuffer(memory, np.uint8)
    assert len(memory) == array.nbytes == num_bytes
    assert array.ctypes.data % (HUGE_PAGE if num_bytes >= HUGE_PAGE else 4096) == 0
    assert not array.any()
    memory[-1] = 7
    assert array[-1] == 7
