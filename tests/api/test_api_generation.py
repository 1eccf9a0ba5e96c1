"""Both generation endpoints through the official client."""

import pytest

from api.harness import MODEL, TOKENIZER, endless, events, fake_engine, gather, in_loop, serving
from cygnet.base.messages import AddRequest
from fakes.engine import FakeEngine
from fakes.tokenizer import BOS, EOS, FIRST_WORD

ASK = [{"role": "user", "content": "hello"}]


@in_loop
async def test_chat() -> None:
    async with serving() as s:
        answer = await s.openai.chat.completions.create(model=MODEL, messages=ASK)
        choice = answer.choices[0]
        assert (choice.message.role, choice.message.content) == ("assistant", "hello world")
        assert choice.finish_reason == "stop"
        request = s.engine.requests[0]
        prompt = TOKENIZER.encode("user: hello\nassistant: ", add_special_tokens=False)
        assert request.prompt_token_ids == prompt
        assert request.sampling.max_tokens == 4096 - len(prompt)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.usage.completion_tokens == 3  # two words and the end
        assert answer.usage.total_tokens == len(prompt) + 3
        assert answer.id.startswith("chatcmpl-")
        assert answer.model == MODEL


@in_loop
async def test_chat_messages_become_template_input() -> None:
    async with serving() as s:
        messages = [
            {"role": "developer", "content": "be kind"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": "d", "name": "ann"},
        ]
        await s.openai.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=2)
        text = TOKENIZER.decode(s.engine.requests[0].prompt_token_ids)
        assert text == "system: be kind\nuser: a\nb\nassistant: c\nuser: d\nassistant: "
        assert s.engine.requests[0].sampling.max_tokens == 2


@in_loop
async def test_chat_stream_with_usage() -> None:
    async with serving() as s:
        stream = await s.openai.chat.completions.create(
            model=MODEL, messages=ASK, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello world"
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
        assert all(c.usage is None for c in chunks[:-1])
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 3
        assert len({c.id for c in chunks}) == 1


@in_loop
async def test_completion_defaults_and_cached_tokens() -> None:
    async with serving(fake_engine(endless)) as s:
        prompt = "a quite long prompt that is asked twice"
        answers = [await s.openai.completions.create(model=MODEL, prompt=prompt) for _ in range(2)]
        assert [a.choices[0].finish_reason for a in answers] == ["length"] * 2
        usages = [a.usage for a in answers]
        assert [u.completion_tokens for u in usages if u] == [16, 16]
        cached = [u.prompt_tokens_details.cached_tokens for u in usages if u and u.prompt_tokens_details]
        assert cached[0] == 0
        assert cached[1] == (len(TOKENIZER.encode(prompt)) - 1) // 4 * 4
        assert s.engine.requests[0].prompt_token_ids[0] == BOS
        assert all(not u.prompt_tokens_details.model_extra for u in usages if u and u.prompt_tokens_details)
        response = await s.post("/reset_prefix_cache", None)
        assert response.status_code == 200
        assert response.json()["dropped"]["device_blocks"] > 0
        assert s.engine.flushes == 1
        again = await s.openai.completions.create(model=MODEL, prompt=prompt)
        assert again.usage
        assert again.usage.prompt_tokens_details
        assert again.usage.prompt_tokens_details.cached_tokens == 0


@in_loop
async def test_completion_stream_is_what_the_whole_is() -> None:
    text = "äöü hello 🦢 world €"
    async with serving(fake_engine(text)) as s:
        whole = await s.openai.completions.create(model=MODEL, prompt="x", max_tokens=100)
        stream = await s.openai.completions.create(model=MODEL, prompt="x", max_tokens=100, stream=True)
        pieces = [chunk.choices[0].text async for chunk in stream]
        assert whole.choices[0].text == "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)


@in_loop
async def test_broken_character_at_the_end_shows_as_replacement() -> None:
    async with serving(fake_engine("é")) as s:
        answer = await s.openai.completions.create(model=MODEL, prompt="x", max_tokens=1)
        assert answer.choices[0].text == "\ufffd"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hello", [[BOS, FIRST_WORD]]),
        (["hello", " world"], [[BOS, FIRST_WORD], [BOS, FIRST_WORD + 1]]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
@in_loop
async def test_prompt_forms(prompt: object, expected: list[list[int]]) -> None:
    def reply(request: AddRequest) -> list[int]:
        return [request.prompt_token_ids[-1]]  # so that each answer shows which prompt it is for

    async with serving(fake_engine(reply)) as s:
        answer = await s.openai.completions.create(model=MODEL, prompt=prompt)  # type: ignore[call-overload]
        assert sorted(r.prompt_token_ids for r in s.engine.requests) == sorted(expected)
        assert [c.index for c in answer.choices] == list(range(len(expected)))
        assert [c.text for c in answer.choices] == [TOKENIZER.decode([ids[-1]]) for ids in expected]
        assert answer.usage.prompt_tokens == sum(map(len, expected))


@in_loop
async def test_special_tokens_options() -> None:
    async with serving(fake_engine(lambda r: [BOS, FIRST_WORD])) as s:
        answer = await s.complete(add_special_tokens=False, skip_special_tokens=False)
        assert s.engine.requests[0].prompt_token_ids == [FIRST_WORD]
        assert answer.json()["choices"][0]["text"] == "<bos>hello"
        assert answer.json()["choices"][0]["stop_reason"] == EOS


@in_loop
async def test_n_answers_have_seeds_of_their_own() -> None:
    def reply(request: AddRequest) -> list[int]:
        return TOKENIZER.encode(f"seed {request.sampling.seed}", add_special_tokens=False)

    async with serving(fake_engine(reply)) as s:
        chat = await s.openai.chat.completions.create(model=MODEL, messages=ASK, n=3, seed=40)
        assert [c.message.content for c in chat.choices] == ["seed 40", "seed 41", "seed 42"]
        assert chat.usage is not None
        assert chat.usage.prompt_tokens == len(s.engine.requests[0].prompt_token_ids)
        assert len({r.request_id for r in s.engine.requests}) == 3
        two = await s.openai.completions.create(model=MODEL, prompt=["a", "b"], n=2, seed=2**63 - 1, max_tokens=40)
        assert [c.text for c in two.choices] == [f"seed {2**63 - 1}", f"seed {-(2**63)}"] * 2
        stream = await s.openai.completions.create(model=MODEL, prompt="a", n=3, seed=7, stream=True)
        texts = ["", "", ""]
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == ["seed 7", "seed 8", "seed 9"]


@in_loop
async def test_echo() -> None:
    async with serving() as s:
        answer = await s.openai.completions.create(model=MODEL, prompt="abc", echo=True, n=2)
        assert [c.text for c in answer.choices] == ["abchello world"] * 2
        response = await s.complete(prompt=[FIRST_WORD], echo=True, stream=True)
        assert "".join(e["choices"][0]["text"] for e in events(response.text)[:-1]) == "hello" + "hello world"


@in_loop
async def test_chat_logprobs() -> None:
    async with serving() as s:
        answer = await s.openai.chat.completions.create(model=MODEL, messages=ASK, logprobs=True, top_logprobs=2)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert [t.token for t in logprobs.content] == ["hello", " world"]
        assert logprobs.content[0].bytes == list(b"hello")
        assert logprobs.content[0].logprob == -0.5
        assert [t.token for t in logprobs.content[0].top_logprobs] == ["hello", " world"]
        stream = await s.openai.chat.completions.create(model=MODEL, messages=ASK, logprobs=True, stream=True)
        tokens = [
            t.token
            async for c in stream
            for t in ((c.choices[0].logprobs.content or []) if c.choices[0].logprobs else [])
        ]
        assert tokens == ["hello", " world"]
        assert s.engine.requests[-1].sampling.logprobs == 0


@in_loop
async def test_completion_logprobs() -> None:
    async with serving(fake_engine("aé world")) as s:
        answer = await s.openai.completions.create(model=MODEL, prompt="x", logprobs=2)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens == ["a", "\ufffd", "\ufffd", " world"]
        assert logprobs.text_offset == [0, 1, 1, 2]
        assert logprobs.token_logprobs == [-0.5] * 4
        assert logprobs.top_logprobs
        assert logprobs.top_logprobs[0] == {"a": -0.5, "b": -1.5}
        none = await s.openai.completions.create(model=MODEL, prompt="x")
        assert none.choices[0].logprobs is None


@in_loop
async def test_stop_string_across_tokens_aborts_the_sequence() -> None:
    engine = fake_engine("one\nHuman:\ntwo" + "x" * 500)
    async with serving(engine) as s:
        for stream in (False, True):
            response = await s.complete(stop=["\nHuman:"], max_tokens=400, stream=stream)
            if stream:
                chunks = events(response.text)[:-1]
                text = "".join(c["choices"][0]["text"] for c in chunks)
                last = chunks[-1]["choices"][0]
            else:
                last = response.json()["choices"][0]
                text = last["text"]
                assert response.json()["usage"]["completion_tokens"] == 6
            assert text == "one"
            assert (last["finish_reason"], last["stop_reason"]) == ("stop", "\nHuman:")
        await engine.wait_idle()
        assert engine.aborted == [r.request_id for r in engine.requests]


@in_loop
async def test_stop_options() -> None:
    async with serving(fake_engine("a END b END c")) as s:

        async def text(**fields: object) -> str:
            return (await s.complete(max_tokens=64, **fields)).json()["choices"][0]["text"]

        assert await text(stop="END") == "a "
        assert await text(stop="END", include_stop_str_in_output=True) == "a END"
        assert await text(stop="END", min_tokens=5) == "a END b "
        assert await text(stop_token_ids=[FIRST_WORD + 2]) == "a "
        assert await text(stop=["nothing", " c"]) == "a END b END"
        assert await text(stop=["ENDLESS"]) == "a END b END c"
        logprobs = (await s.complete(max_tokens=64, stop="END", logprobs=0)).json()["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["a", " "]


@in_loop
async def test_all_sampling_fields_reach_the_engine() -> None:
    async with serving() as s:
        response = await s.complete(
            temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.2,
            frequency_penalty=-0.3, logit_bias={"5": 3}, seed=-4, max_tokens=9, min_tokens=2, ignore_eos=True,
            stop_token_ids=[9], cache_salt="tenant", user="me", logprobs=3,
        )  # fmt: skip
        assert response.status_code == 200
        request = s.engine.requests[0]
        p = request.sampling
        assert (p.temperature, p.top_p, p.top_k, p.min_p) == (0.5, 0.9, 7, 0.1)
        assert (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) == (1.1, 0.2, -0.3)
        assert (p.logit_bias, p.seed, p.max_tokens, p.min_tokens) == ({5: 3.0}, -4, 9, 2)
        assert (p.ignore_eos, p.stop_token_ids, p.logprobs) == (True, (9,), 3)
        assert request.cache_salt == "tenant"
        await s.complete(top_k=-1, temperature=None)
        assert s.engine.requests[1].sampling.top_k == 0
        assert s.engine.requests[1].sampling.temperature == 1.0


@in_loop
async def test_32_streams_at_once() -> None:
    def reply(request: AddRequest) -> list[int]:
        return [request.prompt_token_ids[-1]] * 50

    engine: FakeEngine = fake_engine(reply)
    async with serving(engine) as s:

        async def one(i: int) -> str:
            stream = await s.openai.completions.create(model=MODEL, prompt=[10 + i], max_tokens=50, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

        texts = await gather(*(one(i) for i in range(90, 122)))
        assert texts == [TOKENIZER.decode([10 + i] * 50) for i in range(90, 122)]
        assert engine.aborted == []
        assert engine.num_in_flight == 0


@in_loop
async def test_default_max_tokens_shrink_to_the_context() -> None:
    async with serving(fake_engine(endless, max_model_len=20)) as s:
        answer = await s.openai.completions.create(model=MODEL, prompt=[5] * 12)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage
        assert answer.usage.completion_tokens == 8


@in_loop
async def test_usage_says_from_which_tier() -> None:
    """Where there are lower tiers. Of several answers to one prompt the one with the fewest cached tokens counts."""
    prompt = "a quite long prompt that is asked twice and then once more"
    cached = (len(TOKENIZER.encode(prompt)) - 1) // 4 * 4
    async with serving(fake_engine(tiers=("device", "host", "store"))) as s:
        for expected in ((0, 0, 0), (cached - 8, 4, 4)):
            usage = (await s.complete(prompt=prompt, n=2)).json()["usage"]
            details = usage["prompt_tokens_details"]
            assert tuple(details["cached_tokens_details"].values()) == expected
            assert list(details["cached_tokens_details"]) == ["device", "host", "store"]
            assert details["cached_tokens"] == sum(expected)
        streamed = events((await s.complete(prompt=prompt, stream=True, stream_options={"include_usage": True})).text)
        assert streamed[-2]["usage"]["prompt_tokens_details"] == details
