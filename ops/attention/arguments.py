"""Arguments of the kernels of Attention, LinearAttention and RotaryEmbedding."""

from __future__ import annotations

from subgraph.engine.codegen.arguments import Address, KernelArguments


class AttentionOperands(KernelArguments):
    """Operands and sizes of fused attention; all strides are bytes.

    Elements of Q and of the output along a row are contiguous.

    Attributes:
        q: First element of the queries.
        k: First element of the keys.
        v: First element of the values.
        y: First element of the output.
        mask: First element of what is added to the scaled scores; 0: none.
        queries: Queries of a head.
        keys: Keys of a head.
        key_size: Elements of a key.
        value_size: Elements of a value.
        heads: Heads of Q.
        sharing: Heads of Q that share a head of K and V.
        q_batch: Stride of Q between samples.
        q_head: Between heads.
        q_row: Between queries.
    """

    q: Address
    k: Address
    v: Address
    y: Address
    mask: Address
    queries: int
    keys: int
    key_size: int
    value_size: int
    heads: int
    sharing: int
    q_batch: int
    q_head: int
    q_row: int


class OutputStrides(KernelArguments):
    """Strides of the output and of the mask, in bytes.

    Attributes:
        y_batch: Stride of the output between samples.
        y_head: Between heads.
        y_row: Between queries.
        mask_batch: Stride of the mask between samples.
        mask_head: Between heads.
        mask_row: Between queries; 0: one row for all.
        mask_key: Between keys.
    """

    y_batch: int
    y_head: int
    y_row: int
    mask_batch: int
    mask_head: int
    mask_row: int
    mask_key: int


class LineStrides(KernelArguments):
    """Strides of K and V, in bytes. Both are lines of adjacent elements.

    A line is the elements of one key (value), or one element of all keys (values).

    Attributes:
        k_batch: Stride of K between samples.
        k_head: Between heads.
        k_line: Between lines.
        k_across: Whether a line of K is an element of all keys (1).
        v_batch: Stride of V between samples.
        v_head: Between heads.
        v_line: Between lines.
        v_across: Whether a line of V is an element of all values (1).
    """

    k_batch: int
    k_head: int
    k_line: int
    k_across: int
    v_batch: int
    v_head: int
    v_line: int
    v_across: int


class AttentionArguments(AttentionOperands, LineStrides, OutputStrides):
    """Arguments of `attention`; a work unit is some panels of queries of one head.

    There are batch * heads * ceil(panels / panels of a unit) units. A mask with a stride of queries
    needs keys one element apart.

    A worker's scratch holds, with a panel of ``nv * lanes`` queries, ``key_size + value_size + 3``
    rows of a panel for each panel of a unit, a row for each key of a block, and the copies.

    Attributes:
        k_panel: The panel (``subgraph.engine.codegen.panel``) for K's kind of lines.
        v_panel: The panel for V's.
        scale: Factor of the scores.
        causal: Whether query i sees keys up to ``i + offset`` only (1).
        offset: Keys before the first query.
        keys_block: Keys of a block.
        panels: Panels of a unit.
        scratch: Scratch of the first worker, aligned to 64 bytes.
        scratch_bytes: Bytes from a worker's scratch to the next one's.
        k_pitch: Bytes between the lines of the copy of a block of K; 0: it is read in place.
        v_pitch: The same of V.
        zero_unseen: Whether a query that may look at no key gives 0 (1), not NaN (0).
    """

    k_panel: Address
    v_panel: Address
    scale: float
    causal: int
    offset: int
    keys_block: int
    panels: int
    scratch: Address
    scratch_bytes: int
    k_pitch: int
    v_pitch: int
    zero_unseen: int


class ElementStrides(KernelArguments):
    """Strides of K and V, in bytes.

    Attributes:
        k_batch: Stride of K between samples.
        k_head: Between heads.
        k_row: Between keys.
        k_element: Between the elements of a key.
        v_batch: Stride of V between samples.
        v_head: Between heads.
        v_row: Between values.
        v_element: Between the elements of a value.
    """

    k_batch: int
    k_head: int
    k_row: int
    k_element: int
    v_batch: int
    v_head: int
    v_row: int
    v_element: int


class FewQueriesArguments(AttentionOperands, ElementStrides, OutputStrides):
    """Arguments of `few_queries`; a work unit is a head with all its queries.

    The elements of a value are adjacent, those of a key unless ``across``, a mask's keys too. A
    worker's scratch holds for each query the scores of all keys, rounded up to whole vectors, and
    one element more.

    Attributes:
        scale: Factor of the scores.
        causal: Whether query i sees keys up to ``i + offset`` only (1).
        offset: Keys before the first query.
        scratch: Scratch of the first worker, aligned to 64 bytes.
        scratch_bytes: Bytes from a worker's scratch to the next one's.
        zero_unseen: Whether a query that may look at no key gives 0 (1), not NaN (0).
    """

    scale: float
    causal: int
    offset: int
    scratch: Address
    scratch_bytes: int
    zero_unseen: int


class LinearAttentionArguments(KernelArguments):
    """Arguments of `linear_attention`; a work unit is a head of keys and values of a sample.

    Attributes:
        query: ``[batch][tokens][heads][keys]``.
        key: ``[batch][tokens][owners][keys]``.
        value: ``[batch][tokens][owners][values]``.
        past: The state to begin with, shaped as ``state``, if there is one.
        decay: The factors of the state, ``[batch][tokens][owners][decays]``, if it decays.
        beta: Update rates, ``[batch][tokens][betas]``, for the delta rules.
        y: ``[batch][tokens][heads][values]``.
        state: ``[batch][owners][keys][values]``.
        tokens: Tokens of a sample.
        heads: Heads of queries.
        owners: Heads of keys and values.
        keys: Elements of a key.
        values: Elements of a value.
        scale: Factor of the queries.
        decays: Factors of a head: 1 or ``keys``.
        betas: Rates of a token: 1 or ``owners``.
        scratch: Scratch of the first worker: a value.
        scratch_bytes: Bytes from a worker's scratch to the next one's.
    """

    query: Address
    key: Address
    value: Address
    past: Address
    decay: Address
    beta: Address
    y: Address
    state: Address
    tokens: int
    heads: int
    owners: int
    keys: int
    values: int
    scale: float
    decays: int
    betas: int
    scratch: Address
    scratch_bytes: int


class BiasArguments(KernelArguments):
    """Arguments of `bias`; a work unit is a row of y.

    Attributes:
        y: What is added to the scores, ``[batch][heads][queries][keys]``.
        mask: First element of the mask, if there is one.
        mask_batch: Elements between samples of the mask.
        mask_head: Between heads.
        mask_row: Between queries.
        mask_key: Between keys.
        mask_keys: Keys that the mask has; later ones are not seen.
        heads: Heads of y.
        queries: Queries of a head.
        keys: Keys of a head.
        causal: Whether a query sees no key after it (1).
        past: Keys before the first query.
        left: Keys before its own that a query sees; -1: all.
        right: Keys after its own that a query sees; -1: all.
        counts: int64, how many keys of each sample count, the queries being the last of them; 0:
            all keys of all samples.
        flags: For each row, as an element: whether it sees anything.
    """

    y: Address
    mask: Address
    mask_batch: int
    mask_head: int
    mask_row: int
    mask_key: int
    mask_keys: int
    heads: int
    queries: int
    keys: int
    causal: int
    past: int
    left: int
    right: int
    counts: Address
    flags: Address


class RotateArguments(KernelArguments):
    """Arguments of `rotate`; a work unit is a token of a sample.

    Attributes:
        x: First element of the input.
        y: First element of the output, which has the same strides.
        cosines: Rows of ``half`` elements.
        sines: Rows of ``half`` elements.
        positions: The row of each token, int64; 0: the number of the token.
        heads: Heads of a token.
        tokens: Tokens of a sample.
        size: Elements of a head.
        half: Pairs of a head that are rotated.
        batch_stride: Bytes between samples.
        head_stride: Bytes between heads.
        token_stride: Bytes between tokens.
        rows: Rows of the cosines.
    """

    x: Address
    y: Address
    cosines: Address
    sines: Address
    positions: Address
    heads: int
    tokens: int
    size: int
    half: int
    batch_stride: int
    head_stride: int
    token_stride: int
    rows: int
