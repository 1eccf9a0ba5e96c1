"""What Redis clients may ask, and how it is carried out."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cygnet.gcache import resp
from cygnet.gcache.arena import Entry
from cygnet.gcache.protocol import Item
from cygnet.version import __version__

if TYPE_CHECKING:
    from cygnet.gcache.runtime.resp_connection import RespConnection

BUDGET_S = 10.0
"""For one command."""
SCAN_COUNT, MAX_SCAN_COUNT = 10, 4096
REDIS_VERSION = "7.0.0"
"""What INFO and HELLO call the protocol's release: clients look there for what they may use."""
MAX_TTL_MS = 1 << 50


class CommandError(Exception):
    """A command is answered with this, and the next one is read."""


@dataclass(frozen=True)
class Command:
    """How a command is carried out, and with how many arguments behind its name."""

    run: "Callable[[RespConnection, list[bytes]], None]"
    at_least: int
    at_most: int = resp.MAX_ARGUMENTS


# --- arguments


def key_of(name: bytes) -> bytes:
    """The full key of a name; refuses what is none."""
    try:
        return resp.key_of(name)
    except ValueError as error:
        raise CommandError(f"ERR {error}") from None


def number(word: bytes) -> int:
    """A whole number, not negative."""
    if not word.isdigit() or len(word) > 20:
        raise CommandError("ERR value is not an integer or out of range")
    return int(word)


def ttl_ms(word: bytes, unit_ms: int, command: str) -> int:
    """A time to live."""
    value = number(word) * unit_ms
    if not 0 < value <= MAX_TTL_MS:
        raise CommandError(f"ERR invalid expire time in '{command}' command")
    return value


def pairs(words: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """Options and their values."""
    if len(words) % 2:
        raise CommandError("ERR syntax error")
    return [(words[at].upper(), words[at + 1]) for at in range(0, len(words), 2)]


# --- commands


def _set(client: "RespConnection", arguments: list[bytes]) -> None:
    key, value = key_of(arguments[0]), arguments[1]
    ttl, condition, at = 0, b"", 2
    while at < len(arguments):
        option = arguments[at].upper()
        if option in (b"EX", b"PX") and not ttl and at + 1 < len(arguments):
            ttl = ttl_ms(arguments[at + 1], 1000 if option == b"EX" else 1, "set")
            at += 2
        elif option in (b"NX", b"XX") and not condition:
            condition = option
            at += 1
        else:
            raise CommandError("ERR syntax error; SET takes EX, PX, NX and XX")
    if store(client, key, value, ttl, condition):
        client.answer(resp.OK)
    else:
        client.null()


def store(client: "RespConnection", key: bytes, value: bytes, ttl: int = 0, condition: bytes = b"") -> bool:
    """SET, under the condition NX or XX; whether it was met."""
    if not condition:
        return client.put(key, value, ttl)
    there = client.expiry_ns(key) is not None  # what the disk has comes to memory; what has expired goes
    if there == (condition == b"NX"):
        return False
    wanted = condition == b"XX"
    return client.put(key, value, ttl, lambda entry, on_disk: (entry is not None or on_disk) == wanted)


def _setex(client: "RespConnection", arguments: list[bytes], unit_ms: int) -> None:
    client.put(key_of(arguments[0]), arguments[2], ttl_ms(arguments[1], unit_ms, "setex"))
    client.answer(resp.OK)


def _setnx(client: "RespConnection", arguments: list[bytes]) -> None:
    client.answer(resp.integer(store(client, key_of(arguments[0]), arguments[1], condition=b"NX")))


def _get(client: "RespConnection", arguments: list[bytes]) -> None:
    if not client.get(key_of(arguments[0])):
        client.null()


def _mget(client: "RespConnection", arguments: list[bytes]) -> None:
    keys = [key_of(name) for name in arguments]
    client.answer(b"*%d\r\n" % len(keys))
    for key in keys:
        if not client.get(key):
            client.null()


def _mset(client: "RespConnection", arguments: list[bytes]) -> None:
    if len(arguments) % 2:
        raise CommandError("ERR wrong number of arguments for 'mset' command")
    items = [(key_of(arguments[at]), arguments[at + 1]) for at in range(0, len(arguments), 2)]
    for key, value in items:
        client.put(key, value)
    client.answer(resp.OK)


def _del(client: "RespConnection", arguments: list[bytes]) -> None:
    deadline = time.monotonic() + BUDGET_S
    keys = [key_of(name) for name in arguments]
    client.answer(resp.integer(sum(client.cache.remove(key, deadline) is True for key in keys)))


def _exists(client: "RespConnection", arguments: list[bytes]) -> None:
    keys = [key_of(name) for name in arguments]
    client.answer(resp.integer(sum(client.cache.exists(key, None, touch=False) for key in keys)))


def _strlen(client: "RespConnection", arguments: list[bytes]) -> None:
    entry = client.cache.acquire(key_of(arguments[0]), time.monotonic() + BUDGET_S)
    if isinstance(entry, Entry):
        client.cache.memory.release([entry])
    client.answer(resp.integer(entry.value_bytes if isinstance(entry, Entry) else 0))


def _type(client: "RespConnection", arguments: list[bytes]) -> None:
    there = client.cache.exists(key_of(arguments[0]), None, touch=False)
    client.answer(resp.simple("string" if there else "none"))


def _ttl(client: "RespConnection", arguments: list[bytes], unit_ms: int) -> None:
    expiry_ns = client.expiry_ns(key_of(arguments[0]))
    if not expiry_ns:
        client.answer(resp.integer(-2 if expiry_ns is None else -1))
        return
    left_ms = max(0, (expiry_ns - client.cache.memory.wall_ns()) // 1_000_000)
    client.answer(resp.integer((left_ms + unit_ms // 2) // unit_ms))


def _expire(client: "RespConnection", arguments: list[bytes], unit_ms: int) -> None:
    ttl = ttl_ms(arguments[1], unit_ms, "expire")
    client.flush()
    item = client.cache.set_ttl(key_of(arguments[0]), ttl, time.monotonic() + BUDGET_S)
    _expect_done(item)
    client.answer(resp.integer(item is Item.OK))


def _persist(client: "RespConnection", arguments: list[bytes]) -> None:
    key = key_of(arguments[0])
    if not client.expiry_ns(key):
        client.answer(resp.integer(0))
        return
    client.flush()
    item = client.cache.set_ttl(key, 0, time.monotonic() + BUDGET_S)
    _expect_done(item)
    client.answer(resp.integer(item is Item.OK))


def _expect_done(item: Item) -> None:
    if item not in (Item.OK, Item.MISS, Item.TORN):
        raise CommandError("ERR there is no room, or no time, for a copy with another time to live")


def _ping(client: "RespConnection", arguments: list[bytes]) -> None:
    client.answer(resp.bulk(arguments[0]) if arguments else resp.simple("PONG"))


def _select(client: "RespConnection", arguments: list[bytes]) -> None:
    if number(arguments[0]):
        raise CommandError("ERR there is one database, 0")
    client.answer(resp.OK)


def _auth(client: "RespConnection", arguments: list[bytes]) -> None:
    client.log_in(arguments)
    client.answer(resp.OK)


def _config(client: "RespConnection", arguments: list[bytes]) -> None:
    if arguments[0].upper() != b"GET":
        raise CommandError("ERR CONFIG has GET only; options are given to `cygnet gcache serve`")
    known = {
        b"save": b"",
        b"appendonly": b"no",
        b"databases": b"1",
        b"maxmemory": b"%d" % client.cache.arena.capacity_bytes,
    }
    wanted = [resp.glob(pattern.lower()) for pattern in arguments[1:]]
    found = {
        name: resp.bulk(value)
        for name, value in known.items()
        if any(pattern.match(name.decode()) for pattern in wanted)
    }
    client.answer(resp.mapping(found, client.version))


def _client(client: "RespConnection", arguments: list[bytes]) -> None:
    what = arguments[0].upper()
    if what == b"ID":
        client.answer(resp.integer(0))
    elif what == b"GETNAME":
        client.null()
    elif what in (b"SETINFO", b"SETNAME", b"NO-EVICT", b"NO-TOUCH"):
        client.answer(resp.OK)
    else:
        raise CommandError("ERR CLIENT has ID, GETNAME, SETNAME and SETINFO")


def _command(client: "RespConnection", arguments: list[bytes]) -> None:
    what = arguments[0].upper() if arguments else b""
    if what == b"COUNT":
        client.answer(resp.integer(len(COMMANDS)))
    elif what == b"DOCS":
        client.answer(resp.mapping({}, client.version))
    else:
        client.answer(resp.array(()))


def _flush(client: "RespConnection", arguments: list[bytes]) -> None:
    client.cache.clear(None, time.monotonic() + BUDGET_S)
    client.answer(resp.OK)


def _hello(client: "RespConnection", arguments: list[bytes]) -> None:
    """HELLO [2|3 [AUTH user token] [SETNAME name]]"""
    version = client.version
    if arguments:
        if arguments[0] not in (b"2", b"3"):
            raise CommandError("NOPROTO unsupported protocol version")
        version = int(arguments[0])
    at = 1
    while at < len(arguments):
        option = arguments[at].upper()
        if option == b"AUTH" and at + 2 < len(arguments):
            client.log_in(arguments[at + 1 : at + 3])
            at += 3
        elif option == b"SETNAME" and at + 1 < len(arguments):
            at += 2
        else:
            raise CommandError("ERR syntax error in HELLO")
    if not client.is_known:
        raise CommandError("NOAUTH HELLO must be called with AUTH")
    client.version = version
    about = {
        b"server": resp.bulk(b"redis"),
        b"version": resp.bulk(REDIS_VERSION.encode()),
        b"proto": resp.integer(version),
        b"id": resp.integer(0),
        b"mode": resp.bulk(b"standalone"),
        b"role": resp.bulk(b"master"),
        b"modules": resp.array(()),
    }
    client.answer(resp.mapping(about, version))


def _scan(client: "RespConnection", arguments: list[bytes]) -> None:
    """SCAN cursor [MATCH pattern] [COUNT n] [TYPE string]: objects in memory, in the order in which they came.

    The cursor is the version up to which objects have been named.
    """
    cursor, count, pattern, strings = number(arguments[0]), SCAN_COUNT, b"*", True
    for option, value in pairs(arguments[1:]):
        if option == b"MATCH":
            pattern = value
        elif option == b"COUNT":
            count = min(MAX_SCAN_COUNT, max(1, number(value)))
        elif option == b"TYPE":
            strings = value.lower() == b"string"
        else:
            raise CommandError("ERR syntax error")
    entries = client.cache.memory.entries_after(cursor, count)
    matches = resp.glob(pattern).match
    names = [resp.name_of(entry.key) for entry in entries if strings]
    found = [resp.bulk(name) for name in names if name is not None and matches(name.decode("latin-1"))]
    after = entries[-1].version if len(entries) == count else 0
    client.answer(resp.array((resp.bulk(b"%d" % after), resp.array(found))))


def _info(client: "RespConnection", arguments: list[bytes]) -> None:
    """INFO, in Redis's words where there are some."""
    stats = client.service.stats()
    gets = stats["gets"]
    assert isinstance(gets, dict)
    hits = gets.get("ok", 0)
    lines: dict[str, dict[str, object]] = {
        "Server": {
            "redis_version": REDIS_VERSION,
            "gcache_release": __version__,
            "uptime_in_seconds": int(float(str(stats["uptime_s"]))),
        },
        "Clients": {"connected_clients": stats["connections"]},
        "Memory": {"used_memory": stats["memory_bytes"], "maxmemory": stats["memory_capacity_bytes"]},
        "Persistence": {"loading": 0},
        "Stats": {
            "keyspace_hits": hits,
            "keyspace_misses": sum(gets.values()) - hits,
            "evicted_keys": stats["evicted_objects"],
        },
        "Replication": {"role": "master", "connected_slaves": 0},
        "Keyspace": {"db0": f"keys={stats['objects']},expires=0,avg_ttl=0"},
    }
    text = "\r\n".join(
        f"# {section}\r\n" + "".join(f"{name}:{value}\r\n" for name, value in about.items())
        for section, about in lines.items()
    )
    client.answer(resp.bulk(text.encode()))


COMMANDS: dict[bytes, Command] = {
    b"GET": Command(_get, 1, 1),
    b"SET": Command(_set, 2),
    b"SETEX": Command(lambda client, words: _setex(client, words, 1000), 3, 3),
    b"PSETEX": Command(lambda client, words: _setex(client, words, 1), 3, 3),
    b"SETNX": Command(_setnx, 2, 2),
    b"MGET": Command(_mget, 1),
    b"MSET": Command(_mset, 2),
    b"DEL": Command(_del, 1),
    b"UNLINK": Command(_del, 1),
    b"EXISTS": Command(_exists, 1),
    b"STRLEN": Command(_strlen, 1, 1),
    b"TYPE": Command(_type, 1, 1),
    b"TTL": Command(lambda client, words: _ttl(client, words, 1000), 1, 1),
    b"PTTL": Command(lambda client, words: _ttl(client, words, 1), 1, 1),
    b"EXPIRE": Command(lambda client, words: _expire(client, words, 1000), 2, 2),
    b"PEXPIRE": Command(lambda client, words: _expire(client, words, 1), 2, 2),
    b"PERSIST": Command(_persist, 1, 1),
    b"SCAN": Command(_scan, 1),
    b"DBSIZE": Command(lambda client, _: client.answer(resp.integer(len(client.cache.arena))), 0, 0),
    b"FLUSHDB": Command(_flush, 0, 1),
    b"FLUSHALL": Command(_flush, 0, 1),
    b"INFO": Command(_info, 0),
    b"PING": Command(_ping, 0, 1),
    b"ECHO": Command(lambda client, words: client.answer(resp.bulk(words[0])), 1, 1),
    b"AUTH": Command(_auth, 1, 2),
    b"HELLO": Command(_hello, 0),
    b"SELECT": Command(_select, 1, 1),
    b"QUIT": Command(lambda client, _: client.quit(), 0),
    b"CONFIG": Command(_config, 1),
    b"CLIENT": Command(_client, 1),
    b"COMMAND": Command(_command, 0),
}
"""By name; everything else is unknown."""
