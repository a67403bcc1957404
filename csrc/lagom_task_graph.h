/* What schedule generation and window search share: a task graph, a queue of ranks, the gaps of a resource.
 *
 * Ready tasks wait in a bitmap over their ranks, with a bitmap over its words above it: as their number is known and
 * ranks are dense, the most urgent one is found in a few instructions, where a heap takes a walk.
 */
#ifndef LAGOM_TASK_GRAPH_H
#define LAGOM_TASK_GRAPH_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { WORD = 64, MAX_LEVELS = 6 };

/* Arcs as lists, one after the other: those of task i are preds[pred_begin[i]] ... preds[pred_begin[i + 1] - 1]. */
struct lls_graph {
    int64_t num_tasks, num_resources;
    const int64_t *ticks;
    const int32_t *resource;
    const int32_t *pred_begin, *preds;
    const int32_t *succ_begin, *succs;
};

/* A set of numbers below a limit that gives its least one. */
struct queue {
    int num_levels;
    uint64_t *levels[MAX_LEVELS]; /* levels[0] has a bit per number, each next one a bit per word of the one before */
};

static inline bool queue_open(struct queue *q, int64_t limit) {
    int64_t words = limit;
    do {
        words = (words + WORD - 1) / WORD;
        if (q->num_levels == MAX_LEVELS) return false;
        q->levels[q->num_levels] = calloc((size_t)words, sizeof(uint64_t));
        if (!q->levels[q->num_levels]) return false;
        q->num_levels++;
    } while (words > 1);
    return true;
}

static inline void queue_push(struct queue *q, int64_t number) {
    for (int level = 0; level < q->num_levels; level++) {
        uint64_t *word = &q->levels[level][number / WORD];
        bool had_any = *word != 0;
        *word |= UINT64_C(1) << (number % WORD);
        if (had_any) return;
        number /= WORD;
    }
}

static inline bool queue_is_empty(const struct queue *q) { return q->levels[q->num_levels - 1][0] == 0; }

static inline int64_t queue_pop(struct queue *q) {
    int64_t number = 0;
    for (int level = q->num_levels - 1; level >= 0; level--)
        number = number * WORD + __builtin_ctzll(q->levels[level][number]);
    int64_t found = number;
    for (int level = 0; level < q->num_levels; level++) {
        uint64_t *word = &q->levels[level][number / WORD];
        *word &= ~(UINT64_C(1) << (number % WORD));
        if (*word) break;
        number /= WORD;
    }
    return found;
}

/* Idle times of a resource in order, the last one without end. */
struct gaps {
    int64_t *opens, *closes;
    int64_t num;
};

/* The place of the last gap that opens no later than `moment`; the first one if none does. */
static inline int64_t last_gap(const struct gaps *g, int64_t moment) {
    int64_t low = 0, high = g->num; /* opens[low] <= moment < opens[high], but for the first */
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (g->opens[middle] <= moment)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static inline void gap_remove(struct gaps *g, int64_t place) {
    size_t behind = (size_t)(g->num - place - 1);
    memmove(g->opens + place, g->opens + place + 1, behind * sizeof *g->opens);
    memmove(g->closes + place, g->closes + place + 1, behind * sizeof *g->closes);
    g->num--;
}

static inline void gap_insert(struct gaps *g, int64_t place, int64_t open, int64_t close) {
    size_t behind = (size_t)(g->num - place);
    memmove(g->opens + place + 1, g->opens + place, behind * sizeof *g->opens);
    memmove(g->closes + place + 1, g->closes + place, behind * sizeof *g->closes);
    g->opens[place] = open;
    g->closes[place] = close;
    g->num++;
}

/* Takes the earliest time of that many ticks from `earliest` on; its start. */
static inline int64_t gap_take(struct gaps *g, int64_t earliest, int64_t ticks) {
    int64_t place = last_gap(g, earliest), start;
    for (;; place++) {
        start = g->opens[place] > earliest ? g->opens[place] : earliest;
        if (start + ticks <= g->closes[place]) break;
    }
    int64_t open = g->opens[place], close = g->closes[place], end = start + ticks;
    if (start == open && end == close) {
        gap_remove(g, place);
    } else if (start == open) {
        g->opens[place] = end;
    } else {
        g->closes[place] = start;
        if (end < close) gap_insert(g, place + 1, end, close);
    }
    return start;
}

static inline bool is_valid(const struct lls_graph *graph) {
    return graph->num_tasks > 0 && graph->num_tasks < INT32_MAX && graph->num_resources > 0;
}

static inline double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

#endif
