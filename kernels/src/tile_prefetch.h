// Prefetches of products, which do not change any bit. Include after a lanes_*.h.
#pragma once

#include "kernels.h"

namespace outpace {
namespace {

/// Force inlining: a compiler's own limit is exceeded by the number of formats, and sums that pass through memory take
/// half as long again. Not under sanitizers, where such functions take minutes to compile.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define OUTPACE_WITHIN inline
#else
#define OUTPACE_WITHIN [[gnu::always_inline]] inline
#endif

constexpr int kSteps = kGroup / 4;
constexpr int kLine = 64;  // bytes of a cache line
constexpr int kNearBytes = 8192;  // distance of near prefetches
constexpr int kFirstCache = 65536;  // bytes, at most

/// Rows of a product that are computed together, and their prefetches. Far: in the steps of each group whose bit is
/// set, the lines `ahead` bytes later, so that the next panel has arrived when this one is done; two tiles share them,
/// of more the last one does it. They are spread over steps because processors drop bursts of prefetches. Near: the
/// lines of this panel that are needed soon, and at its end those of the panel `next` bytes later.
struct Tile {
    int first;
    int rows;
    int64_t ahead;
    int64_t next;
    uint32_t far_steps;
    bool is_near;
    bool is_alone;
};

/// Prefetches of a group: lines at these distances from its own.
struct Lines {
    int64_t far, near;
    uint32_t far_steps;
    bool is_near;
};

/// Decides what R rows times V vectors of a panel's weights prefetch. Single tiles prefetch near, unless they have many
/// rows and weights of few bits, which then compute as slowly as far lines arrive. Weights of many bits are prefetched
/// near in other tiles too if the first cache does not hold a panel. Lanes with one vector at a time are too slow to
/// wait for memory and do not prefetch near. `Block`: bytes of `Groups` adjacent groups.
template <int Block, int Groups, int Bits, int R, int V>
struct TilePrefetch {
    static constexpr int kNear = (kNearBytes + Block / 2) / Block * Groups;  // in groups
    static_assert(kNear > 0);

    const Tile& tile;
    const bool is_near;
    const int last;  // from this group on near lines are in the next panel
    const int64_t within, behind;

    OUTPACE_WITHIN TilePrefetch(const Tile& tile, int groups)
        : tile(tile),
          is_near(V > 1 && tile.is_near && (tile.is_alone ? Bits > 4 || R <= 4 : Bits > 4 && groups * (Block / Groups) > kFirstCache)),
          last(kNear < groups ? groups - kNear : 0),
          within(kNear / Groups * Block),
          behind(tile.next - last / Groups * int64_t{Block}) {}

    OUTPACE_WITHIN Lines lines(int group) const {
        return {tile.ahead, group < last ? within : behind, is_near && tile.is_alone ? 0 : tile.far_steps, is_near};
    }
};

/// Prefetches what follows the lines of step `step` of a group of `Bytes` bytes: far lines into the second cache, near
/// ones into the first. `vector`: the index if vectors are computed one after another.
template <int Bytes, int V>
OUTPACE_WITHIN void fetch_lines(const uint8_t* group, int step, int vector, const Lines& lines) {
    constexpr int kLines = Bytes / kLine;
    const int begin = step * kLines / kSteps, end = (step + 1) * kLines / kSteps;
    if (lines.far_steps >> step & 1)
        for (int line = begin; line < end; ++line)
            if (V > 1 || line % 2 == vector) __builtin_prefetch(group + lines.far + line * kLine, 0, 2);
    if (V > 1 && lines.is_near)
        for (int line = begin; line < end; ++line) __builtin_prefetch(group + lines.near + line * kLine, 0, 3);
}

}  // namespace
}  // namespace outpace
