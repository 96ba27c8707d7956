"""Arguments of the kernels of ai.onnx.ml: encoders, support vector machines, tree ensembles."""

from __future__ import annotations

from subgraph.engine.codegen.arguments import Address, KernelArguments


class SearchArguments(KernelArguments):
    """Arguments of `search`; a work unit is an element.

    Attributes:
        x: First element.
        y: First value.
        keys: The keys in ascending order, without NaN.
        values: The values of the keys, of other elements, and of NaN.
        count: Number of keys.
    """

    x: Address
    y: Address
    keys: Address
    values: Address
    count: int


class DistancesArguments(KernelArguments):
    """Arguments of `distances`; a work unit is four samples, of which the last may repeat.

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
        constants: What is added to the scores of each pair, float64.
        ends: Where the vectors of each class begin, and their number; int64.
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
        winners: The class of each sample, int64.
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


class JoinedArguments(KernelArguments):
    """Arguments of `joined`; a work unit is a sample.

    Attributes:
        pairs: The probability of the first class of each pair, ``[samples][pairs]``, float64.
        y: ``[samples][classes]``, float32.
        classes: Number of classes.
        scratch: Scratch of the first worker: ``classes * (classes + 2)`` of float64.
        scratch_bytes: Bytes from a worker's scratch to the next one's.
    """

    pairs: Address
    y: Address
    classes: int
    scratch: Address
    scratch_bytes: int


class EnsembleArguments(KernelArguments):
    """Arguments of `ensemble`; a work unit is a block of samples.

    Attributes:
        x: ``[samples][features]``, float32.
        scores: ``[samples][targets]``, float32.
        labels: The label of each sample, int64, unless only scores are wanted.
        nodes: First record of the nodes, see ``trees_kernels.py``.
        roots: The root of each tree, in bytes from the first node; int32.
        targets: The target of each vote, int32.
        weights: The weight of each vote, float32.
        base: What is added to the score of each target, float32.
        class_labels: The label of each class, int64.
        samples: Number of samples.
        features: Features of a sample.
        count: Number of targets.
        trees: Number of trees.
        divisor: What sums are divided by.
        base_votes: Whether a target that has only a base value counts as voted for.
        scratch: Scratch of the first worker: a byte for each score of a block.
        scratch_bytes: Bytes from a worker's scratch to the next one's.
        voted: Of two classes the one that all leaves vote for.
        second_above: Score of ``voted`` above which a sample is of the second class.
        first_constant: The first class's score is this,
        first_factor: and so many times the score of ``voted``.
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
