// RoiAlign, MaxRoiPool and GridSample. T: element. Coordinates that are NaN or far outside are
// clamped, so that no memory outside the image is read.

#define FAR 1000000000

int clamped_floor(T x) { return isnan(x) ? -1 : (int)floor(clamp(x, (T)-FAR, (T)FAR)); }

#if defined(ROI)
// The two neighbours of a coordinate; returns its distance from the first.
T neighbours(T at, int size, int *low, int *high) {
  at = at > 0 ? at : (T)0;
  *low = (int)at;
  if (*low >= size - 1) {
    *low = *high = size - 1;
    return 0;
  }
  *high = *low + 1;
  return at - *low;
}

int samples(T size, int bins, int wanted) {
  return wanted > 0 ? wanted : (int)ceil(clamp(size / bins, (T)0, (T)4096));
}

// Reports too large and not finite regions; see check_sample_count in roi_kernels.py.
__kernel void check_sample_count(__global const T *regions, int regions0, int count, int bins_down,
                          int bins_across, T scale, int most, __global long *slot, int number) {
  T shift = HALF ? (T)0.5 : (T)0;
  for (int k = 0; k < 2 * count; k++) {
    __global const T *first = regions + regions0 + k / 2 * 4 + k % 2;
    T size = (first[2] * scale - shift) - (first[0] * scale - shift);
    T each = size / (k % 2 ? bins_down : bins_across);
    if (!(each >= -(T)(1 << 30) && each <= most) && slot[0] == 0) {
      slot[0] = number;
      slot[1] = each > 0 ? (long)fmin(each, (T)(1L << 31)) : -1;
      slot[2] = 0;
      slot[3] = most;
    }
  }
}

// One work-item for each bin of a channel of a region. LARGEST: the maximum of its weighted pixels,
// else their average. HALF: the centres of pixels have coordinates k + 0.5.
__kernel void roi_align(int count, __global const T *x, int x0, __global const T *regions,
                        int regions0, __global const long *numbers, int numbers0, __global T *y,
                        int y0, int images, int channels, int height, int width, int bins_down,
                        int bins_across, int wanted, T scale) {
  int id = get_global_id(0);
  if (id >= count) return;
  int j = id % bins_across, i = id / bins_across % bins_down, unit = id / bins_across / bins_down;
  __global const T *region = regions + regions0 + unit / channels * 4;
  // The number comes from an input; clamped, it cannot make the kernel read another array.
  int number = (int)clamp(numbers[numbers0 + unit / channels], 0L, (long)(images - 1));
  x += x0 + (number * channels + unit % channels) * height * width;
  T shift = HALF ? (T)0.5 : (T)0;
  T left = region[0] * scale - shift, top = region[1] * scale - shift;
  T wide = region[2] * scale - shift - left, high = region[3] * scale - shift - top;
  // Without the shift by half a pixel, ONNX makes malformed regions at least one pixel large.
  if (!HALF) wide = wide > 1 ? wide : (T)1, high = high > 1 ? high : (T)1;
  int down = samples(high, bins_down, wanted), across = samples(wide, bins_across, wanted);
  high /= bins_down, wide /= bins_across;
  T total = 0;
  for (int a = 0; a < down; a++) {
    T at_y = top + i * high + (a + (T)0.5) * high / down;
    for (int b = 0; b < across; b++) {
      T at_x = left + j * wide + (b + (T)0.5) * wide / across;
      T p = 0, q = 0, r = 0, s = 0;
      if (at_y >= -1 && at_y <= height && at_x >= -1 && at_x <= width) {
        int r0, r1, c0, c1;
        T fy = neighbours(at_y, height, &r0, &r1), fx = neighbours(at_x, width, &c0, &c1);
        p = (1 - fy) * (1 - fx) * x[r0 * width + c0];
        q = (1 - fy) * fx * x[r0 * width + c1];
        r = fy * (1 - fx) * x[r1 * width + c0];
        s = fy * fx * x[r1 * width + c1];
      }
      if (LARGEST) {
        T found = fmax(fmax(p, q), fmax(r, s));
        // The first sample replaces the 0, since all samples may be negative.
        total = a + b == 0 || found > total ? found : total;
      } else {
        total += p + q + r + s;
      }
    }
  }
  y[y0 + id] = LARGEST ? total : total / max(down * across, 1);
}

int nearest_whole(T x) { return x >= 0 ? clamped_floor(x + (T)0.5) : -clamped_floor((T)0.5 - x); }

__kernel void max_roi_pool(int count, __global const T *x, int x0, __global const T *regions,
                           int regions0, __global T *y, int y0, int images, int channels,
                           int height, int width, int bins_down, int bins_across, T scale) {
  int id = get_global_id(0);
  if (id >= count) return;
  int j = id % bins_across, i = id / bins_across % bins_down, unit = id / bins_across / bins_down;
  __global const T *region = regions + regions0 + unit / channels * 5;
  int number = clamp(clamped_floor(region[0]), 0, images - 1);
  int left = nearest_whole(region[1] * scale), top = nearest_whole(region[2] * scale);
  int wide = max(nearest_whole(region[3] * scale) - left + 1, 1);
  int high = max(nearest_whole(region[4] * scale) - top + 1, 1);
  x += x0 + (number * channels + unit % channels) * height * width;
  int r0 = (int)clamp(top + (long)i * high / bins_down, 0L, (long)height);
  int r1 = (int)clamp(top + ((i + 1L) * high + bins_down - 1) / bins_down, 0L, (long)height);
  int c0 = (int)clamp(left + (long)j * wide / bins_across, 0L, (long)width);
  int c1 = (int)clamp(left + ((j + 1L) * wide + bins_across - 1) / bins_across, 0L, (long)width);
  T found = 0;
  for (int r = r0; r < r1; r++)
    for (int c = c0; c < c1; c++) {
      T value = x[r * width + c];
      // The first pixel replaces the 0, since all may be negative; an empty bin stays 0.
      if ((r == r0 && c == c0) || value > found) found = value;
    }
  y[y0 + id] = found;
}
#endif

#if defined(TAPS)
// TAPS: 1 nearest, 2 linear, 4 cubic; PADDING: 0 zeros, 1 border, 2 reflection; CORNERS: -1 and 1
// are the centres of the outermost pixels, else their edges. U: element of the grid.
U reflected(U x, U least, U most) {
  U extent = most - least;
  if (extent <= 0) return least;
  U outside = x < least ? least - x : x - most;
  if (!(outside > 0)) return x;
  U periods = floor(outside / extent), rest = outside - periods * extent;
  int even = fmod(periods, (U)2) == 0;
  return even == (x < least) ? least + rest : most - rest;
}

// The pixel that PADDING puts at index ``at``, -1 for none.
int pixel(int at, int size, U least, U most) {
  if (PADDING == 0) return at >= 0 && at < size ? at : -1;
  if (PADDING == 2) at = (int)reflected((U)at, least, most);
  return clamp(at, 0, size - 1);
}

// The weight of a neighbour: linear, or Keys' cubic with alpha -0.75.
U weight(U distance) {
  U x = fabs(distance);
  if (TAPS == 1) return 1;
  if (TAPS == 2) return 1 - x;
  if (x <= 1) return ((U)1.25 * x - (U)2.25) * x * x + 1;
  return (((U)-0.75 * x + (U)3.75) * x - 6) * x + 3;
}

// Indices and weights of the neighbours of a grid coordinate along a dimension.
void prepare(U number, int size, int *indices, U *weights) {
  U least = CORNERS ? (U)0 : (U)-0.5, most = CORNERS ? size - (U)1 : size - (U)0.5;
  U at = CORNERS ? (number + 1) / 2 * (size - 1) : ((number + 1) * size - 1) / 2;
  // A NaN or a huge number must not reach the conversion to an integer, whose result is undefined.
  at = isnan(at) ? (U)-1 : clamp(at, (U)-FAR, (U)FAR);
  // ONNX rounds halves to the nearest even pixel, as rint does.
  if (TAPS == 1) at = rint(at);
  if (at < least || at > most) {
    if (PADDING == 1) at = clamp(at, (U)0, (U)(size - 1));
    if (PADDING == 2) at = reflected(at, least, most);
  }
  int first = TAPS == 1 ? (int)at : (int)floor(at) - (TAPS == 4);
  for (int k = 0; k < TAPS; k++) {
    indices[k] = pixel(first + k, size, least, most);
    weights[k] = weight(at - (first + k));
  }
}

// One work-item for each point of the grid, whose neighbours serve all channels.
__kernel void grid_sample(int count, __global const T *x, int x0, __global const U *grid, int grid0,
                          __global T *y, int y0, int channels, int depth, int height, int width,
                          int rank, int points) {
  int id = get_global_id(0);
  if (id >= count) return;
  __global const U *numbers = grid + grid0 + id * rank;
  int zs[TAPS] = {0}, rows[TAPS] = {0}, columns[TAPS];
  U deep[TAPS] = {1}, tall[TAPS] = {1}, across[TAPS];
  prepare(numbers[0], width, columns, across);
  if (rank > 1) prepare(numbers[1], height, rows, tall);
  if (rank > 2) prepare(numbers[2], depth, zs, deep);
  int z_taps = rank > 2 ? TAPS : 1, row_taps = rank > 1 ? TAPS : 1, plane = depth * height * width;
  x += x0 + id / points * channels * plane;
  y += y0 + id / points * channels * points + id % points;
  for (int c = 0; c < channels; c++, x += plane, y += points) {
    U total = 0;
    for (int i = 0; i < z_taps; i++)
      for (int j = 0; j < row_taps; j++) {
        // With zeros as padding a whole row lies outside at once.
        if (zs[i] < 0 || rows[j] < 0) continue;
        __global const T *row = x + (zs[i] * height + rows[j]) * width;
        U sum = 0;
        for (int k = 0; k < TAPS; k++)
          if (columns[k] >= 0) sum += across[k] * row[columns[k]];
        total += deep[i] * tall[j] * sum;
      }
    *y = total;
  }
}
#endif
