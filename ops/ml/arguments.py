"""Arguments of the kernels of ai.onnx.ml: encoders, support vector machines, tree ensembles."""

from __future__ import annotations

from subgraph.engine.codegen.arguments import Address, KernelArguments

NODE_BYTES = 24  # bytes of a node of a packed tree ensemble, see trees_kernels.py
# Samples that go through a tree before the next tree is read; estimate: scores and the tree stay in
# the L1 cache.
BLOCK_SAMPLES = 32

# The probabilities of classes follow from those of pairs by an iteration, of which these are
# libsvm's constants: the least probability of a class of a pair, the most iterations, and the
# deviation from the solution that ends the iteration, divided by the number of classes.
LEAST_PROBABILITY = 1e-7
MAX_ITERATIONS = 100
ACCURACY = 0.005


class SearchArguments(KernelArguments):
    """Arguments of `search`; a work unit is an element.

    Attributes:
        x: First element.
        y: First value.
        keys: The keys in ascending order, without NaN.
        values: The value of each key, then that of other elements, then that of NaN.
        count: Number of keys, at least 1.
    """

    x: Address
    y: Address
    keys: Address
    values: Address
    count: int


class DistancesArguments(KernelArguments):
    """Arguments of `distances`; a work unit is four samples; past the end the last one repeats.

    Attributes:
        x: ``[samples][features]``, float32.
        y: Squared distances, ``[samples][vectors]``, float32.
        table: The support vectors, ``[features][vectors]``, padded to whole pairs of SIMD vectors.
        samples: Number of samples.
        features: Features of a sample.
        vectors: Number of support vectors.
    """

    x: Address
    y: Address
    table: Address
    samples: int
    features: int
    vectors: int


class PairScoresArguments(KernelArguments):
    """Arguments of `pair_scores`; a work unit is a sample.

    Attributes:
        products: The kernel function of samples and vectors, ``[samples][vectors]``, float64.
        scores: ``[samples][pairs]``, float32.
        coefficients: ``[pairs][vectors]``, float64.
        constants: Added to the scores of each pair, float64.
        ends: Index of the first vector of each class, then the number of vectors; int64.
        classes: Number of classes.
        vectors: Number of support vectors.
    """

    products: Address
    scores: Address
    coefficients: Address
    constants: Address
    ends: Address
    classes: int
    vectors: int


class VotesArguments(KernelArguments):
    """Arguments of `votes`; a work unit is a sample.

    Attributes:
        scores: ``[samples][pairs]``, float32.
        winners: The class of each sample, as its index, int64.
        classes: Number of classes.
        pairs: Number of pairs of classes.
        scratch: Scratch of the first worker: an int64 for each class.
        scratch_bytes: Bytes from a worker's scratch to the next one's.
    """

    scores: Address
    winners: Address
    classes: int
    pairs: int
    scratch: Address
    scratch_bytes: int


class ProbabilitiesArguments(KernelArguments):
    """Arguments of `class_probabilities`; a work unit is a sample.

    Attributes:
        pairs: The probability of the first class of each pair, ``[samples][pairs]``, float64.
        y: ``[samples][classes]``, float32.
        classes: Number of classes.
        scratch: Scratch of the first worker: ``classes * (classes + 2)`` elements of float64.
        scratch_bytes: Bytes from a worker's scratch to the next one's.
    """

    pairs: Address
    y: Address
    classes: int
    scratch: Address
    scratch_bytes: int


class EnsembleArguments(KernelArguments):
    """Arguments of `ensemble`; a work unit is a block of `BLOCK_SAMPLES` samples.

    Attributes:
        x: ``[samples][features]``, float32.
        scores: ``[samples][targets]``, float32.
        labels: The label of each sample, int64; 0: only scores are computed.
        nodes: The first node, of `NODE_BYTES` each; see ``trees_kernels.py``.
        roots: The root of each tree, in bytes from the first node; int32.
        targets: The target of each vote, int32.
        weights: The weight of each vote, float32.
        base: Added to the score of each target, float32.
        class_labels: The label of each class, int64.
        samples: Number of samples.
        features: Features of a sample.
        count: Number of targets.
        trees: Number of trees.
        divisor: Sums of votes are divided by this.
        base_votes: Whether base values count as votes for their targets (1).
        scratch: Scratch of the first worker: a byte for each score of a block.
        scratch_bytes: Bytes from a worker's scratch to the next one's.
        voted: Of two classes the one that all leaves vote for.
        second_above: Score of ``voted`` above which a sample is of the second class.
        first_constant: The first class's score is ``first_constant + first_factor * score`` of
            ``voted``.
        first_factor: See ``first_constant``.
    """

    x: Address
    scores: Address
    labels: Address
    nodes: Address
    roots: Address
    targets: Address
    weights: Address
    base: Address
    class_labels: Address
    samples: int
    features: int
    count: int
    trees: int
    divisor: float
    base_votes: int
    scratch: Address
    scratch_bytes: int
    voted: int
    second_above: float
    first_constant: float
    first_factor: float
