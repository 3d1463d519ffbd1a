"""Ctrl-C during a loop: held, handed on once, and never lost."""

import signal
import threading

import pytest

from moe_edge.core.interrupts import check_interrupt, held_interrupts
from tests.support.interrupts import press, press_in_collection, python_handler


@pytest.fixture(autouse=True)
def as_in_plain_python():
    with python_handler():
        yield


def test_interrupt_within_a_collection_waits_for_the_next_check():
    steps = []
    with pytest.raises(KeyboardInterrupt), held_interrupts():
        while True:
            check_interrupt()
            steps.append(1)
            press_in_collection()
    assert steps == [1]


def test_interrupt_after_the_last_check_comes_at_the_end():
    reached = []
    with pytest.raises(KeyboardInterrupt):
        with held_interrupts():
            press()
            reached.append(1)
    check_interrupt()  # once only
    assert reached == [1]


def test_second_interrupt_does_not_wait():
    with pytest.raises(KeyboardInterrupt), held_interrupts():
        press()
        press()
        pytest.fail("the second one waits")
    check_interrupt()


def test_held_within_held_hands_on_at_the_outer_checks():
    reached = []
    with pytest.raises(KeyboardInterrupt), held_interrupts():
        with held_interrupts():
            press()
        reached.append("after the inner one")
        check_interrupt()
        pytest.fail("not handed on")
    assert reached


def test_another_error_does_not_hide_the_interrupt():
    with pytest.raises(KeyboardInterrupt) as caught, held_interrupts():
        press()
        raise ValueError("wrong")
    assert isinstance(caught.value.__context__, ValueError)


def test_handlers_of_others_are_called_and_kept():
    numbers = []

    def note(number, frame) -> None:
        numbers.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        with held_interrupts():
            press()
            assert numbers == []
            check_interrupt()
            check_interrupt()
            assert numbers == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is note
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with held_interrupts():
            press()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        with held_interrupts():
            pass
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_set_meanwhile_stays():
    with held_interrupts():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_handler_that_was_left_behind_acts_as_pythons():
    """As after a second Ctrl-C in the moment in which the first block ends."""
    with held_interrupts():
        left = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, left)
    with pytest.raises(KeyboardInterrupt):
        press()
    with pytest.raises(KeyboardInterrupt), held_interrupts():
        press()
        check_interrupt()
        pytest.fail("not handed on")


def test_other_threads_neither_hold_nor_take_the_interrupt():
    found = []

    @held_interrupts()
    def run() -> None:
        found.append(signal.getsignal(signal.SIGINT))
        check_interrupt()

    def elsewhere() -> None:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    elsewhere()
    assert found == [signal.default_int_handler]
    with pytest.raises(KeyboardInterrupt), held_interrupts():
        press()
        elsewhere()
        check_interrupt()
        pytest.fail("another thread took it")
