"""When a failing server is left alone. Pure."""

from dataclasses import dataclass

FIRST_PAUSE_NS = 500_000_000
LONGEST_PAUSE_NS = 10_000_000_000


@dataclass
class Breaker:
    """Closed: calls pass. Open: they don't, until a pause is over; then one call is let through as a probe.

    Invariants: `failures` counts failures in a row; it is 0 exactly when closed; the pause doubles with each failed
    probe, up to `LONGEST_PAUSE_NS`; at most one probe is under way.
    """

    threshold: int = 1
    """Failures in a row that open it. A deadline missed is one: the next call shall not wait for its own."""
    failures: int = 0
    open_until_ns: int = 0
    probing: bool = False

    @property
    def is_open(self) -> bool:
        """Whether the server counts as failing."""
        return self.failures >= self.threshold

    def allows(self, now_ns: int) -> bool:
        """Whether a call may be tried now. A `True` while open begins the probe: its outcome must be reported."""
        if not self.is_open:
            return True
        if self.probing or now_ns < self.open_until_ns:
            return False
        self.probing = True
        return True

    def succeeded(self) -> None:
        """A call was answered."""
        self.failures, self.open_until_ns, self.probing = 0, 0, False

    def failed(self, now_ns: int) -> None:
        """A call was not answered in time, or the connection broke."""
        late = self.is_open and not self.probing
        self.probing = False
        if late:
            return  # it began before the breaker opened: no news
        self.failures += 1
        if self.is_open:
            pause = min(FIRST_PAUSE_NS << min(self.failures - self.threshold, 16), LONGEST_PAUSE_NS)
            self.open_until_ns = now_ns + pause
