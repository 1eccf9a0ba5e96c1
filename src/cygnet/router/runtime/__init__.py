"""The router's sockets, clocks and processes: HTTP proxy, probes, state in Redis."""
