"""Everything of TensorFlow and Keras that is used though it is not public. Each private name stands here and nowhere
else, in a function that says what it relies on and what breaks without it, so that an upgrade breaks one place.
"""
