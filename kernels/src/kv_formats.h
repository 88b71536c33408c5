// Storage formats of keys and values, as attention reads and writes them. Include after a lanes_*.h.
//
// float32 and half precision store the numbers. int8: 32 entries of a head share a scale, (largest |x| / 127) rounded
// up to bfloat16, and an entry is round(x / scale); entry * scale is exact in float32, so attention computes as it does
// with float32. Keys of 16 slots are interleaved entry by entry, in int8 followed by their scales in the same way; a
// value is contiguous, in int8 followed by its scales.
#pragma once

#include "kernels.h"

namespace outpace {
namespace {

/// Numbers of type T, float or Half.
template <class T>
struct KvFloats {
    static constexpr int kRun = kDepthMax;  // entries that share a result of `scales`
    struct Scales {};

    static Scales scales(const uint8_t*, int, int) { return {}; }
    static Floats key(const uint8_t* block, int entry, Scales) {
        return Floats::load(reinterpret_cast<const T*>(block) + entry * kLanes);
    }
    static Floats value(const uint8_t* slot, int, int entry) {
        return Floats::load(reinterpret_cast<const T*>(slot) + entry);
    }
};

struct KvInt8 {
    static constexpr int kRun = kScaled;

    /// Returns the scales of 16 slots' keys for the entries from `entry` on.
    static Floats scales(const uint8_t* block, int depth, int entry) {
        return load_bfloat16(block + (depth + entry / kScaled * 2) * kLanes);
    }
    static Floats key(const uint8_t* block, int entry, Floats scales) {
        return load_bytes(block + entry * kLanes) * scales;
    }
    static Floats value(const uint8_t* slot, int width, int entry) {
        uint16_t high;
        std::memcpy(&high, slot + width + entry / kScaled * 2, 2);
        return load_bytes(slot + entry) * Floats::all(from_bfloat16(high));
    }
};

inline void put(float value, float* place) { *place = value; }
inline void put(float value, Half* place) { *place = float_to_half(value); }

/// Stores one head's key and value. `block`: the keys of 16 slots; this one has index `lane`.
template <class T>
inline void store_floats(const Heads& heads, uint8_t* block, int lane, uint8_t* slot, const float* key,
                         const float* value) {
    T *keys = reinterpret_cast<T*>(block) + lane, *values = reinterpret_cast<T*>(slot);
    for (int i = 0; i < heads.depth; ++i) put(key[i], keys + i * kLanes);
    for (int i = 0; i < heads.depth; ++i) put(value[i], values + i);
    for (int i = heads.depth; i < heads.width(); ++i) put(0.0f, values + i);
}

/// Converts `count` numbers to bytes at distance `stride`; their scales go to `scales` at the same distance.
inline void store_int8(const float* x, int count, uint8_t* entries, int stride, uint8_t* scales) {
    for (int first = 0; first < count; first += kScaled) {
        const int end = first + kScaled < count ? first + kScaled : count;
        float top = 0.0f;
        for (int i = first; i < end; ++i) top = std::fabs(x[i]) > top ? std::fabs(x[i]) : top;
        const uint16_t high = top > 1e-30f ? to_bfloat16_up(top / 127.0f) : 0;
        const float scale = from_bfloat16(high);
        for (int i = first; i < end; ++i)
            entries[i * stride] = static_cast<uint8_t>(high ? std::lrintf(x[i] / scale) : 0);
        std::memcpy(scales + first / kScaled * 2 * stride, &high, 2);
    }
}

inline void store_head(const Heads& heads, const KeyValues& store, int head, int slot, const float* key,
                      const float* value) {
    const int64_t first_slot = static_cast<int64_t>(head) * store.slots;
    const int lane = slot % kLanes;
    uint8_t* block = store.keys + (first_slot + slot - lane) * heads.key_bytes();
    uint8_t* place = store.values + (first_slot + slot) * heads.value_bytes();
    switch (heads.kv_format) {
        case KvFormat::float32: return store_floats<float>(heads, block, lane, place, key, value);
        case KvFormat::float16: return store_floats<Half>(heads, block, lane, place, key, value);
        case KvFormat::int8:
            store_int8(key, heads.depth, block + lane, kLanes, block + heads.depth * kLanes + lane * 2);
            store_int8(value, heads.depth, place, 1, place + heads.width());
            for (int i = heads.depth; i < heads.width(); ++i) place[i] = 0;
    }
}

}  // namespace
}  // namespace outpace
