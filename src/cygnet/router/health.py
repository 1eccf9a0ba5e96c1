"""Whether a worker may get requests: active probes, and a circuit breaker fed by requests."""

from dataclasses import dataclass
from typing import Literal

Circuit = Literal["closed", "open", "half_open"]


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """Thresholds. Times in ns."""

    probe_failures: int = 3
    """Probes in a row that must fail before a worker counts as down."""
    probe_successes: int = 2
    """Probes in a row that must succeed before one that was down counts as up."""
    breaker_failures: int = 5
    """Requests in a row that must fail before the breaker opens."""
    open_ns: int = 5_000_000_000
    """How long it stays open the first time; doubles up to `max_open_ns` while trials fail."""
    max_open_ns: int = 60_000_000_000


class WorkerHealth:
    """Health of one worker. Time is given in; nothing here touches a load.

        starting --probe ok--> up --probe_failures--> down --probe_successes--> up
        closed --breaker_failures--> open --time--> half_open --one success--> closed
                                       ^-------------one failure---'

    A request *fails* when the worker can't be reached, hangs, answers garbage, breaks off, or answers 5xx. A 4xx is
    the caller's mistake and counts as neither: it proves that the worker answers, and closes nothing it should not.

    Invariants (`audit`): in `half_open` at most one request is on trial; runs of failures are shorter than the
    threshold that acts on them.
    """

    def __init__(self, settings: HealthSettings) -> None:
        self._settings = settings
        self.up: bool | None = None
        """Last word of the probes; `None` before the first success."""
        self.circuit: Circuit = "closed"
        self._probe_run = 0  # successes in a row when positive, failures when negative
        self._failures = 0
        self._open_until = 0
        self._open_ns = settings.open_ns
        self._trial: int | None = None  # when the trial request of half_open was sent

    def available(self, now: int) -> bool:
        """Whether a new request may go there. An open breaker whose time is over becomes half open here."""
        if not self.up:
            return False
        if self.circuit == "open" and now >= self._open_until:
            self.circuit, self._trial = "half_open", None
        if self.circuit == "half_open":
            # A trial whose end was never told (its router's exchange was cut off) must not bar the worker for ever.
            return self._trial is None or now - self._trial >= self._settings.max_open_ns
        return self.circuit == "closed"

    def sent(self, now: int) -> None:
        """A request goes there; in half_open it is the trial."""
        if self.circuit == "half_open":
            self._trial = now

    def succeeded(self) -> None:
        """A request was answered (2xx or 3xx)."""
        self._failures = 0
        if self.circuit != "closed":
            self.circuit, self._trial, self._open_ns = "closed", None, self._settings.open_ns

    def refused(self) -> None:
        """A request ended without a verdict on the worker: 4xx, or its caller left."""
        if self.circuit == "half_open":
            self._trial = None

    def failed(self, now: int) -> bool:
        """A request failed. Returns whether this opened the breaker."""
        self._failures += 1
        if self.circuit == "half_open":
            self._open_ns = min(self._open_ns * 2, self._settings.max_open_ns)
        elif self.circuit == "open" or self._failures < self._settings.breaker_failures:
            return False
        self.circuit, self._trial, self._failures = "open", None, 0
        self._open_until = now + self._open_ns
        return True

    def probed(self, ok: bool) -> bool:
        """A probe came back. Returns whether `up` changed."""
        before = self.up
        if ok:
            self._probe_run = max(self._probe_run, 0) + 1
            if self.up is None or self._probe_run >= self._settings.probe_successes:
                self.up = True
        else:
            self._probe_run = min(self._probe_run, 0) - 1
            if self.up and -self._probe_run >= self._settings.probe_failures:
                self.up = False
        return self.up is not before

    def audit(self) -> list[str]:
        """Discrepancies."""
        found = []
        if self._trial is not None and self.circuit != "half_open":
            found.append(f"a request is on trial while the circuit is {self.circuit}")
        if self.circuit == "closed" and self._failures >= self._settings.breaker_failures:
            found.append(f"{self._failures} failures in a row have not opened the breaker")
        if self.up and -self._probe_run >= self._settings.probe_failures:
            found.append(f"{-self._probe_run} failed probes have not marked the worker down")
        return found
