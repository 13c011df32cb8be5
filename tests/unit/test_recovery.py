"""What becomes of lost choices, and how workers are judged: state without sockets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import inference_pb2, sampling_pb2, worker_pb2
from router.circuit_breaker import FIRST_PAUSE_S, LAST_PAUSE_S, MAX_LOSSES, PROBE_BATCHES, CircuitBreaker
from router.errors import RequestQuarantined, Unavailable
from router.heartbeat import WARM_UP_S, WARM_UP_STEPS, Health, Heartbeat
from router.recovery import MAX_CRASHES, QUARANTINE_S, UNSEEN_TOKENS, Attempts, Loss, Recovery
from router.request import Choice, Request
from router.validation import check_generate


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


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


def recovery() -> tuple[Recovery, list[Choice], Clock]:
    waiting: list[Choice] = []
    clock = Clock()
    return Recovery(3, waiting.append, clock), waiting, clock


def advance(choice: Choice, count: int) -> None:
    choice.take(len(choice.token_ids), [65] * count)


def test_a_second_crash_at_one_place_quarantines_the_prompt_for_a_while():
    taker, waiting, clock = recovery()
    choice = choice_of()
    advance(choice, 20)
    taker.lost(choice, Loss.CRASHED, "a")
    assert waiting == [choice]
    advance(choice, UNSEEN_TOKENS)
    taker.lost(choice, Loss.CRASHED, "b")
    assert waiting == [choice]
    assert isinstance(choice.request.failure, RequestQuarantined)
    with pytest.raises(RequestQuarantined):
        taker.check(choice_of().request)
    taker.check(choice_of(prompt=(1, 2, 3)).request)
    clock.now += QUARANTINE_S
    taker.check(choice_of().request)


@given(st.lists(st.sampled_from([Loss.CRASHED, Loss.FAILED]), max_size=30))
def test_progress_renews_the_budget(losses):
    taker, waiting, _ = recovery()
    choice = choice_of(max_tokens=1000)
    for loss in losses:
        advance(choice, UNSEEN_TOKENS + 1)
        taker.lost(choice, loss, "a")
    assert waiting == [choice] * len(losses)


@given(st.lists(st.tuples(st.sampled_from(list(Loss)), st.integers(0, 3 * UNSEEN_TOKENS)), max_size=30))
def test_attempts_are_bounded_without_progress(history):
    attempts, output, best, count, crashes = Attempts(), 0, None, 0, 0
    for loss, tokens in history:
        output += tokens
        attempts.add(loss, output)
        if best is None or output > best + UNSEEN_TOKENS or not count:
            best, count, crashes = output, 0, 0
        count += loss is not Loss.LEFT
        crashes += loss is Loss.CRASHED
        assert (attempts.lost, attempts.crashed) == (count, crashes)


def test_hangs_are_bounded_and_shutdowns_are_not_counted():
    taker, waiting, _ = recovery()
    choice = choice_of()
    for _ in range(10):
        taker.lost(choice, Loss.LEFT, "a")
    taker.lost(choice, Loss.FAILED, "a")
    taker.lost(choice, Loss.FAILED, "b")
    assert len(waiting) == 12
    taker.lost(choice, Loss.FAILED, "c")
    assert len(waiting) == 12
    assert isinstance(choice.request.failure, Unavailable)


def test_a_choice_that_was_complete_is_not_begun_again():
    taker, waiting, _ = recovery()
    full, stopped = choice_of(max_tokens=3), choice_of(stop_token_ids=[66])
    advance(full, 3)
    stopped.take(0, [65, 66])
    for choice in (full, stopped):
        taker.lost(choice, Loss.CRASHED, "a")
    assert waiting == []
    assert [choice.take_unsent()[-1].finished.reason for choice in (full, stopped)] == [
        sampling_pb2.FINISH_REASON_LENGTH, sampling_pb2.FINISH_REASON_STOP,
    ]  # fmt: skip


def test_what_nobody_waits_for_is_not_put_back():
    taker, waiting, _ = recovery()
    choice = choice_of()
    choice.request.fail(Unavailable("gone"))
    taker.lost(choice, Loss.CRASHED, "a")
    assert waiting == []


def test_quarantine_is_bounded():
    taker, _, _ = recovery()
    for number in range(1000):
        choice = choice_of(prompt=(number,))
        for _ in range(MAX_CRASHES):
            taker.lost(choice, Loss.CRASHED, "a")
    taker.check(choice_of(prompt=(0,)).request)
    with pytest.raises(RequestQuarantined):
        taker.check(choice_of(prompt=(999,)).request)


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
