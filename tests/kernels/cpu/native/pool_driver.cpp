// Two promises of the pool, each with its own argument. Exits with 0 if the promise holds.
//
// `sleep`: a caller that waits for a task of another thread sleeps, and leaves its core to other processes. `keep`:
// alternating calls with one thread and with two start no new threads.

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>

#include "../../../../kernels/cpu/native/common.h"

namespace {

constexpr std::chrono::seconds PATIENCE{20};

pid_t thread_id() { return static_cast<pid_t>(syscall(SYS_gettid)); }

char state_of(pid_t thread) {
    char line[512] = {};
    std::FILE* file = std::fopen(("/proc/self/task/" + std::to_string(thread) + "/stat").c_str(), "r");
    if (file == nullptr || std::fgets(line, sizeof line, file) == nullptr) return '?';
    std::fclose(file);
    return std::strrchr(line, ')')[2];
}

// Runs one task on this thread and one task on another thread. The other thread gets the id of this thread after its
// task has ended.
template <class Body>
void run_on_both(const Body& other) {
    const pid_t caller = thread_id();
    std::atomic<int> began{0};
    std::atomic<bool> caller_is_done{false};
    trueroll::parallel(2, [&](long) {
        ++began;
        while (began != 2) std::this_thread::yield();
        if (thread_id() == caller) {
            caller_is_done = true;
        } else {
            while (!caller_is_done) std::this_thread::yield();
            other(caller);
        }
    });
}

bool caller_sleeps() {
    const trueroll::Call call(2);
    bool found = false;
    run_on_both([&](pid_t caller) {
        const auto end = std::chrono::steady_clock::now() + PATIENCE;
        while (!found && std::chrono::steady_clock::now() < end) found = state_of(caller) == 'S';
    });
    return found;
}

bool threads_are_kept() {
    pid_t first = 0, last = 0;
    for (int turn = 0; turn < 100; ++turn) {
        {
            const trueroll::Call call(1);
            if (trueroll::num_threads() != 1) return false;
        }
        const trueroll::Call call(2);
        if (trueroll::num_threads() != 2) return false;
        run_on_both([&](pid_t) { last = thread_id(); });
        if (turn == 0) first = last;
    }
    return first == last;
}

}  // namespace

int main(int, char** arguments) {
    const bool holds = std::strcmp(arguments[1], "sleep") == 0 ? caller_sleeps() : threads_are_kept();
    return holds ? 0 : 1;
}
