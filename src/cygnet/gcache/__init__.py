"""GCache, a cache for KV blocks and files on machines that fail every day. Decisions and formats; pure.

placement   which server owns a key            record     bytes of a record, a slot and the arena's head
protocol    frames of the native protocol      allocator  extents of the arena
breaker     when a failing server is avoided   arena      index over the arena, and what survives a crash
limits      what is accepted                   tiering    what leaves memory first
namespaces  quotas and times to live           resp       Redis's protocol
quick       frames about one object            rates      what `cygnet gcache top` shows
"""
