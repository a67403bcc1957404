/* Window search: an order of issue is improved part by part, the rest of it kept; part of liblagom_list_schedule.so.
 *
 * The order is run on in-order streams, one per resource. Of a window (consecutive tasks of the order) each task has a
 * release (the end of what it waits for outside, and the moment at which its stream is free) and a tail (the longest
 * path behind it outside of the window, in the graph of arcs and streams). A schedule of the window with a lesser
 * greatest end + tail shortens every longest path through it, and no other order of the window can do more harm than
 * that figure says: what is kept is never worse (spec, planners section 1.3).
 *
 * Schedules of a window are made by insertion in the order of priorities (active schedules, among which an optimum is).
 * Priorities are the starts of the best one so far, of which some are moved: those of a path, of one task, or a little
 * of all. What is as good is taken too, and moved further.
 *
 * Sweeps go from the first task to the last: tails depend on what comes behind only, so that one pass over the whole
 * per sweep is enough.
 */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <stdatomic.h>

#include "lagom_task_graph.h"

#define API __attribute__((visibility("default")))

enum { MAX_WINDOW = 1024, MAX_PATH = 16, TRIES_BETWEEN_LOOKS = 64 };

/* One window; numbers are places in it, in the order of issue. */
struct window {
    int32_t num, num_resources;
    int32_t *tasks;             /* numbers in the graph */
    int64_t *ticks, *release, *tail;
    int32_t *resource;
    int32_t *pred_begin, *preds, *succ_begin, *succs;
    int64_t *free_at, *behind;  /* per resource: when its stream is free; longest path behind the window */
    int32_t *waits, *rank, *by_rank, *best_by_rank;
    int64_t *starts, *best_starts, *priority, *ends;
    struct queue ready;
    struct gaps *gaps;
};

/* The whole order. */
struct order {
    const struct lls_graph *graph;
    int32_t *tasks;              /* by place */
    int64_t *starts, *ends, *after;
    int64_t *behind;             /* per place and resource: longest path from the first task of it at or behind there */
    int64_t *free_at;            /* per resource */
    int32_t *local;              /* per task: place in the window, -1 outside */
};

struct value {
    int64_t longest, sum; /* longest path; sum over what leaves the window, which tells equal ones apart */
};

static uint64_t next_random(uint64_t *state) { /* splitmix64 */
    uint64_t z = (*state += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

/* Uniform in 0 ... limit - 1. */
static int64_t random_below(uint64_t *state, int64_t limit) {
    return (int64_t)(next_random(state) % (uint64_t)limit);
}

static bool is_better(struct value a, struct value b) {
    return a.longest < b.longest || (a.longest == b.longest && a.sum <= b.sum);
}

/* Schedules the window in the order of `by_rank`: `starts`, `ends`. */
static struct value schedule_window(struct window *w) {
    for (int32_t r = 0; r < w->num_resources; r++) {
        w->gaps[r].opens[0] = w->free_at[r];
        w->gaps[r].closes[0] = INT64_MAX;
        w->gaps[r].num = 1;
    }
    for (int32_t i = 0; i < w->num; i++) w->rank[w->by_rank[i]] = i;
    for (int32_t i = 0; i < w->num; i++) {
        w->waits[i] = w->pred_begin[i + 1] - w->pred_begin[i];
        if (!w->waits[i]) queue_push(&w->ready, w->rank[i]);
    }
    struct value value = {0, 0};
    while (!queue_is_empty(&w->ready)) {
        int32_t i = w->by_rank[queue_pop(&w->ready)];
        int64_t earliest = w->release[i];
        for (int32_t k = w->pred_begin[i]; k < w->pred_begin[i + 1]; k++)
            if (w->ends[w->preds[k]] > earliest) earliest = w->ends[w->preds[k]];
        w->starts[i] = gap_take(&w->gaps[w->resource[i]], earliest, w->ticks[i]);
        w->ends[i] = w->starts[i] + w->ticks[i];
        if (w->tail[i] >= 0) {
            if (w->ends[i] + w->tail[i] > value.longest) value.longest = w->ends[i] + w->tail[i];
            value.sum += w->ends[i] + w->tail[i];
        }
        for (int32_t k = w->succ_begin[i]; k < w->succ_begin[i + 1]; k++)
            if (!--w->waits[w->succs[k]]) queue_push(&w->ready, w->rank[w->succs[k]]);
    }
    for (int32_t r = 0; r < w->num_resources; r++) {
        int64_t last = w->gaps[r].opens[w->gaps[r].num - 1] + w->behind[r];
        if (last > value.longest) value.longest = last;
        value.sum += last;
    }
    return value;
}

/* No schedule of the window has a shorter longest path: per resource what is to run between releases and tails. */
static int64_t window_bound(const struct window *w) {
    int64_t bound = 0;
    for (int32_t r = 0; r < w->num_resources; r++) {
        int64_t load = 0, first = INT64_MAX;
        for (int32_t i = 0; i < w->num; i++) {
            if (w->resource[i] != r) continue;
            load += w->ticks[i];
            int64_t release = w->release[i] > w->free_at[r] ? w->release[i] : w->free_at[r];
            if (release < first) first = release;
        }
        if (load && first + load + w->behind[r] > bound) bound = first + load + w->behind[r];
    }
    return bound;
}

static void sort_by_priority(struct window *w) {
    for (int32_t i = 1; i < w->num; i++) { /* nearly sorted: most tasks were not moved */
        int32_t task = w->by_rank[i], k = i;
        int64_t priority = w->priority[task];
        for (; k > 0 && w->priority[w->by_rank[k - 1]] > priority; k--) w->by_rank[k] = w->by_rank[k - 1];
        w->by_rank[k] = task;
    }
}

/* Moves some priorities by up to the window's span. */
static void move_priorities(struct window *w, int64_t span, uint64_t *random) {
    int64_t reach = 1 + (span >> random_below(random, 7));
    int64_t by = random_below(random, 2 * reach + 1) - reach;
    int64_t choice = random_below(random, 8);
    if (choice == 0) { /* a little of all */
        int64_t little = 1 + (reach >> 2);
        for (int32_t i = 0; i < w->num; i++) w->priority[i] += random_below(random, 2 * little + 1) - little;
        return;
    }
    int32_t task = (int32_t)random_below(random, w->num);
    int64_t steps = choice == 1 ? 1 : 1 + random_below(random, MAX_PATH);
    for (;;) {
        w->priority[task] += by;
        int32_t num_succs = w->succ_begin[task + 1] - w->succ_begin[task];
        if (!--steps || !num_succs) return;
        task = w->succs[w->succ_begin[task] + (int32_t)random_below(random, num_succs)];
    }
}

/* When a search ends: at a moment, once that many tasks were placed, or once the caller says so. */
struct limit {
    double until;
    int64_t max_steps, steps;
    const atomic_int *stop;
};

static bool is_over(const struct limit *limit) {
    return limit->steps >= limit->max_steps || atomic_load_explicit(limit->stop, memory_order_relaxed) ||
           now_s() > limit->until;
}

/* Looks for a better schedule of the window; true if one was found, then it is in `best_starts`. */
static bool search_window(struct window *w, int num_tries, uint64_t *random, struct limit *limit) {
    for (int32_t i = 0; i < w->num; i++) w->by_rank[i] = i;
    struct value first = schedule_window(w), best = first;
    limit->steps += w->num;
    int64_t bound = window_bound(w), begin = INT64_MAX, end = 0;
    size_t starts_size = (size_t)w->num * sizeof *w->starts, ranks_size = (size_t)w->num * sizeof *w->by_rank;
    for (int32_t i = 0; i < w->num; i++) {
        if (w->starts[i] < begin) begin = w->starts[i];
        if (w->ends[i] > end) end = w->ends[i];
    }
    memcpy(w->best_starts, w->starts, starts_size);
    memcpy(w->best_by_rank, w->by_rank, ranks_size);
    for (int tries = 0; tries < num_tries && best.longest > bound; tries++) {
        if (tries % TRIES_BETWEEN_LOOKS == 0 && is_over(limit)) break;
        memcpy(w->priority, w->best_starts, starts_size);
        memcpy(w->by_rank, w->best_by_rank, ranks_size);
        move_priorities(w, end - begin, random);
        sort_by_priority(w);
        struct value value = schedule_window(w);
        limit->steps += w->num;
        if (!is_better(value, best)) continue;
        best = value;
        memcpy(w->best_starts, w->starts, starts_size);
        memcpy(w->best_by_rank, w->by_rank, ranks_size);
    }
    return best.longest < first.longest || best.sum < first.sum;
}

/* Runs the tasks at these places on the streams. */
static void run_part(struct order *o, int64_t begin, int64_t end) {
    const struct lls_graph *g = o->graph;
    for (int64_t at = begin; at < end; at++) {
        int32_t task = o->tasks[at];
        int64_t start = o->free_at[g->resource[task]];
        for (int32_t k = g->pred_begin[task]; k < g->pred_begin[task + 1]; k++)
            if (o->ends[g->preds[k]] > start) start = o->ends[g->preds[k]];
        o->starts[task] = start;
        o->ends[task] = o->free_at[g->resource[task]] = start + g->ticks[task];
    }
}

/* Runs all of them; the makespan. */
static int64_t run_order(struct order *o) {
    int64_t makespan = 0;
    for (int64_t r = 0; r < o->graph->num_resources; r++) o->free_at[r] = 0;
    run_part(o, 0, o->graph->num_tasks);
    for (int64_t r = 0; r < o->graph->num_resources; r++)
        if (o->free_at[r] > makespan) makespan = o->free_at[r];
    return makespan;
}

static void find_tails(struct order *o) {
    const struct lls_graph *g = o->graph;
    int64_t *behind = o->behind + g->num_tasks * g->num_resources;
    for (int64_t r = 0; r < g->num_resources; r++) behind[r] = 0;
    for (int64_t at = g->num_tasks - 1; at >= 0; at--) {
        int32_t task = o->tasks[at];
        int64_t longest = behind[g->resource[task]];
        for (int32_t k = g->succ_begin[task]; k < g->succ_begin[task + 1]; k++) {
            int64_t path = o->after[g->succs[k]] + g->ticks[g->succs[k]];
            if (path > longest) longest = path;
        }
        o->after[task] = longest;
        memcpy(behind - g->num_resources, behind, (size_t)g->num_resources * sizeof *behind);
        behind -= g->num_resources;
        behind[g->resource[task]] = longest + g->ticks[task];
    }
}

/* Fills the window with the tasks at these places. */
static void open_window(struct window *w, struct order *o, int64_t begin, int64_t end) {
    const struct lls_graph *g = o->graph;
    w->num = (int32_t)(end - begin);
    for (int32_t i = 0; i < w->num; i++) {
        w->tasks[i] = o->tasks[begin + i];
        o->local[w->tasks[i]] = i;
    }
    for (int32_t r = 0; r < w->num_resources; r++) {
        w->free_at[r] = o->free_at[r];
        w->behind[r] = o->behind[end * g->num_resources + r];
    }
    int32_t num_preds = 0, num_succs = 0;
    for (int32_t i = 0; i < w->num; i++) {
        int32_t task = w->tasks[i];
        w->ticks[i] = g->ticks[task];
        w->resource[i] = g->resource[task];
        w->release[i] = 0;
        w->tail[i] = g->succ_begin[task] == g->succ_begin[task + 1] ? 0 : -1;
        w->pred_begin[i] = num_preds;
        for (int32_t k = g->pred_begin[task]; k < g->pred_begin[task + 1]; k++) {
            int32_t pred = g->preds[k];
            if (o->local[pred] >= 0)
                w->preds[num_preds++] = o->local[pred];
            else if (o->ends[pred] > w->release[i])
                w->release[i] = o->ends[pred];
        }
        w->succ_begin[i] = num_succs;
        for (int32_t k = g->succ_begin[task]; k < g->succ_begin[task + 1]; k++) {
            int32_t succ = g->succs[k];
            if (o->local[succ] >= 0)
                w->succs[num_succs++] = o->local[succ];
            else if (o->after[succ] + g->ticks[succ] > w->tail[i])
                w->tail[i] = o->after[succ] + g->ticks[succ];
        }
    }
    w->pred_begin[w->num] = num_preds;
    w->succ_begin[w->num] = num_succs;
    for (int32_t i = 0; i < w->num; i++) o->local[w->tasks[i]] = -1;
}

/* Puts the window's tasks back by their new starts. */
static void close_window(const struct window *w, struct order *o, int64_t begin) {
    for (int32_t i = 0; i < w->num; i++) {
        int32_t task = w->tasks[i];
        int64_t at = begin + i;
        for (; at > begin && o->starts[o->tasks[at - 1]] > w->best_starts[i]; at--) o->tasks[at] = o->tasks[at - 1];
        o->tasks[at] = task;
        o->starts[task] = w->best_starts[i];
        o->ends[task] = w->best_starts[i] + w->ticks[i];
    }
}

/* One sweep of windows of `size`, each half over the next one, the first one of `first` tasks. */
static void sweep(struct window *w, struct order *o, int32_t size, int32_t first, int num_tries, uint64_t *random,
                  struct limit *limit) {
    int64_t num_tasks = o->graph->num_tasks;
    find_tails(o);
    for (int64_t r = 0; r < o->graph->num_resources; r++) o->free_at[r] = 0;
    for (int64_t begin = 0, step = first; begin < num_tasks; begin += step, step = size / 2) {
        int64_t end = begin + size < num_tasks ? begin + size : num_tasks, kept = begin + step;
        if (end - begin >= 2 && !is_over(limit)) {
            open_window(w, o, begin, end);
            if (search_window(w, num_tries, random, limit)) close_window(w, o, begin);
        }
        run_part(o, begin, kept < num_tasks ? kept : num_tasks);
    }
}

static void window_close(struct window *w) {
    free(w->tasks);
    free(w->ticks);
    free(w->resource);
    free(w->pred_begin);
    free(w->preds);
    free(w->succs);
    free(w->free_at);
    if (w->gaps)
        for (int32_t r = 0; r < w->num_resources; r++) {
            free(w->gaps[r].opens);
            free(w->gaps[r].closes);
        }
    free(w->gaps);
    for (int level = 0; level < w->ready.num_levels; level++) free(w->ready.levels[level]);
}

static bool window_open(struct window *w, const struct lls_graph *g, int32_t size) {
    enum { NUM_LONG = 7, NUM_SHORT = 6 };
    size_t num = (size_t)size + 1, num_resources = (size_t)g->num_resources;
    size_t num_arcs = (size_t)g->pred_begin[g->num_tasks] + 1;
    *w = (struct window){.num_resources = (int32_t)g->num_resources};
    w->ticks = malloc(NUM_LONG * num * sizeof *w->ticks); /* one block each for what is long, and what is short */
    w->tasks = malloc(num * sizeof *w->tasks);
    w->resource = malloc(NUM_SHORT * num * sizeof *w->resource);
    w->pred_begin = malloc(2 * num * sizeof *w->pred_begin);
    w->preds = malloc(num_arcs * sizeof *w->preds);
    w->succs = malloc(num_arcs * sizeof *w->succs);
    w->free_at = malloc(2 * num_resources * sizeof *w->free_at);
    w->gaps = calloc(num_resources, sizeof *w->gaps);
    bool opened = w->ticks && w->tasks && w->resource && w->pred_begin && w->preds && w->succs && w->free_at &&
                  w->gaps && queue_open(&w->ready, size);
    for (size_t r = 0; opened && r < num_resources; r++) {
        w->gaps[r].opens = malloc((num + 1) * sizeof *w->gaps[r].opens);
        w->gaps[r].closes = malloc((num + 1) * sizeof *w->gaps[r].closes);
        opened = w->gaps[r].opens && w->gaps[r].closes;
    }
    if (!opened) {
        window_close(w);
        return false;
    }
    w->release = w->ticks + num, w->tail = w->ticks + 2 * num, w->starts = w->ticks + 3 * num;
    w->best_starts = w->ticks + 4 * num, w->priority = w->ticks + 5 * num, w->ends = w->ticks + 6 * num;
    w->waits = w->resource + num, w->rank = w->resource + 2 * num, w->by_rank = w->resource + 3 * num;
    w->best_by_rank = w->resource + 4 * num;
    w->succ_begin = w->pred_begin + num;
    w->behind = w->free_at + num_resources;
    return true;
}

static void order_close(struct order *o) {
    free(o->tasks);
    free(o->local);
    free(o->starts);
    free(o->ends);
    free(o->after);
    free(o->behind);
    free(o->free_at);
}

static bool order_open(struct order *o, const struct lls_graph *g) {
    size_t num = (size_t)g->num_tasks, num_resources = (size_t)g->num_resources;
    *o = (struct order){.graph = g};
    o->tasks = malloc(num * sizeof *o->tasks);
    o->local = malloc(num * sizeof *o->local);
    o->starts = malloc(num * sizeof *o->starts);
    o->ends = malloc(num * sizeof *o->ends);
    o->after = malloc(num * sizeof *o->after);
    o->behind = malloc((num + 1) * num_resources * sizeof *o->behind);
    o->free_at = malloc(num_resources * sizeof *o->free_at);
    bool opened =
        o->tasks && o->local && o->starts && o->ends && o->after && o->behind && o->free_at;
    if (opened)
        for (size_t i = 0; i < num; i++) o->local[i] = -1;
    else
        order_close(o);
    return opened;
}

/* Improves the order of issue in `tasks` (every task once, none before what it waits for) by one sweep of windows of
 * `size`, the first one moved on by `first` of them, with `num_tries` schedules per window, until `limit_s` seconds have
 * passed, `*steps` tasks were placed, or `stop` is not 0. `tasks`, `starts` and `*steps` (how many were) are
 * overwritten; returns the makespan, which is no greater than that of the order given, or minus an errno. */
API int64_t lls_sweep(const struct lls_graph *graph, int32_t size, int32_t first, int num_tries, uint64_t seed,
                      double limit_s, int64_t *steps, const atomic_int *stop, int32_t *tasks, int64_t *starts) {
    struct window window;
    struct order order;
    if (!is_valid(graph) || size < 2 || size > MAX_WINDOW || first < 1 || first > size) return -EINVAL;
    if (!order_open(&order, graph)) return -ENOMEM;
    if (!window_open(&window, graph, size)) {
        order_close(&order);
        return -ENOMEM;
    }
    struct limit limit = {now_s() + limit_s, *steps, 3 * graph->num_tasks, stop}; /* two runs of the order, its tails */
    size_t size_tasks = (size_t)graph->num_tasks * sizeof *tasks;
    memcpy(order.tasks, tasks, size_tasks);
    run_order(&order);
    sweep(&window, &order, size, first, num_tries, &seed, &limit);
    int64_t makespan = run_order(&order);
    *steps = limit.steps;
    memcpy(tasks, order.tasks, size_tasks);
    memcpy(starts, order.starts, (size_t)graph->num_tasks * sizeof *starts);
    window_close(&window);
    order_close(&order);
    return makespan;
}
