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
        mask: First element of the mask, added to the scaled scores; 0: none.
        sinks: Scores of the attention sinks, one for each head of Q; 0: none.
        queries: Queries of a head.
        keys: Keys of a head.
        key_size: Elements of a key.
        value_size: Elements of a value.
        heads: Heads of Q.
        sharing: Adjacent heads of Q that share a head of K and V.
        q_batch: Stride of Q between samples.
        q_head: Between heads.
        q_row: Between queries.
        k_batch: Stride of K between samples.
        k_head: Between heads.
        v_batch: Stride of V between samples.
        v_head: Between heads.
        y_batch: Stride of the output between samples.
        y_head: Between heads.
        y_row: Between queries.
        mask_batch: Stride of the mask between samples.
        mask_head: Between heads.
        mask_row: Between queries; 0: one row for all.
        mask_key: Between keys.
        sink_head: Stride of the sinks between heads.
        sink_row: Between queries, if those are heads that share their keys; else 0.
        scale: Factor of the scores.
        softcap: Bound c of the scores, before the mask is added: the kernel computes
            ``c * tanh(score)``, and ``scale`` has the factor 1 / c. 0: no bound.
        causal: Whether query i sees keys up to ``i + offset`` only (1).
        offset: Keys before the first query.
        starts: Instead of ``offset`` one int64 for each sample; 0: there are none.
        window: Keys that a causal query sees at most, the last ones; 0: no limit.
        scratch: Scratch of the first worker, aligned to 64 bytes.
        scratch_bytes: Bytes from a worker's scratch to the next one's.
        zero_unseen: Whether a query that sees no key gives 0 (1), not NaN (0); with 2 one with a
            score of NaN gives 0 as well.
    """

    q: Address
    k: Address
    v: Address
    y: Address
    mask: Address
    sinks: Address
    queries: int
    keys: int
    key_size: int
    value_size: int
    heads: int
    sharing: int
    q_batch: int
    q_head: int
    q_row: int
    k_batch: int
    k_head: int
    v_batch: int
    v_head: int
    y_batch: int
    y_head: int
    y_row: int
    mask_batch: int
    mask_head: int
    mask_row: int
    mask_key: int
    sink_head: int
    sink_row: int
    scale: float
    softcap: float
    causal: int
    offset: int
    starts: Address
    window: int
    scratch: Address
    scratch_bytes: int
    zero_unseen: int


class PanelAttentionArguments(AttentionOperands):
    """Arguments of both kernels `attention`; a work unit is some panels of queries of one head.

    There are batch * heads * ceil(panels of a head / panels of a unit) units. A mask whose rows
    differ (``mask_row`` is not 0) has adjacent keys. K and V are lines of adjacent elements: a line
    is the elements of one key (value), or one element of all keys (values).

    Attributes:
        k_line: Stride of K between lines.
        k_across: Whether a line of K is one element of all keys (1).
        v_line: Stride of V between lines.
        v_across: Whether a line of V is one element of all values (1).
        keys_block: Keys of a block.
        panels: Panels of a unit.
    """

    k_line: int
    k_across: int
    v_line: int
    v_across: int
    keys_block: int
    panels: int


class AttentionArguments(PanelAttentionArguments):
    """Arguments of `attention` over contraction tiles.

    A worker's scratch has rows of ``nv * lanes`` elements, one for each query of a panel: for each
    panel of a unit ``key_size + value_size + 3`` (queries, results; maximum, sum and factor of the
    softmax), then one for each key of a block and one for the sink (scores). If scores are bounded
    and there is a mask, as many rows hold the mask of a block. Behind them is room for the values
    of a block of keys, ``value_size`` elements each, if they are copied.

    Attributes:
        k_panel: The panel (``subgraph.engine.codegen.panel``) for K's kind of lines.
        v_panel: The panel for V's.
        v_copy: Bytes from a worker's scratch to the copied values; 0: they are read where they are.
    """

    k_panel: Address
    v_panel: Address
    v_copy: int


class MatrixAttentionArguments(PanelAttentionArguments):
    """Arguments of `attention` over matrix tiles.

    Panels have 32 queries. Below, sizes are rounded up to whole steps of 32, and ``value_size`` to
    whole vectors of 16. A worker's scratch has for each panel of a unit the registers of its
    queries, ``64 * key_size`` bytes, its results, ``128 * value_size`` bytes, and two numbers for
    each query: maximum and sum of the softmax. For a block of keys follow the registers of the
    keys, those of the values, those of the weights, ``64 * keys_block`` bytes, the scores, 32 rows
    of float32, and a vector and two numbers of float32 for each query.

    Attributes:
        panel_bytes: Bytes of a panel.
        v_registers: Bytes from the registers of the keys to those of the values.
        weights: To those of the weights.
        scores: To the scores.
        rows: To the vectors of the queries.
        line: Bytes between rows of scores.
        block_steps: Steps of matrix tiles along a block.
    """

    panel_bytes: int
    v_registers: int
    weights: int
    scores: int
    rows: int
    line: int
    block_steps: int


class FewQueriesArguments(AttentionOperands):
    """Arguments of `few_queries`; a work unit is a head with all its queries.

    The elements of a value are adjacent, a mask's keys too, and of K the elements of a key or, if
    ``across``, the keys. A worker's scratch holds for each query the scores of all keys and of the
    sink, rounded up to whole vectors, and then for each query the sum of its weights.

    Attributes:
        k_row: Stride of K between keys.
        k_element: Between the elements of a key.
        v_row: Stride of V between values.
        row_position: Positions from a query to the next one: 1; 0 for one query of several heads.
    """

    k_row: int
    k_element: int
    v_row: int
    row_position: int


# Vectors of a strip of LinearAttention's state. With two, and two rows at a time, the sums of a
# column are four independent ones, as many as an FMA takes cycles.
STATE_STRIP = 2


class LinearAttentionArguments(KernelArguments):
    """Arguments of `linear_attention`; a work unit is a strip of a head's state in a sample.

    The strips of a head are the columns of its state, `STATE_STRIP` vectors at a time.

    Attributes:
        query: ``[batch][tokens][heads][key_size]``.
        key: ``[batch][tokens][kv_heads][key_size]``.
        value: ``[batch][tokens][kv_heads][value_size]``.
        past: The state to begin with, shaped as ``state``, if there is one.
        decay: The factors of the state, ``[batch][tokens][kv_heads][decays]``, if it decays.
        beta: Update rates, ``[batch][tokens][betas]``, for the delta rules.
        y: ``[batch][tokens][heads][value_size]``.
        state: ``[batch][kv_heads][key_size][value_size]``, that after the last token.
        tokens: Tokens of a sample.
        heads: Heads of queries.
        kv_heads: Heads of keys and values.
        key_size: Elements of a key.
        value_size: Elements of a value.
        scale: Factor of the queries.
        decays: Factors of a head: 1 or ``key_size``.
        betas: Rates of a token: 1 or ``kv_heads``.
        scratch: Scratch of the first worker: a strip.
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
    kv_heads: int
    key_size: int
    value_size: int
    scale: float
    decays: int
    betas: int
    scratch: Address
    scratch_bytes: int


class BiasArguments(KernelArguments):
    """Arguments of `bias`; a work unit is a row of y.

    Attributes:
        y: Added to the scores, ``[batch][heads][queries][keys]``.
        mask: First element of the mask; 0: none.
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
        left: Keys before its own position that a query sees; -1: all.
        right: Keys after its own position that a query sees; -1: all.
        counts: int64 for each sample: keys that are no padding, the queries' own being the last of
            them; 0: no key is padding.
        flags: For each row, as an element of y's dtype: 1 if it sees any key, else 0.
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
        positions: The row of each token, int64; 0: token i of all samples has row i.
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
