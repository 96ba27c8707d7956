// LinearAttention (linear_kernels.py): a work-item computes one column of a head's state, token by
// token. T: element; GATED: the state decays; DELTA: update by the delta rule; PAST: there is a
// state to begin with.

__kernel void linear_attention(int count, __global const T *query, int q0, __global const T *key,
                               int k0, __global const T *value, int v0, __global const T *past,
                               int past0, __global const T *decay, int decay0,
                               __global const T *beta, int beta0, __global T *y, int y0,
                               __global T *state, int state0, int tokens, int heads, int owners,
                               int keys, int values, T scale, int decays, int betas) {
  int id = get_global_id(0);
  if (id >= count) return;
  int j = id % values, unit = id / values, own = unit % owners, shared = heads / owners;
  // Both rules change a column of the state by that column alone, so no barrier is needed. The
  // addresses of adjacent work-items are adjacent.
  state += state0 + unit * keys * values + j;
  past += past0 + unit * keys * values + j;
  for (int i = 0; i < keys; i++) state[i * values] = PAST ? past[i * values] : (T)0;
  for (int t = 0; t < tokens; t++) {
    int token = unit / owners * tokens + t, row = token * owners + own;
    __global const T *mine = key + k0 + row * keys;
    T added = value[v0 + row * values + j];
#if GATED
    for (int i = 0; i < keys; i++) state[i * values] *= decay[decay0 + row * decays + i % decays];
#endif
#if DELTA
    for (int i = 0; i < keys; i++) added -= mine[i] * state[i * values];
    added *= beta[beta0 + token * betas + own % betas];
#endif
    for (int i = 0; i < keys; i++) state[i * values] += mine[i] * added;
    for (int h = own * shared; h < (own + 1) * shared; h++) {
      __global const T *asked = query + q0 + (token * heads + h) * keys;
      T sum = 0;
      for (int i = 0; i < keys; i++) sum += asked[i] * scale * state[i * values];
      y[y0 + (token * heads + h) * values + j] = sum;
    }
  }
}
