"""Workers and those who ask them: sessions arrive, their turns are sent, what comes back is recorded."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from functools import lru_cache

from cygnet.base.ids import BlockKey, RequestId
from cygnet.base.messages import AddRequest, RequestOutput
from cygnet.base.sampling import SamplingParams
from cygnet.engine.core import EngineCore, PreparedRequest
from cygnet.kv.request_kv import RequestKV
from cygnet.sim.events import EventLoop, Priority
from cygnet.sim.handover import Handover
from cygnet.sim.prompts import KeyChain, pieces_of
from cygnet.sim.results import Cached, Recorder
from cygnet.sim.router import Dispatch
from cygnet.sim.sessions import Piece, Session
from cygnet.sim.worker import SimWorker

MAX_TOKEN_ID = (1 << 31) - 1
"""Token ids are hashed as 32-bit integers."""


class _Run:
    """A session on its way: which turn is due, and the keys of what it has said so far."""

    __slots__ = ("chain", "number", "session", "turn")

    def __init__(self, session: Session, number: int) -> None:
        self.session, self.number, self.turn = session, number, 0
        self.chain: KeyChain | None = None


class _Stage(IntEnum):
    """What a request is in the middle of."""

    PREFILL = 0
    HANDOVER = 1
    """Has its first token; the worker that decodes it has not said the second."""
    DECODE = 2


class _Live:
    """A request on its way. `worker` is the one that has it, or -1; `decode` is to have it after its prefill, or -1."""

    __slots__ = (
        "arrival_ns", "cached", "decode", "first_ns", "handover_ns", "kv", "offered", "output_tokens", "prompt_tokens",
        "queued_ns", "run", "stage", "worker",
    )  # fmt: skip

    def __init__(self, run: _Run, kv: RequestKV, prompt_tokens: int, arrival_ns: int) -> None:
        self.run, self.kv, self.worker, self.decode = run, kv, -1, -1
        self.stage = _Stage.PREFILL
        self.offered: Sequence[BlockKey] = ()
        self.prompt_tokens, self.output_tokens, self.cached = prompt_tokens, 0, Cached()
        self.arrival_ns, self.first_ns, self.queued_ns, self.handover_ns = arrival_ns, -1, 0, 0


@lru_cache(maxsize=8192)
def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


class Cluster:
    """Feeds sessions to workers. Sessions are taken from their iterator as their time comes, in order.

    A session whose `arrival_s` is `None` starts at once. Its next turn is sent `delay_s` after its last answer; a
    refused turn ends it. All workers must have the same block size and root key.

    With a `handover`, a worker that only prefills gives a request's first token; the request then goes on, with its KV,
    at the worker that decodes it. That its answer's KV is there, and not with the former, is as it would be.

    Invariant: `_live` names exactly the requests that some worker has, or that wait in the router.
    """

    def __init__(
        self,
        loop: EventLoop,
        root: BlockKey,
        *,
        recorder: Recorder,
        progress: Callable[[int], None] = lambda done: None,
        handover: Handover | None = None,
    ) -> None:
        self.workers: list[SimWorker] = []
        self._handover = handover
        self.dispatch: Dispatch
        """To be set with the workers, before `run`."""
        self._max_model_len = 0
        self._loop, self._root, self._recorder, self._progress = loop, root, recorder, progress
        self._live: dict[str, _Live] = {}
        self._sessions: Iterator[Session] = iter(())
        self._num_sessions = 0
        self._num_requests = 0

    def run(self, sessions: Iterable[Session]) -> None:
        """Simulate all sessions to their ends. They must come in the order of their arrivals (`InvariantError`
        otherwise)."""
        self._sessions = iter(sessions)
        self._max_model_len = min(worker.core.kv.sizes.max_model_len for worker in self.workers)
        self._next_session(self._loop.now_ns)
        self._loop.run()

    def _next_session(self, now_ns: int) -> None:
        session = next(self._sessions, None)
        if session is None:
            return
        arrival_ns = now_ns if session.arrival_s is None else round(session.arrival_s * 1e9)
        run = _Run(session, self._num_sessions)
        self._num_sessions += 1

        def arrive(now_ns: int) -> None:
            self._send(run, now_ns)
            self._next_session(now_ns)

        self._loop.at(arrival_ns, Priority.SESSION, arrive)

    # ---------------------------------------------------------------- requests

    def _send(self, run: _Run, now_ns: int) -> None:
        number = self._num_requests
        self._num_requests += 1
        chain = self._chain(run, self.workers[0].core.kv.block_size)
        chain.extend(pieces_of(run.session.turns[run.turn]))
        if chain.num_tokens >= self._max_model_len:
            self._recorder.refuse("too long")
            return
        request_id = RequestId(str(number))
        kv = RequestKV(request_id, self._root, keys=chain.keys)
        self._live[request_id] = _Live(run, kv, chain.num_tokens, now_ns)
        self.dispatch.place(request_id, run.number, kv.keys, chain.num_tokens)

    def deliver(self, request_id: str, worker: int, decode: int = -1) -> None:
        """A worker was found for a request, and maybe another one to decode it; to be the `placed` of `dispatch`."""
        live = self._live[request_id]
        live.worker = worker
        output_len = live.run.session.turns[live.run.turn].output_len
        live.decode = decode if output_len > 1 else -1
        self._add(request_id, live, live.prompt_tokens, 1 if live.decode >= 0 else output_len, live.arrival_ns)

    def _add(self, request_id: str, live: _Live, num_tokens: int, output_len: int, arrival_ns: int) -> None:
        message = AddRequest(request_id, [], _sampling(output_len), arrival_ns=arrival_ns)
        # The engine looks at the tokens of blocks that are not named yet, which all hold some of the answer.
        said = int(request_id) % MAX_TOKEN_ID
        tokens = array("i", bytes(4 * live.prompt_tokens))
        tokens.extend([said] * (num_tokens - live.prompt_tokens))
        prepared = PreparedRequest(message, live.kv, tokens)
        self.workers[live.worker].add(prepared, said, self._loop.now_ns)

    def refuse(self, request_id: str, why: str = "queue full") -> None:
        """Nobody had a place for a request; to be the `on_refused` of every worker and of `dispatch`."""
        live = self._live.pop(request_id)
        self._recorder.refuse(why)
        self._withdraw(live)
        if live.worker >= 0:
            self.dispatch.ended(request_id)

    def _hand_over(self, request_id: str, live: _Live, now_ns: int) -> None:
        """A prefill is done: the request goes to the worker that decodes it, and finds its KV offered."""
        assert self._handover is not None
        live.offered = live.kv.keys[: self._named(live)]
        self._handover.offer(live.offered)
        live.stage, live.worker, live.decode = _Stage.HANDOVER, live.decode, -1
        self.dispatch.handed_over(request_id)
        live.kv = RequestKV(live.kv.request_id, self._root, keys=list(live.offered))
        rest = live.run.session.turns[live.run.turn].output_len - 1
        self._add(request_id, live, live.prompt_tokens + 1, rest, now_ns)

    def _withdraw(self, live: _Live) -> None:
        if live.offered:
            assert self._handover is not None
            self._handover.withdraw(live.offered)
            live.offered = ()

    # ------------------------------------------------------------------ faults

    def fail(self, cores: Mapping[int, EngineCore]) -> None:
        """Workers that step together die, and what they had cached with them; `cores` are what they will start again
        with.

        Their requests that have not begun to answer are placed anew, as routers do; the others are broken off, and with
        them their sessions.
        """
        lost = [(name, live) for name, live in self._live.items() if live.worker in cores]
        for worker, core in cores.items():
            self.workers[worker].die(core)
        for worker in cores:
            self.dispatch.down(worker)  # first, or those who wait for room would be sent there
        for name, _ in lost:
            self.dispatch.ended(name)
        for name, live in lost:
            live.worker = -1
            if live.first_ns >= 0:
                self.refuse(name, "broken off")
            else:
                live.kv = RequestKV(live.kv.request_id, self._root, keys=live.kv.keys[: self._named(live)])
                self.dispatch.place(name, live.run.number, live.kv.keys, live.prompt_tokens)

    def _named(self, live: _Live) -> int:
        """Whole blocks of a request's prompt."""
        return live.prompt_tokens // self.workers[0].core.kv.block_size

    # --------------------------------------------------------------- outcomes

    def _chain(self, run: _Run, block_size: int) -> KeyChain:
        """What the next turn's prompt begins with: nothing, or all that its session said before."""
        chain, run.chain = run.chain, None
        return chain or KeyChain(self._root, block_size)

    def take(self, outputs: Sequence[RequestOutput], repeats: int, now_ns: int) -> None:
        """What a worker's step gave; to be the `on_outputs` of every worker."""
        live_requests = self._live
        for output in outputs:
            live = live_requests[output.request_id]
            live.output_tokens += 1 + repeats
            if live.stage is not _Stage.DECODE:
                self._begun(live, output, now_ns)
            if output.finish_reason is not None:
                if live.decode >= 0:
                    self._hand_over(output.request_id, live, now_ns)
                    continue
                del live_requests[output.request_id]
                self.dispatch.ended(output.request_id)
                self._finish(live, now_ns)

    def _begun(self, live: _Live, output: RequestOutput, now_ns: int) -> None:
        """A worker gave a request's first token, or the first after it was handed over."""
        if live.stage is _Stage.PREFILL:
            live.first_ns, live.queued_ns = now_ns, output.queued_ns
            live.cached = Cached(output.num_cached_tokens, output.num_host_tokens, output.num_store_tokens)
            self.dispatch.first_token(output.request_id)
        else:
            live.handover_ns = output.queued_ns
            self._withdraw(live)
        live.stage = _Stage.DECODE

    def _finish(self, live: _Live, now_ns: int) -> None:
        self._recorder.record(
            live.arrival_ns,
            live.queued_ns,
            live.first_ns,
            now_ns,
            live.prompt_tokens,
            live.output_tokens,
            live.cached,
            live.handover_ns,
        )
        self._progress(self._recorder.num_finished)
        run = live.run
        run.turn += 1
        if run.turn == len(run.session.turns):
            return
        if run.session.growing:
            run.chain = self._continued(live)
        delay_ns = round(run.session.turns[run.turn].delay_s * 1e9)
        self._loop.at(now_ns + delay_ns, Priority.TURN, lambda now_ns: self._send(run, now_ns))

    def _continued(self, live: _Live) -> KeyChain:
        """The chain of a request's prompt and answer. The engine has named the blocks that it has computed; what lies
        after them is this session's alone."""
        block_size = self.workers[0].core.kv.block_size
        chain = KeyChain(self._root, block_size, live.kv.keys)
        rest = live.prompt_tokens + live.output_tokens - chain.num_tokens
        chain.extend([Piece(f"answer-{live.run.number}-{live.run.turn}", rest)])
        return chain

    def audit(self) -> list[str]:
        """All discrepancies of the workers, and between them and what is known to be on its way."""
        faults = [fault for worker in self.workers for fault in worker.audit()] + self.dispatch.audit()
        for steps in {id(worker.steps): worker.steps for worker in self.workers}.values():
            faults += steps.audit()
        if self._handover is not None:
            faults += self._handover.audit()
            offered = {key for live in self._live.values() for key in self._handover.objects(live.offered)}
            if len(offered) != len(self._handover):
                faults.append(f"hand-over: {len(self._handover)} objects are offered, {len(offered)} are waited for")
        known = sum(worker.num_requests for worker in self.workers)
        placed = sum(live.worker >= 0 for live in self._live.values())
        if known != placed:
            faults.append(f"workers have {known} requests, {placed} are with one")
        return faults
