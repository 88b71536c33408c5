// An aligned block of memory, in large pages if possible.
#pragma once

#ifdef _WIN32
#include <malloc.h>
#else
#include <sys/mman.h>
#endif

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>

namespace outpace {

template <class T>
class Block {
  public:
    Block() = default;

    /// Allocates `count` elements without initialising them; untouched pages take no memory.
    explicit Block(std::size_t count) : count_(count) {
        void* place = is_large() ? map_pages(padded_bytes()) : allocate(padded_bytes());
        if (!place) throw std::bad_alloc();
        data_ = static_cast<T*>(place);
    }
    Block(Block&& other) noexcept : data_(std::exchange(other.data_, nullptr)), count_(std::exchange(other.count_, 0)) {}
    Block& operator=(Block&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(count_, other.count_);
        return *this;
    }
    ~Block() {
        if (is_large())
            unmap_pages(data_, padded_bytes());
        else
            release(data_);
    }

    T* data() const { return data_; }
    std::size_t size() const { return count_; }
    std::size_t bytes() const { return count_ * sizeof(T); }
    T& operator[](std::size_t index) const { return data_[index]; }

    /// Makes space for `count` elements; growing loses the contents.
    void reserve(std::size_t count) {
        if (count > count_) *this = Block(count);
    }

  private:
    static constexpr std::size_t kLarge = std::size_t{1} << 21;  // bytes of a page

    bool is_large() const { return bytes() >= kLarge; }

    /// Returns the bytes to allocate for `bytes()`: whole cache lines, or whole large pages.
    std::size_t padded_bytes() const {
        const std::size_t unit = is_large() ? kLarge : 64;
        return bytes() ? (bytes() + unit - 1) / unit * unit : unit;
    }

#ifdef _WIN32  // there, large pages need a privilege that programs seldom have
    static void* map_pages(std::size_t size) { return _aligned_malloc(size, 4096); }
    static void unmap_pages(void* start, std::size_t) { _aligned_free(start); }
    static void* allocate(std::size_t size) { return _aligned_malloc(size, 64); }
    static void release(void* start) { _aligned_free(start); }
#else
    /// Maps `size` bytes of fresh pages, large ones if the machine has them: memory reused by `free` stays in small
    /// pages.
    static void* map_pages(std::size_t size) {
        void* found = mmap(nullptr, size + kLarge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (found == MAP_FAILED) return nullptr;
        char* start = static_cast<char*>(found);
        const std::size_t before = (kLarge - reinterpret_cast<std::uintptr_t>(start) % kLarge) % kLarge;
        if (before) munmap(start, before);
        munmap(start + before + size, kLarge - before);
#ifdef MADV_HUGEPAGE
        madvise(start + before, size, MADV_HUGEPAGE);
#endif
        return start + before;
    }
    static void unmap_pages(void* start, std::size_t size) { munmap(start, size); }
    static void* allocate(std::size_t size) { return std::aligned_alloc(64, size); }
    static void release(void* start) { std::free(start); }
#endif

    T* data_ = nullptr;
    std::size_t count_ = 0;
};

}  // namespace outpace
