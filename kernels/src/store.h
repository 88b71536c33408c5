// One session's keys and values, all layers.
#pragma once

#include <vector>

#include "kernels.h"
#include "reserved.h"

namespace outpace {

/// Slots for keys and values, as many as are asked for at the time. Written by `Model::forward`, moved and copied here.
class Store {
  public:
    /// Addresses for `capacity` slots, of which there are `slots`.
    Store(const Heads& heads, int layers, int capacity, int slots);

    int capacity() const { return capacity_; }
    int slots() const { return slots_; }
    int layers() const { return layers_; }
    std::size_t bytes() const { return data_.bytes(); }
    const Heads& heads() const { return heads_; }
    KeyValues layer(int number) const;

    /// At least `slots` slots; what lies beyond is forgotten. The heads' slots are spread, or drawn together, in place:
    /// each head's lie in one piece, as attention reads them. Throws std::bad_alloc, and is what it was then.
    void resize(int slots);

    /// What so many slots take.
    static std::size_t bytes_of(const Heads& heads, int layers, int slots);

    /// Slots source[0], source[1], ... come to lie at start, start + 1, ...; they may overlap.
    void move(const std::vector<int>& source, int start);

    /// The first `count` slots of another store of the same shape.
    void copy(const Store& other, int count);

    /// One layer's keys and values of the first `count` slots: [2, kv_heads, count, depth] floats.
    void read(int layer, int count, float* out) const;

  private:
    void move_in(int layer, const std::vector<int>& source, int start);
    void copy_in(int layer, const Store& other, int count);

    /// Moves all that both numbers of slots hold from where it lies to where it lies among `slots`.
    void spread(int slots);

    Heads heads_;
    int layers_, capacity_, slots_ = 0;
    Reserved data_;
};

}  // namespace outpace
