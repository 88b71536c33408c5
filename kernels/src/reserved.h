// A range of addresses whose first part is backed by memory.
#pragma once

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <windows.h>
#else
#include <sys/mman.h>
#endif

#include <cstddef>
#include <cstdint>
#include <new>

namespace outpace {

/// It grows and shrinks in place. Addresses without memory cannot be accessed and count only against limits of address
/// space.
class Reserved {
  public:
    /// Reserves addresses for `capacity` bytes without memory.
    explicit Reserved(std::size_t capacity) : reserved_(round_to(capacity, kLarge) + kLarge), start_(reserve(reserved_)) {
        if (!start_) throw std::bad_alloc();
        const auto address = reinterpret_cast<std::uintptr_t>(start_);
        data_ = start_ + (round_to(address, kLarge) - address);
    }
    ~Reserved() { release(start_, reserved_); }
    Reserved(const Reserved&) = delete;
    Reserved& operator=(const Reserved&) = delete;

    uint8_t* data() const { return data_; }
    std::size_t bytes() const { return bytes_; }

    /// Backs the first `bytes` with memory, rounded up by `whole_pages`; contents are kept. Throws std::bad_alloc.
    void resize(std::size_t bytes) {
        bytes = whole_pages(bytes);
        if (bytes < bytes_)
            give_back(data_ + bytes, bytes_ - bytes);
        else if (bytes > bytes_ && !take(data_, bytes))
            throw std::bad_alloc();
        bytes_ = bytes;
    }

    /// Rounds up to small pages below the size of a large page, else to large pages.
    static std::size_t whole_pages(std::size_t bytes) { return round_to(bytes, bytes < kLarge ? kSmall : kLarge); }

  private:
    static constexpr std::size_t kLarge = std::size_t{1} << 21;  // bytes of a page
    static constexpr std::size_t kSmall = std::size_t{1} << 16;  // a multiple of every machine's small pages

    static std::size_t round_to(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

#ifdef _WIN32
    static uint8_t* reserve(std::size_t bytes) {
        return static_cast<uint8_t*>(VirtualAlloc(nullptr, bytes, MEM_RESERVE, PAGE_NOACCESS));
    }
    static void release(uint8_t* start, std::size_t) { VirtualFree(start, 0, MEM_RELEASE); }
    static bool take(uint8_t* start, std::size_t bytes) {
        return VirtualAlloc(start, bytes, MEM_COMMIT, PAGE_READWRITE) != nullptr;
    }
    static void give_back(uint8_t* start, std::size_t bytes) { VirtualFree(start, bytes, MEM_DECOMMIT); }
#else
    static uint8_t* map(uint8_t* place, std::size_t bytes, int flags) {
        void* found = mmap(place, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
        return found == MAP_FAILED ? nullptr : static_cast<uint8_t*>(found);
    }
    static uint8_t* reserve(std::size_t bytes) { return map(nullptr, bytes, 0); }
    static void release(uint8_t* start, std::size_t bytes) { munmap(start, bytes); }
    static bool take(uint8_t* start, std::size_t bytes) {
        if (mprotect(start, bytes, PROT_READ | PROT_WRITE)) return false;
#ifdef MADV_HUGEPAGE
        madvise(start, bytes, MADV_HUGEPAGE);
#endif
        return true;
    }
    static void give_back(uint8_t* start, std::size_t bytes) { map(start, bytes, MAP_FIXED); }
#endif

    std::size_t reserved_;
    uint8_t* start_;
    uint8_t* data_;
    std::size_t bytes_ = 0;
};

}  // namespace outpace
