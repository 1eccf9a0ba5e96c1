"""Carries out step plans: block tables, forward pass, sampling."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cygnet.base.errors import InvariantError
from cygnet.base.ids import RequestId
from cygnet.engine.plan import SampledToken, StepPlan, StepResult
from cygnet.engine.request import Request
from cygnet.engine.runtime.rows import Row, Rows
from cygnet.engine.runtime.sampler import all_plain_greedy, sample
from cygnet.engine.runtime.step_device import Mark, Staging, StepDevice, step_device
from cygnet.engine.runtime.step_inputs import StepInputs
from cygnet.kv.runtime.device_pool import DevicePool
from cygnet.kv.runtime.transfers import Gate, Transfers
from cygnet.model.batch import ForwardBatch
from cygnet.model.decoder import HybridModel

Forward = Callable[[ForwardBatch], Tensor]
"""From a step to the hidden states of its wanted rows, as `HybridModel` does it."""


class LaunchedStep:
    """A step on its way on the device. It keeps alive what the device reads and writes until the result is there."""

    def __init__(
        self,
        step: int,
        rows: Rows,
        sampled: Sequence[tuple[RequestId, Row]],
        counts: Sequence[int],
        *,
        greedy: Tensor | None,
        logits: Tensor | None,
        mark: Mark,
        gate: Gate | None,
        finished: Callable[[], None],
    ) -> None:
        self._step = step
        self._rows = rows
        self._sampled = sampled
        self._counts = counts
        self._greedy = greedy
        self._logits = logits
        self._mark = mark
        self._gate = gate
        self._finished = finished

    def done(self) -> bool:
        return self._mark.done() and (self._gate is None or self._gate.done())

    def result(self) -> StepResult:
        self._mark.wait()
        tokens = self._tokens()
        if self._gate is not None:
            self._gate.join()
        self._finished()
        self._rows.append([row for _, row in self._sampled], tokens)
        return StepResult(self._step, {rid: token for (rid, _), token in zip(self._sampled, tokens, strict=True)})

    @torch.inference_mode()
    def _tokens(self) -> list[SampledToken]:
        if self._greedy is not None:  # in host memory by now
            return [SampledToken(token) for token in self._greedy.tolist()]
        if self._logits is not None:
            return sample(self._logits, [row.sampling for _, row in self._sampled], self._counts)
        return []


class ModelRunner:
    """Runs one model on one device.

    Invariants (`audit`, between steps): it has a row for exactly the core's running requests and those that the next
    plan declares gone; a row's tokens and block tables are the request's. At most one step is pending.
    """

    def __init__(
        self,
        model: HybridModel,
        pool: DevicePool,
        *,
        window: int,
        eos_token_ids: Sequence[int],
        forward: Forward | None = None,
        device: StepDevice | None = None,
        transfers: Transfers | None = None,
    ) -> None:
        """`forward` stands in for calling `model`, and `device` for the model's own. Without `transfers` there is no
        tier but the device, and no plan may have copies."""
        self._model = model
        self._pool = pool
        self._window = window
        # A tokenizer may know tokens that the model has no logits for.
        self._eos = tuple(token for token in eos_token_ids if token < model.description.vocab_size)
        self._forward = forward or model
        self._device = device or step_device(model.device)
        self._staging = Staging(self._device)
        self._transfers = transfers
        self._rows = Rows()
        self._pending = False

    @property
    def asynchronous(self) -> bool:
        """See `StepRunner`."""
        return self._device.asynchronous

    def execute(self, plan: StepPlan) -> StepResult:
        """A whole step, for scripts."""
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """One forward pass; a sampled token for every request that reached its last token.

        Nothing in here waits for an asynchronous device, except copies of evicted blocks from it. Tokens that are
        simply the likeliest are chosen on the device and copied from it; where more is asked for, `result` samples from
        the logits once they are there. Copies between device and host that no layer waits for may go on until `result`.
        """
        if self._pending:
            raise InvariantError("a step was launched before the last one's result was taken")
        self._pending = True
        gate = self._begin_transfers(plan)
        for request_id in plan.gone:
            self._rows.remove(request_id)
        for new in plan.new:
            eos = () if new.sampling.ignore_eos else self._eos
            self._rows.add(new, (*new.sampling.stop_token_ids, *eos))
        self._rows.take_blocks(plan.requests)
        sampled: Sequence[tuple[RequestId, Row]] = ()
        counts: Sequence[int] = ()
        greedy = logits = None
        if plan.requests:
            inputs = StepInputs(plan.requests, self._rows)
            last = self._run(inputs, gate)
            sampled, counts = inputs.sampled, inputs.num_outputs()
            if sampled and all_plain_greedy([row.sampling for _, row in sampled], counts):
                greedy = self._device.download(self._model.greedy(last))  # without a copy of all logits in fp32
            elif sampled:
                logits = self._model.logits(last)
        return LaunchedStep(
            plan.step,
            self._rows,
            sampled,
            counts,
            greedy=greedy,
            logits=logits,
            mark=self._device.mark(),
            gate=gate,
            finished=self._take,
        )

    def _begin_transfers(self, plan: StepPlan) -> Gate | None:
        """Start the plan's copies, and poison freed blocks: after evicted ones were read, before any is loaded."""

        def poison() -> None:
            self._pool.poison_blocks(plan.freed_full, plan.freed_swa)

        if not plan.transfers:
            poison()
            return None
        if self._transfers is None:
            raise InvariantError(f"step {plan.step} has copies, and there is no tier to copy to or from")
        return self._transfers.begin(plan.transfers, poison)

    def _run(self, inputs: StepInputs, gate: Gate | None) -> Tensor:
        """The forward pass; hidden states of the tokens that a next one is chosen after."""
        batch = inputs.batch(self._pool, self._staging, window=self._window)
        if gate is not None and gate.is_loading:
            batch = replace(batch, gate=gate)
        return self._forward(batch)

    def _take(self) -> None:
        self._pending = False

    def audit(self, running: Mapping[RequestId, Request], gone: Collection[RequestId]) -> list[str]:
        """All discrepancies between the rows and the core's running requests."""
        faults = [] if self._transfers is None else self._transfers.audit()
        return faults + self._rows.audit(running, gone, self._pool.block_size)
