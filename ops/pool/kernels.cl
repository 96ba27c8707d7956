// Pooling: a work-item computes the window of one output element. T: type of an element. An array
// `a` begins at its element `a0`.

#include "movement/windows.cl"

#define POOL_MAX 0
#define POOL_AVERAGE 1
#define POOL_L1 2
#define POOL_L2 3

// LOWEST: the result of a window without pixels. after_*: pads after the image, which count in an
// average that includes the padding. INDICES: if not 0, the index of each maximum in the input is
// written, with a channel's pixels in row-major (1) or column-major (2) order; that of a window
// without pixels is -1.
__kernel void window(int count, __global const T *x, int x0, __global T *y, int y0, WINDOW_SIZES,
                     int after_d, int after_h, int after_w
#if INDICES
                     , __global long *indices, int indices0
#endif
) {
  OUTPUT_PIXEL;
  int plane = sd * sh * sw, seen = 0, padded = 0;
#if INDICES
  int index = 0;
#endif
  x += x0 + channel * plane;
  int z0 = pd * step_d - pad_d, r0 = ph * step_h - pad_h, c0 = pw * step_w - pad_w;
  T sum = LOWEST;
  for (int d = 0; d < kd; d++)
    for (int h = 0; h < kh; h++)
      for (int v = 0; v < kw; v++) {
        int z = z0 + d * far_d, r = r0 + h * far_h, o = c0 + v * far_w;
        padded += z < sd + after_d && r < sh + after_h && o < sw + after_w;
        if (z < 0 || z >= sd || r < 0 || r >= sh || o < 0 || o >= sw) continue;
        T value = x[(z * sh + r) * sw + o];
#if INDICES
        // The index is that of the first NaN, if there is one.
        if (!seen || value > sum || (value != value && sum == sum))
          index = INDICES == 1 ? (z * sh + r) * sw + o : z + (r + o * sh) * sd;
#endif
        seen++;
#if POOL == POOL_MAX
        sum = value != value || value > sum ? value : sum;
#elif POOL == POOL_AVERAGE
        sum += value;
#elif POOL == POOL_L1
        sum += fabs(value);
#else
        sum += value * value;
#endif
      }
#if POOL == POOL_AVERAGE
  sum /= INCLUDE ? padded : seen;
#elif POOL == POOL_L2
  sum = sqrt(sum);
#endif
  y[y0 + id] = sum;
#if INDICES
  indices[indices0 + id] = seen ? (long)channel * plane + index : -1;
#endif
}
