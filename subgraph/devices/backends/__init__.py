"""Devices over other libraries, such as ONNX Runtime, each imported when it is first named."""
