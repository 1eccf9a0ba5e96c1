"""Which windows stay, and that what a rule keeps can be resumed at."""

import pytest

from cygnet.base.errors import ConfigError
from cygnet.kv.policy import KVPolicy
from cygnet.kv.retention import RETENTION_RULES, RetentionContext
from kv.driver import Driver
from kv.shadow import make_geometry

SIZE, WINDOW, WINDOW_BLOCKS = 4, 8, 2
PROMPT = [*list(range(100, 100 + 16 * SIZE)), 0]


def context(**changes: object) -> RetentionContext:
    base: dict[str, object] = {
        "prompt_blocks": 20,
        "num_full_blocks": 7,
        "num_safe_blocks": 3,
        "diverges": False,
        "window_blocks": 2,
    }
    return RetentionContext(**(base | changes))  # type: ignore[arg-type]


def driver(*rules: str, rebuild: bool = True, chunk: int = 16) -> Driver:
    policy = KVPolicy(retention=rules, rebuild=rebuild)
    return Driver(make_geometry(WINDOW, 2), 400, 30, SIZE, chunk, policy)


@pytest.mark.parametrize(
    ("rule", "given", "boundaries"),
    [
        ("prompt_end", context(), [20]),
        ("response_end", context(), []),
        ("branch", context(diverges=True), [7]),
        ("branch", context(diverges=False), []),
        ("geometric", context(), [2, 4, 8, 16]),
        ("geometric", context(window_blocks=20), []),
        ("geometric", context(window_blocks=0), []),
        ("geometric", context(prompt_blocks=0), []),
        ("message", context(), []),
        ("message", context(message_blocks=(3,)), [3]),
        ("message", context(message_blocks=(3, 5, 9)), [3, 5, 9]),
        ("message", context(message_blocks=tuple(range(2, 16))), [2, 12, 13, 14, 15]),
    ],
)
def test_rules(rule: str, given: RetentionContext, boundaries: list[int]) -> None:
    assert list(RETENTION_RULES.get(rule)(given)) == boundaries


def test_an_unknown_rule_is_named() -> None:
    with pytest.raises(ConfigError, match="did you mean 'branch'"):
        driver("brunch")


@pytest.mark.parametrize("chunk", [1, 4, 6, 64])
def test_prompt_end_serves_a_retry_and_a_changed_last_message(chunk: int) -> None:
    cache = driver("prompt_end", chunk=chunk, rebuild=False)
    kv, _ = cache.start(PROMPT)
    answer = PROMPT + [7] * 30
    cache.compute(kv, answer)
    cache.end(kv)
    assert cache.plan(PROMPT).start == 16 * SIZE
    assert cache.plan(answer).start == 16 * SIZE, "nothing was kept at the end of the answer"


@pytest.mark.parametrize("decoded", [1, 3, 4, 30])
def test_response_end_serves_the_next_turn(decoded: int) -> None:
    cache = driver("response_end")
    kv, _ = cache.start(PROMPT)
    answer = PROMPT + [7] * decoded
    cache.compute(kv, answer)
    cache.end(kv)
    plan = cache.plan([*answer, 1, 2, 3])
    assert (plan.kind, plan.start) == ("resume", len(answer) // SIZE * SIZE)
    assert cache.plan(PROMPT).num_safe_blocks == (16 if len(answer) // SIZE == 16 else 0), "only the last window stays"


def test_a_preempted_prompt_resumes_where_it_stopped() -> None:
    cache = driver("response_end")
    kv, _ = cache.start(PROMPT)
    cache.compute(kv, PROMPT, 33)
    cache.end(kv)
    assert cache.plan(PROMPT).start == 32


def test_branch_keeps_the_window_where_two_prompts_part() -> None:
    """The second user of a shared prefix computes it once more (its window is gone); the third resumes there."""
    cache = driver("branch", "response_end", rebuild=False)
    shared = PROMPT[: 8 * SIZE]
    starts = [cache.request([*shared, *[user] * 40]).start for user in (1, 2, 3, 4)]
    assert starts == [0, 0, 8 * SIZE, 8 * SIZE]


def test_geometric_boundaries_serve_a_branch_at_half_its_depth_or_more() -> None:
    cache = driver("geometric", rebuild=False)
    cache.request(PROMPT)
    for shared in range(WINDOW_BLOCKS, 17):
        plan = cache.plan([*PROMPT[: shared * SIZE], 1, 1])
        assert plan.num_safe_blocks * 2 >= plan.num_full_blocks == shared


def test_a_boundary_asked_for_while_a_request_runs_is_kept() -> None:
    cache = driver(rebuild=False)
    kv, _ = cache.start(PROMPT)
    cache.compute(kv, PROMPT, 16)
    cache.manager.want_checkpoint(kv, 10)
    cache.manager.want_checkpoint(kv, 4)  # where it stands now: the window is still there
    cache.manager.want_checkpoint(kv, 2)  # behind: too late
    cache.manager.want_checkpoint(kv, 0)
    cache.compute(kv, PROMPT)
    cache.end(kv)
    assert [b for b in range(1, 17) if cache.plan([*PROMPT[: b * SIZE], 1]).num_safe_blocks == b] == [4, 10]
    assert cache.manager.audit() == []


def test_the_window_resumed_at_is_kept_when_it_was_only_alive_by_another_request() -> None:
    """B resumes where A stands; that is a branch from then on, though A goes on and lets its window go."""
    cache = driver("branch", "prompt_end", rebuild=False)
    a, _ = cache.start(PROMPT)
    cache.compute(a, PROMPT, 8 * SIZE)
    b_prompt = [*PROMPT[: 8 * SIZE], 1]
    b, plan = cache.start(b_prompt)
    assert (plan.kind, plan.start) == ("resume", 8 * SIZE)
    cache.compute(b, b_prompt)
    cache.end(b)
    cache.compute(a, PROMPT)
    cache.end(a)
    assert cache.plan(b_prompt).start == 8 * SIZE


def test_a_twin_that_comes_later_keeps_the_window_the_first_one_let_go() -> None:
    """Two requests compute the same tokens at once; only the second was asked to keep the boundary."""
    cache = driver(rebuild=False)
    first, _ = cache.start(PROMPT)
    second, _ = cache.start(PROMPT)
    cache.manager.want_checkpoint(second, 8)
    cache.compute(first, PROMPT, 8 * SIZE)
    cache.compute(second, PROMPT, 7 * SIZE)  # its blocks are private: the tree has those of the first
    cache.compute(first, PROMPT)
    assert cache.plan([*PROMPT[: 8 * SIZE], 1]).num_safe_blocks == 0, "the first has let its window go"
    cache.compute(second, PROMPT)
    assert cache.plan([*PROMPT[: 8 * SIZE], 1]).num_safe_blocks == 8
    assert cache.manager.audit() == []
    cache.end(first)
    cache.end(second)
    assert [s.used for s in cache.manager.pool_stats()] == [0, 0]


@pytest.mark.parametrize("window", [3, 5, 8])
def test_a_rebuilt_window_is_kept_so_that_it_is_rebuilt_once(window: int) -> None:
    cache = Driver(make_geometry(window, 3), 400, 30, SIZE, policy=KVPolicy(retention=("prompt_end",)))
    cache.request(PROMPT)
    cache.drop_windows()
    assert [cache.request(PROMPT).kind for _ in range(3)] == ["rebuild", "resume", "resume"]


def test_a_message_is_edited_and_only_what_follows_is_computed() -> None:
    """Windows stay at the end of the system prompt and before the last few messages, so far as they are computed."""
    cache = driver("message", rebuild=False)
    starts = [0, 5, 17, 29, 41, 53, 64, 999]
    kv, _ = cache.start(PROMPT, starts)
    cache.compute(kv, PROMPT)
    cache.end(kv)
    kept = [b for b in range(1, 17) if cache.plan([*PROMPT[: b * SIZE], 1]).num_safe_blocks == b]
    assert kept == [1, 7, 10, 13, 16], "where messages start, rounded down to blocks; the one at 4 is too many"
    assert cache.plan([*PROMPT[:41], 1, 2]).start == 40
