// A block of memory whose start is aligned for every register, and for large pages where there are some.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <new>
#include <utility>

namespace outpace {

template <class T>
class Block {
  public:
    Block() = default;

    /// `count` elements, not initialised; pages that nobody writes take no memory.
    explicit Block(std::size_t count) : count_(count) {
        const std::size_t alignment = bytes() >= kLarge ? kLarge : 64;
        const std::size_t rounded = (bytes() + alignment - 1) / alignment * alignment;
        data_ = static_cast<T*>(std::aligned_alloc(alignment, rounded ? rounded : alignment));
        if (!data_) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
        if (rounded >= kLarge) madvise(data_, rounded, MADV_HUGEPAGE);
#endif
    }
    Block(Block&& other) noexcept : data_(std::exchange(other.data_, nullptr)), count_(std::exchange(other.count_, 0)) {}
    Block& operator=(Block&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(count_, other.count_);
        return *this;
    }
    ~Block() { std::free(data_); }

    T* data() const { return data_; }
    std::size_t size() const { return count_; }
    std::size_t bytes() const { return count_ * sizeof(T); }
    T& operator[](std::size_t index) const { return data_[index]; }

    /// At least `count` elements; what was there before is lost where it grows.
    void reserve(std::size_t count) {
        if (count > count_) *this = Block(count);
    }

  private:
    static constexpr std::size_t kLarge = std::size_t{1} << 21;
    T* data_ = nullptr;
    std::size_t count_ = 0;
};

}  // namespace outpace
