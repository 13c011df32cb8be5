"""What becomes of lost choices, and how workers are judged: state without sockets."""

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import inference_pb2, sampling_pb2, worker_pb2
from router.circuit_breaker import FIRST_PAUSE_S, LAST_PAUSE_S, MAX_LOSSES, PROBE_BATCHES, CircuitBreaker
from router.errors import RequestQuarantined, Unavailable
from router.events import RouterEvents
from router.heartbeat import WARM_UP_S, WARM_UP_STEPS, Health, Heartbeat
from router.recovery import MAX_CRASHES, QUARANTINE_S, UNSEEN_TOKENS, Recovery
from router.request import Choice, Request
from router.validation import check_generate
from router.worker_loss import OUTAGE_S, Loss

LEASE = 10.0


class Clock:
    """A clock that a test sets, and what is to be done at which time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, Callable[[], None]]] = []

    def __call__(self) -> float:
        return self.now

    def call_later(self, seconds: float, function: Callable[[], None]) -> None:
        self._timers.append((self.now + seconds, function))

    def advance(self, seconds: float) -> None:
        self.now += seconds
        due = [function for at, function in self._timers if at <= self.now]
        self._timers = [timer for timer in self._timers if timer[0] > self.now]
        for function in due:
            function()


class Letters:
    """A vocabulary whose token n is the letter n."""

    def join(self, token_ids: list[int]) -> bytes:
        return bytes(token_ids)


def choice_of(max_tokens: int = 100, prompt: tuple[int, ...] = (1, 2), **stopping) -> Choice:
    wire = inference_pb2.GenerateRequest(
        stopping=sampling_pb2.StopConditions(**stopping), output=inference_pb2.OutputOptions(token_ids=True)
    )
    request = Request("r", check_generate(wire, frozenset({0}), 256), None)
    request.begin(list(prompt), max_tokens, Letters())
    return request.choices[0]


class Fleet:
    """Workers that a test loses, and what recovery makes of it."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.waiting: list[Choice] = []
        self.events = RouterEvents()
        self.taker = Recovery(
            3,
            self.waiting.append,
            lambda: None,
            self.events,
            lease=LEASE,
            clock=self.clock,
            call_later=self.clock.call_later,
        )
        self.epochs: Counter[str] = Counter()

    def lose(self, kind: Loss, worker: str, *choices: Choice, begun: bool = True) -> None:
        noted = self.taker.worker_lost(worker, hash((worker, self.epochs[worker])), kind)
        for choice in choices:
            self.taker.lost(choice, noted, begun=begun)

    def back(self, worker: str, *, anew: bool) -> None:
        """It comes back when the outage is over: the same process, or a new one."""
        self.clock.advance(OUTAGE_S)
        self.epochs[worker] += anew
        self.taker.worker_returned(worker, hash((worker, self.epochs[worker])))

    def crash(self, worker: str, *choices: Choice, begun: bool = True) -> None:
        self.lose(Loss.BROKEN, worker, *choices, begun=begun)
        self.back(worker, anew=True)


def advance(choice: Choice, count: int) -> None:
    choice.take(len(choice.token_ids), [65] * count)


def test_a_second_crash_at_one_place_quarantines_the_prompt_for_a_while():
    fleet, choice = Fleet(), choice_of()
    advance(choice, 20)
    fleet.crash("a", choice)
    assert fleet.waiting == [choice]
    advance(choice, UNSEEN_TOKENS)
    fleet.crash("b", choice)
    assert fleet.waiting == [choice]
    assert isinstance(choice.request.failure, RequestQuarantined)
    with pytest.raises(RequestQuarantined):
        fleet.taker.check(choice_of().request)
    fleet.taker.check(choice_of(prompt=(1, 2, 3)).request)
    fleet.clock.advance(QUARANTINE_S)
    fleet.taker.check(choice_of().request)


def test_who_killed_one_worker_after_the_other_waits_for_the_verdict():
    fleet, choice = Fleet(), choice_of()
    fleet.lose(Loss.BROKEN, "a", choice)
    fleet.lose(Loss.BROKEN, "b", choice)  # in the same moment, but it ran on both
    assert fleet.waiting == [choice], "held: a third worker is not risked"
    fleet.back("a", anew=True)
    assert (len(fleet.waiting), choice.request.failure) == (1, None)
    fleet.clock.advance(LEASE)
    assert isinstance(choice.request.failure, RequestQuarantined)
    assert len(fleet.waiting) == 1


def test_an_engine_that_says_that_it_failed_need_not_come_back():
    fleet, choice = Fleet(), choice_of()
    for _ in range(MAX_CRASHES):
        fleet.lose(Loss.CRASHED, "a", choice)
    fleet.clock.advance(OUTAGE_S)
    assert isinstance(choice.request.failure, RequestQuarantined)


def test_a_cut_connection_is_no_attempt():
    fleet, choice = Fleet(), choice_of()
    for number in range(20):
        fleet.lose(Loss.BROKEN, "ab"[number % 2], choice)
        fleet.back("ab"[number % 2], anew=False)
    assert (len(fleet.waiting), choice.attempts.lost) == (20, 0)


@pytest.mark.parametrize("anew", [False, True], ids=["cut", "killed"])
def test_workers_that_are_lost_together_are_nobodys_fault(anew):
    """In whatever order the losses are noticed, and whatever was sent to a worker that was gone already."""
    fleet = Fleet()
    mine, other = choice_of(), choice_of()
    for _ in range(2):
        fleet.lose(Loss.BROKEN, "a", mine)
        fleet.lose(Loss.BROKEN, "b", other)
        fleet.lose(Loss.BROKEN, "c", mine, begun=False)
        for worker in "abc":
            fleet.back(worker, anew=anew)
    assert (mine.request.failure, other.request.failure) == (None, None)
    assert fleet.waiting.count(mine) == 4
    assert mine.attempts.lost == (2 if anew else 0)
    assert mine.attempts.suspected == 0
    fleet.taker.check(choice_of().request)


def test_a_crash_counts_only_where_the_worker_had_begun():
    fleet, choice = Fleet(), choice_of()
    fleet.crash("a", choice, begun=False)
    fleet.crash("b", choice)
    fleet.crash("c", choice, begun=False)
    assert isinstance(choice.request.failure, Unavailable), "attempts are bounded all the same"
    assert choice.attempts.crashed == 1


def test_who_loses_worker_after_worker_in_a_moment_is_held_till_it_is_over():
    fleet, choice = Fleet(), choice_of()
    for worker in ("a", "b"):
        fleet.lose(Loss.BROKEN, worker, choice, begun=False)
    assert len(fleet.waiting) == 1
    fleet.clock.advance(OUTAGE_S)
    assert len(fleet.waiting) == 2


def test_nothing_is_held_of_a_call_that_is_over():
    fleet, choice = Fleet(), choice_of()
    for worker in ("a", "b"):
        fleet.lose(Loss.BROKEN, worker, choice)
    fleet.taker.discard(choice.request)
    for worker in ("a", "b"):
        fleet.back(worker, anew=False)
    assert len(fleet.waiting) == 1


def test_who_is_held_goes_on_in_its_turn():
    fleet = Fleet()
    first, second = choice_of(), choice_of()
    for worker in ("a", "b"):
        noted = fleet.taker.worker_lost(worker, 1, Loss.BROKEN)
        for choice in (second, first):  # as a link does it: the first in turn is put back last
            fleet.taker.lost(choice, noted, begun=True)
    fleet.taker.worker_returned("a", 1)
    assert fleet.waiting[2:] == [second, first]


@given(st.lists(st.sampled_from([Loss.BROKEN, Loss.CRASHED, Loss.FAILED]), max_size=30))
def test_progress_renews_the_budget(losses):
    fleet, choice = Fleet(), choice_of(max_tokens=1000)
    for loss in losses:
        advance(choice, UNSEEN_TOKENS + 1)
        fleet.lose(loss, "a", choice)
        fleet.back("a", anew=True)
    assert fleet.waiting == [choice] * len(losses)


@given(st.lists(st.tuples(st.sampled_from([Loss.BROKEN, Loss.FAILED]), st.integers(0, 3 * UNSEEN_TOKENS)), max_size=30))
def test_attempts_are_bounded_without_progress(history):
    fleet, choice = Fleet(), choice_of(max_tokens=1000)
    output, best, count, crashes = 0, None, 0, 0
    for loss, tokens in history:
        output += tokens
        noted = fleet.taker.worker_lost("a", fleet.epochs["a"], loss)
        choice.attempts.add(noted, begun=True, num_output=output)
        fleet.back("a", anew=True)
        if best is None or output > best + UNSEEN_TOKENS:
            best, count, crashes = output, 0, 0
        count += 1
        crashes += loss is Loss.BROKEN
        assert (choice.attempts.lost, choice.attempts.crashed) == (count, crashes)


def test_hangs_are_bounded_and_shutdowns_are_not_counted():
    fleet, choice = Fleet(), choice_of()
    for _ in range(10):
        fleet.lose(Loss.LEFT, "a", choice)
    for worker in ("a", "b"):
        fleet.lose(Loss.FAILED, worker, choice)
        fleet.clock.advance(OUTAGE_S)
    assert len(fleet.waiting) == 12
    fleet.lose(Loss.FAILED, "c", choice)
    assert len(fleet.waiting) == 12
    assert isinstance(choice.request.failure, Unavailable)


def test_a_choice_that_was_complete_is_not_begun_again():
    fleet = Fleet()
    full, stopped = choice_of(max_tokens=3), choice_of(stop_token_ids=[66])
    advance(full, 3)
    stopped.take(0, [65, 66])
    fleet.crash("a", full, stopped)
    assert fleet.waiting == []
    assert [choice.take_unsent()[-1].finished.reason for choice in (full, stopped)] == [
        sampling_pb2.FINISH_REASON_LENGTH, sampling_pb2.FINISH_REASON_STOP,
    ]  # fmt: skip


def test_what_nobody_waits_for_is_not_put_back():
    fleet, choice = Fleet(), choice_of()
    choice.request.fail(Unavailable("gone"))
    fleet.crash("a", choice)
    assert fleet.waiting == []


def test_quarantine_is_bounded():
    fleet = Fleet()
    for number in range(300):
        choice = choice_of(prompt=(number,))
        for _ in range(MAX_CRASHES):
            fleet.lose(Loss.CRASHED, "a", choice)
    fleet.clock.advance(OUTAGE_S)
    fleet.taker.check(choice_of(prompt=(0,)).request)
    with pytest.raises(RequestQuarantined):
        fleet.taker.check(choice_of(prompt=(299,)).request)


# ---- heartbeat ----


def pong(**fields) -> worker_pb2.Pong:
    return worker_pb2.Pong(**{"step": WARM_UP_STEPS, **fields})


def test_silence_makes_suspect_then_lost():
    heart = Heartbeat(timeout=5.0)
    heart.pong(pong())
    states = []
    for _ in range(20):
        states.append(heart.health)
        heart.tick(0.25)
    assert states == [Health.ALIVE] * 4 + [Health.SUSPECT] * 16
    assert heart.health is Health.LOST
    assert "5 s" in str(heart)
    heart.pong(pong())
    assert heart.health is Health.ALIVE


@pytest.mark.parametrize(
    ("age_s", "typical_s", "longest_s", "expected"),
    [
        (0.9, 0.01, 0.02, Health.ALIVE),  # nothing below a second
        (1.1, 0.01, 0.02, Health.SUSPECT),
        (1.1, 0.2, 0.3, Health.ALIVE),  # less than ten usual steps
        (2.1, 0.2, 0.3, Health.SUSPECT),
        (5.0, 0.2, 3.0, Health.ALIVE),  # long prompts have taken three seconds before
        (6.1, 0.2, 3.0, Health.SUSPECT),
        (9.9, 0.01, 0.02, Health.SUSPECT),
        (10.1, 0.01, 0.02, Health.LOST),
    ],
)
def test_a_step_is_judged_by_those_before_it(age_s, typical_s, longest_s, expected):
    heart = Heartbeat(timeout=5.0)
    fields = {"step_time_us": int(typical_s * 1e6), "longest_step_us": int(longest_s * 1e6)}
    heart.pong(pong(step_age_ms=int(age_s * 1000), **fields))
    assert heart.health is expected
    if expected is Health.LOST:
        assert "step" in str(heart)


def test_first_steps_may_compile():
    heart = Heartbeat(timeout=5.0)
    heart.pong(pong(step=WARM_UP_STEPS - 1, step_age_ms=int(WARM_UP_S * 1000) - 1000))
    assert heart.health is Health.ALIVE
    heart.pong(pong(step=WARM_UP_STEPS - 1, step_age_ms=int(WARM_UP_S * 1000)))
    assert heart.health is Health.LOST


# ---- circuit breaker ----


def test_losses_in_a_row_open_the_breaker_and_one_probe_closes_it():
    clock = Clock()
    breaker = CircuitBreaker(clock)
    for _ in range(MAX_LOSSES - 1):
        assert not breaker.lost()
    assert breaker.admits(5)
    assert breaker.lost()
    assert not breaker.admits(0)
    clock.now += FIRST_PAUSE_S
    assert breaker.admits(0)
    assert not breaker.admits(1), "one at a time"
    breaker.succeeded()
    assert breaker.admits(1)
    assert not breaker.lost(), "it is forgotten"


def test_a_lost_probe_doubles_the_pause():
    clock = Clock()
    breaker = CircuitBreaker(clock)
    for _ in range(MAX_LOSSES):
        breaker.lost()
    pauses = []
    for _ in range(6):
        pauses.append(breaker.pause)
        clock.now += breaker.pause
        assert breaker.lost()
    assert pauses == [FIRST_PAUSE_S * 2**n for n in range(4)] + [LAST_PAUSE_S] * 2


def test_a_long_probe_need_not_end():
    clock = Clock()
    breaker = CircuitBreaker(clock)
    for _ in range(MAX_LOSSES):
        breaker.lost()
    clock.now += FIRST_PAUSE_S
    for _ in range(PROBE_BATCHES):
        assert not breaker.admits(1)
        breaker.progressed()
    assert breaker.admits(1)
