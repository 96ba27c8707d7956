// LSTM, GRU and RNN after the inputs were multiplied: a work-group takes one sequence in one
// direction through all steps, its work-items share the hidden elements. T: element; BLOCK:
// neighbouring columns that a work-item sums at a time; CELL: 4 LSTM, 3 GRU, 1 RNN (its gates).

#define SYNC barrier(CLK_GLOBAL_MEM_FENCE)
#define EACH(j) for (int j = get_local_id(0); j < width; j += GROUP)

T sigmoid(T x) { return 1 / (1 + exp(-x)); }

// to[j] = start[j] + sum over k of x[k] * matrix[k, j] for this work-item's columns.
void product(__global T *to, __global const T *start, __global const T *matrix, int step,
             __global const T *x, int count, int size) {
  for (int first = get_local_id(0) * BLOCK; first < count; first += GROUP * BLOCK) {
    if (count - first >= BLOCK) {
      T sums[BLOCK];
#pragma unroll
      for (int j = 0; j < BLOCK; j++) sums[j] = start[first + j];
      __global const T *row = matrix + first;
      for (int k = 0; k < size; k++, row += step) {
        T factor = x[k];
#pragma unroll
        for (int j = 0; j < BLOCK; j++) sums[j] += factor * row[j];
      }
#pragma unroll
      for (int j = 0; j < BLOCK; j++) to[first + j] = sums[j];
    } else {
      for (int j = first; j < count; j++) {
        T sum = start[j];
        for (int k = 0; k < size; k++) sum += x[k] * matrix[k * step + j];
        to[j] = sum;
      }
    }
  }
}

// inputs: [steps, batch, directions, CELL * width]; matrix: [directions, width, CELL * width];
// last: the recurrence bias of GRU's last gate; held: memory of (CELL + 4) * width for each group.
__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1))) void cells(
    __global const T *inputs, int inputs0, __global const T *matrix, int matrix0,
    __global const T *last, int last0, __global const T *h_first, int h_first0,
    __global const T *c_first, int c_first0, __global T *y, int y0, __global T *h_last,
    int h_last0, __global T *c_last, int c_last0, __global T *held, int held0, int steps,
    int batch, int width, int directions, int reverse) {
  int unit = get_group_id(0), direction = unit / batch, size = CELL * width;
  __global T *g = held + held0 + unit * (size + 4 * width);
  __global T *h = g + size, *c = h + width, *spare = c + width, *start = spare + width;
  matrix += matrix0 + direction * width * size;
  last += last0 + direction * width;
  EACH(j) {
    h[j] = HAS_H ? h_first[h_first0 + unit * width + j] : (T)0;
    c[j] = HAS_C ? c_first[c_first0 + unit * width + j] : (T)0;
  }
  SYNC;
  for (int step = 0; step < steps; step++) {
    int t = direction == 1 || reverse ? steps - 1 - step : step;
    __global const T *x = inputs + inputs0;
    x += ((t * batch + unit % batch) * directions + direction) * size;
#if CELL == 4
    // Gates in the order input, output, forget, cell.
    product(g, x, matrix, size, h, size, width);
    SYNC;
    EACH(j) {
      T made = sigmoid(g[j]) * tanh(g[3 * width + j]);
      c[j] = sigmoid(g[2 * width + j]) * c[j] + made;
      h[j] = sigmoid(g[width + j]) * tanh(c[j]);
    }
#elif CELL == 3
    // Gates in the order update, reset, hidden.
    product(g, x, matrix, size, h, 2 * width, width);
#if LINEAR
    product(spare, last, matrix + 2 * width, size, h, width, width);
    SYNC;
#else
    SYNC;
    EACH(j) {
      c[j] = sigmoid(g[width + j]) * h[j];
      start[j] = last[j] + x[2 * width + j];
    }
    SYNC;
    product(spare, start, matrix + 2 * width, size, c, width, width);
    SYNC;
#endif
    EACH(j) {
      T z = sigmoid(g[j]), n = spare[j];
      if (LINEAR) n = sigmoid(g[width + j]) * n + x[2 * width + j];
      h[j] = z * h[j] + (1 - z) * tanh(n);
    }
#else
    product(g, x, matrix, size, h, width, width);
    SYNC;
    EACH(j) h[j] = RELU ? (g[j] < 0 ? (T)0 : g[j]) : tanh(g[j]);
#endif
    if (HAS_Y)
      EACH(j) y[y0 + ((t * directions + direction) * batch + unit % batch) * width + j] = h[j];
    SYNC;
  }
  EACH(j) {
    if (HAS_H_LAST) h_last[h_last0 + unit * width + j] = h[j];
    if (HAS_C_LAST) c_last[c_last0 + unit * width + j] = c[j];
  }
}
