"""Bad samples are named where they may be the cause of what has failed."""

import pytest

from tfdist.control.exit_codes import DivergedError
from tfdist.run.bad_samples import BadSamples


@pytest.mark.parametrize(
    ("found", "beginning"),
    [
        ("", ""),
        ("Sample 17 of mine:data/train has NaN in x at [0].", "{} Repair or leave out such samples first. "),
    ],
)
def test_the_cause_comes_before_what_else_may_help(found, beginning, monkeypatch):
    monkeypatch.setattr(BadSamples, "flaws", lambda self, evaluated: found)
    said = "Loss became NaN between step 0 and 5 (loss nan): lower --learning_rate."
    with pytest.raises(DivergedError) as error, BadSamples(None, None, 0, print).naming():
        raise DivergedError(said)
    assert str(error.value) == beginning.format(found) + said
