"""Errors of object stores, as sentences: why, whether transient, and the exit code that a command ends with."""

from __future__ import annotations

import contextlib
import errno
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from tfdist.control.exit_codes import ConfigError, StartupError, TfdistError

_LONGEST_REASON = 300  # characters
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def is_of_this_machine(error: BaseException) -> bool:
    """Whether the local disk has failed, to which objects are written here, and not the store."""
    return isinstance(error, OSError) and error.errno in _OF_THE_DISK


class StoreError(OSError):
    """The error of a failed store operation. Its text is a sentence. refused: a retry will not help."""

    def __init__(self, sentence: str, refused: bool = False):
        super().__init__(sentence)
        self.refused = refused


def says_it_is_there(error: BaseException) -> bool:
    """Whether a store refused to create an object because its name exists; s3fs turns Ceph's answer into EINVAL."""
    return isinstance(error, FileExistsError) or _answer(error).get("Error", {}).get("Code") == "PreconditionFailed"


def _answer(error: BaseException) -> dict[str, Any]:
    """The answer of an S3 store, from botocore; {} for other stores."""
    found = getattr(error.__cause__, "response", None)
    return found if isinstance(found, dict) else {}


def explained(error: BaseException) -> tuple[str, bool]:
    """(why a store operation failed and what to do about it, whether this is permanent)."""
    name, status = type(error).__name__, getattr(error, "status_code", None)  # the second: from Azure
    said = textwrap.shorten(str(error).partition("RequestId:")[0], _LONGEST_REASON, placeholder=" ...")
    said = name if said in ("", "None") else said  # Ceph gives no reason
    words = re.sub(r"\S*[/%]\S*", " ", said).lower()  # without the names of buckets and objects
    if isinstance(error, FileNotFoundError) or status == 404:
        return f"the bucket or folder does not exist ({said}): create it, or correct the URL", True
    if "encoded in url" in said.lower():
        return "the URL of the store's server (AWS_ENDPOINT_URL) contains a user or password: remove it", True
    if "Invalid endpoint" in said:
        return f"{said}: correct AWS_ENDPOINT_URL, which begins with http:// or https://", True
    if name in ("ProfileNotFound", "ConfigParseError", "InvalidConfigError"):
        return f"{said}: correct AWS_PROFILE, or the file of its settings", True
    if "Credentials" in name or "credentials" in words:
        return (
            f"no credentials were found ({name}): set them in the environment or the files that the store's own tools"
            " read",
            True,
        )
    if isinstance(error, PermissionError) or status in (401, 403):
        return f"it is not permitted ({said}): allow these credentials to read, write, list and delete there", True
    if "libjvm" in said or "libhdfs" in said:
        return (
            "Hadoop's native library (libhdfs) and Java were not found: set HADOOP_HOME, JAVA_HOME and CLASSPATH, or"
            " use webhdfs://",
            True,
        )
    if name == "ParamValidationError" or "InvalidBucketName" in said or "KeyTooLong" in said:
        return f"{said}: correct the URL", True
    answer = _answer(error).get("ResponseMetadata", {})
    region = answer.get("HTTPHeaders", {}).get("x-amz-bucket-region")
    if region and answer.get("HTTPStatusCode") in (301, 307, 400):
        return f"the bucket is in the region {region}: set AWS_REGION={region}", True
    if name == "NoRegionError" or "region" in words:
        return f"{said}: set AWS_REGION to the bucket's region", True
    return f"{name}: {said}", False


@contextlib.contextmanager
def as_sentence(flag: str = "run_dir") -> Iterator[None]:
    """Context manager that turns errors of a store into errors with an exit code. flag: the flag that gave its URL."""
    try:
        yield
    except StoreError as error:
        if error.refused:
            raise ConfigError(f"--{flag}: {error}.") from None
        raise StartupError(f"--{flag}: {error}: check whether the store can be reached from here.") from None
    except TfdistError:
        raise
    except OSError as error:
        raise ConfigError(
            f"--{flag}: its copy on this machine cannot be used ({error}): make room, or choose another --cache_dir."
        ) from None
