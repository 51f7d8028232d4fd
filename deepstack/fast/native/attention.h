// Attention over short sequences, whose weights fit into the cache.
#pragma once
#include "products.h"
#include "reductions.h"

// i: batch, heads, positions of q, width, causal; strides of batch, head and position of each
// operand, whose last stride is 1; positions of k and v.
static inline float* head_of(const Op& op, int operand, int b, int h) {
    const int32_t* s = op.i + 5 + 3 * operand;
    return (float*)op.p[operand] + int64_t(b) * s[0] + int64_t(h) * s[1];
}
static inline int64_t row_of(const Op& op, int operand) { return op.i[7 + 3 * operand]; }

// Call f(first, count, rows) for each W rows of a matrix of S columns: the number of the first row,
// how many there are, and the addresses of W rows, behind the last row the last one again.
template <class F>
static inline void each_block(float* matrix, int rows, int S, F f) {
    for (int first = 0; first < rows; first += W) {
        const int count = rows - first < W ? rows - first : W;
        float* row[W];
        for (int r = 0; r < W; r++) row[r] = matrix + int64_t(first + (r < count ? r : count - 1)) * S;
        f(first, count, row);
    }
}
static inline vec largest_rows(float* const* row, int n) {
    vec top[W];
    float rest[W];
    for (int r = 0; r < W; r++) {
        top[r] = fill(rest[r] = -INFINITY);
        int j = 0;
        for (; j + W <= n; j += W) top[r] = max2(load(row[r] + j), top[r]);
        for (; j < n; j++) rest[r] = max2(row[r][j], rest[r]);
    }
    return max2(load(rest), fold(top, max2<vec>));
}

// weights (positions, S): the logits of a head, where a later key counts -infinity.
static inline void logits(const Op& op, const float* q, int64_t lq, const float* k, int64_t lk,
                          float* weights) {
    const int Q = op.i[2], S = op.i[29], causal = op.i[4];
    multiply({Q, S, op.i[3], q, lq, 1, k, 1, lk, weights, S, float(op.c[0])});
    for (int r = 0; r < Q && causal; r++)
        for (int j = r + 1; j < S; j++) weights[int64_t(r) * S + j] = -INFINITY;
}

// p: y, q, k, v, logsumexp (batch, heads, positions).  c: factor of the logits.
static void attention(const Op& op) {
    const int Q = op.i[2], S = op.i[29], D = op.i[3];
    for (int b = 0; b < op.i[0]; b++)
        for (int h = 0; h < op.i[1]; h++) {
            float *weights = buffer(2, size_t(Q) * S), *logsumexp = head_of(op, 4, b, h);
            logits(op, head_of(op, 1, b, h), row_of(op, 1), head_of(op, 2, b, h), row_of(op, 2), weights);
            each_block(weights, Q, S, [&](int first, int count, float* const* row) {
                float top[W], sum[W], factor[W];
                store(top, largest_rows(row, S));
                for (int r = 0; r < count; r++) {
                    INDEPENDENT
                    for (int j = 0; j < S; j++) row[r][j] = exp1(row[r][j] - top[r]);
                }
                store(sum, sum_rows(S, [&](int r, int j) { return load(row[r] + j); },
                                    [&](int r, int j) { return row[r][j]; }));
                for (int r = 0; r < W; r++) factor[r] = 1.0f / sum[r], sum[r] = top[r] + log1(sum[r]);
                for (int r = 0; r < count; r++) {
                    logsumexp[(first + r) * row_of(op, 4)] = sum[r];
                    INDEPENDENT
                    for (int j = 0; j < S; j++) row[r][j] *= factor[r];
                }
            });
            multiply({Q, D, S, weights, S, 1, head_of(op, 3, b, h), row_of(op, 3), 1,
                      head_of(op, 0, b, h), row_of(op, 0)});
        }
}

// Ask for dy, q, k and v of a head, which were written long ago.
static inline void prefetch_head(const Op& op, int b, int h) {
    for (int operand = 3; b < op.i[0] && operand < 7; operand++)
        for (int r = 0; r < (operand < 5 ? op.i[2] : op.i[29]); r++)
            for (int j = 0; j < op.i[3]; j += 16)
                __builtin_prefetch(head_of(op, operand, b, h) + r * row_of(op, operand) + j, 0, 2);
}

// p: dq, dk, dv, dy, q, k, v, logsumexp, from which the weights are computed again.  c: factor of
// the logits.
static void attention_gradient(const Op& op) {
    const int Q = op.i[2], S = op.i[29], D = op.i[3];
    const float scale = op.c[0];
    for (int b = 0; b < op.i[0]; b++)
        for (int h = 0; h < op.i[1]; h++) {
            float *P = buffer(2, size_t(Q) * S), *dP = buffer(3, size_t(Q) * S);
            const float *dy = head_of(op, 3, b, h), *q = head_of(op, 4, b, h),
                        *k = head_of(op, 5, b, h), *v = head_of(op, 6, b, h),
                        *logsumexp = head_of(op, 7, b, h);
            const int64_t ldy = row_of(op, 3), lq = row_of(op, 4), lk = row_of(op, 5),
                          lv = row_of(op, 6);
            prefetch_head(op, h + 1 < op.i[1] ? b : b + 1, (h + 1) % op.i[1]);
            logits(op, q, lq, k, lk, P);
            multiply({Q, S, D, dy, ldy, 1, v, 1, lv, dP, S});
            each_block(P, Q, S, [&](int first, int count, float* const* row) {
                float inner[W];
                float* const d = dP + int64_t(first) * S;
                for (int r = 0; r < count; r++) {
                    const float shift = logsumexp[(first + r) * row_of(op, 7)];
                    INDEPENDENT
                    for (int j = 0; j < S; j++) row[r][j] = exp1(row[r][j] - shift);
                }
                auto d_of = [&](int r) { return d + int64_t(r < count ? r : count - 1) * S; };
                store(inner, sum_rows(S, [&](int r, int j) { return load(row[r] + j) * load(d_of(r) + j); },
                                      [&](int r, int j) { return row[r][j] * d_of(r)[j]; }));
                for (int r = 0; r < count; r++) {
                    float *w = row[r], *dw = d_of(r);
                    const float c = inner[r];
                    INDEPENDENT
                    for (int j = 0; j < S; j++) dw[j] = w[j] * (dw[j] - c) * scale;
                }
            });
            multiply({S, D, Q, P, 1, S, dy, ldy, 1, head_of(op, 2, b, h), row_of(op, 2)});
            multiply({Q, D, S, dP, S, 1, k, lk, 1, head_of(op, 0, b, h), row_of(op, 0)});
            multiply({S, D, Q, dP, 1, S, q, lq, 1, head_of(op, 1, b, h), row_of(op, 1)});
        }
}
