// Threads that run a table together.
//
// The first thread is the caller.  The others are started once in a process; between tables they
// spin for a short time and then sleep.  Threads wait for each other only where one touches
// memory that another one has touched (`plan`).  A table runs in chunks: before each of them the
// caller decides whether to run it alone, because other processes may occupy the cores.
#pragma once
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#include "products.h"
#include "split.h"

struct Kind {
    const char* name;
    void (*run)(const Op&);
    Split (*split)(const Op&);
};
static const Kind& kind_of(const Op& op);

// Prefetch what a record reads that the next one or two records have not just written.
static void prefetch(const Op* op, const Op* end) {
    constexpr int AHEAD = 2;
    if (end - op > AHEAD && kind_of(op[AHEAD]).run == product) prefetch_weights(op[AHEAD]);
}
static void run_alone(const Op* ops, long count) {
    for (const Op* op = ops; op < ops + count; op++) {
        prefetch(op, ops + count);
        kind_of(*op).run(*op);
    }
}

// Operations between two meetings of all threads.
constexpr long CHUNK = 64;

// The plan of an operation has 1 + threads integers.  Integer 0: the thread that runs the whole of
// it, or -1 if each runs a part.  Integer 1 + t: thread t waits until all others have finished the
// operations below this one of the chunk; -1 if it has no part.
static inline const int32_t* plan_of(const int32_t* plan, long op, int threads) {
    return plan + op * (1 + threads);
}

// The memory that one thread's part of an operation touches, as intervals that contain it.
struct Reach {
    int count = 0;
    const char *first[8], *end[8];
    bool is_written[8];

    Reach() = default;
    Reach(const Op& part, const Split& s) {
        const int64_t missing = s.length - part.i[s.at] / s.scale;
        for (int k = 0; k < 8; k++)
            if (part.p[k] && s.bytes[k]) {
                first[count] = part.p[k], end[count] = part.p[k] + s.bytes[k] - missing * s.step[k];
                is_written[count++] = s.written >> k & 1;
            }
    }
    bool conflicts(const Reach& other) const {
        for (int a = 0; a < count; a++)
            for (int b = 0; b < other.count; b++)
                if ((is_written[a] || other.is_written[b]) && first[a] < other.end[b] &&
                    other.first[b] < end[a])
                    return true;
        return false;
    }
};

// Plan one chunk: divide each operation unless its parts touch each other's memory, and find the
// last earlier operation in which another thread touched memory of a part.
static void plan_chunk(const Op* ops, long count, int threads, int32_t* plan) {
    std::vector<Reach> reaches(count * threads);
    std::vector<long> known(threads, 0);  // others have finished the operations below
    for (long i = 0; i < count; i++, plan += 1 + threads) {
        const Split split = kind_of(ops[i]).split(ops[i]);
        Reach* own = &reaches[i * threads];
        int parts = 0;
        bool is_divided = true;
        for (int t = 0; t < threads; t++) {
            Op part;
            if (!part_of(ops[i], split, t, threads, part)) continue;
            own[t] = Reach(part, split);
            for (int u = 0; u < t; u++) is_divided = is_divided && !own[t].conflicts(own[u]);
            parts++;
        }
        plan[0] = -1;
        if (parts < 2 || !is_divided) {
            std::fill(own, own + threads, Reach());
            own[plan[0] = 0] = Reach(ops[i], split);
        }
        for (int t = 0; t < threads; t++) {
            plan[1 + t] = own[t].count ? 0 : -1;
            if (!own[t].count) continue;
            for (long j = i - 1; j >= known[t]; j--)
                for (int u = 0; u < threads; u++)
                    if (u != t && own[t].conflicts(reaches[j * threads + u])) {
                        plan[1 + t] = int32_t(known[t] = j + 1);
                        break;
                    }
        }
    }
}

static void run_part(const Op& op, const int32_t* plan, int thread, int threads) {
    if (plan[1 + thread] < 0) return;
    const Kind& kind = kind_of(op);
    Op part;
    if (plan[0] >= 0)
        kind.run(op);
    else if (part_of(op, kind.split(op), thread, threads, part))
        kind.run(part);
}

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

static inline void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Spin until the condition holds; after a while leave the core to others between two looks.
template <class F>
static void await(F is_true) {
    for (int n = 0; !is_true(); n++)
        if (n < 1000)
            pause_briefly();
        else
            std::this_thread::sleep_for(microseconds(20));
}

class Team {
  public:
    // The team of this process; a forked one has a new team, because threads are not copied.
    static Team& of_process() {
        static std::atomic<Team*> current{nullptr};
        Team* team = current.load();
        if (team && team->process == getpid()) return *team;
        Team* made = new Team;
        if (current.compare_exchange_strong(team, made)) return *made;
        delete made;
        return *team;
    }

    // Run a table by several threads, or by this one alone while another table runs.
    void run(const Op* ops, long count, int threads, const int32_t* plan) {
        const bool is_free = !busy.exchange(true);
        const bool is_complete = is_free && grow(threads);
        for (long first = 0; first < count; first += CHUNK) {
            const long size = std::min(CHUNK, count - first);
            if (is_complete && gather(threads, count - first > CHUNK))
                run_together({ops + first, size, threads, plan_of(plan, first, threads)});
            else
                run_alone(ops + first, size);
        }
        if (is_free) busy = false;
    }

  private:
    enum State { AWAKE, ASLEEP, CLAIMED };
    struct alignas(64) Member {
        std::atomic<long> finished{0};  // operations of the chunk, from its start
        std::atomic<unsigned> turn{0};
        std::atomic<int> state{AWAKE};
    };
    struct Chunk {
        const Op* ops;
        long count;
        int threads;
        const int32_t* plan;
    };
    // How long a thread without work spins, and how long the caller waits for sleeping ones.
    static constexpr microseconds SPIN{200}, PATIENCE{150};
    // After a loss of time the caller runs alone for so many times as long, at most a second.
    static constexpr int CAUTION = 30;
    static constexpr std::chrono::seconds LONGEST{1};

    const pid_t process = getpid();
    std::atomic<bool> busy{false};
    std::deque<Member> members{1};
    Chunk chunk{};
    std::fenv_t rounding;
    std::mutex mutex;
    std::condition_variable bell;
    unsigned rings = 0;
    Clock::time_point alone_until{};

    bool grow(int threads) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the process's own threads
        try {
            while (int(members.size()) < threads) {
                const int number = int(members.size());
                Member& member = members.emplace_back();
                std::thread([this, number, &member] { serve(number, member); }).detach();
            }
        } catch (const std::system_error&) {
            members.pop_back();
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return int(members.size()) >= threads;
    }

    // Take all other threads, or none; wake those that sleep.
    bool gather(int threads, bool is_long) {
        const auto began = Clock::now();
        if (began < alone_until) return false;
        if (claim(threads)) return true;
        {
            std::lock_guard<std::mutex> lock(mutex);
            rings++;
        }
        bell.notify_all();
        while (is_long && Clock::now() < began + PATIENCE) {
            if (claim(threads)) return true;
            pause_briefly();
        }
        alone_until = began + CAUTION * PATIENCE;
        return false;
    }

    bool claim(int threads) {
        for (int t = 1; t < threads; t++) {
            int awake = AWAKE;
            if (!members[t].state.compare_exchange_strong(awake, CLAIMED)) {
                while (--t > 0) members[t].state = AWAKE;
                return false;
            }
        }
        return true;
    }

    void run_together(const Chunk& next) {
        const auto began = Clock::now();
        chunk = next;
        std::fegetenv(&rounding);
        for (int t = 0; t < next.threads; t++) members[t].finished.store(0, std::memory_order_relaxed);
        for (int t = 1; t < next.threads; t++) members[t].turn.fetch_add(1, std::memory_order_release);
        auto waited = run_parts(0);
        members[0].finished.store(next.count, std::memory_order_release);
        waited += await_others(0, next.count);
        const auto end = Clock::now();
        const auto loss = (end - began) - next.threads * (end - began - waited);
        if (loss > loss.zero())
            alone_until = end + std::min<Clock::duration>(CAUTION * loss, LONGEST);
    }

    // Run a thread's parts of the chunk, and return how long it waited.
    Clock::duration run_parts(int thread) {
        const Chunk& c = chunk;
        Clock::duration waited{};
        const int32_t* plan = c.plan;
        for (long i = 0; i < c.count; i++, plan += 1 + c.threads) {
            if (plan[1 + thread] < 0) continue;
            members[thread].finished.store(i, std::memory_order_release);
            if (plan[1 + thread]) waited += await_others(thread, plan[1 + thread]);
            prefetch(c.ops + i, c.ops + c.count);
            run_part(c.ops[i], plan, thread, c.threads);
        }
        return waited;
    }

    // Wait until the other threads have finished the operations below `count`.
    Clock::duration await_others(int thread, long count) {
        auto are_done = [&] {
            for (int t = 0; t < chunk.threads; t++)
                if (t != thread && members[t].finished.load(std::memory_order_acquire) < count) return false;
            return true;
        };
        if (are_done()) return {};
        const auto began = Clock::now();
        await(are_done);
        return Clock::now() - began;
    }

    // The life of a thread: spin for a chunk, sleep if none comes.
    void serve(int number, Member& me) {
        unsigned turn = 0;
        for (;;) {
            auto end = Clock::now() + SPIN;
            while (me.turn.load(std::memory_order_acquire) == turn) {
                pause_briefly();
                if (Clock::now() > end) {
                    sleep(me);
                    end = Clock::now() + SPIN;
                }
            }
            turn++;
            std::fesetenv(&rounding);
            const long count = chunk.count;
            run_parts(number);
            me.state = AWAKE;
            me.finished.store(count, std::memory_order_release);
        }
    }

    void sleep(Member& me) {
        std::unique_lock<std::mutex> lock(mutex);
        int awake = AWAKE;
        if (!me.state.compare_exchange_strong(awake, ASLEEP)) return;  // claimed
        bell.wait(lock, [&, heard = rings] { return rings != heard; });
        me.state = AWAKE;
    }
};
