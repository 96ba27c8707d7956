// Sums of rows from one offset to the next. T: element; MEAN: they are means; one work-item for
// each element of the result.

// An end as Slice takes it.
long end_of(long at, long size) { return clamp(at < 0 ? at + size : at, 0L, size); }

__kernel void segment_sum(int count, __global const T *rows, int r0, __global const long *offsets,
                          int o0, __global T *y, int y0, int size, int columns) {
  int id = get_global_id(0);
  if (id >= count) return;
  int bag = id / columns, column = id % columns;
  long one = offsets[o0 + bag], other = offsets[o0 + bag + 1];
  long first = end_of(one, size), last = end_of(other, size);
  T total = 0;
  for (long row = first; row < last; row++) total += rows[r0 + row * columns + column];
#if MEAN
  if (one != other) total /= (T)max(last - first, 0L);
#endif
  y[y0 + id] = total;
}
