"""Judges from a worker's Pongs whether it lives: whether it answers, and whether its steps end.

Silence is counted in ticks of the router's own clock: when the router itself was stopped, its workers are not to blame.
"""

from dataclasses import dataclass
from enum import Enum, auto

from protos import worker_pb2

# Seconds. Nothing shorter is taken for a sign of trouble.
SUSPECT_AFTER_S = 1.0
# A step is suspect when it takes so many times as long as steps do, and longer than the longest of late did.
TYPICAL_STEPS = 10
LONGEST_STEPS = 2
# A step that was suspect for so many times that long will not end.
LOST_STEPS = 10
# A worker's first steps may compile kernels or touch memory for the first time.
WARM_UP_STEPS = 32
WARM_UP_S = 120.0


class Health(Enum):
    """What to do with a worker."""

    # Give it work.
    ALIVE = auto()
    # Give it nothing new.
    SUSPECT = auto()
    # Go on without it.
    LOST = auto()


@dataclass(slots=True)
class Heartbeat:
    """One worker, as long as one stream lasts.

    Attributes:
        timeout: seconds of silence after which it is lost.
        silence: seconds since its last Pong.
        step_age: seconds that its step had taken by then.
        step_limit: seconds after which that step is suspect.
        warm: whether its first steps are over.
    """

    timeout: float
    silence: float = 0.0
    step_age: float = 0.0
    step_limit: float = WARM_UP_S
    warm: bool = False

    def tick(self, seconds: float) -> None:
        """So much time has passed."""
        self.silence += seconds

    def pong(self, pong: worker_pb2.Pong) -> None:
        """A sign of life."""
        self.silence = 0.0
        self.step_age = pong.step_age_ms / 1000
        self.warm = pong.step >= WARM_UP_STEPS
        typical, longest = pong.step_time_us / 1e6, pong.longest_step_us / 1e6
        limit = max(SUSPECT_AFTER_S, TYPICAL_STEPS * typical, LONGEST_STEPS * longest)
        self.step_limit = limit if self.warm else max(limit, WARM_UP_S)

    @property
    def health(self) -> Health:
        """What its silence and its step say."""
        lost_after = max(self.timeout, self.step_limit * (LOST_STEPS if self.warm else 1))
        if self.silence >= self.timeout or self.step_age >= lost_after:
            return Health.LOST
        if self.silence >= min(SUSPECT_AFTER_S, self.timeout / 2) or self.step_age >= self.step_limit:
            return Health.SUSPECT
        return Health.ALIVE

    def __str__(self) -> str:
        if self.silence >= self.timeout or self.step_age < self.step_limit:
            return f"it did not answer for {self.silence:g} s"
        return f"its step has taken {self.step_age:.1f} s; {self.step_limit:.1f} s would be long"
