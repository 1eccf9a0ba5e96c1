"""What every `State` must do; run against the one in memory and the one in Redis."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any
from uuid import uuid4

import pytest
from msgspec import structs

from cygnet.router.policies import POLICIES, Ask, Weights
from cygnet.router.scoring import Candidate, Plan
from cygnet.router.state import Decision, Lease, NoRoom, RouteRequest, State
from cygnet.router.view import WorkerRecord
from router.chains import chain_of

BLOCK_TOKENS = 10


@dataclass
class Fixture:
    """A state, and how its time passes."""

    state: State
    sleep: Callable[[float], Awaitable[None]]
    ttl_s: float
    lease_s: float

    async def route(
        self, words: list[int], plan: Plan, *, name: str = "", chance: float = 0.0, tokens: int = 0
    ) -> Decision | NoRoom:
        """Place a prompt of one block per word."""
        request = RouteRequest(
            request_id=name or uuid4().hex,
            chain=chain_of(words),
            tokens=tokens or len(words) * BLOCK_TOKENS,
            block_tokens=BLOCK_TOKENS,
            plan=plan,
            chance=chance,
        )
        return await place(self.state, request)

    async def placed(self, words: list[int], plan: Plan, **more: Any) -> Decision:
        decision = await self.route(words, plan, **more)
        assert isinstance(decision, Decision)
        assert decision.shared
        return decision

    async def workers(self, count: int) -> list[int]:
        slots = []
        for place_ in range(count):
            slot = await self.state.join(WorkerRecord(url=f"http://worker-{place_}:1"))
            assert slot is not None
            slots.append(slot)
        return slots


async def place(state: State, request: RouteRequest) -> Decision | NoRoom:
    future: asyncio.Future[Decision | NoRoom] = asyncio.get_running_loop().create_future()
    state.route(request, future.set_result)
    return await asyncio.wait_for(future, 5)


def plan_for(slots: list[int], **changes: Any) -> Plan:
    plan = Plan(tuple(Candidate(slot) for slot in slots), match_weight=1.5, load_floor=100, request_tokens=1)
    return replace(plan, **changes)


class StateContract:
    """Subclasses give the fixture `fix`; every test is a coroutine run by it."""

    async def test_a_prefix_leads_back_to_its_worker(self, fix: Fixture) -> None:
        plan = plan_for(await fix.workers(4))
        words = list(range(500))
        first = await fix.placed(words[:300], plan, chance=0.6)
        assert (first.slot, first.matched_tokens, first.cost) == (2, 0, 3001)
        for end in (301, 350, 500):
            again = await fix.placed(words[:end], replace(plan, match_weight=10), chance=0.1)
            assert again.slot == 2
        assert again.matched_tokens == 3500

    async def test_loads_count_from_the_choice_on(self, fix: Fixture) -> None:
        plan = plan_for(await fix.workers(4))
        slots = [(await fix.placed([10**6 + turn] * 20, plan)).slot for turn in range(8)]
        assert sorted(slots) == [0, 0, 1, 1, 2, 2, 3, 3]
        assert await fix.state.loads() == dict.fromkeys(range(4), 402)

    async def test_a_release_counts_once(self, fix: Fixture) -> None:
        plan = plan_for(await fix.workers(1))
        await fix.placed([1, 2], plan, name="a")
        await fix.placed([3], plan, name="b")
        for _ in range(3):
            fix.state.release("a")
        fix.state.release("never there")
        assert await fix.state.loads() == {0: 11}
        fix.state.release("b")
        assert await fix.state.loads() == {}

    async def test_settling_lowers_the_load(self, fix: Fixture) -> None:
        plan = plan_for(await fix.workers(1))
        await fix.placed([1] * 50, plan, name="a")
        fix.state.settle("a", 7)
        assert await fix.state.loads() == {0: 7}
        fix.state.settle("unknown", 7)
        fix.state.release("a")
        assert await fix.state.loads() == {}

    async def test_leases_of_the_dead_run_out_and_of_the_living_do_not(self, fix: Fixture) -> None:
        plan = plan_for(await fix.workers(2))
        await fix.placed([1], plan, name="dead", chance=0.0)
        await fix.placed([2], plan, name="living", chance=0.9)
        for _ in range(3):
            await fix.sleep(fix.lease_s * 0.6)
            fix.state.renew([Lease("living", 1, 11)])
        await fix.placed([3], plan, name="reaps")
        fix.state.release("reaps")
        assert await fix.state.loads() == {1: 11}

    async def test_leases_of_the_dead_run_out_where_no_request_comes(self, fix: Fixture) -> None:
        """A router that died left its load on an idle fleet until others came with requests."""
        plan = plan_for(await fix.workers(2))
        for number in range(40):
            await fix.placed([number], plan, chance=number / 40)
        await fix.sleep(fix.lease_s * 1.2)
        assert await fix.state.loads() == {}

    async def test_a_lost_lease_is_entered_again_by_renewal(self, fix: Fixture) -> None:
        await fix.workers(1)
        fix.state.renew([Lease("from before", 0, 50), Lease("of a dead worker", 5, 50)])
        assert await fix.state.loads() == {0: 50}
        fix.state.release("from before")
        assert await fix.state.loads() == {}

    async def test_placed_again_under_the_same_id(self, fix: Fixture) -> None:
        plan = plan_for(await fix.workers(2))
        await fix.placed([1], replace(plan, candidates=plan.candidates[:1]), name="a")
        await fix.placed([1], replace(plan, candidates=plan.candidates[1:]), name="a")
        assert await fix.state.loads() == {1: 11}

    async def test_no_room_changes_nothing(self, fix: Fixture) -> None:
        plan = plan_for(await fix.workers(2), budget=100)
        for turn in range(2):
            await fix.placed([turn] * 9, plan)
        before = await fix.state.loads()
        assert before == {0: 91, 1: 91}
        assert await fix.route([0] * 9 + [5] * 8, plan) == NoRoom(90)
        assert await fix.state.loads() == before
        fits = await fix.placed([0] * 9, plan)
        assert (fits.slot, fits.cost) == (0, 1)

    async def test_a_worker_that_does_little_takes_a_prompt_beyond_its_budget(self, fix: Fixture) -> None:
        plan = plan_for(await fix.workers(1), budget=88)
        assert (await fix.placed([1], plan)).cost == 11
        assert (await fix.placed(list(range(50)), plan)).cost == 501
        assert await fix.route([7], plan) == NoRoom(0)

    async def test_a_prompt_waits_for_its_holder_but_not_for_ever(self, fix: Fixture) -> None:
        plan = plan_for(await fix.workers(2), budget=400)
        words = list(range(30))
        holder = (await fix.placed(words, plan, chance=0.0, tokens=420)).slot
        request = RouteRequest("again", chain_of([*words, 99]), 310, BLOCK_TOKENS, plan, 0.0)
        assert await place(fix.state, request) == NoRoom(300)
        assert await fix.state.loads() == {holder: 421}
        await fix.placed([7] * 5, replace(plan, budget=0), name="other")
        assert await place(fix.state, structs.replace(request, waited=200)) == NoRoom(300), "it has work of its own"
        fix.state.release("other")
        elsewhere = await place(fix.state, structs.replace(request, waited=200))
        assert isinstance(elsewhere, Decision)
        assert elsewhere.slot != holder

    async def test_what_is_late_goes_to_a_worker_below_its_budget(self, fix: Fixture) -> None:
        plan = plan_for(await fix.workers(1), budget=200)
        await fix.placed(list(range(19)), plan)
        request = RouteRequest("late", chain_of([7] * 90), 900, BLOCK_TOKENS, plan, 0.0)
        assert await place(fix.state, request) == NoRoom(0)
        assert isinstance(await place(fix.state, structs.replace(request, late=True)), Decision)
        assert await place(fix.state, structs.replace(request, request_id="later", late=True)) == NoRoom(900)

    async def test_a_look_finds_and_changes_nothing(self, fix: Fixture) -> None:
        plan = plan_for(await fix.workers(2))
        await fix.placed([1, 2, 3], plan, name="a")
        before = await fix.state.loads()
        look = RouteRequest("b", chain_of([1, 2, 3, 4]), 40, BLOCK_TOKENS, plan, 0.0, look=True)
        assert await place(fix.state, look) == NoRoom(30)
        assert await fix.state.loads() == before
        assert (await fix.placed([1, 2, 3, 4], plan)).matched_tokens == 30

    async def test_spilled_is_said(self, fix: Fixture) -> None:
        slots = await fix.workers(2)
        candidates = (Candidate(slots[0], max_tokens=100), Candidate(slots[1], min_tokens=100))
        plan = plan_for(slots, candidates=candidates, budget=150)
        assert not (await fix.placed([1] * 9, plan)).spilled
        spilled = await fix.placed([2] * 9, plan)
        assert (spilled.slot, spilled.spilled) == (1, True)

    async def test_a_restarted_worker_has_forgotten(self, fix: Fixture) -> None:
        slots = await fix.workers(2)
        words = list(range(40))
        await fix.placed(words, plan_for(slots), name="a")
        new = await fix.state.restart("http://worker-0:1", 0)
        assert new == 2
        assert await fix.state.restart("http://worker-0:1", 0) == 2
        assert await fix.state.restart("http://nobody:1", 0) is None
        assert await fix.state.loads() == {}
        decision = await fix.placed(words, plan_for([1, 2]))
        assert decision.matched_tokens == 0

    async def test_a_decision_for_a_worker_that_just_left_holds_nothing(self, fix: Fixture) -> None:
        plan = plan_for(await fix.workers(1))
        await fix.state.leave("http://worker-0:1")
        assert (await fix.placed([1] * 3, plan)).slot == 0
        assert await fix.state.loads() == {}
        assert (await fix.placed([1] * 3, plan)).matched_tokens == 0

    async def test_workers_come_change_and_go(self, fix: Fixture) -> None:
        state = fix.state
        assert (await state.roster()).workers == {}
        worker = WorkerRecord(url="http://a:1", group="long", role="decode")
        assert await state.join(worker) == 0
        first = await state.roster()
        assert first.workers == {0: worker}
        assert await state.join(worker) == 0
        assert (await state.roster()).version == first.version
        draining = WorkerRecord(url="http://a:1", draining=True)
        await state.join(draining)
        second = await state.roster()
        assert second.workers == {0: draining}
        assert second.version > first.version
        await state.leave("http://a:1")
        await state.leave("http://a:1")
        assert (await state.roster()).workers == {}
        assert await state.join(worker) == 1, "the slot is in quarantine"

    async def test_registration_runs_out_unless_renewed(self, fix: Fixture) -> None:
        state = fix.state
        await state.join(WorkerRecord(url="http://a:1"), ttl_s=0.5)
        await state.join(WorkerRecord(url="http://b:1"), ttl_s=0.5)
        await fix.sleep(0.3)
        await state.join(WorkerRecord(url="http://a:1"), ttl_s=0.5)
        await fix.sleep(0.3)
        assert [worker.url for worker in (await state.roster()).workers.values()] == ["http://a:1"]

    async def test_prefixes_age(self, fix: Fixture) -> None:
        plan = plan_for(await fix.workers(1))
        await fix.placed([1] * 5, plan)
        await fix.sleep(fix.ttl_s * 0.7)
        assert (await fix.placed([1] * 5, plan)).matched_tokens == 50
        await fix.sleep(fix.ttl_s * 0.7)
        assert (await fix.placed([1] * 5, plan)).matched_tokens == 50, "used since"
        await fix.sleep(fix.ttl_s * 1.1)
        assert (await fix.placed([1] * 5, plan)).matched_tokens == 0

    async def test_what_a_worker_tells_goes_before_what_it_was_sent(self, fix: Fixture) -> None:
        slots = await fix.workers(3)
        plan = plan_for(slots, match_weight=10)
        words = list(range(100))
        first = await fix.placed(words, plan, chance=0.0)
        assert first.slot == slots[0]

        async def again(known: tuple[int, ...], blocks: int, end: int = 100) -> Decision:
            request = RouteRequest(uuid4().hex, chain_of(words[:end]), end * BLOCK_TOKENS, BLOCK_TOKENS, plan, 0.0)
            request = structs.replace(request, known=known, known_blocks=blocks)
            decision = await place(fix.state, request)
            assert isinstance(decision, Decision)
            fix.state.release(request.request_id)
            return decision

        assert (await again((-1, -1, -1), 100)).slot == slots[0]
        # What was routed there beyond what it speaks of is still on its way.
        pending = await again((0, 600, 0), 60)
        assert (pending.slot, pending.matched_tokens) == (slots[0], 1000)
        evicted = await again((0, 700, -1), 100)
        assert (evicted.slot, evicted.matched_tokens, evicted.cost) == (slots[1], 700, 301)
        rebuilt = await again((900, 700, 0), 100)
        assert (rebuilt.slot, rebuilt.matched_tokens) == (slots[0], 900)

    async def test_a_million_tokens(self, fix: Fixture) -> None:
        plan = plan_for(await fix.workers(3))
        words = list(range(2100))
        await fix.placed(words[:2000], plan, chance=0.5)
        decision = await fix.placed(words, replace(plan, match_weight=9))
        assert (decision.slot, decision.matched_tokens) == (1, 20_000)

    @pytest.mark.parametrize("policy", sorted(POLICIES))
    async def test_every_policy_places(self, fix: Fixture, policy: str) -> None:
        from cygnet.router.view import Member

        slots = await fix.workers(3)
        members = tuple(Member(slot, f"http://worker-{slot}:1") for slot in slots)
        for turn in range(6):
            plan = POLICIES.get(policy)(Ask(b"p", b"s", turn, 0.3), members, {}, Weights())
            assert (await fix.placed([turn], plan, chance=0.4)).slot in slots

    async def test_random_traffic_decides_as_the_reference(self, fix: Fixture) -> None:
        """Sessions that grow and branch, on workers of unlike loads: the same choices as a state in memory."""
        from cygnet.router.local_state import LocalState

        reference = LocalState(lambda: 0, ttl_ns=10**15, lease_ns=10**15, max_entries=1 << 20)
        random = Random(5)
        slots = await fix.workers(5)
        for place_ in range(5):
            await reference.join(WorkerRecord(url=f"http://worker-{place_}:1"))
        sessions: list[list[int]] = [[1, 2, 3]]
        held: list[str] = []
        for turn in range(250):
            old = random.choice(sessions)
            cut = len(old) if random.random() < 0.6 else random.randrange(len(old) + 1)
            words = (old[:cut] + [random.randrange(1 << 30) for _ in range(random.randrange(1, 90))])[:500]
            sessions.append(words)
            chosen = random.sample(slots, random.randrange(1, 6))
            candidates = tuple(Candidate(slot, bonus=random.choice((0.0, 0.25))) for slot in chosen)
            plan = plan_for(chosen, candidates=candidates, budget=random.choice((0, 0, 9000)))
            name = f"r{turn}"
            request = RouteRequest(
                name,
                chain_of(words),
                len(words) * BLOCK_TOKENS,
                BLOCK_TOKENS,
                plan,
                random.random(),
                waited=random.choice((0, 500, 5000)),
                late=random.random() < 0.2,
                look=random.random() < 0.1,
            )
            expected = await place(reference, request)
            assert await place(fix.state, request) == expected, f"turn {turn}"
            if isinstance(expected, Decision):
                held.append(name)
            while len(held) > 12:
                ended = held.pop(random.randrange(len(held)))
                fix.state.release(ended)
                reference.release(ended)
            assert await fix.state.loads() == await reference.loads()
        for name in held:
            fix.state.release(name)
        assert await fix.state.loads() == {}
