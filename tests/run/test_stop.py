import os
import signal
import threading

import pytest

from accumulus.run.stop import StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_asks_second_one_stops(number):
    before, told = signal.getsignal(number), []
    with StopRequest(told.append) as stop:
        os.kill(os.getpid(), number)
        assert stop.signal == number
        assert told == [signal.Signals(number).name]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_another_thread_cannot_be_stopped_and_does_not_fail():
    seen = []

    def work():
        with StopRequest() as stop:
            seen.append(stop.signal)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None]
