"""Arguments of the kernel that runs LSTM, GRU and RNN along sequences, and sizes of its memory."""

from __future__ import annotations

from subgraph.engine.codegen.arguments import Address, KernelArguments

# Gates of a cell: rows of W and R for each hidden element.
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
# Bytes after a row of quantized states: their sum, int32, and padding to a cache line.
ROW_SUM_BYTES = 64


class CellsArguments(KernelArguments):
    """Arguments of `cells`; a work unit is a block of sequences in one direction.

    There are directions * ceil(batch / rows) units. All strides are bytes. A row is the ``padded``
    elements of a gate or of a state.

    A worker's scratch holds ``gates + 3`` rows for each sequence of a unit: hidden states, cell
    states, one for GRU's last gate, sums of the gates. With int8 weights a unit has all sequences
    of a direction, and scratch has ``padded + ROW_SUM_BYTES`` bytes more for each, for its
    quantized states.

    Attributes:
        inputs: The inputs times their weights, plus biases; each gate is padded unless weights are
            int8.
        inputs_step: Stride of the inputs between steps.
        inputs_sequence: Between sequences.
        inputs_direction: Between directions.
        weights: Recurrence weights in panels; of GRU those of the first two gates.
        weights_direction: Their stride between directions.
        last_weights: Recurrence weights of GRU's last gate in panels.
        last_direction: Their stride between directions.
        last_bias: Recurrence bias of GRU's last gate, a row for each direction; only with
            ``linear_before_reset``.
        peepholes: Three rows for each direction (gates i, o, f), if there are peepholes.
        hidden: Initial hidden states; 0: zeros.
        cell: Initial cell states; 0: zeros.
        state_sequence: Stride of states between sequences.
        state_direction: Between directions.
        y: The hidden states of all steps; 0: none are wanted.
        y_step: Stride of y between steps.
        y_sequence: Between sequences.
        y_direction: Between directions.
        last_hidden: The last hidden states; 0: none are wanted.
        last_cell: The last cell states; 0: none are wanted.
        lengths: The length of each sequence in steps, int32; 0: all have all steps.
        steps: Number of steps.
        batch: Number of sequences.
        size: Elements of a state.
        padded: The same, rounded up to whole vectors.
        direction: The direction of the first unit.
        backwards: Whether the first direction goes backwards (1); the second always does.
        rows: Sequences of a unit.
        scratch: Scratch of the first worker.
        scratch_bytes: Bytes from a worker's scratch to the next one's.
        clip: Bound of the arguments of activations, if they are bounded.
        f_alpha: Alpha of the first activation.
        f_beta: Beta of the first activation.
        g_alpha: Alpha of the second activation.
        g_beta: Beta of the second activation.
        h_alpha: Alpha of the third activation.
        h_beta: Beta of the third activation.
        scales: Of int8 weights: the scales of columns, rows ``[directions][gates]``, float32.
        sums: The sums of columns, shaped as the scales, int32.
        zeros: The zero points of columns, shaped as the scales, int32; 0: all are 0.
    """

    inputs: Address
    inputs_step: int
    inputs_sequence: int
    inputs_direction: int
    weights: Address
    weights_direction: int
    last_weights: Address
    last_direction: int
    last_bias: Address
    peepholes: Address
    hidden: Address
    cell: Address
    state_sequence: int
    state_direction: int
    y: Address
    y_step: int
    y_sequence: int
    y_direction: int
    last_hidden: Address
    last_cell: Address
    lengths: Address
    steps: int
    batch: int
    size: int
    padded: int
    direction: int
    backwards: int
    rows: int
    scratch: Address
    scratch_bytes: int
    clip: float
    f_alpha: float
    f_beta: float
    g_alpha: float
    g_beta: float
    h_alpha: float
    h_beta: float
    scales: Address
    sums: Address
    zeros: Address
