"""Everything that tfdist uses of TensorFlow and Keras although it is not public. Each private name appears only in this
package, in a function that says what it relies on and what breaks without it, so that an upgrade breaks one place.
"""
