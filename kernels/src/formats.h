// Formats of weights: the meaning of their numbers, and their layout in a panel. Numbers of a file are not rounded again;
// int8 is Q8_0.
//
// A weight is c * (q - bias) + m, with q a whole number of `bits` bits (or, where there is a table, table[q]), and c and
// m those of its part: 32 inputs, or 16. In the K formats c is a whole number times the scale of 256 inputs, and so
// is m; their products are exact in float32. What the numbers mean: https://github.com/ggml-org/ggml (ggml-quants.c).
//
// U4_32 and U4_64 are ours, for what GPTQ and AWQ write: c * (q - zero), where 32 or 64 inputs share c and zero. Half
// precision cannot hold -c * zero exactly, so m is -zero, in steps of c, and float32 holds the product exactly.
//
// A block of a panel is one group of inputs, in the K formats four:
//     K formats: 32 scales in half precision, then 32 of the minimum, its sign turned, where there is one
//     where c and m have six bits, the upper two of both for two groups: 2 parts x 32 bytes, from the lowest bit on c and
//     m of the first group, c and m of the second; then the same for the other two
//     for each group:
//         for each part that has its own: 32 x c, then 32 x m where there is one, in half precision; 32 bytes of c in Q6_K,
//         and of its exponent in MXFP4;
//         where they have six bits, 32 bytes of their lower four bits, c below m
//         low bits, for every half of 32 inputs: 4 x (32 outputs x 4 inputs), a nibble for inputs 4 i and 4 i + 16;
//         then high bits: of five, 1 x (32 x 4), bit t for inputs 4 t; of six, 2 x (32 x 4), a pair of bits for every
//         second step; or, of eight, 8 x (32 x 4) bytes
#pragma once

#include "layout.h"

namespace outpace {

constexpr int kHalfGroup = kGroup / kHalves;  // inputs
constexpr int kSuperGroups = 4;          // groups that share a scale of scales

/// Sizes that follow from what a format is.
template <int Bits, int PartInputs, int Bias, bool HasMin, bool IsSuper, int SharedInputs = PartInputs,
          bool HasExponents = false>
struct FormatOf {
    static constexpr int kBits = Bits;
    static constexpr int kPart = PartInputs;  // that are summed, then multiplied by c
    static constexpr int kParts = kGroup / PartInputs;
    static_assert(kParts == kHalves || kParts == kQuarters);
    static constexpr int kShares = kGroup / SharedInputs;  // of a group, each with its own c and m
    static constexpr int kBias = Bias;
    static constexpr bool kHasMin = HasMin;
    static constexpr bool kIsSuper = IsSuper;
    static constexpr bool kHasTable = false;
    static constexpr const uint8_t* kTable = nullptr;  // what numbers stand for, plus the bias
    static constexpr bool kHasExponents = HasExponents;  // c is a power of two, in a byte
    static constexpr bool kMinInSteps = false;  // of c

    static constexpr int kGroups = IsSuper ? kSuperGroups : 1;  // of a block
    static constexpr int kNumbers = HasMin ? 2 : 1;             // c, and m
    static constexpr int kFactors = IsSuper ? kNumbers * 2 * kPanel : 0;

    static constexpr bool kSixBits = IsSuper && HasMin;  // of c and m, which take a byte each where they are multiplied
    static constexpr int kSix = kParts * kPanel;         // bytes of c, or m, of a group there
    static constexpr int kHeader = kFactors + (kSixBits ? kGroups / 2 * kSix : 0);

    static constexpr int kNumberBytes = IsSuper || HasExponents ? 1 : 2;
    static constexpr int kScales = kShares * kNumbers * kNumberBytes * kPanel / (kSixBits ? 2 : 1);
    static constexpr int kLow = kPanel * kGroup * (Bits == 8 ? 8 : 4) / 8;
    static constexpr int kHigh = kPanel * kGroup * (Bits == 8 ? 0 : Bits - 4) / 8;
    static constexpr int kGroupBytes = kScales + kLow + kHigh;
    static constexpr int kBlockBytes = kHeader + kGroups * kGroupBytes;

    /// Where the upper two bits of a group's c and m lie in its block, and where these four begin in their byte.
    static constexpr int high_at(int group) { return kFactors + group % kGroups / 2 * kSix; }
    static constexpr int high_bit(int group) { return group % 2 * 4; }

    /// Where c (0), or m (1), of a part lies among those of its group, in numbers.
    static constexpr int number_at(int part, int which) {
        return kSixBits ? which * kSix + part * kPanel : (part * kShares / kParts * kNumbers + which) * kPanel;
    }

    static constexpr int64_t panel_bytes(int groups) {
        return static_cast<int64_t>(round_up(groups, kGroups) / kGroups) * kBlockBytes;
    }
};

struct Q40 : FormatOf<4, 32, 8, false, false> {};
struct Q41 : FormatOf<4, 32, 0, true, false> {};
struct Q50 : FormatOf<5, 32, 16, false, false> {};
struct Q51 : FormatOf<5, 32, 0, true, false> {};
struct Q80 : FormatOf<8, 32, 128, false, false> {};  // stored as q + 128
struct Q4K : FormatOf<4, 32, 0, true, true> {};
struct Q5K : FormatOf<5, 32, 0, true, true> {};
struct Q6K : FormatOf<6, 16, 32, false, true> {};
/// What the nibbles of IQ4_NL stand for, and twice what those of MXFP4 do, plus 128.
constexpr uint8_t kIQ4NL[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t kFP4[16] = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};

struct IQ4NL : FormatOf<4, 32, 128, false, false> {
    static constexpr bool kHasTable = true;
    static constexpr const uint8_t* kTable = kIQ4NL;
};
struct MXFP4 : FormatOf<4, 32, 128, false, false, 32, true> {
    static constexpr bool kHasTable = true;
    static constexpr const uint8_t* kTable = kFP4;
};

struct U432 : FormatOf<4, 32, 0, true, false> {
    static constexpr bool kMinInSteps = true;
};
struct U464 : FormatOf<4, 32, 0, true, false, 64> {
    static constexpr bool kMinInSteps = true;
};

/// f(a format's struct) for one of the formats of a file.
template <class F>
inline auto with_format(Format format, F f) {
    switch (format) {
        case Format::q4_0: return f(Q40{});
        case Format::q4_1: return f(Q41{});
        case Format::q5_0: return f(Q50{});
        case Format::q5_1: return f(Q51{});
        case Format::iq4_nl: return f(IQ4NL{});
        case Format::mxfp4: return f(MXFP4{});
        case Format::q4_k: return f(Q4K{});
        case Format::q5_k: return f(Q5K{});
        case Format::q6_k: return f(Q6K{});
        case Format::u4_32: return f(U432{});
        case Format::u4_64: return f(U464{});
        default: return f(Q80{});
    }
}

}  // namespace outpace
