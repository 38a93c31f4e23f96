"""Models, and faster or safer forms of what models call.

Models: mlp.py, cnn.py, applications.py, transformer.py and vit.py. model_names.py lists their names; build_model.py
makes a model of a name. They share blocks.py, experts.py, inputs.py and keras_untyped.py;
transformer_sizes.py has the sizes, and cnn_sizes.py what the cnn does with those of an image, for the planner too.
Other forms of Keras' and TensorFlow's operations, also in models of the user's own: compiled_functions.py,
cudnn_attention.py, embedding_rows.py, fused_attention.py, fused_batch_norm.py, missing_rows.py, nested_functions.py and
short_softmax.py.
"""
