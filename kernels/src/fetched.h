// What a product asks its memory for while it computes, which changes no bit of it. To be read after a lanes_*.h.
#pragma once

#include "kernels.h"

namespace outpace {
namespace {

/// Within its caller by order: a compiler's own measure ends with so many formats, and sums that pass through memory take
/// half as long again. Under a sanitizer such functions would take minutes to compile.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define OUTPACE_WITHIN inline
#else
#define OUTPACE_WITHIN [[gnu::always_inline]] inline
#endif

constexpr int kSteps = kGroup / 4;
constexpr int kLine = 64;          // bytes that come together
constexpr int kNearBytes = 8192;   // about so far ahead lie lines that are fetched near
constexpr int kFirstCache = 65536;  // bytes, at most

/// Some rows of a product that are computed together, and what is fetched from memory meanwhile. Far: in those steps of every
/// group whose bit is set the lines that lie `ahead` bytes further on, so that the next panel has arrived when this one is
/// done; two tiles take turns, of more the last does it. Spread over the steps: processors drop what is asked for in one
/// go. Near: the lines of this panel that are needed soon, and at its end those of the panel `next` bytes further on.
struct Tile {
    int first;
    int rows;
    int64_t ahead;
    int64_t next;
    uint32_t far_steps;
    bool is_near;
    bool is_alone;
};

/// What a group fetches: lines so many bytes ahead of its own.
struct Lines {
    int64_t far, near;
    uint32_t far_steps;
    bool is_near;
};

/// What R rows times V vectors of a panel's weights fetch. Rows that are alone fetch near, unless they are many and weights
/// have few bits: these are multiplied no sooner than they come from afar. Weights of many bits are fetched near by others
/// as well where the first cache does not hold a panel of them. Lanes that take one vector at a time multiply too slowly to
/// wait for memory, and do not fetch near. `Block`: the bytes of `Groups` groups that lie together.
template <int Block, int Groups, int Bits, int R, int V>
struct Fetched {
    static constexpr int kNear = (kNearBytes + Block / 2) / Block * Groups;  // groups
    static_assert(kNear > 0);

    const Tile& tile;
    const bool is_near;
    const int last;  // from this group on what is near lies in the next panel
    const int64_t within, behind;

    OUTPACE_WITHIN Fetched(const Tile& tile, int groups)
        : tile(tile),
          is_near(V > 1 && tile.is_near && (tile.is_alone ? Bits > 4 || R <= 4 : Bits > 4 && groups * (Block / Groups) > kFirstCache)),
          last(kNear < groups ? groups - kNear : 0),
          within(kNear / Groups * Block),
          behind(tile.next - last / Groups * int64_t{Block}) {}

    OUTPACE_WITHIN Lines of(int group) const {
        return {tile.ahead, group < last ? within : behind, is_near && tile.is_alone ? 0 : tile.far_steps, is_near};
    }
};

/// Asks for what lies ahead of the lines of step `step` of a group of so many bytes: from afar into the second cache, and
/// from near into the first. `vector`: whose, where one is computed after the other.
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
