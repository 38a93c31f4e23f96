"""What is said when the user's own code fails."""

import pytest

from tfdist.control.exit_codes import ConfigError
from tfdist.plugins import own_code, resolve


def test_it_is_said_where_in_the_own_code():
    with pytest.raises(ConfigError, match=r"^--source=mine:data failed at .*test_plugins\.py:\d+, in test_it_is_said_where_in_the_own_code: KeyError: 'label'$"), own_code("source", "mine:data"):
        {}["label"]


def test_not_where_in_keras():
    import keras
    keras.config.disable_traceback_filtering()
    try:
        with pytest.raises(ConfigError, match=r"failed at .*test_plugins\.py:\d+, in test_not_where_in_keras: "), own_code("model", "mine:model"):
            keras.layers.Dense(-1)
    finally:
        keras.config.enable_traceback_filtering()


def test_a_module_that_fails_at_its_import(tmp_path, monkeypatch):
    (tmp_path / "broken_at_import.py").write_text("import json\nimport not_installed_anywhere\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"--model=broken_at_import:model failed at .*broken_at_import\.py:2, in <module>: ModuleNotFoundError: No module named 'not_installed_anywhere'"):
        resolve("model", "broken_at_import:model", {})


def test_other_errors_stay_what_they_are():
    class ResourceExhaustedError(Exception):
        pass

    for error in (ConfigError("as it is"), MemoryError(), ResourceExhaustedError()):
        with pytest.raises(type(error)) as raised, own_code("model", "mine:model"):
            raise error
        assert raised.value is error
