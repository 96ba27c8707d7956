// Copies, fills, tables along an axis, triangles, reversed sequences. T: unsigned integer of an
// element's size. An array `a` begins at its element `a0`.

// Copy an array of up to LEVELS dimensions, the innermost first: sizes n, strides s in the source and
// t in the target, in elements. The outermost dimension has the last strides and needs no size.
__kernel void copy(int count, int n0, int n1, int n2, int n3, int n4, int n5, int s0, int s1,
                   int s2, int s3, int s4, int s5, int s6, int t0, int t1, int t2, int t3, int t4,
                   int t5, int t6, __global const T* x, int x0, int from, __global T* y, int y0,
                   int to) {
  int id = get_global_id(0);
  if (id >= count) return;
  int rest = id, d;
  x += x0 + from;
  y += y0 + to;
#define STEP(k) d = rest % n##k; rest /= n##k; x += d * s##k; y += d * t##k
  STEP(0);
#if LEVELS > 2
  STEP(1);
#endif
#if LEVELS > 3
  STEP(2);
  STEP(3);
  STEP(4);
  STEP(5);
#endif
  // The index of the outermost dimension is what remains, so a division less is needed.
  x += rest * s6;
  y += rest * t6;
  *y = *x;
}

// The same; a work-item copies the whole innermost dimension, of `size` elements.
__kernel void copy_rows(int count, int size, int step, int stride, int n0, int n1, int n2, int n3,
                        int n4, int s0, int s1, int s2, int s3, int s4, int s5, int t0, int t1,
                        int t2, int t3, int t4, int t5, __global const T* x, int x0, int from,
                        __global T* y, int y0, int to) {
  int rest = get_global_id(0), d;
  x += x0 + from;
  y += y0 + to;
#if LEVELS > 2
  STEP(0);
#endif
#if LEVELS > 3
  STEP(1);
  STEP(2);
  STEP(3);
  STEP(4);
#endif
  x += rest * s5;
  y += rest * t5;
  if (step == 1 && stride == 1)
    for (int j = 0; j < size; j++) y[j] = x[j];
  else if (stride == 1)
    for (int j = 0; j < size; j++) y[j] = x[j * step];
  else
    for (int j = 0; j < size; j++) y[j * stride] = x[j * step];
}

__kernel void fill(int count, __global T* y, int y0, __global const T* value, int v0) {
  int id = get_global_id(0);
  if (id < count) y[y0 + id] = value[v0];
}

// y[o, j, i] = x[o, table[j], i], or the pad element if table[j] is -1.
__kernel void take(int count, __global const T* x, int x0, __global T* y, int y0,
                   __global const long* table, int t0, __global const T* pad, int p0, int size,
                   int taken, int inner) {
  int id = get_global_id(0);
  if (id >= count) return;
  int i = id % inner, j = id / inner % taken, o = id / inner / taken;
  int at = (int)table[t0 + j];
  y[y0 + id] = at < 0 ? pad[p0] : x[x0 + (o * size + at) * inner + i];
}

__kernel void trilu(int count, __global const T* x, int x0, __global T* y, int y0, int rows,
                    int columns, int diagonal) {
  int id = get_global_id(0);
  if (id >= count) return;
  int column = id % columns, row = id / columns % rows;
#if UPPER
  int inside = column - row >= diagonal;
#else
  int inside = column - row <= diagonal;
#endif
  y[y0 + id] = inside ? x[x0 + id] : (T)0;
}

__kernel void reverse_sequence(int count, __global const T* x, int x0, __global T* y, int y0,
                               __global const long* lengths, int l0, int batch, int time,
                               int inner, int batch_step, int time_step) {
  int id = get_global_id(0);
  if (id >= count) return;
  int i = id % inner, t = id / inner % time, b = id / inner / time;
  // A length out of range is reported by another kernel; clamped, it reads no memory outside.
  int length = (int)clamp(lengths[l0 + b], 0L, (long)time);
  int from = t < length ? length - 1 - t : t;
  int row = b * batch_step + i;
  y[y0 + row + t * time_step] = x[x0 + row + from * time_step];
}
