// RotaryEmbedding: one work-item for each element; T: element. Of the first 2 * part elements of a
// head, pairs are rotated by the angle of their token: (2 i, 2 i + 1) if PAIRS, else (i, i + part).

#if POSITIONS
#define POSITION long
#else
#define POSITION T  // not read
#endif

__kernel void rotate_pairs(int count, __global const T *x, int x0, __global T *y, int y0,
                   __global const T *cosines, int cosines0, __global const T *sines, int sines0,
                   __global const POSITION *positions, int positions0, int heads, int tokens,
                   int size, int part, int batch_step, int head_step, int token_step, int rows) {
  int id = get_global_id(0);
  if (id >= count) return;
  int i = id % size, head = id / size % heads, unit = id / size / heads;
  int at = unit / tokens * batch_step + unit % tokens * token_step + head * head_step;
  x += x0 + at;
  y += y0 + at;
  if (i >= 2 * part) {
    y[i] = x[i];
    return;
  }
  int row = unit;
#if POSITIONS
  long position = positions[positions0 + unit];
  // Positions are data: one that is out of range must not read outside the caches.
  row = position < 0 ? 0 : position >= rows ? rows - 1 : (int)position;
#endif
  int k = PAIRS ? i / 2 : i % part, second = PAIRS ? i % 2 : i / part;
  T c = cosines[cosines0 + row * part + k], s = sines[sines0 + row * part + k];
  T other = x[PAIRS ? i ^ 1 : second ? i - part : i + part];
  y[i] = second ? x[i] * c + other * s : x[i] * c - other * s;
}
