#include "states.h"

#include <algorithm>
#include <stdexcept>

namespace outpace {

namespace {

constexpr std::size_t kMaxFree = 32;  // places that stay allocated: those of usual trees

}  // namespace

States::States(const Recurrence& sizes) : sizes_(sizes), state_(sizes.state_size() * sizes.layers) { load(nullptr); }

void States::add(int count) {
    const int missing = count - static_cast<int>(free_.size());
    std::vector<Block<float>> more;
    for (int i = 0; i < missing; ++i) more.emplace_back(sizes_.stash_size() * sizes_.layers);
    for (Block<float>& block : more) {
        const auto unused = std::find(stash_.begin(), stash_.end(), nullptr);
        const int place = static_cast<int>(unused - stash_.begin());
        if (unused == stash_.end()) {
            stash_.push_back(nullptr);
            blocks_.emplace_back();
        }
        stash_[place] = block.data();
        blocks_[place] = std::move(block);
        free_.push_back(place);
    }
    for (int i = 0; i < count; ++i) {
        pending_.push_back(free_.back());
        free_.pop_back();
    }
}

void States::keep(const std::vector<int>& path, const std::vector<int>& live) {
    std::vector<bool> is_kept(pending_.size());
    for (const auto* nodes : {&path, &live})
        for (int node : *nodes) {
            if (node < 0 || node >= pending() || is_kept[node]) throw std::invalid_argument("a node is not pending");
            is_kept[node] = true;
        }
    for (int node : path) folds_.push_back(pending_[node]);
    std::vector<int> left;
    for (int node : live) left.push_back(pending_[node]);
    for (int node = 0; node < pending(); ++node)
        if (!is_kept[node]) free_.push_back(pending_[node]);
    pending_ = std::move(left);
}

void States::end_folds() {
    free_.insert(free_.end(), folds_.begin(), folds_.end());
    folds_.clear();
    free_memory(kMaxFree);
}

void States::save(float* out) const {
    if (!folds_.empty()) throw std::invalid_argument("the state lacks accepted nodes");
    std::copy_n(state_.data(), state_.size(), out);
}

void States::load(const float* saved) {
    keep({}, {});
    end_folds();
    if (saved)
        std::copy_n(saved, state_.size(), state_.data());
    else
        std::fill_n(state_.data(), state_.size(), 0.0f);
}

void States::free_memory(std::size_t max_free) {
    while (free_.size() > max_free) {
        blocks_[free_.back()] = Block<float>();
        stash_[free_.back()] = nullptr;
        free_.pop_back();
    }
}

std::size_t States::bytes() const {
    std::size_t total = state_.bytes();
    for (const Block<float>& block : blocks_) total += block.bytes();
    return total;
}

std::size_t States::bytes_of(const Recurrence& sizes, int places) {
    return (sizes.state_size() + sizes.stash_size() * places) * sizes.layers * sizeof(float);
}

}  // namespace outpace
