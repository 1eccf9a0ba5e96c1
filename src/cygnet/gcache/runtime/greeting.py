"""The first frame of a connection and its answer."""

import msgspec


class Hello(msgspec.Struct, frozen=True):
    """What a client says first."""

    version: int
    token: str = ""


class ServerInfo(msgspec.Struct, frozen=True):
    """What it is answered."""

    version: int
    server_id: str
    incarnation: str
    """Of the arena, hexadecimal."""
    arena: str
    """Path of its file, for clients of the same machine."""
    socket: str
    """Path of the unix socket."""
    release: str
    index: str = ""
    """Path of the arena's index, for clients of the same machine; none without."""
