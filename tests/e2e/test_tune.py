"""--jit_tune: the run is the one that the flag which it has chosen would have made."""

import json

import numpy as np
import pytest

from tests.e2e.job import CLUSTERS, records, run, snapshot

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


def test_a_tuned_run_is_the_run_with_what_was_chosen(tmp_path):
    def trained(name, steps, *flags):
        run(2, [*CLUSTERS, "--deterministic", f"--steps={steps}", f"--run_dir={tmp_path / name}", *flags])
        return snapshot(tmp_path / name, steps)

    trained("tuned", 10, "--jit_tune")
    (start,) = records(tmp_path / "tuned", kind="start")
    found = json.loads((tmp_path / "tuned" / "xla.json").read_text())
    assert found["message"] in start["values"]["message"] and "instead of" in found["message"]
    (tmp_path / "tuned" / "xla.json").write_text(
        json.dumps(found | {"message": "as it was"})
    )  # which must not be measured again
    state = trained("tuned", 20, "--jit_tune")
    assert "as it was" in records(tmp_path / "tuned", kind="start")[-1]["values"]["message"]
    plain = trained("plain", 20, *(["--jit_compile"] if found["jit_compile"] else []))
    assert state.keys() == plain.keys()
    for name in state:
        np.testing.assert_array_equal(state[name], plain[name], err_msg=name)
