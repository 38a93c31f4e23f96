"""Prepares arrays as `model.fit` does before it takes batches of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keras.src import tree
from keras.src.trainers.data_adapters import array_data_adapter, array_slicing, data_adapter_utils


def are_arrays(*arrays: Any) -> bool:
    """Whether all leaves are dense arrays of kinds that Keras itself slices into batches: NumPy, tensors, pandas, JAX,
    torch.

    Relies on `array_data_adapter.can_convert_arrays`; without it arrays of some kinds come in the same order in all
    epochs.
    """
    return array_data_adapter.can_convert_arrays(arrays) and not any(
        data_adapter_utils.is_tensorflow_ragged(leaf)
        or data_adapter_utils.is_tensorflow_sparse(leaf)
        or data_adapter_utils.is_jax_sparse(leaf)
        or data_adapter_utils.is_scipy_sparse(leaf)
        for leaf in tree.flatten(arrays)
    )


def prepared(x: Any, y: Any, sample_weight: Any, class_weight: Mapping[int, float] | None) -> Any:
    """Returns the arrays as Keras puts them into a dataset: a nest of tuples, dicts, arrays, tensors and None, with all
    rows in each leaf. Numbers have Keras' precision, there are weights for each output, and class weights have become
    sample weights.

    Relies on `ArrayDataAdapter._inputs` and `array_slicing.convert_to_sliceable`; without them arrays that are shuffled
    without a seed cannot be used on several workers. Raises ValueError if the arguments do not fit together.
    """
    adapter = array_data_adapter.ArrayDataAdapter(x, y, sample_weight=sample_weight, class_weight=class_weight)
    return tree.lists_to_tuples(array_slicing.convert_to_sliceable(adapter._inputs, target_backend="tensorflow"))


def split(arrays: Any, part: float) -> tuple[Any, Any]:
    """Returns (arrays to train on, the last `part` of the rows of each, to validate on); None stays None.

    Relies on `array_slicing.train_validation_split`; without it other rows than Keras' would be held back. Raises
    ValueError if one of the two would have no rows.
    """
    return array_slicing.train_validation_split(arrays, validation_split=part)
