"""Workers and those who ask them: sessions arrive, their turns are sent, what comes back is recorded."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache

from cygnet.base.ids import BlockKey, RequestId
from cygnet.base.messages import AddRequest, RequestOutput
from cygnet.base.sampling import SamplingParams
from cygnet.engine.core import EngineCore, PreparedRequest
from cygnet.kv.request_kv import RequestKV
from cygnet.sim.events import EventLoop, Priority
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


class _Live:
    """A request on its way. `worker` is the one that has it, or -1."""

    __slots__ = (
        "arrival_ns", "cached", "first_ns", "kv", "output_tokens", "prompt_tokens", "queued_ns", "run", "worker",
    )  # fmt: skip

    def __init__(self, run: _Run, kv: RequestKV, prompt_tokens: int, arrival_ns: int) -> None:
        self.run, self.kv, self.worker = run, kv, -1
        self.prompt_tokens, self.output_tokens, self.cached = prompt_tokens, 0, Cached()
        self.arrival_ns, self.first_ns, self.queued_ns = arrival_ns, -1, 0


@lru_cache(maxsize=8192)
def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


class Cluster:
    """Feeds sessions to workers. Sessions are taken from their iterator as their time comes, in order.

    A session whose `arrival_s` is `None` starts at once. Its next turn is sent `delay_s` after its last answer; a
    refused turn ends it. All workers must have the same block size and root key.

    Invariant: `_live` names exactly the requests that some worker has, or that wait in the router.
    """

    def __init__(
        self,
        loop: EventLoop,
        root: BlockKey,
        *,
        recorder: Recorder,
        progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        self.workers: list[SimWorker] = []
        self.dispatch: Dispatch
        """To be set with the workers, before `run`."""
        self._loop, self._root, self._recorder, self._progress = loop, root, recorder, progress
        self._live: dict[str, _Live] = {}
        self._sessions: Iterator[Session] = iter(())
        self._num_sessions = 0
        self._num_requests = 0

    def run(self, sessions: Iterable[Session]) -> None:
        """Simulate all sessions to their ends. They must come in the order of their arrivals (`InvariantError`
        otherwise)."""
        self._sessions = iter(sessions)
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
        sizes = self.workers[0].core.kv.sizes
        chain = self._chain(run, sizes.block_size)
        chain.extend(pieces_of(run.session.turns[run.turn]))
        if chain.num_tokens >= sizes.max_model_len:
            self._recorder.refuse("too long")
            return
        request_id = RequestId(str(number))
        kv = RequestKV(request_id, self._root, keys=chain.keys)
        self._live[request_id] = _Live(run, kv, chain.num_tokens, now_ns)
        self.dispatch.place(request_id, run.number, kv.keys, chain.num_tokens)

    def deliver(self, request_id: str, worker: int) -> None:
        """A worker was found for a request; to be the `placed` of `dispatch`."""
        live = self._live[request_id]
        live.worker = worker
        turn = live.run.session.turns[live.run.turn]
        message = AddRequest(request_id, [], _sampling(turn.output_len), arrival_ns=live.arrival_ns)
        # The engine looks at the tokens of blocks that are not named yet, which all hold some of the answer.
        tokens = array("i", bytes(4 * live.prompt_tokens))
        prepared = PreparedRequest(message, live.kv, tokens)
        self.workers[worker].add(prepared, int(request_id) % MAX_TOKEN_ID, self._loop.now_ns)

    def refuse(self, request_id: str, why: str = "queue full") -> None:
        """Nobody had a place for a request; to be the `on_refused` of every worker and of `dispatch`."""
        live = self._live.pop(request_id)
        self._recorder.refuse(why)
        if live.worker >= 0:
            self.dispatch.ended(request_id)

    # ------------------------------------------------------------------ faults

    def fail(self, worker: int, core: EngineCore) -> None:
        """A worker dies, and what it had cached with it; `core` is what it will start again with.

        Its requests that have not begun to answer are placed anew, as routers do; the others are broken off, and with
        them their sessions.
        """
        lost = [(name, live) for name, live in self._live.items() if live.worker == worker]
        self.workers[worker].die(core)
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
            if live.first_ns < 0:
                live.first_ns, live.queued_ns = now_ns, output.queued_ns
                live.cached = Cached(output.num_cached_tokens, output.num_host_tokens, output.num_store_tokens)
                self.dispatch.first_token(output.request_id)
            if output.finish_reason is not None:
                del live_requests[output.request_id]
                self.dispatch.ended(output.request_id)
                self._finish(live, now_ns)

    def _finish(self, live: _Live, now_ns: int) -> None:
        self._recorder.record(
            live.arrival_ns,
            live.queued_ns,
            live.first_ns,
            now_ns,
            live.prompt_tokens,
            live.output_tokens,
            live.cached,
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
        known = sum(worker.num_requests for worker in self.workers)
        placed = sum(live.worker >= 0 for live in self._live.values())
        if known != placed:
            faults.append(f"workers have {known} requests, {placed} are with one")
        return faults
