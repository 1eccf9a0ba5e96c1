"""GCache's server, clients and store backend.

    shared_memory  the arena's file        wire        sockets, frames, values in and out
    disk_tier      records on a disk       channel     one connection of a client
    cache          both tiers, one lock    lanes       a batch cut into frames, over several connections
    connection     one client, served      views       the arena, seen from another process
    server         all of them             client      the SDK: batches over servers
    exposition     Prometheus              store       the engine's store tier
    memory_tier    arena, leases, order    single      one object with one frame
    writer         cold objects go down    aio         the SDK for asyncio
    resp_*         Redis clients           files       a file system for fsspec

`docs/gcache.md` is for operators, `docs/gcache-protocol.md` describes the bytes.
"""
