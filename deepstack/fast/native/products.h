// Products of matrices: a tile of C stays in registers over all of K.
#pragma once
#include "table.h"

// b: (K, N) as rows of N numbers; C (m, n) = alpha A B + (bias by column, or beta C, or nothing).
struct Product {
    int m, n, k;
    const float* a;
    int64_t a_row, a_column;
    const float* b;
    int64_t b_row, b_column;
    float* c;
    int64_t c_row;
    float alpha = 1, beta = 0;
    const float* bias = nullptr;
    int64_t a_step = 0;  // from one row to the next, where a block of rows starts
};

// Longer sums are added in parts, whose operands lie in the caches.
constexpr int LENGTH = 256;

// Larger operands would drive what is computed now out of the caches.
constexpr int64_t MOST_PREFETCHED = 1 << 15;

// A rounded vector: without it a compiler may fuse a product with a later sum in some tiles and not
// in others, and numbers would depend on where threads divide the rows.
static inline vec rounded(vec x) {
    asm("" : "+m"(x));
    return x;
}
// C of one vector; bias and c: its columns.
static inline vec finish(vec s, const Product& g, const float* bias, const float* c) {
    if (g.alpha != 1) s = rounded(s * g.alpha);
    if (g.bias) s += load(bias);
    if (g.beta != 0) s += g.beta == 1 ? load(c) : rounded(load(c) * g.beta);
    return s;
}

template <int M, int NV>
static inline void tile(const Product& g, int i, int j, int columns, const float* b, int64_t b_row) {
    vec s[M][NV] = {};
    const float* a = g.a + i * g.a_step;
    const int64_t row = g.a_row, column = g.a_column;
    for (int k = 0; k < g.k; k++, a += column, b += b_row) {
        vec y[NV];
        for (int v = 0; v < NV; v++) y[v] = load(b + v * W);
        for (int r = 0; r < M; r++) {
            vec x = fill(a[r * row]);
            for (int v = 0; v < NV; v++) s[r][v] = fused(s[r][v], x, y[v]);
        }
    }
    for (int r = 0; r < M; r++) {
        float* c = g.c + (i + r) * g.c_row + j;
        const float* bias = g.bias ? g.bias + j : nullptr;
        if (columns == NV * W) {
            for (int v = 0; v < NV; v++) store(c + v * W, finish(s[r][v], g, bias + v * W, c + v * W));
        } else {
            float z[NV * W] = {}, added[NV * W] = {};
            for (int q = 0; q < columns; q++) {
                if (g.bias) added[q] = bias[q];
                if (g.beta != 0) z[q] = c[q];
            }
            for (int v = 0; v < NV; v++) store(z + v * W, finish(s[r][v], g, added + v * W, z + v * W));
            for (int q = 0; q < columns; q++) c[q] = z[q];
        }
    }
}

template <int NV, int M = ROWS>
static inline void rows(const Product& g, int i, int j, int columns, const float* b, int64_t b_row) {
    if constexpr (M > 0) {
        if (g.m - i == M) return tile<M, NV>(g, i, j, columns, b, b_row);
        rows<NV, M - 1>(g, i, j, columns, b, b_row);
    }
}

template <int NV>
static void panel(const Product& g, int j, int columns, const float* b, int64_t b_row) {
    int i = 0;
    for (; i + ROWS <= g.m; i += ROWS) tile<ROWS, NV>(g, i, j, columns, b, b_row);
    rows<NV>(g, i, j, columns, b, b_row);
}

// to[k][j] = from[j][k], rows of `row` numbers, for 8 x 8 numbers.
static inline void transpose8(const float* from, int64_t row, float* to, int64_t to_row) {
    vec8 a[8], b[8];
    for (int r = 0; r < 8; r++) a[r] = load<vec8>(from + r * row);
    for (int r = 0; r < 8; r += 2) {
        b[r] = SHUFFLE(a[r], a[r + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        b[r + 1] = SHUFFLE(a[r], a[r + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int r = 0; r < 8; r += 4)
        for (int q = 0; q < 2; q++) {
            a[r + q] = SHUFFLE(b[r + q], b[r + q + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            a[r + q + 2] = SHUFFLE(b[r + q], b[r + q + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int r = 0; r < 4; r++) {
        store(to + r * to_row, SHUFFLE(a[r], a[r + 4], 0, 1, 2, 3, 8, 9, 10, 11));
        store(to + (r + 4) * to_row, SHUFFLE(a[r], a[r + 4], 4, 5, 6, 7, 12, 13, 14, 15));
    }
}

// Copy columns j … of B as rows of `width` numbers, with zeros behind the last column.
static inline void pack(const Product& g, int j, int columns, int width, float* to) {
    const float* b = g.b + j * g.b_column;
    int q = 0;
    if (g.b_row == 1)
        for (; q + 8 <= columns; q += 8) {
            int k = 0;
            for (; k + 8 <= g.k; k += 8)
                transpose8(b + q * g.b_column + k, g.b_column, to + k * width + q, width);
            for (; k < g.k; k++)
                for (int r = q; r < q + 8; r++) to[k * width + r] = b[r * g.b_column + k];
        }
    for (int k = 0; k < g.k; k++) {
        for (int r = q; r < columns; r++) to[k * width + r] = b[k * g.b_row + r * g.b_column];
        for (int r = columns; r < width; r++) to[k * width + r] = 0;
    }
}

// Add one part of the sums to C, or write it there.
static void multiply_part(const Product& g) {
    int vectors = (g.n + W - 1) / W, panels = (vectors + VECTORS - 1) / VECTORS, j = 0;
    for (int q = 0; q < panels; q++) {
        int count = vectors / panels + (q < vectors % panels), width = count * W;
        int columns = g.n - j < width ? g.n - j : width;
        const float* b = g.b + j * g.b_column;
        int64_t b_row = g.b_row;
        if (g.b_column != 1 || columns < width) {
            float* packed = buffer(0, size_t(g.k) * width);
            pack(g, j, columns, width, packed);
            b = packed, b_row = width;
        }
        if (count == 1) panel<1>(g, j, columns, b, b_row);
        if (count == 2) panel<2>(g, j, columns, b, b_row);
        if constexpr (VECTORS > 2)
            if (count == 3) panel<3>(g, j, columns, b, b_row);
        if constexpr (VECTORS > 3)
            if (count == 4) panel<4>(g, j, columns, b, b_row);
        j += width;
    }
}

// Copy A in blocks of ROWS rows: its own rows lie so far apart that caches do not hold them.
static inline void pack_rows(Product& g) {
    float* to = buffer(4, size_t(g.k) * (g.m + ROWS));
    for (int i = 0; i < g.m; i += ROWS) {
        const int count = g.m - i < ROWS ? g.m - i : ROWS;
        const float* a = g.a + i * g.a_row;
        for (int k = 0; k < g.k; k++)
            for (int r = 0; r < count; r++) to[int64_t(i) * g.k + k * ROWS + r] = a[k * g.a_column + r * g.a_row];
    }
    g.a = to, g.a_row = 1, g.a_column = ROWS, g.a_step = g.k;
}

static void multiply(Product g) {
    const Product whole = g;
    for (int first = 0; first < whole.k; first += LENGTH) {
        g.a = whole.a + first * whole.a_column, g.b = whole.b + first * whole.b_row;
        g.k = whole.k - first < LENGTH ? whole.k - first : LENGTH;
        g.a_row = g.a_step = whole.a_row, g.a_column = whole.a_column;
        if (first) g.beta = 1, g.bias = nullptr;
        if (g.a_column >= 128 && g.k >= 64 && g.n > 2 * VECTORS * W) pack_rows(g);
        multiply_part(g);
    }
}

// p: C, A, B, bias or 0.  i: m, n, k, rows and columns of A and B, row of C, batches and the
// strides of batches of C, A, B, bias.  c: alpha, beta.
static void product(const Op& op) {
    const int32_t* i = op.i;
    Product g{i[0], i[1], i[2], (float*)op.p[1], i[3], i[4], (float*)op.p[2], i[5], i[6],
              (float*)op.p[0], i[7], (float)op.c[0], (float)op.c[1], (float*)op.p[3]};
    for (int q = 0; q < i[8]; q++) {
        multiply(g);
        g.c += i[9], g.a += i[10], g.b += i[11];
    }
}

// Ask for B of a product whose rows of A lie side by side: weights, which no cache holds, because
// many layers have been run since they were read.
static inline void prefetch_weights(const Op& op) {
    const int64_t bytes = 4 * int64_t(op.i[1]) * op.i[2];
    if (op.i[3] == 1 || op.i[8] > 1 || bytes > MOST_PREFETCHED) return;
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(op.p[2] + at, 0, 2);
}
