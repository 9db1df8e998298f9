"""Thread pool of the kernels: csrc/pool.h."""

import itertools
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from octavo import _native
from octavo.kernels import native
from tests.torch_ops import native_ops

ops = native_ops()


@pytest.fixture(autouse=True)
def default_threads():
    yield
    native.set_num_threads(0)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_work(rows=24, n=320, k=256):
    """Return a product large enough for several threads and to wake them, and its single result."""
    x, packed = random(rows, k), ops.pack_weight(random(n, k, seed=1))
    native.set_num_threads(1)
    expected = ops.linear(x, packed)
    return lambda: torch.equal(ops.linear(x, packed), expected)


def run_python(code):
    """Run code in a separate process with an unused pool; return its output."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 64])
def test_any_number_of_threads_does_the_same(threads):
    correct = make_work()
    native.set_num_threads(threads)
    assert _native.num_threads() == threads
    assert all(correct() for _ in range(20))


def test_more_threads_than_work():
    native.set_num_threads(16)
    weight = random(200_000)
    for rows in (0, 1, 2, 3):
        x = random(rows, 200_000)
        out = ops.rms_norm(x, weight, 1e-5)
        reference = x * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-5) * weight
        torch.testing.assert_close(out, reference.float(), rtol=1e-4, atol=1e-5)


def test_calls_from_several_threads_at_once():
    correct = make_work()
    native.set_num_threads(3)
    barrier = threading.Barrier(6)

    def call():
        barrier.wait(60)
        return all(correct() for _ in range(30))

    with ThreadPoolExecutor(6) as callers:
        assert all(future.result(100) for future in [callers.submit(call) for _ in range(6)])


def test_the_number_of_threads_changes_while_calls_run():
    correct = make_work()
    stop = threading.Event()

    def call():
        count = 0
        while not stop.is_set() or count == 0:
            assert correct()
            count += 1
        return count

    with ThreadPoolExecutor(3) as callers:
        futures = [callers.submit(call) for _ in range(3)]
        try:
            for threads in itertools.islice(itertools.cycle([1, 4, 2, 7]), 40):
                native.set_num_threads(threads)
                assert _native.num_threads() == threads
        finally:
            stop.set()
        assert all(future.result(100) > 0 for future in futures)


def test_threads_that_sleep_are_woken():
    # The pauses are longer than waiting threads spin.
    correct = make_work()
    native.set_num_threads(4)
    pause = threading.Event()
    for _ in range(30):
        assert correct()
        pause.wait(0.002)


def test_a_refused_call_leaves_the_pool_as_it_was():
    correct = make_work()
    native.set_num_threads(2)
    with pytest.raises(TypeError):
        _native.kernels.linear(x="x")
    with pytest.raises(ValueError, match="dtype"):
        _native.kernels.gated(
            x=0, x_stride=0, out=0, out_stride=0, rows=0, dim=0, kind=0, limit=0, dtype=9
        )
    assert correct()


def test_idle_threads_use_no_processor():
    code = """
import time
from octavo import _native
from octavo.kernels.native import NativeOps
from octavo.system.tensor import full
_native.set_num_threads(8)
ops = NativeOps()
x = full((64, 512), 1, "float32")
ops.linear(x, ops.pack_weight(full((512, 512), 1, "float32")))
time.sleep(0.05)
before = time.process_time()
time.sleep(0.5)
print(time.process_time() - before)
"""
    # Eight threads that wait busily would use half a second of every core.
    assert float(run_python(code)) < 0.1


FORK = """
import array, os, signal, threading
from octavo import _native

_native.set_num_threads(8)
rows, columns = 16, 50_000  # large enough to be shared and to wake sleeping threads
x = array.array("f", range(columns)) * rows
out = array.array("f", [0.0]) * (rows * columns)
address, target = x.buffer_info()[0], out.buffer_info()[0]

def work():
    _native.kernels.softmax(
        x=address, x_stride=columns, out=target, rows=rows, dim=columns, log=True
    )
    return bytes(out)

def resize_on_a_thread():
    results = []
    def run():
        try:
            _native.set_num_threads(3)
            results.append(_native.num_threads())
        except Exception as error:
            results.append(repr(error))
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]

expected = work()
stop = threading.Event()
def call_again_and_again():
    while BUSY and not stop.is_set():
        work()
busy = threading.Thread(target=call_again_and_again)
busy.start()  # if BUSY, its calls hold the pool at most moments
for i in range(10):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # a child that hangs is ended, and the test fails
        good = _native.num_threads() == 8 and work() == expected
        good = good and resize_on_a_thread() == 3 and work() == expected
        os._exit(0 if good else 1)
    assert os.waitpid(pid, 0)[1] == 0, i
    assert work() == expected  # the parent's threads are as they were
assert _native.num_threads() == 8
stop.set()
busy.join()
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_a_forked_process_has_threads_of_its_own(busy):
    assert run_python(f"BUSY = {busy}\n{FORK}") == "done\n"
