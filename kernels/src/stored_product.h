// Matrix products for few rows: int8 activations, and weights in a file's format or int8. Include after a lanes_*.h.
//
// out[r][o] = sum over the parts p of a row, in order:  + float(sum over i in p of (q[o][i] - bias) a[r][i])
//                                                        * (c[o][p] * scale_a[r]), then + m[o][p] * mins[r]
//
// where scale_a belongs to the half of a group of activations that contains the part (or the quarter, if they are
// rounded by quarters) and mins to the half. The inner sum is exact in int32, and each "+" is one fused multiply-add, so
// the result does not depend on the other rows of a pass or on the tiles.
#pragma once

#include <type_traits>

#include "tile_prefetch.h"
#include "formats.h"

namespace outpace {
namespace {

/// Unpacks the weights of 16 outputs x 4 inputs, step `Step` of a group.
template <class F, int Step>
inline auto unpack(const uint8_t* low) {
    constexpr int kHalfSteps = kSteps / kHalves, kAt = Step % kHalfSteps, kWhich = Step / kHalfSteps;
    if constexpr (F::kBits == 8) {
        return Weights::load(low + Step * kStep);
    } else {
        const Bytes both = Bytes::load(low + (kWhich * 4 + kAt % 4) * kStep);
        const Bytes nibbles = bits<kAt < 4 ? 0 : -4, 15>(both);
        if constexpr (F::kHasTable) {
            return lookup(nibbles, F::kTable);
        } else if constexpr (F::kBits == 5) {
            return nibbles | bits<4 - kAt, 16>(Bytes::load(low + F::kLow + kWhich * kStep));
        } else if constexpr (F::kBits == 6) {
            return nibbles | bits<4 - kAt / 2 * 2, 48>(Bytes::load(low + F::kLow + (kWhich * 2 + kAt % 2) * kStep));
        } else {
            return nibbles;
        }
    }
}

/// A group of a panel: its block, c and m, bits, and its index in the block.
struct StoredGroup {
    const uint8_t *block, *scales, *bits;
    int number;

    template <class F>
    OUTPACE_WITHIN static StoredGroup at(const uint8_t* panel, int group) {
        const uint8_t* block = panel + static_cast<int64_t>(group / F::kGroups) * F::kBlockBytes;
        const uint8_t* own = block + F::kHeader + group % F::kGroups * F::kGroupBytes;
        return {block, own, own + F::kScales, group % F::kGroups};
    }
};

/// Prefetches for a step of a group: lines of another group, and one of its block's header.
template <class F, int V>
OUTPACE_WITHIN void fetch_stored(const StoredGroup& group, int step, int first, const Lines& lines) {
    fetch_lines<F::kGroupBytes, V>(group.bits - F::kScales, step, first, lines);
    if (F::kSixBits && step == kSteps - 1) fetch_lines<kLine, V>(group.block + group.number * kLine, step, 0, lines);
}

/// Unpacks c and m of a group, a byte each, from six bits.
template <class F>
inline void unpack_six_bits(const StoredGroup& group, uint8_t* bytes) {
    static_assert(F::kSix == 64);
    const Bytes low = Bytes::load(group.scales), pairs = Bytes::load(group.block + F::high_at(group.number));
    const Bytes high = F::high_bit(group.number) ? bits<-4, 15>(pairs) : bits<0, 15>(pairs);
    (bits<0, 15>(low) | bits<4, 48>(high)).store(bytes);
    (bits<-4, 15>(low) | bits<2, 48>(high)).store(bytes + F::kSix);
}

/// Returns c (0) or m (1) of a part for 16 outputs.
template <class F, int Part, int Which>
inline Floats numbers(const StoredGroup& group, int vector) {
    const uint8_t* place = group.scales + (F::number_at(Part, Which) + vector * kLanes) * F::kNumberBytes;
    if constexpr (F::kIsSuper)
        return load_bytes(place) *
               Floats::load(reinterpret_cast<const Half*>(group.block) + Which * kPanel + vector * kLanes);
    else if constexpr (F::kHasExponents)
        return load_powers(place) * Floats::all(0.5f);
    else
        return Floats::load(reinterpret_cast<const Half*>(place));
}

/// Initial int32 sums: -bias * (sum of a part's activations).
template <class F>
inline Ints start_of(const int32_t* sums, int part) {
    constexpr int kCount = F::kPart / kLanes;
    int32_t total = 0;
    for (int i = 0; i < kCount; ++i) total += sums[part * kCount + i];
    const int32_t offset = -F::kBias * total;
    if constexpr (F::kBits == 8 || F::kHasTable) return begin(offset);
    return Ints::all(offset);
}

/// The type of a part's sums: int32, or the lanes' sums of nibbles.
template <class F>
using PartSums = std::conditional_t<F::kBits == 4 && !F::kHasTable, NibbleSums, Ints>;

template <class Sums>
inline Sums first_sums(Ints start) {
    if constexpr (std::is_same_v<Sums, Ints>) return start;
    else return {};
}

template <class Sums>
inline Ints all_sums(const Sums& sums, Ints start) {
    if constexpr (std::is_same_v<Sums, Ints>) return sums;
    else return start + sums.to_ints();
}

/// Adds part `Part` of a group, from step `Step` on.
template <class F, int R, int V, int Part, int Step, class Sums>
OUTPACE_WITHIN void add_steps(const StoredGroup& group, int first, const int8_t* values,
                              const Lines& lines, Sums (&sums)[R][V]) {
    constexpr int kPartSteps = F::kPart / 4, kAt = Part * kPartSteps + Step;
    if constexpr (Step < kPartSteps) {
        fetch_stored<F, V>(group, kAt, first, lines);
        for (int v = 0; v < V; ++v) {
            const auto w = unpack<F, kAt>(group.bits + (first + v) * 4 * kLanes);
            for (int r = 0; r < R; ++r) sums[r][v] = dot(sums[r][v], w, Quad::load(values + r * kGroup + 4 * kAt));
        }
        add_steps<F, R, V, Part, Step + 1>(group, first, values, lines, sums);
    }
}

/// Adds the parts of a group, from `Part` on, to the totals.
template <class F, int R, int V, int Part>
OUTPACE_WITHIN void add_parts(const StoredGroup& group, int first, const Activations& in,
                              const Lines& lines, Floats (&total)[R][V]) {
    if constexpr (Part < F::kParts) {
        using Sums = PartSums<F>;
        const auto start = [&](int r) { return start_of<F>(in.facts[r].sums, Part); };
        Sums sums[R][V];
        for (int r = 0; r < R; ++r) {
            const Sums none = first_sums<Sums>(start(r));
            for (int v = 0; v < V; ++v) sums[r][v] = none;
        }
        add_steps<F, R, V, Part, 0>(group, first, in.values, lines, sums);
        const int at = F::kParts == kQuarters && !in.by_quarters ? Part / 2 : Part;  // index of the activations' scale
        for (int v = 0; v < V; ++v) {
            const Floats c = numbers<F, Part, 0>(group, first + v);
            for (int r = 0; r < R; ++r)
                total[r][v] = fma(all_sums(sums[r][v], start(r)).to_floats(), c * Floats::all(in.facts[r].scales()[at]),
                                  total[r][v]);
            if constexpr (F::kHasMin) {
                Floats m = numbers<F, Part, 1>(group, first + v);
                if constexpr (F::kMinInSteps) m = m * c;
                for (int r = 0; r < R; ++r)
                    total[r][v] = fma(m, Floats::all(in.facts[r].mins()[Part]), total[r][v]);
            }
        }
        add_parts<F, R, V, Part + 1>(group, first, in, lines, total);
    }
}

/// Multiplies R rows by V vectors of 16 outputs, starting with vector `first` of a panel: out [R, kPanel].
template <class F, int R, int V>
inline void multiply_stored(const uint8_t* panel, int first, const Activations& in, const Tile& tile, float* out) {
    Floats total[R][V];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) total[r][v] = Floats::all(0.0f);
    const TilePrefetch<F::kBlockBytes, F::kGroups, F::kBits, R, V> prefetch(tile, in.groups);
    for (int group = 0; group < in.groups; ++group) {
        StoredGroup at = StoredGroup::at<F>(panel, group);
        alignas(64) uint8_t bytes[F::kSixBits ? 2 * F::kSix : 1];
        if constexpr (F::kSixBits) {
            unpack_six_bits<F>(at, bytes);
            at.scales = bytes;
        }
        add_parts<F, R, V, 0>(at, first, in.from(tile.first, group), prefetch.lines(group), total);
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) total[r][v].store(out + r * kPanel + (first + v) * kLanes);
}

}  // namespace
}  // namespace outpace
