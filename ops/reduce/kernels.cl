// Reductions, softmax, normalizations, running sums, ArgMax and ArgMin, row by row. T: element in
// which is computed. A work-item (GROUP 1) computes a row, or a work-group through local memory;
// GROUP_REDUCE(name, combine) defines the function that combines the results of its work-items.

#if GROUP == 1
#define ROW get_global_id(0)
#define ME 0
#define GROUP_REDUCE(name, combine) \
  T name(T x, __local T *shared) { return x; }
#else
#define ROW get_group_id(0)
#define ME get_local_id(0)
// Work-items may still read shared[0], the result of the function's previous call, before the first
// barrier. All work-items of a group have the same row, so that they return early together and
// never miss a barrier.
#define GROUP_REDUCE(name, combine)                         \
  T name(T x, __local T *shared) {                          \
    barrier(CLK_LOCAL_MEM_FENCE);                           \
    shared[ME] = x;                                         \
    barrier(CLK_LOCAL_MEM_FENCE);                           \
    for (int half_ = GROUP / 2; half_ > 0; half_ /= 2) {    \
      if (ME < half_) {                                     \
        T a = shared[ME], b = shared[ME + half_];           \
        shared[ME] = combine;                               \
      }                                                     \
      barrier(CLK_LOCAL_MEM_FENCE);                         \
    }                                                       \
    return shared[0];                                       \
  }
#endif
#define WIDE 8
#define LARGER(a, b) (IS_NAN(a) ? a : (a) > (b) ? (a) : (b))

#if REAL
#define IS_NAN(x) isnan(x)
#else
#define IS_NAN(x) 0
#endif

#if defined(REDUCE)
// STEP(a, v): add an element to a result; JOIN(a, b): combine two results; END(a): the final one.
// Kept dimensions have sizes n0..n3 and strides s0..s3, reduced ones m0..m3 and t0..t3; total:
// elements reduced to one.
GROUP_REDUCE(join_rows, JOIN(a, b))

__kernel void reduce(int count, __global const T *x, int x0, __global T *y, int y0,
                     __global const T *shifts, int shifts0, int n0, int n1, int n2, int n3, int s0,
                     int s1, int s2, int s3, int m0, int m1, int m2, int m3, int t0, int t1,
                     int t2, int t3, int total) {
  __local T shared[GROUP];
  int row = ROW;
  if (row >= count) return;
  int rest = row;
  x += x0 + rest % n3 * s3;
  rest /= n3;
  x += rest % n2 * s2;
  rest /= n2;
  x += rest % n1 * s1 + rest / n1 * s0;
#if SHIFTED
  T shift = shifts[shifts0 + row];
#endif
  T sums[WIDE];
  // START of a maximum is x[0], an element of the row: it counts more than once, which changes
  // neither a maximum nor a minimum.
  for (int j = 0; j < WIDE; j++) sums[j] = START;
  int iterations = total / m3;
  for (int k = 0; k < iterations; k++) {
    __global const T *from = x + k % m2 * t2 + k / m2 % m1 * t1 + k / m2 / m1 * t0;
    int i = 0;
#if GROUP == 1
    if (t3 == 1)
      for (; i + WIDE <= m3; i += WIDE)
        for (int j = 0; j < WIDE; j++) sums[j] = STEP(sums[j], from[i + j]);
#endif
    for (i += ME; i < m3; i += GROUP) sums[0] = STEP(sums[0], from[i * t3]);
  }
  T result = sums[0];
  for (int j = 1; j < WIDE; j++) result = JOIN(result, sums[j]);
  result = join_rows(result, shared);
  if (ME == 0) y[y0 + row] = END(result);
}
#endif

#if defined(SOFTMAX)
GROUP_REDUCE(group_max, LARGER(a, b))
GROUP_REDUCE(group_sum, a + b)

// Half precision (ROUND_TO 1: float16, 2: bfloat16, 0: none) is computed in float32 and rounded
// after every step, as in the reference.
#if ROUND_TO == 1
T rounded(T x) {
  ushort bits;
  vstore_half(x, 0, (half *)&bits);
  return vload_half(0, (const half *)&bits);
}
#elif ROUND_TO == 2
T rounded(T x) {
  uint bits = as_uint(x);
  return isnan(x) ? x : as_float((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
}
#else
#define rounded(x) (x)
#endif

__kernel void softmax(int count, __global const T *x, int x0, __global T *y, int y0, int size,
                      int inner) {
  __local T shared[GROUP];
  int row = ROW;
  if (row >= count) return;
  int at = row / inner * size * inner + row % inner;
  x += x0 + at;
  y += y0 + at;
  T top = x[0], total = 0;
  for (int i = ME; i < size; i += GROUP) top = LARGER(x[i * inner], top);
  top = group_max(top, shared);
#if LOG
  for (int i = ME; i < size; i += GROUP) total += rounded(exp(rounded(x[i * inner] - top)));
  total = rounded(log(rounded(group_sum(total, shared))));
  for (int i = ME; i < size; i += GROUP) y[i * inner] = rounded(x[i * inner] - top) - total;
#else
  for (int i = ME; i < size; i += GROUP) {
    T value = rounded(exp(rounded(x[i * inner] - top)));
    total += value;
    y[i * inner] = value;
  }
#if ROUND_TO
  total = rounded(group_sum(total, shared));
  for (int i = ME; i < size; i += GROUP) y[i * inner] /= total;
#else
  total = 1 / group_sum(total, shared);
  for (int i = ME; i < size; i += GROUP) y[i * inner] *= total;
#endif
#endif
}
#endif

#if defined(NORMALIZE)
GROUP_REDUCE(group_sum, a + b)

T added(__global const T *x, int size, T shift, int power, __local T *shared) {
  // Eight independent sums, which a compiler can keep in vectors: it may not reorder the additions
  // of one sum.
  T sums[WIDE];
  for (int j = 0; j < WIDE; j++) sums[j] = 0;
  int i = 0;
#if GROUP == 1
  for (; i + WIDE <= size; i += WIDE)
    for (int j = 0; j < WIDE; j++) {
      T value = x[i + j] - shift;
      sums[j] += power == 2 ? value * value : value;
    }
#endif
  for (i += ME; i < size; i += GROUP) {
    T value = x[i] - shift;
    sums[0] += power == 2 ? value * value : value;
  }
  T total = sums[0];
  for (int j = 1; j < WIDE; j++) total += sums[j];
  return group_sum(total, shared);
}

__kernel void rows(int count, __global const T *x, int x0, __global T *y, int y0,
                   __global const T *factor, int f0, __global const T *shift, int h0,
                   __global T *means, int means0, __global T *deviations, int deviations0,
                   int size, T epsilon) {
  __local T shared[GROUP];
  int row = ROW;
  if (row >= count) return;
  x += x0 + row * size;
  y += y0 + row * size;
  // The variance is computed from differences: the mean square less the squared mean loses most
  // digits where the mean is large beside the deviation.
  T mean = CENTRED ? added(x, size, 0, 1, shared) / size : (T)0;
  T scale = 1 / sqrt(added(x, size, mean, 2, shared) / size + epsilon);
  for (int i = ME; i < size; i += GROUP) {
    T value = (x[i] - mean) * scale * factor[f0 + i];
#if BIAS
    value += shift[h0 + i];
#endif
    y[i] = value;
  }
#if MEANS
  if (ME == 0) means[means0 + row] = mean;
#endif
#if DEVIATIONS
  if (ME == 0) deviations[deviations0 + row] = scale;
#endif
}

// Normalizes groups of channels; steps of scale and bias are between channels and between groups.
__kernel void groups(int count, __global const T *x, int x0, __global T *y, int y0,
                     __global const T *factor, int f0, __global const T *shift, int h0, int many,
                     int channels, int pixels, T epsilon, int channel_step, int group_step) {
  __local T shared[GROUP];
  int row = ROW;
  if (row >= count) return;
  int size = channels * pixels, group = row % many;
  x += x0 + row * size;
  y += y0 + row * size;
  T mean = added(x, size, 0, 1, shared) / size;
  T scale = 1 / sqrt(added(x, size, mean, 2, shared) / size + epsilon);
  for (int c = 0; c < channels; c++) {
    int at = group * group_step + c * channel_step;
    T a = scale * factor[f0 + at], b = shift[h0 + at] - mean * a;
    for (int i = ME; i < pixels; i += GROUP) y[c * pixels + i] = a * x[c * pixels + i] + b;
  }
}
#endif

#if defined(EACH)
// LRN: one work-item for each element.
__kernel void local_response(int count, __global const T *x, int x0, __global T *y, int y0,
                             int channels, int pixels, int before, int after, T alpha, T bias,
                             T beta) {
  int id = get_global_id(0);
  if (id >= count) return;
  int pixel = id % pixels, channel = id / pixels % channels;
  x += x0 + id / pixels / channels * channels * pixels + pixel;
  T total = 0;
  for (int c = max(0, channel - before); c <= min(channels - 1, channel + after); c++)
    total += x[c * pixels] * x[c * pixels];
  y[y0 + id] = x[channel * pixels] * pow(bias + alpha * total, -beta);
}
#endif

#if defined(SCAN)
// The index of the largest (or smallest) element of a row.
__kernel void argminmax(int count, __global const T *x, int x0, __global long *y, int y0, int size,
                      int inner) {
  int row = get_global_id(0);
  if (row >= count) return;
  x += x0 + row / inner * size * inner + row % inner;
  T best = x[0];
  int at = 0;
  for (int i = 1; i < size; i++) {
    T value = x[i * inner];
    // NaN counts as the largest and as the smallest: nothing replaces it, except with LAST another.
    int better = IS_NAN(best) ? 0 : IS_NAN(value) || (LARGEST ? value > best : value < best);
    int same = LAST && (value == best || (IS_NAN(value) && IS_NAN(best)));
    if (better || same) best = value, at = i;
  }
  y[y0 + row] = at;
}

__kernel void cumulative(int count, __global const T *x, int x0, __global T *y, int y0, int size,
                         int inner, int reverse, int exclusive) {
  int row = get_global_id(0);
  if (row >= count) return;
  int at = row / inner * size * inner + row % inner;
  x += x0 + at;
  y += y0 + at;
  T total = PRODUCT;
  for (int k = 0; k < size; k++) {
    int i = (reverse ? size - 1 - k : k) * inner;
    T value = x[i];
    T next = PRODUCT ? total * value : total + value;
    y[i] = exclusive ? total : next;
    total = next;
  }
}
#endif
