// Conversions between images and columns of windows: DeformConv's samples, Col2Im's sums. One
// work-item for each element of the result. T: type of an element. An array `a` begins at `a0`.

#include "movement/windows.cl"

#if defined(DEFORM)
T pixel(__global const T *image, int y, int x, int height, int width) {
  return y < 0 || y >= height || x < 0 || x >= width ? (T)0 : image[y * width + x];
}

T sample(__global const T *image, T y, T x, int height, int width) {
  int y0 = (int)floor(y), x0 = (int)floor(x);
  T fy = y - y0, fx = x - x0;
  T top = pixel(image, y0, x0, height, width) * (1 - fx);
  top += pixel(image, y0, x0 + 1, height, width) * fx;
  T low = pixel(image, y0 + 1, x0, height, width) * (1 - fx);
  low += pixel(image, y0 + 1, x0 + 1, height, width) * fx;
  return top * (1 - fy) + low * fy;
}

// Pixels outside an image are zero. MASKED: samples are multiplied by `mask`.
__kernel void deform_columns(int count, __global const T *x, int x0, __global const T *offsets,
                             int o0, __global const T *mask, int m0, __global T *columns, int c0,
                             int channels, int groups, WINDOW_SIZES) {
  int id = get_global_id(0);
  if (id >= count) return;
  int taps = kh * kw, places = th * tw;
  int place = id % places, tap = id / places % taps, plane = id / places / taps;
  int group = plane % channels / (channels / groups);
  int unit = (plane / channels * groups + group) * taps + tap;
  T y = place / tw * step_h - pad_h + tap / kw * far_h;
  T z = place % tw * step_w - pad_w + tap % kw * far_w;
  y += offsets[o0 + unit * 2 * places + place];
  z += offsets[o0 + (unit * 2 + 1) * places + place];
  T found = 0;
  // False for NaN, too: such a sample is zero.
  if (y > -1 && y < sh && z > -1 && z < sw) {
    found = sample(x + x0 + plane * sh * sw, y, z, sh, sw);
#if MASKED
    found *= mask[m0 + unit * places + place];
#endif
  }
  columns[c0 + id] = found;
}
#endif

#if defined(COLUMNS)
// Return the window that has pixel `at` at its tap `tap`, -1: none.
int window_of(int at, int tap, int windows, int step, int pad, int far) {
  int from = at + pad - tap * far;
  return from < 0 || from % step || from / step >= windows ? -1 : from / step;
}

// Three axes each: the image n, taps k, windows w, strides s, pads p, dilations d.
__kernel void columns_to_image(int count, __global const T *x, int x0, __global T *y, int y0, int n0,
                               int n1, int n2, int k0, int k1, int k2, int w0, int w1, int w2,
                               int s0, int s1, int s2, int p0, int p1, int p2, int d0, int d1,
                               int d2) {
  int id = get_global_id(0);
  if (id >= count) return;
  int at2 = id % n2, at1 = id / n2 % n1, at0 = id / n2 / n1 % n0, plane = id / n2 / n1 / n0;
  int taps = k0 * k1 * k2;
  T sum = 0;
  for (int tap = 0; tap < taps; tap++) {
    int i = window_of(at0, tap / (k1 * k2), w0, s0, p0, d0);
    int j = window_of(at1, tap / k2 % k1, w1, s1, p1, d1);
    int k = window_of(at2, tap % k2, w2, s2, p2, d2);
    // Summing over taps for each pixel, instead of adding each column to its pixels, needs no
    // atomic operations and has a fixed order.
    if (i < 0 || j < 0 || k < 0) continue;
    sum += x[x0 + (((plane * taps + tap) * w0 + i) * w1 + j) * w2 + k];
  }
  y[y0 + id] = sum;
}
#endif
