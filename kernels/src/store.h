// One session's keys and values, all layers.
#pragma once

#include <vector>

#include "kernels.h"
#include "memory.h"

namespace outpace {

/// Slots for keys and values, allocated once. Written by `Model::forward`, moved and copied here.
class Store {
  public:
    Store(const Heads& heads, int layers, int slots);

    int slots() const { return slots_; }
    int layers() const { return layers_; }
    const Heads& heads() const { return heads_; }
    KeyValues layer(int number) const;

    /// Slots source[0], source[1], ... come to lie at start, start + 1, ...; they may overlap.
    void move(const std::vector<int>& source, int start);

    /// The first `count` slots of another store of the same shape.
    void copy(const Store& other, int count);

    /// One layer's keys and values of the first `count` slots: [2, kv_heads, count, depth] floats.
    void read(int layer, int count, float* out) const;

  private:
    template <class T>
    void move_in(int layer, const std::vector<int>& source, int start);
    template <class T>
    void copy_in(int layer, const Store& other, int count);
    template <class T>
    void read_in(int layer, int count, float* out) const;

    Heads heads_;
    int layers_, slots_;
    std::size_t key_bytes_, value_bytes_;  // a layer
    Block<uint8_t> data_;
};

}  // namespace outpace
