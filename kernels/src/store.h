// One session's keys and values, all layers, and its recurrent states.
#pragma once

#include <memory>
#include <vector>

#include "kernels.h"
#include "reserved.h"
#include "states.h"

namespace outpace {

/// Slots for keys and values that grow on demand. `Model::forward` writes them; they are moved and copied here.
class Store {
  public:
    /// Reserves addresses for `capacity` slots and allocates `slots`. `heads`: of each layer with keys and values.
    Store(std::vector<Heads> heads, int capacity, int slots, const Recurrence& recurrence = {});

    int capacity() const { return capacity_; }
    int slots() const { return slots_; }
    int layers() const { return static_cast<int>(heads_.size()); }
    std::size_t bytes() const { return data_.bytes() + (states_ ? states_->bytes() : 0); }
    const std::vector<Heads>& heads() const { return heads_; }
    /// Whether slots of a layer's number have the same layout in both.
    bool has_slots_of(const Store& other) const;
    KeyValues layer(int number) const;
    States* states() const { return states_.get(); }  // null without recurrent layers

    /// Resizes to at least `slots` slots; later ones are lost. The heads' slots are moved in place, so that each head
    /// stays contiguous as attention reads it. On std::bad_alloc it is unchanged.
    void resize(int slots);

    /// Bytes of `slots` slots.
    static std::size_t bytes_of(const std::vector<Heads>& heads, int slots);

    /// Moves slots source[0], source[1], ... to start, start + 1, ...; they may overlap.
    void move(const std::vector<int>& source, int start);

    /// Copies the first `count` slots of another store of the same shape, without states.
    void copy(const Store& other, int count);

    /// Reads one layer's keys and values of the first `count` slots: [2, kv_heads, count, depth] floats.
    void read(int layer, int count, float* out) const;

  private:
    void move_in(int layer, const std::vector<int>& source, int start);
    void copy_in(int layer, const Store& other, int count);

    /// Moves the slots that exist in both sizes to their place among `slots`.
    void spread(int slots);

    std::vector<Heads> heads_;
    int capacity_, slots_ = 0;
    Reserved data_;
    std::unique_ptr<States> states_;
};

}  // namespace outpace
