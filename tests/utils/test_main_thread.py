import threading
import time

import pytest

from lockstep.utils import main_thread
from lockstep.utils.main_thread import taking_calls


class Stop(Exception):
    pass


def stop() -> None:
    raise Stop


def test_call_interrupts_a_lock_and_reaches_the_main_thread_only_while_it_takes_calls() -> None:
    main_thread.call(stop)  # dropped
    lock = threading.Lock()
    lock.acquire()
    with taking_calls(), taking_calls():
        threading.Timer(0.05, main_thread.call, (stop,)).start()
        with pytest.raises(Stop):
            lock.acquire(timeout=10)
    main_thread.call(stop)
    time.sleep(0.01)


def test_other_threads_take_no_calls() -> None:
    entered = []

    def enter() -> None:
        with taking_calls():
            entered.append(True)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered
