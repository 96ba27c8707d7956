// Attention: softmax(scale * Q K' + mask) V, with running maximum and sum over blocks of BLOCK
// keys, so scores are never stored. One work-item computes one query. DEPTH, VALUES: sizes of a
// head; SHARED: a GPU's work-group reads each block through local memory. ZERO_UNSEEN: a query
// that sees no key gives 0, not NaN. T: element.

#if defined(DEPTH)
#define STEPS(name) int name##_b, int name##_h, int name##_t, int name##_d
#define WIDE 8

__kernel void attention(int queries, __global const T *q, int q0, __global const T *k, int k0,
                        __global const T *v, int v0, __global T *out, int out0,
                        __global const T *mask, int mask0, int keys, int heads, int sharing,
                        STEPS(q), STEPS(k), STEPS(v), STEPS(o), STEPS(m), T scale, int causal,
                        int offset) {
  int query = get_global_id(0), head = get_global_id(1) % heads;
  int batch = get_global_id(1) / heads;
  int real = query < queries;
#if SHARED
  __local T key_block[BLOCK][DEPTH], value_block[BLOCK][VALUES];
#else
  if (!real) return;
#endif
  int row = real ? query : 0;
  q += q0 + batch * q_b + head * q_h + row * q_t;
  k += k0 + batch * k_b + head / sharing * k_h;
  v += v0 + batch * v_b + head / sharing * v_h;
  mask += mask0 + batch * m_b + head * m_h + row * m_t;
  T mine[DEPTH], sums[VALUES], top = -INFINITY, total = 0;
  for (int d = 0; d < DEPTH; d++) mine[d] = q[d] * scale;
  for (int d = 0; d < VALUES; d++) sums[d] = 0;
  for (int first = 0; first < keys; first += BLOCK) {
    int many = min(BLOCK, keys - first);
#if SHARED
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int e = get_local_id(0); e < many * DEPTH; e += get_local_size(0))
      key_block[e / DEPTH][e % DEPTH] = k[(first + e / DEPTH) * k_t + e % DEPTH * k_d];
    for (int e = get_local_id(0); e < many * VALUES; e += get_local_size(0))
      value_block[e / VALUES][e % VALUES] = v[(first + e / VALUES) * v_t + e % VALUES * v_d];
    barrier(CLK_LOCAL_MEM_FENCE);
#endif
    T scores[BLOCK], best = top;
    int seen = 0;
    for (int j = 0; j < many; j++) {
      T parts[WIDE];
      for (int e = 0; e < WIDE; e++) parts[e] = 0;
      int d = 0;
#if SHARED
#define KEY(d) key_block[j][d]
#define VALUE(d) value_block[j][d]
#else
      __global const T *key = k + (first + j) * k_t;
#define KEY(d) key[(d) * k_d]
#define VALUE(d) value[(d) * v_d]
      if (k_d == 1)
        for (; d + WIDE <= DEPTH; d += WIDE)
          for (int e = 0; e < WIDE; e++) parts[e] += mine[d + e] * key[d + e];
#endif
      for (; d < DEPTH; d++) parts[0] += mine[d] * KEY(d);
      T score = ((parts[0] + parts[1]) + (parts[2] + parts[3])) +
                ((parts[4] + parts[5]) + (parts[6] + parts[7]));
#if MASKED
      score += mask[(first + j) * m_d];
#endif
      if (causal && first + j > row + offset) score = -INFINITY;
      scores[j] = score;
      best = score > best ? score : best;
      seen |= score != -INFINITY;
    }
    if (!seen) continue;
    T shrink = exp(top - best);
    top = best;
    total *= shrink;
    for (int d = 0; d < VALUES; d++) sums[d] *= shrink;
    for (int j = 0; j < many; j++) {
      T weight = exp(scores[j] - top);
      total += weight;
#if SHARED
      for (int d = 0; d < VALUES; d++) sums[d] += weight * VALUE(d);
#else
      __global const T *value = v + (first + j) * v_t;
      if (v_d == 1)
        for (int d = 0; d < VALUES; d++) sums[d] += weight * value[d];
      else
        for (int d = 0; d < VALUES; d++) sums[d] += weight * VALUE(d);
#endif
    }
  }
  if (!real) return;
#if ZERO_UNSEEN
  if (total == 0) total = 1;
#endif
  out += out0 + batch * o_b + head * o_h + row * o_t;
  for (int d = 0; d < VALUES; d++) out[d] = sums[d] / total;
}
#endif

#if defined(MASK)
// Writes what is added to scores: the mask (MASK 1: booleans, 2: numbers, 0: none), minus infinity
// where a query does not see a key. A work-item (GROUP 1) or a work-group writes a row. M: element
// of the mask, which has ``known`` keys; ``before``: keys before the first query; COUNTED: the keys
// of a sample after the first ``counts`` are padding, and the queries are the last before it.
__kernel void bias(int rows, __global T *y, int y0, __global const M *mask, int mask0, int m_b,
                   int m_h, int m_q, int m_k, int known, int heads, int queries, int keys,
                   int causal, int before, int left, int right, __global const long *counts, int c0,
                   __global T *flags, int f0) {
  __local int found;
#if GROUP == 1
  int row = get_global_id(0), me = 0;
  if (row >= rows) return;
#else
  int row = get_group_id(0), me = get_local_id(0);
#endif
  int query = row % queries, head = row / queries % heads, batch = row / queries / heads;
  int last = keys, seen = 0;
  mask += mask0 + batch * m_b + head * m_h + query * m_q;
#if COUNTED
  last = (int)counts[c0 + batch];
  before = last - queries;
#endif
  for (int key = me; key < keys; key += GROUP) {
    int distance = query + before - key;
    int is_free = key < last && (!causal || distance >= 0) && (left < 0 || distance <= left) &&
                  (right < 0 || -distance <= right);
    T value = 0;
#if MASK
    is_free = is_free && key < known;
#endif
#if MASK == 1
    is_free = is_free && mask[key * m_k];
#elif MASK == 2
    if (is_free) value = mask[key * m_k];
#endif
    value = is_free ? value : -INFINITY;
    seen |= value != -INFINITY;
    y[y0 + row * keys + key] = value;
  }
#if GROUP > 1
  if (me == 0) found = 0;
  barrier(CLK_LOCAL_MEM_FENCE);
  if (seen) atomic_or(&found, 1);
  barrier(CLK_LOCAL_MEM_FENCE);
  seen = found;
#endif
  if (me == 0) flags[f0 + row] = seen;
}
#endif
