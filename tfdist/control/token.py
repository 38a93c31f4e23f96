"""The job token: a secret that the processes of one job share, by which each knows the others (control/wire.py).

The launcher, on this machine and on Ray, and the Slurm script make one for every start of a job, and hand it over in
the environment (TFDIST_JOB_TOKEN). Workers that are started by hand get it from there too, or from a file that only
their user can read (--job_token_file). It is taken out of the environment as soon as it is read, so that no child
process, tracker or log gets it from there, and no text that Python makes of a Secret shows it.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import secrets
import stat
from collections.abc import MutableMapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tfdist.control.exit_codes import ConfigError
from tfdist.control.terminal import say

if TYPE_CHECKING:
    from tfdist.control.cluster import Cluster

VARIABLE = "TFDIST_JOB_TOKEN"
_LEAST_CHARACTERS = 16
_MOST_BYTES = 4096
_taken = ""  # what this process's environment held


@dataclass(frozen=True)
class Secret:
    """A job token; false if there is none."""

    value: bytes = field(default=b"", repr=False)

    def __bool__(self) -> bool:
        return bool(self.value)

    def key(self, purpose: str, *context: str) -> bytes:
        """32 bytes for one purpose, and for one meeting of which only the processes of the job know the `context`."""
        parts = [part.encode() for part in (purpose, *context)]
        return hmac.digest(self.value, b"".join(len(part).to_bytes(4, "big") + part for part in parts), hashlib.sha256)


def make() -> str:
    """A new token, fit for an environment variable."""
    return secrets.token_hex(32)


def read(environment: MutableMapping[str, str], file: str = "") -> Secret:
    """The token of this process: from the file if one is named, else from the environment, from which it is removed.

    Raises ConfigError for a file that others can read, and for a token that could be guessed.
    """
    global _taken
    value = environment.pop(VARIABLE, "")
    if environment is os.environ:
        _taken = value = value or _taken
    if file:
        value, source = _read_file(file), f"--job_token_file={file}"
    else:
        source = f"{VARIABLE} in the environment"
    value = value.strip()
    if (file or value) and len(value) < _LEAST_CHARACTERS:
        raise ConfigError(
            f"{source} holds {len(value)} characters, fewer than {_LEAST_CHARACTERS}, which could be guessed: make one"
            ' with `python -c "import secrets; print(secrets.token_hex(32))"`.'
        )
    return Secret(value.encode())


def _read_file(path: str) -> str:
    try:
        with open(
            path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
        ) as file:  # a pipe would wait for its writer
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"--job_token_file={path} is not a plain file: name one that holds the token.")
            if status.st_uid != os.geteuid():
                raise ConfigError(
                    f"--job_token_file={path} belongs to another user: make a copy of your own, with mode 0600."
                )
            if status.st_mode & 0o077:
                raise ConfigError(
                    f"--job_token_file={path} can be used by others (mode {stat.S_IMODE(status.st_mode):04o}): run"
                    f" `chmod 600 {path}` if it holds the token alone."
                )
            return file.read(_MOST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise ConfigError(f"--job_token_file={path} cannot be read ({reason}): check the path.") from None


def host_of(address: str) -> str:
    """The host of host:port, without the brackets of an IPv6 address."""
    return address.rpartition(":")[0].strip("[]")


def is_loopback(host: str) -> bool:
    """Whether a host is this machine by its very name, so that nobody else can reach it."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def with_token(cluster: Cluster, environment: MutableMapping[str, str], file: str) -> Cluster:
    """The cluster of a process that is about to talk to the others, with the job's token. Raises what `read` raises.

    Says, on the chief, if there is none and so whoever reaches the workers' addresses can pose as one of them.
    """
    secret, peers = read(environment, file), cluster.peers
    if cluster.is_chief and len(peers) > 1 and not secret and not all(is_loopback(host_of(peer)) for peer in peers):
        say(
            f"warning: this job has no token, so whoever reaches {host_of(peers[0])} and the other workers can"
            f" join it: give all the same --job_token_file or {VARIABLE} (docs/security.md)."
        )
    return replace(cluster, secret=secret)
