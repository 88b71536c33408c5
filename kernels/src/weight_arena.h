// Memory that several matrices share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "memory.h"

namespace outpace {

/// Packs a model's matrices one after another. Separately, a small model's matrices would not fill large pages, and
/// small pages make a pass a fifth slower; a large model's would leave part of a large page after each.
class WeightArena {
  public:
    /// Memory aligned for every register, and its block, which lives as long as anything refers to it.
    struct Allocation {
        std::shared_ptr<const Block<uint8_t>> block;
        uint8_t* start;
    };

    /// Several threads may call it at once. Throws std::bad_alloc.
    Allocation allocate(std::size_t bytes) {
        const std::lock_guard<std::mutex> alone(allocating_);
        const std::size_t size = (bytes + kLine - 1) / kLine * kLine;
        if (!block_ || size > block_->size() - used_) {
            const std::size_t grown = std::clamp(total_ / 2, kMinBlock, kMaxBlock);
            block_ = std::make_shared<const Block<uint8_t>>(std::max(size, grown));
            used_ = 0;
        }
        uint8_t* start = block_->data() + used_;
        used_ += size;
        total_ += size;
        return {block_, start};
    }

    /// Held by a pass that may pack experts: models with the same weights run one pass at a time.
    std::mutex& running() { return running_; }

  private:
    static constexpr std::size_t kLine = 64;
    // Addresses; untouched pages take no memory. Blocks grow with the model: each ends within a large page.
    static constexpr std::size_t kMinBlock = std::size_t{1} << 26, kMaxBlock = std::size_t{1} << 29;

    std::mutex allocating_, running_;
    std::shared_ptr<const Block<uint8_t>> block_;
    std::size_t used_ = 0;  // bytes used of the last block
    std::size_t total_ = 0;  // bytes used of all blocks
};

}  // namespace outpace
