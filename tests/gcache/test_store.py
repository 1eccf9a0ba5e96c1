"""GCache as the engine's store tier: the contract, the spec, and what a dead server costs."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from contracts import store as contract
from cygnet.base.errors import ConfigError
from cygnet.gcache.runtime.channel import Address
from cygnet.gcache.runtime.store import TOKEN_VARIABLE, parse_servers, parse_spec
from cygnet.kv.runtime.stores import open_store
from cygnet.kv.store import Outcome, Store
from support.gcache import server

MIB = 1 << 20


@contextmanager
def make(capacity: int = 64 * MIB, *, options: str) -> Iterator[Store]:
    with server(capacity) as running:
        store = open_store(f"gcache://127.0.0.1:{running.port}?timeout_s=20&{options}")
        try:
            yield store
        finally:
            store.close()
            assert running.cache.audit() == []


@pytest.mark.parametrize("options", ["same_host=true", "same_host=false", "same_host=false&window=1&connections=1"])
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(check: "contract.Check", options: str) -> None:
    check(partial(make, options=options))


def test_a_dead_server_costs_misses_not_errors() -> None:
    with server() as running:
        store = open_store(f"gcache://127.0.0.1:{running.port}?timeout_s=2")
        key = contract.key(1)
        assert contract.put(store, key) == [Outcome.OK]
        running.close()
        assert contract.get(store, key) == [Outcome.FAILED]
        assert store.batch_exists([key]) == [False]
        assert contract.put(store, key) == [Outcome.FAILED]
        store.touch([key])
        assert store.remove([key]) == store.clear() == store.stats().num_objects == 0
        store.close()


def test_specs() -> None:
    assert parse_servers("a:1,b,c@d:2,[::1]:3,x@[::1]") == (
        Address("a", 1),
        Address("b", 7400),
        Address("d", 2, "c"),
        Address("::1", 3),
        Address("::1", 7400, "x"),
    )
    options = parse_spec("//a:1?timeout_s=0.5&window=3&same_host=false")
    assert (options.timeout_s, options.window, options.same_host) == (0.5, 3, False)


def test_the_token_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with server(token="secret") as running:
        with pytest.raises(ConfigError, match=f"the token is not this server's.*{TOKEN_VARIABLE}"):
            open_store(f"gcache://127.0.0.1:{running.port}")
        monkeypatch.setenv(TOKEN_VARIABLE, "secret")
        store = open_store(f"gcache://127.0.0.1:{running.port}")
        assert contract.put(store, contract.key(1)) == [Outcome.OK]
        store.close()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("//", r"'' is not \[ID@\]HOST"),
        ("//a:0", "'a:0' is not"),
        ("//a:99999", "'a:99999' is not"),
        ("//a:1?wndow=2", "no option 'wndow'"),
        ("//a:1?window=x", "window='x'"),
        ("//a:1?same_host=maybe", "same_host='maybe'"),
    ],
)
def test_specs_that_mean_nothing(spec: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_spec(spec)


def test_opening_says_which_server_does_not_answer() -> None:
    with server() as running:
        port = running.port
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port} does not answer.*is it running"):
        open_store(f"gcache://127.0.0.1:{port}")
