"""What workers find out together."""

from types import SimpleNamespace

import numpy as np
import pytest

from tfdist.runtime.decisions import any_worker, every_worker, texts_of_all


def among(*others):
    """A runtime whose other workers send what `others` are."""
    return SimpleNamespace(all_gather=lambda own: np.stack([own, *(np.array(other, own.dtype) for other in others)]))


@pytest.mark.parametrize(
    ("flags", "of_any", "of_every"),
    [((0, 0), False, False), ((1, 0), True, False), ((0, 1), True, False), ((1, 1), True, True)],
)
def test_a_flag_of_any_and_of_every_worker(flags, of_any, of_every):
    own, other = flags
    assert any_worker(among([other]), bool(own)) is of_any
    assert every_worker(among([other]), bool(own)) is of_every


def test_texts_of_all_have_room_for_the_longest_and_are_cut_there():
    other = list(b"a\xc3      ")  # cut in the middle of a character
    assert texts_of_all(among(other), "host:1", 8) == ["host:1", "a\N{REPLACEMENT CHARACTER}"]
    assert texts_of_all(among(other), "a sentence", 8) == ["a senten", "a\N{REPLACEMENT CHARACTER}"]
