// e^x and functions of it from IEEE operations only, so the bits are the same everywhere. Include after a lanes_*.h.
#pragma once

#include "layout.h"

namespace outpace {
namespace {

/// e^x to 2 units in the last place; x is clamped to [-86.5, 88], where results are normal numbers.
/// e^x = 2^n e^r with n = round(x / ln 2), |r| <= ln 2 / 2, and a polynomial of degree 6 for e^r.
inline Floats exponential(Floats x) {
    x = min(max(x, Floats::all(-86.5f)), Floats::all(88.0f));
    const Ints n = round(x * Floats::all(1.44269504f));
    const Floats count = n.to_floats();
    Floats r = fma(count, Floats::all(-0.693359375f), x);  // ln 2 in two parts, the first with few bits
    r = fma(count, Floats::all(2.12194440e-4f), r);
    Floats p = Floats::all(1.0f / 720);
    p = fma(p, r, Floats::all(1.0f / 120));
    p = fma(p, r, Floats::all(1.0f / 24));
    p = fma(p, r, Floats::all(1.0f / 6));
    p = fma(p, r, Floats::all(0.5f));
    p = fma(p, r, Floats::all(1.0f));
    p = fma(p, r, Floats::all(1.0f));
    return times_power(p, n);
}

/// 1 / (1 + e^-x)
inline Floats sigmoid(Floats x) { return Floats::all(1.0f) / (Floats::all(1.0f) + exponential(x * Floats::all(-1.0f))); }

/// x / (1 + e^-x)
inline Floats silu(Floats x) { return x / (Floats::all(1.0f) + exponential(x * Floats::all(-1.0f))); }

/// (up + 1) * gate / (1 + e^(-1.702 gate)), gate at most `limit`, up within it on both sides.
inline Floats clamped_gate(Floats gate, Floats up, float limit) {
    gate = min(gate, Floats::all(limit));
    up = max(min(up, Floats::all(limit)), Floats::all(-limit));
    const Floats gated = gate / (Floats::all(1.0f) + exponential(gate * Floats::all(-1.702f)));
    return (up + Floats::all(1.0f)) * gated;
}

/// x / 2 (1 + tanh(y)) with y = sqrt(2 / pi) (x + 0.044715 x^3), computed as x / (1 + e^-2y)
inline Floats gelu(Floats x) {
    const Floats slope = fma(x * x, Floats::all(-0.0713548162f), Floats::all(-1.59576912f));
    return x / (Floats::all(1.0f) + exponential(x * slope));
}

/// cap tanh(x / cap), computed as cap - 2 cap / (1 + e^(2 x / cap))
inline Floats capped(Floats x, float cap) {
    const Floats share = Floats::all(1.0f) / (Floats::all(1.0f) + exponential(x * Floats::all(2.0f / cap)));
    return fma(share, Floats::all(-2.0f * cap), Floats::all(cap));
}

/// Caps `count` numbers in place; what follows them is unchanged.
inline void cap_all(float* x, int count, float cap) {
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) capped(Floats::load(x + i), cap).store(x + i);
    if (i == count) return;
    alignas(64) float last[kLanes] = {};
    for (int n = i; n < count; ++n) last[n - i] = x[n];
    capped(Floats::load(last), cap).store(last);
    for (int n = i; n < count; ++n) x[n] = last[n - i];
}

inline float first_lane(Floats x) {
    alignas(64) float lanes[kLanes];
    x.store(lanes);
    return lanes[0];
}

/// Replaces numbers by e^(x - largest); `x` has space for a multiple of 16. Returns 1 / their sum. `sink`: one more
/// number, which counts as the others do, or null.
inline float exponentials(float* x, int count, const float* sink = nullptr) {
    const int padded = round_up(count, kLanes);
    for (int i = count; i < padded; ++i) x[i] = -__builtin_inff();
    Floats highest = Floats::load(x);
    for (int i = kLanes; i < padded; i += kLanes) highest = max(highest, Floats::load(x + i));
    float top = largest(highest);
    if (sink && *sink > top) top = *sink;
    const Floats shift = Floats::all(-top);
    for (int i = 0; i < padded; i += kLanes) exponential(Floats::load(x + i) + shift).store(x + i);
    for (int i = count; i < padded; ++i) x[i] = 0.0f;
    Floats total = Floats::all(0.0f);
    for (int i = 0; i < padded; i += kLanes) total = total + Floats::load(x + i);
    const float whole = sum(total);
    return 1.0f / (sink ? whole + first_lane(exponential(Floats::all(*sink - top))) : whole);
}

}  // namespace
}  // namespace outpace
