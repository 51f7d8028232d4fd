// The record of one operation, vectors, and buffers that each thread keeps.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

// One operation.  p: addresses, the output first.  nd: dimensions, if they vary.  i: sizes and
// strides, in elements.  c: constants.  The translator (translate.py) proves every bound.
struct Op {
    int32_t kind, nd;
    char* p[8];
    int32_t i[30];
    double c[4];
};

#if defined(__AVX512F__)
constexpr int W = 16, ROWS = 8, VECTORS = 3;
#elif defined(__AVX2__)
constexpr int W = 8, ROWS = 6, VECTORS = 2;
#else
constexpr int W = 4, ROWS = 6, VECTORS = 4;
#endif
typedef float vec __attribute__((vector_size(4 * W)));
typedef float vec8 __attribute__((vector_size(32)));

template <class V = vec>
static inline V load(const float* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}
template <class V>
static inline void store(float* p, V v) {
    memcpy(p, &v, sizeof v);
}
static inline vec fill(float x) { return x - vec{}; }

// The sum of a vector's numbers, and the largest.
#define HALVES(v, add)                                                  \
    auto a = __builtin_shufflevector(v, v, 0, 1, 2, 3);                 \
    if constexpr (W >= 8) a = add(a, __builtin_shufflevector(v, v, 4 % W, 5 % W, 6 % W, 7 % W)); \
    if constexpr (W >= 16) {                                            \
        auto b = __builtin_shufflevector(v, v, 8 % W, 9 % W, 10 % W, 11 % W); \
        auto c = __builtin_shufflevector(v, v, 12 % W, 13 % W, 14 % W, 15 % W); \
        a = add(a, add(b, c));                                          \
    }                                                                   \
    a = add(a, __builtin_shufflevector(a, a, 2, 3, 0, 1));              \
    a = add(a, __builtin_shufflevector(a, a, 1, 0, 3, 2));              \
    return a[0];
template <class V>
static inline V sum2(V x, V y) { return x + y; }
template <class V>
static inline V max2(V x, V y) { return x > y ? x : y; }
static inline float total(vec v) { HALVES(v, sum2) }
static inline float largest(vec v) { HALVES(v, max2) }

// The largest of n numbers; NaN do not count.
static inline float max_row(const float* x, int n) {
    vec top = fill(-INFINITY);
    int j = 0;
    for (; j + W <= n; j += W) top = max2(load(x + j), top);
    float t = largest(top);
    for (; j < n; j++) t = x[j] > t ? x[j] : t;
    return t;
}

// A buffer of this thread, number `which`, of at least n floats, from a multiple of 64 bytes on.
static inline float* buffer(int which, size_t n) {
    thread_local std::vector<float> buffers[6];
    auto& b = buffers[which];
    if (b.size() < n + 16) b.resize(n + 16);
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(b.data()) + 63) / 64 * 64);
}

// Sum of f(j) for j < n, where f(j, vec) gives W terms and f(j, float) one; four sums in turn.
template <class F, class G>
static inline float sum_terms(int n, F terms, G term) {
    vec s[4] = {};
    int j = 0;
    for (; j + 4 * W <= n; j += 4 * W)
        for (int u = 0; u < 4; u++) s[u] += terms(j + u * W);
    for (; j + W <= n; j += W) s[0] += terms(j);
    float rest = 0;
    for (; j < n; j++) rest += term(j);
    return total((s[0] + s[1]) + (s[2] + s[3])) + rest;
}
