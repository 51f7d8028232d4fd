"""Signals: the first is remembered, a second one ends the process, whatever it interrupts."""

from collections.abc import Callable
from signal import SIG_IGN, SIGHUP, SIGINT, SIGTERM, raise_signal, signal

import pytest

from deepstack.cli.signals import stop_on_signal


def lost(number: int) -> None:
    """Go on after any error, as some libraries do."""
    with pytest.raises(SystemExit):
        raise_signal(number)


def turned(number: int) -> None:
    """Raise one error in place of any other, as some libraries do."""
    try:
        raise_signal(number)
    except SystemExit:
        raise ValueError("could not determine the shape") from None


def test_one_signal_is_remembered_and_the_same_until_the_process_ends() -> None:
    with stop_on_signal() as stop:
        assert stop() is None
        raise_signal(SIGTERM)
        raise_signal(SIGTERM)  # so soon it is the same request
        assert stop() == SIGTERM
    raise_signal(SIGTERM)  # while it says how to go on: the same request still
    assert stop() == SIGTERM  # by nobody who would act on it
    with pytest.raises(SystemExit, match="130"):
        raise_signal(SIGINT)


@pytest.mark.parametrize("second", [raise_signal, lost, turned])
def test_a_second_ctrl_c_ends_the_process_whatever_it_interrupts(
    second: Callable[[int], None],
) -> None:
    with pytest.raises(SystemExit) as ended, stop_on_signal() as stop:
        raise_signal(SIGINT)
        second(SIGINT)
        stop()
        raise AssertionError("it went on")
    assert ended.value.code == 130


def test_an_error_that_no_signal_made_stays_what_it_is() -> None:
    with pytest.raises(ValueError, match="mine"), stop_on_signal():
        raise_signal(SIGINT)
        raise ValueError("mine")


def test_a_hangup_asks_for_an_end_unless_it_was_ignored_at_the_start() -> None:
    with stop_on_signal() as stop:
        raise_signal(SIGHUP)
        assert stop() == SIGHUP
    signal(SIGHUP, SIG_IGN)
    with stop_on_signal() as stop:
        raise_signal(SIGHUP)
        assert stop() is None
