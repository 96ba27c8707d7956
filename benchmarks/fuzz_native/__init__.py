"""Coverage-guided fuzzing of the code that reads untrusted files and inputs (``make fuzz-native``).

A target is a module with ``seeds()``, the initial corpus; ``run(data)``, which raises if an outcome
is not allowed; and, if random bytes would mostly be rejected early, a function
``mutate(data, largest, seed)``. Allowed outcomes are a result, and an ``sg.SubgraphError`` that is
not an ``sg.InternalError``. Every other exception, a crash, a hang and too much memory are
findings.

Atheris runs a target in a worker process; the supervisor starts the next worker after a crash::

    PYTHONPATH=.:benchmarks python -m fuzz_native text models --seconds 600
    PYTHONPATH=.:benchmarks python -m fuzz_native.worker text --repeat FILE   # one finding again
"""
