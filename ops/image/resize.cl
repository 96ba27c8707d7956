// Resize along one axis. T: element; one work-item for each element of the result.

// Weighted sums of neighbours along an axis:
// y[o, j, i] = more[j] + sum over n of weights[n, j] * x[o, indices[n, j], i].
__kernel void blend(int count, __global const T *x, int x0, __global T *y, int y0,
                    __global const int *indices, int p0, __global const T *weights, int w0,
                    __global const T *more, int m0, int neighbours, int size, int taken,
                    int inner) {
  int id = get_global_id(0);
  if (id >= count) return;
  int i = id % inner, j = id / inner % taken, o = id / inner / taken;
  x += x0 + o * size * inner + i;
  T total = more[m0 + j];
  for (int n = 0; n < neighbours; n++)
    total += weights[w0 + n * taken + j] * x[indices[p0 + n * taken + j] * inner];
  y[y0 + id] = total;
}
