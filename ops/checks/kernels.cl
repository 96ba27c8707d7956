// Reports the first of ``count`` values that is outside [least, most]; see the CPU's in_range.
__kernel void in_range(__global const T *values, int values0, int count, int step, int least,
                       int most, long ignored, __global long *slot, int number) {
  for (int k = 0; k < count; k++) {
    T value = values[values0 + k * step];
    if (!(value > (T)least - 1 && value < (T)most + 1) && value != (T)ignored && slot[0] == 0) {
      slot[0] = number;
      slot[1] = (long)value;
      slot[2] = least;
      slot[3] = most;
    }
  }
}
