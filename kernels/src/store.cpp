#include "store.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "half.h"

namespace outpace {
namespace {

/// Returns the block of 16 slots' keys that contains a slot's key.
uint8_t* key_block(const Heads& heads, const KeyValues& store, int head, int slot) {
    return store.keys + (static_cast<int64_t>(head) * store.slots + slot / kLanes * kLanes) * heads.key_bytes();
}

uint8_t* value_place(const Heads& heads, const KeyValues& store, int head, int slot) {
    return store.values + (static_cast<int64_t>(head) * store.slots + slot) * heads.value_bytes();
}

template <std::size_t Count>
using Bytes = std::integral_constant<std::size_t, Count>;

int entry_bytes(const Heads& heads) {
    return heads.kv_format == KvFormat::float32 ? 4 : heads.kv_format == KvFormat::float16 ? 2 : 1;
}

/// Calls f(place, bytes) for every number of a slot's key: its entries, then its scales in int8.
template <class F>
void for_key(const Heads& heads, const KeyValues& store, int head, int slot, F f) {
    uint8_t* line = key_block(heads, store, head, slot);
    const auto each = [&](int count, auto size) {
        for (int i = 0; i < count; ++i, line += size * kLanes) f(line + slot % kLanes * size, size);
    };
    switch (heads.kv_format) {
        case KvFormat::float32: return each(heads.depth, Bytes<4>{});
        case KvFormat::float16: return each(heads.depth, Bytes<2>{});
        case KvFormat::int8:
            each(heads.depth, Bytes<1>{});
            each(round_up(heads.depth, kScaled) / kScaled, Bytes<2>{});
    }
}

/// Reads the number at `place`. `scale`: the scale of its 32 entries; used in int8 only.
float number(const Heads& heads, const uint8_t* place, const uint8_t* scale) {
    if (heads.kv_format == KvFormat::float32) {
        float found;
        std::memcpy(&found, place, 4);
        return found;
    }
    uint16_t bits;
    std::memcpy(&bits, heads.kv_format == KvFormat::int8 ? scale : place, 2);
    if (heads.kv_format == KvFormat::float16) return half_to_float({bits});
    return static_cast<float>(static_cast<int8_t>(*place)) * from_bfloat16(bits);
}

/// Bytes of a slot in the first `layers` layers.
std::size_t slot_bytes(const std::vector<Heads>& heads, int layers) {
    std::size_t total = 0;
    for (int number = 0; number < layers; ++number)
        total += static_cast<std::size_t>(heads[number].keys) * (heads[number].key_bytes() + heads[number].value_bytes());
    return total;
}

/// Slots are a multiple of 32, so that every layer and head starts aligned.
int whole(int slots) { return round_up(slots, 2 * kLanes); }

}  // namespace

Store::Store(std::vector<Heads> heads, int capacity, int slots, const Recurrence& recurrence)
    : heads_(std::move(heads)),
      capacity_(whole(capacity)),
      data_(bytes_of(heads_, capacity)),
      states_(recurrence.layers ? std::make_unique<States>(recurrence) : nullptr) {
    resize(slots);
}

std::size_t Store::bytes_of(const std::vector<Heads>& heads, int slots) {
    return Reserved::whole_pages(slot_bytes(heads, static_cast<int>(heads.size())) * whole(slots));
}

bool Store::has_slots_of(const Store& other) const {
    return std::equal(heads_.begin(), heads_.end(), other.heads_.begin(), other.heads_.end(),
                      [](const Heads& one, const Heads& another) { return one.has_slots_of(another); });
}

KeyValues Store::layer(int number) const {
    const Heads& heads = heads_[number];
    uint8_t* keys = data_.data() + slot_bytes(heads_, number) * slots_;
    return {keys, keys + static_cast<std::size_t>(heads.key_bytes()) * heads.keys * slots_, slots_};
}

void Store::resize(int slots) {
    slots = whole(slots);
    if (slots > slots_) data_.resize(bytes_of(heads_, slots));
    spread(slots);
    if (slots < slots_) data_.resize(bytes_of(heads_, slots));
    slots_ = slots;
}

void Store::spread(int slots) {
    const std::size_t both = std::min(slots, slots_);
    if (!both || slots == slots_) return;
    std::vector<std::size_t> starts{0};  // of each head's keys or values, and the end, as multiples of the slots
    for (const Heads& heads : heads_)
        for (int part = 0; part < 2 * heads.keys; ++part)
            starts.push_back(starts.back() + (part < heads.keys ? heads.key_bytes() : heads.value_bytes()));
    const std::size_t parts = starts.size() - 1;
    for (std::size_t n = 0; n < parts; ++n) {
        // in this order none is overwritten before it is moved
        const std::size_t part = slots > slots_ ? parts - 1 - n : n;
        std::memmove(data_.data() + starts[part] * slots, data_.data() + starts[part] * slots_,
                     both * (starts[part + 1] - starts[part]));
    }
}

void Store::move_in(int number, const std::vector<int>& source, int start) {
    const Heads& heads = heads_[number];
    const KeyValues place = layer(number);
    const std::size_t size = heads.value_bytes();
    std::vector<uint8_t> buffer(source.size() * (heads.key_bytes() + size));
    for (int head = 0; head < heads.keys; ++head) {
        uint8_t* to = buffer.data();
        const auto take = [&](const uint8_t* from, auto bytes) { std::memcpy(to, from, bytes), to += bytes; };
        for (int slot : source) {
            for_key(heads, place, head, slot, take);
            take(value_place(heads, place, head, slot), size);
        }
        const uint8_t* from = buffer.data();
        const auto give = [&](uint8_t* back, auto bytes) { std::memcpy(back, from, bytes), from += bytes; };
        for (std::size_t n = 0; n < source.size(); ++n) {
            const int slot = start + static_cast<int>(n);
            for_key(heads, place, head, slot, give);
            give(value_place(heads, place, head, slot), size);
        }
    }
}

void Store::copy_in(int number, const Store& other, int count) {
    const Heads& heads = heads_[number];
    const KeyValues to = layer(number), from = other.layer(number);
    const std::size_t whole = round_up(count, kLanes);  // keys are moved in blocks of 16 slots
    for (int head = 0; head < heads.keys; ++head) {
        std::memcpy(key_block(heads, to, head, 0), key_block(heads, from, head, 0), whole * heads.key_bytes());
        std::memcpy(value_place(heads, to, head, 0), value_place(heads, from, head, 0),
                    static_cast<std::size_t>(count) * heads.value_bytes());
    }
}

void Store::move(const std::vector<int>& source, int start) {
    for (int number = 0; number < layers(); ++number) move_in(number, source, start);
}

void Store::copy(const Store& other, int count) {
    for (int number = 0; number < layers(); ++number) copy_in(number, other, count);
}

void Store::read(int layer_number, int count, float* out) const {
    const Heads& heads = heads_[layer_number];
    const KeyValues place = layer(layer_number);
    const int depth = heads.depth, size = entry_bytes(heads);
    float* values_out = out + static_cast<int64_t>(heads.keys) * count * depth;
    for (int head = 0; head < heads.keys; ++head)
        for (int slot = 0; slot < count; ++slot) {
            const int lane = slot % kLanes;
            const uint8_t *block = key_block(heads, place, head, slot), *key_scales = block + depth * kLanes + lane * 2;
            const uint8_t *value = value_place(heads, place, head, slot), *value_scales = value + heads.width();
            for (int i = 0; i < depth; ++i) {
                const int scale = i / kScaled * 2;
                *out++ = number(heads, block + (i * kLanes + lane) * size, key_scales + scale * kLanes);
                *values_out++ = number(heads, value + i * size, value_scales + scale);
            }
        }
}

}  // namespace outpace
