// Direct convolutions (few channels per group) and transposed ones: one work-item for each output
// element, unless a comment says otherwise. T: type of an element. An array `a` begins at its
// element `a0`. `p` and `q` are the numbers of the activation ACT.

#include "movement/windows.cl"

__kernel void direct(int count, __global const T *x, int x0, __global const T *w, int w0,
                     __global T *y, int y0, __global const T *bias, int bias0,
                     __global const T *residual, int residual0, T p, T q, int groups, int inputs,
                     int outputs, WINDOW_SIZES) {
  OUTPUT_PIXEL;
  int output = channel % (groups * outputs), image = channel / (groups * outputs);
  int group = output / outputs, plane = sd * sh * sw, taps = kd * kh * kw;
  x += x0 + (image * groups + group) * inputs * plane;
  w += w0 + output * inputs * taps;
  int z0 = pd * step_d - pad_d, r0 = ph * step_h - pad_h, c0 = pw * step_w - pad_w;
  T sum = 0;
  for (int c = 0; c < inputs; c++, x += plane)
    for (int d = 0; d < kd; d++)
      for (int h = 0; h < kh; h++)
        for (int v = 0; v < kw; v++, w++) {
          int z = z0 + d * far_d, r = r0 + h * far_h, o = c0 + v * far_w;
          if (z >= 0 && z < sd && r >= 0 && r < sh && o >= 0 && o < sw)
            sum += *w * x[(z * sh + r) * sw + o];
        }
#if BIAS
  sum += bias[bias0 + output];
#endif
#if RESIDUAL
  sum += residual[residual0 + id];
#endif
  y[y0 + id] = ACT(sum, p, q);
}

// For a CPU: a work-item computes a row of outputs, LINE pixels at a time. Windows inside the image
// need no checks.
#if defined(LINE)
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void rows(
    int count, __global const T *x, int x0, __global const T *w, int w0, __global T *y, int y0,
    __global const T *bias, int bias0, __global const T *residual, int residual0, T p, T q,
    int groups, int inputs, int outputs, WINDOW_SIZES) {
  int row = get_global_id(0), channel = get_global_id(1);
  int ph = row % th, pd = row / th;
  int output = channel % (groups * outputs), image = channel / (groups * outputs);
  int group = output / outputs, plane = sd * sh * sw, taps = kd * kh * kw;
  x += x0 + (image * groups + group) * inputs * plane;
  w += w0 + output * inputs * taps;
  int at = (channel * td + pd) * th * tw + ph * tw;
  int z0 = pd * step_d - pad_d, r0 = ph * step_h - pad_h;
  for (int first = 0; first < tw; first += LINE) {
    int many = min(LINE, tw - first), c0 = first * step_w - pad_w;
    int last = c0 + (LINE - 1) * step_w + (kw - 1) * far_w;
    int inside = many == LINE && c0 >= 0 && last < sw;
    T sums[LINE];
    for (int j = 0; j < LINE; j++) sums[j] = 0;
    for (int c = 0; c < inputs; c++)
      for (int d = 0; d < kd; d++)
        for (int h = 0; h < kh; h++) {
          int z = z0 + d * far_d, r = r0 + h * far_h;
          if (z < 0 || z >= sd || r < 0 || r >= sh) continue;
          __global const T *from = x + c * plane + (z * sh + r) * sw + c0;
          __global const T *weights = w + ((c * kd + d) * kh + h) * kw;
          if (inside && step_w == 1) {
            for (int v = 0; v < kw; v++, from += far_w)
              for (int j = 0; j < LINE; j++) sums[j] += weights[v] * from[j];
          } else if (inside && step_w == 2) {
            for (int v = 0; v < kw; v++, from += far_w)
              for (int j = 0; j < LINE; j++) sums[j] += weights[v] * from[2 * j];
          } else {
            for (int v = 0; v < kw; v++, from += far_w) {
              int at = c0 + v * far_w, room = sw - 1 - at;
              int begin = at < 0 ? (step_w - 1 - at) / step_w : 0;
              int end = room < 0 ? 0 : min(many, room / step_w + 1);
              if (step_w == 1)
                for (int j = begin; j < end; j++) sums[j] += weights[v] * from[j];
              else
                for (int j = begin; j < end; j++) sums[j] += weights[v] * from[j * step_w];
            }
          }
        }
    for (int j = 0; j < many; j++) {
      T sum = sums[j];
#if BIAS
      sum += bias[bias0 + output];
#endif
#if RESIDUAL
      sum += residual[residual0 + at + first + j];
#endif
      y[y0 + at + first + j] = ACT(sum, p, q);
    }
  }
}
#endif

// Each output sums the inputs whose transposed window reaches it.
__kernel void transposed(int count, __global const T *x, int x0, __global const T *w, int w0,
                         __global T *y, int y0, __global const T *bias, int bias0, T p, T q,
                         int groups, int inputs, int outputs, WINDOW_SIZES) {
  OUTPUT_PIXEL;
  int output = channel % (groups * outputs), image = channel / (groups * outputs);
  int group = output / outputs, plane = sd * sh * sw, taps = kd * kh * kw;
  x += x0 + (image * groups + group) * inputs * plane;
  w += w0 + (group * inputs * outputs + output % outputs) * taps;
  T sum = 0;
  for (int d = 0; d < kd; d++)
    for (int h = 0; h < kh; h++)
      for (int v = 0; v < kw; v++) {
        int z = pd + pad_d - d * far_d, r = ph + pad_h - h * far_h, o = pw + pad_w - v * far_w;
        if (z < 0 || r < 0 || o < 0 || z % step_d || r % step_h || o % step_w) continue;
        z /= step_d, r /= step_h, o /= step_w;
        if (z >= sd || r >= sh || o >= sw) continue;
        __global const T *from = x + (z * sh + r) * sw + o;
        __global const T *weight = w + (d * kh + h) * kw + v;
        for (int c = 0; c < inputs; c++) sum += from[c * plane] * weight[c * outputs * taps];
      }
#if BIAS
  sum += bias[bias0 + output];
#endif
  y[y0 + id] = ACT(sum, p, q);
}
