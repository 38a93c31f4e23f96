"""The job token: a secret shared by the processes of one job, with which they authenticate each other (wire.py).

The launcher, on this machine and on Ray, and the Slurm script make a new token for every start of a job, and pass it in
the environment (TFDIST_JOB_TOKEN). Workers that are started by hand get it from there too, or from a file that only
their user can read (--job_token_file). It is removed from the environment as soon as it is read, so that no child
process, tracker or log gets it from there. A Secret's text (repr, str) does not show it.
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
_taken = ""  # the token that was in this process's environment


@dataclass(frozen=True)
class Secret:
    """A job token. Its truth value is False if there is none."""

    value: bytes = field(default=b"", repr=False)

    def __bool__(self) -> bool:
        return bool(self.value)

    def key(self, purpose: str, *context: str) -> bytes:
        """Derives a key of 32 bytes for one purpose and one session, whose `context` only the job's processes know."""
        parts = [part.encode() for part in (purpose, *context)]
        return hmac.digest(self.value, b"".join(len(part).to_bytes(4, "big") + part for part in parts), hashlib.sha256)


def make() -> str:
    """Makes a new token that can be put into an environment variable."""
    return secrets.token_hex(32)


def read(environment: MutableMapping[str, str], file: str = "") -> Secret:
    """Reads the token of this process: from the file if given, else from the environment, and removes it there.

    Raises ConfigError if others can read the file, and if the token could be guessed.
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
            f"{source} has {len(value)} characters, fewer than {_LEAST_CHARACTERS}, and could be guessed: create one"
            ' with `python -c "import secrets; print(secrets.token_hex(32))"`.'
        )
    return Secret(value.encode())


def _read_file(path: str) -> str:
    try:
        with open(
            path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
        ) as file:  # opening a pipe would wait for its writer
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"--job_token_file={path} is not a plain file: name one that contains the token.")
            if status.st_uid != os.geteuid():
                raise ConfigError(
                    f"--job_token_file={path} belongs to another user: make your own copy, with mode 0600."
                )
            if status.st_mode & 0o077:
                raise ConfigError(
                    f"--job_token_file={path} can be used by others (mode {stat.S_IMODE(status.st_mode):04o}): run"
                    f" `chmod 600 {path}` if it contains only the token."
                )
            return file.read(_MOST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise ConfigError(f"--job_token_file={path} cannot be read ({reason}): check the path.") from None


def host_of(address: str) -> str:
    """Returns the host of host:port, without the brackets of an IPv6 address."""
    return address.rpartition(":")[0].strip("[]")


def is_loopback(host: str) -> bool:
    """Returns whether a host is a loopback name or address, which other machines cannot reach."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def with_token(cluster: Cluster, environment: MutableMapping[str, str], file: str) -> Cluster:
    """Adds the job's token to the cluster of a process about to connect to the others. Raises what `read` raises.

    On the chief, prints a warning if there is no token, since whoever reaches the workers can then pose as one of them.
    """
    secret, peers = read(environment, file), cluster.peers
    if cluster.is_chief and len(peers) > 1 and not secret and not all(is_loopback(host_of(peer)) for peer in peers):
        say(
            f"warning: this job has no token, so anyone who can reach {host_of(peers[0])} and the other workers can"
            f" join it: give all the same --job_token_file or {VARIABLE} (docs/security.md)."
        )
    return replace(cluster, secret=secret)
