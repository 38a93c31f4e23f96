"""Models, and faster or safer forms of operations that models use.

Models: mlp.py, cnn.py, applications.py, transformer.py and vit.py. model_names.py lists their names; build_model.py
builds a model from a name. They share blocks.py, experts.py, inputs.py and keras_untyped.py. transformer_sizes.py has
the sizes of transformers, and cnn_sizes.py how the cnn depends on the image size; the planner uses both, too.
Other forms of Keras' and TensorFlow's operations, used in users' models as well: compiled_functions.py,
cudnn_attention.py, embedding_rows.py, fused_attention.py, fused_batch_norm.py, missing_rows.py, nested_functions.py and
short_softmax.py.
"""
