"""Traces, what is done to their sessions, and the names of simulated blocks."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cygnet.base.errors import ConfigError
from cygnet.base.ids import BlockKey
from cygnet.cli.bench.traces import load_trace
from cygnet.cli.bench.workload import TokenSource
from cygnet.kv.hashing import common_blocks, extend_keys, root_key
from cygnet.sim.agents import AgentProfile, Spread, fit, generate
from cygnet.sim.prompts import KeyChain, pieces_of
from cygnet.sim.sessions import Piece, Session, Turn, overlaid, repeated
from cygnet.sim.traces import read_sessions

TRACES = Path(__file__).parents[2].parent / "shared" / "traces"
ROOT = root_key("test")

# --- traces


def test_burstgpt() -> None:
    lines = [
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n",
        "5,ChatGPT,472,18,490,Conversation log\n",
        "45,ChatGPT,1087,0,1087,Conversation log\n",
        "118,GPT-4,417,276,693,API log\n",
    ]
    one, two = read_sessions(lines)  # the failed one is left out
    assert [(s.arrival_s, s.turns[0].input_len, s.turns[0].output_len) for s in (one, two)] == [
        (5.0, 472, 18),
        (118.0, 417, 276),
    ]


def test_a_custom_dataset_of_vllms_bench() -> None:
    lines = [json.dumps({"prompt": "a" * 400}), json.dumps({"prompt": "b" * 40, "output_tokens": 7})]
    one, two = read_sessions(lines)
    assert (one.arrival_s, one.turns[0].input_len, one.turns[0].output_len) == (None, 100, 256)
    assert (two.turns[0].text, two.turns[0].output_len) == ("b" * 40, 7)


def test_a_chain_that_is_too_short_is_continued() -> None:
    row = {"timestamp": 0, "input_length": 1300, "output_length": 1, "hash_ids": [4, 9]}
    (session,) = read_sessions([json.dumps(row)])
    assert session.turns[0].pieces == (Piece("block-4", 512), Piece("block-9", 512), Piece("block-9-tail", 276))


@pytest.mark.skipif(not TRACES.is_dir(), reason="needs the public traces")
@pytest.mark.parametrize(
    ("file", "requests", "mean_input"),
    [
        ("mooncake/conversation_trace.jsonl.gz", 12_031, 12_035),
        ("agent_text/agent_traces.jsonl.gz", 1_619, 2_476),
        ("azure2023/AzureLLMInferenceTrace_code.csv.gz", 8_819, 2_048),
    ],
)
def test_public_traces_have_their_known_statistics(file: str, requests: int, mean_input: int) -> None:
    turns = [turn for session in load_trace(TRACES / file, None) for turn in session.turns]
    assert len(turns) == requests
    assert sum(turn.input_len for turn in turns) / requests == pytest.approx(mean_input, abs=1)


# --- more of the same


def test_copies_share_nothing_but_what_all_share() -> None:
    turn = Turn(pieces=(Piece("shared-0", 10), Piece("own", 5)))
    sessions = [Session((turn,), arrival_s=1.0), Session((Turn(text="hello"),), arrival_s=2.0)]
    copies = list(repeated(sessions, 3, every_s=100.0))
    assert [session.arrival_s for session in copies] == [1.0, 2.0, 101.0, 102.0, 201.0, 202.0]
    pieces = [session.turns[0].pieces for session in copies[::2]]
    assert {p[0] for p in pieces} == {Piece("shared-0", 10)}
    assert len({p[1] for p in pieces}) == 3
    assert len({session.turns[0].text for session in copies[1::2]}) == 3
    assert [session.arrival_s for session in overlaid(sessions, 2, spread_s=0.5)] == [1.0, 1.5, 2.0, 2.5]


# --- names of blocks

SIZE = 4
prompts = st.lists(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 11)).map(lambda p: Piece(*p)), min_size=1, max_size=6),
    min_size=2,
    max_size=4,
)


def keys_of(pieces: list[Piece], *, steps: int = 1) -> list[BlockKey]:
    chain = KeyChain(ROOT, SIZE)
    for start in range(0, len(pieces), steps):
        chain.extend(pieces[start : start + steps])
    assert chain.num_tokens == sum(piece.length for piece in pieces)
    return chain.keys


@settings(deadline=None)
@given(prompts)
def test_blocks_are_equal_where_their_tokens_are(prompts: list[list[Piece]]) -> None:
    """Against the engine's hashing of the pieces' tokens. A piece is cut at no block's edge on purpose."""
    source = TokenSource(0, 1 << 30)
    by_name, by_tokens = [], []
    for pieces in prompts:
        tokens = source.token_ids(pieces)
        keys: list[BlockKey] = []
        extend_keys(keys, ROOT, tokens, SIZE, len(tokens))
        by_tokens.append(keys)
        by_name.append(keys_of(pieces))
        assert len(by_name[-1]) == len(keys)
        assert keys_of(pieces, steps=2) == by_name[-1]
    for i, one in enumerate(by_name):
        for j, other in enumerate(by_name):
            assert common_blocks(one, other) == common_blocks(by_tokens[i], by_tokens[j])


def test_a_longer_piece_continues_a_shorter_one() -> None:
    assert keys_of([Piece("a", 12)])[:2] == keys_of([Piece("a", 8), Piece("b", 4)])[:2]
    assert keys_of([Piece("a", 8)]) != keys_of([Piece("b", 8)])


def test_texts_share_their_beginnings() -> None:
    one = pieces_of(Turn(text="x" * 1000 + "y" * 400))
    two = pieces_of(Turn(text="x" * 1000 + "z" * 100))
    assert one[:3] == two[:3]
    assert one[3] != two[3]
    assert sum(piece.length for piece in one) == pytest.approx(350, abs=1)


# --- agents

PROFILE = AgentProfile(
    turns=Spread(10, 0.8), system_tokens=Spread(4000, 0.3), num_systems=5, first_tokens=Spread(500, 0.9),
    added_tokens=Spread(300, 1.1), output_tokens=Spread(100, 0.7), pause_s=Spread(8.0, 1.0), subagents_per_turn=0.0,
    max_context=100_000_000,
)  # fmt: skip


def test_the_same_seed_gives_the_same_sessions() -> None:
    one, same, other = (generate(PROFILE, num_sessions=20, rate=1.0, seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_fitting_finds_the_profile_again() -> None:
    fitted = fit(generate(PROFILE, num_sessions=1500, rate=1.0, seed=0))
    assert fitted.num_systems == PROFILE.num_systems
    for name in ("turns", "first_tokens", "added_tokens", "output_tokens", "pause_s"):
        want, got = getattr(PROFILE, name), getattr(fitted, name)
        assert got.median == pytest.approx(want.median, rel=0.1), name
        assert got.sigma == pytest.approx(want.sigma, rel=0.1), name


def test_sessions_share_system_prompts_and_start_in_order() -> None:
    sessions = generate(AgentProfile(num_systems=3), num_sessions=200, rate=2.0, seed=0)
    firsts = [session.turns[0].pieces[0].key for session in sessions]
    assert set(firsts) == {"shared-system-0", "shared-system-1", "shared-system-2"}
    assert firsts.count("shared-system-0") > firsts.count("shared-system-2")
    starts = [session.arrival_s for session in sessions]
    assert all(a is not None and b is not None and a <= b for a, b in pairwise(starts))
    assert len(sessions) > 200, "no sub-agents"
    own = [piece.key for session in sessions for turn in session.turns for piece in turn.pieces[-1:]]
    assert len(set(own)) == len(own)


def test_no_context_outgrows_the_limit() -> None:
    profile = AgentProfile(turns=Spread(80, 0.5), max_context=30_000, system_tokens=Spread(3000, 0.1))
    for session in generate(profile, num_sessions=30, rate=1.0, seed=4):
        assert session.growing
        total = sum(turn.input_len + turn.output_len for turn in session.turns)
        assert total <= profile.max_context + profile.max_context // 4


def test_agents_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be above 0"):
        generate(PROFILE, num_sessions=0, rate=1.0, seed=0)
    with pytest.raises(ConfigError, match="several turns"):
        fit([Session((Turn(pieces=(Piece("a", 3),)),))])
