"""The clock of a worker's start."""

import logging

import pytest

from worker.phases import StartPhases


def test_phases_are_summed_and_told_in_order(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.0, 1.5, 2.0, 2.25, 3.0, 4.0, 4.5])
    monkeypatch.setattr("worker.phases.time.monotonic", lambda: next(times))
    caplog.set_level(logging.INFO)
    phases = StartPhases()
    for name in ("weights", "warm-up", "weights"):
        with phases.phase(name):
            pass
    assert phases.seconds == {"weights": 2.5, "warm-up": 0.25}
    assert phases.describe() == "weights 2.50, warm-up 0.25"
    assert phases.elapsed == 4.5 >= sum(phases.seconds.values())
    assert "start-up: warm-up took 0.25 s" in caplog.messages


def test_a_phase_that_fails_is_not_counted() -> None:
    phases = StartPhases()
    with pytest.raises(ValueError, match="broken"), phases.phase("weights"):
        raise ValueError("broken")
    assert phases.seconds == {}
