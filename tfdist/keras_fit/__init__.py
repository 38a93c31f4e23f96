"""`tfdist.fit`, `tfdist.evaluate` and `tfdist.predict`: Keras' own loops, around a model whose forward pass and update
are spread over the workers."""
