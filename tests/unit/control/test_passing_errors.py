"""A network or a file server that fails may answer when the job is started again; a file that is not there stays so."""

import errno
import http.client
import socket
import urllib.error

import pytest

from tfdist.control.exit_codes import ConfigError, DataError, StartupError
from tfdist.control.passing_errors import reading_failed
from tfdist.plugins import own_code


class Gone(ConnectionError):
    """An error of a store of the user's own."""


class ReadTimeout(OSError):
    """As requests names it."""


class HTTPError(OSError):
    """As requests and urllib name it."""


PASSING = [
    ConnectionResetError("reset by storage"),
    BrokenPipeError(),
    TimeoutError("nfs timed out"),
    Gone("later"),
    ReadTimeout("Read timed out."),
    HTTPError("503 Server Error: Service Unavailable for url: http://a"),
    HTTPError("HTTP Error 502: Bad Gateway"),
    urllib.error.URLError("timed out"),
    urllib.error.URLError(TimeoutError("the handshake operation timed out")),
    http.client.RemoteDisconnected("Remote end closed connection without response"),
    socket.gaierror(-3, "Temporary failure in name resolution"),
    *(OSError(number, "words") for number in (errno.EIO, errno.ESTALE, errno.EHOSTUNREACH, errno.ENETUNREACH)),
]
STAYING = [
    FileNotFoundError(errno.ENOENT, "No such file or directory", "train.txt"),
    PermissionError(errno.EACCES, "Permission denied", "train.txt"),
    OSError(errno.ENOSPC, "No space left on device"),
    HTTPError("404 Client Error: Not Found for url: http://a/503"),
    ValueError("a ConnectionError is in the text: TimeoutError"),
    KeyError("timeout"),
    urllib.error.URLError("unknown url type: s4"),
]


@pytest.mark.parametrize("form", ["raised", "told by TensorFlow"])
@pytest.mark.parametrize(
    "error, kind",
    [*((error, StartupError) for error in PASSING), *((error, DataError) for error in STAYING)],
    ids=repr,
)
def test_which_errors_may_pass(error, kind, form):
    name = type(error).__name__ if type(error) is not Gone else "ConnectionError"  # of which it is one
    text = f'{name}: {error}\nTraceback (most recent call last):\n\n  File "a.py", line 1, in f\n\n{name}: {error}\n\n'
    found = reading_failed("It cannot be read.", error if form == "raised" else text)
    assert type(found) is kind
    told = "It cannot be read; this may be temporary: start the job again (the launcher does so with --max_restarts=N)."
    assert str(found) == (told if kind is StartupError else "It cannot be read.")


def test_what_a_source_raises_may_pass_also_if_it_is_no_error_of_the_system():
    with pytest.raises(StartupError, match="this may be temporary"), own_code("source", "mine:data"):
        raise http.client.IncompleteRead(b"half", 8)
    with pytest.raises(ConfigError), own_code("model", "mine:model"):
        raise http.client.IncompleteRead(b"half", 8)


def test_a_file_that_tensorflow_cannot_read():
    for words, kind in (("Stale file handle", StartupError), ("No such file or directory", DataError)):
        assert type(reading_failed("a", f"/mnt/a.png; {words}\n\t [[{{{{node ReadFile}}}}]]")) is kind
    assert type(reading_failed("a", "the store is away", passes=True)) is StartupError
