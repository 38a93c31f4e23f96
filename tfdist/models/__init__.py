"""Models, and faster or safer forms of what models call.

    models             mlp.py, cnn.py, applications.py, transformer.py, vit.py; their names in model_names.py, how a
                       name becomes a model in build_model.py
    what they share    blocks.py, experts.py, inputs.py, keras_untyped.py
    forms of Keras'    compiled_functions.py, cudnn_attention.py, embedding_rows.py, fused_attention.py,
    operations         fused_batch_norm.py, missing_rows.py, nested_functions.py, short_softmax.py: they also act in
                       models of the user's own
"""
