#include "store.h"

#include <algorithm>
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

std::size_t entry_bytes(const Heads& heads) { return heads.is_half ? sizeof(Half) : sizeof(float); }

std::size_t key_bytes(const Heads& heads) { return heads.depth * entry_bytes(heads); }
std::size_t value_bytes(const Heads& heads) { return heads.width() * entry_bytes(heads); }

/// What a slot takes in one layer.
std::size_t slot_bytes(const Heads& heads) { return heads.keys * (key_bytes(heads) + value_bytes(heads)); }

/// Slots are a multiple of 32: every layer and every head begins aligned.
int whole(int slots) { return round_up(slots, 2 * kLanes); }

}  // namespace

Store::Store(const Heads& heads, int layers, int capacity, int slots)
    : heads_(heads), layers_(layers), capacity_(whole(capacity)), data_(bytes_of(heads, layers, capacity)) {
    resize(slots);
}

std::size_t Store::bytes_of(const Heads& heads, int layers, int slots) {
    return Reserved::whole_pages(slot_bytes(heads) * layers * whole(slots));
}

KeyValues Store::layer(int number) const {
    uint8_t* keys = data_.data() + slot_bytes(heads_) * number * slots_;
    return {keys, keys + key_bytes(heads_) * heads_.keys * slots_, slots_};
}

void Store::resize(int slots) {
    slots = whole(slots);
    if (slots > slots_) data_.resize(bytes_of(heads_, layers_, slots));
    spread(slots);
    if (slots < slots_) data_.resize(bytes_of(heads_, layers_, slots));
    slots_ = slots;
}

void Store::spread(int slots) {
    const std::size_t both = std::min(slots, slots_), parts = 2 * heads_.keys * static_cast<std::size_t>(layers_);
    if (!both || slots == slots_) return;
    const auto start = [&](std::size_t part) {  // of a head's keys or values, as a multiple of the slots
        const std::size_t head = part % (2 * heads_.keys), keys = heads_.keys;
        return slot_bytes(heads_) * (part / (2 * keys)) + std::min(head, keys) * key_bytes(heads_) +
               (head > keys ? head - keys : 0) * value_bytes(heads_);
    };
    for (std::size_t n = 0; n < parts; ++n) {
        const std::size_t part = slots > slots_ ? parts - 1 - n : n;  // none is overwritten before it is moved
        const bool is_key = part % (2 * heads_.keys) < static_cast<std::size_t>(heads_.keys);
        std::memmove(data_.data() + start(part) * slots, data_.data() + start(part) * slots_,
                     both * (is_key ? key_bytes(heads_) : value_bytes(heads_)));
    }
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
