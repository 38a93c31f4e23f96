"""Does the test suite notice silent damage and security holes? Injects faults into copies of the code to find out.

    python scripts/inject_faults.py             all of FAULTS, each with the tests of its mechanism
    python scripts/inject_faults.py NAME ...    some of them
    python scripts/inject_faults.py --list      their names

For each fault, only the tests named with it are run, up to the first failure, so that it takes minutes and not hours.
They all belong to the default suite. Exit code 1 if a fault is not noticed, or if the tests fail without a fault.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.e2e.job import ENVIRONMENT  # noqa: E402
from tests.faulty_copy import faulty_copy  # noqa: E402


class Fault(NamedTuple):
    """Replaces `text` by `other` in `file` below tfdist. tests: arguments of pytest."""

    what: str
    file: str
    text: str
    other: str
    tests: tuple[str, ...]


_ATTACKED = "tests/e2e/test_attackers.py::test_a_job_goes_on_and_who_is_lost_is_named[sockets]"
_PARTS = "tests/unit/artifacts/test_shard_upload.py"
FAULTS: dict[str, Fault] = {
    "reduction": Fault(
        "gradients are not added up over the workers",
        "training/update.py",
        "        reduced = self.runtime.all_reduce([*travel, tf.concat([sums, signals], 0)])\n",
        "        reduced = [*travel, *self.runtime.all_reduce([tf.concat([sums, signals], 0)])]\n",
        ("tests/parity/test_parity.py",),
    ),
    "held up": Fault(
        "workers of a new elastic group are killed, because the group before was broken for too long",
        "control/membership.py",
        "        self.broken_since = None\n        formed",
        "        formed",
        ("tests/unit/launcher/test_elastic_job.py",),
    ),
    "end of a stream": Fault(
        "a file of a stream that is cut within the header of a record ends there",
        "data/sources/whole_records.py",
        "tf.equal(total, ends[number])",
        "tf.less_equal(total, ends[number])",
        ("tests/unit/data/test_damaged_record.py",),
    ),
    "share": Fault(
        "each worker's share of a gradient has the precision of float32",
        "training/dtypes.py",
        "if isinstance(factor, tf.Tensor) else tf.constant(factor, piece.dtype)",
        "if isinstance(factor, tf.Tensor) else tf.cast(factor, piece.dtype)",
        ("tests/unit/keras_fit/test_gradients.py",),
    ),
    "executions": Fault(
        "a fit is resumed between two executions of steps_per_execution",
        "artifacts/backup_checks.py",
        "    if batch % steps_per_execution:\n",
        "    if False:\n",
        ("tests/unit/artifacts/test_backup.py",),
    ),
    "other hosts": Fault(
        "a worker is told to read its neighbor's memory though that is on another host",
        "runtime/ring/array_meeting.py",
        "self._shared.readers &= {(self.rank + 1) % self.size}",
        "pass",
        ("tests/unit/runtime/ring/test_ring.py",),
    ),
    "dependent columns": Fault(
        "powersgd counts rounding as a direction",
        "training/parallel/compression.py",
        "tf.where(left <= _ROUNDING**2 * before, 0.0, unit)",
        "unit",
        ("tests/unit/training/test_compression.py",),
    ),
    "lost direction": Fault(
        "powersgd finds nothing after a gradient of zeros",
        "training/parallel/compression.py",
        "tf.where(tf.reduce_any(tf.not_equal(q, 0.0), 0), q, ends[basis])",
        "q",
        ("tests/unit/training/test_compression.py",),
    ),
    "kept NaN": Fault(
        "topk keeps a NaN in the carried error",
        "training/parallel/compression.py",
        "tf.where(tf.math.is_nan(flat), math.inf, tf.abs(flat))",
        "tf.abs(flat)",
        ("tests/unit/training/test_compression.py",),
    ),
    "unknown label": Fault(
        "a label outside a vocabulary that is spread trains all logits down",
        "training/parallel/tensor.py",
        "losses *= tf.where(tf.logical_or(is_known, tf.equal(weights, 0.0)), 1.0, math.nan)",
        "pass",
        ("tests/unit/training/parallel/test_tensor.py",),
    ),
    "server draws": Fault(
        "on parameter servers all steps draw the same numbers without a generator",
        "training/parameter_server/remote_step.py",
        "stateless_call(self.model, weights, non_trainable, x, True, [*given])",
        "stateless_call(self.model, weights, non_trainable, x, True)",
        ("tests/unit/training/parameter_server/test_parameters.py",),
    ),
    "stage draws": Fault(
        "all stages of a pipeline draw the same numbers without a generator",
        "training/replica_gradients.py",
        "            reseed_for_part(self._without_one, part)\n",
        "",
        ("tests/unit/training/parallel/test_pipeline.py",),
    ),
    "neighbour": Fault(
        "each worker but the first takes a sample of its neighbor instead of its own",
        "data/order.py",
        "first = consumed + step",
        "first = (replica > 0) + consumed + step",
        ("tests/unit/data",),
    ),
    "seed": Fault(
        "the state of seed generators is not saved",
        "artifacts/state.py",
        "enumerate(_once(model.variables))}",
        'enumerate(_once([v for v in model.variables if "seed" not in v.path]))}',
        ("tests/unit/artifacts",),
    ),
    "clip": Fault(
        "gradients are clipped on each worker before they are added up",
        "training/step.py",
        "        return self.update.reduce(gradients, sums, signals)\n",
        "        if self.options.clip_norm:\n"
        "            local = clipping(tf.linalg.global_norm(gradients) * self.runtime.size, self.options.clip_norm)\n"
        "            gradients = [scaled(gradient, local) for gradient in gradients]\n"
        "        return self.update.reduce(gradients, sums, signals)\n",
        ("tests/parity/test_parity.py", "tests/fuzz"),
    ),
    "loss scale": Fault(
        "gradients are divided by the loss scale of the step before",
        "training/step.py",
        "        factor = self._unscaling(reduced, scale)\n",
        "        older = scale\n"
        "        if self.loss_scale.dynamic:  # after a step that did not fit it was twice as large\n"
        "            halved = tf.logical_and(tf.equal(self.loss_scale._good_steps, 0), step > 0)\n"
        "            older = tf.where(halved, 2.0 * scale, scale)\n"
        "        factor = self._unscaling(reduced, older)\n",
        ("tests/unit/training", "tests/parity/test_parity.py"),
    ),
    "slot": Fault(
        "one slot variable of the optimizer is not restored",
        "artifacts/state.py",
        "        tf_variable(variable).assign(arrays[key])",
        '        if key != "optimizer/0002":\n            tf_variable(variable).assign(arrays[key])',
        ("tests/unit/artifacts", "tests/unit/run"),
    ),
    "batch norm": Fault(
        "BatchNormalization uses the statistics of only its worker's rows",
        "runtime/batch_norm.py",
        "synchronized=lambda x, axes, keepdims: moments(runtime, x, axes, keepdims)",
        "synchronized=lambda x, axes, keepdims: tf.nn.moments(x, axes, keepdims=keepdims)",
        ("tests/parity/test_replicas.py", "tests/parity/test_parity.py", "tests/fuzz"),
    ),
    "second derivative": Fault(
        "a second derivative through moments of several workers differs from that of one process",
        "runtime/batch_norm.py",
        "    fixed = tf.stop_gradient(apart)\n",
        "    fixed = apart\n",
        ("tests/unit/runtime/test_batch_norm.py",),
    ),
    "missing row": Fault(
        "a lookup of a row that does not exist silently returns another one under XLA",
        "models/missing_rows.py",
        '            return _where(there, found, float("nan"))\n',
        "            return found\n",
        ("tests/unit/models/test_missing_rows.py",),
    ),
    "missing number": Fault(
        "a lookup of an integer that does not exist silently returns another one under XLA",
        "keras_fit/silent_lookups.py",
        "missing_rows.poisoned(function(*args, **kwargs))",
        "function(*args, **kwargs)",
        ("tests/unit/keras_fit/test_silent_lookups.py",),
    ),
    "bucket": Fault(
        "two gradients of one shape come out of a bucket swapped",
        "runtime/reducer.py",
        "        self.wait_s += time.monotonic() - begun\n",
        "        shapes = [array.shape for array in reduced]\n"
        "        twins = [i for i, shape in enumerate(shapes) if shape and shape == shapes[-2]][:2]\n"
        "        if len(twins) == 2:\n"
        "            reduced[twins[0]], reduced[twins[1]] = reduced[twins[1]], reduced[twins[0]]\n"
        "        self.wait_s += time.monotonic() - begun\n",
        ("tests/multi/test_conformance.py",),
    ),
    "epoch": Fault(
        "the last sample of an epoch is shuffled as if it were of the next",
        "data/order.py",
        "    epoch = positions // size\n",
        "    epoch = (positions + 1) // size\n",
        ("tests/unit/data",),
    ),
    "fsync": Fault(
        "a snapshot is committed before its files are on the disk",
        "artifacts/snapshot_folder.py",
        ", checksum, flush=True)",
        ", checksum, flush=False)",
        ("tests/unit/artifacts",),
    ),
    "direct fsync": Fault(
        "a snapshot is committed before its data, which bypass the page cache, are on the disk",
        "artifacts/direct_file.py",
        "        os.fsync(self._descriptor)\n",
        "",
        ("tests/unit/artifacts",),
    ),
    "mixed rows": Fault(
        "only the chief's share of the trials counts when a model is checked for mixing rows",
        "training/row_checks/row_mixing.py",
        "share.index >= 0 and",
        "runtime.rank == 0 and",
        ("tests/unit/training/row_checks/test_row_mixing.py",),
    ),
    "mixed on the way back": Fault(
        "gradients of whole batches are taken for sums over their rows",
        "training/row_checks/row_gradients.py",
        "return _differ(together, sums, rounded, known) and",
        "return False and",
        ("tests/unit/training/row_checks/test_row_mixing.py",),
    ),
    "mixed above a value": Fault(
        "all rows that a model is tried with have the same size",
        "training/row_checks/trial_values.py",
        "or leaf.shape[0] != len(scales)",
        "or leaf.shape[0] == len(scales)",
        ("tests/unit/training/row_checks/test_row_mixing.py",),
    ),
    "mixing objective": Fault(
        "in-batch negatives are taken for losses of single samples",
        "training/row_checks/objective_rows.py",
        "if not differing:",
        "if True:",
        ("tests/unit/training/row_checks/test_objective_rows.py",),
    ),
    "idle weights": Fault(
        "weights that the loss does not depend on are decayed",
        "training/connected.py",
        "piece if self._found is None or place in self._found else None",
        "piece",
        ("tests/unit/training/test_step.py",),
    ),
    "idle averages": Fault(
        "the moving averages of a stage or server whose variables all have no gradient stay zeros",
        "training/connected.py",
        "keras_optimizers.update_moving_averages(optimizer)",
        "pass",
        ("tests/unit/training/test_connected.py",),
    ),
    "frozen parts": Fault(
        "frozen weights, of which each rank may have another part, become the first worker's like moving statistics",
        "run/moving_statistics.py",
        "if isinstance(layer, keras.layers.BatchNormalization)",
        "if True",
        ("tests/unit/run/test_moving_statistics.py",),
    ),
    "cut by name": Fault(
        "the results of a user's model are not checked once its layers are cut",
        "training/parallel/compose.py",
        "if rows and not is_known",
        "if False",
        ("tests/parity/test_mesh_parity.py::test_what_is_cut_and_computes_something_else_is_refused",),
    ),
    "fast weights": Fault(
        "a gradient with respect to values in place of weights comes from one worker's rows",
        "keras_fit/rows.py",
        "for grad in total(runtime, dense(upstream))]",
        "for grad in dense(upstream)]",
        ("tests/parity/test_fit.py",),
    ),
    "logits": Fault(
        "the crossentropy of a gathered softmax is cut off where a probability is below 1e-7",
        "compat/keras_tensors.py",
        'tensor.op if hasattr(tensor, "graph") and tensor.op.type in _OF_LOGITS else None',
        "None",
        ("tests/unit/keras_fit/test_forward.py",),
    ),
    "kept tensors": Fault(
        "a compute_loss may read what a layer has kept of one worker's rows",
        "keras_fit/kept_tensors.py",
        "layer.__dict__[name] = OfOwnRows(value, layer.name, name)",
        "pass",
        ("tests/unit/keras_fit/test_forward.py",),
    ),
    "used outside": Fault(
        "a compute_loss may read what a call has kept of one worker's rows in a variable of the module",
        "keras_fit/used_outside.py",
        "if not is_ours and",
        "if False and",
        ("tests/unit/keras_fit/test_forward.py",),
    ),
    "kept in a trial": Fault(
        "a compute_loss reads what a layer has kept of the rows of a trial",
        "keras_fit/kept_tensors.py",
        "if in_a_trial or attributes.get(name)",
        "if attributes.get(name)",
        ("tests/unit/keras_fit/test_forward.py",),
    ),
    "rows in a branch": Fault(
        "rows that a call looks up inside a branch are added up, row by row, with those of the other workers",
        "keras_fit/lookups.py",
        "if _is_lookup(op) or _may_look_up(op)",
        "if _is_lookup(op)",
        ("tests/unit/keras_fit/test_forward.py",),
    ),
    "rows of a step": Fault(
        "rows of a table that a step looks up by gathered outputs are in its gradient once for each worker",
        "keras_fit/rows.py",
        "[mark_same_on_all(rows) for rows in as_list(gather(*tensors))]",
        "as_list(gather(*tensors))",
        ("tests/unit/keras_fit/test_forward.py",),
    ),
    "row proof": Fault(
        "a softmax over the rows of a batch is taken for one of each row",
        "training/row_checks/row_rules.py",
        "return x if x and x.axis != rank_of(operation.inputs[0]) - 1 else MIXED",
        "return x or MIXED",
        ("tests/unit/training/row_checks/test_row_proof.py",),
    ),
    "proved for one number of rows": Fault(
        "a value computed from the number of rows is taken for a constant",
        "training/row_checks/row_proof.py",
        "if is_one_number else SIZES",
        "if is_one_number else FREE",
        ("tests/unit/training/row_checks/test_row_proof.py",),
    ),
    "sum of anything": Fault(
        "a sum over the rows of a batch is taken for a value that does not depend on their number",
        "training/row_checks/row_rules.py",
        "MIXED if zeros is None or np.any(zeros) else FREE",
        "MIXED if zeros is None else FREE",
        ("tests/unit/training/row_checks/test_row_proof.py",),
    ),
    "a function that is called": Fault(
        "a function that a model calls is not checked for mixing rows",
        "training/row_checks/row_proof.py",
        "found = _followed(functions, kinds)",
        "found = [kinds[0]] * len(functions[0].outputs)",
        ("tests/unit/training/row_checks/test_row_proof.py",),
    ),
    "rows of a worker": Fault(
        "mixing of only as many rows as a worker has is not found",
        "training/row_checks/mixing_trial.py",
        "if part < 2 or part in tried:",
        "if True:",
        ("tests/unit/training/row_checks/test_row_mixing.py",),
    ),
    "axis from the last": Fault(
        "a built-in layer of Keras that works along the rows by a negative axis is not checked",
        "training/row_checks/row_mixing.py",
        "any(axis == -rank for rank in ranks)",
        "False",
        ("tests/unit/training/row_checks/test_row_mixing.py",),
    ),
    "other micro-batch": Fault(
        "a worker with another micro-batch takes samples that others also take",
        "run/agreement.py",
        '    "micro_batch",\n',
        "",
        ("tests/unit/run/test_agreement.py",),
    ),
    "number of rows": Fault(
        "a model that depends on the number of rows of its batch trains on a worker's share of them",
        "training/row_checks/mixing_trial.py",
        "_depends_on_its_place(outputs, together, number, tolerance) or",
        "False or",
        ("tests/unit/training/row_checks/test_row_mixing.py",),
    ),
    "faded in": Fault(
        "behavior that a variable set by a callback turns on is not seen when a model is tried",
        "training/row_checks/model_probe.py",
        "self._states(conditions.states_off)",
        "self.states",
        ("tests/unit/training/row_checks/test_row_mixing.py",),
    ),
    "other batches": Fault(
        "workers that give the model different rows train on them",
        "runtime/rounding.py",
        "_ROUNDINGS = 64 ",
        "_ROUNDINGS = 1e6 ",
        ("tests/unit/runtime/test_rounding.py",),
    ),
    "added in evaluation": Fault(
        "losses that layers add in evaluation are taken for those in training",
        "keras_fit/losses_inside.py",
        "known = self._known[training]",
        "known = self._known[True]",
        ("tests/parity/test_fit.py::test_like_keras_in_one_process[2-losses_added_as_sums]",),
    ),
    "another number": Fault(
        "a worker whose layer has another number one level down takes part in training",
        "training/own_values.py",
        "return _attributes(attributes_of(value), depth) or None if _is_own(value) else None",
        "return None",
        ("tests/unit/training/test_same_model.py",),
    ),
    "derivative": Fault(
        "the derivative of GELU that XLA compiles is wrong",
        "models/compiled_functions.py",
        "0.5 * x * (1 - tanh * tanh)",
        "0.5 * x * (1 - tanh)",
        ("tests/unit/models/test_compiled_functions.py",),
    ),
    "told to rest": Fault(
        "a trial of a model inside its call tells the layers of the real pass that they are not training",
        "compat/keras_layers.py",
        "vars(around).update(attributes)",
        "vars(around).update(attributes, training=False)",
        ("tests/parity/test_fit.py::test_like_keras_in_one_process[2-two_inputs_of_static_shape]",),
    ),
    "overflow in a row": Fault(
        "only one gradient of a row that was looked up several times is checked for overflow",
        "keras_fit/model.py",
        "each.values if isinstance(each, tf.IndexedSlices) else each for each",
        "each for each",
        ("tests/unit/keras_fit/test_pieces.py",),
    ),
    "sum on GPUs": Fault(
        "values that workers exchange between steps have a type that GPUs do not sum",
        "runtime/mirrored.py",
        "CARRIER = tf.float64",
        "CARRIER = tf.int32",
        ("tests/unit/runtime/test_mirrored.py",),
    ),
    "some rows": Fault(
        "a trial checks only the first and the last row",
        "training/row_checks/mixing_trial.py",
        "by_halves=(number + training) % 2 == 1",
        "by_halves=False",
        ("tests/unit/training/row_checks/test_row_mixing.py",),
    ),
    "drawn numbers": Fault(
        "integer rows that a model is tried with have equal values in all places",
        "training/row_checks/mixing_trial.py",
        "draw = None if attempt.moves else",
        "draw = None if attempt.training or not attempt.training else",
        ("tests/unit/training/row_checks/test_row_mixing.py",),
    ),
    "now and then": Fault(
        "random mixing of a few rows is checked in one step only",
        "training/row_checks/mixing_trial.py",
        "or self._found_by_many_runs(many))",
        ")",
        ("tests/unit/training/row_checks/test_row_mixing.py",),
    ),
    "hidden state": Fault(
        "a tf.Variable that a layer keeps is not saved",
        "artifacts/state.py",
        "for index, variable in enumerate(hidden_variables(model))}",
        "for index, variable in enumerate([])}",
        ("tests/unit/artifacts/test_hidden_state.py",),
    ),
    "one generator": Fault(
        "a tf.random.Generator draws the same on all workers in a step",
        "training/seeds.py",
        "alone = runtime.local_replicas == 1 and runtime.replicas > 1",
        "alone = False",
        ("tests/multi/test_conformance.py",),
    ),
    "one seed": Fault(
        "tf.random draws the same on all workers in a step",
        "training/seeds.py",
        "runtime.first_replica if number is None else int(number)",
        "0",
        ("tests/unit/training/test_seeds.py",),
    ),
    "one seed of micro-batches": Fault(
        "tf.random draws the same in two micro-batches",
        "training/replica_gradients.py",
        "with seeds_moved(self.runtime.replicas):",
        "with seeds_moved(0):",
        ("tests/unit/training/test_seeds.py",),
    ),
    "one generator of fit": Fault(
        "a tf.random.Generator draws the same on all workers in tfdist.fit",
        "keras_fit/random_numbers.py",
        "keys = tensorflow_random.keys_moved(rank) if rank else",
        "keys = tensorflow_random.keys_moved(0) if rank else",
        ("tests/parity/test_fit.py::test_like_keras_in_one_process[2-random_numbers_of_the_rows]",),
    ),
    "drawn without one": Fault(
        "a backup of tfdist.fit loses the state of draws without a generator",
        "keras_fit/epoch_backup.py",
        "            made.state.assign(drawn)\n",
        "            pass\n",
        ("tests/unit/artifacts/test_hidden_state.py",),
    ),
    "asking trial": Fault(
        "a trial of a model reads the metrics of a layer from all workers, though some try nothing",
        "training/row_checks/model_probe.py",
        "for variable, value in self._of_metrics)]",
        "for variable, value in ())]",
        ("tests/unit/training/row_checks/test_probe_replicas.py",),
    ),
    "late state": Fault(
        "a variable created in the first step counts as saved, but is not",
        "training/step.py",
        "kept = [*self._saved_variables, ",
        "kept = [*state.collect(self.model, self.optimizer, self.variables).values(), ",
        ("tests/unit/training/test_unsaved_state_checks.py",),
    ),
    "unsaved state": Fault(
        "a step sets a variable that no snapshot contains",
        "training/unsaved_state_checks.py",
        "if not last_part(name).startswith(_OF_THE_PROCESS)]",
        "if False]",
        ("tests/unit/training/test_unsaved_state_checks.py",),
    ),
    "state in no backup": Fault(
        "a step of tfdist.fit sets a variable that its backup does not contain",
        "keras_fit/unsaved_state.py",
        "        backup.ask(found)\n\n\n",
        "        pass\n\n\n",
        ("tests/unit/keras_fit/test_unsaved_state.py",),
    ),
    "state of losses": Fault(
        "the state of losses and metrics is in no backup",
        "artifacts/hidden_state.py",
        ", *state_beside_layers(model, hidden)]",
        "]",
        ("tests/unit/keras_fit/test_unsaved_state.py",),
    ),
    "state of schedules": Fault(
        "the state of a learning rate schedule is in no backup",
        "artifacts/hidden_state.py",
        ", *functions, *of_optimizers])",
        ", *functions])",
        ("tests/unit/keras_fit/test_unsaved_state.py",),
    ),
    "middle of a pass": Fault(
        "a fit goes on in the middle of a pass over data that are shuffled with another seed, without a word",
        "artifacts/backup_checks.py",
        "if fit.begins_within_a_pass(epoch, ends):",
        "if False:",
        ("tests/unit/artifacts/test_backup.py",),
    ),
    "backup of a later fit": Fault(
        "the first fit of a program takes the backup of its second",
        "artifacts/backup_checks.py",
        "if written_by > number(backup) and not is_kept:",
        "if False:",
        ("tests/unit/keras_fit/test_epoch_backup.py",),
    ),
    "containers of callbacks": Fault(
        "a Counter of a callback comes back as a dict",
        "artifacts/backup_file.py",
        "return {_name_of(value, _OF_PAIRS): pairs}",
        'return {"dict": pairs}',
        ("tests/unit/keras_fit/test_pieces.py",),
    ),
    "one object or two": Fault(
        "two attributes of a callback that were one object at first, but no longer, are one after a restart",
        "artifacts/callback_state.py",
        "held if stays else copy.copy(held)",
        "held",
        ("tests/unit/keras_fit/test_epoch_backup.py",),
    ),
    "other data": Fault(
        "a fit resumes with other data than before it was killed",
        "keras_fit/data_identity.py",
        "if name in before and before[name] != now[name])",
        "if name in before and before[name] is None)",
        ("tests/unit/keras_fit/test_resumed_data.py::test_a_fit_that_resumes_with_other_data_is_refused",),
    ),
    "taken name": Fault(
        "a metric of an objective replaces the step's own sums",
        "training/own_objective.py",
        "if metric in _TAKEN:",
        "if metric in ():",
        ("tests/unit/training/test_own_objective.py",),
    ),
    "state of own rows": Fault(
        "the model sets a variable of a module, which differs between workers",
        "keras_fit/unsaved_state.py",
        "if unsaved_state_checks.last_part(name) != _GENERATOR\n",
        "if False\n",
        ("tests/unit/keras_fit/test_unsaved_state.py",),
    ),
    "state of rules": Fault(
        "the state of a constraint is in no snapshot",
        "artifacts/hidden_state.py",
        "for part in (variable.regularizer, variable.constraint)]",
        "for part in ()]",
        ("tests/unit/training/test_unsaved_state_checks.py",),
    ),
    "drawing augmentation": Fault(
        "an augmentation does not draw from its seeds",
        "data/augment.py",
        "    if drawing or setting:\n",
        "    if False:\n",
        ("tests/unit/data/test_augment.py",),
    ),
    "exported state": Fault(
        "an export has the initial value of a layer's state",
        "run/results.py",
        "(state.model_variables(copy) | state.hidden(copy)).items()",
        "state.model_variables(copy).items()",
        ("tests/unit/run/test_results.py",),
    ),
    "rules on stages": Fault(
        "a constraint with a state advances on one stage only",
        "training/parallel/assigned_weights.py",
        "    if found := variables_of_rules(model):\n",
        "    if False and (found := variables_of_rules(model)):\n",
        ("tests/unit/training/parallel/test_hidden_on_stages.py",),
    ),
    "drawn anew": Fault(
        "a recomputed layer draws other numbers in the backward pass",
        "training/parallel/recompute.py",
        "    if any(map(draws_anew, kinds)):\n",
        "    if False:\n",
        ("tests/unit/training/test_recompute.py",),
    ),
    "model ranks": Fault(
        "on GPUs each rank of `model` updates replicated values with its own sum of the gradient",
        "training/parallel/mesh_update.py",
        "return self.reduce_gradients(self._alike(kept)), scalars",
        "return self.reduce_gradients(kept), scalars",
        ("tests/unit/training/parallel/test_mesh_update.py",),
    ),
    "devices of others": Fault(
        "a process takes the devices of all workers for its own",
        "runtime/host.py",
        """if "/job:" not in name or name""",
        "if name or name",
        ("tests/multi/test_conformance.py",),
    ),
    "another model": Fault(
        "a worker with another activation takes part in training",
        "training/same_model.py",
        "if (rows[:, 0] == rows[0, 0]).all():",
        "if True:",
        ("tests/unit/training/test_same_model.py",),
    ),
    "fused attention": Fault(
        "the gradient of cuDNN's attention uses another scale",
        "models/cudnn_attention.py",
        "_config(by_head[0], by_head[1], scores, _BACKWARD)",
        "_config(by_head[0], by_head[1], Scores(1.0, scores.is_causal), _BACKWARD)",
        ("tests/unit/models/test_fused_attention.py",),
    ),
    "datagram hash": Fault(
        "anyone who has seen a datagram can forge others",
        "control/datagrams.py",
        " or not hmac.compare_digest(code, self._code(body)):",
        ":",
        (_ATTACKED,),
    ),
    "datagram stamp": Fault(
        "a replayed datagram counts again, whoever sends it",
        "control/datagrams.py",
        "if stamp <= self._newest.get(rank, -1) or took",
        "if took",
        ("tests/unit/control/test_datagrams.py",),
    ),
    "proof": Fault(
        "anyone who connects is accepted as part of the job",
        "control/reception.py",
        "            if not hmac.compare_digest(proof, ",
        "            if False and (proof, ",
        ("tests/e2e/test_attackers.py",),
    ),
    "gRPC": Fault(
        "other machines can reach the TensorFlow port of a local job",
        "control/packet_filter.py",
        "_ALL, _NOTHING = 0xFFFFFFFF, 0",
        "_ALL, _NOTHING = 0xFFFFFFFF, 0xFFFFFFFF",
        ("tests/e2e/test_attackers.py",),
    ),
    "bad weights": Fault(
        "NaN weights are not noticed as long as the loss is finite",
        "training/step.py",
        "tf.math.is_finite(self.update.weight_norm())",
        "tf.constant(True)",
        ("tests/unit/training/test_step.py::test_a_bad_row_that_nobody_looks_up_makes_the_weights_bad",),
    ),
    "own random": Fault(
        "packages of stores draw their pauses from the user's generator",
        "control/optional_packages.py",
        "    isolate_random()\n    return found\n",
        "    return found\n",
        (
            "tests/unit/storage/test_object_store.py::test_a_store_that_makes_one_wait_leaves_the_users_random_numbers_alone",
        ),
    ),
    "store manifest": Fault(
        "the manifest of a snapshot is in the store before its files are",
        "artifacts/remote_snapshots.py",
        """            self._objects.remove(f"{name}/{MANIFEST}")
            self._objects.send_all(""",
        """            self._objects.put_text(f"{name}/{MANIFEST}", text)
            self._objects.send_all(""",
        ("tests/unit/artifacts/test_remote_snapshots.py",),
    ),
    "part stamp": Fault(
        "a snapshot is made of shards of two writes of its step",
        "artifacts/sharded_commit.py",
        'if note is None or note["stamp"] != first["stamp"]]',
        "if note is None]",
        (_PARTS,),
    ),
    "part there": Fault(
        "a snapshot is made of the files that a worker reports as sent, present or not",
        "artifacts/sharded_commit.py",
        "if not _is_there(step, rank, notes[rank], there)]",
        "if False]",
        (_PARTS,),
    ),
    "part anew": Fault(
        "files of a trusted snapshot are replaced",
        "artifacts/sharded_commit.py",
        "                self._remote.withdraw(step)\n",
        "                pass\n",
        (_PARTS,),
    ),
    "part of another run": Fault(
        "files that another run left on a machine are sent as this one's",
        "artifacts/shard_upload.py",
        'note.get("run_id") == run_id and',
        "",
        (_PARTS,),
    ),
    "lost status": Fault(
        "a working copy without status.json is resumed from, whichever run is in the store",
        "artifacts/run_identity.py",
        'or next(filter(None, _named_by_snapshots(folder)), "")',
        'or ""',
        ("tests/unit/run/test_remote_run.py",),
    ),
    "range": Fault(
        "bytes of a snapshot are read from a store without a check of their checksum",
        "artifacts/partial_download.py",
        "if not each.is_intact(_content(Path(snapshot.path) / name, each)):",
        "if False:",
        (_PARTS,),
    ),
    "store lease": Fault(
        "a chief that was stopped for long removes files of another job",
        "storage/store_lease.py",
        "> 2 * _RENEW_SECONDS:",
        "< 0:",
        ("tests/unit/storage/test_object_store.py",),
    ),
    "data version": Fault(
        "an object that changes while it is fetched is accepted",
        "storage/object_copy.py",
        "        self.check_same()  # else the copy may be of both\n",
        "",
        ("tests/unit/storage/test_data_cache.py",),
    ),
    "data record": Fault(
        "a copy of another version of an object is read",
        "storage/object_copy.py",
        "            return self._record_there() == self.record and",
        "            return bool(self._record_there()) and",
        ("tests/unit/storage/test_data_cache.py",),
    ),
    "data pins": Fault(
        "copies are removed while a job reads them",
        "storage/copies.py",
        "if unused and unread and unfetched:",
        "if unfetched:",
        ("tests/unit/storage/test_data_cache.py",),
    ),
    "data range": Fault(
        "bytes of another version of an object are read as a part of it",
        "storage/object_copy.py",
        "        self.check_same()  # else they may be another's\n",
        "",
        ("tests/unit/data/test_stored_sources.py", "tests/unit/data/test_stored_streams.py"),
    ),
    "first values": Fault(
        "workers start with different values",
        "runtime/first_values.py",
        "                variable.assign(value)\n",
        "                pass\n",
        ("tests/unit/runtime/test_first_values.py", "tests/multi/test_conformance.py"),
    ),
    "alike at first": Fault(
        "a variable that differs on one of the workers is not noticed",
        "runtime/first_values.py",
        "(found == found[0]).all(axis=(0, 2))",
        "(found == found[0]).any(axis=(0, 2))",
        ("tests/unit/runtime/test_first_values.py",),
    ),
    "stream files": Fault(
        "each worker reads its own files of a stream, whatever they contain",
        "data/sources/tfrecord.py",
        'len(paths) if options["by_file"] else 1',
        "len(paths)",
        ("tests/unit/data/test_source_tfrecord.py",),
    ),
    "files by file": Fault(
        "some workers read two files of a stream, others one, and each repeats its own",
        "data/streams.py",
        "split.stream_shards % plan.replicas == 0 and plan.even",
        "plan.replicas <= split.stream_shards and plan.even",
        ("tests/unit/data/test_input_pipeline.py",),
    ),
    "length of a shard": Fault(
        "the data that a worker repeats may be shorter than those of others",
        "data/sources/equal_shards.py",
        "tf.where(is_end, tf.equal(count, length), count <= length)",
        "tf.where(is_end, count <= length, count <= length)",
        ("tests/unit/data/test_source_tfrecord.py",),
    ),
    "other records": Fault(
        "files of a stream are identified only by their names and sizes",
        "data/sources/tfrecord.py",
        "contents=lambda: [*folder.checksums(paths), folder.checksum_of_heads(paths)],",
        "contents=lambda: folder.checksums(paths),",
        ("tests/unit/data/test_source_tfrecord.py",),
    ),
    "loss of synchronous servers": Fault(
        "a NaN loss does not stop the run if its gradients are finite",
        "training/parameter_server/synchronous.py",
        "self.remote.apply(self.remote.combine(results), loss, weight)",
        "self.remote.apply(self.remote.combine(results), tf.constant(0.0), weight)",
        ("tests/unit/training/parameter_server/test_server_steps.py",),
    ),
    "a part of a pod's variables": Fault(
        "each worker of a job trains alone",
        "control/resolvers.py",
        'if not (environ.get("TFDIST_WORKERS") or environ.get("TFDIST_ADDRESS"))',
        "if not all(map(environ.get, _OF_A_POD))",
        ("tests/unit/control/test_resolvers.py",),
    ),
    "epochs of another batch": Fault(
        "a run resumed with another batch ends where --epochs counted from the beginning would end it",
        "artifacts/restore.py",
        "    if size and not run.steps and trained != step * global_batch:\n",
        "    if size and not run.steps and trained < 0:\n",
        ("tests/unit/run/test_recovery.py",),
    ),
    "stream order": Fault(
        "a stream skips a file of the store",
        "data/sources/tfrecord.py",
        "return self.records(paths[first::n], compression)",
        "return self.records(paths[first::n][: 28 if n == 1 else None], compression)",
        ("tests/unit/data/test_stored_sources.py", "tests/unit/data/test_source_tfrecord.py"),
    ),
    "stream in any order": Fault(
        "a dataset that yields what is ready first is accepted",
        "data/sources/user.py",
        "if any(map(tensorflow_data.in_any_order, parts)):",
        "if False:",
        ("tests/unit/data/test_source_user.py",),
    ),
    "stream shuffled anew": Fault(
        "a stream whose later samples come in another order at each pass is accepted",
        "data/sources/user.py",
        "elif any(map(_shuffle_apart, parts, again)):",
        "elif False:",
        ("tests/unit/data/test_source_user.py",),
    ),
    "idle decay": Fault(
        "a variable whose optimizer decay rounds to 1 in its type is never trained",
        "training/optimizer.py",
        "dtype.as_numpy_dtype(decay) == 1",
        "False",
        ("tests/unit/training/test_optimizer.py",),
    ),
    "scheduled rollback": Fault(
        "a rollback restores a snapshot that an uninterrupted run does not have",
        "artifacts/restore.py",
        "snapshot, messages = store.newest_valid(steps)",
        "snapshot, messages = store.newest_valid()",
        ("tests/unit/run/test_recovery.py",),
    ),
    "noise of rows": Fault(
        "random layers between layers that are cut draw other numbers on each rank for what all units share",
        "training/parallel/own_noise.py",
        "    return whole.inputs != cut.inputs if cut.drawn is None else whole.drawn != cut.drawn",
        "    return True",
        ("tests/unit/training/parallel/test_tensor.py",),
    ),
    "cut in training": Fault(
        "a model whose layers are cut is checked in inference only",
        "training/parallel/cut_trial.py",
        "for training in (False, True):\n            if whole :=",
        "for training in (False,):\n            if whole :=",
        ("tests/unit/training/test_cut_trial.py",),
    ),
    "initial weights": Fault(
        "a model whose layers are cut is tried with its initial weights, where a 0 hides what comes before it",
        "training/parallel/trial_attempts.py",
        "_DISTURBED = 1.0",
        "_DISTURBED = 0.0",
        ("tests/unit/training/test_cut_trial.py",),
    ),
    "gradients of added losses": Fault(
        "the gradients of losses that layers between cut ones add are not checked",
        "training/parallel/cut_trial.py",
        "of_added = self._gradients(tape, added) if losses else []",
        "of_added = []",
        ("tests/unit/training/test_cut_trial.py",),
    ),
    "draws of all units": Fault(
        "what a layer draws for all units, whatever the part is, is drawn alike on all ranks",
        "training/parallel/own_noise.py",
        "if not _differ(whole, cut) and not _is_shared_by_units(whole, cut):",
        "if False:",
        ("tests/unit/training/parallel/test_tensor.py",),
    ),
    "rows as a bias": Fault(
        "numbers of rows are added to channels where there are as many",
        "compat/keras_addition.py",
        "return not is_one_for_all_rows and not _is_made_of_weights(other)",
        "return False",
        ("tests/unit/compat/test_keras_addition.py",),
    ),
    "decay of Muon's Adam": Fault(
        "what Muon trains by Adam decays by Keras' own rate, whatever --weight_decay is",
        "training/optimizer.py",
        'options.setdefault("adam_weight_decay", config.weight_decay or None)',
        "pass",
        ("tests/unit/training/test_optimizer.py",),
    ),
    "names of what decays": Fault(
        "which weights of a fit decay is asked by their short names, and the answer is kept",
        "compat/keras_optimizers.py",
        "if decays(weight.value)])",
        "if decays(weight)])",
        ("tests/unit/compat/test_keras_optimizers.py",),
    ),
    "copy of another run": Fault(
        "a reader of a run in a store continues from the copy of an earlier run",
        "storage/reader_copy.py",
        "                self._forget_another_run(self.objects)\n",
        "",
        ("tests/unit/storage/test_reader_copy.py",),
    ),
    "flags of the same length": Fault(
        "changed flags of the same length are not fetched",
        "storage/mirror.py",
        '_WRITTEN_ANEW = (".json", ".txt")',
        '_WRITTEN_ANEW = (".json",)',
        ("tests/unit/storage/test_reader_copy.py",),
    ),
    "large channels": Fault(
        "a wrong channel of an output passes the trial of a cut model next to one with large numbers",
        "training/parallel/trial_results.py",
        "_differ(expected, b, tolerance, _MOVES * moved, _without_channels(whole))",
        "_differ(expected, b, tolerance, _MOVES * moved.max())",
        ("tests/unit/training/test_cut_trial.py",),
    ),
    "gradients of large channels": Fault(
        "a wrong gradient passes the trial of a cut model next to that of a channel with large numbers",
        "training/parallel/cut_trial.py",
        "tf.cast(leaf, tf.float32) * inverse_of_largest(leaf) * self._upstream",
        "tf.cast(leaf, tf.float32) * self._upstream",
        ("tests/unit/training/test_cut_trial.py",),
    ),
    "counts of a mask": Fault(
        "BatchNormalization weighs all channels by the first one's count, where a mask runs along them",
        "runtime/batch_norm.py",
        "    counts = tf.reshape(count, [-1])\n",
        "    counts = tf.reshape(count, [-1])[:1]\n",
        ("tests/unit/runtime/test_batch_norm.py",),
    ),
    "arrays in their own precision": Fault(
        "arrays that are shuffled without a seed are not cast as Keras casts them",
        "compat/keras_arrays.py",
        'array_slicing.convert_to_sliceable(adapter._inputs, target_backend="tensorflow")',
        "adapter._inputs",
        ("tests/unit/keras_fit/test_arrays.py",),
    ),
    "recomputed functions": Fault(
        "a function of a layer uses the weights of the forward pass where it is recomputed",
        "training/parallel/recompute.py",
        "            with functions_inline(), again, scope:",
        "            with again, scope:",
        ("tests/unit/training/test_recompute.py",),
    ),
    "training in the second pass": Fault(
        "layers inside a recomputed layer take training for inference in the backward pass",
        "training/parallel/recompute.py",
        "self.call_again() if is_second else contextlib.nullcontext()",
        "contextlib.nullcontext()",
        ("tests/unit/training/parallel/test_gathered.py",),
    ),
    "kept for a block": Fault(
        "a tensor that another layer has kept gets no gradient where a layer is recomputed",
        "training/parallel/recompute.py",
        "if id(tensor) not in known and is_made_of_variables(tensor):",
        "if False:",
        ("tests/unit/training/parallel/test_gathered.py",),
    ),
    "a fork's signal": Fault(
        "a forked helper does not notice that it is asked to end, and the run waits for it for ever",
        "control/signals.py",
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})",
        "signal.pthread_sigmask(signal.SIG_BLOCK, set())",
        ("tests/unit/control/test_signals.py",),
    ),
    "functions keep a trial": Fault(
        "a function of a layer is called in training as a trial traced it: without dropout, with constants",
        "training/stateless_call.py",
        "with keras_layers.outside_the_call(), functions_inline(), scope:",
        "with keras_layers.outside_the_call(), scope:",
        ("tests/unit/training/test_stateless_call.py",),
    ),
    "functions keep a cut": Fault(
        "a function of a layer is called in training as a trial of the cut model traced it",
        "training/row_checks/trial_scope.py",
        "with in_trials(), functions_inline(), contextlib",
        "with in_trials(), contextlib",
        ("tests/unit/training/test_cut_trial.py",),
    ),
    "callbacks of a plain fit": Fault(
        "a resumed plain fit starts with empty early stopping, best values and history",
        "artifacts/backup.py",
        "        self._fit_state.restore(self._trained, self._restored)\n",
        "",
        ("tests/unit/artifacts/test_backup.py",),
    ),
    "callbacks of skipped batches": Fault(
        "callbacks count the skipped batches of a resumed epoch, and set the learning rate by them",
        "artifacts/resumed_epoch.py",
        "        self._mute(count)\n",
        "",
        ("tests/unit/artifacts/test_backup.py",),
    ),
    "second beginning of an epoch": Fault(
        "callbacks keep their state from the second beginning of a resumed epoch",
        "artifacts/resumed_epoch.py",
        "                self._backup.after_skipping()\n",
        "",
        ("tests/unit/artifacts/test_backup.py",),
    ),
    "plain attributes": Fault(
        "a resumed fit starts with the initial values of attributes that a callback changes (KL annealing)",
        "artifacts/fit_state.py",
        '        plain_attributes.restore(model, fields["attributes"])\n',
        "",
        ("tests/unit/artifacts/test_plain_attributes.py",),
    ),
    "lent seed": Fault(
        "the seed that workers agree on stays: arrays of later fits come in one order in all epochs",
        "compat/tensorflow_random.py",
        "    return 0 if _lent is not None and context.global_seed() == _lent[0] else state_digest()",
        "    return state_digest()",
        ("tests/unit/compat/test_tensorflow_random.py",),
    ),
    "one reader at a time": Fault(
        "two readers on a machine fetch a snapshot at once, and each removes the files of the other",
        "artifacts/read_snapshots.py",
        "    with as_sentence(), copies_changed(Path(store.directory).parent):",
        "    with as_sentence():",
        ("tests/unit/artifacts/test_remote_snapshots.py",),
    ),
    "copies of snapshots": Fault(
        "an evaluator continues from the copy of a snapshot that has been replaced in the store",
        "artifacts/read_snapshots.py",
        "        if each > newest or each == (newest if step < 0 else step):",
        "        if False:",
        ("tests/unit/artifacts/test_remote_snapshots.py",),
    ),
    "pattern in a folder's name": Fault(
        "TFRecord files of a neighboring folder are read",
        "data/sources/tfrecord.py",
        'folder = re.sub(r"[*?\\[\\\\]", r"\\\\\\g<0>", self._data_dir)',
        "folder = self._data_dir",
        ("tests/unit/data/test_source_tfrecord.py",),
    ),
    "linked texts": Fault(
        "a text that a link also points to is read twice",
        "data/sources/text_files.py",
        "found.setdefault(os.path.realpath(path), (inside, path))",
        "found.setdefault(path, (inside, path))",
        ("tests/unit/data/test_source_text.py",),
    ),
    "noise of parts": Fault(
        "random layers between layers that are cut draw the same numbers for every rank's part",
        "training/parallel/tensor.py",
        "    if whole.of_layer or whole.by_tensorflow:\n",
        "    if False:\n",
        ("tests/unit/training/parallel/test_tensor.py",),
    ),
    "rollback to a backup": Fault(
        "a rollback restores a backup, which a stopped run may not have",
        "artifacts/restore.py",
        "        others = ()",
        "        pass",
        ("tests/unit/run/test_recovery.py",),
    ),
    "backup of the last step": Fault(
        "a run resumed from a backup of its last step deletes it, and saves nothing",
        "run/recovery.py",
        '{"must_be_saved": not files.is_own(snapshot)}',
        '{"must_be_saved": False}',
        ("tests/unit/run/test_recovery.py",),
    ),
    "best before a rollback": Fault(
        "a rollback removes the best snapshot, which --keep_best keeps",
        "artifacts/writer.py",
        "if doomed > step and doomed in kept:",
        "if False:",
        ("tests/unit/run/test_recovery.py",),
    ),
    "scores of the last step": Fault(
        "the snapshot of the last step is written before it is evaluated, without scores",
        "training/loop.py",
        "if schedule.save_at_evaluation and step == schedule.target and not stopped:",
        "if False:",
        ("tests/unit/training/test_loop.py",),
    ),
    "clock of rollbacks": Fault(
        "how many batches a rollback skips depends on how fast the steps are, and on where the run was stopped",
        "run/session_hooks.py",
        "past = period_end if restore.scheduled(self.recovery.job.config).periods else step",
        "past = step",
        ("tests/unit/run/test_session.py",),
    ),
    "best of NaN": Fault(
        "an evaluation with NaN may be the best",
        "artifacts/policy.py",
        "if math.isfinite(score)}  # NaN is no best",
        "}",
        ("tests/unit/artifacts/test_writer.py",),
    ),
    "another batch": Fault(
        "a run resumed with another batch starts at another sample than it had reached",
        "run/progress.py",
        'self._skipped = manifest["consumed"] - step * self.global_batch',
        'self._skipped = manifest["skipped_samples"]',
        ("tests/unit/run/test_progress.py",),
    ),
    "own files": Fault(
        "where each worker reads its own files, a resumed run skips too many samples",
        "data/streams.py",
        "numbered = _shard(split, reading, replica, cut, consumed // cut)",
        "numbered = _shard(split, reading, replica, cut, consumed)",
        ("tests/unit/data/test_input_pipeline.py",),
    ),
    "count of rollbacks": Fault(
        "a resumed run starts with a rollback count of 0",
        "run/recovery.py",
        'same.get("rollbacks", 0)',
        "0",
        ("tests/unit/run/test_recovery.py",),
    ),
    "sums of an interval": Fault(
        "the first log line of a resumed run leaves out the steps before its snapshot",
        "run/recovery.py",
        'self.interval_sums.restore(same.get("interval_sums", {}))',
        "pass",
        ("tests/unit/run/test_recovery.py",),
    ),
    "scores of other weights": Fault(
        "a snapshot is given the scores of an earlier evaluation",
        "run/recovery.py",
        "self.evaluated[1] if self.evaluated[0] == step else {}",
        "self.evaluated[1]",
        ("tests/unit/run/test_recovery.py",),
    ),
    "lease of backups": Fault(
        "two jobs write one folder of backups at once",
        "run/local_backup.py",
        "if os.path.realpath(place) == os.path.realpath(run_folder):",
        "if place:",
        ("tests/unit/run/test_recovery.py",),
    ),
    "several chiefs": Fault(
        "each of several workers acts as the only one",
        "runtime/factory.py",
        "if cluster.size > 1 and not strategy.several_workers:",
        "if not cluster.size:",
        ("tests/unit/runtime/test_factory.py",),
    ),
    "small gradients": Fault(
        "a gradient that is far smaller than others may depend on other rows",
        "training/row_checks/row_gradients.py",
        "doubtful = [index for index in small if",
        "doubtful = [index for index in () if",
        ("tests/unit/training/row_checks/test_row_mixing.py",),
    ),
}


def noticed(fault: Fault | None, tests: tuple[str, ...]) -> str:
    """Returns the first test that fails in a copy of the repository with the fault; "" if none fails."""
    with faulty_copy(*((fault.file, fault.text, fault.other) if fault else ())) as copy:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests],
            cwd=copy,
            env={**ENVIRONMENT, "PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
        )
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if done.returncode not in (0, 1) or bool(failed) != bool(done.returncode):
            raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
        return failed[0] if failed else ""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *FAULTS], metavar="NAME")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args(arguments)
    names: list[str] = given.names
    if given.list:
        print("\n".join(f"{name}: {fault.what} ({fault.file})" for name, fault in FAULTS.items()))
        return 0
    chosen = {name: FAULTS[name] for name in names} if names else FAULTS
    missed = []
    for name, fault in chosen.items():
        begun = time.monotonic()
        by = noticed(fault, fault.tests)
        if not by:
            missed.append(name)
        print(f"{name}: {fault.what}: {by or 'NOT noticed'} ({time.monotonic() - begun:.0f} s)", flush=True)
    every = tuple(dict.fromkeys(test for fault in chosen.values() for test in fault.tests))
    if not names and (by := noticed(None, every)):
        raise SystemExit(f"without a fault: {by}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
