#include "team.h"

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace outpace {
namespace {

constexpr int kSpins = 2000;  // 20 to 60 microseconds; a phase of a small model's pass takes less

void pause() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

/// Spins, then sleeps, until `value` differs from `old`.
void wait_for_change(const std::atomic<int>& value, int old) {
    for (int spin = 0; spin < kSpins; ++spin) {
        if (value.load(std::memory_order_acquire) != old) return;
        pause();
    }
    value.wait(old, std::memory_order_acquire);
}

}  // namespace

Team::Team(int threads) : size_(threads) {
    for (int number = 1; number < size_; ++number) threads_.emplace_back([this, number] { work(number); });
}

Team::~Team() {
    stopping_.store(true, std::memory_order_relaxed);
    jobs_.fetch_add(1, std::memory_order_release);
    jobs_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void Team::run(int phases, const std::function<void(Member&)>& job) {
    const int counters = phases * (size_ + 1);
    if (counters > num_counters_) {
        counters_ = std::make_unique<Counter[]>(counters);
        num_counters_ = counters;
    }
    for (int number = 0; number < counters; ++number) counters_[number].value.store(0, std::memory_order_relaxed);
    job_ = &job;
    if (size_ > 1) {
        inside_.store(0, std::memory_order_release);
        jobs_.fetch_add(1, std::memory_order_release);
        jobs_.notify_all();
    }
    Member caller{0};
    job(caller);
    if (size_ == 1) return;
    for (int others = 0; !inside_.compare_exchange_weak(others, -1, std::memory_order_acq_rel); others = 0) {
        const int now = inside_.load(std::memory_order_acquire);
        if (now > 0) wait_for_change(inside_, now);  // they only need to see that no work is left
    }
}

void Team::work(int number) {
    for (int seen = 0;;) {
        wait_for_change(jobs_, seen);
        seen = jobs_.load(std::memory_order_acquire);
        if (stopping_.load(std::memory_order_relaxed)) return;
        if (!enter()) continue;
        Member member{number};
        (*job_)(member);
        leave();
    }
}

/// Joins the open job; returns false if there is none.
bool Team::enter() {
    int others = inside_.load(std::memory_order_acquire);
    while (others >= 0)
        if (inside_.compare_exchange_weak(others, others + 1, std::memory_order_acq_rel)) return true;
    return false;
}

void Team::leave() {
    inside_.fetch_sub(1, std::memory_order_acq_rel);
    inside_.notify_all();
}

void Team::wait_until(const std::atomic<int>& value, int expected) {
    for (int now; (now = value.load(std::memory_order_acquire)) != expected;) wait_for_change(value, now);
}

}  // namespace outpace
