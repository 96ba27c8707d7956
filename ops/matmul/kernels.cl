// Matrix products, and convolutions as products of weights and the pixels of all taps (im2col).
// C[row, column] = act(alpha * sum(A[row, k] * B[k, column]) + beta * bias[row, column] + R).
// T: type of an element; V: vector of LANES; a panel is 2 * LANES columns; ROWS: rows of a block.
// An array `a` begins at its element `a0`; strides are in elements.

#define WIDTH (2 * LANES)
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define VLOAD JOIN(vload, LANES)
#define VSTORE JOIN(vstore, LANES)

#define ARGUMENTS                                                                              \
  __global const T *a, int a0, __global const T *b, int b0, __global T *c, int c0,             \
      __global const T *bias, int bias0, __global const T *residual, int residual0, int m,     \
      int n, int depth, int a_row, int a_column, int bias_row, int bias_column, T alpha,       \
      T beta, T p, T q, int size1, int size2, int a_s0, int a_s1, int a_s2, int b_s0,          \
      int b_s1, int b_s2, int c_s0, int c_s1, int c_s2, int bias_step

// Advance the pointers to this work-item's matrices of the stack.
#define STACK                                                                     \
  int i2 = get_global_id(2) % size2, i1 = get_global_id(2) / size2 % size1;       \
  int i0 = get_global_id(2) / size2 / size1;                                      \
  a += a0 + i0 * a_s0 + i1 * a_s1 + i2 * a_s2;                                    \
  b += b0 + i0 * b_s0 + i1 * b_s1 + i2 * b_s2;                                    \
  int first = i0 * c_s0 + i1 * c_s1 + i2 * c_s2;                                  \
  c += c0 + first;                                                                \
  bias += bias0 + i2 * bias_step;                                                 \
  residual += residual0 + first

T finish(T sum, int row, int column, int n, __global const T *bias, int bias_row, int bias_column,
         __global const T *residual, T alpha, T beta, T p, T q) {
  T x = alpha * sum;
#if BIAS
  x += beta * bias[row * bias_row + column * bias_column];
#endif
#if RESIDUAL
  x += residual[row * n + column];
#endif
  return ACT(x, p, q);
}

#if defined(ROWS)
// For a CPU: a work-item computes a panel's columns of up to BLOCKS consecutive blocks of ROWS rows,
// each block in registers. B is packed into panels [columns / WIDTH][depth][WIDTH]; CHUNK rows of a
// panel stay in the L1 cache while all blocks use them.
#if DENSE
#define LEFT(r, k) line[r][k]
#else
#define LEFT(r, k) line[r][(k) * a_column]
#endif

__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void panels(ARGUMENTS, int blocks) {
  int top = get_global_id(0) * ROWS * blocks, column = get_global_id(1) * WIDTH;
  STACK;
  b += (size_t)get_global_id(1) * depth * WIDTH;
  T part[BLOCKS * ROWS * WIDTH];
  int end = 0;
  do {
    int begin = end;
    end = depth - begin > CHUNK * 3 / 2 ? begin + CHUNK : depth;
    for (int block = 0; block < blocks; block++) {
      int row = top + block * ROWS;
      if (row >= m) break;
      __global const T *line[ROWS];
      T *mine = part + block * ROWS * WIDTH;
      V low[ROWS], high[ROWS];
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        line[r] = a + (size_t)min(row + r, m - 1) * a_row;
        low[r] = begin ? VLOAD(2 * r, mine) : (V)0;
        high[r] = begin ? VLOAD(2 * r + 1, mine) : (V)0;
      }
      __global const T *from = b + (size_t)begin * WIDTH;
      for (int k = begin; k < end; k++, from += WIDTH) {
        V b_low = VLOAD(0, from), b_high = VLOAD(1, from);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
          T x = LEFT(r, k);
          low[r] = x * b_low + low[r];
          high[r] = x * b_high + high[r];
        }
      }
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        VSTORE(low[r], 2 * r, mine);
        VSTORE(high[r], 2 * r + 1, mine);
      }
    }
  } while (end < depth);
  int rows = min(blocks * ROWS, m - top), count = min(WIDTH, n - column);
  for (int r = 0; r < rows; r++) {
    __global T *to = c + (size_t)(top + r) * n + column;
    for (int j = 0; j < count; j++)
      to[j] = finish(part[r * WIDTH + j], top + r, column + j, n, bias, bias_row, bias_column,
                     residual, alpha, beta, p, q);
  }
}
#endif

#if defined(TILE)
// For a GPU: a group of GROUP * GROUP work-items computes a TILE * TILE part of C from tiles of A
// and B in local memory; each work-item computes EACH * EACH elements.
#define EACH (TILE / GROUP)
#define DEEP 16

#if defined(CONVOLUTION)
#define MORE                                                                                 \
  , int sd, int sh, int sw, int th, int tw, int kd, int kh, int kw, int step_d, int step_h,  \
      int step_w, int far_d, int far_h, int far_w, int pad_d, int pad_h, int pad_w
#else
#define MORE , int b_row, int b_column
#endif

__kernel __attribute__((reqd_work_group_size(GROUP, GROUP, 1))) void tiles(ARGUMENTS MORE) {
  __local T left[DEEP][TILE + 1], right[DEEP][TILE + 1];
  int lx = get_local_id(0), ly = get_local_id(1), me = ly * GROUP + lx;
  int column = get_group_id(0) * TILE, row = get_group_id(1) * TILE;
  STACK;
  T sums[EACH][EACH];
  for (int i = 0; i < EACH; i++)
    for (int j = 0; j < EACH; j++) sums[i][j] = 0;
  for (int k0 = 0; k0 < depth; k0 += DEEP) {
    for (int e = me; e < DEEP * TILE; e += GROUP * GROUP) {
      int k = k0 + e % DEEP, r = row + e / DEEP;
      left[e % DEEP][e / DEEP] = k < depth && r < m ? a[r * a_row + k * a_column] : (T)0;
    }
    for (int e = me; e < DEEP * TILE; e += GROUP * GROUP) {
      int k = k0 + e / TILE, o = column + e % TILE;
      T value = 0;
      if (k < depth && o < n) {
#if defined(CONVOLUTION)
        int x = o % tw * step_w - pad_w + k % kw * far_w;
        int y = o / tw % th * step_h - pad_h + k / kw % kh * far_h;
        int z = o / tw / th * step_d - pad_d + k / kw / kh % kd * far_d;
        if (x >= 0 && x < sw && y >= 0 && y < sh && z >= 0 && z < sd)
          value = b[((k / kw / kh / kd * sd + z) * sh + y) * sw + x];
#else
        value = b[k * b_row + o * b_column];
#endif
      }
      right[e / TILE][e % TILE] = value;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int k = 0; k < DEEP; k++) {
      T mine[EACH];
      for (int j = 0; j < EACH; j++) mine[j] = right[k][lx + j * GROUP];
      for (int i = 0; i < EACH; i++) {
        T x = left[k][ly + i * GROUP];
        for (int j = 0; j < EACH; j++) sums[i][j] = x * mine[j] + sums[i][j];
      }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
  }
  for (int i = 0; i < EACH; i++)
    for (int j = 0; j < EACH; j++) {
      int r = row + ly + i * GROUP, o = column + lx + j * GROUP;
      if (r < m && o < n)
        c[r * n + o] = finish(sums[i][j], r, o, n, bias, bias_row, bias_column, residual, alpha,
                              beta, p, q);
    }
}
#endif

#if defined(PACK)
// Each work-item packs one panel of a matrix [depth, n]; columns beyond n are zero.
__kernel void pack(__global const T *b, int b0, __global T *y, int y0, int depth, int n, int b_row,
                   int b_column, int panels, int size, int packed) {
  int panel = get_global_id(0), matrix = get_global_id(1);
  b += b0 + (size_t)matrix * size;
  y += y0 + (size_t)matrix * packed + (size_t)panel * depth * WIDTH;
  int column = panel * WIDTH, count = min(WIDTH, n - column);
  b += (size_t)column * b_column;
  if (count == WIDTH && b_column == 1) {
    for (int k = 0; k < depth; k++, b += b_row, y += WIDTH) {
      VSTORE(VLOAD(0, b), 0, y);
      VSTORE(VLOAD(1, b), 1, y);
    }
    return;
  }
  for (int k = 0; k < depth; k++)
    for (int j = 0; j < WIDTH; j++)
      y[k * WIDTH + j] = j < count ? b[k * b_row + j * b_column] : (T)0;
}

// Each work-item packs the inputs of WIDTH output pixels of a convolution: a panel [channels,
// taps][WIDTH], zero outside the image.
__kernel void pixels(__global const T *x, int x0, __global T *y, int y0, int channels, int sd,
                     int sh, int sw, int td, int th, int tw, int kd, int kh, int kw, int step_d,
                     int step_h, int step_w, int far_d, int far_h, int far_w, int pad_d, int pad_h,
                     int pad_w, int panels) {
  int panel = get_global_id(0), image = get_global_id(1);
  int taps = kd * kh * kw, plane = sd * sh * sw, count = td * th * tw;
  x += x0 + (size_t)image * channels * plane;
  y += y0 + ((size_t)image * panels + panel) * channels * taps * WIDTH;
  int tap = 0;
  for (int d = 0; d < kd; d++)
    for (int h = 0; h < kh; h++)
      for (int w = 0; w < kw; w++, tap++) {
        int at[WIDTH], whole = 1, even = 1;
        for (int j = 0; j < WIDTH; j++) {
          int o = panel * WIDTH + j;
          int ix = o % tw * step_w - pad_w + w * far_w;
          int iy = o / tw % th * step_h - pad_h + h * far_h;
          int iz = o / tw / th * step_d - pad_d + d * far_d;
          int inside = o < count && ix >= 0 && ix < sw && iy >= 0 && iy < sh && iz >= 0 && iz < sd;
          at[j] = inside ? (iz * sh + iy) * sw + ix : -1;
          whole &= inside && at[j] - at[0] == j;
          even &= inside && at[j] - at[0] == 2 * j;
        }
        __global const T *from = x;
        __global T *to = y + tap * WIDTH;
        for (int c = 0; c < channels; c++, from += plane, to += taps * WIDTH) {
          if (whole) {
            VSTORE(VLOAD(0, from + at[0]), 0, to);
            VSTORE(VLOAD(1, from + at[0]), 1, to);
          } else if (even) {
            for (int j = 0; j < WIDTH; j++) to[j] = from[at[0] + 2 * j];
          } else {
            for (int j = 0; j < WIDTH; j++) to[j] = at[j] >= 0 ? from[at[j]] : (T)0;
          }
        }
      }
}
#endif
