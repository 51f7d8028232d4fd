// Elementwise operations on operands of any strides.
#pragma once
#include "scalar.h"

// i: 5 sizes, then 5 strides of each operand, the output first; the last dimension is innermost.
template <int N, class F>
static inline void each_row(const Op& op, F run) {
    const int nd = op.nd;
    const int32_t* size = op.i;
    int64_t at[N] = {};
    int32_t index[5] = {};
    for (;;) {
        run(at);
        int d = nd - 2;
        for (; d >= 0; d--) {
            for (int k = 0; k < N; k++) at[k] += op.i[5 + 5 * k + d];
            if (++index[d] < size[d]) break;
            for (int k = 0; k < N; k++) at[k] -= int64_t(size[d]) * op.i[5 + 5 * k + d];
            index[d] = 0;
        }
        if (d < 0) return;
    }
}

template <class F, class Out, class A>
static void map1(const Op& op) {
    const F f{op};
    const int last = op.nd - 1, n = op.i[last], so = op.i[5 + last], sa = op.i[10 + last];
    each_row<2>(op, [&](const int64_t* at) {
        Out* o = (Out*)op.p[0] + at[0];
        const A* a = (const A*)op.p[1] + at[1];
        if (so == 1 && sa == 1) {
            INDEPENDENT
            for (int j = 0; j < n; j++) o[j] = f(a[j]);
        } else {
            for (int j = 0; j < n; j++) o[int64_t(j) * so] = f(a[int64_t(j) * sa]);
        }
    });
}

template <bool SA, bool SB, class F, class Out, class A, class B>
static inline void row2(int n, F f, Out* o, const A* a, const B* b) {
    const A a0 = *a;
    const B b0 = *b;
    INDEPENDENT
    for (int j = 0; j < n; j++) o[j] = f(SA ? a[j] : a0, SB ? b[j] : b0);
}

template <class F, class Out, class A, class B>
static void map2(const Op& op) {
    const F f{op};
    const int last = op.nd - 1, n = op.i[last];
    const int64_t so = op.i[5 + last], sa = op.i[10 + last], sb = op.i[15 + last];
    each_row<3>(op, [&](const int64_t* at) {
        Out* o = (Out*)op.p[0] + at[0];
        const A* a = (const A*)op.p[1] + at[1];
        const B* b = (const B*)op.p[2] + at[2];
        if (so == 1 && sa == 1 && sb == 1) return row2<1, 1>(n, f, o, a, b);
        if (so == 1 && sa == 1 && sb == 0) return row2<1, 0>(n, f, o, a, b);
        if (so == 1 && sa == 0 && sb == 1) return row2<0, 1>(n, f, o, a, b);
        for (int64_t j = 0; j < n; j++) o[j * so] = f(a[j * sa], b[j * sb]);
    });
}

template <class F, class A>
static void map3(const Op& op) {
    const F f{op};
    const int last = op.nd - 1, n = op.i[last];
    const int64_t so = op.i[5 + last], sa = op.i[10 + last], sb = op.i[15 + last],
                  sc = op.i[20 + last];
    each_row<4>(op, [&](const int64_t* at) {
        float* o = (float*)op.p[0] + at[0];
        const A* a = (const A*)op.p[1] + at[1];
        const float* b = (const float*)op.p[2] + at[2];
        const float* c = (const float*)op.p[3] + at[3];
        if (so == 1 && sa == 1 && sb == 1 && sc == 1) {
            INDEPENDENT
            for (int j = 0; j < n; j++) o[j] = f(a[j], b[j], c[j]);
        } else if (so == 1 && sa == 1 && sb == 1 && sc == 0) {
            const float c0 = *c;
            INDEPENDENT
            for (int j = 0; j < n; j++) o[j] = f(a[j], b[j], c0);
        } else {
            for (int64_t j = 0; j < n; j++) o[j * so] = f(a[j * sa], b[j * sb], c[j * sc]);
        }
    });
}

INLINE float smaller(float x, float y) { return x > y ? y : x; }  // x if it is NaN

// Functions of one number.  c: constants of the operation.
#define FUNCTION1(name, ...)                                          \
    struct name {                                                     \
        float c, d;                                                   \
        explicit name(const Op& op) : c(op.c[0]), d(op.c[1]) {}       \
        inline float operator()(float x) const { return __VA_ARGS__; } \
    };
FUNCTION1(Copy, x)
FUNCTION1(Scale, x * c + d)
FUNCTION1(Divide, x / c)
FUNCTION1(Abs, fabsf(x))
FUNCTION1(Sign, (x > 0.0f) - (x < 0.0f))
FUNCTION1(Square, x* x)
FUNCTION1(Sqrt, sqrtf(x))
FUNCTION1(Rsqrt, 1.0f / sqrtf(x))
FUNCTION1(Reciprocal, 1.0f / x)
FUNCTION1(Power, powf(x, c))
FUNCTION1(Exp, exp1(x))
FUNCTION1(Log, logf(x))
FUNCTION1(Sine, sinf(x))
FUNCTION1(Cosine, cosf(x))
FUNCTION1(Relu, x < 0.0f ? 0.0f : x)
FUNCTION1(Sigmoid, sigmoid1(x))
FUNCTION1(Tanh, tanh1(x))
FUNCTION1(Silu, x* sigmoid1(x))
FUNCTION1(Gelu, 0.5f * x * (1.0f + erf1(x * 0.70710678118654752f)))
FUNCTION1(GeluTanh, 0.5f * x * (1.0f + tanh1(0.79788456080286536f * (x + 0.044715f * x * x * x))))
FUNCTION1(Elu, x > 0.0f ? x * c : expm1_1(x) * d)
FUNCTION1(Clamp, smaller(x < c ? c : x, d))  // the upper bound wins where they cross, as in torch
FUNCTION1(Threshold, x <= c ? d : x)

// Functions of two numbers.
#define FUNCTION2(name, ...)                                                   \
    struct name {                                                              \
        float c, d;                                                            \
        explicit name(const Op& op) : c(op.c[0]), d(op.c[1]) {}                \
        inline float operator()(float x, float y) const { return __VA_ARGS__; } \
    };
FUNCTION2(Add, x + c * y)
FUNCTION2(Multiply, x* y)
FUNCTION2(Quotient, x / y)
FUNCTION2(ThresholdGradient, y <= c ? 0.0f : x)
FUNCTION2(SigmoidGradient, x * (1.0f - y) * y)
FUNCTION2(TanhGradient, x * (1.0f - y * y))

struct SiluGradient {
    explicit SiluGradient(const Op&) {}
    inline float operator()(float dy, float x) const {
        float s = sigmoid1(x);
        return dy * s * (1.0f + x * (1.0f - s));
    }
};
struct GeluGradient {
    explicit GeluGradient(const Op&) {}
    inline float operator()(float dy, float x) const {
        float cdf = 0.5f * (1.0f + erf1(x * 0.70710678118654752f));
        return dy * (cdf + x * exp1(-0.5f * x * x) * 0.39894228040143268f);
    }
};
struct EluGradient {  // c[0]: scale; c[1]: alpha * scale
    float c, d;
    explicit EluGradient(const Op& op) : c(op.c[0]), d(op.c[1]) {}
    inline float operator()(float dy, float x) const {
        return x <= 0.0f ? dy * d * exp1(x) : dy * c;
    }
};
struct MaskedFill {
    float c;
    explicit MaskedFill(const Op& op) : c(op.c[0]) {}
    inline float operator()(float x, uint8_t mask) const { return mask ? c : x; }
};
struct AddProduct {
    float c;
    explicit AddProduct(const Op& op) : c(op.c[0]) {}
    inline float operator()(float x, float y, float z) const { return x + c * (y * z); }
};
struct Lerp {
    explicit Lerp(const Op&) {}
    inline float operator()(float x, float y, float w) const {
        return fabsf(w) < 0.5f ? x + w * (y - x) : y - (y - x) * (1.0f - w);
    }
};
struct AddQuotient {
    float c;
    explicit AddQuotient(const Op& op) : c(op.c[0]) {}
    inline float operator()(float x, float y, float z) const { return x + c * (y / z); }
};
struct Where {
    explicit Where(const Op&) {}
    inline float operator()(uint8_t mask, float x, float y) const { return mask ? x : y; }
};

static void set_value(const Op& op) {  // every element of the output
    const int last = op.nd - 1;
    const int64_t n = op.i[last], so = op.i[5 + last];
    each_row<1>(op, [&](const int64_t* at) {
        float* o = (float*)op.p[0] + at[0];
        const float c = op.c[0];
        for (int64_t j = 0; j < n; j++) o[j * so] = c;
    });
}
