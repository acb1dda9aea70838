// The thread pool and the threads' scratch memory.
//
// Threads claim tasks one by one, so a thread that loses its core to another process delays at most one task. A task's
// result does not depend on the thread that computes it.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#include <pthread.h>

#include "common.h"

namespace trueroll {
namespace {

// 20 to 100 microseconds, depending on how long the CPU pauses. This spin time exceeds the pause between two ops of a
// model, but is too short to be noticed.
constexpr int SPINS = 2000;

// The time that a caller stays awake while it waits for the other threads' last tasks. Waking a sleeping caller takes
// at most a twentieth of this time.
using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds AWAKE{1};

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Pool {
  public:
    void run(long tasks, void (*function)(const void*, long), const void* context) {
        function_ = function, context_ = context, tasks_ = tasks;
        finished_.store(0, std::memory_order_relaxed);
        const uint64_t job = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
        ticket_.store(job << 32 | static_cast<uint64_t>(tasks));
        if (sleepers_.load() > 0) {
            std::lock_guard<std::mutex> lock(mutex_);
            wake_.notify_all();
        }
        work(job);
        if (!finishes_soon(tasks)) sleep_until_finished(tasks);
    }

    // If one thread is requested, the other threads sleep but do not exit. Calls that alternate between one and many
    // threads therefore start no new threads.
    void resize(long threads) {
        threads_ = threads;
        if (threads == 1 || threads == static_cast<long>(workers_.size()) + 1) return;
        stop();
        for (long i = 1; i < threads; ++i)
            workers_.emplace_back([this, seen = ticket_.load() >> 32]() mutable {
                while (await_job(seen)) work(seen);
            });
    }

    long size() const { return threads_; }

  private:
    // Waits for a short time without sleeping, and returns whether all tasks are finished. If another process computes
    // on this core, the first yield takes longer.
    bool finishes_soon(long tasks) {
        for (int spins = 0; spins < SPINS; ++spins, relax())
            if (finished_.load() == tasks) return true;
        for (const auto end = Clock::now() + AWAKE; Clock::now() < end; std::this_thread::yield())
            if (finished_.load() == tasks) return true;
        return finished_.load() == tasks;
    }

    // Frees this core. Another thread has a long task, or has lost its core during a task and may need this core.
    void sleep_until_finished(long tasks) {
        std::unique_lock<std::mutex> lock(mutex_);
        caller_sleeps_.store(true);
        done_.wait(lock, [&] { return finished_.load() == tasks; });
        caller_sleeps_.store(false);
    }

    void work(uint64_t job) {
        uint64_t ticket = ticket_.load();
        long finished = 0;
        while (ticket >> 32 == job && static_cast<uint32_t>(ticket) != 0) {
            if (!ticket_.compare_exchange_weak(ticket, ticket - 1)) continue;
            // Until this thread has reported its finished tasks, the job cannot end and its description cannot change.
            function_(context_, tasks_ - static_cast<long>(static_cast<uint32_t>(ticket)));
            ++finished;
            ticket = ticket_.load();
        }
        if (finished == 0) return;
        // The caller first sets `caller_sleeps_`, then checks `finished_`. This thread uses the opposite order, so no
        // wake-up is lost.
        finished_.fetch_add(finished);
        if (caller_sleeps_.load()) {
            std::lock_guard<std::mutex> lock(mutex_);
            done_.notify_one();
        }
    }

    // Waits for a job newer than `seen` and updates `seen`. Returns false if the thread must exit.
    bool await_job(uint64_t& seen) {
        for (int spins = 0; spins < SPINS; ++spins, relax())
            if (ticket_.load(std::memory_order_acquire) >> 32 != seen) break;
        if (ticket_.load() >> 32 == seen) {
            std::unique_lock<std::mutex> lock(mutex_);
            ++sleepers_;
            wake_.wait(lock, [&] { return stopping_ || ticket_.load() >> 32 != seen; });
            --sleepers_;
        }
        seen = ticket_.load() >> 32;
        return !stopping_;
    }

    void stop() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
            ticket_.store(((ticket_.load() >> 32) + 1) << 32);
            wake_.notify_all();
        }
        for (auto& worker : workers_) worker.join();
        workers_.clear();
        stopping_ = false;
    }

    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    long threads_ = 1;
    std::atomic<bool> stopping_{false};
    std::atomic<bool> caller_sleeps_{false};
    std::atomic<int> sleepers_{0};
    // The number of the newest job in the upper half, and the job's count of unclaimed tasks in the lower half.
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<long> finished_{0};
    void (*function_)(const void*, long) = nullptr;
    const void* context_ = nullptr;
    long tasks_ = 0;
};

// The pool is never destroyed, since its threads may outlive the statics of this library. The pool is replaced after a
// fork, since no thread survives a fork.
Pool* pool = new Pool;
std::mutex* caller = new std::mutex;

void forget_after_fork() {
    pool = new Pool;
    caller = new std::mutex;
}

[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, forget_after_fork);

struct Buffer {
    void* data = nullptr;
    size_t bytes = 0;

    ~Buffer() { std::free(data); }

    void* at_least(size_t wanted) {
        if (wanted > bytes) {
            std::free(data);
            bytes = 0;
            data = std::aligned_alloc(64, (wanted + 63) / 64 * 64);
            if (data == nullptr) {
                std::fprintf(stderr, "trueroll: cannot allocate %zu bytes of scratch memory\n", wanted);
                std::abort();
            }
            bytes = wanted;
        }
        return data;
    }
};

thread_local Buffer buffers[NUM_PURPOSES];

}  // namespace

void parallel(long tasks, void (*run)(const void*, long), const void* context) {
    if (tasks == 1 || pool->size() == 1)
        for (long task = 0; task < tasks; ++task) run(context, task);
    else
        pool->run(tasks, run, context);
}

long num_threads() { return pool->size(); }

void* scratch_bytes(Purpose purpose, size_t bytes) { return buffers[purpose].at_least(bytes); }

#if defined(__x86_64__)
unsigned read_float_mode() { return __builtin_ia32_stmxcsr(); }
void set_float_mode(unsigned mode) { __builtin_ia32_ldmxcsr(mode); }
constexpr unsigned DEFAULT_FLOAT_MODE = 0x1F80;
#else
unsigned read_float_mode() { return 0; }
void set_float_mode(unsigned) {}
constexpr unsigned DEFAULT_FLOAT_MODE = 0;
#endif

// The caller may flush denormal numbers. The setting belongs to a thread, and new threads of the pool inherit their
// creator's setting.
Call::Call(long threads) : float_mode_(read_float_mode()) {
    caller->lock();
    set_float_mode(DEFAULT_FLOAT_MODE);
    pool->resize(threads);
}
Call::~Call() {
    set_float_mode(float_mode_);
    caller->unlock();
}

CallBeside::CallBeside() : float_mode_(read_float_mode()), has_pool_(caller->try_lock()) {
    set_float_mode(DEFAULT_FLOAT_MODE);
}
CallBeside::~CallBeside() {
    set_float_mode(float_mode_);
    if (has_pool_) caller->unlock();
}

}  // namespace trueroll
