// DFT and STFT: a work-group transforms a line by Stockham's algorithm over the factors of its
// length; its work-items share the results of each pass. T: element, W: element to compute in;
// complex numbers are pairs.

#define SYNC barrier(CLK_GLOBAL_MEM_FENCE)
#define EACH(i, many) for (int i = get_local_id(0); i < many; i += GROUP)
#define T2_(type) type##2
#define T2_OF(type) T2_(type)
#define PAIR T2_OF(W)

__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1))) void lines(
    __global const T *x, int x0, __global T *y, int y0, __global const T *window, int window0,
    __global const W *table, int table0, __global const int *radices, int radices0,
    __global W *buffers, int buffers0, int passes, int given, int size, int results, int x_numbers,
    int y_numbers, int x_step, int y_step, int many, int x_outer, int y_outer, int x_line,
    int y_line, int hermitian, int direction) {
  int unit = get_group_id(0), outer = unit / many, line = unit % many;
  __global PAIR *a = (__global PAIR *)(buffers + buffers0) + (size_t)unit * 2 * size, *b = a + size;
  __global const PAIR *circle = (__global const PAIR *)(table + table0);
  x += x0 + outer * x_outer + line * x_line;
  y += y0 + outer * y_outer + line * y_line;
  EACH(i, size) {
    // A one-sided input has only the first half; the rest of a real signal's transform is its
    // conjugate in reverse order.
    int mirrored = hermitian && i > size / 2, from = mirrored ? size - i : i;
    PAIR value = (PAIR)(0, 0);
    if (from < given) {
      value.x = x[from * x_step];
      if (x_numbers == 2) value.y = x[from * x_step + 1];
#if WINDOW
      value *= window[window0 + from];
#endif
    }
    if (mirrored) value.y = -value.y;
    a[i] = value;
  }
  SYNC;
  for (int pass = 0, step = 1; pass < passes; pass++) {
    int radix = radices[radices0 + pass], stride = size / radix;
    EACH(i, size) {
      int q = i % step, k = i / step % radix, p = i / step / radix;
      // The root of unity of (j, k) times the twiddle of (p, k) is one entry of the table.
      int advance = k * stride, place = p * k * step;
      PAIR sum = (PAIR)(0, 0);
      for (int j = 0; j < radix; j++) {
        PAIR value = a[q + step * p + stride * j], w = circle[place];
        w.y *= direction;
        sum += (PAIR)(value.x * w.x - value.y * w.y, value.x * w.y + value.y * w.x);
        place += advance;
        // Both numbers are below the size, so one subtraction replaces a division.
        if (place >= size) place -= size;
      }
      b[i] = sum;
    }
    SYNC;
    step *= radix;
    __global PAIR *other = a;
    a = b;
    b = other;
  }
  // ONNX divides by the length in the inverse transform only.
  W scale = direction > 0 ? (W)1 : 1 / (W)size;
  EACH(i, results) {
    y[i * y_step] = a[i].x * scale;
    if (y_numbers == 2) y[i * y_step + 1] = a[i].y * scale;
  }
}
