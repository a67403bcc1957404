/* liblagom_rcpsp.so: the search loop of plan.rcpsp, schedules of projects with renewable resources.
 *
 * A schedule is made from a list of activities in a topological order: each is placed as early as what is placed
 * allows (serial schedule generation), then all are shifted right and left for as long as that shortens it (double
 * justification; V. Valls, F. Ballestin, S. Quintanilla, EJOR 165 (2005) 375-386). What is free of all resources in
 * one period is a few words: a field per resource with a guard bit above it. A demand fits if no guard bit is borrowed
 * from, one subtraction and one mask per word.
 *
 * The search is a genetic one over such lists (S. Hartmann, Naval Research Logistics 45 (1998) 733-750; justified
 * children as in Valls et al., EJOR 185 (2008) 495-508). Populations grow stale one after another; the best quarters of
 * four make the next, and when that is stale all begins anew. The search depends on the seed, the size of a population
 * and the number of children alone, however a caller slices it. One thread per search; memory of a caller is not kept.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define API __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

enum {
    LR_VERSION = 1,
    MAX_ACTIVITIES = 1 << 15,
    MAX_RESOURCES = 64,
    MAX_ARCS = 1 << 22,
    MAX_HORIZON = 1 << 22,
    MIN_POPULATION = 8,
    MAX_POPULATION = 1 << 14,
    SEEN_PER_MEMBER = 16, /* places for what is known already, at least */
    CLOCK_EVERY = 8,      /* children between two looks at the clock */
    NUM_ISLANDS = 4,      /* populations that one is made of */
    STALE_ISLAND = 15,    /* children per member without a shorter schedule after which a population ends */
    STALE_UNION = 30      /* the same of what is made of four */
};

/* Arcs by the activity at their later end, in one direction of time. */
struct arcs {
    int32_t *begin; /* [num + 1] into `activities` */
    int32_t *activities;
};

struct member {
    int32_t makespan;
    int32_t *list; /* [num] by start */
};

struct lagom_rcpsp {
    int num, num_words, horizon; /* activities; words of one period; periods of the longest schedule */
    int32_t *rows; /* memory of all that is [num] */
    int32_t *durations;
    uint64_t *demands; /* [num][num_words] */
    uint64_t full[MAX_RESOURCES], guard[MAX_RESOURCES]; /* an empty period, and its guard bits */
    struct arcs preds, succs;
    int32_t *topological; /* [num] */
    int32_t *tails;       /* [num] longest path from the start of each to the end */
    uint64_t *profile;    /* [horizon][num_words] free, between two schedules `full` everywhere */
    int32_t *counts;      /* [horizon + 2] of sorting */
    /* Work space of one schedule, [num] each. */
    int32_t *ends, *keys, *flipped, *ahead, *back, *right;
    /* Work space of one child, [num] each. */
    int32_t *child, *starts, *sorted, *waits, *ready, *place_of;
    double *noisy;
    /* The search. */
    uint64_t random;
    int population, num_members, num_sampled, longest_tail;
    struct member *members; /* a heap, the longest schedule first */
    struct member *kept;    /* [population] the best of the islands so far */
    int num_kept, num_islands;
    uint64_t *seen;         /* hashes of lists, direct-mapped */
    size_t num_seen;        /* places of `seen`, a power of two */
    int32_t *lists;         /* [2 population][num] of `members` and `kept` */
    int64_t since_better;
    int32_t shortest; /* of this population */
    int32_t best;     /* of all */
    int32_t *best_starts;
};

/* ---- random numbers: xorshift64*, S. Vigna, ACM TOMS 42 (2016) article 30 ---- */

static uint32_t random_word(struct lagom_rcpsp *p) {
    p->random ^= p->random >> 12;
    p->random ^= p->random << 25;
    p->random ^= p->random >> 27;
    return (uint32_t)((p->random * UINT64_C(2685821657736338717)) >> 32);
}

static int below(struct lagom_rcpsp *p, int n) { return (int)(((uint64_t)random_word(p) * (uint32_t)n) >> 32); }

static double uniform(struct lagom_rcpsp *p) { return random_word(p) / 4294967296.0; }

/* ---- one schedule ---- */

INLINE bool fits(const uint64_t *free, const uint64_t *demand, const uint64_t *guard, int num_words) {
    uint64_t borrowed = 0;
    for (int w = 0; w < num_words; w++) borrowed |= ~(free[w] - demand[w]) & guard[w];
    return !borrowed;
}

INLINE bool is_zero(const uint64_t *demand, int num_words) {
    uint64_t any = 0;
    for (int w = 0; w < num_words; w++) any |= demand[w];
    return !any;
}

/* Starts if activities are placed in this order, each as early as what is placed allows; returns the makespan. */
INLINE int placed(struct lagom_rcpsp *p, const struct arcs *preds, const int32_t *order, int32_t *starts,
                  const int num_words) {
    uint64_t *profile = p->profile;
    int makespan = 0;
    for (int k = 0; k < p->num; k++) {
        int activity = order[k], start = 0, duration = p->durations[activity];
        for (int i = preds->begin[activity]; i < preds->begin[activity + 1]; i++) {
            int end = p->ends[preds->activities[i]];
            start = end > start ? end : start;
        }
        const uint64_t *demand = p->demands + (size_t)activity * (size_t)num_words;
        if (duration && !is_zero(demand, num_words)) {
            /* From the last period to the first: behind the last conflict nothing before it needs a look. */
            for (int period = start + duration - 1; period >= start;) {
                if (fits(profile + (size_t)period * (size_t)num_words, demand, p->guard, num_words)) {
                    period--;
                } else {
                    start = period + 1;
                    period += duration;
                }
            }
            for (int period = start; period < start + duration; period++) {
                uint64_t *free = profile + (size_t)period * (size_t)num_words;
                for (int w = 0; w < num_words; w++) free[w] -= demand[w];
            }
        }
        starts[activity] = start;
        p->ends[activity] = start + duration;
        if (start + duration > makespan) makespan = start + duration;
    }
    for (int period = 0; period < makespan; period++)
        for (int w = 0; w < num_words; w++) profile[(size_t)period * (size_t)num_words + (size_t)w] = p->full[w];
    return makespan;
}

static int place(struct lagom_rcpsp *p, const struct arcs *preds, const int32_t *order, int32_t *starts) {
    if (p->num_words == 1) return placed(p, preds, order, starts, 1);
    return placed(p, preds, order, starts, p->num_words);
}

/* Sorts by key (0 .. most), ties as in `from`. */
static void sort_by(struct lagom_rcpsp *p, const int32_t *from, const int32_t *keys, int most, int32_t *to) {
    memset(p->counts, 0, sizeof *p->counts * ((size_t)most + 2));
    for (int i = 0; i < p->num; i++) p->counts[keys[i] + 1]++;
    for (int key = 0; key < most; key++) p->counts[key + 1] += p->counts[key];
    for (int i = 0; i < p->num; i++) to[p->counts[keys[from[i]]]++] = from[i];
}

/* The list of a schedule for the other direction of time. Ties as in the list that it was made from, backward: an
 * activity without duration ends where what it waits for does. */
static void flip(struct lagom_rcpsp *p, const int32_t *list, const int32_t *starts, int makespan, int32_t *to) {
    for (int i = 0; i < p->num; i++) {
        p->flipped[i] = list[p->num - 1 - i];
        p->keys[i] = makespan - starts[i] - p->durations[i];
    }
    sort_by(p, p->flipped, p->keys, makespan, to);
}

/* Places `list`, shifts right and left for as long as that shortens it; `starts` of the last, and its makespan. */
static int justify(struct lagom_rcpsp *p, const int32_t *list, int32_t *starts) {
    int makespan = place(p, &p->preds, list, starts), before;
    memcpy(p->ahead, list, sizeof *list * (size_t)p->num);
    do { /* a shift never lengthens */
        before = makespan;
        flip(p, p->ahead, starts, makespan, p->back);
        makespan = place(p, &p->succs, p->back, p->right);
        flip(p, p->back, p->right, makespan, p->ahead);
        makespan = place(p, &p->preds, p->ahead, starts);
    } while (makespan < before);
    return makespan;
}

/* ---- the population ---- */

static void swap(struct member *a, struct member *b) {
    struct member other = *a;
    *a = *b;
    *b = other;
}

static void sink(struct member *heap, int num, int at) {
    for (;;) {
        int most = at;
        for (int child = 2 * at + 1; child <= 2 * at + 2 && child < num; child++)
            if (heap[child].makespan > heap[most].makespan) most = child;
        if (most == at) return;
        swap(&heap[at], &heap[most]);
        at = most;
    }
}

static void rise(struct member *heap, int at) {
    for (int above; at > 0 && heap[at].makespan > heap[above = (at - 1) / 2].makespan; at = above)
        swap(&heap[at], &heap[above]);
}

static bool is_known(struct lagom_rcpsp *p, const int32_t *list) {
    uint64_t hash = UINT64_C(1469598103934665603);
    for (int i = 0; i < p->num; i++) {
        hash = (hash ^ (uint64_t)(uint32_t)list[i]) * UINT64_C(1099511628211);
        hash ^= hash >> 29;
    }
    uint64_t *known = &p->seen[hash & (p->num_seen - 1)];
    bool is_same = *known == hash;
    *known = hash;
    return is_same;
}

/* Justifies a list and takes it into the population: instead of the longest, unless it is longer or known. */
static void take(struct lagom_rcpsp *p, const int32_t *list) {
    int32_t *sorted = p->sorted;
    int makespan = justify(p, list, p->starts);
    p->since_better++;
    if (makespan < p->shortest) {
        p->shortest = makespan;
        p->since_better = 0;
    }
    if (makespan < p->best) {
        p->best = makespan;
        memcpy(p->best_starts, p->starts, sizeof *p->starts * (size_t)p->num);
    }
    sort_by(p, p->topological, p->starts, makespan, sorted);
    if (is_known(p, sorted)) return;
    if (p->num_members < p->population) {
        struct member *member = &p->members[p->num_members];
        member->makespan = makespan;
        memcpy(member->list, sorted, sizeof *sorted * (size_t)p->num);
        rise(p->members, p->num_members++);
    } else if (makespan <= p->members[0].makespan) {
        p->members[0].makespan = makespan;
        memcpy(p->members[0].list, sorted, sizeof *sorted * (size_t)p->num);
        sink(p->members, p->num_members, 0);
    }
}

/* A list by longest tails with noise. */
static void sample(struct lagom_rcpsp *p, int32_t *list) {
    static const double shares[] = {0.1, 0.2, 0.4};
    double noise = shares[below(p, 3)] * p->longest_tail;
    int32_t *waits = p->waits, *ready = p->ready;
    int num_ready = 0;
    for (int i = 0; i < p->num; i++) {
        p->noisy[i] = uniform(p) * noise - p->tails[i];
        waits[i] = p->preds.begin[i + 1] - p->preds.begin[i];
        if (!waits[i]) ready[num_ready++] = i;
    }
    for (int k = 0; k < p->num; k++) {
        int first = 0;
        for (int i = 1; i < num_ready; i++)
            if (p->noisy[ready[i]] < p->noisy[ready[first]]) first = i;
        int activity = list[k] = ready[first];
        ready[first] = ready[--num_ready];
        for (int i = p->succs.begin[activity]; i < p->succs.begin[activity + 1]; i++)
            if (!--waits[p->succs.activities[i]]) ready[num_ready++] = p->succs.activities[i];
    }
}

/* The better of two at random. */
static int chosen(struct lagom_rcpsp *p) {
    int first = below(p, p->num_members), second = below(p, p->num_members);
    return p->members[first].makespan <= p->members[second].makespan ? first : second;
}

/* A stretch of the mother's list in the father's order, the rest as hers (two-point crossover). */
static void cross(struct lagom_rcpsp *p, int32_t *list) {
    int mother = chosen(p), father = chosen(p);
    if (mother == father) father = (mother + 1 + below(p, p->num_members - 1)) % p->num_members;
    const int32_t *hers = p->members[mother].list, *his = p->members[father].list;
    int width = (int)(p->num * (0.15 + 0.35 * uniform(p))), begin = below(p, p->num - width + 1), end = begin + width;
    int32_t *place_of = p->place_of; /* in her list */
    for (int i = 0; i < p->num; i++) place_of[hers[i]] = i;
    memcpy(list, hers, sizeof *list * (size_t)p->num);
    /* Of his list, the first `width` that she does not have before the stretch; then hers that are left. */
    int at = begin;
    for (int i = 0; i < p->num && at < end; i++) {
        if (place_of[his[i]] < begin) continue;
        list[at++] = his[i];
        place_of[his[i]] = -1;
    }
    for (int i = begin; i < p->num; i++)
        if (place_of[hers[i]] >= 0) list[at++] = hers[i];
}

static bool is_arc(const struct lagom_rcpsp *p, int pred, int succ) {
    for (int i = p->preds.begin[succ]; i < p->preds.begin[succ + 1]; i++)
        if (p->preds.activities[i] == pred) return true;
    return false;
}

/* Swaps neighbours where no arc forbids it, one in fifty. */
static void mutate(struct lagom_rcpsp *p, int32_t *list) {
    for (int i = 0; i + 1 < p->num; i++) {
        if (random_word(p) >= UINT32_MAX / 50 || is_arc(p, list[i], list[i + 1])) continue;
        int32_t other = list[i];
        list[i] = list[i + 1];
        list[i + 1] = other;
    }
}

/* The next population: an island from samples, or the union of the best of each; then all from the start. */
static void renew(struct lagom_rcpsp *p) {
    bool is_union = p->num_islands == NUM_ISLANDS;
    p->shortest = INT32_MAX;
    p->since_better = 0;
    p->num_sampled = 0;
    p->num_islands = is_union ? 0 : p->num_islands + 1;
    if (!is_union) {
        while (p->num_members > p->population / NUM_ISLANDS) {
            swap(&p->members[0], &p->members[--p->num_members]);
            sink(p->members, p->num_members, 0);
        }
        for (int i = 0; i < p->num_members; i++) swap(&p->kept[p->num_kept++], &p->members[i]);
    }
    p->num_members = 0;
    if (p->num_islands < NUM_ISLANDS) return;
    while (p->num_kept) {
        swap(&p->members[p->num_members], &p->kept[--p->num_kept]);
        if (p->members[p->num_members].makespan < p->shortest) p->shortest = p->members[p->num_members].makespan;
        rise(p->members, p->num_members++);
    }
}

static void one_child(struct lagom_rcpsp *p) {
    /* A small project may not have as many lists as there are members. */
    bool is_short = p->num_members < p->population && p->num_sampled < 2 * p->population;
    if (is_short || p->num_members < 2) {
        sample(p, p->child);
        p->num_sampled++;
    } else {
        cross(p, p->child);
        mutate(p, p->child);
    }
    take(p, p->child);
    int64_t patience = p->num_islands == NUM_ISLANDS ? STALE_UNION : STALE_ISLAND;
    if (p->since_better > patience * p->population) renew(p);
}

/* ---- what is called from outside ---- */

API int lr_version(void) { return LR_VERSION; }

API void lr_close(struct lagom_rcpsp *p) {
    if (!p) return;
    void *const blocks[] = {
        p->preds.begin, p->preds.activities, p->succs.begin, p->succs.activities, p->rows, p->demands, p->profile,
        p->counts,      p->noisy,            p->members,     p->kept,             p->seen, p->lists,
    };
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) free(blocks[i]);
    free(p);
}

static int32_t *numbers(size_t num) { return calloc(num ? num : 1, sizeof(int32_t)); }

static bool allocate(struct lagom_rcpsp *p, int num_arcs) {
    size_t num = (size_t)p->num, words = (size_t)p->num_words, horizon = (size_t)p->horizon;
    int32_t **const rows[] = {
        &p->durations, &p->topological, &p->tails,  &p->ends,   &p->keys,  &p->flipped, &p->ahead,    &p->back,
        &p->right,     &p->child,       &p->starts, &p->sorted, &p->waits, &p->ready,   &p->place_of, &p->best_starts,
    };
    size_t num_rows = sizeof rows / sizeof *rows;
    bool is_complete = (p->rows = numbers(num_rows * num)) != NULL;
    for (size_t i = 0; is_complete && i < num_rows; i++) *rows[i] = p->rows + i * num;
    is_complete &= (p->preds.begin = numbers(num + 1)) != NULL && (p->succs.begin = numbers(num + 1)) != NULL;
    is_complete &= (p->preds.activities = numbers((size_t)num_arcs)) != NULL;
    is_complete &= (p->succs.activities = numbers((size_t)num_arcs)) != NULL;
    is_complete &= (p->counts = numbers(horizon + 2)) != NULL;
    is_complete &= (p->demands = calloc(num * words, sizeof *p->demands)) != NULL;
    is_complete &= (p->profile = calloc(horizon * words + 1, sizeof *p->profile)) != NULL;
    is_complete &= (p->noisy = calloc(num, sizeof *p->noisy)) != NULL;
    is_complete &= (p->members = calloc((size_t)p->population, sizeof *p->members)) != NULL;
    is_complete &= (p->kept = calloc((size_t)p->population, sizeof *p->kept)) != NULL;
    is_complete &= (p->seen = calloc(p->num_seen, sizeof *p->seen)) != NULL;
    is_complete &= (p->lists = numbers(2 * (size_t)p->population * num)) != NULL;
    return is_complete;
}

/* Words of one period, or 0 if a demand or a capacity is out of range. `words` and `shifts` say where a field lies. */
static int packed_words(int num, int num_resources, const int64_t *demands, const int64_t *capacities, int *words,
                        int *shifts) {
    int num_words = 1, used = 0;
    for (int r = 0; r < num_resources; r++) {
        if (capacities[r] < 0 || capacities[r] > INT64_MAX / 2) return 0;
        int bits = 1; /* the guard */
        while (bits < 64 && capacities[r] >> (bits - 1)) bits++;
        if (used + bits > 64) num_words++, used = 0;
        words[r] = num_words - 1;
        shifts[r] = used;
        used += bits;
        for (int i = 0; i < num; i++) {
            int64_t demand = demands[(size_t)i * (size_t)num_resources + (size_t)r];
            if (demand < 0 || demand > capacities[r]) return 0;
        }
    }
    return num_words;
}

static void pack(struct lagom_rcpsp *p, int num_resources, const int64_t *demands, const int64_t *capacities,
                 const int *words, const int *shifts) {
    for (int r = 0; r < num_resources; r++) {
        int bits = 0;
        while (capacities[r] >> bits) bits++;
        uint64_t guard = UINT64_C(1) << (shifts[r] + bits);
        p->guard[words[r]] |= guard;
        p->full[words[r]] |= guard | (uint64_t)capacities[r] << shifts[r];
        for (int i = 0; i < p->num; i++) {
            uint64_t demand = (uint64_t)demands[(size_t)i * (size_t)num_resources + (size_t)r];
            p->demands[(size_t)i * (size_t)p->num_words + (size_t)words[r]] |= demand << shifts[r];
        }
    }
    for (int period = 0; period < p->horizon; period++)
        memcpy(p->profile + (size_t)period * (size_t)p->num_words, p->full, sizeof *p->full * (size_t)p->num_words);
}

/* By the activity at one end of the arcs, the activities at the other. */
static void index_arcs(struct arcs *arcs, int num, int num_arcs, const int32_t *pairs, int end) {
    for (int i = 0; i < num_arcs; i++) arcs->begin[pairs[2 * i + end] + 1]++;
    for (int i = 0; i < num; i++) arcs->begin[i + 1] += arcs->begin[i];
    for (int i = num_arcs - 1; i >= 0; i--) {
        int at = --arcs->begin[pairs[2 * i + end] + 1];
        arcs->activities[at] = pairs[2 * i + 1 - end];
    }
    /* Each begin has moved down to that of the activity before: shift them back. */
    for (int i = 0; i < num; i++) arcs->begin[i] = arcs->begin[i + 1];
    arcs->begin[num] = num_arcs;
}

/* Topological order and tails; false if there is a cycle. */
static bool order_activities(struct lagom_rcpsp *p) {
    int num_ordered = 0;
    for (int i = 0; i < p->num; i++) {
        p->waits[i] = p->preds.begin[i + 1] - p->preds.begin[i];
        if (!p->waits[i]) p->topological[num_ordered++] = i;
    }
    for (int k = 0; k < num_ordered; k++) {
        int activity = p->topological[k];
        for (int i = p->succs.begin[activity]; i < p->succs.begin[activity + 1]; i++)
            if (!--p->waits[p->succs.activities[i]]) p->topological[num_ordered++] = p->succs.activities[i];
    }
    if (num_ordered < p->num) return false;
    for (int k = p->num - 1; k >= 0; k--) {
        int activity = p->topological[k];
        for (int i = p->succs.begin[activity]; i < p->succs.begin[activity + 1]; i++) {
            int tail = p->tails[p->succs.activities[i]];
            if (tail > p->tails[activity]) p->tails[activity] = tail;
        }
        p->tails[activity] += p->durations[activity];
        if (p->tails[activity] > p->longest_tail) p->longest_tail = p->tails[activity];
    }
    return true;
}

/* A search. `demands` is [num][num_resources], `arcs` [num_arcs] pairs (before, after). NULL with `error` set: EINVAL
 * if an argument is out of range or precedence has a cycle, or ENOMEM. */
API struct lagom_rcpsp *lr_open(int num, int num_resources, const int32_t *durations, const int64_t *demands,
                                const int64_t *capacities, int num_arcs, const int32_t *arcs, uint64_t seed,
                                int population, int *error) {
    int words[MAX_RESOURCES], shifts[MAX_RESOURCES];
    int64_t horizon = 0;
    *error = EINVAL;
    if (num < 1 || num > MAX_ACTIVITIES || num_resources < 0 || num_resources > MAX_RESOURCES) return NULL;
    if (num_arcs < 0 || num_arcs > MAX_ARCS || population < MIN_POPULATION || population > MAX_POPULATION) return NULL;
    for (int i = 0; i < num; i++) {
        if (durations[i] < 0) return NULL;
        horizon += durations[i];
    }
    if (horizon > MAX_HORIZON) return NULL;
    for (int i = 0; i < 2 * num_arcs; i++)
        if (arcs[i] < 0 || arcs[i] >= num) return NULL;
    int num_words = packed_words(num, num_resources, demands, capacities, words, shifts);
    if (!num_words) return NULL;
    *error = ENOMEM;
    struct lagom_rcpsp *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    p->num = num, p->num_words = num_words, p->horizon = (int)horizon;
    p->population = population;
    for (p->num_seen = 1; p->num_seen < (size_t)population * SEEN_PER_MEMBER;) p->num_seen *= 2;
    if (!allocate(p, num_arcs)) return lr_close(p), NULL;
    memcpy(p->durations, durations, sizeof *durations * (size_t)num);
    pack(p, num_resources, demands, capacities, words, shifts);
    index_arcs(&p->preds, num, num_arcs, arcs, 1);
    index_arcs(&p->succs, num, num_arcs, arcs, 0);
    *error = EINVAL;
    if (!order_activities(p)) return lr_close(p), NULL;
    for (int i = 0; i < p->population; i++) {
        p->members[i].list = p->lists + (size_t)i * (size_t)num;
        p->kept[i].list = p->members[i].list + (size_t)population * (size_t)num;
    }
    p->random = (seed + 1) * UINT64_C(0x9E3779B97F4A7C15);
    p->random ^= p->random >> 31;
    if (!p->random) p->random = 1;
    p->best = p->shortest = INT32_MAX;
    *error = 0;
    return p;
}

/* Makes children until there are `max_children`, `seconds` have passed or the makespan is `target`; at least one. The
 * shortest makespan so far. */
API int lr_run(struct lagom_rcpsp *p, double seconds, int64_t max_children, int target) {
    struct timespec begin, moment;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (int64_t child = 1;; child++) {
        one_child(p);
        if (p->best <= target || child >= max_children) break;
        if (child % CLOCK_EVERY) continue;
        clock_gettime(CLOCK_MONOTONIC, &moment);
        double passed_s = (double)(moment.tv_sec - begin.tv_sec) + 1e-9 * (double)(moment.tv_nsec - begin.tv_nsec);
        if (passed_s >= seconds) break;
    }
    return p->best;
}

/* The makespan and, in `starts` [num], the starts of the shortest schedule so far; -ENODATA if there is none. */
API int lr_best(const struct lagom_rcpsp *p, int32_t *starts) {
    if (p->best == INT32_MAX) return -ENODATA;
    memcpy(starts, p->best_starts, sizeof *starts * (size_t)p->num);
    return p->best;
}

/* Whether `list` has every activity once, each after those that it waits for. Backward: before them. */
static bool is_list(struct lagom_rcpsp *p, const struct arcs *preds, const int32_t *list) {
    for (int i = 0; i < p->num; i++) p->place_of[i] = -1;
    for (int k = 0; k < p->num; k++) {
        if (list[k] < 0 || list[k] >= p->num || p->place_of[list[k]] >= 0) return false;
        p->place_of[list[k]] = k;
    }
    for (int i = 0; i < p->num; i++)
        for (int k = preds->begin[i]; k < preds->begin[i + 1]; k++)
            if (p->place_of[preds->activities[k]] >= p->place_of[i]) return false;
    return true;
}

/* Takes a schedule from elsewhere into the population, as the list of its starts; -EINVAL if they break precedence or
 * lie outside 0 .. the sum of durations. */
API int lr_add(struct lagom_rcpsp *p, const int32_t *starts) {
    for (int i = 0; i < p->num; i++)
        if (starts[i] < 0 || starts[i] > p->horizon) return -EINVAL;
    sort_by(p, p->topological, starts, p->horizon, p->child);
    if (!is_list(p, &p->preds, p->child)) return -EINVAL;
    take(p, p->child);
    return 0;
}

/* The makespan of a list and its starts: placed in order, forward or backward in time, or justified; -EINVAL if it is
 * no topological list of that direction. Leaves the search alone. */
API int lr_place(struct lagom_rcpsp *p, int is_backward, const int32_t *list, int32_t *starts) {
    const struct arcs *preds = is_backward ? &p->succs : &p->preds;
    return is_list(p, preds, list) ? place(p, preds, list, starts) : -EINVAL;
}

API int lr_justify(struct lagom_rcpsp *p, const int32_t *list, int32_t *starts) {
    return is_list(p, &p->preds, list) ? justify(p, list, starts) : -EINVAL;
}
