#include "store.h"

#include <cstring>

#include "half.h"

namespace outpace {
namespace {

float as_float(float x) { return x; }
float as_float(Half x) { return half_to_float(x); }

/// Where the key of a slot begins; its entries lie kLanes apart.
template <class T>
T* key_place(const Heads& heads, const KeyValues& store, int head, int slot) {
    const int64_t block = static_cast<int64_t>(head) * store.slots + slot / kLanes * kLanes;
    return static_cast<T*>(store.keys) + block * heads.depth + slot % kLanes;
}

template <class T>
T* value_place(const Heads& heads, const KeyValues& store, int head, int slot) {
    return static_cast<T*>(store.values) + (static_cast<int64_t>(head) * store.slots + slot) * heads.width();
}

}  // namespace

Store::Store(const Heads& heads, int layers, int slots)
    : heads_(heads), layers_(layers), slots_(round_up(slots, 2 * kLanes)) {
    const std::size_t size = heads.is_half ? sizeof(Half) : sizeof(float);
    const std::size_t entries = static_cast<std::size_t>(heads.keys) * slots_;
    key_bytes_ = entries * heads.depth * size;  // slots are a multiple of 32: every layer begins aligned
    value_bytes_ = entries * heads.width() * size;
    data_ = Block<uint8_t>(layers * (key_bytes_ + value_bytes_));
}

KeyValues Store::layer(int number) const {
    uint8_t* keys = data_.data() + number * (key_bytes_ + value_bytes_);
    return {keys, keys + key_bytes_, slots_};
}

template <class T>
void Store::move_in(int number, const std::vector<int>& source, int start) {
    const KeyValues place = layer(number);
    const std::size_t width = heads_.width(), depth = heads_.depth;
    std::vector<T> held(source.size() * (depth + width));
    for (int head = 0; head < heads_.keys; ++head) {
        T* to = held.data();
        for (int slot : source) {
            const T* key = key_place<T>(heads_, place, head, slot);
            for (std::size_t i = 0; i < depth; ++i) *to++ = key[i * kLanes];
            std::memcpy(to, value_place<T>(heads_, place, head, slot), width * sizeof(T));
            to += width;
        }
        const T* from = held.data();
        for (std::size_t n = 0; n < source.size(); ++n) {
            const int slot = start + static_cast<int>(n);
            T* key = key_place<T>(heads_, place, head, slot);
            for (std::size_t i = 0; i < depth; ++i) key[i * kLanes] = *from++;
            std::memcpy(value_place<T>(heads_, place, head, slot), from, width * sizeof(T));
            from += width;
        }
    }
}

template <class T>
void Store::copy_in(int number, const Store& other, int count) {
    const KeyValues to = layer(number), from = other.layer(number);
    const std::size_t whole = round_up(count, kLanes), depth = heads_.depth;  // keys go in blocks of 16 slots
    for (int head = 0; head < heads_.keys; ++head) {
        std::memcpy(key_place<T>(heads_, to, head, 0), key_place<T>(heads_, from, head, 0), whole * depth * sizeof(T));
        std::memcpy(value_place<T>(heads_, to, head, 0), value_place<T>(heads_, from, head, 0),
                    count * static_cast<std::size_t>(heads_.width()) * sizeof(T));
    }
}

template <class T>
void Store::read_in(int number, int count, float* out) const {
    const KeyValues place = layer(number);
    float* values_out = out + static_cast<int64_t>(heads_.keys) * count * heads_.depth;
    for (int head = 0; head < heads_.keys; ++head)
        for (int slot = 0; slot < count; ++slot) {
            const T* key = key_place<T>(heads_, place, head, slot);
            const T* value = value_place<T>(heads_, place, head, slot);
            for (int i = 0; i < heads_.depth; ++i) *out++ = as_float(key[i * kLanes]);
            for (int i = 0; i < heads_.depth; ++i) *values_out++ = as_float(value[i]);
        }
}

void Store::move(const std::vector<int>& source, int start) {
    for (int number = 0; number < layers_; ++number)
        heads_.is_half ? move_in<Half>(number, source, start) : move_in<float>(number, source, start);
}

void Store::copy(const Store& other, int count) {
    for (int number = 0; number < layers_; ++number)
        heads_.is_half ? copy_in<Half>(number, other, count) : copy_in<float>(number, other, count);
}

void Store::read(int number, int count, float* out) const {
    heads_.is_half ? read_in<Half>(number, count, out) : read_in<float>(number, count, out);
}

}  // namespace outpace
