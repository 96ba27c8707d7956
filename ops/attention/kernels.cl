// Attention: softmax(scale * Q K' + mask) V, with running maximum and sum over blocks of BLOCK
// keys, so scores are never stored. DEPTH, VALUES: sizes of a head; ZERO_UNSEEN: a query that sees
// no key gives 0, not NaN (1), and one with a score of NaN, too (2); SINKS: each head has a further
// key without value, whose score is in ``sinks``; STARTS: samples have offsets of their own;
// BOUNDED: scores s are softcap * tanh(s) before the mask is added. T: element.

#if defined(DEPTH)
#define STEPS(name) int name##_b, int name##_h, int name##_t, int name##_d
#define ARGUMENTS                                                                              \
  int queries, __global const T *q, int q0, __global const T *k, int k0, __global const T *v,  \
      int v0, __global T *out, int out0, __global const T *mask, int mask0,                    \
      __global const T *sinks, int sinks0, __global const long *starts, int starts0, int keys, \
      int heads, int sharing, STEPS(q), STEPS(k), STEPS(v), STEPS(o), STEPS(m), T scale,       \
      T softcap, int causal, int offset, int window
// Find the query and its head, and advance the pointers to their rows. The queries of all heads are
// numbered along one dimension, those of each head rounded up to work-groups.
// Work-items after the last query read query 0 and write nothing: on a GPU they have to reach the
// barriers of their work-group.
#define QUERY                                                \
  int padded = (queries + QUERIES - 1) / QUERIES * QUERIES;  \
  int query = get_global_id(0) % padded;                     \
  int head = get_global_id(0) / padded % heads;              \
  int batch = get_global_id(0) / padded / heads;             \
  int real = query < queries, row = real ? query : 0;        \
  q += q0 + batch * q_b + head * q_h + row * q_t;            \
  k += k0 + batch * k_b + head / sharing * k_h;              \
  v += v0 + batch * v_b + head / sharing * v_h;              \
  mask += mask0 + batch * m_b + head * m_h + row * m_t;      \
  offset = STARTS ? (int)clamp(starts[starts0 + batch], 0L, (long)keys) : offset; \
  out += out0 + batch * o_b + head * o_h + row * o_t

#if SINKS
#define FIRST_TOP sinks[sinks0 + head]
#else
#define FIRST_TOP (-INFINITY)
#endif

// The score of a key, from the product of query and key.
T seen_score(T score, int key, int position, __global const T *mask, int m_d, T softcap,
             int causal, int window) {
#if BOUNDED
  score = softcap * tanh(score);
#endif
#if MASKED
  score += mask[key * m_d];
#endif
  return causal && (key > position || (window && key <= position - window)) ? -INFINITY : score;
}
#endif

#if defined(DEPTH) && PARTS == 1
#define WIDE 8

// For a CPU: one work-item computes one query.
__kernel void attention(ARGUMENTS) {
  QUERY;
  if (!real) return;
  T mine[DEPTH], sums[VALUES], top = FIRST_TOP, total = top != -INFINITY;
  for (int d = 0; d < DEPTH; d++) mine[d] = q[d] * scale;
  for (int d = 0; d < VALUES; d++) sums[d] = 0;
  for (int first = 0; first < keys; first += BLOCK) {
    int many = min(BLOCK, keys - first);
    T scores[BLOCK], best = top;
    int seen = 0;
    for (int j = 0; j < many; j++) {
      // A compiler may not reorder the additions of one sum, but it can keep eight independent sums
      // in vectors.
      T parts[WIDE];
      for (int e = 0; e < WIDE; e++) parts[e] = 0;
      int d = 0;
      __global const T *key = k + (first + j) * k_t;
      // If the compiler knows the stride to be 1, it can use vector loads.
      if (k_d == 1)
        for (; d + WIDE <= DEPTH; d += WIDE)
          for (int e = 0; e < WIDE; e++) parts[e] += mine[d + e] * key[d + e];
      for (; d < DEPTH; d++) parts[0] += mine[d] * key[d * k_d];
      T score = ((parts[0] + parts[1]) + (parts[2] + parts[3])) +
                ((parts[4] + parts[5]) + (parts[6] + parts[7]));
      scores[j] = seen_score(score, first + j, row + offset, mask, m_d, softcap, causal,
                             window);
      best = scores[j] > best ? scores[j] : best;
      seen |= scores[j] != -INFINITY;
    }
    // While no key was seen the maximum is minus infinity, and exp(-inf - -inf) would be NaN.
    if (!seen) continue;
    // Sums so far are relative to the former maximum. Before the first visible key the factor is
    // exp(-inf), which is 0, as the sums are.
    T shrink = exp(top - best);
    top = best;
    total *= shrink;
    for (int d = 0; d < VALUES; d++) sums[d] *= shrink;
    for (int j = 0; j < many; j++) {
      T weight = exp(scores[j] - top);
      total += weight;
      __global const T *value = v + (first + j) * v_t;
      if (v_d == 1)
        for (int d = 0; d < VALUES; d++) sums[d] += weight * value[d];
      else
        for (int d = 0; d < VALUES; d++) sums[d] += weight * value[d * v_d];
    }
  }
#if ZERO_UNSEEN
  if (total == 0) total = 1;
#endif
  for (int d = 0; d < VALUES; d++) out[d] = ZERO_UNSEEN == 2 && !(total > 0) ? 0 : sums[d] / total;
}
#endif

#if defined(DEPTH) && PARTS > 1
// For a GPU: a work-group computes QUERIES queries. PARTS work-items share a query: each takes every
// PARTS-th key of a block in local memory, and they join their sums at the end. Heads are padded to
// vectors of 4 with zeros.
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define V4 JOIN(T, 4)
#define DEEP ((DEPTH + 3) / 4)
#define WIDE ((VALUES + 3) / 4)
#define EACH (BLOCK / PARTS)

__kernel __attribute__((reqd_work_group_size(QUERIES, PARTS, 1))) void attention(ARGUMENTS) {
  __local V4 key_block[BLOCK][DEEP], value_block[BLOCK][WIDE], sums_of[PARTS][QUERIES];
  __local T tops[PARTS][QUERIES], totals[PARTS][QUERIES];
  int mine = get_local_id(0), part = get_local_id(1), me = part * QUERIES + mine;
  QUERY;
  V4 asked[DEEP], sums[WIDE];
  for (int d = 0; d < DEEP; d++) {
    T four[4];
    for (int e = 0; e < 4; e++) four[e] = 4 * d + e < DEPTH ? q[(4 * d + e) * q_d] * scale : (T)0;
    asked[d] = vload4(0, four);
  }
  for (int d = 0; d < WIDE; d++) sums[d] = 0;
  T top = part == 0 ? FIRST_TOP : -INFINITY, total = top != -INFINITY;
  // The last key that any query of the work-group sees: all work-items need the same bound, as they
  // share the blocks and their barriers.
  int last = query - mine + QUERIES - 1 + offset;
  int end = causal ? min(keys, last + 1) : keys;
  for (int first = 0; first < end; first += BLOCK) {
    int many = min(BLOCK, end - first);
    // The block may be overwritten only after all work-items have used it.
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int e = me; e < many * DEEP * 4; e += QUERIES * PARTS) {
      int j = e / (DEEP * 4), d = e % (DEEP * 4);
      ((__local T *)key_block)[e] = d < DEPTH ? k[(first + j) * k_t + d * k_d] : (T)0;
    }
    for (int e = me; e < many * WIDE * 4; e += QUERIES * PARTS) {
      int j = e / (WIDE * 4), d = e % (WIDE * 4);
      ((__local T *)value_block)[e] = d < VALUES ? v[(first + j) * v_t + d * v_d] : (T)0;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    T scores[EACH], best = top;
    int seen = 0;
    for (int i = 0; i < EACH; i++) {
      int j = i * PARTS + part;
      if (j >= many) break;
      V4 sum = 0;
      for (int d = 0; d < DEEP; d++) sum = asked[d] * key_block[j][d] + sum;
      T score = (sum.s0 + sum.s1) + (sum.s2 + sum.s3);
      scores[i] = seen_score(score, first + j, row + offset, mask, m_d, softcap, causal,
                             window);
      best = scores[i] > best ? scores[i] : best;
      seen |= scores[i] != -INFINITY;
    }
    // Both barriers are above, so that a work-item may leave out the rest of an iteration by
    // itself.
    if (!seen) continue;
    T shrink = exp(top - best);
    top = best;
    total *= shrink;
    for (int d = 0; d < WIDE; d++) sums[d] *= shrink;
    for (int i = 0; i < EACH; i++) {
      int j = i * PARTS + part;
      if (j >= many) break;
      T weight = exp(scores[i] - top);
      total += weight;
      for (int d = 0; d < WIDE; d++) sums[d] = weight * value_block[j][d] + sums[d];
    }
  }
  tops[part][mine] = top;
  totals[part][mine] = total;
  barrier(CLK_LOCAL_MEM_FENCE);
  T best = tops[0][mine], weight = 0;
  for (int p = 1; p < PARTS; p++) best = tops[p][mine] > best ? tops[p][mine] : best;
  T whole = 0;
  for (int p = 0; p < PARTS; p++) {
    // A part that saw no key has no weight, also where no part has seen one.
    T of = totals[p][mine] == 0 ? (T)0 : exp(tops[p][mine] - best);
    whole += totals[p][mine] * of;
    weight = p == part ? of : weight;
  }
#if ZERO_UNSEEN
  if (whole == 0) whole = 1;
#endif
  // One vector of the results is exchanged at a time, which bounds the local memory; the parts add
  // up the vectors in turn.
  for (int d = 0; d < WIDE; d++) {
    barrier(CLK_LOCAL_MEM_FENCE);
    sums_of[part][mine] = sums[d] * weight;
    barrier(CLK_LOCAL_MEM_FENCE);
    if (part != d % PARTS || !real) continue;
    V4 sum = 0;
    for (int p = 0; p < PARTS; p++) sum += sums_of[p][mine];
    T four[4];
    vstore4(ZERO_UNSEEN == 2 && !(whole > 0) ? (V4)0 : sum / whole, 0, four);
    for (int e = 0; e < 4 && 4 * d + e < VALUES; e++) out[(4 * d + e) * o_d] = four[e];
  }
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
  // A work-item has seen only some keys of the row; the flag is about all of them.
  if (me == 0) found = 0;
  barrier(CLK_LOCAL_MEM_FENCE);
  if (seen) atomic_or(&found, 1);
  barrier(CLK_LOCAL_MEM_FENCE);
  seen = found;
#endif
  if (me == 0) flags[f0 + row] = seen;
}
#endif
