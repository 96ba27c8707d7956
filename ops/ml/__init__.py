"""Operators of ai.onnx.ml: trees, support vectors, linear models, encoders."""
