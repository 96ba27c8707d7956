"""Fuzzing with operands that do not fit: every operator, every version, between guard pages.

An honest sample of one node (`samples`) is damaged in one or two places
(`damage`): a dimension one longer, one shorter, 0 or 1, a dimension more or less, an
index out of range, an attribute of 0, -1, NaN or a huge number, an unknown text. The model is
declared with sizes, with symbolic ones, without any, or has operands as constants. Without declared
sizes it runs the honest operands first, then several damaged sets, so that these meet plans for new
shapes; each set counts as a case. CPU, REFERENCE, OPENCL (in a share of the cases) and ONNX Runtime
then either agree on the result or refuse it. Models run in a process that may die; that is
reported, and the next process goes on.

    SUBGRAPH_GUARD=end PYTHONPATH=.:benchmarks python -m wrong_sizes --count 10000

With ``--nodes 4`` a model joins four samples (`graphs`): operands of one, sizes and indices too,
are computed from results of others. Only our devices are compared then.

A model is its seed and number: ``--start N --count 1`` repeats one. On Oclgrind what it writes to
OCLGRIND_LOG is a finding, too. Findings are counted by kind:

- ``crash``, ``hang``: the process died at a guard page (the report says where) or gave no answer
- ``raw``: an exception that is no SubgraphError, or an InternalError
- ``verdict``: one of our devices refuses what another computes
- ``values``: our devices give different results
- ``outside``: Oclgrind saw an access outside of a buffer, or a race
- ``lax``, ``strict``, ``other``: against ONNX Runtime, for samples on which it agrees when honest;
  ``excused`` are those of which `reasons` says why
"""
