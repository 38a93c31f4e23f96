"""Transient errors of a network or a file server: after a restart of the job, the data may be readable."""

from __future__ import annotations

import errno
import os
import re

from tfdist.control.exit_codes import DataError, StartupError, TfdistError
from tfdist.control.user_errors import said, what_in_text

_NUMBERS = {
    number: os.strerror(number)
    for number in (
        errno.EIO,
        errno.EPIPE,
        errno.ESTALE,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.ENOTCONN,
        errno.EREMOTEIO,
        errno.ETIMEDOUT,
    )
} | {-3: "Temporary failure in name resolution"}  # of getaddrinfo
# Error names of Python itself and of requests, urllib3, httpx, aiohttp and botocore.
_NAME = re.compile(
    r"^(?:[\w.]+\.)?(?:HTTPError: (?:HTTP Error )?(?:429|5\d\d)\b|"
    r"URLError: <urlopen error (?:[^>]* )?timed out>|"
    r"(?:\w*Connect(?:ion)?(?:Reset|Refused|Aborted|Closed|Timeout)?Error|\w*Timeout(?:Error|Exception)?"
    r"|(?:Remote|Server)Disconnected(?:Error)?|BrokenPipeError|ProtocolError|ChunkedEncodingError|IncompleteRead"
    r"|MaxRetryError):)"
)
_NUMBER = re.compile(rf"\[Errno ({'|'.join(map(str, _NUMBERS))})\]")
_OF_TENSORFLOW = re.compile(rf"; ({'|'.join(map(re.escape, _NUMBERS.values()))})$", re.MULTILINE)


def reading_failed(sentence: str, error: BaseException | str, passes: bool = False) -> TfdistError:
    """Returns the error, with this sentence, for unreadable data: a StartupError if it may pass, else a DataError.

    error: the exception, or TensorFlow's text about it. passes: whether it is known that it may pass.
    """
    if not (passes or (_text_may_pass(error) if isinstance(error, str) else may_pass(error))):
        return DataError(sentence)
    return StartupError(
        f"{sentence.rstrip('.')}; this may be temporary: start the job again (the launcher does so with"
        " --max_restarts=N)."
    )


def may_pass(error: BaseException) -> bool:
    """Returns whether this is an error of a network or a file server that may be transient."""
    return any(_what_may_pass(f"{kind.__name__}: {said(error)}") for kind in type(error).__mro__)


def _text_may_pass(text: str) -> bool:
    return _what_may_pass(what_in_text(text)) or bool(_OF_TENSORFLOW.search(text))


def _what_may_pass(what: str) -> bool:
    return bool(_NAME.search(what) or _NUMBER.search(what))
