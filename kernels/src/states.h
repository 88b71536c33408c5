// One session's recurrent states, all layers, and what its pending nodes stash.
#pragma once

#include <vector>

#include "memory.h"
#include "recurrence.h"

namespace outpace {

/// The committed state, and a place in the stash for each pending node and for each accepted node that the state has
/// not taken in yet. Places keep their address and are used again.
class States {
  public:
    explicit States(const Recurrence& sizes);

    const Recurrence& sizes() const { return sizes_; }
    float* state() const { return state_.data(); }
    float* const* stash() const { return stash_.data(); }
    std::size_t size() const { return state_.size(); }
    int pending() const { return static_cast<int>(pending_.size()); }

    /// Returns the places of the pending nodes, and of the accepted ones, in their order.
    const std::vector<int>& places() const { return pending_; }
    const std::vector<int>& folds() const { return folds_; }

    /// Allocates places for `count` more nodes, which become pending. On std::bad_alloc it is unchanged.
    void add(int count);

    /// Accepts the pending nodes of `path`, keeps those of `live`, which are renumbered from 0, and drops the others.
    void keep(const std::vector<int>& path, const std::vector<int>& live);

    /// Frees the places of the accepted nodes, which a pass has taken in; most of a long prompt's memory goes.
    void end_folds();

    /// Copies the committed state, [layers, state_size] floats. Throws if accepted nodes are missing in it.
    void save(float* out) const;

    /// Continues from a saved state, or from the beginning of a text with null. Nothing is pending then.
    void load(const float* saved);

    /// Frees the memory of all unused places but `max_free`.
    void free_memory(std::size_t max_free);

    std::size_t bytes() const;

    /// Bytes of a session with this number of places.
    static std::size_t bytes_of(const Recurrence& sizes, int places);

  private:
    Recurrence sizes_;
    Block<float> state_;
    std::vector<Block<float>> blocks_;
    std::vector<float*> stash_;
    std::vector<int> pending_, folds_, free_;
};

}  // namespace outpace
