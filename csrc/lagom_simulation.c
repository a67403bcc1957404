/* The event simulation with contention: operators of a graph run side by side, at rates that the set of running ones has.
 *
 * Between two events the same set runs, so what each of them takes as a whole is constant; the caller gives these times
 * once per set, as a table from the kinds of the running operators, collectives (kinds from 0 up) before computations
 * (below 0), each by number. Whatever of them ends first is the next event; what ends with it ends at the same time, and
 * what waited for it starts then. A set that the table lacks stops the simulation; the caller adds its times, and it
 * goes on. Nothing here knows what a rate comes from.
 *
 * A collective can be held behind a computation that runs when it starts: it waits until that has been done to a share,
 * which `behind` gives per pair of kinds; meanwhile the rest run as if it was not there.
 */
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))

enum { VERSION = 2, FIRST_SLOTS = 64 };

/* Operators in order of issue: how many each waits for, and who waits for it (those of i are followers[begin[i]] ...). */
struct lsim_graph {
    int64_t num_ops;
    const int32_t *waits;
    const int32_t *begin, *followers;
};
_Static_assert(sizeof(struct lsim_graph) == 32, "sim/core.py has the same layout");

/* behind[(comm * num_comps + comp) * 2 + is_running]: the share of the computation (of kind -1 - comp) that is left when
 * a collective of kind comm gets its SMs; 1 or more where it does not wait. */
struct lsim_holds {
    int64_t num_comms, num_comps;
    const double *behind;
};
_Static_assert(sizeof(struct lsim_holds) == 24, "sim/core.py has the same layout");

/* Sets of kinds with the times of their members: an open hash table over one arena of keys and one of times. */
struct entry {
    uint64_t hash;
    int64_t at; /* of both key and times */
    int32_t num;
};

struct lsim_rates {
    int64_t num_slots, num_entries, room, used;
    struct entry *slots; /* num 0: empty */
    int32_t *kinds;
    double *times_s;
};

static uint64_t hash_of(const int32_t *kinds, int32_t num) {
    uint64_t hash = 1469598103934665603u;
    for (int32_t i = 0; i < num; i++) {
        hash ^= (uint32_t)kinds[i];
        hash *= 1099511628211u;
        hash ^= hash >> 29;
    }
    return hash;
}

static struct entry *find(const struct lsim_rates *rates, const int32_t *kinds, int32_t num, uint64_t hash) {
    uint64_t mask = (uint64_t)rates->num_slots - 1;
    for (uint64_t i = hash & mask;; i = (i + 1) & mask) {
        struct entry *slot = &rates->slots[i];
        if (!slot->num) return slot;
        if (slot->hash == hash && slot->num == num &&
            !memcmp(rates->kinds + slot->at, kinds, (size_t)num * sizeof *kinds))
            return slot;
    }
}

API int64_t lsim_version(void) { return VERSION; }

/* Who waits for each operator, from whom each waits for: num_waits[i] operators, each `distances` from it, one operator
 * after the other. `begin` has num_ops + 1 places. */
API void lsim_followers(int64_t num_ops, const int32_t *num_waits, const int32_t *distances, int32_t *begin,
                        int32_t *followers) {
    memset(begin, 0, (size_t)(num_ops + 1) * sizeof *begin);
    int64_t edge = 0;
    for (int64_t i = 0; i < num_ops; i++)
        for (int32_t n = 0; n < num_waits[i]; n++) begin[i + distances[edge++]]++;
    for (int64_t i = 1; i <= num_ops; i++) begin[i] += begin[i - 1];
    for (int64_t i = num_ops - 1; i >= 0; i--)
        for (int32_t n = 0; n < num_waits[i]; n++) followers[--begin[i + distances[--edge]]] = (int32_t)i;
}

API void lsim_rates_close(struct lsim_rates *rates) {
    if (!rates) return;
    free(rates->slots);
    free(rates->kinds);
    free(rates->times_s);
    free(rates);
}

API struct lsim_rates *lsim_rates_open(void) {
    struct lsim_rates *rates = calloc(1, sizeof *rates);
    if (!rates) return NULL;
    rates->num_slots = FIRST_SLOTS;
    rates->slots = calloc(FIRST_SLOTS, sizeof *rates->slots);
    if (rates->slots) return rates;
    lsim_rates_close(rates);
    return NULL;
}

static bool widen(struct lsim_rates *rates) {
    int64_t num_before = rates->num_slots;
    struct entry *before = rates->slots, *after = calloc((size_t)(2 * num_before), sizeof *after);
    if (!after) return false;
    rates->slots = after;
    rates->num_slots = 2 * num_before;
    for (int64_t i = 0; i < num_before; i++)
        if (before[i].num) *find(rates, rates->kinds + before[i].at, before[i].num, before[i].hash) = before[i];
    free(before);
    return true;
}

static bool make_room(struct lsim_rates *rates, int32_t num) {
    if (rates->used + num <= rates->room) return true;
    int64_t room = 2 * (rates->room + num) + FIRST_SLOTS;
    int32_t *kinds = realloc(rates->kinds, (size_t)room * sizeof *kinds);
    if (!kinds) return false;
    rates->kinds = kinds;
    double *times_s = realloc(rates->times_s, (size_t)room * sizeof *times_s);
    if (!times_s) return false;
    rates->times_s = times_s;
    rates->room = room;
    return true;
}

/* The whole times of a set that runs together; 0, or a negative errno. */
API int64_t lsim_rates_add(struct lsim_rates *rates, int32_t num, const int32_t *kinds, const double *times_s) {
    if (num < 1) return -EINVAL;
    if (2 * (rates->num_entries + 1) > rates->num_slots && !widen(rates)) return -ENOMEM;
    if (!make_room(rates, num)) return -ENOMEM;
    uint64_t hash = hash_of(kinds, num);
    struct entry *slot = find(rates, kinds, num, hash);
    if (!slot->num) {
        *slot = (struct entry){hash, rates->used, num};
        memcpy(rates->kinds + rates->used, kinds, (size_t)num * sizeof *kinds);
        rates->used += num;
        rates->num_entries++;
    }
    memcpy(rates->times_s + slot->at, times_s, (size_t)num * sizeof *times_s);
    return 0;
}

struct op {
    double left;      /* the share of its work that remains */
    double whole_s;   /* the whole of it under the present set */
    int32_t held_by;  /* the computation that it waits behind, or -1 */
    double held_left; /* the share of that which is left when it begins */
    double stop_left; /* the share at which a collective that waits behind this one begins; -1: none waits */
    bool is_held;
};

/* All that one run needs; `now` is in seconds. */
struct run {
    const struct lsim_graph *graph;
    const struct lsim_holds *holds;
    const int32_t *kinds;
    double *starts, *ends, now;
    struct op *ops;
    int32_t *waiting, *running, *ended, *key;
    int64_t num_running, num_ended;
};

static bool is_before(const int32_t *kinds, int32_t a, int32_t b) {
    bool a_comp = kinds[a] < 0, b_comp = kinds[b] < 0;
    return a_comp != b_comp ? b_comp : a < b;
}

static void sort_running(struct run *run) {
    for (int64_t i = 1; i < run->num_running; i++) {
        int32_t op = run->running[i];
        int64_t at = i;
        for (; at && is_before(run->kinds, op, run->running[at - 1]); at--) run->running[at] = run->running[at - 1];
        run->running[at] = op;
    }
}

/* Puts collectives that have just started behind the computation that runs, where they wait for it. */
static void hold_from(struct run *run, int64_t first) {
    if (!run->holds) return;
    int32_t by = -1;
    for (int64_t i = 0; i < run->num_running && by < 0; i++)
        if (run->kinds[run->running[i]] < 0) by = run->running[i];
    for (int64_t i = first; by >= 0 && i < run->num_running; i++) {
        int32_t comm = run->running[i];
        if (run->kinds[comm] < 0) continue;
        struct op *op = &run->ops[comm];
        double left = run->ops[by].left;
        double behind = run->holds->behind[2 * (run->kinds[comm] * run->holds->num_comps - 1 - run->kinds[by]) +
                                           (left != 1.0)];
        op->held_by = by;
        op->held_left = behind < left ? behind : left;
    }
}

/* Which of the running ones wait, and the kinds of the others as the table's key; their number. */
static int32_t find_active(struct run *run) {
    int32_t num = 0;
    for (int64_t i = 0; i < run->num_running; i++) run->ops[run->running[i]].stop_left = -1.0;
    for (int64_t i = 0; i < run->num_running; i++) {
        struct op *op = &run->ops[run->running[i]];
        op->is_held = op->held_by >= 0 && run->ops[op->held_by].left > op->held_left;
        if (!op->is_held) {
            run->key[num++] = run->kinds[run->running[i]];
            continue;
        }
        struct op *by = &run->ops[op->held_by];
        if (op->held_left > by->stop_left) by->stop_left = op->held_left;
    }
    return num;
}

/* Seconds to the next end, or to where a collective that waits begins. */
static double next_step(struct run *run, const double *whole_s) {
    double step = -1.0;
    for (int64_t i = 0, active = 0; i < run->num_running; i++) {
        struct op *op = &run->ops[run->running[i]];
        if (op->is_held) continue;
        op->whole_s = whole_s[active++];
        double until = (op->stop_left > 0.0 ? op->left - op->stop_left : op->left) * op->whole_s;
        if (step < 0.0 || until < step) step = until;
    }
    return step;
}

/* Lets the step pass: what is done leaves, what waited for it starts. */
static void advance(struct run *run, double step) {
    int64_t num_left = 0;
    run->now += step;
    run->num_ended = 0;
    for (int64_t i = 0; i < run->num_running; i++) {
        int32_t at = run->running[i];
        struct op *op = &run->ops[at];
        if (!op->is_held && op->left * op->whole_s <= step) {
            op->left = 0.0;
            run->ends[at] = run->now;
            run->ended[run->num_ended++] = at;
            continue;
        }
        if (!op->is_held) {
            bool stops = op->stop_left > 0.0 && (op->left - op->stop_left) * op->whole_s <= step;
            double left = op->left - step / op->whole_s;
            op->left = stops ? op->stop_left : left > 0.0 ? left : 0.0;
        }
        run->running[num_left++] = at;
    }
    run->num_running = num_left;
    for (int64_t i = 0; i < run->num_ended; i++) {
        int32_t at = run->ended[i];
        for (int32_t next = run->graph->begin[at]; next < run->graph->begin[at + 1]; next++) {
            int32_t follower = run->graph->followers[next];
            if (--run->waiting[follower]) continue;
            run->starts[follower] = run->now;
            run->running[run->num_running++] = follower;
        }
    }
    hold_from(run, num_left);
}

/* A run with room for all operators, those that wait for nothing begun; NULL without memory. */
static struct run *begin(const struct lsim_graph *graph, const struct lsim_holds *holds, const int32_t *kinds,
                         double *starts, double *ends) {
    size_t num_ops = (size_t)graph->num_ops;
    struct run *run = malloc(sizeof *run + (num_ops + 1) * sizeof *run->ops + 4 * num_ops * sizeof *run->key);
    if (!run) return NULL;
    struct op *ops = (struct op *)(run + 1);
    int32_t *lists = (int32_t *)(ops + num_ops + 1);
    *run = (struct run){.graph = graph, .holds = holds, .kinds = kinds, .starts = starts, .ends = ends, .ops = ops,
                        .waiting = lists, .running = lists + num_ops, .ended = lists + 2 * num_ops,
                        .key = lists + 3 * num_ops};
    for (size_t i = 0; i < num_ops; i++) {
        ops[i] = (struct op){.left = 1.0, .held_by = -1};
        starts[i] = ends[i] = 0.0;
        run->waiting[i] = graph->waits[i];
        if (!run->waiting[i]) run->running[run->num_running++] = (int32_t)i;
    }
    hold_from(run, 0);
    return run;
}

/* Forgets a run that stopped. */
API void lsim_forget(struct run *stopped) { free(stopped); }

/* Starts and ends of all operators; 0, or how many kinds a set has whose times are missing (written to `missing`), or a
 * negative errno. A run that stopped for a set is kept in `stopped`, which is NULL at first; called again with the same
 * arguments it goes on there. Operators that wait for each other in a circle end at 0. */
API int64_t lsim_run(const struct lsim_graph *graph, const struct lsim_rates *rates, const struct lsim_holds *holds,
                     const int32_t *kinds, double *starts, double *ends, int32_t *missing, struct run **stopped) {
    struct run *run = *stopped ? *stopped : begin(graph, holds, kinds, starts, ends);
    *stopped = NULL;
    if (!run) return -ENOMEM;
    while (run->num_running) {
        sort_running(run);
        int32_t num = find_active(run);
        const struct entry *found = find(rates, run->key, num, hash_of(run->key, num));
        if (!found->num) {
            memcpy(missing, run->key, (size_t)num * sizeof *missing);
            *stopped = run;
            return num;
        }
        advance(run, next_step(run, rates->times_s + found->at));
    }
    free(run);
    return 0;
}
