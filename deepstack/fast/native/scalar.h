// Functions of one number without branches, which compilers turn into vector code.
#pragma once
#include "table.h"

INLINE float bits(int32_t n) {
    float x;
    memcpy(&x, &n, 4);
    return x;
}

// e^x, to 1 unit in the last place; 0, infinity and NaN as in the C library.
INLINE float exp1(float x) {
    float y = x > 89.0f ? 89.0f : x;
    y = y < -104.0f ? -104.0f : y;
    float n = (y * 1.44269504f + 12582912.0f) - 12582912.0f;
    float r = (y - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    int32_t k = (int32_t)(n == n ? n : 0.0f), half = k >> 1;  // NaN stay in p
    return p * bits((half + 127) << 23) * bits((k - half + 127) << 23);
}

// e^x - 1 without cancellation: |x| below ln 2 / 2 has its own polynomial.
INLINE float expm1_1(float x) {
    float p = 1.9875691500e-4f;
    p = p * x + 1.3981999507e-3f;
    p = p * x + 8.3334519073e-3f;
    p = p * x + 4.1665795894e-2f;
    p = p * x + 1.6666665459e-1f;
    p = p * x + 5.0000001201e-1f;
    const float small = p * (x * x) + x;
    return fabsf(x) < 0.34657359f ? small : exp1(x) - 1.0f;
}

// ln x of a normal number > 0, to 1 unit in the last place.
INLINE float log1(float x) {
    int32_t n;
    memcpy(&n, &x, 4);
    int32_t e = (n >> 23) - 126;
    float m = bits((n & 0x007fffff) | 0x3f000000);  // x = m 2^e, 0.5 <= m < 1
    const bool small = m < 0.70710678118654752f;
    m = (small ? m + m : m) - 1.0f;
    const float k = e - int32_t(small), z = m * m;
    float p = 7.0376836292e-2f;
    p = p * m - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    p = (p * m * z - 2.12194440e-4f * k) - 0.5f * z;
    return (m + p) + 0.693359375f * k;
}

INLINE float sigmoid1(float x) { return 1.0f / (1.0f + exp1(-x)); }

INLINE float tanh1(float x) {
    float z = x * x;
    float p = -5.70498872745e-3f;
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    float small = p * z * x + x;
    float a = fabsf(x), large = 1.0f - 2.0f / (exp1(2.0f * a) + 1.0f);
    large = x < 0.0f ? -large : large;
    return a < 0.625f ? small : large;
}

INLINE float erf1(float x) {
    const float a = fabsf(x), y = a > 3.832506856900711f ? 3.832506856900711f : a;
    float z = y * y;
    float p = 0.00022905065861350646f;
    p = p * z + 0.0034082910107109506f;
    p = p * z + 0.050955695062380861f;
    p = p * z + 0.18520832239976145f;
    p = p * z + 1.128379143519084f;
    float q = -1.1791602954361697e-7f;
    q = q * z + 0.000023547966471313185f;
    q = q * z + 0.0010179625278914885f;
    q = q * z + 0.014070470171167667f;
    q = q * z + 0.11098505178285362f;
    q = q * z + 0.49746925110067538f;
    q = q * z + 1.0f;
    const float ratio = y * p / q;  // may round beyond 1
    return copysignf(ratio > 1.0f ? 1.0f : ratio, x);
}
