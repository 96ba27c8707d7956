// TopK, NonZero, Compress, Unique, NonMaxSuppression. T: element, REAL: whether it may be NaN.
// A team is one work-item (GROUP 1) or a work-group; ME is the work-item's index in its team.

#if GROUP == 1
#define TEAM get_global_id(0)
#define ME 0
#else
#define TEAM get_group_id(0)
#define ME get_local_id(0)
#endif
#if REAL
#define IS_NAN(x) isnan(x)
#else
#define IS_NAN(x) 0
#endif

#if defined(T)
// Returns less than zero if row a of ``length`` elements is smaller than row b, and zero if they are
// equal. NaN equals NaN and is larger than all others.
int compare(__global const T *x, int a, int b, int step, int length) {
  for (int e = 0; e < length; e++) {
    T p = x[a * step + e], q = x[b * step + e];
    if (p < q || (IS_NAN(q) && !IS_NAN(p))) return -1;
    if (q < p || (IS_NAN(p) && !IS_NAN(q))) return 1;
  }
  return 0;
}
#endif

#if defined(ORDER)
// Sorts the indices of each line by their elements; of equal elements the lower index is first. A
// line of the result has room for ``size`` indices, of which the first ``most`` are computed.
// Elements of a line are ``inner`` apart. COUNTED: the indices to sort are in ``order``, ``counts``
// is their number for each line; else all indices are sorted.
#if COUNTED
#define MANY counts[c0 + line]
#else
#define MANY size
#endif

int before(__global const T *x, int a, int b, int step, int length) {
  int order = compare(x, a, b, step, length);
#if DESCENDING
  order = -order;
#endif
  return order < 0 || (order == 0 && a < b);
}

// Moves an index down in a heap, from the free entry ``at``.
void sink(__global const T *x, __global int *heap, int moving, int at, int count, int step,
          int length) {
  for (int child; (child = 2 * at + 1) < count; at = child) {
    if (child + 1 < count && before(x, heap[child], heap[child + 1], step, length)) child++;
    if (!before(x, moving, heap[child], step, length)) break;
    heap[at] = heap[child];
  }
  heap[at] = moving;
}

#define LINE                                            \
  x += x0 + line / inner * size * inner + line % inner; \
  order += order0 + line * size;                        \
  spare += spare0 + line * size

// One work-item sorts a run of ``width`` indices: it merges from runs of one index on, from either
// buffer to the other; the result is in ``order``.
__kernel void runs(int count, __global const T *x, int x0, __global int *order, int order0,
                   __global int *spare, int spare0, __global const int *counts, int c0, int size,
                   int inner, int length, int most, int width, int in_line) {
  int id = get_global_id(0);
  if (id >= count) return;
  int line = id / in_line, begin = id % in_line * width, end = min(MANY - begin, width) + begin;
  int step = inner * length;
  LINE;
  __global int *from = order, *to = spare;
#if !COUNTED
  for (int i = begin; i < end; i++) from[i] = i;
#endif
  for (int w = 1; w < end - begin; w *= 2) {
    for (int low = begin; low < end; low += 2 * w) {
      // Only the first ``most`` indices of a run can be among the first ``most`` of the merged run.
      int i = low, j = low + w, held = min(w, most), last = min(low + most, end);
      int last_i = min(i + held, end), last_j = min(j + held, end);
      for (int k = low; k < last && (i < last_i || j < last_j); k++) {
        int first = i < last_i && (j >= last_j || before(x, from[i], from[j], step, length));
        to[k] = first ? from[i++] : from[j++];
      }
    }
    __global int *other = from;
    from = to, to = other;
  }
  if (from != order)
    for (int i = begin; i < min(end, begin + most); i++) order[i] = from[i];
}

// The same by a heap of the ``most`` first indices of each run, the last of them on top: faster if
// ``most`` is small.
__kernel void picks(int count, __global const T *x, int x0, __global int *order, int order0,
                    __global int *spare, int spare0, __global const int *counts, int c0, int size,
                    int inner, int length, int most, int width, int in_line) {
  int id = get_global_id(0);
  if (id >= count) return;
  int line = id / in_line, begin = id % in_line * width, end = min(size - begin, width) + begin;
  int step = inner * length, held = min(most, end - begin);
  LINE;
  order += begin;
  for (int i = 0; i < held; i++) order[i] = begin + i;
  for (int i = held / 2 - 1; i >= 0; i--) sink(x, order, order[i], i, held, step, length);
  for (int i = begin + held; i < end; i++)
    if (before(x, i, order[0], step, length)) sink(x, order, i, 0, held, step, length);
  // The last of the picked indices is on top: taking it off again and again fills the run from its
  // end.
  for (int i = held - 1; i > 0; i--) {
    int moving = order[i];
    order[i] = order[0];
    sink(x, order, moving, 0, i, step, length);
  }
}

// Merges pairs of runs from ``order`` to ``spare``, of each run its first ``taken`` indices. A
// work-item writes ``chunk`` indices; it finds by bisection where in the two runs it begins.
__kernel void merge(int count, __global const T *x, int x0, __global const int *order, int order0,
                    __global int *spare, int spare0, __global const int *counts, int c0, int size,
                    int inner, int length, int most, int width, int in_line, int taken, int chunk,
                    int chunks) {
  int id = get_global_id(0);
  if (id >= count) return;
  int first = id % chunks * chunk, pair = id / chunks % in_line, line = id / chunks / in_line;
  int begin = pair * 2 * width, many = MANY - begin, step = inner * length;
  LINE;
  __global const int *a = order + begin, *b = a + width;
  int in_a = clamp(many, 0, taken), in_b = clamp(many - width, 0, taken);
  int last = min(min(first + chunk, most), in_a + in_b);
  // Index ``first`` of the merged run splits into i indices of a and first - i of b; i is found by
  // bisection, so that chunks need not wait for each other.
  int i = max(0, first - in_b), j = min(first, in_a);
  while (i < j) {
    int middle = (i + j) / 2;
    if (before(x, a[middle], b[first - 1 - middle], step, length)) i = middle + 1;
    else j = middle;
  }
  spare += begin;
  j = first - i;
  for (int k = first; k < last; k++) {
    int from_a = i < in_a && (j >= in_b || before(x, a[i], b[j], step, length));
    spare[k] = from_a ? a[i++] : b[j++];
  }
}

// Values and indices of TopK, from the sorted indices of each line.
__kernel void top(int count, __global const T *x, int x0, __global const int *order, int order0,
                  __global T *values, int v0, __global long *places, int p0, int size, int inner,
                  int k) {
  int id = get_global_id(0);
  if (id >= count) return;
  int i = id % inner, j = id / inner % k, row = id / inner / k;
  int place = order[order0 + (row * inner + i) * size + j];
  values[v0 + id] = x[x0 + (row * size + place) * inner + i];
  places[p0 + id] = place;
}
#endif

#if defined(SCAN) || defined(BOXES)
// Returns the number of flags set in the team before this work-item's; ``all``: in the whole team.
int set_before(int flag, int *all, __local int *sums) {
#if GROUP == 1
  *all = flag;
  return 0;
#else
  barrier(CLK_LOCAL_MEM_FENCE);
  sums[ME] = flag;
  for (int step = 1; step < GROUP; step *= 2) {
    barrier(CLK_LOCAL_MEM_FENCE);
    // The barrier after this line separates its reads from the writes below.
    int more = ME >= step ? sums[ME - step] : 0;
    barrier(CLK_LOCAL_MEM_FENCE);
    sums[ME] += more;
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  *all = sums[GROUP - 1];
  return sums[ME] - flag;
#endif
}
#endif

#if defined(SCAN)
// Numbers the flagged among ``size`` items, a prefix sum. Each team has ``chunk`` items: ``tally``
// counts the flagged ones of each, ``starts`` adds the counts up, ``number`` numbers the items.
// ALONE: one team runs ``number`` over all items.
#if SCAN == 0  // elements that are not zero: writes their indices
#define ARGUMENTS __global const T *x, int x0, __global long *places, int p0, \
                  __global const int *dims, int d0
#if HALF
#define FLAG(i) ((x[x0 + (i)] & 0x7fff) != 0)
#else
#define FLAG(i) (x[x0 + (i)] != 0)
#endif
#define PUT(i, set, n)                                            \
  if (set)                                                        \
    for (int d = RANK - 1, rest = i; d >= 0; rest /= dims[d--])   \
      places[p0 + d * size + n] = rest % dims[d]
#elif SCAN == 1  // sorted rows that differ from the row before: each begins a group
#define ARGUMENTS __global const T *x, int x0, __global const int *order, int order0, \
                  __global int *groups, int g0, __global int *begins, int b0,         \
                  __global int *firsts, int f0, int length
#define FLAG(i)            \
  ((i) == 0 || compare(x + x0, order[order0 + (i) - 1], order[order0 + (i)], length, length) != 0)
#define PUT(i, set, n)                    \
  groups[g0 + (i)] = (n) + (set) - 1;     \
  firsts[f0 + order[order0 + (i)]] = set; \
  if (set) begins[b0 + (n)] = i
#else  // rows that are the first of their group, in the order of the input
#define ARGUMENTS __global const int *firsts, int f0, __global int *numbers, int n0
#define FLAG(i) firsts[f0 + (i)]
#define PUT(i, set, n) \
  if (set) numbers[n0 + (i)] = n
#endif
#define MINE int begin = TEAM * chunk, end = min(begin + chunk, size)

__kernel void tally(int size, int chunk, __global int *counts, int c0, ARGUMENTS) {
  __local int shared[GROUP];
  MINE;
  int mine = 0, all;
  for (int i = begin + ME; i < end; i += GROUP) mine += FLAG(i);
  set_before(mine, &all, shared);
  if (ME == 0) counts[c0 + TEAM] = all;
}

__kernel void starts(int teams, __global int *counts, int c0, __global long *total, int t0) {
  __local int shared[GROUP];
  int start = 0, all;
  for (int base = 0; base < teams; base += GROUP) {
    int i = base + ME, mine = i < teams ? counts[c0 + i] : 0;
    int place = start + set_before(mine, &all, shared);
    if (i < teams) counts[c0 + i] = place;
    start += all;
  }
  if (ME == 0) total[t0] = start;
}

__kernel void number(int size, int chunk, __global const int *counts, int c0, __global long *total,
                     int t0, ARGUMENTS) {
  __local int shared[GROUP];
  MINE;
#if ALONE
  int start = 0, all;
#else
  int start = counts[c0 + TEAM], all;
#endif
  for (int base = begin; base < end; base += GROUP) {
    int i = base + ME, set = i < end && FLAG(i);
    int place = start + set_before(set, &all, shared);
    if (i < end) {
      PUT(i, set, place);
    }
    start += all;
  }
#if ALONE
  if (ME == 0) total[t0] = start;
#endif
}
#endif

#if defined(COMPRESS)
// Copies the slices of ``step`` elements whose indices are listed.
__kernel void compress(int count, __global const T *x, int x0, __global const long *places, int p0,
                       __global const long *total, int t0, __global T *y, int y0, int size,
                       int room, int step) {
  int id = get_global_id(0);
  if (id >= count) return;
  int i = id % step, j = id / step % room, outer = id / step / room;
  if (j < total[t0]) y[y0 + id] = x[x0 + (outer * size + (int)places[p0 + j]) * step + i];
}
#endif

#if defined(DISTINCT)
// The outputs of Unique, from the sorted rows and their groups. SORTED: groups are in the order of
// their rows, else in that of their first appearance.
__kernel void distinct(int count, __global const T *x, int x0, __global const int *order, int order0,
                       __global const int *groups, int g0, __global const int *begins, int b0,
                       __global const int *numbers, int n0, __global const long *total, int t0,
                       __global T *y, int y0, __global long *first, int f0, __global long *inverse,
                       int i0, __global long *counts, int c0, int rows, int length) {
  int id = get_global_id(0);
  if (id >= count) return;
  int wide = max(length, 1), k = id / wide, e = id % wide;
  int group = groups[g0 + k], begin = begins[b0 + group];
  int row = order[order0 + begin];
#if SORTED
  int at = group;
#else
  int at = numbers[n0 + row];
#endif
  if (e == 0) inverse[i0 + order[order0 + k]] = at;
  // One work-item of each group writes its outputs.
  if (k != begin) return;
  if (e < length) y[y0 + at * length + e] = x[x0 + row * length + e];
  if (e != 0) return;
  first[f0 + at] = row;
  counts[c0 + at] = (group + 1 < total[t0] ? begins[b0 + group + 1] : rows) - begin;
}
#endif

#if defined(BOXES)
// A fused multiplication would round the overlap differently than the CPU and could decide
// otherwise about a box at the threshold.
#pragma OPENCL FP_CONTRACT OFF

// The boxes of each class (line) whose score exceeds the threshold.
__kernel void candidates(int lines, __global const float *scores, int s0,
                         __global const float *least, int l0, __global int *order, int order0,
                         __global int *counts, int c0, int boxes) {
  __local int shared[GROUP];
  int line = TEAM, start = 0, all;
  if (line >= lines) return;
  scores += s0 + line * boxes;
  for (int base = 0; base < boxes; base += GROUP) {
    int i = base + ME, set = i < boxes && (!SCORED || scores[i] > least[l0]);
    int place = start + set_before(set, &all, shared);
    if (set) order[order0 + line * boxes + place] = i;
    start += all;
  }
  if (ME == 0) counts[c0 + line] = start;
}

// The two corners of a box, the lower first.
float4 corners(__global const float *boxes, int place) {
  float4 box = vload4(place, boxes);
#if CENTRED
  float2 half_size = box.hi / 2;
  return (float4)(box.lo - half_size, box.lo + half_size);
#else
  return (float4)(fmin(box.lo, box.hi), fmax(box.lo, box.hi));
#endif
}

// Intersection over union.
float overlap(float4 a, float4 b) {
  float2 size = fmin(a.hi, b.hi) - fmax(a.lo, b.lo);
  float first = (a.z - a.x) * (a.w - a.y), second = (b.z - b.x) * (b.w - b.y);
  if (size.x <= 0 || size.y <= 0 || first <= 0 || second <= 0) return 0;
  float common = size.x * size.y;
  return common / (first + second - common);
}

// Selects boxes of a class, the best first; each is compared with those selected before.
__kernel void suppress(int lines, __global const float *boxes, int boxes0,
                       __global const int *order, int order0, __global const int *counts, int c0,
                       __global const long *most, int m0, __global const float *limit, int l0,
                       __global long *picked, int p0, __global long *many, int many0, int number,
                       int classes, int room) {
  __local int found;
  int line = TEAM, taken = 0;
  if (line >= lines) return;
  boxes += boxes0 + line / classes * number * 4;
  order += order0 + line * number;
  picked += p0 + line * room;
  float least = LIMITED ? limit[l0] : 0;
  int wanted = (int)clamp(most[m0], 0L, (long)room), end = counts[c0 + line];
  for (int c = 0; c < end && taken < wanted; c++) {
    int place = order[c], hit = 0;
    float4 box = corners(boxes, place);
#if GROUP > 1
    if (ME == 0) found = 0;
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
#endif
    for (int k = ME; k < taken && !hit; k += GROUP)
      hit = overlap(box, corners(boxes, (int)picked[k])) > least;
#if GROUP > 1
    if (hit) found = 1;
    barrier(CLK_LOCAL_MEM_FENCE);
    hit = found;
    barrier(CLK_LOCAL_MEM_FENCE);
#endif
    if (hit) continue;
    if (ME == 0) picked[taken] = place;
    taken++;
  }
  if (ME == 0) many[many0 + line] = taken;
}

// Joins the selected boxes of all classes.
__kernel void gather_picked(int lines, __global const long *picked, int p0,
                            __global const long *many, int many0, __global long *y, int y0,
                            __global long *total, int t0, int classes, int room) {
  int line = TEAM, start = 0;
  if (line >= lines) return;
  // Each class adds up the counts of the classes before it, which saves a kernel for a prefix sum.
  for (int k = 0; k < line; k++) start += many[many0 + k];
  int own = many[many0 + line];
  for (int k = ME; k < own; k += GROUP)
    vstore3((long3)(line / classes, line % classes, picked[p0 + line * room + k]), start + k, y + y0);
  if (ME == 0 && line == lines - 1) total[t0] = start + own;
}
#endif
