// LSTM, GRU and RNN of inputs that were multiplied by their weights: a work-group runs one sequence
// in one direction through all steps, its work-items share the hidden elements. T: element; BLOCK:
// adjacent columns that a work-item sums at a time; CELL: 4 LSTM, 3 GRU, 1 RNN (its gates); F, G,
// H: the activations in the standard's order, of a number and their alpha and beta; QUANTIZED:
// QuantizedLSTM.

#define SYNC barrier(CLK_GLOBAL_MEM_FENCE)
#define EACH(j) for (int j = get_local_id(0); j < width; j += GROUP)

// Numbers of the activations: the bound of their arguments (0: none), alphas and betas.
typedef struct {
  T clip, f_a, f_b, g_a, g_b, h_a, h_b;
} Numbers;

T clipped(T x, Numbers n) { return n.clip > 0 ? clamp(x, -n.clip, n.clip) : x; }
T first_act(T x, Numbers n) {
  x = clipped(x, n);
  return F(x, n.f_a, n.f_b);
}
T second_act(T x, Numbers n) {
  x = clipped(x, n);
  return G(x, n.g_a, n.g_b);
}
T third_act(T x, Numbers n) {
  x = clipped(x, n);
  return H(x, n.h_a, n.h_b);
}

// LSTM's hidden element j from the sums of its gates, in the order input, output, forget, cell;
// holes: peepholes of its direction, [3, width].
void lstm(int j, int width, __global const T *g, __global T *h, __global T *c,
                 __global const T *holes, Numbers n) {
  T i = g[j], o = g[width + j], forget = g[2 * width + j], old = c[j];
#if PEEPHOLES
  i += holes[j] * old;
  forget += holes[2 * width + j] * old;
#endif
  i = first_act(i, n);
  forget = COUPLED ? 1 - i : first_act(forget, n);
  T made = forget * old + i * second_act(g[3 * width + j], n);
#if PEEPHOLES
  o += holes[width + j] * made;
#endif
  c[j] = made;
  h[j] = first_act(o, n) * third_act(made, n);
}

#if QUANTIZED
// The least and the greatest of 0 and count states, for all work-items of a group.
float2 range_of(__local float2 *found, __global const T *h, int count) {
  int me = get_local_id(0);
  float2 own = (float2)(0, 0);
  for (int i = me; i < count; i += GROUP) own = (float2)(fmin(own.x, h[i]), fmax(own.y, h[i]));
  found[me] = own;
  barrier(CLK_LOCAL_MEM_FENCE);
  for (int k = 0; k < GROUP; k++) own = (float2)(fmin(own.x, found[k].x), fmax(own.y, found[k].y));
  barrier(CLK_LOCAL_MEM_FENCE);
  return own;
}

// to[j] = step * scales[j] * sum over k of x[k] * matrix[k, j] for this work-item's columns.
void product(__global T *to, __global const T *scales, float step, __global const short *matrix,
             __global const int *x, int count, int size) {
  for (int first = get_local_id(0) * BLOCK; first < count; first += GROUP * BLOCK) {
    // Integers are summed exactly, and scaled once at the end.
    int many = min(BLOCK, count - first), sums[BLOCK] = {0};
    for (int k = 0; k < size; k++) {
      __global const short *row = matrix + k * count + first;
      int factor = x[k];
      for (int j = 0; j < many; j++) sums[j] += factor * row[j];
    }
    for (int j = 0; j < many; j++) to[first + j] = sums[j] * (step * scales[first + j]);
  }
}

// An LSTM that quantizes its states in each step by the range of all sequences' states: a
// work-group runs a direction. matrix: weights less their zero points [directions, width, 4 *
// width], scales: theirs [directions, 4 * width]; held: memory of batch * 6 * width for each
// group, bytes: of batch * width. Other arguments are those of cells.
__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1))) void quantized_cells(
    __global const T *inputs, int inputs0, __global const short *matrix, int matrix0,
    __global const T *scales, int scales0, __global const T *peepholes, int peepholes0,
    __global const T *h_first, int h_first0, __global const T *c_first, int c_first0,
    __global const int *lengths, int lengths0, __global T *y, int y0, __global T *h_last,
    int h_last0, __global T *c_last, int c_last0, __global T *held, int held0, __global int *bytes,
    int bytes0, int steps, int batch, int width, int first, int reverse, int x_step,
    int x_sequence, int s_sequence, int s_direction, int y_step, int y_sequence, int y_direction,
    T clip, T f_a, T f_b, T g_a, T g_b, T h_a, T h_b) {
  int group = get_group_id(0), direction = first + group, size = 4 * width, all = batch * width;
  Numbers n = {clip, f_a, f_b, g_a, g_b, h_a, h_b};
  __global T *g = held + held0 + group * 6 * all, *h = g + 4 * all, *c = h + all;
  __local float2 found[GROUP];
  bytes += bytes0 + group * all;
  matrix += matrix0 + direction * width * size;
  scales += scales0 + direction * size;
  inputs += inputs0 + direction * size;
  y += y0 + direction * y_direction;
  for (int b = 0; b < batch; b++) {
    int state = b * s_sequence + direction * s_direction;
    EACH(j) {
      h[b * width + j] = HAS_H ? h_first[h_first0 + state + j] : 0;
      c[b * width + j] = HAS_C ? c_first[c_first0 + state + j] : 0;
    }
  }
  SYNC;
  for (int step = 0; step < steps; step++) {
    // One range for the states of all sequences, so that one work-group has to run all of them.
    float2 range = range_of(found, h, all);
    float scale = range.y > range.x ? (range.y - range.x) / 255 : 1;
    float zero = rint(clamp(-range.x / scale, 0.0f, 255.0f));
    for (int i = get_local_id(0); i < all; i += GROUP)
      bytes[i] = clamp(rint(h[i] / scale) + zero, 0.0f, 255.0f) - zero;
    SYNC;
    for (int b = 0; b < batch; b++)
      product(g + b * size, scales, scale, matrix, bytes + b * width, size, width);
    SYNC;
    for (int b = 0; b < batch; b++) {
      int length = LENGTHS ? clamp(lengths[lengths0 + b], 0, steps) : steps, t = step;
      int going = step < length, own = b * width;
      if (going && (direction == 1 || reverse)) t = length - 1 - step;
      __global const T *x = inputs + t * x_step + b * x_sequence;
      EACH(j) {
        for (int gate = 0; going && gate < 4; gate++)
          g[b * size + gate * width + j] += x[gate * width + j];
        __global const T *holes = peepholes + peepholes0 + direction * 3 * width;
        if (going) lstm(j, width, g + b * size, h + own, c + own, holes, n);
        if (HAS_Y) y[t * y_step + b * y_sequence + j] = going ? h[own + j] : 0;
      }
    }
    SYNC;
  }
  for (int b = 0; b < batch; b++) {
    int state = b * s_sequence + direction * s_direction;
    EACH(j) {
      if (HAS_H_LAST) h_last[h_last0 + state + j] = h[b * width + j];
      if (HAS_C_LAST) c_last[c_last0 + state + j] = c[b * width + j];
    }
  }
}
#else
// to[j] = start[j] + sum over k of x[k] * matrix[k, j] for this work-item's columns.
void product(__global T *to, __global const T *start, __global const T *matrix, int step,
             __global const T *x, int count, int size) {
  for (int first = get_local_id(0) * BLOCK; first < count; first += GROUP * BLOCK) {
    // With a constant number of columns the compiler can unroll and keep the sums in registers.
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
  Numbers n = {clip, f_a, f_b, g_a, g_b, h_a, h_b};
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
    // Results after the end of a sequence are zeros in both directions.
    for (int t = length; HAS_Y && t < steps; t++) y[t * y_step + j] = 0;
  }
  SYNC;
  for (int step = 0; step < length; step++) {
    int t = direction == 1 || reverse ? length - 1 - step : step;
    __global const T *x = inputs + t * x_step;
#if CELL == 4
    product(g, x, matrix, size, h, size, width);
    SYNC;
    __global const T *holes = peepholes + peepholes0 + direction * 3 * width;
    EACH(j) lstm(j, width, g, h, c, holes, n);
#elif CELL == 3
    // Gates in the order update, reset, hidden.
    product(g, x, matrix, size, h, 2 * width, width);
#if LINEAR
    // Both products read the previous state, so that no barrier is needed between them.
    product(spare, last + last0 + direction * width, matrix + 2 * width, size, h, width, width);
    SYNC;
#else
    SYNC;
    EACH(j) {
      // GRU has no cell state: its memory holds the state times the reset gate.
      c[j] = first_act(g[width + j], n) * h[j];
      spare[j] = x[2 * width + j];
    }
    SYNC;
    product(spare, spare, matrix + 2 * width, size, c, width, width);
    SYNC;
#endif
    EACH(j) {
      T z = first_act(g[j], n), made = spare[j];
      if (LINEAR) made = first_act(g[width + j], n) * made + x[2 * width + j];
      h[j] = z * h[j] + (1 - z) * second_act(made, n);
    }
#else
    product(g, x, matrix, size, h, width, width);
    SYNC;
    EACH(j) h[j] = first_act(g[j], n);
#endif
    if (HAS_Y) EACH(j) y[t * y_step + j] = h[j];
    SYNC;
  }
  EACH(j) {
    if (HAS_H_LAST) h_last[h_last0 + state + j] = h[j];
    if (HAS_C_LAST) c_last[c_last0 + state + j] = c[j];
  }
}
#endif
