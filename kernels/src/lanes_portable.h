// Sixteen lanes in plain C++: the reference that every other instruction set must equal bit by bit.
#pragma once

#include <cmath>
#include <cstring>

#include "formats.h"
#include "half.h"
#include "layout.h"

namespace outpace {
namespace {

constexpr int kTileRows = 2;  // rows of a product computed together; more take long to compile
constexpr int kTileVectors = 1;  // times 16 outputs
constexpr int kQueries = 2;  // queries of attention computed together
constexpr int kMixVectors = 2;  // times 16 entries of a value

struct Floats {
    float v[kLanes];

    static Floats all(float x) {
        Floats r;
        for (float& lane : r.v) lane = x;
        return r;
    }
    static Floats load(const float* p) {
        Floats r;
        std::memcpy(r.v, p, sizeof r.v);
        return r;
    }
    static Floats load(const Half* p) {
        Floats r;
        for (int i = 0; i < kLanes; ++i) r.v[i] = half_to_float(p[i]);
        return r;
    }
    void store(float* p) const { std::memcpy(p, v, sizeof v); }
};

template <class F>
inline Floats each(F f) {
    Floats r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = f(i);
    return r;
}
inline Floats operator+(Floats a, Floats b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
inline Floats operator*(Floats a, Floats b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
inline Floats operator/(Floats a, Floats b) { return each([&](int i) { return a.v[i] / b.v[i]; }); }
inline Floats fma(Floats a, Floats b, Floats c) { return each([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); }); }
inline Floats max(Floats a, Floats b) { return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
inline Floats min(Floats a, Floats b) { return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
inline Floats abs(Floats a) { return each([&](int i) { return std::fabs(a.v[i]); }); }

/// Adds lanes i and i + 8, then i and i + 4, i + 2, i + 1: the order of every sum over lanes.
inline float sum(Floats a) {
    for (int half = kLanes / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) a.v[i] = a.v[i] + a.v[i + half];
    return a.v[0];
}
inline float largest(Floats a) {
    float r = a.v[0];
    for (float lane : a.v) r = lane > r ? lane : r;
    return r;
}

struct Ints {
    int32_t v[kLanes];

    static Ints all(int32_t x) {
        Ints r;
        for (int32_t& lane : r.v) lane = x;
        return r;
    }
    Floats to_floats() const {
        return each([&](int i) { return static_cast<float>(v[i]); });
    }
    void store_bytes(int8_t* p) const {
        for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(v[i]);
    }
};

inline int32_t sum(Ints a) {
    int32_t total = 0;
    for (int32_t lane : a.v) total += lane;
    return total;
}
/// Rounds to the nearest whole number, ties to even.
inline Ints round(Floats a) {
    Ints r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = static_cast<int32_t>(std::lrintf(a.v[i]));
    return r;
}
/// a * 2^n, for results that are normal numbers.
inline Floats times_power(Floats a, Ints n) {
    return each([&](int i) {
        uint32_t bits;
        std::memcpy(&bits, &a.v[i], 4);
        bits += static_cast<uint32_t>(n.v[i]) << 23;
        float r;
        std::memcpy(&r, &bits, 4);
        return r;
    });
}

/// 16 outputs x 4 inputs of weights, each stored as w + 128.
struct Weights {
    uint8_t v[64];

    static Weights load(const uint8_t* p) {
        Weights r;
        std::memcpy(r.v, p, sizeof r.v);
        return r;
    }
};

/// Four activations.
struct Quad {
    int8_t v[4];

    static Quad load(const int8_t* p) {
        Quad r;
        std::memcpy(r.v, p, sizeof r.v);
        return r;
    }
};

/// Initial int32 sums of a product: -128 * (sum of activations), because weights are stored as w + 128.
inline Ints begin(int32_t offset) { return Ints::all(offset); }

/// sums + (w + 128) * a over four inputs, for 16 outputs.
inline Ints dot(Ints sums, const Weights& w, Quad a) {
    for (int i = 0; i < kLanes; ++i)
        for (int j = 0; j < 4; ++j) sums.v[i] += static_cast<int32_t>(w.v[4 * i + j]) * a.v[j];
    return sums;
}

/// 64 whole numbers from 0 to 63 of a file's weights, or their packed bits.
struct Bytes {
    uint8_t v[64];

    static Bytes load(const uint8_t* p) {
        Bytes r;
        std::memcpy(r.v, p, sizeof r.v);
        return r;
    }
    void store(uint8_t* p) const { std::memcpy(p, v, sizeof v); }
};

template <class F>
inline Bytes each_byte(F f) {
    Bytes r;
    for (int i = 0; i < 64; ++i) r.v[i] = static_cast<uint8_t>(f(i));
    return r;
}
inline Bytes operator|(const Bytes& a, const Bytes& b) { return each_byte([&](int i) { return a.v[i] | b.v[i]; }); }

/// Returns the bits of `Mask` after shifting each byte left by `Left` bits, or right if that is negative.
template <int Left, int Mask>
inline Bytes bits(const Bytes& a) {
    return each_byte([&](int i) { return (Left < 0 ? a.v[i] >> -Left : a.v[i] << Left) & Mask; });
}

/// Looks up the weights of numbers from 0 to 15.
inline Weights lookup(const Bytes& a, const uint8_t* table) {
    Weights r;
    for (int i = 0; i < 64; ++i) r.v[i] = table[a.v[i]];
    return r;
}

using NibbleSums = Ints;

/// sums + q * a over four inputs, for 16 outputs.
inline Ints dot(Ints sums, const Bytes& q, Quad a) {
    for (int i = 0; i < kLanes; ++i)
        for (int j = 0; j < 4; ++j) sums.v[i] += static_cast<int32_t>(q.v[4 * i + j]) * a.v[j];
    return sums;
}

/// Sixteen signed bytes.
inline Floats load_bytes(const uint8_t* p) {
    return each([&](int i) { return static_cast<float>(static_cast<int8_t>(p[i])); });
}

/// 2^(e - 127) of sixteen bytes e.
inline Floats load_powers(const uint8_t* p) {
    return each([&](int i) { return power_of_two(p[i]); });
}

/// Sixteen bfloat16 numbers.
inline Floats load_bfloat16(const uint8_t* p) {
    return each([&](int i) {
        uint16_t high;
        std::memcpy(&high, p + 2 * i, 2);
        const uint32_t bits = static_cast<uint32_t>(high) << 16;
        float r;
        std::memcpy(&r, &bits, 4);
        return r;
    });
}

}  // namespace
}  // namespace outpace
