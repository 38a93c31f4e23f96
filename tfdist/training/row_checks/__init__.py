"""May the rows of a batch be divided over workers and micro-batches? What is found out, once, before the first step, of
a model, an objective or an augmentation of the user's own.

Ask `row_trials` (for tfdist.train) or keras_fit/forward.py (for tfdist.fit): they ask `row_mixing` whether outputs
depend on other rows, which `row_proof` proves from the graph (rules: `row_rules`, `row_shape_rules`), or `mixing_trial`
tries; `added_losses` how losses of layers depend on rows; `row_gradients` whether gradients are sums over rows.
"""
