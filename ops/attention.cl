// Attention: softmax(scale * Q K' + mask) V, the softmax online over blocks of BLOCK keys, so that
// scores are never stored. One work-item has one query. DEPTH, VALUES: sizes of a head; SHARED: a
// GPU's group reads each block of keys through local memory. T: element.

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
    }
    if (best == -INFINITY) continue;
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
  out += out0 + batch * o_b + head * o_h + row * o_t;
  for (int d = 0; d < VALUES; d++) out[d] = sums[d] / total;
}
