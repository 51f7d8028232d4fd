"""Signals: the first is remembered, a second one ends the process, whatever it interrupts."""

import os
import signal
from collections.abc import Callable

import pytest

from deepstack.cli.signals import stop_on_signal


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def lost(number: int) -> None:
    """As in a library that goes on after any error of what it called."""
    with pytest.raises(SystemExit):
        send(number)


def turned(number: int) -> None:
    """As in a library that has one error for all of what it called."""
    try:
        send(number)
    except SystemExit:
        raise ValueError("could not determine the shape") from None


def test_one_signal_is_remembered_and_the_same_until_the_process_ends() -> None:
    with stop_on_signal() as stop:
        assert stop() is None
        send(signal.SIGTERM)
        send(signal.SIGTERM)  # so soon it is the same request
        assert stop() == signal.SIGTERM
    send(signal.SIGTERM)  # while it says how to go on: the same request still
    assert stop() == signal.SIGTERM  # by nobody who would act on it
    with pytest.raises(SystemExit, match="130"):
        send(signal.SIGINT)


@pytest.mark.parametrize("second", [send, lost, turned])
def test_a_second_ctrl_c_ends_the_process_whatever_it_interrupts(
    second: Callable[[int], None],
) -> None:
    with pytest.raises(SystemExit) as ended, stop_on_signal() as stop:
        send(signal.SIGINT)
        second(signal.SIGINT)
        stop()
        raise AssertionError("it went on")
    assert ended.value.code == 130


def test_an_error_that_no_signal_made_stays_what_it_is() -> None:
    with pytest.raises(ValueError, match="mine"), stop_on_signal():
        send(signal.SIGINT)
        raise ValueError("mine")


def test_a_hangup_asks_for_an_end_unless_it_was_ignored_at_the_start() -> None:
    with stop_on_signal() as stop:
        send(signal.SIGHUP)
        assert stop() == signal.SIGHUP
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stop_on_signal() as stop:
        send(signal.SIGHUP)
        assert stop() is None
