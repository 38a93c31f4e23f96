"""Tests with stores are among these."""

from tests.stores.service_files import service_files_are_read_once

__all__ = ["service_files_are_read_once"]
