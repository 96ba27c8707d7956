// LSTM, GRU and RNN after the inputs were multiplied: a work-group takes one sequence in one
// direction through all steps, its work-items share the hidden elements. T: element; BLOCK:
// neighbouring columns that a work-item sums at a time; CELL: 4 LSTM, 3 GRU, 1 RNN (its gates);
// F, G, H: the activations in the standard's order, of a number and their alpha and beta.

#define SYNC barrier(CLK_GLOBAL_MEM_FENCE)
#define EACH(j) for (int j = get_local_id(0); j < width; j += GROUP)

T first_act(T x, T a, T b, T clip) {
  x = clip > 0 ? clamp(x, -clip, clip) : x;
  return F(x, a, b);
}
T second_act(T x, T a, T b, T clip) {
  x = clip > 0 ? clamp(x, -clip, clip) : x;
  return G(x, a, b);
}
T third_act(T x, T a, T b, T clip) {
  x = clip > 0 ? clamp(x, -clip, clip) : x;
  return H(x, a, b);
}
#define FIRST(x) first_act(x, f_a, f_b, clip)
#define SECOND(x) second_act(x, g_a, g_b, clip)
#define THIRD(x) third_act(x, h_a, h_b, clip)

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

// inputs: CELL * width numbers for each step, sequence and direction; matrix: [directions, width,
// CELL * width]; last: the recurrence bias of GRU's last gate; peepholes: [directions, 3, width];
// held: memory of (CELL + 3) * width for each group. Steps x, s, y: between steps, sequences and
// directions of inputs, states and results, in elements.
__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1))) void cells(
    __global const T *inputs, int inputs0, __global const T *matrix, int matrix0,
    __global const T *last, int last0, __global const T *peepholes, int peepholes0,
    __global const T *h_first, int h_first0, __global const T *c_first, int c_first0,
    __global const int *lengths, int lengths0, __global T *y, int y0, __global T *h_last,
    int h_last0, __global T *c_last, int c_last0, __global T *held, int held0, int steps,
    int batch, int width, int first, int reverse, int x_step, int x_sequence, int s_sequence,
    int s_direction, int y_step, int y_sequence, int y_direction, T clip, T f_a, T f_b, T g_a,
    T g_b, T h_a, T h_b) {
  int unit = get_group_id(0), direction = first + unit / batch, b = unit % batch;
  int size = CELL * width, length = steps;
  __global T *g = held + held0 + unit * (size + 3 * width);
  __global T *h = g + size, *c = h + width, *spare = c + width;
  int state = b * s_sequence + direction * s_direction;
  matrix += matrix0 + direction * width * size;
  inputs += inputs0 + b * x_sequence + direction * size;
  y += y0 + b * y_sequence + direction * y_direction;
#if LENGTHS
  length = clamp(lengths[lengths0 + b], 0, steps);
#endif
  EACH(j) {
    h[j] = HAS_H ? h_first[h_first0 + state + j] : (T)0;
    c[j] = HAS_C ? c_first[c_first0 + state + j] : (T)0;
    for (int t = length; HAS_Y && t < steps; t++) y[t * y_step + j] = 0;
  }
  SYNC;
  for (int step = 0; step < length; step++) {
    int t = direction == 1 || reverse ? length - 1 - step : step;
    __global const T *x = inputs + t * x_step;
#if CELL == 4
    // Gates in the order input, output, forget, cell.
    product(g, x, matrix, size, h, size, width);
    SYNC;
    EACH(j) {
      T i = g[j], o = g[width + j], forget = g[2 * width + j], old = c[j];
#if PEEPHOLES
      __global const T *holes = peepholes + peepholes0 + direction * 3 * width + j;
      i += holes[0] * old;
      forget += holes[2 * width] * old;
#endif
      i = FIRST(i);
      forget = COUPLED ? 1 - i : FIRST(forget);
      T made = forget * old + i * SECOND(g[3 * width + j]);
#if PEEPHOLES
      o += holes[width] * made;
#endif
      c[j] = made;
      h[j] = FIRST(o) * THIRD(made);
    }
#elif CELL == 3
    // Gates in the order update, reset, hidden.
    product(g, x, matrix, size, h, 2 * width, width);
#if LINEAR
    product(spare, last + last0 + direction * width, matrix + 2 * width, size, h, width, width);
    SYNC;
#else
    SYNC;
    EACH(j) {
      c[j] = FIRST(g[width + j]) * h[j];
      spare[j] = x[2 * width + j];
    }
    SYNC;
    product(spare, spare, matrix + 2 * width, size, c, width, width);
    SYNC;
#endif
    EACH(j) {
      T z = FIRST(g[j]), n = spare[j];
      if (LINEAR) n = FIRST(g[width + j]) * n + x[2 * width + j];
      h[j] = z * h[j] + (1 - z) * SECOND(n);
    }
#else
    product(g, x, matrix, size, h, width, width);
    SYNC;
    EACH(j) h[j] = FIRST(g[j]);
#endif
    if (HAS_Y) EACH(j) y[t * y_step + j] = h[j];
    SYNC;
  }
  EACH(j) {
    if (HAS_H_LAST) h_last[h_last0 + state + j] = h[j];
    if (HAS_C_LAST) c_last[c_last0 + state + j] = c[j];
  }
}
