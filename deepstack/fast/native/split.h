// How operations are divided between threads.
//
// Every number is computed by one thread, in the order in which one thread alone would add its
// terms, so the numbers do not depend on the threads.
#pragma once
#include "table.h"

// The axis along which an operation may be cut, whose entries are computed independently.
// at: the integer of the record that holds the axis's length; it counts `scale` for an entry.
// block: parts begin at multiples of so many entries.
// step: bytes from one entry to the next, by operand.  bytes: that an operand spans in all.
// written: bit k is set if operand k is written.
struct Split {
    int at;
    int64_t length, block = 1, scale = 1;
    unsigned written = 1;
    int64_t step[8] = {}, bytes[8] = {};
};

// Blocks of floats that fill a cache line, and of rows that fill a tile of a product.
constexpr int64_t LINE = 16, TILE = 8;
static inline int64_t block_of_rows(int64_t rows) { return rows >= 8 * TILE ? TILE : 1; }

template <class... T>
static Split split_elements(const Op& op) {
    const int64_t widths[] = {sizeof(T)...};
    Split s{0, op.i[0], op.nd == 1 ? LINE : block_of_rows(op.i[0])};
    for (int k = 0; k < int(sizeof...(T)); k++) {
        int64_t last = 0;
        for (int d = 0; d < op.nd; d++) last += int64_t(op.i[d] - 1) * op.i[5 + 5 * k + d];
        s.step[k] = widths[k] * op.i[5 + 5 * k];
        s.bytes[k] = widths[k] * (last + 1);
    }
    return s;
}

static Split split_reduction(const Op& op) {
    const int32_t *n = op.i, *s = op.i + 4, *so = op.i + 8;
    const int at = n[0] > 1 ? 0 : 1;
    int64_t last = 0;
    for (int d = 0; d < 4; d++) last += int64_t(n[d] - 1) * s[d];
    Split split{at, n[at], at ? LINE : 1};
    split.step[0] = 4 * int64_t(so[at]), split.step[1] = 4 * int64_t(s[at]);
    split.bytes[0] = 4 * (1 + int64_t(n[0] - 1) * so[0] + int64_t(n[1] - 1) * so[1]);
    split.bytes[1] = 4 * (1 + last);
    return split;
}

// Set step and bytes of an operand whose rows lie in three dimensions (see `row_at`).
static inline void split_rows(Split& s, int operand, const int32_t* size, const int32_t* stride,
                              int axis, int64_t width) {
    int64_t last = 0;
    for (int d = 0; d < 3; d++) last += int64_t(size[d] - 1) * stride[d];
    s.step[operand] = 4 * int64_t(stride[axis]);
    s.bytes[operand] = 4 * (last + width);
}

// The cut of rows in three dimensions, along the first of them that has entries to divide.
static inline Split rows_split(const int32_t* size, int& axis) {
    axis = size[0] > 1 ? 0 : size[1] > 1 ? 1 : 2;
    int64_t scale = 1;
    for (int d = axis + 1; d < 3; d++) scale *= size[d];
    return {0, size[axis], scale == 1 ? block_of_rows(size[axis]) : 1, scale};
}

static Split split_layer_norm(const Op& op) {
    const int64_t rows = op.i[0], n = op.i[1];
    int axis;
    Split s = rows_split(op.i + 2, axis);
    s.written = 7;
    split_rows(s, 3, op.i + 2, op.i + 5, axis, n);
    s.step[0] = 4 * n * s.scale, s.bytes[0] = 4 * n * rows;
    for (int k = 1; k < 3; k++) s.step[k] = 4 * s.scale, s.bytes[k] = 4 * rows;
    s.bytes[4] = s.bytes[5] = 4 * n;
    return s;
}

// The gradient of the input is cut by rows, gradients of gain and bias by columns; no record has
// both.
static Split split_layer_norm_gradient(const Op& op) {
    const int64_t rows = op.i[0], n = op.i[1];
    int axis;
    Split s = rows_split(op.i + 2, axis);
    const bool by_rows = op.p[0];
    if (!by_rows) s = {1, n, LINE};
    s.written = 7;
    split_rows(s, 3, op.i + 2, op.i + 8, axis, n);
    split_rows(s, 4, op.i + 2, op.i + 5, axis, n);
    s.bytes[0] = 4 * n * rows, s.bytes[5] = s.bytes[6] = 4 * rows;
    s.bytes[1] = s.bytes[2] = s.bytes[7] = 4 * n;
    if (by_rows) {
        s.step[0] = 4 * n * s.scale, s.step[5] = s.step[6] = 4 * s.scale;
    } else {
        s.step[1] = s.step[2] = s.step[3] = s.step[4] = s.step[7] = 4;
    }
    return s;
}

static Split split_softmax(const Op& op) {
    const int64_t outer = op.i[0], n = op.i[1], inner = op.i[2];
    Split s{0, outer, block_of_rows(outer)};
    s.step[0] = 4 * n * inner, s.bytes[0] = 4 * outer * n * inner;
    s.step[1] = 4 * int64_t(op.i[3]);
    s.bytes[1] = 4 * (1 + (outer - 1) * op.i[3] + (n - 1) * op.i[4] + (inner - 1) * op.i[5]);
    return s;
}

static Split split_softmax_gradient(const Op& op) {
    Split s = split_softmax(op);
    s.step[2] = s.step[0], s.bytes[2] = s.bytes[0];
    return s;
}

static Split split_product(const Op& op) {
    const int32_t* i = op.i;
    const int64_t m = i[0], n = i[1], k = i[2], batches = i[8];
    const bool by_batch = batches > 1;
    Split s = by_batch ? Split{8, batches} : Split{0, m, TILE};
    const int64_t rows[] = {i[7], i[3], 0};
    const int64_t last[] = {(m - 1) * i[7] + n - 1, (m - 1) * i[3] + (k - 1) * i[4],
                            (k - 1) * i[5] + (n - 1) * i[6]};
    for (int o = 0; o < 3; o++) {
        s.step[o] = 4 * (by_batch ? i[9 + o] : rows[o]);
        s.bytes[o] = 4 * (1 + last[o] + (batches - 1) * i[9 + o]);
    }
    s.bytes[3] = 4 * n;
    return s;
}

// positions: of each operand, q's or k's.
static inline Split split_attentions(const Op& op, unsigned written, std::initializer_list<char> positions) {
    const int axis = op.i[0] > 1 ? 0 : 1;
    Split s{axis, op.i[axis], 1, 1, written};
    int operand = 0;
    for (char kind : positions) {
        const int32_t* stride = op.i + 5 + 3 * operand;
        const int64_t rows = kind == 'k' ? op.i[29] : op.i[2], width = kind == 'l' ? 1 : op.i[3];
        s.step[operand] = 4 * int64_t(stride[axis]);
        s.bytes[operand++] = 4 * (int64_t(op.i[0] - 1) * stride[0] + int64_t(op.i[1] - 1) * stride[1] +
                                  (rows - 1) * stride[2] + width);
    }
    return s;
}
static Split split_attention(const Op& op) {
    return split_attentions(op, 1 | 1 << 4, {'q', 'q', 'k', 'k', 'l'});
}
static Split split_attention_gradient(const Op& op) {
    return split_attentions(op, 7, {'q', 'k', 'k', 'q', 'q', 'k', 'k', 'l'});
}

// One thread's part of an operation; false if it has none.  Operands at address 0 are absent.
static inline bool part_of(const Op& op, const Split& s, int thread, int threads, Op& part) {
    const int64_t blocks = s.length / s.block;
    const int64_t first = blocks * thread / threads * s.block;
    const int64_t end = thread + 1 == threads ? s.length : blocks * (thread + 1) / threads * s.block;
    if (blocks < 1 || first == end) return false;
    part = op;
    part.i[s.at] = int32_t((end - first) * s.scale);
    for (int k = 0; k < 8; k++)
        if (part.p[k]) part.p[k] += first * s.step[k];
    return true;
}
