"""ONNX Runtime's own operators, defined by bodies of standard operators."""
