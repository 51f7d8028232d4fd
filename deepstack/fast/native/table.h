// The record of one operation, vectors, and buffers that each thread keeps.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#if defined(__AVX2__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

// Compiled into its caller, whose loop can then become vector code.
#define IN_CALLER __attribute__((always_inline))
#define INLINE IN_CALLER static inline

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
typedef float vec4 __attribute__((vector_size(16)));

// SHUFFLE: the numbers at these places of a and b, which lie side by side.  quarter: numbers 4 q
// to 4 q + 3.
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
template <int Q>
static inline vec4 quarter(vec v) {
    return __builtin_shufflevector(v, v, 4 * Q, 4 * Q + 1, 4 * Q + 2, 4 * Q + 3);
}
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, decltype((a) > (b)){__VA_ARGS__})
template <int Q>
static inline vec4 quarter(vec v) {
    vec4 part;
    memcpy(&part, reinterpret_cast<const char*>(&v) + 16 * Q, 16);
    return part;
}
#endif

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

// s + x y, rounded once where the processor can: compilers leave some chains of them unfused, so
// that numbers would depend on the shape of a tile, or on the columns of a thread.
static inline vec fused(vec s, vec x, vec y) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)s);
#elif defined(__AVX2__) && defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)s);
#elif defined(__FMA__)
    return (vec)_mm_fmadd_ps((__m128)x, (__m128)y, (__m128)s);
#elif defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)s, (float32x4_t)x, (float32x4_t)y);
#else
    return s + x * y;
#endif
}
static inline float fused(float s, float x, float y) {
#if defined(__AVX512F__) || defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(x, y, s);
#else
    return s + x * y;
#endif
}

template <class V>
static inline V sum2(V x, V y) { return x + y; }
template <class V>
static inline V max2(V x, V y) { return x > y ? x : y; }

// What f makes of all numbers of a vector, by halves.
template <class F>
static inline float reduce_vector(vec v, F f) {
    vec4 a = quarter<0>(v);
    if constexpr (W >= 8) a = f(a, quarter<1 % (W / 4)>(v));
    if constexpr (W >= 16) a = f(a, f(quarter<2 % (W / 4)>(v), quarter<3 % (W / 4)>(v)));
    a = f(a, SHUFFLE(a, a, 2, 3, 0, 1));
    return f(a, SHUFFLE(a, a, 1, 0, 3, 2))[0];
}
static inline float total(vec v) { return reduce_vector(v, sum2<vec4>); }
static inline float largest(vec v) { return reduce_vector(v, max2<vec4>); }

// The largest of n numbers; NaN do not count.
static inline float max_row(const float* x, int n) {
    vec top = fill(-INFINITY);
    int j = 0;
    for (; j + W <= n; j += W) top = max2(load(x + j), top);
    float t = largest(top);
    for (; j < n; j++) t = x[j] > t ? x[j] : t;
    return t;
}

// Fold vectors a and b halfway: neighbouring halves of four numbers, or neighbouring fours.
template <bool FOURS, class F, int... J>
static inline vec fold_pair(vec a, vec b, F f, std::integer_sequence<int, J...>) {
    constexpr auto at = [](int j, int half) {
        if (FOURS) return 8 * (j / 4 % (W / 8)) + 4 * half + j % 4 + (j < W / 2 ? 0 : W);
        return j / 4 * 4 + j % 4 / 2 + 2 * half + (j % 2 ? W : 0);
    };
    return f(SHUFFLE(a, b, at(J, 0)...), SHUFFLE(a, b, at(J, 1)...));
}
// The vector of the numbers to which f folds N rows, a vector each.
template <int N = W, class F>
static inline vec fold(const vec* row, F f) {
    constexpr std::make_integer_sequence<int, W> all;
    if constexpr (N == 4)
        return fold_pair<false>(fold_pair<false>(row[0], row[2], f, all),
                                fold_pair<false>(row[1], row[3], f, all), f, all);
    else
        return fold_pair<true>(fold<N / 2>(row, f), fold<N / 2>(row + N / 2, f), f, all);
}

// A buffer of this thread, number `which`, of at least n floats, from a multiple of 64 bytes on.
static inline float* buffer(int which, size_t n) {
    thread_local std::vector<float> buffers[6];
    auto& b = buffers[which];
    if (b.size() < n + 16) b.resize(n + 16);
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(b.data()) + 63) / 64 * 64);
}

// Most terms that are added one after the other.  The sums of such blocks are added in pairs, pairs
// of pairs and so on, because rounding errors grow with the length of a chain.
constexpr int64_t CHAIN = 128 * W, SCALAR_CHAIN = 128;

// After block number `block`, call merge for each two sums of equally many blocks.
template <class F>
INLINE void merge_pairs(int64_t block, F merge) {
    for (; block & 1; block >>= 1) merge();
}
// The sum over n terms, where sum(first, end) adds at most `size` of them.
template <class F>
INLINE float sum_blocks(int64_t n, int64_t size, F sum) {
    if (n <= size) return sum(0, n);
    float parts[64];
    int depth = 0;
    const auto merge = [&] { depth--, parts[depth - 1] += parts[depth]; };
    for (int64_t block = 0, first = 0; first < n; block++, first += size) {
        parts[depth++] = sum(first, n - first < size ? n : first + size);
        merge_pairs(block, merge);
    }
    while (depth > 1) merge();
    return parts[0];
}

// Sums of terms(j) from j on for j < end, which gives W terms, in four vectors in turn; j ends
// behind the last whole vector.
template <class J, class F>
INLINE vec sum_vectors(J& j, J end, F terms) {
    vec s[4] = {};
    for (; j + 4 * W <= end; j += 4 * W)
        for (int u = 0; u < 4; u++) s[u] += terms(j + u * W);
    for (; j + W <= end; j += W) s[0] += terms(j);
    return (s[0] + s[1]) + (s[2] + s[3]);
}

// Sum of terms for j < n, where terms(j) gives W of them and term(j) one.
template <class F, class G>
INLINE float sum_terms(int64_t n, F terms, G term) {
    return sum_blocks(n, CHAIN, [&](int64_t j, int64_t end) {
        const vec sums = sum_vectors(j, end, terms);
        float rest = 0;
        for (; j < end; j++) rest += term(j);
        return total(sums) + rest;
    });
}

// The same sums of W rows, by terms(r, j) and term(r, j), of at most a few thousand terms.
template <class F, class G>
static inline vec sum_rows(int n, F terms, G term) {
    vec rows[W];
    float rest[W] = {};
    for (int r = 0; r < W; r++) {
        int j = 0;
        rows[r] = sum_vectors(j, n, [&](int j) { return terms(r, j); });
        for (; j < n; j++) rest[r] += term(r, j);
    }
    return fold(rows, sum2<vec>) + load(rest);
}
