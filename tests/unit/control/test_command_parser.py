"""What argparse would let through."""

import pytest

from tfdist.control.command_parser import CommandParser
from tfdist.control.exit_codes import ConfigError


@pytest.mark.parametrize("kind", [int, str])
def test_two_dashes_are_no_value(kind):
    parser = CommandParser("see --help", prog="tool")
    parser.add_argument("--devices", type=kind, default=1)
    with pytest.raises(ConfigError, match="--devices=-- sets no value for the flag: see --help"):
        parser.parse_args(["--devices=4", "--devices=--"])
