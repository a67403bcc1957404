/* liblagom_list_schedule.so: schedules of task graphs by priority, and their improvement forward and backward.
 *
 * What `planners/schedule/generation.py` calls; its docstring says what the schedules are. A task occupies one resource, a
 * resource runs one task at a time. Nothing is kept between two calls and nothing is shared, so that any number of
 * threads may call at once. Memory is the caller's; arcs must not go round in a circle (then -EINVAL is returned).
 */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "lagom_task_graph.h"

#define API __attribute__((visibility("default")))

enum { LLS_VERSION = 2, DIGIT_BITS = 11, NUM_DIGITS = 1 << DIGIT_BITS };
enum kind { SERIAL, PARALLEL, NUM_KINDS };

struct workspace {
    int64_t num_tasks, num_resources;
    uint64_t *keys, *other_keys;
    int32_t *by_rank, *other_ranks, *rank, *waits;
    int64_t *starts, *ends;
    struct queue *queues; /* one per resource */
    struct gaps *gaps;    /* one per resource */
    int64_t *free_at;     /* per resource: end of the task that runs, -1 if none does */
    int32_t *running;     /* per resource */
};

static void workspace_close(struct workspace *w) {
    free(w->keys);
    free(w->other_keys);
    free(w->by_rank);
    free(w->other_ranks);
    free(w->rank);
    free(w->waits);
    free(w->starts);
    free(w->ends);
    free(w->free_at);
    free(w->running);
    for (int64_t r = 0; r < w->num_resources; r++) {
        if (w->queues)
            for (int level = 0; level < w->queues[r].num_levels; level++) free(w->queues[r].levels[level]);
        if (w->gaps) {
            free(w->gaps[r].opens);
            free(w->gaps[r].closes);
        }
    }
    free(w->queues);
    free(w->gaps);
}

static bool workspace_open(struct workspace *w, const struct lls_graph *graph) {
    size_t num = (size_t)graph->num_tasks, num_resources = (size_t)graph->num_resources;
    *w = (struct workspace){.num_tasks = graph->num_tasks, .num_resources = graph->num_resources};
    w->keys = malloc(num * sizeof *w->keys);
    w->other_keys = malloc(num * sizeof *w->other_keys);
    w->by_rank = malloc(num * sizeof *w->by_rank);
    w->other_ranks = malloc(num * sizeof *w->other_ranks);
    w->rank = malloc(num * sizeof *w->rank);
    w->waits = malloc(num * sizeof *w->waits);
    w->starts = malloc(num * sizeof *w->starts);
    w->ends = malloc(num * sizeof *w->ends);
    w->free_at = malloc(num_resources * sizeof *w->free_at);
    w->running = malloc(num_resources * sizeof *w->running);
    w->queues = calloc(num_resources, sizeof *w->queues);
    w->gaps = calloc(num_resources, sizeof *w->gaps);
    bool opened = w->keys && w->other_keys && w->by_rank && w->other_ranks && w->rank && w->waits && w->starts &&
                  w->ends && w->free_at && w->running && w->queues && w->gaps;
    for (size_t r = 0; opened && r < num_resources; r++) {
        w->gaps[r].opens = malloc((num + 1) * sizeof *w->gaps[r].opens);
        w->gaps[r].closes = malloc((num + 1) * sizeof *w->gaps[r].closes);
        opened = w->gaps[r].opens && w->gaps[r].closes && queue_open(&w->queues[r], graph->num_tasks);
    }
    if (!opened) workspace_close(w);
    return opened;
}

/* Sorts tasks by their keys, equal ones by number: `by_rank` and `rank`. The keys are lost. */
static void rank_by_keys(struct workspace *w) {
    uint64_t common = ~UINT64_C(0), any = 0;
    for (int64_t i = 0; i < w->num_tasks; i++) {
        w->by_rank[i] = (int32_t)i;
        common &= w->keys[i];
        any |= w->keys[i];
    }
    for (int shift = 0; shift < 64; shift += DIGIT_BITS) {
        if (!(((common ^ any) >> shift) & (NUM_DIGITS - 1))) continue; /* all have the same digit */
        int32_t place[NUM_DIGITS + 1] = {0};
        for (int64_t i = 0; i < w->num_tasks; i++) place[((w->keys[i] >> shift) & (NUM_DIGITS - 1)) + 1]++;
        for (int digit = 0; digit < NUM_DIGITS; digit++) place[digit + 1] += place[digit];
        for (int64_t i = 0; i < w->num_tasks; i++) {
            int32_t to = place[(w->keys[i] >> shift) & (NUM_DIGITS - 1)]++;
            w->other_keys[to] = w->keys[i];
            w->other_ranks[to] = w->by_rank[i];
        }
        uint64_t *keys = w->keys;
        int32_t *ranks = w->by_rank;
        w->keys = w->other_keys, w->other_keys = keys;
        w->by_rank = w->other_ranks, w->other_ranks = ranks;
    }
    for (int64_t i = 0; i < w->num_tasks; i++) w->rank[w->by_rank[i]] = (int32_t)i;
}

/* Keys in the order of the numbers; 0.0 and -0.0 are equal. */
static void keys_of_priority(struct workspace *w, const double *priority) {
    for (int64_t i = 0; i < w->num_tasks; i++) {
        double value = priority[i] + 0.0;
        uint64_t bits;
        memcpy(&bits, &value, sizeof bits);
        w->keys[i] = bits >> 63 ? ~bits : bits | UINT64_C(1) << 63;
    }
}

/* What ends last in `starts` is the most urgent when time runs backward, and what must start first when it then runs
 * forward again: both are the order of falling ends. */
static void keys_of_ends(struct workspace *w, const struct lls_graph *graph, int64_t makespan, const int64_t *starts) {
    for (int64_t i = 0; i < w->num_tasks; i++) w->keys[i] = (uint64_t)(makespan - starts[i] - graph->ticks[i]);
}

static int64_t count_waits(struct workspace *w, const struct lls_graph *graph) {
    for (int64_t i = 0; i < w->num_tasks; i++) w->waits[i] = graph->pred_begin[i + 1] - graph->pred_begin[i];
    return w->num_tasks;
}

/* Tasks by rank as soon as what they wait for was placed, each into the earliest gap. */
static int64_t serial(struct workspace *w, const struct lls_graph *graph, int64_t *starts) {
    struct queue *ready = &w->queues[0];
    int64_t left = count_waits(w, graph), makespan = 0;
    for (int64_t r = 0; r < w->num_resources; r++) {
        w->gaps[r].opens[0] = 0;
        w->gaps[r].closes[0] = INT64_MAX;
        w->gaps[r].num = 1;
    }
    for (int64_t i = 0; i < w->num_tasks; i++)
        if (!w->waits[i]) queue_push(ready, w->rank[i]);
    for (; !queue_is_empty(ready); left--) {
        int32_t task = w->by_rank[queue_pop(ready)];
        int64_t earliest = 0;
        for (int32_t k = graph->pred_begin[task]; k < graph->pred_begin[task + 1]; k++)
            if (w->ends[graph->preds[k]] > earliest) earliest = w->ends[graph->preds[k]];
        starts[task] = gap_take(&w->gaps[graph->resource[task]], earliest, graph->ticks[task]);
        w->ends[task] = starts[task] + graph->ticks[task];
        if (w->ends[task] > makespan) makespan = w->ends[task];
        for (int32_t k = graph->succ_begin[task]; k < graph->succ_begin[task + 1]; k++)
            if (!--w->waits[graph->succs[k]]) queue_push(ready, w->rank[graph->succs[k]]);
    }
    return left ? -EINVAL : makespan;
}

/* A free resource takes the most urgent task that is ready. */
static int64_t parallel(struct workspace *w, const struct lls_graph *graph, int64_t *starts) {
    int64_t left = count_waits(w, graph), now = 0;
    for (int64_t r = 0; r < w->num_resources; r++) w->free_at[r] = -1;
    for (int64_t i = 0; i < w->num_tasks; i++)
        if (!w->waits[i]) queue_push(&w->queues[graph->resource[i]], w->rank[i]);
    for (;;) {
        int64_t next = INT64_MAX;
        for (int64_t r = 0; r < w->num_resources; r++) {
            if (w->free_at[r] < 0 && !queue_is_empty(&w->queues[r])) {
                int32_t task = w->by_rank[queue_pop(&w->queues[r])];
                starts[task] = now;
                w->running[r] = task;
                w->free_at[r] = now + graph->ticks[task];
                left--;
            }
            if (w->free_at[r] >= 0 && w->free_at[r] < next) next = w->free_at[r];
        }
        if (next == INT64_MAX) return left ? -EINVAL : now;
        now = next;
        for (int64_t r = 0; r < w->num_resources; r++) {
            if (w->free_at[r] != now) continue;
            w->free_at[r] = -1;
            int32_t task = w->running[r];
            for (int32_t k = graph->succ_begin[task]; k < graph->succ_begin[task + 1]; k++) {
                int32_t succ = graph->succs[k];
                if (!--w->waits[succ]) queue_push(&w->queues[graph->resource[succ]], w->rank[succ]);
            }
        }
    }
}

static int64_t generate(struct workspace *w, const struct lls_graph *graph, enum kind kind, int64_t *starts) {
    rank_by_keys(w);
    return kind == SERIAL ? serial(w, graph, starts) : parallel(w, graph, starts);
}

API int lls_version(void) { return LLS_VERSION; }

/* Schedules by priority, the smallest first, ties by number; returns the makespan, or minus an errno. */
API int64_t lls_generate(const struct lls_graph *graph, int kind, const double *priority, int64_t *starts) {
    struct workspace w;
    if (!is_valid(graph) || kind < 0 || kind >= NUM_KINDS) return -EINVAL;
    if (!workspace_open(&w, graph)) return -ENOMEM;
    keys_of_priority(&w, priority);
    int64_t makespan = generate(&w, graph, (enum kind)kind, starts);
    workspace_close(&w);
    return makespan;
}

/* Forward-backward rounds from the schedule in `starts`, which the best one replaces; returns its makespan, or minus an
 * errno. They end after `patience` rounds without gain, at `target` ticks, after `limit_s` seconds, or once `*steps` tasks
 * were placed; how many were is left there. */
API int64_t lls_improve(const struct lls_graph *graph, int forward, int backward, int max_rounds, int patience,
                        int64_t target, double limit_s, int64_t *steps, int64_t *starts) {
    struct workspace w;
    if (!is_valid(graph) || forward < 0 || forward >= NUM_KINDS || backward < 0 || backward >= NUM_KINDS)
        return -EINVAL;
    if (!workspace_open(&w, graph)) return -ENOMEM;
    struct lls_graph reversed = *graph;
    reversed.pred_begin = graph->succ_begin, reversed.preds = graph->succs;
    reversed.succ_begin = graph->pred_begin, reversed.succs = graph->preds;
    size_t size = (size_t)graph->num_tasks * sizeof *starts;
    int64_t best = 0, current;
    for (int64_t i = 0; i < graph->num_tasks; i++)
        if (starts[i] + graph->ticks[i] > best) best = starts[i] + graph->ticks[i];
    current = best;
    memcpy(w.starts, starts, size);
    double until = now_s() + limit_s;
    int64_t max_steps = *steps;
    *steps = 0;
    for (int round = 0, dull = 0; round < max_rounds && dull < patience && best > target; round++) {
        if (*steps >= max_steps || now_s() >= until) break;
        *steps += 2 * graph->num_tasks;
        keys_of_ends(&w, graph, current, w.starts);
        int64_t from_end = generate(&w, &reversed, (enum kind)backward, w.starts);
        keys_of_ends(&w, graph, from_end, w.starts);
        current = from_end < 0 ? from_end : generate(&w, graph, (enum kind)forward, w.starts);
        if (current < 0) {
            best = current;
            break;
        }
        dull++;
        if (current < best) {
            best = current;
            dull = 0;
            memcpy(starts, w.starts, size);
        }
    }
    workspace_close(&w);
    return best;
}
