"""Exports that load without tfdist: `.keras` and SavedModel."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Container
from pathlib import Path
from typing import Any

import keras

from tfdist.control.exit_codes import CheckpointError, ConfigError
from tfdist.control.own_files import remove_tree
from tfdist.control.user_errors import first_line, first_paragraph

KERAS_FILE, SAVED_MODEL_FOLDER = "model.keras", "saved_model"


def load_export(path: str) -> keras.Model:
    """Loads the model of a `.keras` file, which may be untrusted: nothing in it is executed. Raises CheckpointError."""
    if Path(path).is_dir():
        raise CheckpointError(
            f"{path} is a folder (a SavedModel, perhaps), not a .keras file: give the {KERAS_FILE} that --export=keras"
            " writes next to it."
        )
    try:
        loaded: Any = keras.models.load_model(path, compile=False, safe_mode=True)
        return loaded
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        if "lambda" in str(error).lower():
            raise CheckpointError(
                f"{path} contains Python code (a Lambda layer), which could do anything and is not executed: save the"
                " model with a layer of its own class instead of the Lambda."
            ) from None
        raise CheckpointError(
            f"The model file {path} cannot be loaded: {(first_line(error) or type(error).__name__)[:300]}"
        ) from None


def check_exportable(model: keras.Model, formats: Container[str]) -> None:
    """Raises ConfigError if a `.keras` file cannot hold the model, already before it is trained."""
    if "keras" not in formats:
        return
    try:
        json.dumps(keras.saving.serialize_keras_object(model))  # in the form that the file will contain
    except Exception as error:  # noqa: BLE001 - from Keras, or from the user's get_config
        raise ConfigError(
            f"--export=keras cannot write the model ({first_paragraph(error) or type(error).__name__}): give the named"
            " object a get_config, or train with --export=saved_model or --export=none."
        ) from None


def export_model(model: keras.Model, folder: Path, formats: tuple[str, ...]) -> list[Path]:
    """Writes the formats ("keras", "saved_model") of a plain model, one that no strategy has distributed.

    Each is written under a temporary name and renamed. Returns the paths.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for form in formats:
        target = folder / {"keras": KERAS_FILE, "saved_model": SAVED_MODEL_FOLDER}[form]
        temporary = folder / f".writing-{uuid.uuid4().hex[:8]}{target.suffix}"
        try:
            if form == "keras":
                model.save(temporary)
            else:
                model.export(temporary, format="tf_saved_model", verbose=False)
            if target.is_dir():
                remove_tree(target)
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary) if temporary.is_file() else remove_tree(temporary)
            raise
        written.append(target)
    return written
