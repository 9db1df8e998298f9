"""The engine core in a separate process, connected by ZMQ.

The process has three threads. One receives requests, one sends outputs, and the busy loop schedules
and computes, so that neither decoding nor sending a message delays a step. The process reads its
setup from standard input and keeps reading there. It ends at the end of file, which also occurs
when the parent dies.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # until the model is loaded: collections would search many objects that stay

import logging
import os
import queue
import select
import shutil
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import zmq

from octavo.checkpoints.registry import open_checkpoint
from octavo.config import EngineConfig
from octavo.engine.assemble import kept_media_nbytes, make_engine_core
from octavo.engine.core import EngineCore
from octavo.engine.core_messages import (
    ABORT,
    ADD,
    DEAD,
    ITEMS,
    OUTPUTS,
    READY,
    RESULT,
    UTILITY,
    CoreDead,
    CoreProcessSetup,
    CoreReady,
)
from octavo.engine.head import ENGINE_IN, ENGINE_OUT, HELLO, connect
from octavo.engine.kept_items import RESET_ITEMS, KeptItems, RequestWithItems
from octavo.engine.record import StepRecorder
from octavo.engine.step_reporter import StepReporter
from octavo.errors import EngineDeadError, EngineStoppedError, OctavoError
from octavo.executor.base import Wave
from octavo.executor.registry import get_executor_class
from octavo.kv_cache.block_map import make_block_map
from octavo.messages import EngineCoreRequest, UtilityCall, UtilityResult
from octavo.models.registry import read_spec
from octavo.observability.profiler import span
from octavo.observability.recording import Recorder
from octavo.system import clock
from octavo.system.device import SWITCH_INTERVAL, signal_at_parents_end
from octavo.system.logs import setup_logging

logger = logging.getLogger(__name__)

# Seconds for the core to end in order after the parent has died.
_GRACE_SECONDS = 2.0


def main() -> None:
    """Run an engine core until the parent stops it or dies."""
    # The parent decides when to stop; a Ctrl-C in the terminal reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.argv[1:]:
        # The process cannot read standard input while it imports. It may be killed at any time.
        signal_at_parents_end(signal.SIGKILL)
        if not _has_parent():  # the parent ended before the signal was set up
            os._exit(1)
        _warm_up(int(sys.argv[1]))
    if not (head := sys.stdin.buffer.read(4)):
        os._exit(0)  # the spare process is not needed
    signal_at_parents_end(signal.SIGCONT)
    size = int.from_bytes(head, "little")
    setup = msgspec.msgpack.decode(sys.stdin.buffer.read(size), type=CoreProcessSetup)
    clock.set_epoch(setup.clock_epoch)
    inputs: queue.SimpleQueue[object] = queue.SimpleQueue()
    folder = None
    if setup.reached_by is None:
        folder = Path(setup.input_address.removeprefix("ipc://")).parent
    loaded = threading.Event()
    threading.Thread(target=_end_with_parent, args=(inputs, folder, loaded), daemon=True).start()
    threading.Thread(target=_receive_inputs, args=(setup, inputs), daemon=True).start()
    parallel = setup.config.parallel
    number = parallel.first_engine + setup.engine_index
    fields = {"engine": number} if parallel.numbered else {}
    setup_logging(setup.log_level, setup.log_format, **fields)
    sys.setswitchinterval(SWITCH_INTERVAL)

    output_queue: queue.SimpleQueue[tuple[bytes, msgspec.Struct] | None] = queue.SimpleQueue()
    sender = threading.Thread(
        target=_send_outputs,
        args=(setup, output_queue),
        name="octavo-outputs",
        daemon=True,
    )
    sender.start()
    status = 0
    try:
        path = Path(setup.model_path)
        checkpoint = open_checkpoint(
            path, setup.config.load.load_format, mmproj=setup.config.load.mmproj
        )
        spec = read_spec(checkpoint, setup.config.model)
        recorder = None if setup.record is None else Recorder(Path(setup.record))
        step_recorder = None if recorder is None else StepRecorder(recorder.put)
        core, plan = make_engine_core(
            setup.config,
            spec,
            path,
            default_batched_tokens=setup.default_batched_tokens,
            request_memory=setup.request_memory,
            warm_spare=setup.warm_spare,
            engine_index=setup.engine_index,
            memory_limit=setup.memory_limit,
            expert_memory=setup.expert_memory,
            machine=setup.machine,
            listeners=[
                *([] if step_recorder is None else [step_recorder]),
                *([StepReporter()] if setup.reports_steps else []),
            ],
            wake=lambda: inputs.put([]),  # an empty abort
        )
        if setup.reports_steps:
            core.scheduler.kv_cache_manager.log_given_up(clock.now)
        if step_recorder is not None:
            manager = core.scheduler.kv_cache_manager
            step_recorder.make_map = partial(make_block_map, manager)
        core.executor.register_failure_callback(inputs.put)  # wakes an idle loop
        # All current objects stay: exempt them from garbage collections, which saves 90 ms each.
        gc.freeze()
        gc.enable()
        loaded.set()
        nbytes = kept_media_nbytes(setup.config, spec)
        ready = CoreReady(plan, core.executor.pids, nbytes)
        output_queue.put((READY, ready))
        _BusyLoop(core, inputs, output_queue, core.executor.wave).run()
        core.shutdown()
        if recorder is not None:
            recorder.close()
    except OctavoError as error:
        status = 1
        stopped = isinstance(error, EngineStoppedError)
        output_queue.put((DEAD, CoreDead(str(error), stopped)))
    except BaseException as error:
        status = 1
        logger.exception("the engine core failed")
        output_queue.put((DEAD, CoreDead(f"{type(error).__name__}: {error}")))
    output_queue.put(None)
    sender.join(timeout=5)
    # Threads that wait on sockets or standard input must not keep a finished process alive.
    os._exit(status)


def _has_parent() -> bool:
    """Return True if the parent still holds its end of standard input."""
    poll = select.poll()
    poll.register(sys.stdin, select.POLLHUP)
    return not any(event & select.POLLHUP for _, event in poll.poll(0))


def _warm_up(num_workers: int) -> None:
    """Import the slow modules, in this process or in worker processes."""
    if num_workers:
        from octavo.executor.multiproc import make_spares

        make_spares(num_workers)
    else:
        get_executor_class(EngineConfig())


class _BusyLoop:
    """Main loop of the process: handles messages and runs steps."""

    def __init__(
        self,
        core: EngineCore,
        inputs: queue.SimpleQueue[object],
        outputs: queue.SimpleQueue[tuple[bytes, msgspec.Struct] | None],
        wave: Wave | None = None,
    ) -> None:
        self._core = core
        self._wave = wave
        self._inputs = inputs
        self._outputs = outputs
        self._running = True

    def run(self) -> None:
        """Run until the inputs end."""
        core, checked = self._core, True
        while self._running:
            if core.has_work():
                while not self._inputs.empty():
                    self._handle(self._inputs.get())
                # A step for the requests of other engines changes nothing that is checked.
                checked = checked and self._wave is not None and not core.scheduler.has_requests()
                self._outputs.put((OUTPUTS, core.step()))
                continue
            if not checked:
                core.check_integrity()  # the core is idle: the check delays no step
                checked = True
            if self._wave is not None:
                self._wave.sleep()
            self._handle(self._next_input())

    def _next_input(self) -> object:
        """Wait for an input, or until the next deadline of a request."""
        try:
            seconds = self._core.seconds_to_deadline()
            # A deadline may be further away than a thread can wait.
            return self._inputs.get(timeout=None if seconds is None else min(seconds, 3600.0))
        except queue.Empty:
            return []  # an empty abort: the core now has to end a request

    def _handle(self, message: object) -> None:
        if isinstance(message, EngineCoreRequest):
            self._core.add_request(message)
        elif isinstance(message, list):
            self._core.abort_requests(message)
        elif isinstance(message, UtilityCall):
            self._outputs.put((RESULT, self._call(message)))
        elif isinstance(message, Exception):
            raise message
        else:
            self._running = False

    def _call(self, call: UtilityCall) -> UtilityResult:
        try:
            return UtilityResult(call.call_id, self._core.call_utility(call.method, *call.args))
        except OctavoError as error:
            return UtilityResult(call.call_id, error=str(error), error_kind=type(error).__name__)
        except Exception as error:
            return UtilityResult(call.call_id, error=f"{type(error).__name__}: {error}")


def _receive_inputs(setup: CoreProcessSetup, inputs: queue.SimpleQueue[object]) -> None:
    """Decode messages in the input thread while the core computes."""
    decoders: dict[bytes, msgspec.msgpack.Decoder[Any]] = {
        ADD: msgspec.msgpack.Decoder(EngineCoreRequest),
        ITEMS: msgspec.msgpack.Decoder(RequestWithItems),
        ABORT: msgspec.msgpack.Decoder(list[str]),
        UTILITY: msgspec.msgpack.Decoder(UtilityCall),
    }
    count, kept = 0, KeptItems()
    try:
        if setup.reached_by is not None:
            name = ENGINE_IN + setup.reached_by.launch_id
            socket = connect(zmq.Context(), setup.reached_by, name)
            socket.send(HELLO)
        else:
            # The receiving end binds, so the parent can send before this process runs.
            socket = zmq.Context().socket(zmq.PULL)
            socket.bind(setup.input_address)
        while True:
            kind, *number, payload = socket.recv_multipart()
            count += 1
            if number and int.from_bytes(number[0], "little") != count:
                raise EngineDeadError("requests were lost when the connection to the head broke")
            message = decoders[kind].decode(payload)
            if kind == UTILITY and message.method == RESET_ITEMS:
                kept.clear()
            inputs.put(kept.complete(message) if kind == ITEMS else message)
    except Exception as error:
        inputs.put(error)  # the busy loop raises it: the core cannot work without inputs


def _send_outputs(
    setup: CoreProcessSetup,
    outputs: queue.SimpleQueue[tuple[bytes, msgspec.Struct] | None],
) -> None:
    """Encode and send messages in the output thread; None ends it after the last message."""
    context = zmq.Context()
    socket: zmq.Socket[bytes]
    if setup.reached_by is not None:
        socket = connect(context, setup.reached_by, ENGINE_OUT + setup.reached_by.launch_id)
    else:
        socket = context.socket(zmq.PUSH)
        socket.connect(setup.output_address)
    encoder = msgspec.msgpack.Encoder()
    count = 0
    while (item := outputs.get()) is not None:
        with span("send_outputs"):
            payload = encoder.encode(item[1])
            if setup.reached_by is None:
                socket.send_multipart([item[0], payload])
            else:
                count += 1
                socket.send_multipart([item[0], count.to_bytes(8, "little"), payload])
    socket.close(linger=2000)
    context.term()


def _end_with_parent(
    inputs: queue.SimpleQueue[object], folder: Path | None, loaded: threading.Event
) -> None:
    """End the process when the parent closes standard input or dies."""
    while sys.stdin.buffer.read(1):
        pass
    if folder is not None:  # the sockets' files, which a dead parent did not remove
        shutil.rmtree(folder, ignore_errors=True)
    if not loaded.is_set():
        os._exit(1)  # no work has begun that must end in order
    inputs.put(None)
    time.sleep(_GRACE_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main()
