"""Text from tokens: stop strings against a dumb model, and independence of how outputs are cut."""

import asyncio
import random

import pytest

from api.harness import TOKENIZER
from cygnet.api import sse
from cygnet.api.errors import ClientDisconnectedError
from cygnet.api.output import Delta, OutputProcessor, StopMatcher, TextOptions
from cygnet.base.messages import PositionLogprobs, RequestOutput


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The text up to the first end of any stop string, character by character."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


def cut(text: str, rng: random.Random) -> list[str]:
    """`text` in random pieces, some empty."""
    pieces = []
    while text:
        size = rng.randrange(4)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


@pytest.mark.parametrize("seed", range(300))
def test_stop_matcher_agrees_with_the_naive_search(seed: int) -> None:
    rng = random.Random(seed)
    stops = ["".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 3))]
    text = "".join(rng.choices("abc", k=30))
    include = rng.random() < 0.5
    matcher = StopMatcher(stops, include_stop=include)
    shown = ""
    found = None
    seen = ""
    for piece in cut(text, rng):
        released, found = matcher.push(piece)
        seen += piece
        shown += released
        if found is not None:
            break
        assert shown + matcher.held == seen  # nothing lost
        assert not any(stop.startswith(matcher.held + "x") for stop in stops)
        held = matcher.held
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
    if found is None:
        shown += matcher.flush()
    assert (shown, found) == naive(text, stops, include)


def outputs(ids: list[int], sizes: list[int], reason: str, stop_id: int | None) -> list[RequestOutput]:
    """`ids` as engine outputs of the given sizes."""
    made = []
    for size in sizes:
        part, ids = ids[:size], ids[size:]
        last = not ids
        made.append(
            RequestOutput(
                "r",
                part,
                logprobs=[PositionLogprobs(i, -float(i), []) for i in part],
                finish_reason=reason if last else None,
                stop_token_id=stop_id if last else None,
            )
        )
    return made


def play(options: TextOptions, given: list[RequestOutput]) -> tuple[str, int, list[tuple[int, int]], Delta]:
    """Text, token count, (token, offset) pairs and the last delta."""
    processor = OutputProcessor(TOKENIZER, options)
    text, count, logprobs = "", 0, []
    delta = Delta("")
    for output in given:
        delta = processor.push(output)
        text += delta.text
        count += delta.num_tokens
        logprobs += [(item.position.token_id, item.offset) for item in delta.logprobs]
        if delta.finish_reason:
            break
    return text, count, logprobs, delta


@pytest.mark.parametrize("seed", range(100))
def test_result_does_not_depend_on_how_outputs_are_grouped(seed: int) -> None:
    rng = random.Random(seed)
    ids = TOKENIZER.encode("aé world END 🦢hello Human:\nEN", add_special_tokens=False)[: rng.randint(1, 40)]
    stop_id = 2 if rng.random() < 0.5 else None
    if stop_id:
        ids = [*ids, stop_id]
    options = TextOptions(
        stop=tuple(rng.sample(["END", "hell", "\n", "🦢", "d E", "ENDX", "zzz"], rng.randint(0, 3))),
        include_stop=rng.random() < 0.3,
        min_tokens=rng.choice([0, 0, 4]),
        logprobs=rng.random() < 0.7,
    )
    reason = "stop" if stop_id else "length"
    one_by_one = play(options, outputs(ids, [1] * len(ids), reason, stop_id))
    all_at_once = play(options, outputs(ids, [len(ids)], reason, stop_id))
    sizes: list[int] = []
    while sum(sizes) < len(ids):
        sizes.append(min(rng.randint(1, 5), len(ids) - sum(sizes)))
    mixed = play(options, outputs(ids, sizes, reason, stop_id))
    for other in (all_at_once, mixed):
        assert other[:3] == one_by_one[:3]
        assert other[3].finish_reason == one_by_one[3].finish_reason
        assert other[3].stop_reason == one_by_one[3].stop_reason
    if one_by_one[3].finish_reason == "length":
        assert one_by_one[0] == TOKENIZER.decode(ids)
    if options.logprobs and not isinstance(one_by_one[3].stop_reason, str):
        assert [token for token, _ in one_by_one[2]] == [i for i in ids if i != stop_id]


def test_a_client_that_takes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stuck(message: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(sse, "SEND_TIMEOUT_S", 0.01)
    with pytest.raises(ClientDisconnectedError):
        asyncio.run(sse.EventStream(stuck).event({}))
