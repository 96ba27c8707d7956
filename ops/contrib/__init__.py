"""ONNX Runtime's own operators, by the standard's."""
