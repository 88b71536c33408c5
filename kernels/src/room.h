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
class Room {
  public:
    /// Some bytes, aligned for every register, and their block, which lives as long as anything refers to it.
    struct Place {
        std::shared_ptr<const Block<uint8_t>> home;
        uint8_t* start;
    };

    /// Several threads may call it at once. Throws std::bad_alloc.
    Place take(std::size_t bytes) {
        const std::lock_guard<std::mutex> alone(taking_);
        const std::size_t size = (bytes + kLine - 1) / kLine * kLine;
        if (!home_ || size > home_->size() - used_) {
            home_ = std::make_shared<const Block<uint8_t>>(std::max(size, std::clamp(taken_ / 2, kBlock, kMost)));
            used_ = 0;
        }
        uint8_t* start = home_->data() + used_;
        used_ += size;
        taken_ += size;
        return {home_, start};
    }

  private:
    static constexpr std::size_t kLine = 64;
    // Addresses; untouched pages take no memory. Blocks grow with the model: each ends within a large page.
    static constexpr std::size_t kBlock = std::size_t{1} << 26, kMost = std::size_t{1} << 29;

    std::mutex taking_;
    std::shared_ptr<const Block<uint8_t>> home_;
    std::size_t used_ = 0;  // of the last block
    std::size_t taken_ = 0;  // of all
};

}  // namespace outpace
