// Gather, Scatter and their variants, OneHot. T: element (unsigned of its size where it is only
// copied); I: index; FROM: gather, else scatter. Strides are in elements.

#if REDUCTION == 0
#define PUT(old, new) (new)
#elif REDUCTION == 1
#define PUT(old, new) ((old) + (new))
#elif REDUCTION == 2
#define PUT(old, new) ((old) * (new))
// A NaN stays: comparisons with it are false, so that a new one is taken, an old one is tested for.
#elif REDUCTION == 3
#define PUT(old, new) ((old) > (new) || (old) != (old) ? (old) : (new))
#else
#define PUT(old, new) ((old) < (new) || (old) != (old) ? (old) : (new))
#endif

// Returns an index as a position in [0, size). An index out of range is reported in the slot (see
// subgraph/engine/program/reports.py) and clamped.
int checked(long index, int size, __global long *slot, int number) {
  if (index >= 0 && index < size) return (int)index;
  if (index < 0 && index >= -(long)size) return (int)(index + size);
  // Many work-items may meet bad indices at once; only the first writes the report, so that its
  // fields belong to one index.
  if (atomic_cmpxchg((volatile __global int *)slot, 0, number) == 0) {
    slot[1] = index;
    slot[2] = -(long)size;
    slot[3] = size - 1;
  }
  return index < 0 ? 0 : size - 1;
}

__kernel void gather(int count, __global const T *x, int x0, __global const I *indices, int i0,
                     __global T *y, int y0, int size, int taken, int inner,
                     __global long *slot, int number) {
  int id = get_global_id(0);
  if (id >= count) return;
  int i = id % inner, j = id / inner % taken, o = id / inner / taken;
  y[y0 + id] = x[x0 + (o * size + checked(indices[i0 + j], size, slot, number)) * inner + i];
}

// GatherElements and ScatterElements. n: sizes of the indices, s: strides of the data, 0 along the
// axis. With a reduction, updates of one line along the axis may meet in an element: one work-item
// applies them in order, ``many`` indices that are ``apart`` elements from each other.
__kernel void elements(int count, int many, int apart, __global T *data, int data0,
                       __global const I *indices, int i0, __global T *others, int others0,
                       int size, int axis_step, int n1, int n2, int n3, int n4, int n5, int s0,
                       int s1, int s2, int s3, int s4, int s5, __global long *slot, int number) {
  int id = get_global_id(0);
  if (id >= count) return;
  int first = id / apart * apart * many + id % apart;
  for (int k = first; k < first + many * apart; k += apart) {
    int rest = k, at = data0;
    at += rest % n5 * s5, rest /= n5;
    at += rest % n4 * s4, rest /= n4;
    at += rest % n3 * s3, rest /= n3;
    at += rest % n2 * s2, rest /= n2;
    at += rest % n1 * s1 + rest / n1 * s0;
    at += checked(indices[i0 + k], size, slot, number) * axis_step;
#if FROM
    others[others0 + k] = data[at];
#else
    data[at] = PUT(data[at], others[others0 + k]);
#endif
  }
}

// GatherND and ScatterND: slices of ``inner`` elements, by tuples of DEPTH indices. With a reduction,
// updates are applied in order: each of ``shares`` work-items goes through all tuples, and updates
// the slices that it owns.
__kernel void nd(int count, int tuples, int shares, __global T *data, int data0,
                 __global const long *indices, int i0, __global T *others, int others0, int inner, int per_batch, int batch,
                 __global const int *sizes, int sizes0, __global const int *steps, int steps0,
                 __global long *slot, int number) {
  int id = get_global_id(0);
  if (id >= count) return;
#if FROM || REDUCTION == 0
  int tuple = id / inner, end = tuple + 1, element = id % inner;
#else
  int tuple = 0, end = tuples, element = id / shares;
#endif
  for (; tuple < end; tuple++) {
    int at = tuple / per_batch * batch + element;
    for (int d = 0; d < DEPTH; d++)
      at += checked(indices[i0 + tuple * DEPTH + d], sizes[d], slot, number) * steps[d];
    int k = others0 + tuple * inner + element;
#if FROM
    others[k] = data[data0 + at];
#elif REDUCTION == 0
    data[data0 + at] = others[k];
#else
    // A slice belongs to one work-item for each element, so updates need no atomic operations and
    // are applied in the order of the tuples.
    if (at / inner % shares == id % shares) data[data0 + at] = PUT(data[data0 + at], others[k]);
#endif
  }
}

__kernel void one_hot(int count, __global const long *indices, int i0, __global const T *values,
                      int v0, __global T *y, int y0, int depth, int inner, int wrap) {
  int id = get_global_id(0);
  if (id >= count) return;
  int i = id % inner, d = id / inner % depth, o = id / inner / depth;
  long index = indices[i0 + o * inner + i];
  index = index < 0 && wrap ? index + depth : index;
  // An index outside the depth equals no d, so that its whole line is off.
  y[y0 + id] = values[v0 + (index == d)];
}


#if defined(CIRCULAR)
// TensorScatter: rows of an update are copied into a longer cache, with INDEXED from a position of
// each sample on.
__kernel void tensor_scatter(int items, __global T *cache, int cache0, __global const T *update,
                         int update0, __global const long *firsts, int f0, int groups, int places,
                         int count, int row) {
  int id = get_global_id(0);
  if (id >= items) return;
  int w = id % row, k = id / row % count, unit = id / row / count;
  long to = k + (INDEXED ? firsts[f0 + unit / groups] : 0);
#if CIRCULAR
  if (k + places < count) return;  // a later row overwrites this one
  to = (to % places + places) % places;
#endif
  if (to >= 0 && to < places) cache[cache0 + (unit * places + (int)to) * row + w] = update[update0 + id];
}
#endif
