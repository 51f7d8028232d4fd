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

// p: y, q, k, v, logsumexp (batch, heads, positions).  c: factor of the logits.
static void attention(const Op& op) {
    const int Q = op.i[2], S = op.i[29], D = op.i[3], causal = op.i[4];
    const float scale = op.c[0];
    for (int b = 0; b < op.i[0]; b++)
        for (int h = 0; h < op.i[1]; h++) {
            float *weights = buffer(2, size_t(Q) * S), *y = head_of(op, 0, b, h),
                  *logsumexp = head_of(op, 4, b, h);
            multiply({Q, S, D, head_of(op, 1, b, h), row_of(op, 1), 1, head_of(op, 2, b, h), 1,
                      row_of(op, 2), weights, S, scale});
            for (int r = 0; r < Q; r++) {
                float* w = weights + r * S;
                const int n = causal && r < S ? r + 1 : S;
                const float top = max_row(w, n);
                INDEPENDENT
                for (int j = 0; j < n; j++) w[j] = exp1(w[j] - top);
                for (int j = n; j < S; j++) w[j] = 0;
                const float sum = sum_row(w, n), factor = 1.0f / sum;
                INDEPENDENT
                for (int j = 0; j < n; j++) w[j] *= factor;
                logsumexp[r * row_of(op, 4)] = top + logf(sum);
            }
            multiply({Q, D, S, weights, S, 1, head_of(op, 3, b, h), row_of(op, 3), 1, y,
                      row_of(op, 0)});
        }
}

// p: dq, dk, dv, dy, q, k, v, y.  The softmax is computed again.  c: factor of the logits.
static void attention_gradient(const Op& op) {
    const int Q = op.i[2], S = op.i[29], D = op.i[3], causal = op.i[4];
    const float scale = op.c[0];
    for (int b = 0; b < op.i[0]; b++)
        for (int h = 0; h < op.i[1]; h++) {
            float *P = buffer(2, size_t(Q) * S), *dP = buffer(3, size_t(Q) * S);
            const float *dy = head_of(op, 3, b, h), *q = head_of(op, 4, b, h),
                        *k = head_of(op, 5, b, h), *v = head_of(op, 6, b, h),
                        *y = head_of(op, 7, b, h);
            const int64_t ldy = row_of(op, 3), lq = row_of(op, 4), lk = row_of(op, 5),
                          lv = row_of(op, 6), ly = row_of(op, 7);
            multiply({Q, S, D, q, lq, 1, k, 1, lk, P, S, scale});
            multiply({Q, S, D, dy, ldy, 1, v, 1, lv, dP, S});
            for (int r = 0; r < Q; r++) {
                float *w = P + r * S, *dw = dP + r * S;
                const int n = causal && r < S ? r + 1 : S;
                const float top = max_row(w, n);
                INDEPENDENT
                for (int j = 0; j < n; j++) w[j] = exp1(w[j] - top);
                for (int j = n; j < S; j++) w[j] = dw[j] = 0;
                const float factor = 1.0f / sum_row(w, n), inner = dot(dy + r * ldy, y + r * ly, D);
                INDEPENDENT
                for (int j = 0; j < n; j++) w[j] *= factor;
                INDEPENDENT
                for (int j = 0; j < n; j++) dw[j] = w[j] * (dw[j] - inner) * scale;
            }
            multiply({S, D, Q, P, 1, S, dy, ldy, 1, head_of(op, 2, b, h), row_of(op, 2)});
            multiply({Q, D, S, dP, S, 1, k, lk, 1, head_of(op, 0, b, h), row_of(op, 0)});
            multiply({S, D, Q, dP, 1, S, q, lq, 1, head_of(op, 1, b, h), row_of(op, 1)});
        }
}
