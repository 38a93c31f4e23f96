"""May the rows of a batch be divided over workers and micro-batches? These checks find out, once, before the first
step, for a user's own model, objective or augmentation.

The entry points are `row_trials` (for tfdist.train) and keras_fit/forward.py (for tfdist.fit). They ask `row_mixing`
whether outputs depend on other rows: `row_proof` proves that they do not, from the graph (rules: `row_rules`,
`row_shape_rules`), or else `mixing_trial` tries it. They ask `added_losses` how losses that layers add depend on rows.
`row_gradients` finds out whether gradients are sums over rows.
"""
