"""Bookkeeping of KV memory: two block pools, the prefix tree over them, reuse plans, retention and eviction.

Pure: no tensors, clocks, threads or sockets. `manager.KVManager` is what the scheduler sees; `runtime/` holds the
tensors.
"""
