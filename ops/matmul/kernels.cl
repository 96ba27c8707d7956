// Matrix products, and convolutions as products of weights and the pixels of all taps (im2col).
// C[row, column] = act(alpha * sum(A[row, k] * B[k, column]) + beta * bias[row, column] + R).
// T: type of an element; V: vector of LANES; a panel is 2 * LANES columns; ROWS: rows of a block.
// An array `a` begins at its element `a0`; strides are in elements.

#include "movement/windows.cl"

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

// Advance the pointers to the matrices of this number in the stack.
#define STACK(number)                                                             \
  int i2 = (number) % size2, i1 = (number) / size2 % size1;                       \
  int i0 = (number) / size2 / size1;                                              \
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
  STACK(get_global_id(2));
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
// and B in local memory, DEEP columns and rows at a time. It loads the next tiles to registers while
// it computes with the present ones. A work-item computes EACH * EACH elements, in blocks of 4 * 4
// that are 4 * GROUP apart, so that it reads local memory in vectors.
//
// The groups are numbered along one dimension, as GPUs bound the others to 65,535 groups: columns,
// then rows, then the stack of `count` products, once for each slice of the depth. With SPLIT, C is [slices][count][m][n] and takes the sums of the slices; `total` adds them.
#define EACH (TILE / GROUP)
#define DEEP 16
#define ITEMS (GROUP * GROUP)
#define COPIES (TILE * DEEP / ITEMS)  // elements of a tile that a work-item copies
#define V4 JOIN(T, 4)

// Indices within a tile of the t-th element that a work-item copies: K along the depth, AT along the
// rows of A or the columns of B. Neighbouring work-items copy elements that are neighbours along the
// depth (ALONG) or along the rows or columns (ACROSS).
#define ALONG_K(t) (me % DEEP)
#define ALONG_AT(t) (me / DEEP + (t) * (ITEMS / DEEP))
#define ACROSS_K(t) (me / TILE + (t) * (ITEMS / TILE))
#define ACROSS_AT(t) (me % TILE)
#if LEFT_ALONG
#define LEFT_K ALONG_K
#define LEFT_AT ALONG_AT
#else
#define LEFT_K ACROSS_K
#define LEFT_AT ACROSS_AT
#endif
#if RIGHT_ALONG
#define RIGHT_K ALONG_K
#define RIGHT_AT ALONG_AT
#else
#define RIGHT_K ACROSS_K
#define RIGHT_AT ACROSS_AT
#endif

#if defined(KW)  // a convolution by KD * KH * KW taps: B is its image
#define MORE                                                                                  \
  , int sd, int sh, int sw, int th, int tw, int step_d, int step_h, int step_w, int far_d,    \
      int far_h, int far_w, int pad_d, int pad_h, int pad_w
#else
#define MORE , int b_row, int b_column
#endif

__kernel __attribute__((reqd_work_group_size(GROUP, GROUP, 1))) void tiles(
    ARGUMENTS, int count, int share MORE) {
  __local T left[DEEP][TILE + 4] __attribute__((aligned(32)));
  __local T right[DEEP][TILE + 4] __attribute__((aligned(32)));
  int lx = get_local_id(0), ly = get_local_id(1);
  uint me = ly * GROUP + lx;
  int across = (n + TILE - 1) / TILE, down = (m + TILE - 1) / TILE;
  int column = get_group_id(0) % across * TILE, row = get_group_id(0) / across % down * TILE;
  int place = get_group_id(0) / across / down, number = place % count, slice = place / count;
  STACK(number);
#if SPLIT
  c += slice * count * m * n;
#endif
  int begin = slice * share, end = min(begin + share, depth);
#if defined(KW)
  int pixel = column + RIGHT_AT(0);
  int x0 = pixel % tw * step_w - pad_w, y0 = pixel / tw % th * step_h - pad_h;
  int z0 = pixel / tw / th * step_d - pad_d;
#endif
  V4 sums[EACH][EACH / 4];
  for (int i = 0; i < EACH; i++)
    for (int j = 0; j < EACH / 4; j++) sums[i][j] = 0;
  T next_left[COPIES], next_right[COPIES];
  for (int k0 = begin;; k0 += DEEP) {
    if (k0 < end) {
#pragma unroll
      for (int t = 0; t < COPIES; t++) {
        int k = k0 + LEFT_K(t), r = row + LEFT_AT(t);
        next_left[t] = k < end && r < m ? a[r * a_row + k * a_column] : (T)0;
      }
#pragma unroll
      for (int t = 0; t < COPIES; t++) {
        int k = k0 + RIGHT_K(t), o = column + RIGHT_AT(t);
        T value = 0;
#if defined(KW)
        int x = x0 + k % KW * far_w, y = y0 + k / KW % KH * far_h;
        int z = z0 + k / (KW * KH) % KD * far_d;
        if (k < end && o < n && x >= 0 && x < sw && y >= 0 && y < sh && z >= 0 && z < sd)
          value = b[((k / (KW * KH * KD) * sd + z) * sh + y) * sw + x];
#else
        if (k < end && o < n) value = b[k * b_row + o * b_column];
#endif
        next_right[t] = value;
      }
    }
    if (k0 > begin) {
#pragma unroll
      for (int k = 0; k < DEEP; k++) {
        V4 x[EACH / 4], y[EACH / 4];
        for (int h = 0; h < EACH / 4; h++) {
          x[h] = *(__local const V4 *)&left[k][4 * (h * GROUP + ly)];
          y[h] = *(__local const V4 *)&right[k][4 * (h * GROUP + lx)];
        }
        for (int h = 0; h < EACH / 4; h++)
          for (int j = 0; j < EACH / 4; j++) {
            sums[4 * h][j] = x[h].s0 * y[j] + sums[4 * h][j];
            sums[4 * h + 1][j] = x[h].s1 * y[j] + sums[4 * h + 1][j];
            sums[4 * h + 2][j] = x[h].s2 * y[j] + sums[4 * h + 2][j];
            sums[4 * h + 3][j] = x[h].s3 * y[j] + sums[4 * h + 3][j];
          }
      }
    }
    if (k0 >= end) break;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int t = 0; t < COPIES; t++) left[LEFT_K(t)][LEFT_AT(t)] = next_left[t];
    for (int t = 0; t < COPIES; t++) right[RIGHT_K(t)][RIGHT_AT(t)] = next_right[t];
    barrier(CLK_LOCAL_MEM_FENCE);
  }
  int vectors = n % 4 == 0 && (size_t)c % sizeof(V4) == 0;
  for (int i = 0; i < EACH; i++) {
    int r = row + i / 4 * 4 * GROUP + 4 * ly + i % 4;
    if (r >= m) continue;
    for (int j = 0; j < EACH / 4; j++) {
      int o = column + 4 * (j * GROUP + lx);
      T part[4];
      vstore4(sums[i][j], 0, part);
#if !SPLIT
      for (int e = 0; e < 4; e++)
        if (o + e < n)
          part[e] = finish(part[e], r, o + e, n, bias, bias_row, bias_column, residual, alpha,
                           beta, p, q);
#endif
      if (vectors && o < n)
        *(__global V4 *)(c + r * n + o) = vload4(0, part);
      else
        for (int e = 0; e < 4; e++)
          if (o + e < n) c[r * n + o + e] = part[e];
    }
  }
}

// Each work-item adds the sums of the slices of one element of C = [count][m][n].
__kernel void total(__global const T *part, int part0, __global T *c, int c0,
                    __global const T *bias, int bias0, __global const T *residual,
                    int residual0, int slices, int size, int m, int n, int bias_row,
                    int bias_column, T alpha, T beta, T p, T q, int size2, int bias_step) {
  int e = get_global_id(0);
  if (e >= size) return;
  int number = e / n / m;
  bias += bias0 + number % size2 * bias_step;
  residual += residual0 + number * m * n;
  T sum = 0;
  for (int s = 0; s < slices; s++) sum += part[part0 + s * size + e];
  c[c0 + e] = finish(sum, e / n % m, e % n, n, bias, bias_row, bias_column, residual, alpha, beta,
                     p, q);
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
__kernel void pixels(__global const T *x, int x0, __global T *y, int y0, int channels, WINDOW_SIZES,
                     int panels) {
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
