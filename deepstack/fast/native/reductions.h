// Sums, norms of vectors, layer norms and softmax.
#pragma once
#include "scalar.h"

constexpr int BLOCK = 128;  // rows that are added before their sum is added to the rest

INLINE float sum_row(const float* x, int64_t n) {
    return sum_terms(n, [&](int64_t j) { return load(x + j); }, [&](int64_t j) { return x[j]; });
}
INLINE float squares(const float* x, int64_t n) {
    return sum_terms(n, [&](int64_t j) { vec v = load(x + j); return v * v; },
                     [&](int64_t j) { return x[j] * x[j]; });
}
INLINE float dot(const float* x, const float* y, int64_t n) {
    return sum_terms(n, [&](int64_t j) { return load(x + j) * load(y + j); },
                     [&](int64_t j) { return x[j] * y[j]; });
}
// The sum of term(j), whose numbers do not lie side by side.
template <class F>
INLINE float sum_scattered(int64_t n, F term) {
    return sum_blocks(n, SCALAR_CHAIN, [&](int64_t j, int64_t end) {
        float sum = 0;
        for (; j < end; j++) sum += term(j);
        return sum;
    });
}

// part[j] = the sum over rows q from `first` to `end`, for j < n, where f(q, j, sum) adds the terms
// of W columns to a vector, or of one to a float; the sums stay in registers.
template <class F>
INLINE void sum_columns(int first, int end, int n, float* part, F f) {
    int j = 0;
    for (; j + 2 * W <= n; j += 2 * W) {
        vec a = {}, b = {};
        for (int q = first; q < end; q++) a = f(q, j, a), b = f(q, j + W, b);
        store(part + j, a), store(part + j + W, b);
    }
    for (; j + W <= n; j += W) {
        vec a = {};
        for (int q = first; q < end; q++) a = f(q, j, a);
        store(part + j, a);
    }
    for (; j < n; j++) {
        float a = 0;
        for (int q = first; q < end; q++) a = f(q, j, a);
        part[j] = a;
    }
}
// Adds the sums of blocks of rows, n columns each, as `sum_blocks` does, in buffer 1.
struct ColumnSums {
    const int n;
    float* const parts;
    int depth = 0;
    int64_t block = 0;

    // blocks: how many there will be.
    ColumnSums(int n, int64_t blocks) : n(n), parts(buffer(1, size_t(n) * (1 + levels(blocks)))) {}
    static int levels(int64_t blocks) { return blocks > 1 ? 1 + levels((blocks + 1) / 2) : 1; }
    static int64_t blocks_of(int64_t rows) { return (rows + BLOCK - 1) / BLOCK; }

    // Add rows, whose terms f(q, j, sum) adds as in `sum_columns`.
    template <class F>
    IN_CALLER inline void add(int64_t rows, F f) {
        for (int64_t first = 0; first < rows; first += BLOCK) {
            const int64_t end = first + BLOCK < rows ? first + BLOCK : rows;
            sum_columns(first, end, n, parts + int64_t(depth++) * n, f);
            merge_pairs(block++, [&] { merge(); });
        }
    }
    void merge() {
        const float* last = parts + int64_t(--depth) * n;
        float* sums = parts + int64_t(depth - 1) * n;
        INDEPENDENT
        for (int j = 0; j < n; j++) sums[j] += last[j];
    }
    const float* total() {
        while (depth > 1) merge();
        return parts;
    }
};
static inline void read(const float* p, vec& v) { v = load(p); }
static inline void read(const float* p, float& v) { v = *p; }

// i: sizes of two kept and two reduced dimensions, the input's strides of the four, the output's
// strides of the first two.  c: factor of the sum, by which it is divided.
template <bool NORM>
static void reduce(const Op& op) {
    const int32_t *n = op.i, *s = op.i + 4, *so = op.i + 8;
    const float* x = (const float*)op.p[1];
    float* y = (float*)op.p[0];
    const float divisor = op.c[0];
    auto finish = [&](float t) { return NORM ? sqrtf(t) : t / divisor; };
    for (int64_t a = 0; a < n[0]; a++) {
        if (s[1] == 1 && n[1] > 1 && so[1] == 1) {  // sums of columns
            ColumnSums sums(n[1], n[2] * ColumnSums::blocks_of(n[3]));
            for (int64_t r = 0; r < n[2]; r++) {
                const float* rows = x + a * s[0] + r * s[2];
                sums.add(n[3], [&](int64_t q, int j, auto sum) {
                    auto v = sum;
                    read(rows + q * s[3] + j, v);
                    return NORM ? fused(sum, v, v) : sum + v;
                });
            }
            const float* total = sums.total();
            for (int j = 0; j < n[1]; j++) y[a * so[0] + j] = finish(total[j]);
            continue;
        }
        for (int64_t b = 0; b < n[1]; b++)
            y[a * so[0] + b * so[1]] = finish(sum_scattered(n[2], [&](int64_t r) {
                const float* row = x + a * s[0] + b * s[1] + r * s[2];
                if (s[3] == 1) return NORM ? squares(row, n[3]) : sum_row(row, n[3]);
                return sum_scattered(n[3], [&](int64_t q) {
                    const float v = row[q * s[3]];
                    return NORM ? v * v : v;
                });
            }));
    }
}

// The address of row `index`, of rows in three dimensions with these sizes and strides.
static inline int64_t row_at(int64_t index, const int32_t* size, const int32_t* stride) {
    if (index < size[2]) return index * stride[2];
    int64_t inner = index % size[2], rest = index / size[2];
    return inner * stride[2] + rest % size[1] * stride[1] + rest / size[1] * stride[0];
}

// p: y, mean, 1 / standard deviation, x, gain or 0, bias or 0.  i: rows, width, 3 sizes, 3 strides
// of x.  c: eps.
static void layer_norm(const Op& op) {
    const int rows = op.i[0], n = op.i[1];
    float *y = (float*)op.p[0], *means = (float*)op.p[1], *rstds = (float*)op.p[2];
    const float *gain = (float*)op.p[4], *bias = (float*)op.p[5], eps = op.c[0];
    for (int first = 0; first < rows; first += W) {
        const int count = rows - first < W ? rows - first : W;
        const float* x[W];  // behind the last row, the last row again
        for (int r = 0; r < W; r++)
            x[r] = (float*)op.p[3] + row_at(first + (r < count ? r : count - 1), op.i + 2, op.i + 5);
        float mean[W], rstd[W];
        store(mean, sum_rows(n, [&](int r, int j) { return load(x[r] + j); },
                             [&](int r, int j) { return x[r][j]; }) / float(n));
        const vec variance = sum_rows(
            n, [&](int r, int j) { vec v = load(x[r] + j) - mean[r]; return v * v; },
            [&](int r, int j) { float v = x[r][j] - mean[r]; return v * v; }) / float(n) + eps;
        store(rstd, variance);
        for (int r = 0; r < W; r++) rstd[r] = 1.0f / sqrtf(rstd[r]);
        // NaN where squares overflow: a norm of zeros would look sound.  The mean has time for it.
        store(mean, fused(load(mean), variance, vec{}));
        memcpy(means + first, mean, 4 * count), memcpy(rstds + first, rstd, 4 * count);
        for (int r = 0; r < count; r++) {
            float* out = y + (int64_t(first) + r) * n;
            const float *in = x[r], m = mean[r], s = rstd[r];
            if (gain && bias) {
                INDEPENDENT
                for (int j = 0; j < n; j++) out[j] = (in[j] - m) * s * gain[j] + bias[j];
            } else {
                for (int j = 0; j < n; j++)
                    out[j] = (in[j] - m) * s * (gain ? gain[j] : 1.0f) + (bias ? bias[j] : 0.0f);
            }
        }
    }
}

// p: dx, dgain, dbias (or 0 each), dy, x, mean, 1 / standard deviation, gain or 0.  i: rows, width,
// 3 sizes, 3 strides of x, 3 strides of dy.
static void layer_norm_gradient(const Op& op) {
    const int rows = op.i[0], n = op.i[1];
    float *dx = (float*)op.p[0], *dgain = (float*)op.p[1], *dbias = (float*)op.p[2];
    const float *means = (float*)op.p[5], *rstds = (float*)op.p[6], *gain = (float*)op.p[7];
    auto dy_at = [&](int64_t r) { return (float*)op.p[3] + row_at(r, op.i + 2, op.i + 8); };
    auto x_at = [&](int64_t r) { return (float*)op.p[4] + row_at(r, op.i + 2, op.i + 5); };
    if (dx && !gain) {
        float* ones = buffer(1, n);
        for (int j = 0; j < n; j++) ones[j] = 1;
        gain = ones;
    }
    for (int64_t r = 0; r < rows && dx; r++) {
        const float *dy = dy_at(r), *x = x_at(r), mean = means[r], rstd = rstds[r];
        const float a = sum_terms(n, [&](int j) { return load(dy + j) * load(gain + j); },
                                  [&](int j) { return dy[j] * gain[j]; }) / n;
        const float b = sum_terms(
            n, [&](int j) { return load(dy + j) * load(gain + j) * (load(x + j) - mean); },
            [&](int j) { return dy[j] * gain[j] * (x[j] - mean); }) * rstd * rstd / n;
        float* out = dx + r * n;
        INDEPENDENT
        for (int j = 0; j < n; j++) out[j] = rstd * (dy[j] * gain[j] - a - b * (x[j] - mean));
    }
    if (dgain) {
        ColumnSums sums(n, ColumnSums::blocks_of(rows));
        sums.add(rows, [&](int64_t r, int j, auto sum) {
            auto x = sum, dy = sum;
            read(dy_at(r) + j, dy), read(x_at(r) + j, x);
            return fused(sum, dy, (x - means[r]) * rstds[r]);
        });
        memcpy(dgain, sums.total(), 4 * size_t(n));
    }
    if (dbias) {
        ColumnSums sums(n, ColumnSums::blocks_of(rows));
        sums.add(rows, [&](int64_t r, int j, auto sum) {
            auto dy = sum;
            read(dy_at(r) + j, dy);
            return sum + dy;
        });
        memcpy(dbias, sums.total(), 4 * size_t(n));
    }
}

// p: y, contiguous, and x.  i: outer size, length, inner size, and the three strides of x.
template <bool LOG>
static void softmax(const Op& op) {
    const int64_t outer = op.i[0], n = op.i[1], inner = op.i[2], s = op.i[4];
    for (int64_t a = 0; a < outer; a++)
        for (int64_t b = 0; b < inner; b++) {
            float *y = (float*)op.p[0] + a * n * inner + b, *e = buffer(1, n);
            const float* x = (float*)op.p[1] + a * op.i[3] + b * op.i[5];
            for (int64_t j = 0; j < n; j++) e[j] = x[j * s];
            const float top = max_row(e, n);
            INDEPENDENT
            for (int j = 0; j < n; j++) e[j] = exp1(e[j] - top);
            const float sum = sum_row(e, n), log_sum = logf(sum);
            // x - (top + ln sum) would lose the digits of x - top if all of x are large.
            for (int64_t j = 0; j < n; j++) y[j * inner] = LOG ? (x[j * s] - top) - log_sum : e[j] / sum;
        }
}

// p: dx, dy, y, each with i: outer size, length, inner size and the stride of the three dimensions
// of dy.
template <bool LOG>
static void softmax_gradient(const Op& op) {
    const int64_t outer = op.i[0], n = op.i[1], inner = op.i[2], sa = op.i[3], sn = op.i[4], sb = op.i[5];
    for (int64_t a = 0; a < outer; a++)
        for (int64_t b = 0; b < inner; b++) {
            float* dx = (float*)op.p[0] + a * n * inner + b;
            const float* dy = (float*)op.p[1] + a * sa + b * sb;
            const float* y = (float*)op.p[2] + a * n * inner + b;
            float sum = 0;
            if (inner == 1 && sn == 1) {
                sum = LOG ? sum_row(dy, n) : dot(dy, y, n);
                INDEPENDENT
                for (int j = 0; j < n; j++)
                    dx[j] = LOG ? dy[j] - exp1(y[j]) * sum : y[j] * (dy[j] - sum);
            } else {
                sum = sum_scattered(n, [&](int64_t j) { return LOG ? dy[j * sn] : dy[j * sn] * y[j * inner]; });
                for (int64_t j = 0; j < n; j++)
                    dx[j * inner] = LOG ? dy[j * sn] - exp1(y[j * inner]) * sum
                                        : y[j * inner] * (dy[j * sn] - sum);
            }
        }
}
