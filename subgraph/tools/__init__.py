"""Tools: the command line, benchmarks, profiles, accuracy, warm-up, ONNX's backend interface."""
