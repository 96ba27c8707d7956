"""Coverage-guided fuzzing of what reads files and inputs of others (``make fuzz-native``).

A target is a module with ``seeds()``, inputs to begin with, made from the test suites;
``run(data)``, which raises where an outcome is not allowed; and, where random bytes would not reach
far, ``mutate(data, largest, seed)``. Allowed are a result and an ``sg.SubgraphError`` that is not
an ``sg.InternalError``. Every other exception, a crash, a hang and too much memory are findings.

Atheris drives a target in a worker process; the supervisor starts the next worker after a crash::

    PYTHONPATH=.:benchmarks python -m fuzz_native text models --seconds 600
    PYTHONPATH=.:benchmarks python -m fuzz_native.worker text --repeat FILE   # one finding again
"""
