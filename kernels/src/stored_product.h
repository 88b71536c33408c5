// Products with a file's own weights, for few rows. To be read after a lanes_*.h.
//
// out[r][o] = sum over the parts p of a row, in order:  + float(sum over i in p of (q[o][i] - bias) a[r][i])
//                                                        * (c[o][p] * scale_a[r]), then + m[o][p] * mins[r]
//
// with scale_a and mins those of the activations' group and half. The inner sum is exact in int32, and each "+" is one
// fused multiply-add: which rows travel together, and how they are cut into tiles, changes nothing.
#pragma once

#include <type_traits>

#include "formats.h"
#include "kernels.h"

namespace outpace {
namespace {

constexpr int kSteps = kGroup / 4;

/// Some rows of a product that are computed together, and what is fetched from memory meanwhile: the lines that lie
/// `ahead` bytes further on, in those steps of every group whose bit is set. So the next panel has arrived when this
/// one is done: two tiles take turns, of more the last does it. Spread over the steps: processors drop what is asked
/// for in one go.
struct Tile {
    int first;
    int rows;
    int64_t ahead;
    uint32_t fetched_steps;
};

/// Weights of 16 outputs x 4 inputs, step `Step` of a group, from its bits.
template <class F, int Step>
inline auto unpack(const uint8_t* low) {
    constexpr int kHalfSteps = kSteps / kHalves, kAt = Step % kHalfSteps, kWhich = Step / kHalfSteps;
    if constexpr (F::kBits == 8) {
        return Weights::load(low + Step * kStep);
    } else {
        const Bytes both = Bytes::load(low + (kWhich * 4 + kAt % 4) * kStep);
        const Bytes nibbles = bits<kAt < 4 ? 0 : -4, 15>(both);
        if constexpr (F::kHasTable) {
            return lookup(nibbles);
        } else if constexpr (F::kBits == 5) {
            return nibbles | bits<4 - kAt, 16>(Bytes::load(low + F::kLow + kWhich * kStep));
        } else if constexpr (F::kBits == 6) {
            return nibbles | bits<4 - kAt / 2 * 2, 48>(Bytes::load(low + F::kLow + (kWhich * 2 + kAt % 2) * kStep));
        } else {
            return nibbles;
        }
    }
}

/// c, or m, of a part for 16 outputs. `header`: the scales of its block.
template <class F>
inline Floats numbers(const uint8_t* header, const uint8_t* scales, int part, int which, int vector) {
    const uint8_t* place = scales + (F::number_at(part, which) + vector * kLanes) * F::kNumberBytes;
    if constexpr (F::kIsSuper)
        return load_bytes(place) *
               Floats::load(reinterpret_cast<const Half*>(header) + which * kPanel + vector * kLanes);
    else
        return Floats::load(reinterpret_cast<const Half*>(place));
}

/// -bias * (sum of a part's activations): where its int32 sums begin.
template <class F>
inline Ints start_of(const int32_t* sums, int part) {
    constexpr int kCount = F::kPart / kLanes;
    int32_t total = 0;
    for (int i = 0; i < kCount; ++i) total += sums[part * kCount + i];
    const int32_t offset = -F::kBias * total;
    if constexpr (F::kBits == 8 || F::kHasTable) return begin(offset);
    return Ints::all(offset);
}

/// The lines of the next panel that step `step` of a group fetches.
template <class F, int V>
inline void fetch_ahead(const uint8_t* group, int step, int first, const Tile& tile) {
    constexpr int kLines = F::kGroupBytes / 64;
    if (!(tile.fetched_steps >> step & 1)) return;
    for (int line = step * kLines / kSteps; line < (step + 1) * kLines / kSteps; ++line)
        if (V > 1 || line % 2 == first) __builtin_prefetch(group + tile.ahead + line * 64, 0, 2);
}

/// What a part's products are summed in: int32, or sums of nibbles as the lanes like them.
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

/// Within its caller by order: a compiler's own measure ends with so many formats, and sums that pass through memory take
/// half as long again. Under a sanitizer such functions would take minutes to compile.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define OUTPACE_WITHIN inline
#else
#define OUTPACE_WITHIN [[gnu::always_inline]] inline
#endif

/// The sums of part `Part` of a group, from its step `Step` on.
template <class F, int R, int V, int Part, int Step, class Sums>
OUTPACE_WITHIN void add_steps(const uint8_t* group, int first, const int8_t* values, const Tile& tile,
                              Sums (&sums)[R][V]) {
    constexpr int kPartSteps = F::kPart / 4, kAt = Part * kPartSteps + Step;
    if constexpr (Step < kPartSteps) {
        fetch_ahead<F, V>(group, kAt, first, tile);
        for (int v = 0; v < V; ++v) {
            const auto w = unpack<F, kAt>(group + F::kScales + (first + v) * 4 * kLanes);
            for (int r = 0; r < R; ++r) sums[r][v] = dot(sums[r][v], w, Quad::load(values + r * kGroup + 4 * kAt));
        }
        add_steps<F, R, V, Part, Step + 1>(group, first, values, tile, sums);
    }
}

/// The parts of a group, from `Part` on, into the totals.
template <class F, int R, int V, int Part>
OUTPACE_WITHIN void add_parts(const uint8_t* header, const uint8_t* place, int first, const Activations& in,
                              const Tile& tile, Floats (&total)[R][V]) {
    if constexpr (Part < F::kParts) {
        using Sums = PartSums<F>;
        const auto start = [&](int r) { return start_of<F>(in.facts[r].sums, Part); };
        Sums sums[R][V];
        for (int r = 0; r < R; ++r) {
            const Sums none = first_sums<Sums>(start(r));
            for (int v = 0; v < V; ++v) sums[r][v] = none;
        }
        add_steps<F, R, V, Part, 0>(place, first, in.values, tile, sums);
        for (int v = 0; v < V; ++v) {
            const Floats c = numbers<F>(header, place, Part, 0, first + v);
            for (int r = 0; r < R; ++r)
                total[r][v] = fma(all_sums(sums[r][v], start(r)).to_floats(),
                                  c * Floats::all(in.facts[r].scale), total[r][v]);
            if constexpr (F::kHasMin) {
                Floats m = numbers<F>(header, place, Part, 1, first + v);
                if constexpr (F::kMinInSteps) m = m * c;
                for (int r = 0; r < R; ++r)
                    total[r][v] = fma(m, Floats::all(in.facts[r].mins[Part]), total[r][v]);
            }
        }
        add_parts<F, R, V, Part + 1>(header, place, first, in, tile, total);
    }
}

/// R rows times V vectors of 16 outputs, beginning with vector `first` of a panel, into out [R, kPanel].
template <class F, int R, int V>
inline void multiply_stored(const uint8_t* panel, int first, const Activations& in, const Tile& tile, float* out) {
    Floats total[R][V];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) total[r][v] = Floats::all(0.0f);
    const uint8_t *header = panel, *place = panel + F::kHeader;
    for (int group = 0; group < in.groups; ++group) {
        add_parts<F, R, V, 0>(header, place, first, in.from(tile.first, group), tile, total);
        place += F::kGroupBytes;
        if ((group + 1) % F::kGroups == 0) header = place, place += F::kHeader;
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) total[r][v].store(out + r * kPanel + (first + v) * kLanes);
}

}  // namespace
}  // namespace outpace
