"""The table of exit codes, the errors that carry them, and how a command maps an error to its code.

A supervisor (ours, Kubernetes, Slurm) decides by the code alone whether to start the job again. docs/exit_codes.md has
the same table, and a test compares the two.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import functools
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from tfdist.control.terminal import as_line, open_closed_streams, outlive_reader
from tfdist.control.time_limit import for_at_most
from tfdist.control.user_errors import first_line

_SAYING_SECONDS = 5.0
_HELD_SECONDS = 5.0  # until a process that has finished its work says which threads it waits for
_before_end: list[Callable[[str, ExitCode], None]] = []  # what `end_process` calls first
_taken_file = ""  # what FINAL_CODE_VARIABLE named in this process's environment


class ExitCode(enum.IntEnum):
    """The exit codes of tfdist's processes."""

    OK = 0
    INTERNAL = 1
    CONFIG = 2
    CLUSTER = 3
    DATA = 4
    STARTUP = 5
    PEER_LOST = 6
    HANG = 7
    DIVERGED = 8
    CHECKPOINT = 9
    UNSUPPORTED = 10
    CRASH_LOOP = 11
    MEMORY = 12
    UNHEALTHY = 13
    PREEMPTED = 42
    INTERRUPTED = 130


MEANING: dict[ExitCode, str] = {
    ExitCode.OK: "training (or the command) ended as asked",
    ExitCode.INTERNAL: "an unexpected error; the traceback is in the log",
    ExitCode.CONFIG: "a flag, a flag file or their combination is wrong",
    ExitCode.CLUSTER: "TF_CONFIG or the cluster's environment is wrong",
    ExitCode.DATA: "the data source is missing, empty or malformed",
    ExitCode.STARTUP: "a peer, an object store or a data source did not answer in time, or a port is in use",
    ExitCode.PEER_LOST: "another worker died or left during training",
    ExitCode.HANG: "a watchdog found this or another worker stuck",
    ExitCode.DIVERGED: "the loss, a gradient or a weight became NaN or infinite, or the workers' weights differ",
    ExitCode.CHECKPOINT: "a checkpoint cannot be used: none is valid, or it is from another configuration",
    ExitCode.UNSUPPORTED: "this Python, TensorFlow or Keras version is not supported, or a needed package is missing",
    ExitCode.CRASH_LOOP: "the supervisor gave up: the job failed again and again without progress",
    ExitCode.MEMORY: "parameters, gradients and optimizer state, a step or the data do not fit in a worker's memory",
    ExitCode.UNHEALTHY: "tfdist.doctor found problems that must be fixed before a job can run",
    ExitCode.PREEMPTED: "stopped by a signal after saving: start again to resume",
    ExitCode.INTERRUPTED: "interrupted from the keyboard",
}

# After these codes, starting the same job again can help; after the others it fails in the same way.
RESTARTABLE = frozenset({ExitCode.INTERNAL, ExitCode.STARTUP, ExitCode.PEER_LOST, ExitCode.HANG, ExitCode.PREEMPTED})
FINAL = frozenset(ExitCode) - RESTARTABLE - {ExitCode.OK}

FINAL_CODE_VARIABLE = "TFDIST_FINAL_CODE_FILE"  # names a file for the first code of FINAL (Slurm's job file sets it)
PASSED_ON = "passed on"  # at the end of the last line of a worker that ends with another one's code


class TfdistError(ValueError):
    """Base class of errors whose cause and fix can be named in a sentence. The error's text is that sentence."""

    exit_code = ExitCode.INTERNAL
    ag_pass_through = True  # else AutoGraph converts an error raised inside a tf.function into a StagingError


class ConfigError(TfdistError):
    exit_code = ExitCode.CONFIG


class ClusterError(TfdistError):
    exit_code = ExitCode.CLUSTER


class DataError(TfdistError):
    exit_code = ExitCode.DATA


class StartupError(TfdistError):
    exit_code = ExitCode.STARTUP


class PeerLostError(TfdistError):
    exit_code = ExitCode.PEER_LOST


class DivergedError(TfdistError):
    exit_code = ExitCode.DIVERGED


class CheckpointError(TfdistError):
    exit_code = ExitCode.CHECKPOINT


class PeerFailedError(TfdistError):
    """Another worker has failed in a way that no new start mends. This one, which has lost it, ends with its code."""

    def __init__(self, sentence: str, code: ExitCode):
        super().__init__(sentence)
        self.exit_code = code


class UnsupportedError(TfdistError):
    exit_code = ExitCode.UNSUPPORTED


class MemoryShortError(TfdistError):
    exit_code = ExitCode.MEMORY


# Keras wraps the text of an error that is raised while a layer is called in its own text.
_AROUND = re.compile(r"Exception encountered when calling .*?\n\n(.*)\n\nArguments received by .*", re.DOTALL)


def _sentence(error: TfdistError) -> str:
    """Returns the sentence of an error, without the text that Keras has wrapped around it."""
    return _AROUND.sub(r"\1", str(error))


def run_command(main: Callable[[list[str]], int | None], argv: list[str]) -> NoReturn:
    """Runs a command's `main(argv)` and ends the process with the exit code for its result or error.

    A TfdistError is shown as its sentence, anything unexpected with its traceback. After an error the process ends at
    once: TensorFlow's orderly shutdown waits for peers that may be gone. After success, threads and exit functions run
    to their end as in any Python program, but the exit code is fixed: neither destructors nor errors in TensorFlow's
    threads, which may occur when the other workers leave, can change it.
    """
    open_closed_streams()
    outlive_reader()
    _final_code_file()
    decided: list[int] = []
    atexit.register(_end_with, decided)  # the first to be registered is the last to be called
    try:
        code = int(main(argv) or 0)
    except SystemExit as end:  # --help
        if end.code in (None, 0):
            decided.append(0)
        raise SystemExit(end.code) from None
    except KeyboardInterrupt:
        say_last_words("tfdist: interrupted.")
        code = ExitCode.INTERRUPTED
    except TfdistError as error:
        passed_on = isinstance(error, PeerFailedError)
        say_last_words(error_line(as_line(_sentence(error)), error.exit_code, passed_on))
        code = error.exit_code
    except BaseException as error:  # noqa: BLE001 - the last resort
        what = f"unexpected {type(error).__name__}: {as_line(first_line(error))}"
        say_last_words(f"{traceback.format_exc()}{error_line(what, ExitCode.INTERNAL)}")
        code = ExitCode.INTERNAL
    decided.append(code)
    if code == ExitCode.OK:
        _say_who_holds_the_end(code)
        raise SystemExit(0)
    _end(code)


def _say_who_holds_the_end(code: int) -> None:
    """Handles the time in which Python waits for non-daemon threads, such as those that a user's data source leaves
    behind. From now on a signal ends the process with `code`; after some seconds the threads' names are printed.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, lambda *_: _end(code))

    def say() -> None:
        time.sleep(_HELD_SECONDS)
        threads = [each for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
        if threads:
            say_last_words(
                f"tfdist: all work is done, but the process is waiting for {', '.join(each.name for each in threads)}:"
                " end these threads in your own code that started them, or start them with daemon=True."
            )

    threading.Thread(target=say, name="tfdist-held", daemon=True).start()


def before_end_process(tell: Callable[[str, ExitCode], None] | None) -> None:
    """Sets what `end_process` calls first, with its arguments: by this a worker tells the others. None: nothing."""
    _before_end[:] = [tell] if tell else []


def error_line(sentence: str, code: ExitCode, passed_on: bool = False) -> str:
    """Returns the last line of a process that ends with an error. passed_on: with one of another worker."""
    return f"tfdist: error: {sentence} (exit code {code.value}, {code.name}{f', {PASSED_ON}' if passed_on else ''})"


def end_process(sentence: str, code: ExitCode) -> NoReturn:
    """Prints the sentence, tells it to the other workers if there are any, and ends the process at once, from any
    thread, even if nobody reads the sentence."""
    for tell in _before_end:
        for_at_most(_SAYING_SECONDS, functools.partial(tell, sentence, code))
    say_last_words(error_line(sentence, code))
    _end(code)


def say_last_words(text: str) -> None:
    """Prints on standard error; returns even if nobody reads there."""

    def say() -> None:
        with contextlib.suppress(OSError, ValueError):  # the reader is gone
            print(text, file=sys.stderr, flush=True)

    for_at_most(_SAYING_SECONDS, say)


def _end_with(decided: list[int]) -> None:
    """Ends the process at once, if its exit code has been decided."""
    if decided:
        _end(decided[0])


def _end(code: int) -> NoReturn:
    if code == ExitCode.OK:  # a slow reader must get all results
        _flush()
    else:
        for_at_most(_SAYING_SECONDS, _flush)
        for_at_most(_SAYING_SECONDS, functools.partial(_note_final, code))
        _end_helpers()
    os._exit(code)


def _end_helpers() -> None:
    """Ends the processes that Python itself would end now: daemons of multiprocessing, if a data source has any."""
    if "multiprocessing" in sys.modules:
        import multiprocessing

        for helper in multiprocessing.active_children():
            if helper.daemon:
                with contextlib.suppress(OSError, ValueError):
                    helper.kill()  # nobody waits for it any more


def _final_code_file() -> str:
    """Returns the file for the code of this process ("": none), and takes its name out of the environment: the codes of
    commands that this process runs say nothing about the job."""
    global _taken_file
    _taken_file = os.environ.pop(FINAL_CODE_VARIABLE, "") or _taken_file
    return _taken_file


def _note_final(code: int) -> None:
    """Notes a code after which no new start helps, unless another worker has noted one. Slurm's job file asks for it,
    since srun tells only the highest code of all workers."""
    path = _final_code_file()
    if path and code in FINAL:
        with contextlib.suppress(OSError), open(path, "x") as file:
            file.write(str(code))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # the reader may be gone
            stream.flush()
